"""Tests of worker.engine.execution."""
