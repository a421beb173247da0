"""One workload through vLLM: `python -m benchmarks.gpu_vllm '{"model": ...}'`; its last line is JSON.

Untested: written from vLLM's documentation of its offline interface.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from benchmarks.gpu_speed import fitted_to, workload


def main() -> None:
    """Measure what the argument says."""
    import vllm

    asked: dict[str, Any] = json.loads(sys.argv[1])
    items = fitted_to(workload(asked["workload"]), asked["vocabulary"])
    engine = vllm.LLM(
        model=asked["model"],
        dtype=asked["dtype"],
        max_num_seqs=asked["at_once"],
        max_model_len=max(len(item.prompt) + item.new_tokens for item in items),
        enable_prefix_caching=True,
    )
    prompts = [{"prompt_token_ids": list(item.prompt)} for item in items]
    wanted = [vllm.SamplingParams(temperature=0, max_tokens=item.new_tokens, ignore_eos=True) for item in items]
    engine.generate([{"prompt_token_ids": list(items[0].prompt[::-1])}], wanted[:1], use_tqdm=False)
    began = time.perf_counter()
    results = engine.generate(prompts, wanted, use_tqdm=False)
    seconds = time.perf_counter() - began
    # Where vLLM keeps no times of single requests, the first token is not told.
    first = [result.metrics.first_token_latency for result in results if getattr(result, "metrics", None)]
    measured = {
        "tokens": sum(len(result.outputs[0].token_ids) for result in results),
        "seconds": seconds,
        "first": statistics.median(first) if first else 0.0,
        "notes": {"vllm": vllm.__version__},
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
