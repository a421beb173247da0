"""Names for what a model is, computed from its files and its tokenizer: equal on every machine that has the same ones.

A model's revision covers the weights and the configuration beside them, not the number format that they are computed
in; a tokenizer's covers all that turns messages into token ids.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from worker.models.demo import find_gguf
from worker.models.load import ModelSource

# A file up to here is read whole, which takes a second or two and follows right after it was loaded. Of a larger one a
# piece of each stretch: a layer or an expert that differs is much longer than a stretch, so it is seen.
WHOLE_BYTES = 1 << 30
STRETCH_BYTES = 16 << 20
PIECE_BYTES = 64 << 10

# What makes a difference beside the weights: the architecture, and which tokens end a text.
_SETTINGS = ("config.json", "generation_config.json")
# In the order in which transformers looks for them; an index names the files it is spread over.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class NoRevisionError(Exception):
    """It cannot be said what this model is; the message says why."""


def model_revision(source: ModelSource, quantize: str | None = None) -> str:
    """32 hexadecimal digits for configuration and weights, and `-int8` or `-int4` where they are loaded so.

    Raises:
        NoRevisionError: its files cannot be found or read.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name, path in _files(source):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            _read_into(digest, path)
    except OSError as error:
        raise NoRevisionError(f"cannot read the files of {source.announced_name}: {error}") from error
    return digest.hexdigest() + (f"-{quantize}" if quantize else "")


def tokenizer_body(tokenizer: Any) -> bytes:
    """The tokenizer with its chat template as canonical JSON (ASCII, sorted keys, no spaces); see `tokenizer_revision`.

    Raises:
        NoRevisionError: it is none of the kind that has a `tokenizer.json`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise NoRevisionError("its tokenizer has no tokenizer.json")
    content = json.loads(backend.to_str())
    # Set by whoever encoded last, and nothing of the tokenizer itself.
    content["truncation"] = content["padding"] = None
    tokens = {name: getattr(tokenizer, name, None) for name in _SPECIAL_TOKENS}
    body = {
        "tokenizer": content,
        "chat_template": _chat_template(tokenizer),
        "special_tokens": {name: str(token) for name, token in tokens.items() if token is not None},
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def tokenizer_revision(body: bytes) -> str:
    """The SHA-256 of a `tokenizer_body`, 64 hexadecimal digits."""
    return hashlib.sha256(body).hexdigest()


def _chat_template(tokenizer: Any) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _files(source: ModelSource) -> Iterable[tuple[str, Path]]:
    """Name and place of each file that counts. A GGUF file is all there is to it, whatever it is called."""
    path = find_gguf() if source.location is None else Path(source.location)
    if path.is_file():
        return [("gguf", path)]
    directory = path if path.is_dir() else _snapshot(source)
    weights = next((name for name in _WEIGHTS if (directory / name).is_file()), None)
    if weights is None:
        raise NoRevisionError(f"{directory} has no weights under a name that is known here")
    names = [name for name in _SETTINGS if (directory / name).is_file()] + [weights]
    if weights.endswith(".index.json"):
        names += _parts(directory / weights)
    return [(name, directory / name) for name in names]


def _parts(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NoRevisionError(f"{index} is no index of weights") from error


def _snapshot(source: ModelSource) -> Path:
    """Where a hub model has been downloaded to."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(str(source.location), "config.json")
    if not isinstance(found, str):
        raise NoRevisionError(f"there is no copy of {source.location} on this machine")
    return Path(found).parent


def _read_into(digest: hashlib.blake2b, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            return
        for start in [*range(0, size - PIECE_BYTES, STRETCH_BYTES), size - PIECE_BYTES]:
            file.seek(start)
            digest.update(file.read(PIECE_BYTES))
