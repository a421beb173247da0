"""A chat job's payload, read into what an engine understands. A broker has checked what clients sent, so a field that
cannot be read is the job's fault; one that asks for what is not served here is told apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.engine.interface import GenerationRequest, Sampling
from worker.text_parameters import BadPayloadError, finite_number

_LARGEST_INTEGER = 2**31
_NUMBERS = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
# What a chat can ask for that nothing here does.
_NOT_SERVED = ("tools", "response_format")


class NotServedError(Exception):
    """The job asks for something that this worker does not do; the message names the field."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What to generate; `messages`, where given, are to be rendered by the model's own template into the prompt."""

    request: GenerationRequest
    messages: list[dict[str, Any]] | None


def read_chat(
    job_id: str, payload: dict[str, Any], seed: int, *, cache_salt: str = "", prefix: Any = None
) -> ChatRequest:
    """The engine's request for a pop's `payload`; `prefix`: ids that the slot has already.

    Raises:
        BadPayloadError: a field has a wrong type or a senseless value.
        NotServedError: a field asks for what is not served.
    """
    for field in _NOT_SERVED:
        if payload.get(field) is not None:
            raise NotServedError(f"{field} is not served here")
    prompt, messages = _prompt(payload)
    request = GenerationRequest(
        id=job_id,
        prompt=prompt,
        max_new_tokens=_count(payload, "max_new_tokens", least=1),
        seed=seed,
        stop=_stop_strings(payload),
        prefix=_ids("prefix_token_ids", [] if prefix is None else prefix),
        logprobs=None if payload.get("logprobs") is None else _count(payload, "logprobs", least=0),
        cache_salt=cache_salt,
        sampling=_sampling(_given(payload, "sampling", {})),
    )
    return ChatRequest(request, messages)


def _prompt(payload: dict[str, Any]) -> tuple[str | tuple[int, ...], list[dict[str, Any]] | None]:
    """Token ids are what the broker has counted, so they go before all else; then messages; then text as it is."""
    if (ids := payload.get("prompt_token_ids")) is not None:
        return _ids("prompt_token_ids", ids), None
    if (messages := payload.get("messages")) is not None:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadPayloadError("messages is not a list of objects")
        return "", messages
    text = payload.get("prompt")
    if not isinstance(text, str):
        raise BadPayloadError("prompt is not a string, and there are no messages and no prompt_token_ids")
    return text, None


def _sampling(given: Any) -> Sampling:
    if not isinstance(given, dict):
        raise BadPayloadError("sampling is not an object")
    settings: dict[str, Any] = {
        name: finite_number(given[name], name) for name in _NUMBERS if given.get(name) is not None
    }
    if given.get("top_k") is not None:
        settings["top_k"] = _count(given, "top_k", least=0)
    return Sampling(**settings, logit_bias=_logit_bias(_given(given, "logit_bias", {})))


def _logit_bias(given: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, dict):
        raise BadPayloadError("logit_bias is not an object")
    try:
        return tuple((int(token_id), finite_number(given[token_id], token_id)) for token_id in given)
    except ValueError as error:
        raise BadPayloadError("logit_bias has a key that is no token id") from error


def _given(values: dict[str, Any], field: str, default: Any) -> Any:
    value = values.get(field)
    return default if value is None else value


def _stop_strings(payload: dict[str, Any]) -> tuple[str, ...]:
    stop = _given(payload, "stop", [])
    if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise BadPayloadError("stop is not a list of strings")
    return tuple(stop)


def _ids(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise BadPayloadError(f"{field} is not a list of token ids")
    return tuple(value)


def _count(values: dict[str, Any], field: str, *, least: int) -> int:
    value = values.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST_INTEGER:
        raise BadPayloadError(f"{field} is not an integer of at least {least}")
    return value
