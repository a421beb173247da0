"""What a handler may leave word of for the case that its answer cannot be sent."""

from __future__ import annotations

from collections.abc import Callable

from flask import request

ON_UNDELIVERED = "horde.on_undelivered"


def if_undelivered(remedy: Callable[[], None]) -> None:
    """Run `remedy` later, in a thread of its own, when it is certain that the client did not get this answer whole.

    A server that does not know what became of its answers never runs it.
    """
    request.environ.get(ON_UNDELIVERED, []).append(remedy)
