"""Settings of one worker: a flag beats the environment, that beats the file, that beats the default.

Click does the choosing (its `default_map` is the file) and names the option in its messages; here is what it fills in,
and what is checked once the values stand together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

# YAML reads 0000000000 as the number 0: a key or name must not come out as another one.
_TEXTS = frozenset({"api_key", "name", "model", "announce_as", "broker", "device", "dtype", "log_level"})
ENVIRONMENT_PREFIX = "HORDE_WORKER_"


class ConfigError(Exception):
    """A setting makes no sense; the message names it."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What `horde-worker run` was told. Lengths are tokens; None: chosen by the model."""

    broker: str
    api_key: str = field(repr=False)
    name: str
    model: str
    announce_as: str | None
    device: str
    dtype: str
    max_batch: int
    max_length: int | None
    max_context_length: int | None
    poll_wait: int
    log_level: str

    def lengths(self, context_length: int) -> tuple[int, int]:
        """Longest answer and longest context to announce, for a model that reads `context_length` tokens.

        Raises:
            ConfigError: what was asked for does not fit the model.
        """
        context = self.max_context_length or min(2048, context_length)
        if context > context_length:
            raise ConfigError(
                f"--max-context-length {context} is more than the {context_length} tokens this model reads"
            )
        length = self.max_length or min(512, context // 2)
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
