"""Tokenizers over HTTP: who may publish one, what is taken, how large a body may be and for whom, and how one is read."""

from __future__ import annotations

import base64
import hashlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from tokenizers import Tokenizer, models

from horde.api import connections, exchange
from horde.api.horde_v2 import registry as routes
from horde.db.database import Database
from horde.errors import HordeError
from horde.registry import tokenizers as registry
from horde.registry.tokenizers import MAX_TOKENIZER_BYTES, Tokenizers, canonical_form, load_canonical
from horde.usecases import models as usecase
from tests.support import tiny_tokenizer
from tests.support.limited import run_limited
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker

JSON = {"Content-Type": "application/json"}
TINY = tiny_tokenizer.upload()
REVISION = tiny_tokenizer.revision_of(TINY)
MEBIBYTE = 1 << 20


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def key(broker: LiveBroker) -> str:
    """The key of a trusted worker's owner."""
    return broker.user("Trusted", "trusted").api_key


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def put(
    broker: LiveBroker, body: Any, key: str | None, *, revision: str | None = None, **options: Any
) -> requests.Response:
    data = body if isinstance(body, bytes) or hasattr(body, "__next__") else canonical(body)
    revision = revision or (hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else "0" * 64)
    return broker.call(
        "PUT", f"tokenizers/{revision}", key=key, data=data, headers=options.pop("headers", JSON), **options
    )


def stored(broker: LiveBroker) -> int:
    with broker.context.database.autocommit() as tx:
        return int(tx.execute("SELECT count(*) FROM tokenizers").scalar_one())


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


SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
MARK = {"SpecialToken": {"id": "z", "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]


def doubling(letter: str, times: int, **of: str) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": of or {"String": letter}, "content": letter * 2}] * times


def replacing(found: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def sequence(part: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", part: steps}


def adding(single: list[Any], ids: list[int]) -> dict[str, Any]:
    special = {"z": {"id": "z", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": PAIR, "special_tokens": special}


def characters_map(*texts: bytes) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def model(**changed: Any) -> dict[str, Any]:
    return {**TINY["tokenizer"]["model"], **changed}


def words(more: dict[str, Any]) -> dict[str, Any]:
    return model(vocab={**TINY["tokenizer"]["model"]["vocab"], **more})


# Each of a part that asks for too much, at once or with the first text.
BOMBS: dict[str, tuple[str, Any]] = {
    "a text doubled again and again": ("normalizer", sequence("normalizers", doubling("a", 28))),
    "a text doubled few times": ("normalizer", sequence("normalizers", doubling("a", 5))),
    "sequences in sequences": (
        "normalizer", sequence("normalizers", [sequence("normalizers", doubling("a", 3)), sequence("normalizers", doubling("a", 3))]),
    ),
    "nothing replaced": ("normalizer", sequence("normalizers", doubling("ab", 2, Regex="x*"))),
    "nothing replaced, by its text": ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 16}),
    "bytes of bytes": ("pre_tokenizer", sequence("pretokenizers", [TINY["tokenizer"]["pre_tokenizer"]] * 5)),
    "bytes of bytes of a text": ("normalizer", sequence("normalizers", [{"type": "ByteLevel"}] * 5)),
    "a step that has no type": ("normalizer", {"pattern": {"String": "a"}, "content": "aa"}),
    "a long text in front": ("normalizer", sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 600}] * 2)),
    "a long pattern": ("pre_tokenizer", {**SPLIT, "pattern": {"Regex": "a" * 20_000}}),
    "too many steps": ("pre_tokenizer", sequence("pretokenizers", [SPLIT] * 17)),
    "too many steps of steps": (
        "pre_tokenizer", sequence("pretokenizers", [sequence("pretokenizers", [SPLIT] * 8)] * 2),
    ),
    "long texts of characters": ("normalizer", characters_map(b"a", b"b" * 65)),
    "a map of characters that is none": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "-"}),
    "two maps of characters": ("normalizer", sequence("normalizers", [characters_map(b"a" * 64)] * 2)),
    "an answer doubled again and again": ("decoder", sequence("decoders", [TINY["tokenizer"]["decoder"], *doubling("b", 15)])),
    "a text repeated": ("post_processor", adding([TEXT] * 2, [1])),
    "many pieces": ("post_processor", adding([*[MARK] * 64, TEXT], [1])),
    "many tokens of a piece": ("post_processor", adding([MARK, TEXT], [1] * 65)),
    "many steps behind": ("post_processor", sequence("processors", [adding([MARK, TEXT], [1])] * 17)),
    "the largest id there may be": ("model", words({"zz": (1 << 32) - 1})),
    "a large id": ("model", words({"zz": 1_999_999_999})),
    "an id with too many before it": ("model", words({"zz": 2 * 260 + 65_537})),
    "an added token with a large id": ("added_tokens", [{**TINY["tokenizer"]["added_tokens"][0], "id": 1_999_999_999}]),
    "a long token": ("model", words({"z" * 1025: 300})),
    "too many words": ("model", {"type": "WordLevel", "vocab": {f"{n:x}": n for n in range(1_000_001)}, "unk_token": "0"}),
    "too many merges": ("model", model(merges=["a b"] * 1_000_001)),
    "long words": (
        "model",
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "#", "max_input_chars_per_word": 10**9},
    ),
    "a long prefix": ("model", model(continuing_subword_prefix="#" * 65)),
}  # fmt: skip


