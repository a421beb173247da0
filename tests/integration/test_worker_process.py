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
import threading
from horde.cli.worker_process import WorkerOptions, WorkerProcess
worker = WorkerProcess(WorkerOptions("http://127.0.0.1:1", "0123456789", "orphan", "SmolLM2-135M-Instruct"), print)
print("started", worker.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.needs("model")
def test_a_worker_does_not_outlive_a_killed_horde_up() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline().removeprefix("started "))
    # From its first words on, it is past its own look at who its parent is.
    assert "INFO" in parent.stdout.readline()
    worker = os.pidfd_open(pid)
    try:
        parent.kill()
        parent.communicate()
        ended, _, _ = select.select([worker], [], [], PATIENCE)
        assert ended, "the worker is still running"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        os.close(worker)
