"""The price of a result, by kind: what the lifecycle is handed as callables."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any

from horde.kudos import prices
from horde.lifecycle.rows import JobFacts
from horde.lifecycle.store import Price, Pricing, Result
from horde.lifecycle.words import Kind, ResultState
from horde.usecases.context import Context
from horde.usecases.counting import count_posted

RUNNING_REVISIONS = """
SELECT DISTINCT tokenizer_revision FROM jobs
WHERE request_id IN (%(id)s, (SELECT request_id FROM jobs WHERE id = %(id)s))
  AND state = 'processing' AND tokenizer_revision IS NOT NULL
"""


def pricing(context: Context) -> Pricing:
    """How results are priced, and what a cancel leaves of a stream is counted."""
    return Pricing(price_result, partial(count_posted, context.tokenizers))


def ready_to_price(context: Context, some_id: uuid.UUID) -> Pricing:
    """The same, once this process has at hand what the output of a running request is counted with: whoever ends it need not
    be who let it in. Before the transaction, for loading takes its time.

    Args:
        some_id: of the request, or of one of its jobs.
    """
    rows = context.database.read(lambda tx: tx.execute(RUNNING_REVISIONS, {"id": some_id}).scalars())
    for revision in rows:
        context.tokenizers.load(context.database, revision)
    return pricing(context)


def price_result(job: JobFacts, result: Result) -> Price:
    """What one stored result costs its client and earns its worker's owner.

    Text and chat by AI Horde's text formula, but no more than the order was quoted where it named its models; images have no
    worker here yet and cost the fee alone. The client pays all that was delivered. A worker that went on with what another
    one had begun earns for its own tokens, and nothing where there are none. Nor does a chat without a word earn anything.
    """
    prompt_tokens = _prompt_tokens(job.payload)
    if prompt_tokens is None:
        return Price(price=prices.FEE, reward=0)
    if job.kind is Kind.CHAT and result.state is ResultState.OK and not result.text and not result.tokens:
        return Price(price=prices.FEE, reward=0)
    worth = _reward(job, prompt_tokens, result.tokens)
    reward = worth
    if result.prefix_tokens:
        reward = _reward(job, prompt_tokens, result.own_tokens) if result.own_tokens else 0
    return Price(price=worth + prices.FEE, reward=reward)


def _prompt_tokens(payload: dict[str, Any]) -> int | None:
    if "prompt_tokens" in payload:
        return prices.believed_prompt(int(payload["prompt_tokens"]), estimated=bool(payload.get("estimated")))
    return prices.estimate_tokens(str(payload["prompt"])) if "prompt" in payload else None


def _reward(job: JobFacts, prompt_tokens: int, tokens: int) -> int:
    reward = prices.text_reward(
        tokens=min(job.max_length, max(prices.LEAST_TOKENS, tokens)),
        prompt_tokens=prompt_tokens,
        model=job.model,
        trusted=job.owner_trusted,
        validated=prices.is_validated(job.bridge_agent),
    )
    if not job.models:
        return reward
    quoted = prices.most_per_text(max_length=job.max_length, prompt_tokens=prompt_tokens, models=job.models)
    return min(reward, quoted - prices.FEE)
