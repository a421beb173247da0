"""Memory of mapped weights is given back, and nothing that somebody wrote is lost."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from worker.models import mapped_files
from worker.models.mapped_files import release_mapped_weights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MEBIBYTES = 32


@pytest.fixture
def weights(tmp_path: Path) -> torch.Tensor:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(MEBIBYTES << 18, dtype=torch.float32), "v": torch.ones(8)}, path)
    with safe_open(path, "pt") as file:
        return file.get_tensor("w")


def mapped_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile")


def test_read_pages_are_given_back_and_come_again_when_used(weights):
    release_mapped_weights()
    total = weights.double().sum()
    full = mapped_bytes()
    assert release_mapped_weights() >= (MEBIBYTES - 1) << 20
    assert full - mapped_bytes() > (MEBIBYTES // 2) << 20
    assert weights.double().sum() == total


def test_a_file_that_was_written_to_in_memory_keeps_what_was_written(weights):
    weights.double().sum()
    weights[5] = -1.0
    release_mapped_weights()
    assert weights[5] == -1.0


def test_memory_that_took_the_place_of_a_mapping_keeps_its_content(monkeypatch):
    with mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"kept" * (1 << 18))
        view = (ctypes.c_char * (1 << 20)).from_buffer(memory)
        start = ctypes.addressof(view)
        monkeypatch.setattr(mapped_files, "_mappings", lambda _: [(start, 1 << 20, 1 << 20)])
        release_mapped_weights()
        assert memory[:] == b"kept" * (1 << 18)
        del view


def test_pages_go_while_a_reader_goes_on(weights, monkeypatch):
    rounds = 0
    thrice = threading.Event()

    def counted() -> int:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            thrice.set()
        return release_mapped_weights()

    monkeypatch.setattr(mapped_files, "release_mapped_weights", counted)
    total = weights.double().sum()
    full = mapped_bytes()
    with mapped_files.releasing_mapped_weights(every=0.001):
        assert thrice.wait(20)
    assert full - mapped_bytes() > (MEBIBYTES // 2) << 20
    assert weights.double().sum() == total
    assert "releaser" not in {thread.name for thread in threading.enumerate()}


def test_without_proc_nothing_happens(weights, monkeypatch):
    def nowhere(*_: object, **__: object) -> str:
        raise FileNotFoundError("/proc/self/smaps")

    weights.double().sum()
    monkeypatch.setattr(Path, "read_text", nowhere)
    assert release_mapped_weights() == 0
