"""The messages of a chat, as either door takes them: what is malformed, and what no model here can read.

Messages leave as chat templates know them: `role` (system, user or assistant), `content` (text), and `name` where it
was given. Nothing of a message is dropped in silence.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, Field, WithJsonSchema

from horde.errors import ErrorCode, HordeError, bad_request

MOST_MESSAGES = 2000
LONGEST_NAME = 255
# What stands between two text parts of one message.
BETWEEN_PARTS = "\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Roles and fields of a conversation with tools, which changes what a model should say: refused, not left out.
_TOOL_ROLES = frozenset({"tool", "function"})
_TOOL_FIELDS = ("tool_calls", "tool_call_id", "function_call", "audio", "refusal")
_OTHER_PARTS = frozenset(
    {
        "image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "input_video",
        "file", "input_file", "refusal", "tool_use", "tool_result",
    }
)  # fmt: skip


def read_messages(given: Any) -> list[dict[str, Any]]:
    """The messages of a JSON body, ready for a chat template.

    Args:
        given: what stands under `messages`; None when nothing does.

    Raises:
        HordeError: 400 `invalid_request`, or `unsupported_parameter` for what no model here can read. Its one field
            is `messages`, or the place within it (`messages.3.content`).
    """
    if given is None:
        _refuse("messages", "is required: a list of at least one message")
    if not isinstance(given, list):
        _refuse("messages", "has to be a list of messages")
    if not given:
        _refuse("messages", "has to hold at least one message")
    if len(given) > MOST_MESSAGES:
        _refuse("messages", f"has more than {MOST_MESSAGES} messages")
    return [_message(message, f"messages.{index}") for index, message in enumerate(given)]


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        _refuse(place, "has to be an object with `role` and `content`")
    role = _role(given.get("role"), f"{place}.role")
    for field in _TOOL_FIELDS:
        if given.get(field) not in (None, []):
            _refuse_kind(f"{place}.{field}")
    content = given.get("content")
    if content is None and role == "assistant":
        content = ""
    message: dict[str, Any] = {"role": role, "content": _content(content, f"{place}.content")}
    name = given.get("name")
    if name is not None:
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME:
            _refuse(f"{place}.name", f"has to be a string of 1 to {LONGEST_NAME} characters")
        message["name"] = name
    return message


def _role(given: Any, place: str) -> str:
    if given in _TOOL_ROLES if isinstance(given, str) else False:
        _refuse_kind(place)
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        _refuse(place, "has to be one of system, developer, user, assistant")
    return role


def _content(given: Any, place: str) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        _refuse(place, "has to be a string or a list of text parts")
    if not given:
        _refuse(place, "has to hold at least one part")
    return BETWEEN_PARTS.join(_text_of(part, f"{place}.{index}") for index, part in enumerate(given))


def _text_of(part: Any, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in _OTHER_PARTS:
        _refuse_kind(f"{place}.type", f"{kind} parts are not supported: the models here read text only")
    if kind != "text":
        _refuse(place, 'has to be an object of type "text"')
    text = part.get("text")
    if not isinstance(text, str):
        _refuse(f"{place}.text", "has to be a string")
    return text


def _refuse(place: str, said: str) -> NoReturn:
    refusal = bad_request(f"`{place}` {said}.")
    refusal.errors = {place: said}
    raise refusal


def _refuse_kind(place: str, said: str = "is not supported by the models here") -> NoReturn:
    raise HordeError(ErrorCode.UNSUPPORTED_PARAMETER, f"`{place}`: {said}.", rc="BadRequest", errors={place: said})


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}
_SCHEMA = {
    "title": "Messages",
    "type": "array",
    "minItems": 1,
    "maxItems": MOST_MESSAGES,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": _CONTENT,
            "name": {"type": "string", "minLength": 1, "maxLength": LONGEST_NAME},
        },
    },
}

# A field of a body: refusals go up as they are, so that what is wrong with the messages is said before anything else.
Messages = Annotated[
    list[dict[str, Any]], BeforeValidator(read_messages), WithJsonSchema(_SCHEMA), Field(validate_default=True)
]
