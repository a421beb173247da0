"""Database: engine, session scope, tables, migrations, embedded PostgreSQL. Knows nothing of the other rooms."""
