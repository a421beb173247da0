"""The `horde-worker` command."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import click

from worker.broker import BrokerClient, BrokerUnavailableError, TurnedAwayError, normalise_url
from worker.config import ENVIRONMENT_PREFIX, ConfigError, WorkerConfig, read_file
from worker.display import log_lines, shown
from worker.status import Status

log = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])
_AGENT = f"Horde Worker:{version('horde')}:unknown"
_LOG_LEVELS = click.Choice(["debug", "info", "warning", "error"], case_sensitive=False)


def _option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option that can also come from the environment, under its own name."""
    variable = ENVIRONMENT_PREFIX + names[0].removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


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


def _check_filled(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty", context, parameter)
    return value


@click.group()
@click.version_option(version("horde"), prog_name="horde-worker")
def main() -> None:
    """Serve a language model to a horde."""


@main.command()
@_option("--broker", required=True, metavar="URL", callback=_check_url, help="Address of the broker.")
@_option(
    "--api-key", required=True, metavar="KEY", callback=_check_api_key, help="Your key; better set in the environment."
)
@_option("--name", required=True, callback=_check_filled, help="What this worker is called; unique in the horde.")
@_option(
    "--model", required=True, metavar="NAME_OR_PATH", callback=_check_filled,
    help="A hub name, a local directory, or SmolLM2-135M-Instruct.",
)  # fmt: skip
@_option("--announce-as", metavar="NAME", callback=_check_filled, help="Call the model this instead of its own name.")
@_option(
    "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]),
    help="Where to compute; auto takes a GPU if there is one.",
)  # fmt: skip
@_option(
    "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
    help="Number format; auto takes what the hardware computes in.",
)  # fmt: skip
@_option("--max-batch", default=1, show_default=True, type=click.IntRange(1, 50), help="Texts generated side by side.")
@_option("--max-length", type=click.IntRange(16, 4096), help="Longest answer, in tokens.  [default: 512]")
@_option(
    "--max-context-length", type=click.IntRange(80, 1048576),
    help="Longest prompt and answer together, in tokens.  [default: 2048, or less if the model reads less]",
)  # fmt: skip
@_option(
    "--poll-wait", default=5, show_default=True, type=click.IntRange(0, 25),
    help="Seconds the broker may keep us waiting for a job.",
)  # fmt: skip
@_option("--log-level", default="info", show_default=True, type=_LOG_LEVELS, help="Lowest level that is logged.")
@_option(
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


def _calm_openmp() -> None:
    """Have torch's threads sleep while they wait for each other, unless the environment says how they should wait.

    Left alone they spin. On a machine that does anything else, one of them is then often without a core while the others
    burn theirs waiting for it, and a token takes twenty times as long. libgomp reads this when torch is imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "0")


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
    if not sys.stderr.isatty():
        # Progress bars would fill a log file; tqdm looks at this when it is first imported, and torch imports it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    _calm_openmp()
    # Late, so that --help and a mistyped option answer at once: torch takes seconds to import.
    from worker.loop import Worker
    from worker.models.load import choose_device, load, resolve
    from worker.models.loaded import ModelNotFoundError

    try:
        source = resolve(config.model)
        model_name = config.announce_as or source.announced_name
        if not 3 <= len(model_name) <= 255:
            raise click.BadParameter(f"{model_name!r} is not 3 to 255 characters long", param_hint="--announce-as")
        if (problem := _check_key(config)) is not None:
            return problem
        device = choose_device(config.device)
    except ModelNotFoundError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    try:
        loaded = load(source, device, config.dtype)
        max_length, max_context_length = config.lengths(loaded.context_length)
    except ModelNotFoundError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    except ConfigError as error:
        raise click.UsageError(str(error)) from error

    from worker.engine.reference import ReferenceEngine

    pop_body = {
        "name": config.name,
        "models": [model_name],
        "max_length": max_length,
        "max_context_length": max_context_length,
        "threads": config.max_batch,
        "bridge_agent": _AGENT,
        "wait": config.poll_wait,
    }
    status = Status()
    with shown(config.name, model_name, status, config.log_level) as say:
        worker = Worker(
            ReferenceEngine(loaded, max_batch=config.max_batch),
            lambda: BrokerClient(config.broker, config.api_key, _AGENT),
            pop_body,
            status=status,
            on_ready=lambda: say(f"worker {config.name} serves {model_name}"),
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        return worker.run()
