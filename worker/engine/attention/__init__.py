"""The paged key-value cache and attention over it: one backend for each kind of machine, one interface for all."""
