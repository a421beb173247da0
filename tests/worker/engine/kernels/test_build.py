from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from worker.engine.kernels import build
from worker.engine.kernels.bindings import load_kernels

ROOT = Path(__file__).parents[4]
COMPILER = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


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


ANSWER = (
    "import sys, pathlib; from worker.engine.kernels import build; build.SOURCES = pathlib.Path(sys.argv[1]);"
    "library = build.load_library(); print(library and library.answer())"
)


@dataclass
class Program:
    """A process that compiles and asks a small library, in a cache of its own."""

    sources: Path
    cache: Path
    calls: Path

    def run(self) -> str:
        result = subprocess.run(
            [sys.executable, "-c", ANSWER, str(self.sources)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return result.stdout.strip()

    @property
    def compiled(self) -> int:
        """How often."""
        return sum("answer.cpp" in line for line in self.calls.read_text(encoding="utf-8").splitlines())

    @property
    def directory(self) -> Path:
        (found,) = self.cache.glob("kernels-*")
        return found


@pytest.fixture
def program(fresh: Path, tmp_path: Path) -> Program:
    made = Program(tmp_path / "sources", tmp_path / "cache" / "kernels", tmp_path / "calls")
    write_program(fresh / "c++", f'echo "$*" >> {made.calls}; PATH={os.defpath} exec {COMPILER} "$@"')
    made.sources.mkdir()
    (made.sources / "answer.cpp").write_text('extern "C" int answer() { return 42; }', encoding="utf-8")
    return made


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


@pytest.mark.needs("compiler")
def test_where_there_is_a_compiler_there_are_kernels():
    # Else everything would go on without them, here and in most other tests: slower, and right.
    assert load_kernels() is not None


@pytest.mark.needs("compiler")
def test_a_user_without_a_home_has_the_kernels_among_the_temporary_files(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.setattr(build, "SOURCES", program.sources)
    for name in ("HOME", "XDG_CACHE_HOME", "HORDE_MODEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    own = tmp_path / f"horde-cache-{os.getuid()}"
    own.mkdir(mode=0o777)
    own.chmod(0o777)
    assert build.load_library() is None
    assert "is not a directory of this user alone" in caplog.text
    own.chmod(0o700)
    build._loaded.clear()
    library = build.load_library()
    assert library is not None
    assert library.answer() == 42
    assert list(own.glob("kernels/kernels-*/kernels.so"))


@pytest.mark.usefixtures("fresh")
def test_kernels_that_are_switched_off_are_not_even_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
    assert not caplog.records


@pytest.mark.needs("compiler")
def test_a_second_process_finds_the_library_compiled(program: Program) -> None:
    assert [program.run(), program.run()] == ["42", "42"]
    assert program.compiled == 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda directory: os.truncate(directory / "kernels.so", 5000),
    "empty": lambda directory: os.truncate(directory / "kernels.so", 0),
    "zeroed": lambda directory: (directory / "kernels.so").write_bytes(
        bytes((directory / "kernels.so").stat().st_size)
    ),
    "garbage": lambda directory: (directory / "kernels.so").write_bytes(b"no library"),
    "missing": lambda directory: (directory / "kernels.so").unlink(),
    "a directory": lambda directory: [(directory / "kernels.so").unlink(), (directory / "kernels.so").mkdir()],
    "without its record": lambda directory: (directory / "kernels.sha256").unlink(),
    "with a broken record": lambda directory: (directory / "kernels.sha256").write_bytes(b"\xff\x00"),
}


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_library_is_never_loaded_but_compiled_anew(
    program: Program,
    damage: Callable[[Path], object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(build, "SOURCES", program.sources)
    damage(build._compiled().parent)
    library = build._compiled()
    assert "is damaged; it is made anew" in caplog.text
    assert program.compiled == 2
    assert [path.name for path in program.cache.iterdir() if path.is_dir()] == [library.parent.name]
    assert ctypes.CDLL(str(library)).answer() == 42
    assert build._compiled() == library
    assert program.compiled == 2


@pytest.mark.needs("compiler")
def test_processes_that_find_a_damaged_library_at_once_compile_once(program: Program) -> None:
    assert program.run() == "42"
    os.truncate(program.directory / "kernels.so", 5000)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: program.run(), range(3))) == ["42"] * 3
    assert program.compiled == 2


@pytest.mark.needs("compiler")
def test_a_library_nobody_has_used_for_a_month_goes_when_another_is_compiled(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SOURCES", program.sources)
    month_ago = time.time() - 31 * 24 * 3600
    for name in ("kernels-old", "kernels-young", "other"):
        (program.cache / name).mkdir(parents=True)
        if name != "kernels-young":
            os.utime(program.cache / name, (month_ago, month_ago))
    made = build._compiled().parent
    assert {path.name for path in program.cache.iterdir() if path.is_dir()} == {made.name, "kernels-young", "other"}
    os.utime(made, (month_ago, month_ago))
    build._compiled()
    assert time.time() - made.stat().st_mtime < 1000


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("a.cpp: In function f\na.cpp:1:2: error: no such thing\ncompilation terminated.", "error: no such thing"),
        ("as.s: Assembler messages:\nas: a.o: No space left on device\nas: error: closing", "No space left on device"),
        ("ld: a.o: undefined symbol f\ncollect2: error: ld returned 1 exit status", "undefined symbol f"),
        ("", "it says nothing"),
    ],
)
def test_of_what_a_failing_compiler_says_the_reason_is_kept(
    fresh: Path, caplog: pytest.LogCaptureFixture, tmp_path: Path, said: str, kept: str
) -> None:
    (tmp_path / "said").write_text(said, encoding="utf-8")
    write_program(
        fresh / "c++",
        f'[ "$1" = --version ] && exit 0; {shutil.which("cat", path=os.defpath)} {tmp_path}/said >&2; exit 1',
    )
    with caplog.at_level(logging.WARNING):
        assert load_kernels() is None
    assert kept in caplog.text
    assert "collect2" not in caplog.text
    assert "terminated" not in caplog.text


@pytest.mark.needs("compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory map")
def test_kernels_and_torch_share_one_openmp() -> None:
    """In a process of their own: other libraries may bring one into this one."""
    program = (
        "import torch; from worker.engine.kernels.build import load_library; assert load_library() is not None;"
        "torch.ones(10_000).sum(); print(open('/proc/self/maps').read())"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = {line.split()[-1] for line in result.stdout.splitlines() if "/" in line}
    runtimes = {path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}
    assert len(runtimes) <= 1


@pytest.mark.needs("compiler")
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
