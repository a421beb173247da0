"""The `horde-worker` command."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from worker.backoff import Pace
from worker.broker import BrokerClient, BrokerUnavailableError, TurnedAwayError, normalise_url
from worker.chat_template import render
from worker.config import ConfigError, WorkerConfig, read_file
from worker.display import log_lines, shown
from worker.engine_options import (
    check_filled,
    describe_model,
    engine_options,
    find_model,
    load_model,
    make_engine,
    option,
    prepare_process,
)
from worker.generate import generate
from worker.publishing import Publication, Publisher
from worker.status import Status

log = logging.getLogger(__name__)

_AGENT = f"Horde Worker:{version('horde')}:unknown"
_LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)


def _read_config_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None:
        try:
            context.default_map = {**(context.default_map or {}), **read_file(value)}
        except ConfigError as error:
            raise click.BadParameter(str(error), context, parameter) from error
    return value


def _check_url(context: click.Context, parameter: click.Parameter, value: str) -> str:
    try:
        return normalise_url(value)
    except ValueError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def _check_api_key(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not value.strip() or not value.isascii() or not value.isprintable():
        # The value itself is left out: a mistyped key is still close to the real one.
        raise click.BadParameter("it is empty or holds characters that no key has", context, parameter)
    return value.strip()


@click.group()
@click.version_option(version("horde"), prog_name="horde-worker")
def main() -> None:
    """Serve a language model to a horde, or use one here."""


main.add_command(generate)


@main.command()
@option("--broker", required=True, metavar="URL", callback=_check_url, help="Address of the broker.")
@option(
    "--api-key", required=True, metavar="KEY", callback=_check_api_key, help="Your key; better set in the environment."
)
@option("--name", required=True, callback=check_filled, help="What this worker is called; unique in the horde.")
@engine_options
@option("--announce-as", metavar="NAME", callback=check_filled, help="Call the model this instead of its own name.")
@option(
    "--max-batch", type=click.IntRange(1, 50),
    help="Texts generated side by side.  [default: 32; with the reference engine 1]",
)  # fmt: skip
@option(
    "--max-length", type=click.IntRange(16, 4096),
    help="Longest answer, in tokens.  [default: half the context, at most 4096]",
)  # fmt: skip
@option(
    "--max-context-length", type=click.IntRange(80, 1048576),
    help="Longest prompt and answer together, in tokens.  [default: what model and cache hold]",
)  # fmt: skip
@option(
    "--poll-wait", default=5, show_default=True, type=click.IntRange(0, 25),
    help="Seconds the broker may keep us waiting for a job.",
)  # fmt: skip
@option(
    "--progress-interval", default=0.05, show_default=True, type=click.FloatRange(0.01, 2.0),
    help="Seconds between two posts of what has been written for those who watch it.",
)  # fmt: skip
@option("--log-level", default="info", show_default=True, type=_LOG_LEVELS, help="Lowest level that is logged.")
@option(
    "--config", is_eager=True, expose_value=False, callback=_read_config_file,
    type=click.Path(dir_okay=False, path_type=Path), help="YAML file with any of these options.",
)  # fmt: skip
def run(**options: Any) -> None:
    """Load a model and work for a broker until stopped.

    Ctrl-C (or SIGTERM) finishes what runs and takes nothing new; a second one hands the jobs back and leaves.
    """
    config = WorkerConfig(**options)
    log_lines(config.log_level)
    problem = _serve(config)
    if problem is not None:
        click.echo(f"Stopped: {problem}", err=True)
        sys.exit(1)


def _check_key(config: WorkerConfig) -> str | None:
    """Why the broker won't have us, asked before a model is loaded for nothing; None too where it does not answer."""
    client = BrokerClient(config.broker, config.api_key, _AGENT)
    try:
        client.check_key()
    except TurnedAwayError as error:
        return str(error)
    except BrokerUnavailableError as error:
        log.warning("%s; loading the model meanwhile", error)
    finally:
        client.close()
    return None


def _serve(config: WorkerConfig) -> str | None:
    prepare_process()
    # Late, so that --help and a mistyped option answer at once: torch takes seconds to import.
    from worker.loop import Worker

    source = find_model(config)
    model_name = config.announce_as or source.announced_name
    if not 3 <= len(model_name) <= 255:
        raise click.BadParameter(f"{model_name!r} is not 3 to 255 characters long", param_hint="--announce-as")
    if (problem := _check_key(config)) is not None:
        return problem
    loaded = load_model(config, source)
    engine = make_engine(config, loaded, config.batch)
    try:
        max_length, max_context_length = config.lengths(engine.context_length)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    pop_body: dict[str, Any] = {
        "name": config.name,
        "models": [model_name],
        "max_length": max_length,
        "max_context_length": max_context_length,
        "threads": config.batch,
        "bridge_agent": _AGENT,
        "wait": config.poll_wait,
    }
    publication = describe_model(config, source, loaded, engine, model_name)
    if publication is not None:
        pop_body["manifests"] = {model_name: publication.manifest.body()}

    def client() -> BrokerClient:
        return BrokerClient(config.broker, config.api_key, _AGENT)

    status = Status()
    with shown(config.name, model_name, status, config.log_level) as say, _published(publication, client):
        worker = Worker(
            engine,
            client,
            pop_body,
            status=status,
            on_ready=lambda: say(f"worker {config.name} serves {model_name}"),
            render=lambda messages: render(loaded.tokenizer, messages),
            pace=Pace(stream=config.progress_interval),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        return worker.run()


@contextlib.contextmanager
def _published(publication: Publication | None, client: Callable[[], BrokerClient]) -> Iterator[None]:
    """Publish meanwhile, if there is something to."""
    if publication is None:
        yield
        return
    publisher = Publisher(client(), publication)
    publisher.start()
    try:
        yield
    finally:
        publisher.stop()
