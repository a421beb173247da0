"""Answers as a worker makes them, step by step, and what a client of `/v1` is told of each step, as chunks and as a whole.

What is told is written down here in full, so that a field that comes, goes or changes its place is seen.
"""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support import tiny_tokenizer
from tests.support.chat import CHAT, COMPLETIONS
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker

PROMPT = "Hello"
Act = Callable[[PlayedWorker, Sequence[PlayedJob]], object]


@dataclass(frozen=True)
class Piece:
    """A delta; `ids` are those of its tokens, where log-probabilities were asked for."""

    text: str
    slot: int = 0
    ids: Sequence[int] | None = None


@dataclass(frozen=True)
class End:
    """A finish reason."""

    reason: str
    slot: int = 0


@dataclass(frozen=True)
class Step:
    """What a worker does with its jobs, by slot, and what is told of it."""

    act: Act
    told: tuple[Piece | End, ...] = ()


@dataclass(frozen=True)
class Scene:
    """One answer.

    Attributes:
        tokens: of all choices.
        asked: fields of the order that are to differ.
        logprobs: how many likely tokens to tell beside each.
    """

    name: str
    tokens: int
    steps: tuple[Step, ...]
    asked: dict[str, Any] = field(default_factory=dict)
    logprobs: int | None = None

    @property
    def n(self) -> int:
        """How many choices it has."""
        return int(self.asked.get("n", 1))

    @property
    def told(self) -> list[Piece | End]:
        """All that is told, in order."""
        return [told for step in self.steps for told in step.told]

    def fields(self, path: str) -> dict[str, Any]:
        """The order's fields, but for its prompt and model."""
        if self.logprobs is None:
            return dict(self.asked)
        shown = {"logprobs": self.logprobs}
        return self.asked | (shown if path == COMPLETIONS else {"logprobs": True, "top_logprobs": self.logprobs})

    def take(self, worker: PlayedWorker) -> list[PlayedJob]:
        """The scene's jobs, by slot."""
        jobs = worker.pop(wait=10, slots=self.n)
        assert len(jobs) == self.n, f"{len(jobs)} jobs of {self.n} came"
        return sorted(jobs, key=lambda job: job.slot)

    def play(self, worker: PlayedWorker) -> None:
        """Take the jobs and go through all steps, at once."""
        jobs = self.take(worker)
        for step in self.steps:
            step.act(worker, jobs)


def say(added: str | Sequence[int], *told: str, slot: int = 0, lag: int = 0, logprobs: bool = False) -> Step:
    """Post more; told is just this, of a text, unless said otherwise."""
    texts = told if told or not isinstance(added, str) else (added,)
    ids = (tiny_tokenizer.encode(added) if isinstance(added, str) else added) if logprobs else None
    return Step(
        lambda worker, jobs: worker.say(jobs[slot], added, lag=lag), tuple(Piece(text, slot, ids) for text in texts)
    )


def hold_back(added: str | Sequence[int]) -> Step:
    """Post tokens that show nothing yet."""
    return Step(lambda worker, jobs: worker.say(jobs[0], added))


def finish(reason: str, *told: str, added: str = "", slot: int = 0, **fields: Any) -> Step:
    """Submit, with what was never posted."""

    def act(worker: PlayedWorker, jobs: Sequence[PlayedJob]) -> None:
        jobs[slot].say(added)
        worker.finish(jobs[slot], reason, **fields)

    return Step(act, (*(Piece(text, slot) for text in told), End(reason, slot)))


def _post_both(worker: PlayedWorker, jobs: Sequence[PlayedJob]) -> None:
    jobs[0].say("nt")
    jobs[1].say("Bear")
    worker.post(jobs[1], jobs[0])


def _finish_with_an_empty_line(worker: PlayedWorker, jobs: Sequence[PlayedJob]) -> None:
    jobs[0].say("\n\n")
    worker.finish(jobs[0])


def _censor(worker: PlayedWorker, jobs: Sequence[PlayedJob]) -> None:
    worker.submit(jobs[0], **jobs[0].result() | {"generation": "", "state": "censored", "finish_reason": "stop"})


def _send(*pieces: tuple[int, int, int], told: str) -> Step:
    """Send these pieces of `SENT` one by one: first and last token of each, and how many the broker holds then."""

    def act(worker: PlayedWorker, jobs: Sequence[PlayedJob]) -> None:
        job = jobs[0]
        job.say("" if job.token_ids else SENT)
        for first, last, held in pieces:
            reply = worker.send({"id": job.id, "state": "decode", **job.piece(first, last)})
            assert [entry["accepted"] for entry in reply.body["jobs"]] == [held], reply

    return Step(act, (Piece(told),))


