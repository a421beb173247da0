"""The sandbox that chat templates run in: Jinja's own, with a budget, and with the few names that templates of models use."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from horde.registry.template_filters import allowed_filters, counted_tests
from horde.registry.template_guards import (
    MOST_CHARACTERS,
    budget_of_this,
    check_braces,
    check_operation,
    check_text_method,
    made,
    step,
    too_large,
)

# What can be asked of plain data: reading it, and making text of text. The methods that are not here make much of little, or
# lead to data of other kinds.
_METHODS: dict[type[Any], frozenset[str]] = {
    str: frozenset(
        (
            *(
                "capitalize",
                "casefold",
                "count",
                "endswith",
                "find",
                "format",
                "format_map",
                "index",
                "isalnum",
                "isalpha",
            ),
            *(
                "isascii",
                "isdecimal",
                "isdigit",
                "isidentifier",
                "islower",
                "isnumeric",
                "isprintable",
                "isspace",
                "istitle",
            ),
            *(
                "isupper",
                "join",
                "lower",
                "lstrip",
                "partition",
                "removeprefix",
                "removesuffix",
                "replace",
                "rfind",
                "rindex",
            ),
            *(
                "rpartition",
                "rsplit",
                "rstrip",
                "split",
                "splitlines",
                "startswith",
                "strip",
                "swapcase",
                "title",
                "upper",
            ),
        )
    ),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
}
_LONGEST_NAME = 256
# Jinja's own, which it hands along with each call in a loop or a block.
_OF_THE_PLACE = frozenset({"_loop_vars", "_block_vars"})


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


class _Guarding(NodeTransformer):
    """Puts calls of the environment's guards into a tree: where time may go, and where a value comes into being."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """`a ~ b`."""
        self.generic_visit(node)
        return _call("joined", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """`a == b`, `a in b`: nothing is made, and it may take a while."""
        self.generic_visit(node)
        node.expr = _call("passed", [node.expr], node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """`a[1:]`; any other item goes by way of the environment as it is."""
        self.generic_visit(node)
        return _call("passed", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        """`[a, b]`."""
        self.generic_visit(node)
        return _call("passed", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        """`{a: b}`."""
        self.generic_visit(node)
        return _call("passed", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        """`(a, b)`, unless values are put into its names."""
        self.generic_visit(node)
        return _call("passed", [node], node) if node.ctx == "load" else node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """A loop, which may pass over all that it is given."""
        self.generic_visit(node)
        node.iter = _call("passed", [cast("nodes.Expr", node.iter)], node)
        return node


def _call(name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(at.lineno)
    return call


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget for time and text."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    # The next three are called by a template itself, see `_parse`.
    def round(self, characters: int) -> str:
        """A loop or a macro begins to write that much text of its own."""
        step()
        if (budget := budget_of_this.get()) is not None:
            budget.write(characters)
        return ""

    def passed(self, value: Any) -> Any:
        """A value on its way."""
        step()
        return made(value)

    def joined(self, *parts: Any) -> str:
        """`a ~ b`."""
        step()
        texts: list[str] = []
        size = 0
        for part in parts:
            texts.append(str(part))
            size += len(texts[-1])
            if size > MOST_CHARACTERS:
                too_large()
        return str(made("".join(texts)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The tree of a template, with calls of the guards in it."""
        tree = super()._parse(source, name, filename)
        for macro in tree.find_all(nodes.Macro):
            if len(macro.name) > _LONGEST_NAME:
                raise jinja2.TemplateSyntaxError("a macro has a very long name", macro.lineno)
        _Guarding().visit(tree)
        for block in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.FilterBlock))):
            body: list[nodes.Node] = block.body  # type: ignore[attr-defined]
            own = sum(len(data.data) for node in body for data in _all(node, nodes.TemplateData))
            begins = nodes.ExprStmt(_call("round", [nodes.Const(own)], block))
            body.insert(0, begins.set_lineno(block.lineno))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may have it: of plain data, a few methods only."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        for kind, methods in _METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return type(obj).__module__ != "builtins"

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, unless that would be huge."""
        step()
        check_operation(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`."""
        step()
        return made(super().getitem(obj, argument))

    # Odd names, as in the base class: a template's own arguments may have any other.
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805, PYI063
        """A call, unless it would make something huge."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        step()
        made((*args, *(value for name, value in kwargs.items() if name not in _OF_THE_PLACE)))
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
            check_braces(text, (*args, *kwargs.values()))
            return plain(*args, **kwargs)

        return wrapped


def _all(node: nodes.Node, kind: type[Any]) -> Iterable[Any]:
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


@jinja2.pass_context
def _written(_: Any, value: Any) -> str:
    """A value that is written where it stands. It wants the context, so that nothing is written before there is one."""
    step()
    text = str(value)
    if (budget := budget_of_this.get()) is not None:
        budget.write(len(text))
    return text


def _raise_exception(message: Any) -> NoReturn:
    raise RefusedError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 100 or re.search(r"\d{3}", form):
        too_large()
    # Without a zone, as models' own tokenizers have it.
    return dt.datetime.now().strftime(form)  # noqa: DTZ005


class _Namespace(Namespace):
    """`namespace(...)`. What it holds may change after it was put into something, so it is not written out."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _NewDict:
    """`dict(...)` in a template: makes dicts and leads nowhere else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


def _make_environment() -> jinja2.Environment:
    sandbox = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        # Nothing of a template is worked out while it is compiled.
        optimized=False,
        finalize=_written,
        extensions=[loopcontrols, _Generation],
        cache_size=0,
    )
    sandbox.filters = allowed_filters(sandbox.filters)
    sandbox.tests.update(counted_tests(sandbox.tests))
    sandbox.globals = {
        "range": sandbox.globals["range"],
        "namespace": _Namespace,
        "cycler": sandbox.globals["cycler"],
        "joiner": sandbox.globals["joiner"],
        "dict": _NewDict(),
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    return sandbox


environment = _make_environment()
