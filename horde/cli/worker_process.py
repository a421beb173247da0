"""The worker that `horde up` starts beside its broker: another program, its output shown line by line, told to stop.

It runs in a session of its own, so that Ctrl-C at the terminal reaches it through us and in order; and the kernel ends
it if we are killed, so that no worker of a dead `horde up` works on under the name of the next one's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

# argv: our pid, then the worker's own arguments. The pid is compared after the request to the kernel, which does not
# look back at a parent that has died before it.
START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("its parent has ended")
sys.argv[0] = "horde-worker"
from worker.cli import main
main(prog_name="horde-worker")
"""

# The head of the worker's log lines; beside a person at a terminal the day and an ordinary line's level say nothing.
LOG_HEAD = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} (?:INFO )?")


@dataclass(frozen=True)
class WorkerOptions:
    """What the worker is told; `broker` is a URL, `model` a name or a path."""

    broker: str
    api_key: str
    name: str
    model: str


class WorkerProcess:
    """A started worker.

    Args:
        options: passed on; the key through the environment, where other users can't read it.
        show: called with each line of its output, shortened, from a thread.

    Attributes:
        announced: set once it has been answered by the broker.
    """

    def __init__(self, options: WorkerOptions, show: Callable[[str], None]) -> None:
        self.announced = threading.Event()
        self._show = show
        self._announcement = f"worker {options.name} serves "
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                START,
                str(os.getpid()),
                "run",
                f"--broker={options.broker}",
                f"--name={options.name}",
                f"--model={options.model}",
            ],
            env={**os.environ, "HORDE_WORKER_API_KEY": options.api_key, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="worker-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """Its exit status (negative: the signal that ended it), or None while it runs."""
        return self._process.poll()

    def ask_to_stop(self) -> None:
        """The first time: finish what runs, take nothing new. The second: hand the jobs back and leave."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once; its jobs come back to the queue when their leases are over."""
        self._send(signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, all its output shown, within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        # A grandchild may hold the pipe open; its words are not worth waiting for.
        self._reader.join(1.0)
        return True

    def _send(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.strip():
                    self._show(self._short(line))
                if line.startswith(self._announcement):
                    self.announced.set()

    def _short(self, line: str) -> str:
        if line.startswith(self._announcement):
            line = f"serves {line.removeprefix(self._announcement)}"
        return LOG_HEAD.sub(r"\1 ", line.rstrip())
