"""The options that say which model runs and how, and the engine they make: the same for every command that runs one."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from worker.config import ENVIRONMENT_PREFIX, ConfigError, EngineConfig, parse_size

if TYPE_CHECKING:
    from worker.engine.interface import Engine
    from worker.models.load import ModelSource
    from worker.models.loaded import LoadedModel
    from worker.publishing import Publication

log = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option that can also come from the environment, under its own name."""
    variable = ENVIRONMENT_PREFIX + names[0].removeprefix("--").replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


def check_filled(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse a blank value."""
    if value is not None and not value.strip():
        raise click.BadParameter("it is empty", context, parameter)
    return value


def _read_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return parse_size(value)
    except ConfigError as error:
        raise click.BadParameter(str(error), context, parameter) from error


def engine_options(command: _Command) -> _Command:
    """Add the options whose values `EngineConfig` takes, but for the batch."""
    for add in reversed(_ENGINE_OPTIONS):
        command = add(command)
    return command


_ENGINE_OPTIONS: list[Callable[[Any], Any]] = [
    option(
        "--model", required=True, metavar="NAME_OR_PATH", callback=check_filled,
        help="A hub name, a local directory or GGUF file, or SmolLM2-135M-Instruct.",
    ),
    option(
        "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]),
        help="Where to compute; auto takes a GPU if there is one.",
    ),
    option(
        "--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16", "float16"]),
        help="Number format; auto takes what is fast here and loses least.",
    ),
    option(
        "--quantize", type=click.Choice(["int8", "int4"]),
        help="Keep the weights in less memory. On a CPU with our kernels int8 costs no speed; int4 is for few texts.",
    ),
    option(
        "--engine", default="paged", show_default=True, type=click.Choice(["paged", "reference"]),
        help="reference is slow and plain; to compare with.",
    ),
    option(
        "--kv-cache-memory", metavar="SIZE", callback=_read_size,
        help="For what texts under way have computed, such as 2GiB or 512MB.  [default: fitted to the machine]",
    ),
]  # fmt: skip


def prepare_process() -> None:
    """Set up what torch reads when it is imported; call it before.

    Left alone, torch's threads spin for long while they wait for each other. On a machine that does anything else, one of
    them is then often without a core while the others burn theirs waiting for it, and a token takes twenty times as
    long. Without any spinning each of the hundreds of short waits in a step costs a sleep, which is a third of its speed.
    So they spin for some microseconds and then sleep, unless the environment says how they should wait.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        # Progress bars would fill a log file; tqdm looks at this when it is first imported, and torch imports it.
        os.environ.setdefault("TQDM_DISABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")


def find_model(config: EngineConfig) -> ModelSource:
    """What `--model` means; nothing is loaded.

    Raises:
        click.BadParameter: no such model.
    """
    from worker.models.load import resolve
    from worker.models.loaded import ModelNotFoundError

    try:
        return resolve(config.model)
    except ModelNotFoundError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


def load_model(config: EngineConfig, source: ModelSource) -> LoadedModel:
    """The model in memory.

    Raises:
        click.BadParameter: no such device, or it cannot be loaded so.
    """
    from worker.models.load import choose_device, load
    from worker.models.loaded import ModelNotFoundError

    try:
        device = choose_device(config.device)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--device") from error
    try:
        return load(source, device, _dtype(config, device), quantize=config.quantize)
    except ModelNotFoundError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error


def _dtype(config: EngineConfig, device: str) -> str:
    """Our kernels only keep weights in bfloat16 and compute in float32, so they gain on any CPU."""
    from worker.engine.kernels.build import load_library

    automatic = config.dtype == "auto" and config.engine == "paged" and not config.quantize
    return "bfloat16" if automatic and device == "cpu" and load_library() is not None else config.dtype


def make_engine(config: EngineConfig, loaded: LoadedModel, batch: int) -> Engine:
    """An engine for `batch` texts side by side.

    Raises:
        click.UsageError: it cannot run this model so.
    """
    if config.engine == "reference":
        from worker.engine.reference import ReferenceEngine

        return ReferenceEngine(loaded, max_batch=batch)
    from worker.engine.execution.cache_memory import CacheMemoryError
    from worker.engine.execution.probe import UnsupportedModelError
    from worker.engine.paged import PagedEngine

    try:
        return PagedEngine(loaded, max_batch=batch, cache_memory=config.kv_cache_memory)
    except UnsupportedModelError as error:
        raise click.BadParameter(str(error), param_hint="--model") from error
    except CacheMemoryError as error:
        raise click.UsageError(str(error)) from error


def describe_model(
    config: EngineConfig, source: ModelSource, loaded: LoadedModel, engine: Engine, name: str
) -> Publication | None:
    """What to announce and publish of what runs here; None, with a word why, if it can't be named: then chat is not served.

    Runs a few tokens, so the engine must not serve yet.
    """
    from worker.manifest import PROBE_PROMPT, describe, run_probe
    from worker.models.revision import NoRevisionError, model_revision, tokenizer_body, tokenizer_revision
    from worker.publishing import Publication

    try:
        tokenizer = tokenizer_body(loaded.tokenizer)
        revision = model_revision(source, config.quantize)
    except NoRevisionError as error:
        log.warning("%s is served for text only: %s", name, error)
        return None
    manifest = describe(engine, model_revision=revision, tokenizer_revision=tokenizer_revision(tokenizer))
    probe = run_probe(engine, PROBE_PROMPT, [int(i) for i in loaded.tokenizer(PROBE_PROMPT).input_ids])
    return Publication(name, manifest, tokenizer, loaded.context_length, probe)
