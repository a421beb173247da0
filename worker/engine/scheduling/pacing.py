"""How many prompt tokens a step may hold, so that running texts do not stall for longer than a target.

The machine is learnt from the steps themselves: what decodes cost alone, and what a prompt token adds to that. Both
are medians over the last few steps, so that a single slow one changes nothing and a lasting change counts soon.
"""

from __future__ import annotations

from collections import deque
from statistics import median

# Odd, so that a median is one of the measured values; four outliers among nine are outvoted.
_WINDOW = 9


class PrefillPacer:
    """Feed it every step with `observe`; ask it with `limit`, which suits `Scheduler.prefill_limit`.

    Args:
        target_seconds: of a step in which texts are decoded.
        smallest: prompt tokens granted however long a step takes, so that prompts get on.
        largest: prompt tokens granted at most, and whenever nothing is decoded.

    Raises:
        ValueError: not 0 < target_seconds, or not 1 <= smallest <= largest.
    """

    def __init__(self, target_seconds: float, smallest: int, largest: int) -> None:
        if not target_seconds > 0:
            raise ValueError(f"a step takes more than {target_seconds} seconds")
        if not 1 <= smallest <= largest:
            raise ValueError(f"between {smallest} and {largest} tokens there is no choice")
        self._target = target_seconds
        self._smallest = smallest
        self._largest = largest
        # By the binary magnitude of the number of decodes.
        self._decode_seconds: dict[int, deque[float]] = {}
        self._mixed: deque[tuple[int, int, float]] = deque(maxlen=_WINDOW)

    def observe(self, prefill_tokens: int, decodes: int, seconds: float) -> None:
        """A step has computed so many tokens of prompts, and so many sequences' newest tokens."""
        if prefill_tokens >= self._smallest:
            self._mixed.append((prefill_tokens, decodes, seconds))
        elif prefill_tokens == 0 and decodes > 0:
            self._decode_seconds.setdefault(decodes.bit_length(), deque(maxlen=_WINDOW)).append(seconds)
        # Fewer than the smallest share tell more about what a step costs than about what a token costs.

    def limit(self, decodes: int) -> int:
        """Most prompt tokens to compute beside so many decodes."""
        if decodes == 0:
            return self._largest
        if not self._mixed:
            return self._smallest
        # Where the price of the decodes is not known yet it is in that of the tokens: too high at first, but right
        # once the limit has settled, because then both are measured where they are used.
        price = median(max(seconds - self._alone(beside), 0.0) / tokens for tokens, beside, seconds in self._mixed)
        left = self._target - self._alone(decodes)
        if left <= 0:
            return self._smallest
        if price * self._largest <= left:
            return self._largest
        return max(self._smallest, int(left / price))

    def _alone(self, decodes: int) -> float:
        """Seconds of a step of so many decodes and nothing else; 0 if there was none yet."""
        if decodes == 0 or not self._decode_seconds:
            return 0.0
        wanted = decodes.bit_length()
        nearest = min(self._decode_seconds, key=lambda magnitude: (abs(magnitude - wanted), -magnitude))
        return median(self._decode_seconds[nearest])