SENT = "Hello, wörld"
FAMILY = "👨‍👩‍👧"
_FAMILY = FAMILY.encode()

SCENES = [
    Scene("it stops by itself", 18, (say("Hé"), say("llo"), say(" wörld 🐝"), finish("stop"))),
    Scene("the end comes with the result", 5, (say("Hel"), finish("stop", "lo", added="lo"))),
    Scene("nothing is posted before the result", 5, (finish("stop", "Hello", added="Hello"),)),
    Scene(
        "a stop string comes in three posts",
        7,
        (say("abc E", "abc "), hold_back("N"), hold_back("D, and more"), finish("stop")),
        {"stop": ["END"]},
    ),
    Scene(
        "what might have been a stop string is none",
        9,
        (say("abc EN", "abc "), say("x", "ENx"), hold_back("E"), finish("stop", "EN", added="N")),
        {"stop": ["END", "never"]},
    ),
    Scene("all tokens are used up", 5, (say("Hel"), say("lo"), finish("length")), {"max_tokens": 5}),
    Scene("the text ends where its tokens do", 5, (say("Hello"), finish("stop")), {"max_tokens": 6}),
    Scene(
        "the last token completes a stop string",
        7,
        (say("abc EN", "abc "), finish("stop", added="D")),
        {"max_tokens": 7, "stop": ["END"]},
    ),
    Scene("the first token ends it", 0, (finish("stop"),)),
    Scene("the first token ends one of two", 2, (say("Hi", slot=1), finish("stop"), finish("stop", slot=1)), {"n": 2}),
    Scene(
        "three choices alternate",
        15,
        (
            say("A", slot=0),
            say("Cat", slot=2),
            Step(_post_both, (Piece("nt", 0), Piece("Bear", 1))),
            finish("stop", slot=2),
            say("s", slot=1),
            finish("length", " ...", added=" ...", slot=0),
            finish("stop", slot=1),
        ),
        {"n": 3},
    ),
    Scene(
        "log-probabilities are told beside the tokens",
        8,
        (
            say("né", logprobs=True),
            # The tokens are there, and the text of them is not yet.
            say("e!", "", lag=2, logprobs=True),
            Step(lambda worker, jobs: worker.say(jobs[0], "?", lag=0), (Piece("e!?", ids=b"?"),)),
            Step(_finish_with_an_empty_line, (Piece("\n\n", ids=b"\n\n"), End("stop"))),
        ),
        logprobs=2,
    ),
    Scene(
        "a character comes in two posts",
        17,
        (
            hold_back(b"\xf0\x9f"),
            say(b"\x98\x80A", "😀A"),
            hold_back(b"\xe4\xbd"),
            say(b"\xa0 \xf0\x9f\x91", "你 "),
            say(b"\x8d!", "👍!"),
            say(b"\xef\xbf\xbd", "\ufffd"),
            finish("stop"),
        ),
    ),
    Scene(
        "a family comes byte by byte",
        18,
        (
            *(hold_back(_FAMILY[at : at + 1]) for at in range(3)),
            say(_FAMILY[3:4], FAMILY[0]),
            say(_FAMILY[4:12], FAMILY[1:3]),
            hold_back(_FAMILY[12:13]),
            say(_FAMILY[13:18], FAMILY[3:5]),
            finish("stop"),
        ),
    ),
    Scene(
        "the last character is cut off",
        4,
        (say(b"Hi\xf0\x9f", "Hi"), finish("length")),
        {"max_tokens": 4},
    ),
    Scene(
        "the last character is shown as what is left of it",
        4,
        (say(b"Hi\xf0\x9f", "Hi"), finish("length", "\ufffd", generation="Hi\ufffd")),
        {"max_tokens": 4},
    ),
    Scene("an answer is withheld", 0, (Step(_censor, (End("content_filter"),)),)),
    Scene(
        "posts come late, twice and in any order",
        13,
        (
            # What lies behind a gap is not taken, and what is there already changes nothing.
            _send((9, 13, 0), (3, 9, 0), (0, 5, 5), told="Hello"),
            _send((0, 5, 5), (9, 13, 5), (3, 9, 9), told=", w"),
            _send((0, 5, 9), (3, 9, 9), (9, 13, 13), (9, 13, 13), told="örld"),
            finish("stop"),
        ),
    ),
]


