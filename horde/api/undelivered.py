"""What a handler may leave word of for the case that its client is gone, or that its answer cannot be sent.

A server that does not know what became of its clients and answers calls nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable

from flask import request

ON_UNDELIVERED, ON_GONE = "horde.on_undelivered", "horde.on_gone"


def if_undelivered(remedy: Callable[[], None]) -> None:
    """Run `remedy` later, in a thread of its own, when it is certain that the client did not get this answer whole."""
    request.environ.get(ON_UNDELIVERED, []).append(remedy)


def if_gone(callback: Callable[[], None]) -> None:
    """Call `callback` once, as soon as the client of this request hangs up or its connection ends in another way, and
    never once the answer has been written; at once when that has happened already.

    Hanging up is closing the connection or only the client's side of it. `callback` runs in the server's loop, which
    serves nobody meanwhile: it must not wait, and should do no more than wake whoever waits.
    """
    register = request.environ.get(ON_GONE)
    if register is not None:
        register(callback)
