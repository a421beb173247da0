"""Checked input: field types, the words of a refusal, and the adapter that makes APIFlask use them.

Types follow JSON Schema as AI Horde applies it: `5.0` and `1e2` are integers, `true`, `"5"` and `5.5` are not; an
explicit null is refused where a value is expected; keys that nobody documented are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, TypeVar

from annotated_types import GroupedMetadata
from apiflask.schema_adapters import registry
from apiflask.schema_adapters.pydantic import PydanticAdapter
from flask import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema
from werkzeug.exceptions import RequestEntityTooLarge, UnsupportedMediaType

from horde.api.errors import InvalidInputError
from horde.api.strict_json import LONGEST_PATH, MOST_CONTAINERS, MOST_ERRORS, read_repaired, read_strict

MAX_BODY_BYTES = 1 << 20
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1

Item = TypeVar("Item")


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticCustomError("null", "null is not allowed here")
    return value


# Stands last in `Annotated[int, Field(strict=True, ...), WHOLE]`, so that the bounds stay bounds of an integer.
WHOLE = BeforeValidator(_whole)
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# A field that may be left out, and is None then, but may not be given as null.
Absent = Annotated[Item | None, BeforeValidator(_not_null)]


# Every list of a body is bounded by one of these two. Checking ends with the first bad item: a key is looked at only
# after the body, so nobody may make thousands of bad items cost thousands of messages.
def at_most(items: int) -> Any:
    """Refuse a list of more items."""
    return Field(max_length=items, fail_fast=True)


def first(items: int) -> GroupedMetadata:
    """Keep that many items of a list and do not look at the others."""
    return _First(items)


@dataclass(frozen=True)
class _First(GroupedMetadata):
    items: int

    def __iter__(self) -> Iterator[Any]:
        yield Field(fail_fast=True)
        yield BeforeValidator(lambda value: value[: self.items] if isinstance(value, list) else value)


class Body(BaseModel):
    """A JSON body of a client.

    Attributes:
        strip_nul_from: fields whose NUL characters are dropped instead of refused.
    """

    model_config = ConfigDict(strict=True, extra="ignore")
    strip_nul_from: ClassVar[tuple[str, ...]] = ()


class LateBody(Body):
    """A body that is described like any other, and that its handler reads by itself, once it knows who sends it."""


class WorkerResult(Body):
    """A JSON body of a worker that holds its output: text that cannot be stored is repaired instead of refused.

    Attributes:
        most_containers: arrays and objects that it may hold.
    """

    most_containers: ClassVar[int] = MOST_CONTAINERS


class Query(BaseModel):
    """A query string: everything is text, so numbers are read from text."""

    model_config = ConfigDict(extra="ignore")


class Answer(BaseModel):
    """The shape of an answer, for the API's description. Answers are built by hand, and tests hold them to this."""

    model_config = ConfigDict(extra="forbid")


def list_of(model: type[Answer]) -> Any:
    """A list of `model` as an answer; APIFlask takes it, and its annotations do not say so."""
    return list[model]  # type: ignore[valid-type]


def read_body(request: Request, model: type[BaseModel]) -> BaseModel:
    """The request's body as `model`.

    Raises:
        UnsupportedMediaType: the content type is not JSON.
        RequestEntityTooLarge: more than `MAX_BODY_BYTES`.
        BodyError: not strict JSON.
        InvalidInputError: not of this shape; names the fields.
    """
    if not request.is_json:
        raise UnsupportedMediaType
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise RequestEntityTooLarge
    body = request.get_data(cache=False)
    if len(body) > MAX_BODY_BYTES:
        raise RequestEntityTooLarge
    if issubclass(model, WorkerResult):
        parsed = read_repaired(body, most_containers=model.most_containers)
    else:
        parsed = read_strict(body, strip_nul_from=model.strip_nul_from if issubclass(model, Body) else ())
    return _validate(model, parsed, "in the JSON body")


