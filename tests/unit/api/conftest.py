"""An application whose database nobody reaches: enough for all that happens before a use case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from apiflask import APIFlask

from horde.api.broker import broker_of
from horde.app import create_app
from horde.settings import Settings


@pytest.fixture
def app() -> Iterator[APIFlask]:
    made = create_app(Settings(database_url="postgresql://nobody@127.0.0.1:1/none", rate_limits="off"))
    yield made
    broker_of(made).context.close()
