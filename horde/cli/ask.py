"""`horde ask`: post a prompt, show where it stands, print the text. Ctrl-C cancels the request at the broker too."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console

from horde.cli.broker_client import BrokerClient, BrokerError
from horde.cli.local import data_dir_option, find_broker, settings_with

# Clients of the public network poll every 2.5 s or slower; a person at a terminal deserves better.
POLL_SECONDS = 0.5
INTERRUPTED = 130


@click.command()
@click.argument("prompt")
@click.option("--model", "models", multiple=True, help="A model to take; several: any of them.  [default: any]")
@click.option("--max-length", type=int, default=80, show_default=True, help="Tokens to generate at most.")
@click.option(
    "--temperature", default=0.7, show_default=True, help="0 always takes the likeliest token; 1 and more ramble."
)
@click.option("--n", type=int, default=1, show_default=True, help="How many texts to ask for.")
@click.option("--broker", envvar="HORDE_BROKER", help="URL of the broker.  [default: the `horde up` of this machine]")
@click.option("--api-key", envvar="HORDE_API_KEY", help="Your key.  [default: the local `horde up`'s, else anonymous]")
@data_dir_option
def ask(
    prompt: str,
    models: tuple[str, ...],
    max_length: int,
    temperature: float,
    n: int,
    broker: str | None,
    api_key: str | None,
    data_dir: Path | None,
) -> None:
    """Have PROMPT continued by a model of the horde (`-` reads it from standard input)."""
    if prompt == "-":
        prompt = sys.stdin.read()
    url, key = find_broker(broker, api_key, settings_with(data_dir=data_dir).data_dir)
    body: dict[str, Any] = {"prompt": prompt, "params": {"n": n, "max_length": max_length, "temperature": temperature}}
    if models:
        body["models"] = list(models)
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with BrokerClient(url, key) as client:
            _print(_ask(client, body))
    finally:
        signal.signal(signal.SIGTERM, previous)


def _ask(client: BrokerClient, body: dict[str, Any]) -> dict[str, Any]:
    accepted = client.post("generate/text/async", body)
    path = f"generate/text/status/{accepted['id']}"
    console = Console(stderr=True)
    try:
        if accepted.get("message"):
            console.print(str(accepted["message"]), style="yellow", markup=False)
        with console.status("Sent") as line:
            said = ""

            def say(now: str) -> None:
                nonlocal said
                line.update(now)
                if not console.is_terminal and now != said:
                    console.print(now, markup=False)
                said = now

            while True:
                status: dict[str, Any] = client.get_patiently(path, say)
                if status["done"]:
                    return status
                say(_where_it_stands(status))
                time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        _cancel(client, path, console)


def _where_it_stands(status: dict[str, Any]) -> str:
    wanted = status["finished"] + status["processing"] + status["waiting"]
    done = f", {status['finished']} of {wanted} ready" if wanted > 1 else ""
    if status["restarted"]:
        done += f", tried again ({status['restarted']})"
    if status["processing"]:
        return f"A worker is at it{done}"
    if not status["is_possible"]:
        return "No worker that could serve this is online; waiting for one (Ctrl-C cancels)"
    seconds = f", about {status['wait_time']} s" if status["wait_time"] > 0 else ""
    return f"Position {status['queue_position']} in the queue{seconds}{done}"


def _cancel(client: BrokerClient, path: str, console: Console) -> NoReturn:
    # A second Ctrl-C must not keep the first from reaching the broker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        client.delete(path)
    except BrokerError as error:
        console.print(f"Could not cancel it: {error.message}", markup=False)
    else:
        console.print("Cancelled.")
    raise SystemExit(INTERRUPTED)


def _print(status: dict[str, Any]) -> None:
    for place, generation in enumerate(status["generations"]):
        if place:
            click.echo("-" * 40)
        click.echo(_printable(generation["text"]))
    if status["faulted"]:
        code = f" ({status['error_code']})" if status.get("error_code") else ""
        raise BrokerError(f"The request ended in a fault{code}: the workers that tried it could not finish it.")
    if status.get("cancelled"):
        raise BrokerError("The request was cancelled before all of it was ready.")


def _printable(text: str) -> str:
    """The text as it is; on a terminal without control characters, by which a stranger's worker could steer it."""
    if not sys.stdout.isatty():
        return text
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
