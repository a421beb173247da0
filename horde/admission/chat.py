"""A chat on its way in: who could serve it, its prompt rendered and counted, and whether both fit; before any request exists."""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.admission.text import RESERVED_MODEL, new_seeds
from horde.db.database import Transaction
from horde.errors import ErrorCode, HordeError, bad_request
from horde.kudos.prices import estimate_tokens
from horde.registry.chat_tokenizer import ChatTokenizer
from horde.registry.models import Serving, Target, best_target, is_known_model, serving_chat
from horde.registry.templates import TemplateError

# Without `max_tokens` no more than this is generated.
USUAL_MOST_TOKENS = 1024
NO_CAPACITY_RETRY = 10.0
# More than the tokens of any long text have on average.
MOST_CHARACTERS_PER_TOKEN = 32
# Log-probabilities of one answer, the likeliest alternatives included: a worker's result has to fit its call's body.
MOST_LOGPROBS = 30_000


@dataclass(frozen=True)
class ChatOrder:
    """What a client asks for, as the API parsed it.

    Attributes:
        models: names of which any will do; one is picked.
        messages: as a chat template takes them; None for a completion.
        prompt: of a completion: text or token ids, continued as it is.
        max_tokens: None: what fits, within `USUAL_MOST_TOKENS`.
        sampling: those parameters that were given, by the names of a chat job's payload.
        logprobs: None, or how many of the likeliest tokens to tell beside each.
        address: the client's, for the scope of the anonymous account's idempotency keys.
        route: where it came in: keys are one route's.
        body_hash: of all that changes the result.
    """

    models: list[str]
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    model_revision: str | None = None
    n: int = 1
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    logprobs: int | None = None
    deadline_seconds: float | None = None
    worker_ids: list[uuid.UUID] = field(default_factory=list)
    worker_blacklist: bool = False
    trusted_workers: bool = False
    slow_workers: bool = True
    dry_run: bool = False
    client_agent: str = "unknown:0:unknown"
    address: str = ""
    idempotency_key: str | None = None
    body_hash: str = ""
    route: str = "chat/async"


@dataclass(frozen=True)
class Prompt:
    """A prompt as a worker will read it.

    Attributes:
        text: rendered; None for token ids, and where the worker has to render it.
        token_ids: None where the broker has no tokenizer for the model.
        tokens: how many; characters / 4 where `estimated`.
    """

    text: str | None
    token_ids: list[int] | None
    tokens: int
    estimated: bool


def choose_target(tx: Transaction, order: ChatOrder, user_id: int) -> Target:
    """The first of the order's models that somebody serves whom it allows, at the revision of the highest standing.

    Raises:
        HordeError: 404 `model_not_found` when none of them was ever announced, 503 `no_capacity` when nobody serves one now.
    """
    for model in order.models:
        if model == RESERVED_MODEL:
            continue
        serving = serving_chat(tx, model, user_id=user_id)
        target = best_target(model, (worker for worker in serving if _allows(order, worker)))
        if target is not None:
            return target
    name = order.models[0] if order.models else ""
    if not any(is_known_model(tx, model) for model in order.models if model != RESERVED_MODEL):
        raise HordeError(
            ErrorCode.MODEL_NOT_FOUND,
            f"The model {name[:255]!r} does not exist here, or no worker has ever served it for chat.",
            rc="ModelNotFound",
            errors={"model": "not known"},
        )
    raise no_capacity(f"No worker online serves {name[:255]!r} as it was asked for; try again later.")


def no_capacity(message: str, *, retry_after: float = NO_CAPACITY_RETRY) -> HordeError:
    """The 503 for work that nobody could do now."""
    return HordeError(ErrorCode.NO_CAPACITY, message, rc="NoCapacity", retry_after=retry_after)


def _allows(order: ChatOrder, worker: Serving) -> bool:
    if order.model_revision not in {None, worker.manifest.model_revision}:
        return False
    if order.worker_ids and (worker.worker_id in order.worker_ids) == order.worker_blacklist:
        return False
    return (worker.trusted or not order.trusted_workers) and (order.slow_workers or not worker.is_slow)


def read_prompt(order: ChatOrder, tokenizer: ChatTokenizer | None, context_length: int) -> Prompt:
    """The prompt, rendered and counted by the model's own tokenizer where the broker has it.

    A text far longer than any context of `context_length` tokens is not counted, which could take seconds.

    Raises:
        HordeError: 400 that names `messages`, `prompt` or another field that the tokenizer does not know.
    """
    if tokenizer is None:
        return _estimate(order)
    _check_ids("logit_bias", [int(token) for token in order.sampling.get("logit_bias", {})], tokenizer.vocabulary)
    if isinstance(order.prompt, list):
        _check_ids("prompt", order.prompt, tokenizer.vocabulary)
        return Prompt(None, order.prompt, len(order.prompt), estimated=False)
    if order.messages is None:
        text, special = order.prompt or "", True
    else:
        text, special = _render(order.messages, tokenizer), False
    least = len(text) // MOST_CHARACTERS_PER_TOKEN
    if least >= context_length:
        raise _too_long(order, Prompt(None, None, least, estimated=True), context_length)
    ids = tokenizer.encode(text, special=special)
    if not ids:
        # A model continues what it has read: without a token there is nothing to begin with.
        raise bad_request("Nothing is left of this for the model to read.", field=_content(order))
    return Prompt(text, ids, len(ids), estimated=False)


