"""Connections that are busy in the background while something else is measured: an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


@contextlib.contextmanager
def aside(work: Callable[[asyncio.Event, Callable[[], None]], Coroutine[Any, Any, None]], name: str) -> Iterator[None]:
    """Run `work` beside the body, from when it is ready to the body's end.

    Args:
        work: called with an event that is set when it is to end, and with what it has to call once it is ready.

    Raises:
        BaseException: what `work` raised, at the end.
    """
    failed: list[BaseException] = []
    ready, loop, ending = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(work(ending, ready.set))
        except BaseException as error:  # noqa: BLE001 an exception in a thread is nobody's; it is raised below
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name=name)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()
    if failed:
        raise failed[0]
