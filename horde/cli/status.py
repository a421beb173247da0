"""`horde status`: workers, models and queue of a running broker, from its API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from horde.cli.broker_client import BrokerClient
from horde.cli.local import data_dir_option, find_broker, settings_with


@click.command()
@click.option("--broker", envvar="HORDE_BROKER", help="URL of the broker.  [default: the `horde up` of this machine]")
@data_dir_option
def status(broker: str | None, data_dir: Path | None) -> None:
    """Show who works here, at what, and how much waits."""
    url, key = find_broker(broker, None, settings_with(data_dir=data_dir).data_dir)
    with BrokerClient(url, key) as client:
        performance: dict[str, Any] = client.get("status/performance")
        models: list[dict[str, Any]] = client.get("status/models?type=text")
        workers: list[dict[str, Any]] = client.get("workers?type=text")
    console = Console()
    console.print(f"Broker {url}", markup=False, highlight=False)
    waiting, online = int(performance["queued_text_requests"]), int(performance["text_worker_count"])
    console.print(
        f"{waiting} {'request waits' if waiting == 1 else 'requests wait'}, "
        f"{online} text worker{'' if online == 1 else 's'} online",
        highlight=False,
    )
    if models:
        console.print(
            _table(
                ("model", "threads", "queued tokens", "mean tokens/s", "wait"),
                [
                    (
                        str(model["name"]),
                        str(model["count"]),
                        f"{model['queued']:.0f}",
                        f"{model['performance']:.1f}",
                        f"{model['eta']} s" if model["count"] else "no worker",
                    )
                    for model in models
                ],
            )
        )
    if workers:
        console.print(
            _table(
                ("worker", "models", "state", "done", "failed", "own tokens/s"),
                [
                    (
                        str(worker["name"]),
                        ", ".join(worker["models"]),
                        _state(worker),
                        str(worker["requests_fulfilled"]),
                        str(worker["uncompleted_jobs"]),
                        _speed(str(worker["performance"])),
                    )
                    for worker in workers
                ],
            )
        )


def _speed(performance: str) -> str:
    """The figure of a worker's `performance`, which is a sentence."""
    first = performance.split(" ", 1)[0]
    return first if first.replace(".", "", 1).isdigit() else "none yet"


def _state(worker: dict[str, Any]) -> str:
    if worker["maintenance_mode"]:
        return "maintenance"
    return "online" if worker["online"] else "offline"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    # Names come from strangers: shown as text, never read as markup.
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