def _render(messages: list[dict[str, Any]], tokenizer: ChatTokenizer) -> str:
    if not tokenizer.has_template:
        raise HordeError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            "This model has no chat template; it can only complete a prompt.",
            rc="BadRequest",
            errors={"messages": "the model has no chat template"},
        )
    try:
        return tokenizer.render(messages)
    except TemplateError as error:
        raise bad_request(f"The model's chat template refuses these messages: {error}", field="messages") from error


def _estimate(order: ChatOrder) -> Prompt:
    if order.logprobs is not None:
        raise HordeError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            "The tokenizer of this model is not known here, so its tokens cannot be shown.",
            rc="BadRequest",
            errors={"logprobs": "the model's tokenizer is not known here"},
        )
    if isinstance(order.prompt, list):
        return Prompt(None, order.prompt, len(order.prompt), estimated=True)
    if order.messages is None:
        return Prompt(order.prompt, None, estimate_tokens(order.prompt or ""), estimated=True)
    characters = "".join(str(message.get("content") or "") for message in order.messages)
    return Prompt(None, None, max(1, estimate_tokens(characters)), estimated=True)


def _check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocabulary:
            raise bad_request(f"{name} names token {token_id}; this model has {vocabulary}.", field=name)


def fit(order: ChatOrder, prompt: Prompt, target: Target, *, most: int | None = None) -> int:
    """Tokens to generate at most; with `prompt` they fit at least one of the target's workers.

    Args:
        most: of an order that names no `max_tokens`, no more than this.

    Raises:
        HordeError: 400 `context_length_exceeded` with both numbers; 400 `unsupported_parameter` where every worker stops earlier.
    """
    context = target.context_length
    most_shown = None if order.logprobs is None else MOST_LOGPROBS // (order.logprobs + 1)
    # An estimate decides nothing: the worker counts, and says so if it does not fit.
    tokens = min(prompt.tokens, context - 1) if prompt.estimated else prompt.tokens
    if order.max_tokens is None:
        usual = min(limit for limit in (USUAL_MOST_TOKENS, most, most_shown) if limit is not None)
        room = max(min(worker.context_length - tokens, worker.max_length, usual) for worker in target.sized_by)
        if room < 1:
            raise _too_long(order, prompt, context)
        return room
    wanted = order.max_tokens
    if tokens + wanted > context and not prompt.estimated:
        raise _too_long(order, prompt, context)
    needed = context_needed(prompt, wanted, target)
    longest = max(worker.max_length for worker in target.sized_by if needed <= worker.context_length)
    if most_shown is not None and wanted > most_shown:
        raise bad_request(
            f"With {order.logprobs} alternatives a token, log-probabilities are shown for {most_shown} tokens at most.",
            field="max_tokens",
        )
    if wanted > longest:
        raise HordeError(
            ErrorCode.UNSUPPORTED_PARAMETER,
            f"No worker online generates more than {longest} tokens of this model with such a prompt.",
            rc="BadRequest",
            errors={"max_tokens": f"is greater than the {longest} tokens that a worker online generates"},
        )
    return wanted


def context_needed(prompt: Prompt, max_new_tokens: int, target: Target) -> int:
    """Tokens of context that a worker must have to be offered this."""
    needed = prompt.tokens + max_new_tokens
    return min(needed, target.context_length) if prompt.estimated else needed


def projected_blocks(prompt: Prompt, max_new_tokens: int, target: Target) -> int:
    """Cache blocks that one answer takes at its full length."""
    return math.ceil((prompt.tokens + max_new_tokens) / max(1, target.manifest.block_size))


def _content(order: ChatOrder) -> str:
    return "prompt" if order.messages is None else "messages"


def _too_long(order: ChatOrder, prompt: Prompt, context: int) -> HordeError:
    wanted = order.max_tokens
    # Where the prompt by itself leaves room, fewer tokens would do.
    if wanted is not None and prompt.tokens < context:
        field, fault = "max_tokens", f"{wanted} tokens after {prompt.tokens} exceed the context of {context}"
    else:
        field, fault = _content(order), f"{prompt.tokens} tokens exceed the context of {context}"
    asked = f"{'at least ' if prompt.estimated else ''}{prompt.tokens} prompt tokens" + (
        f" and max_tokens of {wanted}" if wanted is not None else ""
    )
    return HordeError(
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        f"This model's maximum context length is {context} tokens, and this is {asked}"
        + (f" ({prompt.tokens + wanted} in all)." if wanted is not None else ", which leaves no room for an answer."),
        rc="TokenOverflow",
        errors={field: fault},
    )


def seeds_of(order: ChatOrder) -> list[int]:
    """A seed for each slot. Of a given one the first slot has it as it is and the others have what follows from it."""
    if order.seed is None:
        return new_seeds(order.n)
    return [order.seed, *(_seed_after(order.seed, index) for index in range(1, order.n))]


def _seed_after(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
