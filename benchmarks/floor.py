"""The plain-SQL floor of a queue's cycle: pgbench where there is one, else the same statements from psycopg2 threads."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from pathlib import Path

import psycopg2

from benchmarks.server import Postgres, dsn

HERE = Path(__file__).parent
CLIENTS, THREADS = 8, 2

# What makes the claim independent of how many rows are done; the floor is told with it as well.
INDEX = "CREATE INDEX jobs_queued ON jobs (priority DESC, id) WHERE state = 'queued'"
ENQUEUE = "INSERT INTO jobs(payload) VALUES (repeat('x', 400))"
CLAIM = """UPDATE jobs SET state = 'running', started_at = clock_timestamp(), worker_id = %s
WHERE id = (SELECT id FROM jobs WHERE state = 'queued' ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED)
  AND state = 'queued' RETURNING id"""
COMPLETE = "UPDATE jobs SET state = 'done', result = repeat('y', 1000) WHERE id = %s AND state = 'running'"


class Floor:
    """A database of its own for the floor; emptied before each measurement."""

    def __init__(self, postgres: Postgres) -> None:
        self._url = dsn(postgres.create_database(migrated=False))
        self._pgbench = postgres.program("pgbench")

    @property
    def how(self) -> str:
        """What measures it."""
        return (
            f"pgbench -c {CLIENTS} -j {THREADS}" if self._pgbench else f"{CLIENTS} psycopg2 threads (no pgbench here)"
        )

    def measure(self, seconds: float, *, indexed: bool = False) -> float:
        """Cycles (enqueue, claim, complete; three transactions) per second, from an empty table."""
        with contextlib.closing(psycopg2.connect(self._url)) as connection:
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute((HERE / "pg_cycle.schema.sql").read_text())
            if indexed:
                cursor.execute(INDEX)
        return self._by_pgbench(seconds) if self._pgbench else self._by_threads(seconds)

    def _by_pgbench(self, seconds: float) -> float:
        script = str(HERE / "pg_cycle.pgbench.sql")
        command = [str(self._pgbench), "-n", "-M", "prepared", "-f", script, "-c", str(CLIENTS), "-j", str(THREADS)]
        command += ["-T", str(max(1, round(seconds))), self._url]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = re.search(r"^tps = ([\d.]+)", done.stdout, flags=re.MULTILINE)
        if found is None:
            raise RuntimeError(f"pgbench said no rate:\n{done.stdout}{done.stderr}")
        return float(found[1])

    def _by_threads(self, seconds: float) -> float:
        counts = [0] * CLIENTS
        began = time.monotonic()

        def client(number: int) -> None:
            with contextlib.closing(psycopg2.connect(self._url)) as connection:
                connection.autocommit = True
                cursor = connection.cursor()
                while time.monotonic() - began < seconds:
                    cursor.execute(ENQUEUE)
                    cursor.execute(CLAIM, (number,))
                    claimed = cursor.fetchone()
                    if claimed is not None:
                        cursor.execute(COMPLETE, claimed)
                        counts[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts) / (time.monotonic() - began)
