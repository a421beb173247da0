"""Settings of one worker: a flag beats the environment, that beats the file, that beats the default.

Click does the choosing (its `default_map` is the file) and names the option in its messages; here is what it fills in,
and what is checked once the values stand together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

# YAML reads 0000000000 as the number 0: a key or name must not come out as another one.
_TEXTS = frozenset(
    {
        "api_key", "name", "model", "announce_as", "broker", "device", "dtype", "quantize", "engine", "kv_cache_memory",
        "log_level",
    }
)  # fmt: skip
ENVIRONMENT_PREFIX = "HORDE_WORKER_"
# The reference engine gives its requests a turn each, so more of them only makes all of them slow.
_USUAL_BATCH = {"paged": 32, "reference": 1}
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip

_LARGEST_SIZE = 2**60

# The longest that anybody can ask for, in tokens.
_LONGEST_ANSWER, _LONGEST_CONTEXT = 4096, 1_048_576


class ConfigError(Exception):
    """A setting makes no sense; the message names it."""


def parse_size(text: str) -> int:
    """Bytes in a size such as `2GiB`, `512MB` or `1.5 GB`: decimal units, and binary ones with an `i`.

    Raises:
        ConfigError: not a size above 0, or its unit is missing.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    factor = _UNITS.get(match[2]) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size such as 2GiB or 512MB")
    size = float(match[1]) * factor
    if size < 1:
        raise ConfigError(f"{text!r} is no memory at all")
    if size > _LARGEST_SIZE:
        raise ConfigError(f"{text!r} is more memory than any machine has")
    return int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which model runs, and how; `kv_cache_memory` in bytes. None: the engine's own choice."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    quantize: str | None = None
    engine: str = "paged"
    max_batch: int | None = None
    kv_cache_memory: int | None = None

    @property
    def batch(self) -> int:
        """Texts generated side by side."""
        return self.max_batch or _USUAL_BATCH[self.engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(EngineConfig):
    """What `horde-worker run` was told. Lengths are tokens; None: chosen by the model. `progress_interval` in seconds."""

    broker: str
    api_key: str = field(repr=False)
    name: str
    announce_as: str | None
    max_length: int | None
    max_context_length: int | None
    poll_wait: int
    progress_interval: float
    log_level: str

    def lengths(self, context_length: int) -> tuple[int, int]:
        """Longest answer and longest context to announce, for an engine that holds `context_length` tokens of a text.

        Raises:
            ConfigError: what was asked for does not fit the model.
        """
        context = self.max_context_length or min(_LONGEST_CONTEXT, context_length)
        if context > context_length:
            raise ConfigError(
                f"--max-context-length {context} is more than the {context_length} tokens that this model reads and "
                "its cache holds"
            )
        length = self.max_length or min(_LONGEST_ANSWER, context // 2)
        if length >= context:
            raise ConfigError(f"--max-length {length} leaves no room for a prompt in a context of {context}")
        return length, context


def read_file(path: Path) -> dict[str, Any]:
    """Option name -> value from a YAML file; names may be written with `-` or `_`.

    Raises:
        ConfigError: unreadable, not a mapping, or a key that is no option.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    except yaml.YAMLError as error:
        # The error's own text quotes the line at fault, which may be the one with the key.
        mark = getattr(error, "problem_mark", None)
        place = f" near line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{place}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a list of `option: value` lines")
    known = {f.name for f in fields(WorkerConfig)}
    values: dict[str, Any] = {}
    for written, value in content.items():
        option = str(written).replace("-", "_")
        if option not in known:
            raise ConfigError(f"{path}: there is no option {written!r}; there are {', '.join(sorted(known))}")
        if option in _TEXTS and value is not None and not isinstance(value, str):
            raise ConfigError(f"{path}: put the value of {written} in quotes")
        if isinstance(value, list | dict | bool):
            raise ConfigError(f"{path}: {written} takes a single value")
        if value is not None:
            values[option] = value
    return values
