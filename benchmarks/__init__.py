"""Numbers about a running broker, each a ratio to something measured in the same run on the same machine.

`python -m benchmarks [name ...]` prints a table and writes JSON under `build/bench/`. An absolute number from a shared
machine says little: its disk and its neighbours move it by factors.
"""
