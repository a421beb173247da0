"""Tests of the worker; none of them needs a broker or PostgreSQL."""
