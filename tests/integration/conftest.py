"""Brokers that tests share: one for chats, of a whole module since to start one takes long; and one for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.chat import ChatBroker, chat_broker
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.postgres import Server


@pytest.fixture(scope="module")
def running(server: Server) -> Iterator[ChatBroker]:
    """The module's broker; at the end no request of it was answered 500, and its books are right."""
    url = server.create()
    try:
        with chat_broker(url) as broker:
            yield broker
            broker.assert_sound()
            assert broker.live.unexpected_errors() == 0
    finally:
        server.drop(url)


@pytest.fixture
def settled_chat(running: ChatBroker) -> Iterator[ChatBroker]:
    """The same for tests that hang up and race: whatever they left open is closed, and the books are looked at after each."""
    yield running
    running.hang_up()
    running.assert_sound()


@pytest.fixture
def chat(running: ChatBroker) -> Iterator[ChatBroker]:
    """That broker, for one test: afterwards nothing of the test's is left."""
    with running.of_one_test() as broker:
        yield broker


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    """A test's own; at the end no request of it was answered 500."""
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def key(broker: LiveBroker) -> str:
    """The key of a trusted worker's owner."""
    return broker.user("Trusted", "trusted").api_key
