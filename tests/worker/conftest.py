"""Fixtures for the worker's tests: a tiny random model, a played broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worker.played_broker import PlayedBroker
from tests.worker.started_worker import Started
from tests.worker.tiny_model import make_tiny_model
from worker.models.loaded import LoadedModel


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    """A two-layer llama with random weights whose tokens are bytes."""
    return make_tiny_model()


@pytest.fixture(scope="session")
def tiny_directory(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a directory on disk."""
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny.model.save_pretrained(directory)
    tiny.tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def patient_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk that can write for minutes."""
    loaded = make_tiny_model(context_length=65536)
    directory = tmp_path_factory.mktemp("patient") / "tiny-llama"
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def broker() -> Iterator[PlayedBroker]:
    played = PlayedBroker()
    yield played
    played.stop()


@pytest.fixture
def start(broker: PlayedBroker) -> Iterator[Callable[..., Started]]:
    """Starts workers at the played broker, and sees that they end."""
    made: list[Started] = []

    def starter(**settings: Any) -> Started:
        made.append(Started(broker, **settings))
        return made[-1]

    yield starter
    broker.close_up()
    for started in made:
        started.close()
