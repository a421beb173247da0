"""Tests of worker.engine.attention."""
