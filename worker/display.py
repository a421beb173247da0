"""What a person sees: a live panel on a terminal, plain log lines otherwise. The API key is never part of either."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from worker.status import Snapshot, Status

_COLOURS = {"working": "green", "draining": "yellow", "paused": "yellow", "reconnecting": "red", "stopping": "red"}


def panel(name: str, model: str, now: Snapshot) -> Panel:
    """The panel for one moment."""
    figures = Table.grid(padding=(0, 3))
    figures.add_row(
        Text(f"{now.tokens_per_second:.1f} tokens/s", style="bold"),
        Text(f"{now.running} running"),
        Text(f"{now.waiting} waiting"),
        Text(f"{now.submitting} delivering"),
    )
    figures.add_row(
        Text(f"{now.tokens} tokens"),
        Text(f"{now.done} done"),
        Text(f"{now.failed} failed"),
        Text(f"{now.stopped} stopped"),
        Text(f"{now.kudos:.2f} kudos"),
    )
    cache = now.engine
    if cache.blocks_total:
        rate = now.cache_hit_rate
        figures.add_row(
            Text(f"{cache.blocks_free} of {cache.blocks_total} blocks free"),
            Text(f"{cache.blocks_cached} cached"),
            Text("no prompts yet" if rate is None else f"{rate:.0%} of prompts cached"),
        )
    content = Table.grid()
    content.add_row(Text.assemble((now.state, _COLOURS.get(now.state, "cyan")), "  ", now.note))
    content.add_row(figures)
    # Names come from outside and may hold what rich would read as markup.
    return Panel(content, title=Text(f"{name} · {model}"), title_align="left", border_style="dim")


@contextlib.contextmanager
def shown(name: str, model: str, status: Status, level: str) -> Iterator[Callable[[str], None]]:
    """Show the worker's state until the end; gives a function that prints a line to standard output."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        log_lines(level)
        yield lambda line: print(line, flush=True)
        return
    logging.basicConfig(
        level=level.upper(),
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False, markup=False)],
        force=True,
    )

    def current() -> Panel:
        return panel(name, model, status.snapshot())

    with Live(get_renderable=current, console=console, refresh_per_second=4, transient=True):
        yield lambda line: console.print(Text(line))


def log_lines(level: str) -> None:
    """Plain log lines on standard error."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, force=True
    )
    logging.getLogger("urllib3").setLevel(logging.WARNING)
