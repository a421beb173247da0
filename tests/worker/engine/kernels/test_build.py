from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from worker.engine.kernels import build
from worker.engine.kernels.bindings import load_kernels

ROOT = Path(__file__).parents[4]
COMPILER = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in a process that has loaded nothing yet, with an empty cache; gives back the directory of its programs."""
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("HORDE_MODEL_CACHE", str(tmp_path / "cache" / "models"))
    monkeypatch.delenv("HORDE_WORKER_KERNELS", raising=False)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    return programs


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.usefixtures("fresh")
def test_without_a_compiler_there_are_no_kernels_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
        assert load_kernels() is None
    (message,) = [record.message for record in caplog.records]
    assert "the slower PyTorch path takes over: no C++ compiler" in message


def test_a_compiler_that_fails_means_no_kernels_and_nothing_half_built(
    fresh: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    write_program(fresh / "c++", '[ "$1" = --version ] && exit 0; echo "no space for an object file" >&2; exit 1')
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
    assert "no space for an object file" in caplog.text
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_dir() and path.name.startswith("kernels-")]


@pytest.mark.usefixtures("fresh")
def test_kernels_that_are_switched_off_are_not_even_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
    assert not caplog.records


@needs_compiler
def test_a_second_process_finds_the_library_compiled(fresh: Path, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    write_program(fresh / "c++", f'echo "$*" >> {calls}; PATH={os.defpath} exec {COMPILER} "$@"')
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "answer.cpp").write_text('extern "C" int answer() { return 42; }', encoding="utf-8")
    program = (
        "import sys, pathlib; from worker.engine.kernels import build; build.SOURCES = pathlib.Path(sys.argv[1]);"
        "print(build.load_library().answer())"
    )
    for _ in range(2):
        result = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "sources")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == "42"
    compiled = [line for line in calls.read_text(encoding="utf-8").splitlines() if "answer.cpp" in line]
    assert len(compiled) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory map")
def test_kernels_and_torch_share_one_openmp() -> None:
    if build.load_library() is None:
        pytest.skip("the kernels cannot be built here")
    torch.ones(10_000).sum()
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split()[-1] for line in lines if "/" in line}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) <= 1


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86")
def test_the_vectors_of_any_cpu_give_the_same_numbers(tmp_path: Path) -> None:
    """What a CPU without AVX-512 would run, on this one: the portable code beside every intrinsic."""
    x = torch.linspace(-90, 90, 1003)
    for architecture in ("x86-64", "x86-64-v2"):
        library = tmp_path / f"{architecture}.so"
        command = [str(COMPILER), "-O1", "-std=c++17", "-fPIC", "-w", "-ffp-contract=fast", f"-march={architecture}"]
        source = build.SOURCES / "elementwise.cpp"
        subprocess.run([*command, "-shared", str(source), "-o", str(library)], check=True, capture_output=True)
        out = torch.empty_like(x)
        function = ctypes.CDLL(str(library)).horde_exp
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        function(x.data_ptr(), out.data_ptr(), len(x))
        expected = x.double().exp()
        expected[x < -87.3] = 0
        expected[expected > torch.finfo(torch.float32).max] = torch.inf
        torch.testing.assert_close(out.double(), expected, rtol=5e-7, atol=0)
