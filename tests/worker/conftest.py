"""Fixtures for the worker's tests: a tiny random model, a played broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.played_broker import PlayedBroker
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


@pytest.fixture
def broker() -> Iterator[PlayedBroker]:
    played = PlayedBroker()
    yield played
    played.stop()
