"""GGUF files: made into safetensors directories once, which then load like any other model.

transformers unpacks the weights into the number format that is asked for; taking them apart takes a minute and more, so
the result is kept in the cache, one copy a format. What transformers leaves out of the file or gets wrong is put right
here or said aloud: text splitting, end tokens, stretched contexts, weights that are missing.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models.build_once import build_once, model_cache_dir
from worker.models.gguf_header import FLOAT32_TENSOR, GgufHeader, NotGgufError, read_float32, read_header
from worker.models.gguf_tokenizer import end_token_ids, repair_tokenizer
from worker.models.loaded import ModelNotFoundError
from worker.models.telling import telling

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

# Raise it when what `_unpack` writes changes: old copies are then left alone and new ones made.
_LAYOUT = 1
_WHOLE_DIGEST_BYTES = 256 << 20
_EDGE_BYTES = 1 << 20
# Llama 3.1 to 3.3 all stretch their context by this rule and differ in the factor alone.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def unpacked_directory(path: Path, name: str, dtype: torch.dtype) -> Path:
    """A directory that transformers can load the file's model from; made on first use.

    Args:
        path: of the GGUF file.
        name: begins the directory's name.
        dtype: of the weights in it.

    Raises:
        ModelNotFoundError: the file cannot be used; the message says why.
    """
    try:
        digest = _fingerprint(path)
    except OSError as error:
        raise ModelNotFoundError(f"cannot read {path}: {error.strerror or error}") from error
    kind = str(dtype).removeprefix("torch.")
    suffix = "" if kind == "float32" else f"-{kind}"
    directory = f"{name}-{digest}{suffix}-{_LAYOUT}"
    try:
        return build_once(model_cache_dir(), directory, lambda target: _convert(path, name, dtype, target))
    except OSError as error:
        raise ModelNotFoundError(f"cannot unpack {name}: {error}") from error


def _fingerprint(path: Path) -> str:
    """Of the content; for a large file of its size, date, beginning and end, since every start computes it."""
    digest = hashlib.sha256()
    facts = path.stat()
    with path.open("rb") as file:
        if facts.st_size <= _WHOLE_DIGEST_BYTES:
            while chunk := file.read(_EDGE_BYTES):
                digest.update(chunk)
        else:
            digest.update(f"{facts.st_size} {facts.st_mtime_ns}".encode())
            digest.update(file.read(_EDGE_BYTES))
            file.seek(-_EDGE_BYTES, 2)
            digest.update(file.read())
    return digest.hexdigest()[:12]


def _convert(path: Path, name: str, dtype: torch.dtype, target: Path) -> None:
    try:
        header = read_header(path)
    except NotGgufError as error:
        raise ModelNotFoundError(f"{path} is no GGUF file that can be used: {error}") from error
    _check(path, header, dtype, target)
    log.info("unpacking %s: this once, a minute or more", name)
    try:
        with telling("unpacking"):
            _unpack(path, header, dtype, target)
    except (ValueError, NotImplementedError, KeyError, ImportError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise ModelNotFoundError(f"transformers cannot read {path}: {first_line}") from error


def _check(path: Path, header: GgufHeader, dtype: torch.dtype, target: Path) -> None:
    pieces = int(header.metadata.get("split.count", 1))
    if pieces > 1:
        raise ModelNotFoundError(
            f"{path} is one of {pieces} pieces of a model; join them first (llama.cpp's `llama-gguf-split --merge`)"
        )
    if not header.architecture or not header.tensors:
        raise ModelNotFoundError(f"{path} holds no model: a GGUF with a vocabulary or settings only")
    needed = header.parameters * dtype.itemsize
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ModelNotFoundError(
            f"unpacking {path} takes {needed / 1e9:.1f} GB in {target.parent}, and {free / 1e9:.1f} GB are free there; "
            "HORDE_MODEL_CACHE names another place"
        )


def _unpack(path: Path, header: GgufHeader, dtype: torch.dtype, target: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    repair_tokenizer(tokenizer, header)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=dtype, output_loading_info=True, **_dense()
    )
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would fill them with random numbers.
        raise ModelNotFoundError(
            f"{path} has no weights for {missing[0]} and {len(missing) - 1} more of {file}'s model"
        )
    # These weights are no longer quantised, but the model still says so and would refuse to be saved.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _restore_rope(path, header, model.config)
    model.generation_config.eos_token_id = end_token_ids(header) or None
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _dense() -> dict[str, Any]:
    """Newer transformers keep the weights of some architectures in GGUF's blocks unless told otherwise."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": config(dequantize=True)} if config else {}


def _restore_rope(path: Path, header: GgufHeader, config: Any) -> None:
    """Carry over how the file stretches its context, which transformers drops; what cannot be carried over is said."""
    current = getattr(config, "rope_parameters", None) or {}
    if current.get("rope_type", "default") != "default":
        return
    scaling = _llama3_scaling(path, header, current) or _stated_scaling(header)
    if scaling:
        config.rope_parameters = {**current, **scaling}
        return
    stretched = [name for name in header.tensors if name.startswith("rope_f")]
    if stretched or header.metadata.get(f"{header.architecture}.rope.scaling.type", "none") != "none":
        log.warning("%s stretches its context in a way that is not read here: long texts will come out wrong", path)


def _llama3_scaling(path: Path, header: GgufHeader, current: dict[str, Any]) -> dict[str, Any] | None:
    """Llama 3's rule, if the file's divisors of the rotary frequencies are those it gives."""
    place = header.tensors.get("rope_freqs.weight")
    base = current.get("rope_theta")
    if place is None or place.kind != FLOAT32_TENSOR or not base:
        return None
    divisors = read_float32(path, place)
    factor = max(divisors)
    expected = _llama3_divisors(float(base), len(divisors), factor)
    if any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(divisors, expected, strict=True)):
        return None
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _llama3_divisors(base: float, count: int, factor: float) -> list[float]:
    """What each of `count` rotary frequencies is divided by; the rule of Llama 3.1's reference code."""
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    divisors = []
    for i in range(count):
        turns = _LLAMA3_ROPE["original_max_position_embeddings"] * base ** (-i / count) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / (share + (1 - share) / factor))
    return divisors


def _stated_scaling(header: GgufHeader) -> dict[str, Any] | None:
    """What the metadata say, for the two rules that a factor and a length describe."""
    prefix = f"{header.architecture}.rope.scaling."
    kind, factor = header.metadata.get(prefix + "type"), header.metadata.get(prefix + "factor")
    if not factor or kind not in {"linear", "yarn"}:
        return None
    original = header.metadata.get(prefix + "original_context_length")
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    return (
        {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
        if original
        else None
    )
