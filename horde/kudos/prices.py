"""What a text costs its client and earns its worker's owner.

The formulas are AI Horde's (published in its API's behaviour): reward = tokens x size bonus x billions of parameters / 125 x
context multiplier, and the client pays one kudos more than the worker earns. Nobody checks here what a model is, and anybody
can name one: the size that a name tells is believed of trusted owners only, and for all others the model counts as unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

HUNDREDTHS = 100
FEE = 1 * HUNDREDTHS  # per delivered result, kept by the horde
TEXT_TAX = 1 * HUNDREDTHS  # per request
LEAST_TOKENS = 20
CHARACTERS_PER_TOKEN = 4
MOST_ESTIMATED = 1024  # of a prompt's tokens, where its tokenizer is not known

VALIDATED_BRIDGES = ("AI Horde Worker", "KoboldCppEmbedWorker", "TabbyAPI", "Horde Worker")
VALIDATED_BACKENDS = ("aphrodite~oai", "aphrodite~kai")
UNVALIDATED_SHARE = 0.3
UNKNOWN_MODEL_PER_TOKEN = 0.027
# A name that tells of more is not believed of anybody: a reward must fit its column.
MOST_BILLIONS = 2000

_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)\s?([bBmM])(?![A-Za-z0-9])")


def billions_of_parameters(model: str) -> float | None:
    """The size a model's name tells (`7b`, `8x7B` counts its last factor, `135M`); None when it tells none or more than 2,000."""
    found = _SIZE.findall(model.replace("x", " "))
    if not found:
        return None
    number, unit = found[-1]
    size = float(number) / (1000 if unit in "mM" else 1)
    return size if 0 < size <= MOST_BILLIONS else None


def estimate_tokens(text: str) -> int:
    """Tokens of a text where no tokenizer is known: characters / 4, rounded up."""
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def believed_prompt(tokens: int, *, estimated: bool) -> int:
    """Tokens of a chat's prompt that its price goes by: nobody earns more for a length that nobody has counted."""
    return min(tokens, MOST_ESTIMATED) if estimated else tokens


def context_multiplier(prompt_tokens: int) -> float:
    """1.2 + 2.2 ^ log2(prompt tokens / 1024), within 0.1 and 30."""
    return min(30.0, max(0.1, 1.2 + math.pow(2.2, math.log2(max(1, prompt_tokens) / 1024))))


def text_reward(*, tokens: int, prompt_tokens: int, model: str, trusted: bool, validated: bool) -> int:
    """Hundredths of a kudos that a worker's owner earns for one text of `tokens` tokens.

    Args:
        trusted: whether the owner is. Of anybody else no size is believed: an unknown model earns the trusted 0.027 a token,
            and others the context multiplier alone, once.
    """
    billions = billions_of_parameters(model) if trusted else None
    context = context_multiplier(prompt_tokens)
    if billions is None:
        kudos = tokens * context * UNKNOWN_MODEL_PER_TOKEN if trusted else context
    else:
        kudos = tokens * math.pow(max(billions, 13) / 13, 0.2) * billions / 125 * context
    if not validated:
        kudos *= UNVALIDATED_SHARE
    return round(kudos * HUNDREDTHS)


def is_validated(bridge_agent: str) -> bool:
    """Whether a bridge agent (`name:version:url`) names a backend whose sampling is known to be faithful."""
    name = bridge_agent.split(":", 1)[0]
    return name in VALIDATED_BRIDGES or name.endswith(VALIDATED_BACKENDS)


def estimate_text_price(*, n: int, max_length: int, prompt: str, models: Iterable[str]) -> int:
    """Hundredths that n texts cost at most, tax included; for dry runs and the 202.

    It is what they cost if all are of full length and each comes from whoever earns most for it: a trusted owner's validated
    worker with the largest of `models`, or, where that is more (for a short text of a small model), a stranger's worker, which
    is paid by the job. For an order that names its models, give those: no delivery then costs more. For one that takes any
    model, give those that trusted owners serve at this moment; a larger one that comes later may cost more.
    """
    return TEXT_TAX + n * most_per_text(max_length=max_length, prompt_tokens=estimate_tokens(prompt), models=models)


def most_per_text(*, max_length: int, prompt_tokens: int, models: Iterable[str]) -> int:
    """Hundredths that one text of any of `models` can cost, fee included."""

    def reward(model: str, *, trusted: bool) -> int:
        return text_reward(tokens=max_length, prompt_tokens=prompt_tokens, model=model, trusted=trusted, validated=True)

    # The second one does not depend on the model.
    return FEE + max(reward("", trusted=False), *(reward(model, trusted=True) for model in set(models) or {""}))
