"""Chat templates are rendered as the models' own library renders them, and see no more than they are given."""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from typing import Any

import pytest

from horde.registry.templates import LONGEST_TEMPLATE, ChatTemplate, TemplateError, is_token_name
from horde.registry.tokenizers import canonical_form, load_canonical
from tests.support.template_families import (
    ALTERNATING,
    CHATML,
    CHATS,
    DATED,
    FAMILIES,
    HEADERS,
    TOKENS,
    refusal,
    render,
    said,
)


def render_by_library(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What the models' library makes of it; None where it raises."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    try:
        (text,), _ = render_jinja_template(
            [given], chat_template=source, add_generation_prompt=options.get("add_generation_prompt", True), **TOKENS
        )
    except (jinja2.TemplateError, TypeError):
        return None
    return str(text)


def same_by_library(source: str, messages: list[dict[str, Any]], **options: Any) -> bool:
    """Whether both render the same or both refuse; a date may change between the two."""
    for _ in range(2):
        expected = render_by_library(source, messages, **options)
        try:
            found = render(source, messages, **options)
        except TemplateError:
            found = None
        if found == expected:
            return True
    return False


@pytest.mark.needs("model")
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_is_rendered_as_the_models_library_does(family: str, chat: str) -> None:
    for prompt in (True, False):
        assert same_by_library(FAMILIES[family], CHATS[chat], add_generation_prompt=prompt)


@pytest.mark.needs("model")
def test_a_real_model_reads_the_same_ids_whoever_rendered_and_counted() -> None:
    import torch
    from transformers import AutoTokenizer

    from worker.models.demo import DEMO_MODEL, find_gguf
    from worker.models.gguf import unpacked_directory
    from worker.models.revision import tokenizer_body

    tokenizer = AutoTokenizer.from_pretrained(unpacked_directory(find_gguf(), DEMO_MODEL, torch.float32))
    body = tokenizer_body(tokenizer)
    assert canonical_form(body) == body
    chat = load_canonical(body)
    for messages in CHATS.values():
        if any(message["content"] is None for message in messages):
            continue
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert chat.render(messages) == text
        assert chat.encode(text, special=False) == tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


def test_each_family_renders_something_of_its_own() -> None:
    """The comparison above would be content with two that always fail."""
    assert render(CHATML).endswith("user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert render(HEADERS, CHATS["system"]).startswith(
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    )
    assert render(ALTERNATING, CHATS["assistant last"]) == "<s> [INST] Hello [/INST] Hi</s>"
    assert f"{dt.date.today():%Y}." in render(DATED, CHATS["letters"])  # noqa: DTZ011 the template's day


def test_a_template_refuses_in_its_own_words_and_at_most_a_line_of_them() -> None:
    assert refusal(ALTERNATING, CHATS["two users"]) == "Roles have to take turns: user, assistant, user"
    assert refusal("{{ raise_exception('a\nb\x00' ~ 'c' * 1000) }}") == "a b " + "c" * 196
    assert refusal("{{ raise_exception('') }}") == "the chat template refuses these messages"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("{{ messages[0].content.secret.more }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[7].role }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% include 'other' %}", "TypeError"),
    ],
)
def test_any_other_failure_is_named_and_quotes_nothing(source: str, kind: str) -> None:
    message = refusal(source, said("user: a secret"))
    assert message == f"the chat template fails at these messages ({kind})"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% for a in b %}", "{{ 'a'|nofilter }}", "{% unknown %}", "{% break %}"]
)
def test_what_is_no_template_is_refused_when_it_is_made(source: str) -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate(source, {})


def test_a_template_has_a_length() -> None:
    ChatTemplate("x" * LONGEST_TEMPLATE, {})
    with pytest.raises(TemplateError, match="longer than"):
        ChatTemplate("x" * (LONGEST_TEMPLATE + 1), {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['sys'] }}",
        "{{ (messages|map(attribute='__class__')|first).mro() }}",
        "{{ ('{0.__class__.__mro__}').format(messages) }}",
        "{{ strftime_now.__globals__ }}",
        "{{ dict.__class__.__base__ }}",
        "{{ self._TemplateReference__context.environment }}",
    ],
)
def test_a_template_sees_only_what_it_was_given(source: str) -> None:
    """Refused, or nothing at all comes out."""
    text = ""
    with contextlib.suppress(TemplateError):
        text = render(source)
    assert text == ""


def test_messages_are_as_they_were_afterwards() -> None:
    messages = [{"role": "user", "content": "Hi", "name": None}]
    render(DATED, messages)
    assert messages == [{"role": "user", "content": "Hi", "name": None}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ [[1, 2], {'a': (3, none)}] == [[1, 2], {'a': (3, none)}] }}", "True"),
        ("{{ ['b', 'a', 'b']|unique|sort(reverse=true)|join(',') }}{{ 'abc'|reverse }}{{ [1, 2]|max }}", "b,acba2"),
        ("{{ messages|map(attribute='role')|map('upper')|list }}", "['USER']"),
        ("{{ messages|rejectattr('role', 'in', ['system', 'tool'])|list|count }}", "1"),
        ("{% for k, v in {'b': 1, 'a': 2}|dictsort %}{{ k }}{{ v }}{% endfor %}", "a2b1"),
        ("{% for k, v in messages[0].items() %}{{ k }};{% endfor %}{{ messages[0].get('x', 'y') }}", "role;content;y"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\n') }}{{ ' x '.strip() }}", "bx"),
        ("{{ 'x'|default('y') }}{{ z|default('y') }}{{ '7'|int + 1 }}{{ 'a b'|title }}{{ -3|abs }}", "xy8A B3"),
        ("{% set a, b = 1, 2 %}{% set c = [a, b][1:] %}{{ c }}{{ (a, b)[::-1] }}", "[2](2, 1)"),
        ("{{ '%5.2f|%-4s|%(a)s'|replace('%(a)s', '') % (3.14159, 'x') }}", " 3.14|x   |"),
        ("{{ '{:>6.2f}|{x[0]}'.format(2.5, x=['y']) }}{{ '%(a)s 100%%' % {'a': 'b'} }}", "  2.50|yb 100%"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ {'b': [1], 'a': 2}|tojson(indent=2, sort_keys=true) }}", '{\n  "a": 2,\n  "b": [\n    1\n  ]\n}'),
        # It may change after it was weighed.
        ("{% set a = namespace(x=0) %}{% set b = [a] * 2 %}{% set a.x = b %}{{ b }}", "[<Namespace>, <Namespace>]"),
    ],
)  # fmt: skip
def test_what_templates_of_models_do_is_done(source: str, text: str) -> None:
    assert render(source) == text


def test_markdown_and_percent_signs_are_no_widths() -> None:
    assert (
        render("{{ '**%s** 100%% %5d' % ('a', 1) }}{{ '**{}** {{}} {:>5}'.format('a', 1) }}")
        == "**a** 100%     1**a** {}     1"
    )


def test_many_threads_render_at_once_each_its_own() -> None:
    template = ChatTemplate(CHATML, TOKENS)
    barrier, wrong = threading.Barrier(8), []

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(50):
            text = f"{number}-{turn}"
            if f"user\n{text}<|im_end|>" not in template.render(said(f"user: {text}")):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_special_token_hides_nothing_that_a_template_is_given() -> None:
    assert is_token_name("bos_token")
    assert is_token_name("image2_start_token")
    for name in ("messages", "tools", "_token", "Bos_token", "bos_token ", "bos-token", "", "a" * 80 + "_token"):
        assert not is_token_name(name)
