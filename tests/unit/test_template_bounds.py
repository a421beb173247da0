"""Chat templates that ask for too much are stopped, and the longest honest ones are not."""

from __future__ import annotations

import json
import threading
import time

import pytest

from horde.registry import templates
from horde.registry.template_sandbox import environment
from tests.support.limited import run_limited
from tests.support.template_families import (
    CHATML,
    CHATS,
    FAMILIES,
    refusal,
    render,
    said,
)

DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = %s %}{% endfor %}{{ ns.x|length }}"
GREEDY = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ (2 ** 64) ** 64 * 10 ** 60 }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a\t'.expandtabs(10**9) }}",
    "{{ 'a\t'.expandtabs(tabsize=10**9) }}",
    "{{ ('a' * 4000000).replace('a', 'b' * 4000000) }}",
    "{{ 'a' * 4000000|replace('a', 'b' * 4000000) }}",
    "{{ 'a'.translate({97: 'b' * 4000000}) }}",
    "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "{{ ('a' * 100000).join(range(100000)|map('string')) }}",
    "{{ ['b'] * 100000|join('a' * 100000) }}",
    "{{ ('a\n' * 100000)|indent(100000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ ('%s' * 100000) % (('a' * 4000000,) * 100000) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ ('{0}' * 100000).format('a' * 4000000) }}",
    "{{ ('{0[0]}' * 100000).format(['a' * 4000000]) }}",
    "{{ ('{x}' * 100000).format_map({'x': 'a' * 4000000}) }}",
    "{{ strftime_now('%999999999d') }}",
    "{{ strftime_now('%d' * 1000) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ range(10**9)|list }}",
    "{% for i in range(90000) %}" + "y" * 1000 + "{% endfor %}",
    "{% set x %}{% for i in range(90000) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    DOUBLING.replace("%s", "ns.x + ns.x"),
    DOUBLING.replace("%s", "ns.x ~ ns.x"),
    DOUBLING.replace("%s", "ns.x * 2"),
    DOUBLING.replace("%s", "[ns.x, ns.x]|join"),
    DOUBLING.replace("%s", "'%s%s' % (ns.x, ns.x)"),
    DOUBLING.replace("{% set ns.x = %s %}", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "{% set ns = namespace(x=['a' * 4000000]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [ns.x[0][1:]] %}{% endfor %}",
    "{% set ns = namespace(x=['a' * 4000000]) %}{% for i in range(99999) %}{% set ns.x = ns.x + [ns.x[0]|upper] %}{% endfor %}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_what_asks_for_too_much_is_stopped_before_it_has_it(source: str) -> None:
    began = time.thread_time()
    assert refusal(source).startswith(("the chat template was stopped", "the chat template fails")), source
    assert time.thread_time() - began < 2


NESTED = (
    "{% set ns = namespace(x=['aaaaaaaa'], y=['aaaaaaaa']) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = (
    NESTED.replace("['aaaaaaaa']", "'aaaaaaaa'")
    .replace("[ns.x, ns.x]", "(ns.x, ns.x)")
    .replace("[ns.y, ns.y]", "(ns.y, ns.y)")
)
SHALLOW = NESTED.replace("range(40)", "range(17)")
LONG = "{% set a = 'a' * 4000000 %}"
LISTS = "{% set r = range(100000)|list %}"
# What one operation makes much of, or takes long for; several of them in C, where nothing stops it.
BOMBS = {
    "slice": "{{ (messages|slice(10**9)|list)|length }}",
    "slice of a constant": "{{ ([1]|slice(1000000000)|list)|length }}",
    "batch": "{{ (messages|batch(500000000, 'x')|list)|length }}",
    "batch of a constant": "{{ ([1]|batch(500000000, 'x')|list)|length }}",
    "round": "{{ (messages|length)|round(300000000, 'ceil') }}",
    "round of a constant": "{{ 1|round(300000000, 'ceil') }}",
    "nested, as JSON": NESTED + "{{ ns.x|tojson }}",
    "nested, written": NESTED + "{{ ns.x }}",
    "nested, as a text": NESTED + "{{ (ns.x|string)|length }}",
    "nested, compared": NESTED + "{{ ns.x == ns.y }}",
    "nested, counted": NESTED + "{{ [ns.x].count(ns.y) }}",
    "nested, looked for": NESTED + "{{ ns.x in [ns.y] }}",
    "nested, joined": NESTED + "{{ ([ns.x] * 100)|join('')|length }}",
    "nested, put together": NESTED + "{{ (ns.x ~ ns.x)|length }}",
    "nested, formatted": NESTED + "{{ '{0}'.format(ns.x)|length }}",
    "nested, raised": NESTED + "{{ raise_exception(ns.x) }}",
    "nested tuples as a key": TUPLES + "{{ {ns.x: 1}|length }}",
    "nested tuples, made unique": TUPLES + "{{ [ns.x, ns.y]|unique|list|length }}",
    "nested a little, many times": SHALLOW + "{{ ([ns.x] * 100000)|tojson|length }}",
    "nested a little, compared many times": SHALLOW + "{{ ([ns.x] * 100000).count(ns.y) }}",
    "long texts as JSON": LONG + "{{ ([a] * 900)|tojson|length }}",
    "long texts by format": LONG + "{{ '{0}'.format([[a] * 900])|length }}",
    "long texts by percent": LONG + "{{ ('%s' % ([[a] * 900],))|length }}",
    "long texts joined": LONG + "{{ [a, a]|join|length }}",
    "long texts joined by name": LONG + "{% set k = {'k': a} %}{{ ([k] * 1000)|join(attribute='k')|length }}",
    "long texts between keys": LONG + "{{ a.join(dict(a=1, b=1, c=1))|length }}",
    "long texts between letters": LONG + "{{ a.join(a)|length }}",
    "long texts between values": LONG + "{{ [1, 2]|tojson(separators=(a, a))|length }}",
    "long texts in the arguments of a macro": LONG
    + "{% macro f() %}{{ varargs|string|length }}{% endmacro %}{{ f("
    + "a, " * 500
    + "a) }}",
    "long texts in a cycler": LONG + "{{ cycler(" + "a, " * 500 + "a).items|string|length }}",
    "long texts, one after another": LONG + "{{ " + "a ~ " * 2000 + "a }}",
    "lists sorted": LISTS + "{{ ([r] * 10**6)|map('sort')|list|length }}",
    "lists listed": LISTS + "{{ ([r] * 10**6)|map('list')|list|length }}",
    "lists reversed": LISTS + "{{ ([r] * 10**6)|map('reverse')|map('list')|list|length }}",
    "lists of lists, one after another": "{{ range(100000)|map('string')|map('list')|map('batch', 10**9)|list|length }}",
    "lists made of one range": "{% for i in range(100000) %}" + LISTS + "{% set x = r|sort|unique|list %}{% endfor %}",
    "titles": "{{ (['a ' * 2000000] * 10**6)|map('title')|list|length }}",
    "words": "{{ (['a ' * 2000000] * 10**6)|map('wordcount')|list|length }}",
    "a long title": "{{ ('a ' * 2000000)|title|length }}",
    "many sorted": "{{ (range(100000)|list * 10)|map('string')|sort|length }}",
    "groups": "{% set r = [{'a': 1}] * 1000 %}{% for i in range(100000) %}{{ r|groupby('a')|length }}{% endfor %}",
    "letters stripped of letters": "{{ ('a' * 4000000).strip('b' * 3000000 + 'a')|length }}",
    "letters trimmed of letters": "{{ ('a' * 4000000)|trim('b' * 3000000 + 'a') }}",
    "looked for from behind": "{{ ('a' * 4000000).rfind('a' * 1000000 + 'b' + 'a' * 1000000) }}",
    "split from behind": "{{ ('a' * 4000000).rsplit('a' * 1000000 + 'b' + 'a' * 1000000)|length }}",
    "indented lines of another kind": "{{ ('a\r' * 1000000)|indent(1000)|length }}",
    "indented JSON": "{% set r = [0] * 200000 %}{{ r|tojson(indent=16, separators=('  ' * 8, ':'))|length }}",
    "widths of a name": "{{ '%(x)9999999999d' % {'x': 1} }}",
    "widths of an odd name": "{{ '%(a%b)9999999999d' % {'a%b': 1} }}",
    "many widths": "{{ (('%999999d' * 10000) % ((1,) * 10000))|length }}",
    "a width with colons": "{{ ('{' + ':' * 4000000 + '}').format(1)|length }}",
    "many fields": "{{ ('{0}' * 1000000).format(1)|length }}",
    "bytes": "{{ ('a'.encode() * 10**9)|length }}",
    "bytes of a number": "{{ (1).to_bytes(10**9, 'big')|length }}",
    "a number of many digits": "{{ ('9' * 4000000)|int(base=16) }}",
    "long numbers": "{% set ns = namespace(x=10**60) %}{% for i in range(30) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x // 7 > 1 }}",
    "compared, without a loop": "{% set r = range(100000)|list %}{% set q = range(100000)|list %}"
    + "{% if r == q %}{% endif %}" * 2400,
    "passed over, without a loop": "{% set r = [1] * 250000 %}" + "{% for i in r if false %}{% endfor %}" * 1700,
}
# Each of them alone: how it ended, and how long it took.
DROP = """
import json, sys, time
from horde.registry.templates import ChatTemplate, TemplateError
for name, source in json.load(sys.stdin).items():
    began = time.thread_time()
    try:
        ended = "came out: " + repr(ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])[:50])
    except TemplateError as error:
        ended = error.message
    print(json.dumps([name, ended, time.thread_time() - began]), flush=True)
"""


def test_no_template_takes_a_machine_down() -> None:
    said = run_limited(DROP, json.dumps(BOMBS), seconds=120)
    ends = [json.loads(line) for line in said.splitlines() if line.startswith("[")]
    # The first that is missing is the one that did not end.
    assert [name for name, _, _ in ends] == list(BOMBS), said[-500:]
    stopped = (
        "the chat template was stopped",
        "the chat template does not compile: No filter named",
        "the chat template fails",
    )
    assert [end for end in ends if not end[1].startswith(stopped) or "MemoryError" in end[1]] == []
    # A long template takes a while to be read.
    assert [end for end in ends if end[2] > 8] == []


def test_nothing_of_a_template_is_worked_out_while_it_is_made() -> None:
    for source in ("{{ 'ab' * 3 }}", "{{ ['ab', 'ab', 'ab']|join }}", "{% set x = 'ab' + 'abab' %}{{ x }}"):
        assert "ababab" not in environment.compile(source, raw=True)
        assert render(source) == "ababab"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% for m in messages * 9999 if m.role == 'none' %}{% else %}{% endfor %}{% endfor %}",
    ],
)
def test_what_takes_too_long_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.2)
    began = time.thread_time()
    assert refusal(source) == "the chat template was stopped: it takes too long"
    assert time.thread_time() - began < 2


def test_time_is_the_threads_own_and_a_busy_machine_takes_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MOST_SECONDS", 0.5)
    done = threading.Event()

    def be_busy() -> None:
        while not done.is_set():
            sum(range(10_000))

    others = [threading.Thread(target=be_busy) for _ in range(8)]
    for other in others:
        other.start()
    try:
        began = time.monotonic()
        while time.monotonic() - began < 1.5:
            render(CHATML, CHATS["long"])
    finally:
        done.set()
        for other in others:
            other.join()


def test_the_longest_chats_are_no_trouble() -> None:
    """Two thousand messages, and one of a mebibyte: what the API takes."""
    many = said(*["user: " + "x" * 400, "assistant: " + "y" * 400] * 1000)
    one = said("user: " + "<|im_end|>{{ é }}" * 65_000)
    for source in FAMILIES.values():
        for chat in (many, one):
            began = time.thread_time()
            assert len(render(source, chat)) >= 1000
            assert time.thread_time() - began < 1


def test_text_that_grows_piece_by_piece_is_no_trouble() -> None:
    source = "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all + m.content + '\n' %}{% endfor %}{{ ns.all }}"
    assert len(render(source, said(*["user: " + "x" * 200] * 1000))) == 201_000
