"""A program in a process of its own that may take only so much: one that takes more dies, and its test fails with it."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIBIBYTE = 1 << 30


def run_limited(program: str, given: str, *, seconds: float = 60, memory: int = 2 * GIBIBYTE) -> str:
    """What the program writes that reads `given`; where it has to be stopped, what it wrote until then."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=given,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=ROOT,
            preexec_fn=limit,
            check=False,
        )
    except subprocess.TimeoutExpired as stopped:
        return (stopped.stdout or b"").decode()
    return done.stdout + done.stderr
