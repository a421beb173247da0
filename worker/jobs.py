"""A job as it comes from the broker, and what goes back for it."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from worker.broker import Kind
from worker.chat_parameters import NotServedError, read_chat
from worker.engine.interface import Finished, GenerationRequest
from worker.formatting import OutputFormat
from worker.job_output import JobOutput
from worker.text_parameters import BadPayloadError, read_format, read_request

State = Literal["ok", "faulted", "released", "rejected"]
# Why a request can be at fault, in the broker's words.
ErrorCode = Literal["context_length_exceeded", "unsupported_parameter"]
_AS_IT_IS = OutputFormat()


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt at one text; its id is the broker's, and the engine's request has the same.

    Args:
        messages: to be rendered into the prompt by the model's own template; None: the request has its prompt.
        attached: a client waits on an open connection, so that its output is told as it comes.
        prefix_text: text of the request's `prefix`, as the client has it.
        model_revision, tokenizer_revision: what the job is meant for; None: whatever goes by the model's name.
    """

    id: str
    kind: Kind
    model: str
    request: GenerationRequest
    output_format: OutputFormat = _AS_IT_IS
    messages: list[dict[str, Any]] | None = None
    attached: bool = False
    prefix_text: str = ""
    model_revision: str | None = None
    tokenizer_revision: str | None = None

    @property
    def seed(self) -> int:
        """The seed it runs with."""
        return self.request.seed

    @property
    def streams(self) -> bool:
        """Whether its output is told as it comes; not where a clean-up may still change what has been shown."""
        return self.attached and self.output_format == _AS_IT_IS

    def new_output(self) -> JobOutput:
        """To be filled by one run of it."""
        return JobOutput(self.request.prefix, self.prefix_text, with_logprobs=self.request.logprobs is not None)


@dataclass(frozen=True, slots=True)
class UnreadableJob:
    """A job that cannot begin: its payload makes no sense, or, with an `error_code`, asks for what is not served."""

    id: str
    kind: Kind
    message: str
    error_code: ErrorCode | None = None


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
    kind: Kind = "chat" if answer.get("kind") == "chat" else "text"
    payload = answer.get("payload")
    if not isinstance(payload, dict):
        return UnreadableJob(job_id, kind, "payload is not an object")
    seed = answer.get("seed")
    if isinstance(seed, bool) or not isinstance(seed, int):
        seed = secrets.randbits(31)
    try:
        if kind == "chat":
            return _read_chat_job(job_id, answer, payload, seed)
        request = read_request(job_id, payload, seed, cache_salt=_cache_salt(answer))
        return Job(
            job_id,
            "text",
            _text(answer, "model"),
            request,
            output_format=read_format(payload),
            attached=answer.get("attached") is True,
        )
    except BadPayloadError as error:
        return UnreadableJob(job_id, kind, str(error))
    except NotServedError as error:
        return UnreadableJob(job_id, kind, str(error), "unsupported_parameter")


def _read_chat_job(job_id: str, answer: dict[str, Any], payload: dict[str, Any], seed: int) -> Job:
    chat = read_chat(job_id, payload, seed, cache_salt=_cache_salt(answer), prefix=answer.get("prefix_token_ids"))
    return Job(
        job_id,
        "chat",
        _text(answer, "model"),
        chat.request,
        messages=chat.messages,
        attached=answer.get("attached") is True,
        prefix_text=_text(answer, "prefix_text") if chat.request.prefix else "",
        model_revision=_text(answer, "model_revision") or None,
        tokenizer_revision=_text(answer, "tokenizer_revision") or None,
    )


def _text(answer: dict[str, Any], field: str) -> str:
    value = answer.get(field)
    return value if isinstance(value, str) else ""


def _cache_salt(answer: dict[str, Any]) -> str:
    """The tenant's salt. From a broker that names none, only the jobs of one request may share what is computed: nobody
    can tell from the time a prompt takes what others have asked."""
    salt = answer.get("cache_salt")
    return f"tenant {salt}" if isinstance(salt, str) and salt else f"job {_id(answer.get('id'))}"


@dataclass(frozen=True, slots=True)
class Submission:
    """What is told to the broker about a job; `idempotency_key` stays the same however often it is sent."""

    job_id: str
    kind: Kind
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


def stored(job: Job, output: JobOutput, finished: Finished) -> Submission:
    """The result of a job.

    A chat goes with all its ids, and the broker sees how they come to this text. For other text ids go along only where
    they decode to exactly this: not after a clean-up, nor when a stop string cut the text within a token.
    """
    text = output.text
    shown = job.output_format.apply(text)
    usage = {"prompt_tokens": finished.prompt_tokens, "completion_tokens": finished.completion_tokens}
    extra: dict[str, Any] = {"finish_reason": finished.reason.value, "usage": usage}
    if job.kind == "chat":
        usage["cached_tokens"] = finished.cached_tokens
        if (logprobs := output.logprobs) is not None:
            extra["logprobs"] = logprobs
    if job.kind == "chat" or (shown == text and finished.stop_string is None):
        extra["token_ids"] = output.token_ids
    return Submission(job.id, job.kind, "ok", shown, job.seed, extra)


def faulted(job_id: str, kind: Kind, seed: int = 0) -> Submission:
    """A job that failed here; the broker tries it elsewhere."""
    return Submission(job_id, kind, "faulted", "faulted", seed)


def released(job: Job) -> Submission:
    """A job handed back without blame."""
    return Submission(job.id, job.kind, "released", "", job.seed)


def rejected(job_id: str, kind: Kind, code: ErrorCode, seed: int = 0) -> Submission:
    """A job whose request is itself at fault, so that nobody else need try it."""
    return Submission(job_id, kind, "rejected", "", seed, {"error_code": code})