def test_a_part_that_asks_for_too_much_is_a_400_that_names_it(broker: LiveBroker, key: str) -> None:
    for name, (part, value) in BOMBS.items():
        body = {**TINY, "tokenizer": {**TINY["tokenizer"], part: value}}
        answer = put(broker, body, key)
        assert answer.status_code == 400, (name, answer.text)
        assert list(answer.json()["errors"]) == [f"tokenizer.{part}"], (name, answer.text)
    assert stored(broker) == 0


# As they are found in the tokenizers of models.
USUAL: dict[str, dict[str, Any]] = {
    "spaces as letters": {
        "normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁")]),
        "pre_tokenizer": None,
        "decoder": sequence("decoders", [
            replacing("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]),
    },
    "quotes and rows of spaces": {
        "normalizer": sequence("normalizers", [
            replacing("``", '"'), replacing("''", '"'),
            {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, replacing(" {2,}", " ", "Regex"),
        ]),
    },
    "words, then bytes": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": sequence("pretokenizers", [
            SPLIT, {"type": "Digits", "individual_digits": True}, TINY["tokenizer"]["pre_tokenizer"],
        ]),
        "post_processor": sequence("processors", [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            adding([MARK, TEXT], [257]),
        ]),
    },
    "ids with a gap": {"model": words({"zz": 2 * 260 + 65_536})},
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_what_the_tokenizers_of_models_are_made_of_is_taken(name: str) -> None:
    body = {**TINY, "tokenizer": {**TINY["tokenizer"], **USUAL[name]}}
    assert load_canonical(canonical_form(canonical(body))).encode("two  words", special=True)


def test_no_tokenizer_takes_a_machine_down() -> None:
    """Those that would, were they loaded and asked for a text."""
    names = [name for name in BOMBS if name != "too many words"]
    bodies = {name: {**TINY, "tokenizer": {**TINY["tokenizer"], BOMBS[name][0]: BOMBS[name][1]}} for name in names}
    said = run_limited(LOADING, json.dumps(bodies))
    assert [json.loads(line)[0] for line in said.splitlines() if line.startswith("[")] == names, said[-500:]
    assert {json.loads(line)[1] for line in said.splitlines() if line.startswith("[")} == {400}


LOADING = """
import json, sys
from horde.errors import HordeError
from horde.registry.tokenizers import canonical_form, load_canonical
for name, body in json.load(sys.stdin).items():
    try:
        tokenizer = load_canonical(canonical_form(json.dumps(body).encode()))
        status = len(tokenizer.encode("a" * 1000, special=True))
    except HordeError as error:
        status = error.status
    print(json.dumps([name, status]), flush=True)
"""


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


# --- how large a body may be


