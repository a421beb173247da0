"""Guards taken out one at a time, each to be noticed by a named test: `python -m tests.mutants`."""
