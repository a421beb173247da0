"""`horde-worker generate`: continue one prompt here, without a broker."""

from __future__ import annotations

import io
import json
import logging
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from worker.config import EngineConfig
from worker.display import log_lines
from worker.engine.interface import (
    Delta,
    Engine,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    RequestRefusedError,
    Sampling,
)
from worker.engine_options import engine_options, find_model, load_model, make_engine, prepare_process

if TYPE_CHECKING:
    from collections.abc import Callable

_INTERRUPTED = 130
_ENGINE_FIELDS = ("model", "device", "dtype", "quantize", "engine", "kv_cache_memory")


@dataclass(slots=True)
class _Sample:
    """One text as it grows; `shown` characters of it are printed."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    shown: int = 0
    finished: Finished | None = None


@dataclass(slots=True)
class _Timing:
    """Seconds since the request was added; `tokens` of all samples together."""

    first_token: float | None = None
    total: float = 0.0
    tokens: int = 0

    def sentence(self, samples: list[_Sample], seed: int) -> str:
        prompts = [sample.finished.prompt_tokens for sample in samples if sample.finished is not None]
        rate = self.tokens / self.total if self.total > 0 else 0.0
        parts = [
            f"{_counted(self.tokens, 'token')} in {self.total:.2f} s ({rate:.1f} tokens/s)",
            *([f"first token after {self.first_token:.2f} s"] if self.first_token is not None else []),
            *([_counted(prompts[0], "prompt token")] if prompts else []),
            f"seed {seed}",
        ]
        return ", ".join(parts)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@click.command()
@click.argument("prompt")
@engine_options
@click.option(
    "--max-new-tokens", default=128, show_default=True, type=click.IntRange(1), help="Longest text, in tokens."
)
@click.option(
    "--temperature", default=1.0, show_default=True, type=click.FloatRange(0),
    help="0 always takes the likeliest token.",
)  # fmt: skip
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0, 1), help="1 is off.")
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(0), help="0 is off.")
@click.option("--seed", type=int, help="Same seed, same text.  [default: drawn, and told at the end]")
@click.option("--stop", multiple=True, metavar="TEXT", help="The text ends before this; may be given several times.")
@click.option("--n", default=1, show_default=True, type=click.IntRange(1, 64), help="Texts for this prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text as it comes.")
@click.option(
    "--log-level", default="warning", show_default=True,
    type=click.Choice(["debug", "info", "warning", "error"], case_sensitive=False), help="Lowest level that is logged.",
)  # fmt: skip
def generate(prompt: str, **options: Any) -> None:
    """Continue PROMPT with a model on this machine; `-` reads it from standard input.

    The text goes to standard output as it comes, figures to standard error. The prompt is fed as it is, without a chat
    template; of standard input the last line break is left out.
    """
    log_lines(options["log_level"])
    if options["log_level"] == "warning":
        # Loading and unpacking may take a minute, and silence looks like a hang.
        logging.getLogger("worker.models").setLevel(logging.INFO)
    try:
        _generate(_read_prompt(prompt), options)
    except KeyboardInterrupt:
        click.echo(err=True)
        sys.exit(_INTERRUPTED)


def _read_prompt(argument: str) -> str:
    if argument != "-":
        return argument
    if sys.stdin is None:
        raise click.ClickException("there is no standard input to read the prompt from")
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except OSError as error:
        raise click.ClickException(f"cannot read standard input: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError("standard input is not UTF-8 text") from error


def _generate(prompt: str, options: dict[str, Any]) -> None:
    if sys.stdout is None:
        raise click.ClickException("there is no standard output to write the text to")
    config = EngineConfig(**{name: options[name] for name in _ENGINE_FIELDS})
    prepare_process()
    engine = make_engine(config, load_model(config, find_model(config)), options["n"])
    request = GenerationRequest(
        id="prompt",
        prompt=prompt,
        max_new_tokens=options["max_new_tokens"],
        seed=secrets.randbits(31) if options["seed"] is None else options["seed"],
        stop=options["stop"],
        n=options["n"],
        sampling=Sampling(temperature=options["temperature"], top_k=options["top_k"], top_p=options["top_p"]),
    )
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without some character shows a question mark, and the text goes on.
        sys.stdout.reconfigure(errors="replace")
    samples, timing = _run(engine, request, show=None if options["as_json"] else _show_in_turn)
    if options["as_json"]:
        _write(json.dumps(_document(config.model, request, samples, timing), ensure_ascii=False) + "\n")
    elif not samples[-1].text.endswith("\n"):
        _write("\n")
    click.echo(timing.sentence(samples, request.seed), err=True)


def _run(
    engine: Engine, request: GenerationRequest, show: Callable[[list[_Sample]], None] | None
) -> tuple[list[_Sample], _Timing]:
    """Generate to the end.

    Raises:
        click.ClickException: the engine refused the request, or failed at it.
        KeyboardInterrupt: as it came, with the request gone from the engine.
    """
    samples = [_Sample() for _ in range(request.n)]
    timing = _Timing()
    begun = time.perf_counter()
    try:
        engine.add(request)
        while engine.running:
            events = engine.step()
            timing.total = time.perf_counter() - begun
            for event in events:
                _take(event, samples, timing)
            if show is not None:
                show(samples)
    except RequestRefusedError as error:
        raise click.ClickException(str(error)) from error
    finally:
        engine.abort(request.id)
    return samples, timing


def _take(event: Event, samples: list[_Sample], timing: _Timing) -> None:
    match event:
        case Delta(_, token_ids, text, number):
            if token_ids and timing.first_token is None:
                timing.first_token = timing.total
            timing.tokens += len(token_ids)
            samples[number].token_ids += token_ids
            samples[number].text += text
        case Finished():
            samples[event.sample].finished = event
        case Failed(_, message):
            raise click.ClickException(f"the model failed: {message}")


def _show_in_turn(samples: list[_Sample]) -> None:
    """Print what is new of the first text that is not complete, and then of those after it."""
    for number, sample in enumerate(samples):
        if number and not sample.shown and sample.text:
            _write(f"\n--- {number + 1} ---\n")
        _write(sample.text[sample.shown :])
        sample.shown = len(sample.text)
        if sample.finished is None:
            return


def _write(text: str) -> None:
    """Unlike click's `echo` this leaves every character as it is.

    Raises:
        click.ClickException: it cannot be written. (Where the reader has gone away, click ends us without a word.)
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is left in the buffer would be tried again, and complained about again, when the process ends.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise click.ClickException(f"cannot write to standard output: {error.strerror or error}") from error


def _document(model: str, request: GenerationRequest, samples: list[_Sample], timing: _Timing) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": request.prompt,
        "seed": request.seed,
        "samples": [
            {
                "text": sample.text,
                "token_ids": sample.token_ids,
                **(
                    {
                        "finish_reason": sample.finished.reason.value,
                        "stop_string": sample.finished.stop_string,
                        "prompt_tokens": sample.finished.prompt_tokens,
                        "completion_tokens": sample.finished.completion_tokens,
                        "cached_tokens": sample.finished.cached_tokens,
                    }
                    if sample.finished is not None
                    else {}
                ),
            }
            for sample in samples
        ],
        "timing": asdict(timing),
    }