def large(size: int) -> dict[str, Any]:
    """A tokenizer of about that many bytes."""
    words = {f"{number:06}" + "x" * 90: number for number in range(size // 108)}
    raw = Tokenizer(models.WordLevel({"a": len(words), **words}, unk_token="a"))
    return {"tokenizer": json.loads(raw.to_str()), "chat_template": None, "special_tokens": {}}


def test_a_tokenizer_of_many_mebibytes_is_taken_in_one_piece_and_in_chunks(broker: LiveBroker, key: str) -> None:
    for size in (4 * MEBIBYTE, 8 * MEBIBYTE):
        body = canonical(large(size))
        assert len(body) > size * 3 // 4
        revision = hashlib.sha256(body).hexdigest()
        pieces = iter([body[start : start + 100_000] for start in range(0, len(body), 100_000)])
        assert put(broker, pieces if size == 4 * MEBIBYTE else body, key, revision=revision).status_code == 201
        assert broker.call("GET", f"tokenizers/{revision}").content == body
        assert put(broker, body, key).status_code == 200


def test_one_that_is_too_large_is_a_413_that_the_client_gets_to_read(broker: LiveBroker, key: str) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        for start in range(0, size, MEBIBYTE):
            yield b" " * min(MEBIBYTE, size - start)

    for size in (MAX_TOKENIZER_BYTES + 1, MAX_TOKENIZER_BYTES + 2 * MEBIBYTE):
        for body in (b" " * size, pieces(size)):
            answer = put(broker, body, key)
            assert answer.status_code == 413
            assert answer.json()["message"]
    # Of the largest size that may be, it is read and looked at.
    assert put(broker, b" " * MAX_TOKENIZER_BYTES, key).status_code == 400


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} /api/v2/{path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def first_line(broker: LiveBroker, request: bytes) -> bytes:
    """How the answer begins to a request whose body never comes, or not whole."""
    with socket.create_connection((broker.host, broker.port), timeout=20) as connection:
        connection.sendall(request)
        return connection.recv(65536).partition(b"\r\n")[0]


OTHERS = [
    ("POST", "generate/text/async"),
    ("POST", f"tokenizers/{REVISION}"),
    ("PUT", "models/a/revisions/b"),
    ("PUT", "workers/x"),
    ("PUT", "tokenizers"),
]


def test_every_other_route_is_refused_at_two_mebibytes(broker: LiveBroker) -> None:
    length = f"Content-Length: {2 * MEBIBYTE}"
    chunk = b"%x\r\n" % MEBIBYTE + b" " * MEBIBYTE + b"\r\n"
    for method, path in OTHERS:
        assert first_line(broker, head(method, path, length)) == b"HTTP/1.1 413 Request Entity Too Large"
        in_chunks = head(method, path, "Transfer-Encoding: chunked") + chunk * 2
        assert first_line(broker, in_chunks) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(broker: LiveBroker, key: str) -> None:
    length = f"Content-Length: {MAX_TOKENIZER_BYTES + 2 * MEBIBYTE}"
    request = head("PUT", f"tokenizers/{REVISION}", length, f"apikey: {key}")
    assert first_line(broker, request) == b"HTTP/1.1 413 Request Entity Too Large"


def test_only_so_many_large_bodies_arrive_at_once(
    broker: LiveBroker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_LARGE_BODIES", 2)
    begun = head("PUT", f"tokenizers/{REVISION}", f"Content-Length: {3 * MEBIBYTE}", "Expect: 100-continue")
    chunked = head("PUT", f"tokenizers/{REVISION}", "Transfer-Encoding: chunked", "Expect: 100-continue")
    with socket.create_connection((broker.host, broker.port), timeout=20) as one:
        one.sendall(begun)
        assert one.recv(65536).startswith(b"HTTP/1.1 100")
        with socket.create_connection((broker.host, broker.port), timeout=20) as two:
            two.sendall(chunked)
            assert two.recv(65536).startswith(b"HTTP/1.1 100")
            answer = put(broker, canonical(large(3 * MEBIBYTE)), key)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
            # One of an ordinary size is no matter.
            assert put(broker, TINY, key).status_code == 201
        # The other end is told of a hang-up some time.
        body = canonical(large(3 * MEBIBYTE))
        statuses = iter(lambda: put(broker, body, key).status_code, 201)
        assert set(statuses) <= {503}


def test_a_slow_upload_is_waited_for_while_it_arrives_at_a_decent_pace(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 0.1)
    monkeypatch.setattr(connections, "SLOWEST_UPLOAD", 1000)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    body = canonical(large(3 * MEBIBYTE))
    revision = hashlib.sha256(body).hexdigest()
    with live_broker(database_url) as broker:
        key = broker.user("Trusted", "trusted").api_key
        request = head("PUT", f"tokenizers/{revision}", f"Content-Length: {len(body)}", f"apikey: {key}")
        with (
            socket.create_connection((broker.host, broker.port), timeout=20) as slow,
            socket.create_connection((broker.host, broker.port), timeout=20) as idle,
        ):
            slow.sendall(request + body[:MEBIBYTE])
            idle.sendall(request)
            assert idle.recv(65536) == b""
            slow.sendall(body[MEBIBYTE:])
            assert slow.recv(65536).startswith(b"HTTP/1.1 201")


# --- those that a process has loaded


def test_what_was_just_published_is_known_at_once_although_it_was_missed_before(broker: LiveBroker, key: str) -> None:
    known = broker.context.tokenizers
    assert known.load(broker.context.database, REVISION) is None
    put(broker, TINY, key)
    tokenizer = known.load(broker.context.database, REVISION)
    assert tokenizer is not None
    assert tokenizer.has_template
    assert tokenizer.vocabulary == 259
    assert known.load(broker.context.database, REVISION) is tokenizer


class Counting:
    """A database that counts who asks it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.reads = 0

    def read(self, work: Any) -> Any:
        self.reads += 1
        return self._database.read(work)


@pytest.fixture
def counting(broker: LiveBroker) -> Any:
    return Counting(broker.context.database)


def test_an_unknown_revision_is_looked_for_again_only_after_a_while(
    counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Tokenizers()
    for _ in range(5):
        assert known.load(counting, REVISION) is None
    assert counting.reads == 1
    for no_revision in ("", "main", REVISION.upper(), "\x00"):
        assert known.load(counting, no_revision) is None
    assert counting.reads == 1
    monkeypatch.setattr(registry, "UNKNOWN_FOR", 0.0)
    known.forget_unknown(REVISION)
    for _ in range(5):
        assert known.load(counting, REVISION) is None
    assert counting.reads == 6


def test_unknown_revisions_are_not_remembered_without_end(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MOST_UNKNOWN", 10)
    known = Tokenizers()
    for number in range(30):
        known.load(counting, f"{number:064x}")
    assert len(known._unknown) == 10
    assert known._loading == {}


def test_many_who_need_one_at_once_load_it_once(
    broker: LiveBroker, key: str, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(broker, TINY, key)
    known, barrier, found = Tokenizers(), threading.Barrier(8), []
    others_wait = threading.Event()
    loads = []

    def slow(canonical: bytes) -> Any:
        loads.append(1)
        others_wait.wait(0.2)
        return registry_load(canonical)

    registry_load = registry.load_canonical
    monkeypatch.setattr(registry, "load_canonical", slow)

    def work() -> None:
        barrier.wait()
        found.append(known.load(counting, REVISION))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert found[0] is not None
    assert (counting.reads, len(loads)) == (1, 1)


def test_the_ones_that_were_used_last_stay(broker: LiveBroker, key: str, counting: Any) -> None:
    revisions = []
    for number in range(3):
        body = tiny_tokenizer.upload(f"{number}")
        put(broker, body, key)
        revisions.append(tiny_tokenizer.revision_of(body))
    known = Tokenizers(most=2)
    for revision in (revisions[0], revisions[1], revisions[0], revisions[2]):
        known.load(counting, revision)
    assert counting.reads == 3
    known.load(counting, revisions[0])
    known.load(counting, revisions[2])
    assert counting.reads == 3
    known.load(counting, revisions[1])
    assert counting.reads == 4


def test_a_stored_one_that_cannot_be_used_is_as_good_as_unknown(broker: LiveBroker) -> None:
    with broker.context.database.transaction() as tx:
        tx.execute(
            "INSERT INTO tokenizers VALUES (%(revision)s, %(body)s, 1, horde_now())",
            {"revision": REVISION, "body": b"no zlib"},
        )
    assert broker.context.tokenizers.load(broker.context.database, REVISION) is None


def test_a_failed_load_is_tried_again_by_the_next(counting: Any) -> None:
    class Down:
        def read(self, _: Any) -> Any:
            raise HordeError(registry.bad_request("x").code, "down", rc="Unavailable")

    known = Tokenizers()
    down: Any = Down()
    for _ in range(2):
        with pytest.raises(HordeError):
            known.load(down, REVISION)
    assert known.load(counting, REVISION) is None
    assert counting.reads == 1


def test_the_canonical_form_is_that_of_any_json_library_and_fast_enough() -> None:
    body = large(2 * MEBIBYTE)
    assert canonical_form(json.dumps(body, indent=2).encode()) == canonical(body)
