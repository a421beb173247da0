"""Signs of life: work that says nothing for a minute looks stuck."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

log = logging.getLogger(__name__)

TELL_SECONDS = 5.0


@contextlib.contextmanager
def telling(what: str, every: float = TELL_SECONDS) -> Iterator[None]:
    """Log a line every so many seconds while entered."""
    begun = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            log.info("%s: %.0f s so far", what, time.monotonic() - begun)

    teller = threading.Thread(target=tell, name="teller", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
