"""What has to be on an account before a long answer is begun: AI Horde's rule, so that the idle poor wait and do not pay.

Answers up to a limit need nothing. The limit falls as the queue grows beyond the horde's threads.
"""

from __future__ import annotations

import math

from horde.kudos.prices import HUNDREDTHS, billions_of_parameters

MOST_FREE_TOKENS, LEAST_FREE_TOKENS = 512, 256
WITHOUT_A_SIZE = 20 * HUNDREDTHS


def free_tokens(*, threads: int, queued: int) -> int:
    """Tokens that anybody may ask for: 512 + 5 x threads - 0.9 x queued requests, within 256 and 512."""
    return max(LEAST_FREE_TOKENS, min(MOST_FREE_TOKENS, math.floor(512 + 5 * threads - 0.9 * queued)))


def upfront(*, max_length: int, model: str, n: int) -> int:
    """Hundredths of a kudos to have for n longer answers: tokens x billions of parameters / 21; 20 kudos each for a model whose
    name tells no size."""
    billions = billions_of_parameters(model)
    if billions is None:
        return WITHOUT_A_SIZE * n
    return math.ceil(max_length * billions / 21 * HUNDREDTHS) * n
