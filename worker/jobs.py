"""A job as it comes from the broker, and what goes back for it."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.engine.interface import Finished, GenerationRequest
from worker.formatting import OutputFormat
from worker.text_parameters import BadPayloadError, read_format, read_request

State = Literal["ok", "faulted", "released"]


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one text; its id is the broker's, and the engine's request has the same."""

    id: str
    model: str
    request: GenerationRequest
    output_format: OutputFormat

    @property
    def seed(self) -> int:
        """The seed it runs with."""
        return self.request.seed


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A job whose payload makes no sense to us: it is handed back as faulted."""

    id: str
    message: str


def read_pop(answer: dict[str, Any]) -> list[Job | UnreadableJob]:
    """The jobs in a pop's answer, whatever JSON it is; none when there is nothing to do.

    What has no usable id is passed over: nothing could be told of it. A job that is there twice counts once.
    """
    several = answer.get("jobs")
    # AI Horde's own answers have no `jobs`, only one payload for one id or, in a batch, for several.
    if isinstance(several, list) and several:
        found = {_id(job.get("id")): job for job in several if isinstance(job, dict)}
    elif own := _id(answer.get("id")):
        ids = answer.get("ids")
        batch = [usable for each in ids if (usable := _id(each))] if isinstance(ids, list) else []
        found = dict.fromkeys(batch or [own], answer)
    else:
        found = {}
    return [_read_job(job_id, job) for job_id, job in found.items() if job_id]


def _id(value: Any) -> str:
    """A job's id as text; empty if it is none."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63:
        return str(value)
    return value if isinstance(value, str) else ""


def _read_job(job_id: str, answer: dict[str, Any]) -> Job | UnreadableJob:
    payload = answer.get("payload")
    if not isinstance(payload, dict):
        return UnreadableJob(job_id, "payload is not an object")
    seed = answer.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        seed = secrets.randbits(31)
    model = answer.get("model")
    try:
        request = read_request(job_id, payload, seed, cache_salt=_cache_salt(answer))
        return Job(job_id, model if isinstance(model, str) else "", request, read_format(payload))
    except BadPayloadError as error:
        return UnreadableJob(job_id, str(error))


def _cache_salt(answer: dict[str, Any]) -> str:
    """The tenant's salt. From a broker that names none, only the jobs of one request may share what is computed: nobody
    can tell from the time a prompt takes what others have asked."""
    salt = answer.get("cache_salt")
    return f"tenant {salt}" if isinstance(salt, str) and salt else f"job {_id(answer.get('id'))}"


@dataclass(frozen=True, slots=True)
class Submission:
    """What is told to the broker about a job; `idempotency_key` stays the same however often it is sent."""

    job_id: str
    state: State
    generation: str
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    idempotency_key: str = field(default_factory=lambda: str(uuid.uuid4()))

    def body(self) -> dict[str, Any]:
        """The JSON body of the submit call."""
        return {
            "id": self.job_id,
            "generation": self.generation,
            "state": self.state,
            "seed": self.seed,
            "gen_metadata": [],
            **self.extra,
        }


def stored(job: Job, text: str, token_ids: list[int], finished: Finished) -> Submission:
    """The result of a job.

    Token ids go along only where they decode to exactly this text: not after a clean-up, nor when a stop string cut
    the text within a token.
    """
    shown = job.output_format.apply(text)
    extra: dict[str, Any] = {
        "finish_reason": finished.reason.value,
        "usage": {"prompt_tokens": finished.prompt_tokens, "completion_tokens": finished.completion_tokens},
    }
    if shown == text and finished.stop_string is None:
        extra["token_ids"] = token_ids
    return Submission(job.id, "ok", shown, job.seed, extra)


def faulted(job_id: str, seed: int = 0) -> Submission:
    """A job that failed here; the broker tries it elsewhere."""
    return Submission(job_id, "faulted", "faulted", seed)


def released(job_id: str, seed: int = 0) -> Submission:
    """A job handed back without blame."""
    return Submission(job_id, "released", "", seed)
