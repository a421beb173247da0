"""A PostgreSQL of our own, so that `horde up` needs nothing installed.

`EmbeddedPostgres(data_dir).start()` answers a URL over a private unix socket; `stop()` ends the server cleanly.
"""

from __future__ import annotations

from horde.db.embedded.cluster import EmbeddedPostgres, running_url
from horde.db.embedded.errors import EmbeddedPostgresError

__all__ = ["EmbeddedPostgres", "EmbeddedPostgresError", "running_url"]
