"""Every state change of requests, slots and jobs, and the read of their status; nothing else writes a state.

One function a transition. Each runs inside the caller's READ COMMITTED transaction, locks the request row first (then
its processing jobs by id, where others may change), changes the job by compare-and-set, and only then slots, counters
and outcome. Knows the database and nothing of HTTP, price formulas or streams: a price is a callable passed in.
"""
