"""The broker: holds all state in PostgreSQL and never runs a model."""

from __future__ import annotations

__version__ = "0.1.0"
