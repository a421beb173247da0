"""How a budget becomes blocks, and what counts as free memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.execution.cache_memory import CacheMemoryError, cache_shape, free_memory, free_on_host

CPU = torch.device("cpu")
LAYERS = (LayerShape(8, 2, 64, 64),) * 4
# Keys and values of 16 tokens in fp32.
BYTES_PER_BLOCK = 4 * 2 * 128 * 16 * 4


def shape(budget: int | None, context_length: int = 4096, max_batch: int = 4) -> CacheShape:
    return cache_shape(
        LAYERS,
        block_size=16,
        dtype=torch.float32,
        device=CPU,
        context_length=context_length,
        max_batch=max_batch,
        budget=budget,
    )


def test_a_budget_is_filled_with_blocks_and_not_passed():
    made = shape(100 * BYTES_PER_BLOCK + BYTES_PER_BLOCK - 1)
    assert made.blocks == 100
    assert made.bytes_per_block == BYTES_PER_BLOCK


def test_without_a_budget_no_more_is_taken_than_a_full_batch_can_use():
    assert shape(None, context_length=160).blocks == 4 * 10


def test_without_a_budget_a_share_of_the_free_memory_is_taken(monkeypatch):
    monkeypatch.setattr("worker.engine.execution.cache_memory.free_memory", lambda device: 64 * BYTES_PER_BLOCK)
    assert shape(None).blocks == 64


def test_a_budget_that_holds_no_text_of_a_useful_length_is_refused_with_the_amount_that_would():
    assert shape(16 * BYTES_PER_BLOCK).blocks == 16
    with pytest.raises(CacheMemoryError, match=r"holds 240 tokens .* room for 256: 1 MiB; give --kv-cache-memory more"):
        shape(15 * BYTES_PER_BLOCK)
    with pytest.raises(CacheMemoryError):
        shape(0)


@pytest.mark.parametrize(
    ("budget", "says"),
    [(0, "0 bytes holds no tokens"), (1000, "1000 bytes holds no"), (70_000, "68 KiB holds 16 tokens")],
)
def test_a_tiny_budget_is_told_in_units_that_show_it(budget, says):
    with pytest.raises(CacheMemoryError, match=f"a cache of {says}"):
        shape(budget)


def test_the_amount_that_is_asked_for_is_never_rounded_down():
    with pytest.raises(CacheMemoryError, match=r"room for 272: 2 MiB"):
        cache_shape(
            LAYERS, block_size=17, dtype=torch.float32, device=CPU, context_length=4096, max_batch=1, budget=5
        )  # fmt: skip


@pytest.mark.parametrize("budget", [900 * 10**12, 10**41, 10**400], ids=("terabytes", "silly", "endless"))
def test_a_budget_beyond_what_is_free_is_refused_before_anything_is_taken(budget):
    with pytest.raises(CacheMemoryError, match="free on this machine"):
        shape(budget)


def test_on_the_host_a_budget_may_be_all_that_is_free_and_not_a_byte_more(monkeypatch):
    monkeypatch.setattr("worker.engine.execution.cache_memory.free_on_host", lambda: 64 * BYTES_PER_BLOCK)
    assert shape(64 * BYTES_PER_BLOCK).blocks == 64
    with pytest.raises(CacheMemoryError, match="asks for 4 MiB, and 4 MiB are free"):
        shape(64 * BYTES_PER_BLOCK + 1)


def test_a_model_with_a_short_context_needs_less():
    assert shape(3 * BYTES_PER_BLOCK, context_length=48).blocks == 3
    with pytest.raises(CacheMemoryError, match="room for 48"):
        shape(2 * BYTES_PER_BLOCK, context_length=48)


def test_on_the_host_only_part_of_what_is_free_is_taken():
    assert 0 < free_memory(CPU) < free_on_host()


class Machine:
    """A file system with just the files that tell about memory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="ascii")

    def free(self) -> int:
        return free_on_host(self.root)


@pytest.fixture
def machine(tmp_path) -> Machine:
    made = Machine(tmp_path)
    made.write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n")
    return made


def test_without_control_groups_the_system_says_what_is_free(machine):
    assert machine.free() == 8000 * 1024


def test_the_limit_of_a_container_counts_less_what_is_used_in_it(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.write("sys/fs/cgroup/box/memory.max", "4000000\n")
    machine.write("sys/fs/cgroup/box/memory.current", "1500000\n")
    assert machine.free() == 2_500_000


def test_file_pages_that_can_be_dropped_count_as_free(machine):
    machine.write("proc/self/cgroup", "0::/box\n")
    machine.write("sys/fs/cgroup/box/memory.max", "4000000\n")
    machine.write("sys/fs/cgroup/box/memory.current", "3500000\n")
    machine.write("sys/fs/cgroup/box/memory.stat", "anon 500000\nactive_file 7\ninactive_file 3000000\n")
    assert machine.free() == 3_500_000


def test_the_tightest_of_nested_groups_counts(machine):
    machine.write("proc/self/cgroup", "0::/outer/inner\n")
    machine.write("sys/fs/cgroup/outer/inner/memory.max", "max\n")
    machine.write("sys/fs/cgroup/outer/inner/memory.current", "5\n")
    machine.write("sys/fs/cgroup/outer/memory.max", "3000\n")
    machine.write("sys/fs/cgroup/outer/memory.current", "1000\n")
    assert machine.free() == 2000


def test_a_group_whose_path_is_that_of_the_host_is_looked_for_at_the_root(machine):
    machine.write("proc/self/cgroup", "0::/docker/abc\n")
    machine.write("sys/fs/cgroup/memory.max", "3000\n")
    machine.write("sys/fs/cgroup/memory.current", "4000\n")
    assert machine.free() == 0


def test_the_older_interface_of_control_groups_is_read_too(machine):
    machine.write("proc/self/cgroup", "5:devices:/x\n4:cpuset,memory:/box\n1:name=systemd:/\n")
    machine.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "7000\n")
    machine.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1000\n")
    assert machine.free() == 6000


def test_a_system_without_such_files_gives_an_amount_too(tmp_path):
    assert free_on_host(tmp_path) > 0
