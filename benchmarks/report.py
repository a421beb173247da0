"""What a benchmark found: rows of a table, the numbers behind them as JSON, and what machine it was."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SYNCS = 50
PAGE = b"\0" * 8192


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        target: what the value is to be, in words; empty where it is only told.
        met: whether it is; None where there is no target.
    """

    what: str
    value: str
    target: str = ""
    met: bool | None = None


@dataclass
class Report:
    """A benchmark's result.

    Attributes:
        raw: everything measured, for the JSON file.
    """

    name: str
    rows: list[Row] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)

    def tell(self, what: str, value: str) -> None:
        """A number without a target."""
        self.rows.append(Row(what, value))

    def judge_at_least(self, what: str, value: float, least: float) -> None:
        """A ratio that is to be at least so large."""
        self.rows.append(Row(what, f"{value:.3f}", f"at least {least}", value >= least))

    def judge_at_most(self, what: str, value: float, most: float, unit: str = "") -> None:
        """A number that is to be at most so large."""
        self.rows.append(Row(what, f"{value:.2f}{unit}", f"at most {most}{unit}", value <= most))

    def print(self) -> None:
        """The table, on a terminal or in a pipe."""
        table = Table(title=self.name, title_justify="left")
        for heading in ("what", "value", "target", ""):
            table.add_column(heading, no_wrap=heading != "what")
        for row in self.rows:
            table.add_row(row.what, row.value, row.target, {None: "", True: "met", False: "MISSED"}[row.met])
        Console(width=None if os.isatty(1) else 110).print(table)

    def write(self, folder: Path) -> Path:
        """Write `<name>.json` under `folder`; its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        rows = [row.__dict__ for row in self.rows]
        path.write_text(json.dumps({"name": self.name, "rows": rows, **self.raw}, indent=2) + "\n")
        return path


def machine() -> dict[str, Any]:
    """What was measured on, and how busy it was already."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "fdatasync_ms": sync_milliseconds(),
    }


def sync_milliseconds() -> float:
    """Median of a few writes of a page, each followed by fdatasync."""
    took = []
    with tempfile.TemporaryFile(buffering=0) as file:
        for _ in range(SYNCS):
            began = time.perf_counter()
            file.write(PAGE)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return round(1000 * statistics.median(took), 3)


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)
