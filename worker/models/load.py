"""From what stands after `--model` to a model in memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models.demo import DEMO_MODEL, find_gguf
from worker.models.gguf import unpacked_directory
from worker.models.gguf_header import is_gguf
from worker.models.loaded import LoadedModel, ModelNotFoundError
from worker.models.mapped_files import releasing_mapped_weights
from worker.models.telling import telling

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# For a model that does not say how much it can read.
_UNKNOWN_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where to load from (`location`: a directory, a GGUF file or a hub name; None: the demo model), and its name."""

    location: str | None
    announced_name: str


def resolve(name_or_path: str) -> ModelSource:
    """What a `--model` value means: an existing directory or GGUF file, the demo model, else a hub name.

    Raises:
        ModelNotFoundError: it looks like a path, and no model lies there.
    """
    try:
        if (found := _on_disk(name_or_path)) is not None:
            return found
    except RuntimeError as error:
        raise ModelNotFoundError(f"{name_or_path} begins in a home directory, and there is none") from error
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {name_or_path}: {error.strerror or error}") from error
    if name_or_path == DEMO_MODEL:
        return ModelSource(None, DEMO_MODEL)
    if name_or_path.startswith((".", "/", "~")) or name_or_path.lower().endswith(".gguf"):
        raise ModelNotFoundError(f"{name_or_path} is not there; a model is a directory, a GGUF file or a hub name")
    return ModelSource(name_or_path, name_or_path)


def _on_disk(name_or_path: str) -> ModelSource | None:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{name_or_path} holds no config.json, so no model that transformers can load{_ggufs_in(path)}"
            )
        return ModelSource(str(path), path.resolve().name)
    if path.is_file():
        _check_gguf(name_or_path, path)
        return ModelSource(str(path), path.resolve().stem)
    if path.exists():
        raise ModelNotFoundError(f"{name_or_path} is neither a file nor a directory, so no model")
    return None


def load(source: ModelSource, device: str = "auto", dtype: str = "auto", *, quantize: str | None = None) -> LoadedModel:
    """Load weights and tokenizer.

    Args:
        source: from `resolve`.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:N`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        quantize: None, `int8` or `int4`: what linear layers keep their weights in. The rest is then bfloat16 if `dtype`
            is `auto`.

    Raises:
        ModelNotFoundError: not there, not reachable, not a causal language model, or not to be quantised so.
        ValueError: no such device.
    """
    import torch

    place = choose_device(device)
    kind = torch.bfloat16 if quantize and dtype == "auto" else choose_dtype(dtype, place)
    log.info("loading %s on %s in %s", source.announced_name, place, quantize or str(kind).removeprefix("torch."))
    location = _location(source, kind)
    with telling("loading"), releasing_mapped_weights():
        model, tokenizer = _from_pretrained(location, source.announced_name, kind)
        if quantize:
            _quantise(model, quantize, place, source.announced_name)
        model.to(torch.device(place))
    model.eval()
    return LoadedModel(
        model, tokenizer, _context_length(model.config), _eos_token_ids(model, tokenizer), quantize=quantize
    )


def _location(source: ModelSource, dtype: torch.dtype) -> str:
    """A directory or a hub name; a GGUF file is unpacked if it was not before."""
    import torch

    if source.location is None:
        # So small that one copy serves all formats.
        return str(unpacked_directory(find_gguf(), DEMO_MODEL, torch.float32))
    path = Path(source.location)
    return str(unpacked_directory(path, source.announced_name, dtype)) if path.is_file() else source.location


def _from_pretrained(location: str, name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    if not Path(location).is_dir() and _has_copy(location):
        # Asking the hub for news about a model that lies here takes a minute when there is no network.
        try:
            return _read(location, dtype, local_files_only=True)
        except (OSError, ValueError, ImportError, _DamagedError):
            log.info("the local copy of %s is not complete", name)
    try:
        return _read(location, dtype)
    except (OSError, ValueError, ImportError, _DamagedError) as error:
        raise ModelNotFoundError(f"cannot load {name}: {_reason(error)}") from error


class _DamagedError(Exception):
    """A file of the model does not hold what it should."""


def _read(location: str, dtype: torch.dtype, **options: bool) -> tuple[Any, Any]:
    from pickle import UnpicklingError

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(location, **options)
        return AutoModelForCausalLM.from_pretrained(location, dtype=dtype, **options), tokenizer
    except torch.OutOfMemoryError:
        raise
    except JSONDecodeError as error:
        raise _DamagedError(f"one of its JSON files is damaged or incomplete ({error})") from error
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise _DamagedError(f"a file of its weights is damaged or incomplete ({said})") from error


def _has_copy(hub_name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(hub_name, "config.json"), str)
    except HFValidationError:
        return False


def _reason(error: BaseException) -> str:
    """The first line of what went wrong, or a sentence where the library's would not help."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LocalEntryNotFoundError):
            if constants.HF_HUB_OFFLINE:
                return "it is not in this machine's copy of the hub, and HF_HUB_OFFLINE forbids to fetch it"
            return "the hub cannot be reached, and there is no copy on this machine; a directory or GGUF file will do"
        cause = cause.__cause__ or cause.__context__
    return str(error).strip().split("\n")[0]


def _quantise(model: Any, kind: str, place: str, name: str) -> None:
    from worker.models.quantise import QuantisationError, quantise

    try:
        quantise(model, kind, place)
    except QuantisationError as error:
        raise ModelNotFoundError(f"cannot load {name} in {kind}: {error}") from error


def _check_gguf(name_or_path: str, path: Path) -> None:
    try:
        if is_gguf(path):
            return
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {name_or_path}: {error.strerror or error}") from error
    raise ModelNotFoundError(
        f"{name_or_path} is not a GGUF file; a model is a directory with a config.json, a GGUF file or a hub name"
    )


def _ggufs_in(directory: Path) -> str:
    names = sorted(file.name for file in directory.glob("*.gguf"))
    return f"; name the file itself: {', '.join(names[:3])}" if names else ""


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
