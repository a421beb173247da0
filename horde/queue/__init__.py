"""Which request a worker may take next: rank, candidates, the pop filter, skipped counts, estimates, wake-up. Reads only."""
