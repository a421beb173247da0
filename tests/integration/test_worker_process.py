"""The worker beside a `horde up`: it ends with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

PATIENCE = 120

# A `horde up` reduced to its worker, which finds no broker and so never ends by itself.
PARENT = """
import functools, threading
from horde.cli.worker_process import WorkerOptions, WorkerProcess
say = functools.partial(print, flush=True)
worker = WorkerProcess(WorkerOptions("http://127.0.0.1:1", "0123456789", "orphan", "SmolLM2-135M-Instruct"), say)
say("started", worker.pid)
threading.Event().wait()
"""


def line_of(parent: subprocess.Popen[bytes]) -> str:
    """Its next line, waited for with patience."""
    assert parent.stdout is not None
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([parent.stdout], [], [], PATIENCE)
        assert readable, f"nothing more came after {line!r}"
        more = os.read(parent.stdout.fileno(), 1)
        assert more, f"it ended after {line!r}"
        line += more
    return line.decode()


@pytest.mark.needs("model")
def test_a_worker_does_not_outlive_a_killed_horde_up() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    )
    try:
        first = line_of(parent)
        worker = os.pidfd_open(int(first.removeprefix("started ")))
        try:
            # From its first words on, it is past its own look at who its parent is.
            assert "no answer from http://127.0.0.1:1" in line_of(parent)
            parent.kill()
            ended, _, _ = select.select([worker], [], [], PATIENCE)
            assert ended, "the worker is still running"
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
    finally:
        parent.kill()
        parent.communicate()
