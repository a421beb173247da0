"""What a played worker makes of one job: tokens, the text they show so far, and the pieces of both that a post carries.

Tokens are bytes, as in `tiny_tokenizer`. A story follows from the seed alone, so whoever continues a slot behind its prefix
goes on where the worker before stopped.
"""

from __future__ import annotations

import codecs
import functools
import random
import time
from collections.abc import Iterable
from typing import Any

from tests.support import tiny_tokenizer

_WORDS = [
    "a bee",
    "sees",
    "the sea",
    "and",
    "no ship",
    "on it;",
    "Käse,",
    "ça va,",
    "你好,",
    "😀",
    "tea",
    "or coffee",
    "for us",
]
_STORY_BYTES = 8192


@functools.lru_cache(maxsize=256)
def story(seed: int) -> bytes:
    """Words that follow from a seed, some of them in characters of several bytes."""
    words = random.Random(seed).choices(_WORDS, k=_STORY_BYTES // 2)
    return " ".join(words).encode()[:_STORY_BYTES]


class PlayedJob:
    """One job, as popped, and its output; offsets count from the slot's first token and character.

    Attributes:
        token_ids: all of the slot so far, prefix included.
        accepted: tokens that the broker said it holds.
        stopped: why the broker wants no more of it, once it said so.
        ended: by a stop string of the order; nothing is added then.
    """

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.id = str(told["id"])
        self.kind = str(told["kind"])
        self.slot = int(told["slot"])
        self.seed = int(told["seed"])
        self.attached = bool(told["attached"])
        self.payload: dict[str, Any] = told["payload"]
        self.prefix: list[int] = list(told.get("prefix_token_ids") or [])
        self.token_ids = list(self.prefix)
        self.accepted = len(self.prefix)
        self.stopped: str | None = None
        self.ended = False
        self.taken_at = time.monotonic()
        self._stops: list[str] = list(self.payload.get("stop") or [])
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = self._decode(self.prefix)
        prefix_text = str(told.get("prefix_text") or "")
        assert self._whole.startswith(prefix_text), f"the prefix {self.prefix} does not show {prefix_text!r}"
        # Characters shown after each token, from the prefix on.
        self._shown = [len(prefix_text)]

    @property
    def max_new_tokens(self) -> int:
        """How many tokens the slot may have, prefix included."""
        return int(self.payload["max_new_tokens"])

    @property
    def text(self) -> str:
        """What is shown so far."""
        return self._whole[: self._shown[-1]]

    def say(self, added: str | Iterable[int], *, lag: int = 0) -> None:
        """Add tokens; the last `lag` characters, or what may become a stop string, are shown by a later token."""
        ids = tiny_tokenizer.encode(added) if isinstance(added, str) else list(added)
        texts = [self._decode([token_id]) for token_id in ids]
        most_shown = len(self._whole) + sum(map(len, texts)) - lag
        for token_id, text in zip(ids, texts, strict=True):
            if self.ended:
                return
            self.token_ids.append(token_id)
            self._whole += text
            self._shown.append(max(self._shown[-1], min(self._certain(), most_shown)))

    def write(self, count: int) -> None:
        """Add the next tokens of the story, no more than were ordered."""
        first = len(self.token_ids)
        self.say(story(self.seed)[first : min(first + count, self.max_new_tokens)])

    def piece(self, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Tokens and text for a post: from what the broker holds, or from `first`, up to all, or `last`."""
        first = self.accepted if first is None else first
        last = len(self.token_ids) if last is None else last
        begin, end = self._shown_after(first), self._shown_after(last)
        piece = {
            "offset": first,
            "token_ids": self.token_ids[first:last],
            "text": self._whole[begin:end],
            "text_offset": begin,
        }
        return piece | ({"logprobs": self.logprobs(first, last)} if self.wants_logprobs else {})

    @property
    def wants_logprobs(self) -> bool:
        """Whether the order asked for them."""
        return self.payload.get("logprobs") is not None

    def logprobs(self, first: int, last: int) -> list[Any]:
        """An entry for each token: it and its neighbours by number, less and less likely."""
        count = int(self.payload["logprobs"])
        return [
            [token_id, -0.5, [[(token_id + place) % 256, -0.5 - place] for place in range(count)]]
            for token_id in self.token_ids[first:last]
        ]

    def result(self) -> dict[str, Any]:
        """What a submit carries: everything of the slot, with what was held back and no stop string."""
        result: dict[str, Any] = {
            "generation": self.text if self.ended else self._whole,
            "token_ids": self.token_ids,
            "seed": self.seed,
            "usage": {
                "prompt_tokens": int(self.payload.get("prompt_tokens", 0)),
                "completion_tokens": len(self.token_ids),
                "cached_tokens": 0,
            },
        }
        if self.wants_logprobs:
            result["logprobs"] = self.logprobs(len(self.prefix), len(self.token_ids))
        return result

    def _decode(self, token_ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(token_id for token_id in token_ids if token_id < tiny_tokenizer.END))

    def _certain(self) -> int:
        """Characters that no stop string can take back; sets `ended` where one is complete."""
        found = [place for stop in self._stops if (place := self._whole.find(stop, self._shown[-1])) >= 0]
        if found:
            self.ended = True
            return min(found)
        longest = max(
            (size for stop in self._stops for size in range(1, len(stop)) if self._whole.endswith(stop[:size])),
            default=0,
        )
        return len(self._whole) - longest

    def _shown_after(self, tokens: int) -> int:
        return self._shown[tokens - len(self.prefix)]
