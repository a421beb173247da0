"""Alembic's entry: one connection, one transaction per migration run, guarded by an advisory lock."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from horde.db.tables import Base

# Two brokers that start together must not migrate together; any constant both know will do.
MIGRATION_LOCK = 7_001_2026

engine = sa.create_engine(context.config.attributes["url"])
try:
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
        with context.begin_transaction():
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})")
            context.run_migrations()
finally:
    engine.dispose()
