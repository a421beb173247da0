"""Tests of the engine; none of them needs a broker."""
