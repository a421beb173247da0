"""From what stands after `--model` to a model in memory."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models.demo import DEMO_MODEL, demo_directory
from worker.models.loaded import LoadedModel, ModelNotFoundError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# For a model that does not say how much it can read.
_UNKNOWN_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where to load from (`location`: a directory or a hub name; None: the demo model), and what to call it."""

    location: str | None
    announced_name: str


def resolve(name_or_path: str) -> ModelSource:
    """What a `--model` value means: an existing directory, the demo model, else a hub name.

    Raises:
        ModelNotFoundError: it looks like a path, and no model lies there.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"{name_or_path} holds no config.json, so no model that transformers can load")
        return ModelSource(str(path), path.resolve().name)
    if name_or_path == DEMO_MODEL:
        return ModelSource(None, DEMO_MODEL)
    if name_or_path.startswith((".", "/", "~")) or path.is_file():
        raise ModelNotFoundError(f"{name_or_path} is not a directory; a model is a directory or a hub name")
    return ModelSource(name_or_path, name_or_path)


def load(source: ModelSource, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load weights and tokenizer.

    Args:
        source: from `resolve`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.

    Raises:
        ModelNotFoundError: not there, not reachable, or not a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = choose_device(device)
    kind = choose_dtype(dtype, place)
    location = source.location or str(demo_directory())
    log.info("loading %s on %s in %s", source.announced_name, place, str(kind).removeprefix("torch."))
    try:
        tokenizer = AutoTokenizer.from_pretrained(location)
        model: Any = AutoModelForCausalLM.from_pretrained(location, dtype=kind)
    except (OSError, ValueError, ImportError) as error:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in {"", "0"} else ""
        first_line = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(f"cannot load {source.announced_name}{offline}: {first_line}") from error
    model.to(torch.device(place))
    model.eval()
    return LoadedModel(model, tokenizer, _context_length(model.config), _eos_token_ids(model, tokenizer))


def choose_device(wanted: str) -> str:
    """The torch device for a `--device` value.

    Raises:
        ValueError: a GPU is asked for and torch sees none.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU here; use --device cpu, or install a CUDA build of torch")
    return wanted


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """The number format: what was asked for, else bfloat16 where the hardware computes in it, else float32."""
    import torch

    if wanted != "auto":
        chosen = getattr(torch, wanted)
        assert isinstance(chosen, torch.dtype)
        return chosen
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    features = torch.cpu.get_capabilities()
    return torch.bfloat16 if features.get("avx512_bf16") or features.get("amx_bf16") else torch.float32


def _context_length(config: Any) -> int:
    text_config = config.get_text_config(decoder=True)
    length = getattr(text_config, "max_position_embeddings", None)
    return length if isinstance(length, int) and length > 0 else _UNKNOWN_CONTEXT


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    declared = model.generation_config.eos_token_id
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))
