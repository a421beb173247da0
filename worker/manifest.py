"""What a worker announces of the model it serves, and the sample run by which others can tell that it is the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from worker.engine.interface import Delta, Engine, Failed, GenerationRequest, RequestRefusedError, Sampling

PROBE_PROMPT = "The capital of France is"
PROBE_TOKENS = 8
_PROBE_ID = "probe"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One model as this worker runs it.

    Args:
        model_revision, tokenizer_revision: 1 to 128 visible ASCII characters.
        context_length: most tokens of prompt and answer together.
        block_size, blocks: tokens a block of the cache holds, and how many blocks there are.
        kv_bytes_per_token: memory that a token takes in the cache; 0 where that is not known.
        capabilities: what it can do beyond plain text.
    """

    model_revision: str
    tokenizer_revision: str
    context_length: int
    block_size: int
    blocks: int
    kv_bytes_per_token: int
    capabilities: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        """As a pop carries it."""
        return {
            "model_revision": self.model_revision,
            "tokenizer_revision": self.tokenizer_revision,
            "context_length": self.context_length,
            "block_size": self.block_size,
            "blocks": self.blocks,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "capabilities": list(self.capabilities),
        }


def describe(engine: Engine, *, model_revision: str, tokenizer_revision: str) -> Manifest:
    """The manifest of what this engine runs. One without a paged cache counts as one whose blocks hold a text each."""
    figures = engine.statistics()
    return Manifest(
        model_revision=model_revision,
        tokenizer_revision=tokenizer_revision,
        context_length=engine.context_length,
        block_size=figures.block_size or engine.context_length,
        blocks=figures.blocks_total or engine.max_batch,
        kv_bytes_per_token=figures.kv_bytes_per_token,
    )


def run_probe(engine: Engine, prompt: str, token_ids: Sequence[int]) -> dict[str, Any] | None:
    """What the engine makes of a prompt without any chance in it; None if it can't. To be called before it serves."""
    output: list[int] = []
    request = GenerationRequest(
        id=_PROBE_ID,
        prompt=tuple(token_ids),
        max_new_tokens=PROBE_TOKENS,
        seed=0,
        cache_salt=_PROBE_ID,
        sampling=Sampling(temperature=0.0),
    )
    try:
        engine.add(request)
        while engine.running:
            for event in engine.step():
                match event:
                    case Delta(_, ids):
                        output += ids
                    case Failed():
                        return None
    except RequestRefusedError:
        return None
    finally:
        engine.abort(_PROBE_ID)
    return {"prompt": prompt, "token_ids": list(token_ids), "output_token_ids": output}
