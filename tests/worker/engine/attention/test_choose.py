"""Which backend a machine gets, and what the log says about it."""

from __future__ import annotations

import logging

import pytest
import torch

from worker.engine.attention import choose
from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.attention.choose import BackendUnusableError, choose_backend
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.attention.gather import GatherBackend


@pytest.fixture(autouse=True)
def _log_is_heard(caplog):
    caplog.set_level(logging.INFO, "worker.engine.attention.choose")


def shape(dtype: torch.dtype = torch.float32, device: str = "cpu") -> CacheShape:
    return CacheShape((LayerShape(4, 2, 8, 8),), 4, 16, dtype, torch.device(device))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_gets_the_kernels(dtype, caplog):
    assert isinstance(choose_backend(shape(dtype)), CpuKernelBackend)
    assert caplog.messages == [f"attention: C++ kernels, {str(dtype)[6:]} on cpu"]


def test_without_kernels_the_pure_pytorch_path_takes_over_and_the_log_says_why(monkeypatch, caplog):
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    assert isinstance(choose_backend(shape()), GatherBackend)
    why = "attention: gather, float32 on cpu (the C++ kernels are switched off or cannot be built here)"
    assert caplog.messages[-1] == why


def test_half_precision_on_a_cpu_is_left_to_pytorch(caplog):
    assert isinstance(choose_backend(shape(torch.float16)), GatherBackend)
    assert caplog.messages == ["attention: gather, float16 on cpu (the C++ kernels do not read float16)"]


def test_other_devices_get_the_pure_pytorch_path(caplog):
    assert isinstance(choose_backend(shape(device="meta")), GatherBackend)
    assert "the C++ kernels are for CPUs, the model is on meta" in caplog.text


def test_a_backend_can_be_asked_for_by_name(monkeypatch):
    assert isinstance(choose_backend(shape(), "gather"), GatherBackend)
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    with pytest.raises(BackendUnusableError, match="switched off or cannot be built"):
        choose_backend(shape(), "kernels")
    with pytest.raises(KeyError):
        choose_backend(shape(), "none such")


def test_the_last_of_the_backends_takes_everything():
    *_, last = choose.BACKENDS.values()
    assert isinstance(last(shape(torch.float16, "meta")), GatherBackend)
