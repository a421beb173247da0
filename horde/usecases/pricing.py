"""The price of a result, by kind: what the lifecycle is handed as a callable."""

from __future__ import annotations

from horde.kudos import prices
from horde.lifecycle.rows import JobFacts
from horde.lifecycle.store import Price, Result


def price_result(job: JobFacts, result: Result) -> Price:
    """What one stored result costs its client and earns its worker's owner.

    Text and chat by AI Horde's text formula; images have no worker here yet and cost the fee alone.
    """
    if "prompt" not in job.payload:
        return Price(price=prices.FEE, reward=0)
    reward = prices.text_reward(
        tokens=min(job.max_length, max(prices.LEAST_TOKENS, result.tokens)),
        prompt_tokens=prices.estimate_tokens(str(job.payload["prompt"])),
        model=job.model,
        trusted=job.owner_trusted,
        validated=prices.is_validated(job.bridge_agent),
    )
    return Price(price=reward + prices.FEE, reward=reward)
