"""The price of a result, by kind: what the lifecycle is handed as a callable."""

from __future__ import annotations

from horde.kudos import prices
from horde.lifecycle.rows import JobFacts
from horde.lifecycle.store import Price, Result


def price_result(job: JobFacts, result: Result) -> Price:
    """What one stored result costs its client and earns its worker's owner.

    Text and chat by AI Horde's text formula, but no more than the order was quoted where it named its models; images have no
    worker here yet and cost the fee alone.
    """
    if "prompt" not in job.payload:
        return Price(price=prices.FEE, reward=0)
    prompt_tokens = prices.estimate_tokens(str(job.payload["prompt"]))
    reward = prices.text_reward(
        tokens=min(job.max_length, max(prices.LEAST_TOKENS, result.tokens)),
        prompt_tokens=prompt_tokens,
        model=job.model,
        trusted=job.owner_trusted,
        validated=prices.is_validated(job.bridge_agent),
    )
    if job.models:
        quoted = prices.most_per_text(max_length=job.max_length, prompt_tokens=prompt_tokens, models=job.models)
        reward = min(reward, quoted - prices.FEE)
    return Price(price=reward + prices.FEE, reward=reward)
