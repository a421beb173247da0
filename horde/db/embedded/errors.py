"""What the embedded server raises; its text is shown to the person at the terminal as it is."""

from __future__ import annotations


class EmbeddedPostgresError(Exception):
    """The server can't be started, reached or stopped; `str()` is a sentence saying why and what to do."""
