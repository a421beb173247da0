"""Alembic migrations: forward from the first table; raw SQL for triggers and functions lies beside them."""
