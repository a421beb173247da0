"""Compiles our C++ sources into one shared library, kept in the cache; no compiler is needed to install or to run.

The sources have a plain C interface and use OpenMP. The library is linked against nothing of its own: the OpenMP that
torch brought is already in the process, so kernels and torch share one set of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from worker.models.build_once import build_once, model_cache_dir

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_SECONDS = 300
_LIBRARY = "kernels.so"
# Beside the library: its SHA-256 and its size. To load a damaged one would end the process.
_RECORD = "kernels.sha256"
# Of a compiler whose linker has failed: the linker's own lines say why.
_ECHOES = ("collect2:", "clang: error: linker", "clang++: error: linker")
_UNUSED_SECONDS = 30 * 24 * 3600
_lock = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}


def load_library() -> ctypes.CDLL | None:
    """The kernels, compiled if this machine has not done so yet; None where that is not possible.

    `HORDE_WORKER_KERNELS=off` says not to try. Called again, it answers the same at once.
    """
    if os.environ.get("HORDE_WORKER_KERNELS", "").lower() in {"off", "0", "no", "false"}:
        log.info("the C++ kernels are switched off; the slower PyTorch path is used")
        return None
    with _lock:
        if "library" not in _loaded:
            _loaded["library"] = _try_to_load()
        return _loaded["library"]


def _try_to_load() -> ctypes.CDLL | None:
    try:
        return _open(_compiled())
    except (OSError, subprocess.SubprocessError, KernelBuildError) as error:
        log.warning("the C++ kernels cannot be used, the slower PyTorch path takes over: %s", error)
        return None


class KernelBuildError(Exception):
    """There is no compiler, it refuses our sources, or what it made cannot be kept; the message says which."""


def _compiled() -> Path:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise KernelBuildError("no C++ compiler (c++, g++ or clang++) is installed")
    name = f"kernels-{_fingerprint(compiler)}"
    root = model_cache_dir().parent / "kernels"

    def build(target: Path) -> None:
        _compile(compiler, target)
        _remove_unused(root)

    directory = build_once(root, name, build, _is_whole)
    if not _is_whole(directory):
        raise KernelBuildError(f"{directory} does not keep what is written to it")
    with contextlib.suppress(OSError):
        os.utime(directory)  # in use: see `_remove_unused`
    return directory / _LIBRARY


def _is_whole(directory: Path) -> bool:
    """Whether the library is, byte for byte, what was once compiled."""
    try:
        return (directory / _RECORD).read_text(encoding="ascii") == _record(directory / _LIBRARY)
    except (OSError, ValueError):
        return False


def _record(library: Path) -> str:
    content = library.read_bytes()
    return f"{hashlib.sha256(content).hexdigest()} {len(content)}\n"


def _remove_unused(root: Path) -> None:
    """Libraries of older sources, and of machines long gone."""
    for directory in root.glob("kernels-*"):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(directory)


def _compile(compiler: str, target: Path) -> None:
    log.info("compiling the kernels for this CPU: this once, some seconds")
    objects = {source: target / f"{source.stem}.o" for source in sorted(SOURCES.glob("*.cpp"))}
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(_call, compiler, *_FLAGS, "-fopenmp", "-c", str(source), "-o", str(made))
            for source, made in objects.items()
        ]
        for call in calls:
            call.result()
    # Linked without -fopenmp: that would bring a second OpenMP runtime, with threads that fight the first one's.
    _call(compiler, "-shared", *map(str, objects.values()), "-o", str(target / _LIBRARY))
    for made in objects.values():
        made.unlink()
    (target / _RECORD).write_text(_record(target / _LIBRARY), encoding="ascii")


def _call(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False)
    if result.returncode != 0:
        raise KernelBuildError(f"{command[0]} failed: {_reason(result.stderr)}")


def _reason(said: str) -> str:
    """The first line, and the last one that names a fault: a full disk is told of below many other lines."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it says nothing"]
    faults = [line for line in lines if "error" in line.lower() and not line.startswith(_ECHOES)]
    full = [line for line in lines if "No space" in line]
    return "; ".join(dict.fromkeys([lines[0], *(full or faults)[-1:]]))


def _open(path: Path) -> ctypes.CDLL:
    import torch  # brings its OpenMP into the process

    for runtime in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        # Already loaded by torch, but for itself only; our library has to find it too.
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))


def _fingerprint(compiler: str) -> str:
    """Of everything that the compiled code depends on: a home directory may be shared by unlike machines."""
    digest = hashlib.sha256()
    for part in (compiler, *_FLAGS, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True)
    digest.update(version.stdout)
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
