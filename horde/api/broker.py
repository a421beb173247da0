"""What handlers need of the process they run in: its context, and whether it is shutting down."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from flask import Flask, current_app

from horde.usecases.context import Context

EXTENSION = "horde"


@dataclass
class Broker:
    """One process: what its use cases work with, and how it is known to the outside.

    Attributes:
        node: `host:port:version` for the header `Horde-Node`; the port is known once the server has bound it.
        stopping: set when the process begins to shut down; polls that wait are answered then.
    """

    context: Context
    node: str
    stopping: threading.Event = field(default_factory=threading.Event)


def broker_of(app: Flask) -> Broker:
    """The broker that `app` serves."""
    broker = app.extensions[EXTENSION]
    assert isinstance(broker, Broker)
    return broker


def context() -> Context:
    """What the use cases of this request work with."""
    return broker_of(current_app).context


def stopping() -> bool:
    """Whether the process is shutting down."""
    return broker_of(current_app).stopping.is_set()