def read_query(request: Request, model: type[BaseModel]) -> BaseModel:
    """The query string as `model`; of a repeated parameter the first counts."""
    given = request.args.to_dict()
    with_nul = islice((name for name, value in given.items() if "\x00" in value), MOST_ERRORS)
    errors = {name[:64].replace("\x00", ""): "must not contain NUL" for name in with_nul}
    if errors:
        raise InvalidInputError(errors)
    return _validate(model, given, "in the query string")


def _validate(model: type[BaseModel], given: Any, where: str) -> BaseModel:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise InvalidInputError(refusals(error, where)) from None


def refusals(error: ValidationError, where: str) -> dict[str, str]:
    """Dotted path -> what is wrong, the first fault of each of `MOST_ERRORS` fields, in the words of JSON Schema."""
    errors: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        if len(errors) >= MOST_ERRORS:
            break
        path = ".".join(str(part) for part in fault["loc"])[:LONGEST_PATH]
        context = fault.get("ctx", {})
        word = _WORDS.get(fault["type"])
        if fault["type"] == "missing":
            said = f"Missing required parameter {where}"
        elif word is not None:
            said = word(_shown(fault["input"]), context)
        else:
            said = fault["msg"]
        errors.setdefault(path, said)
    return errors


def _shown(value: Any) -> str:
    """A value as a refusal names it, by JSON's words; numbers only, so that no text of a user is repeated."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)[:40]
    kinds = {str: "the string", list: "the array", dict: "the object", type(None): "null"}
    return kinds.get(type(value), "the value")


def _wrong_type(name: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda value, _: f"{value} is not of type '{name}'"


_WORDS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "null": lambda value, _: f"{value} is not allowed here",
    "string_type": _wrong_type("string"),
    "int_type": _wrong_type("integer"),
    "int_from_float": _wrong_type("integer"),
    "float_type": _wrong_type("number"),
    "bool_type": _wrong_type("boolean"),
    "list_type": _wrong_type("array"),
    "dict_type": _wrong_type("object"),
    "model_type": _wrong_type("object"),
    "greater_than_equal": lambda value, limit: f"{value} is less than the minimum of {limit['ge']}",
    "greater_than": lambda value, limit: f"{value} is not greater than {limit['gt']}",
    "less_than_equal": lambda value, limit: f"{value} is greater than the maximum of {limit['le']}",
    "string_too_short": lambda value, limit: f"{value} is shorter than {limit['min_length']} characters",
    "string_too_long": lambda value, limit: f"{value} is longer than {limit['max_length']} characters",
    "too_long": lambda value, limit: f"{value} has more than {limit['max_length']} items",
    "too_short": lambda value, limit: f"{value} has fewer than {limit['min_length']} items",
    "literal_error": lambda value, limit: f"{value} is not one of {limit['expected']}",
    "finite_number": lambda value, _: f"{value} is not a finite number",
}


class _WireSchema(GenerateJsonSchema):
    """JSON Schema in which a field that may be left out is not shown as nullable."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        if self.mode == "validation":
            return self.generate_inner(schema["schema"])
        return super().nullable_schema(schema)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        found = super().default_schema(schema)
        if found.get("default", ...) is None:
            found.pop("default")
        return found


class WireAdapter(PydanticAdapter):
    """Reads input by `read_body` and `read_query`; describes answers as they are written, input as it is read."""

    def validate_input(self, request: Request, location: str, **_: Any) -> BaseModel:
        """The checked input of a route."""
        if issubclass(self.model_class, LateBody):
            return self.model_class.model_construct()
        if location == "json":
            return read_body(request, self.model_class)
        return read_query(request, self.model_class)

    def get_openapi_schema(self, **_: Any) -> dict[str, Any]:
        """JSON Schema, with references into the components of the API's description."""
        mode: JsonSchemaMode = "serialization" if issubclass(self.model_class, Answer) else "validation"
        return self.model_class.model_json_schema(
            ref_template=f"#/components/schemas/{self.get_schema_name()}.{{model}}",
            schema_generator=_WireSchema,
            mode=mode,
        )


# `input` picks its adapter when a handler is decorated, which is when a module of handlers is imported.
registry.register("pydantic", WireAdapter)
