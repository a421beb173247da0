"""Tokenizers over HTTP: who may publish one, what is taken, and how one is given back."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import requests

from horde.api.horde_v2 import registry as routes
from horde.usecases import models as usecase
from tests.support import tiny_tokenizer
from tests.support.live_broker import ANONYMOUS, LiveBroker
from tests.support.uploads import JSON, REVISION, TINY, canonical, put, stored

# --- who may publish, and what


def test_a_tokenizer_is_published_once_and_given_back_as_it_is(broker: LiveBroker, key: str) -> None:
    first, second = (put(broker, TINY, key) for _ in range(2))
    assert (first.status_code, first.json()) == (201, {"revision": REVISION})
    assert (second.status_code, second.json()) == (200, {"revision": REVISION})
    found = broker.call("GET", f"tokenizers/{REVISION}")
    assert found.status_code == 200
    assert found.content == canonical(TINY)
    assert found.headers["Content-Type"] == "application/json; charset=utf-8"
    assert found.headers["ETag"] == f'"{REVISION}"'
    assert "immutable" in found.headers["Cache-Control"]


def test_one_that_is_known_need_not_be_sent_again(broker: LiveBroker, key: str) -> None:
    put(broker, TINY, key)
    known = broker.call("GET", f"tokenizers/{REVISION}", headers={"If-None-Match": f'"{REVISION}"'})
    assert (known.status_code, known.content) == (304, b"")
    head = broker.call("HEAD", f"tokenizers/{REVISION}")
    assert (head.status_code, head.content) == (200, b"")
    for unknown in ("0" * 64, REVISION.upper(), REVISION[:-1], "x", "%00", "..%2f"):
        for method in ("GET", "HEAD"):
            assert broker.call(method, f"tokenizers/{unknown}").status_code == 404, unknown
        assert broker.call("GET", f"tokenizers/{unknown}", headers={"If-None-Match": f'"{unknown}"'}).status_code == 404


def test_trusted_users_and_admins_may_publish(broker: LiveBroker) -> None:
    for role in ("trusted", "admin"):
        body = tiny_tokenizer.upload(role)
        assert put(broker, body, broker.user(None, role).api_key).status_code == 201


def test_nobody_else_may_and_what_they_send_is_not_looked_at(
    broker: LiveBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def must_not_run(*_: Any) -> Any:
        raise AssertionError("looked at a body of somebody unknown")

    monkeypatch.setattr(usecase, "canonical_form", must_not_run)
    monkeypatch.setattr(routes, "_read_body", must_not_run)
    users = [broker.user().api_key, ANONYMOUS]
    for body in (canonical(TINY), b"[" * 5_000_000, b"nothing"):
        assert {put(broker, body, user, revision=REVISION).status_code for user in users} == {403}
        assert put(broker, body, "nobody's key", revision=REVISION).status_code == 401
        assert put(broker, body, None, revision=REVISION).status_code == 400
    assert stored(broker) == 0


def test_any_spelling_of_the_same_body_is_the_same_tokenizer(broker: LiveBroker, key: str) -> None:
    text = json.dumps({"unknown": [1], **dict(reversed(TINY.items()))}, indent=1, ensure_ascii=False)
    twice = '{"chat_template": "an earlier one",' + text[1:]
    assert put(broker, text.encode(), key, revision=REVISION).status_code == 201
    assert put(broker, twice.encode(), key, revision=REVISION).status_code == 200
    bare = {"tokenizer": TINY["tokenizer"], "chat_template": None, "special_tokens": {}}
    short = {"tokenizer": TINY["tokenizer"]}
    assert put(broker, short, key, revision=tiny_tokenizer.revision_of(bare)).status_code == 201


def test_another_body_than_the_revision_says_is_refused_with_the_right_one(broker: LiveBroker, key: str) -> None:
    for revision in ("0" * 64, "x", REVISION.upper()):
        answer = put(broker, TINY, key, revision=revision)
        assert (answer.status_code, answer.json()["rc"]) == (422, "TokenizerMismatch")
        assert REVISION in answer.json()["message"]
    put(broker, TINY, key)
    assert put(broker, tiny_tokenizer.upload(None), key, revision=REVISION).status_code == 422
    # Its own hash, and yet not the canonical form.
    assert put(broker, canonical(TINY) + b" ", key).status_code == 422
    assert stored(broker) == 1


BAD: dict[str, tuple[Any, str | None]] = {
    "no JSON": (b"{", None),
    "no UTF-8": (b'{"tokenizer": "\xff"}', None),
    "NaN": (b'{"tokenizer": {"a": NaN}}', None),
    "a number too large": (b'{"tokenizer": {"a": 1e999}}', "tokenizer"),
    "no object": (b"[]", None),
    "nothing": (b"", None),
    "too deep": (b'{"tokenizer":' + b'{"a":' * 63 + b"[]" + b"}" * 63 + b"}", "tokenizer"),
    "far too deep": (b'{"tokenizer":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "too many parts": (b'{"tokenizer":{"a":[' + b"[]," * 4_000_001 + b"[]]}}", None),
    "no tokenizer": ({"chat_template": "x"}, "tokenizer"),
    "a text for a tokenizer": ({**TINY, "tokenizer": "x"}, "tokenizer"),
    "an empty tokenizer": ({**TINY, "tokenizer": {}}, "tokenizer"),
    "half a character in a tokenizer": ({**TINY, "tokenizer": {**TINY["tokenizer"], "version": "\ud800"}}, "tokenizer"),
    "a number for a template": ({**TINY, "chat_template": 5}, "chat_template"),
    "a template that is none": ({**TINY, "chat_template": "{% if %}"}, "chat_template"),
    "a template too long": ({**TINY, "chat_template": "x" * 300_000}, "chat_template"),
    "half a character in a template": ({**TINY, "chat_template": "\udfff"}, "chat_template"),
    "null for tokens": ({**TINY, "special_tokens": None}, "special_tokens"),
    "a list of tokens": ({**TINY, "special_tokens": ["<s>"]}, "special_tokens"),
    "a token that hides messages": ({**TINY, "special_tokens": {"messages": "x"}}, "special_tokens"),
    "a number for a token": ({**TINY, "special_tokens": {"bos_token": 1}}, "special_tokens.bos_token"),
    "half a character in a token": ({**TINY, "special_tokens": {"bos_token": "\ud83d"}}, "special_tokens.bos_token"),
    "too many tokens": ({**TINY, "special_tokens": {f"t{n}_token": "x" for n in range(65)}}, "special_tokens"),
}


def test_a_body_that_cannot_be_used_is_a_400_that_names_the_field(broker: LiveBroker, key: str) -> None:
    for name, (body, field) in BAD.items():
        answer = put(broker, body, key)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["message"], name
        assert list(answer.json().get("errors", {})) == ([field] if field else []), name
    assert stored(broker) == 0


def test_only_json_is_taken(broker: LiveBroker, key: str) -> None:
    assert put(broker, TINY, key, headers={"Content-Type": "text/plain"}).status_code == 415


def test_odd_characters_survive(broker: LiveBroker, key: str) -> None:
    body = {
        **TINY,
        "chat_template": "\x00 \u2028 😍 \ufffd {{ bos_token }}",
        "special_tokens": {"bos_token": "\x00<ｓ>"},
    }
    assert put(broker, body, key).status_code == 201
    assert broker.call("GET", f"tokenizers/{tiny_tokenizer.revision_of(body)}").content == canonical(body)
    tokenizer = broker.context.tokenizers.load(broker.context.database, tiny_tokenizer.revision_of(body))
    assert tokenizer is not None
    assert tokenizer.render([]) == "\x00 \u2028 😍 \ufffd \x00<ｓ>"


def test_a_stored_one_can_be_neither_changed_nor_removed(broker: LiveBroker, key: str) -> None:
    put(broker, TINY, key)
    for statement in ("UPDATE tokenizers SET body = ''", "DELETE FROM tokenizers"):
        with pytest.raises(Exception, match="append-only"), broker.context.database.transaction() as tx:
            tx.execute(statement)


def test_two_who_publish_the_same_at_once_both_succeed(broker: LiveBroker, key: str) -> None:
    barrier, statuses = threading.Barrier(4), []

    def work() -> None:
        barrier.wait()
        headers = {**JSON, "apikey": key}
        answer = requests.put(
            f"{broker.url}/api/v2/tokenizers/{REVISION}", data=canonical(TINY), headers=headers, timeout=60
        )
        statuses.append(answer.status_code)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 200, 200, 201]
    assert stored(broker) == 1
