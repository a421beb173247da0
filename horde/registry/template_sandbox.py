"""The sandbox that chat templates run in: Jinja's own, with a budget, and with the few names that templates of models use."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from horde.registry.template_guards import (
    budget_of_this,
    check_format,
    check_operation,
    check_text_method,
    guarded_filters,
    made,
    too_large,
    written,
)


class RefusedError(jinja2.TemplateError):
    """The template's own words to whoever wrote the messages."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; to a chat it is nothing."""

    tags = {"generation"}  # noqa: RUF012 the base class has it as an attribute of an instance

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes of what stands between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget for time and text."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def step(self, characters: int) -> str:
        """Called by the template itself, see `_parse`."""
        if (budget := budget_of_this.get()) is not None:
            budget.step(characters)
        return ""

    def joined(self, *parts: Any) -> str:
        """`a ~ b`."""
        texts = [str(part) for part in parts]
        check_text_method("", "join", (texts,))
        text = "".join(texts)
        made(text)
        return text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree of a template, in which each loop and macro counts its rounds, and each `~` what it makes."""
        tree = super()._parse(source, name, filename)
        for block in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock))):
            body: list[nodes.Node] = block.body  # type: ignore[attr-defined]
            own = sum(len(data.data) for node in body for data in _all(node, nodes.TemplateData))
            body.insert(0, _statement(_call("step", [nodes.Const(own)]), block.lineno))
        for parent in list(_all(tree, nodes.Node)):
            _count_joins(parent)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, unless that would be huge."""
        check_operation(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`."""
        return made(super().getitem(obj, argument))

    # Odd names, as in the base class: a template's own arguments may have any other.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        """A call, unless it would make something huge."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = tuple(list(value) if isinstance(value, Iterator) else value for value in args)
            check_text_method(owner, getattr(__obj, "__name__", ""), (*args, *kwargs.values()))
        return made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"...".format` as the sandbox has it, unless it would make something huge."""
        plain = super().wrap_str_format(value)
        if plain is None:
            return None
        text = value.__self__

        def wrapped(*args: Any, **kwargs: Any) -> str:
            check_format(text, (*args, *kwargs.values()))
            return plain(*args, **kwargs)

        return wrapped


def _statement(expression: nodes.Expr, line: int) -> nodes.Node:
    return nodes.ExprStmt(expression).set_lineno(line)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _all(node: nodes.Node, kind: type[Any]) -> Iterable[Any]:
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _count_joins(parent: nodes.Node) -> None:
    """Put a call of `joined` for each `~` right below a node."""
    for field, value in parent.iter_fields():
        if isinstance(value, nodes.Concat):
            setattr(parent, field, _join(value))
        elif isinstance(value, list):
            value[:] = [_join(item) if isinstance(item, nodes.Concat) else item for item in value]


def _join(concat: nodes.Concat) -> nodes.Call:
    # It shares its list with the node that it stands for, whose own turn comes.
    call = _call("joined", concat.nodes)
    call.set_lineno(concat.lineno)
    return call


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3}", form):
        too_large()
    # Without a zone, as models' own tokenizers have it.
    return dt.datetime.now().strftime(form)  # noqa: DTZ005


class _NewDict:
    """`dict(...)` in a template: makes dicts and leads nowhere else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _make_environment() -> jinja2.Environment:
    sandbox = _Environment(
        trim_blocks=True, lstrip_blocks=True, finalize=written, extensions=[loopcontrols, _Generation], cache_size=0
    )
    sandbox.filters = guarded_filters(sandbox)
    sandbox.globals = {
        "range": sandbox.globals["range"],
        "namespace": sandbox.globals["namespace"],
        "cycler": sandbox.globals["cycler"],
        "joiner": sandbox.globals["joiner"],
        "dict": _NewDict(),
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return sandbox


environment = _make_environment()