class Told:
    """What a client is told in a scene, field by field, once it is known when and as what.

    Args:
        request_id: behind the dash of the answer's id.
        created: when, in seconds since the epoch.
    """

    def __init__(self, scene: Scene, path: str, request_id: str, created: int) -> None:
        self._scene, self._path = scene, path
        self._begun = path == COMPLETIONS
        self._logprobs = _Logprobs(path, scene.logprobs)
        self._head = {
            "id": f"{'cmpl-' if path == COMPLETIONS else 'chatcmpl-'}{request_id}",
            "created": created,
            "model": tiny_tokenizer.MODEL,
            "system_fingerprint": tiny_tokenizer.MODEL_REVISION,
        }

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens, as the tokenizer counts them."""
        text = PROMPT if self._path == COMPLETIONS else tiny_tokenizer.render([{"role": "user", "content": PROMPT}])
        prompt = len(tiny_tokenizer.encode(text))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._scene.tokens,
            "total_tokens": prompt + self._scene.tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def chunks(self, told: Sequence[Piece | End]) -> Iterator[dict[str, Any]]:
        """The chunks of what is told next, with `usage` null."""
        for one in told:
            if not self._begun:
                self._begun = True
                for slot in range(self._scene.n):
                    yield self._chunk(slot, delta={"role": "assistant", "content": ""})
            if isinstance(one, End):
                shown: dict[str, Any] = {"text": ""} if self._path == COMPLETIONS else {"delta": {}}
                yield self._chunk(one.slot, finish_reason=one.reason, **shown)
            else:
                shown = {"text": one.text} if self._path == COMPLETIONS else {"delta": {"content": one.text}}
                yield self._chunk(one.slot, logprobs=self._logprobs.of(one), **shown)

    def last_chunk(self) -> dict[str, Any]:
        """The one with the usage."""
        return self._head | {"object": self._chunk_object, "choices": [], "usage": self.usage}

    def whole(self) -> dict[str, Any]:
        """The answer that is no stream."""
        kind = "text_completion" if self._path == COMPLETIONS else "chat.completion"
        choices = [self._choice(slot) for slot in range(self._scene.n)]
        return self._head | {"object": kind, "choices": choices, "usage": self.usage}

    @property
    def _chunk_object(self) -> str:
        return "text_completion" if self._path == COMPLETIONS else "chat.completion.chunk"

    def _chunk(self, slot: int, **shown: Any) -> dict[str, Any]:
        choice = {"index": slot, "logprobs": None, "finish_reason": None, **shown}
        return self._head | {"object": self._chunk_object, "choices": [choice], "usage": None}

    def _choice(self, slot: int) -> dict[str, Any]:
        mine = [one for one in self._scene.told if one.slot == slot]
        pieces = [one for one in mine if isinstance(one, Piece)]
        (reason,) = (one.reason for one in mine if isinstance(one, End))
        ids = [token_id for piece in pieces for token_id in piece.ids or ()]
        text = "".join(piece.text for piece in pieces)
        return {
            "index": slot,
            "logprobs": None if self._scene.logprobs is None else self._logprobs.of(Piece(text, slot, ids)),
            "finish_reason": reason,
        } | (
            {"text": text}
            if self._path == COMPLETIONS
            else {"message": {"role": "assistant", "content": text, "refusal": None}}
        )


class _Logprobs:
    """Log-probabilities as `PlayedJob` makes them up, in the shape of chats or the older one of completions."""

    def __init__(self, path: str, count: int | None) -> None:
        self._path, self._count = path, count
        self._decoders: dict[int, codecs.IncrementalDecoder] = defaultdict(
            lambda: codecs.getincrementaldecoder("utf-8")("replace")
        )
        self._characters: dict[int, int] = defaultdict(int)

    def of(self, piece: Piece) -> dict[str, Any] | None:
        if piece.ids is None:
            return None
        if self._path == CHAT:
            content = [self._entry(token_id, 0) | {"top_logprobs": self._likely(token_id)} for token_id in piece.ids]
            return {"content": content, "refusal": None}
        return {
            "text_offset": [self._pass_over(piece.slot, token_id) for token_id in piece.ids],
            "token_logprobs": [-0.5 for _ in piece.ids],
            "tokens": [_shown(token_id) for token_id in piece.ids],
            "top_logprobs": [
                # Of those that read the same the likeliest.
                {likely["token"]: likely["logprob"] for likely in reversed(self._likely(token_id))}
                for token_id in piece.ids
            ],
        }

    def _likely(self, token_id: int) -> list[dict[str, Any]]:
        return [self._entry(token_id, place) for place in range(self._count or 0)]

    @staticmethod
    def _entry(token_id: int, place: int) -> dict[str, Any]:
        likely = (token_id + place) % 256
        return {"token": _shown(likely), "logprob": -0.5 - place, "bytes": [likely]}

    def _pass_over(self, slot: int, token_id: int) -> int:
        begin = self._characters[slot]
        self._characters[slot] += len(self._decoders[slot].decode(bytes([token_id])))
        return begin


def _shown(token_id: int) -> str:
    return bytes([token_id]).decode("utf-8", "replace")
