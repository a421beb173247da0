"""Models: revisions that are published and stay, and what the workers online announce of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import pytest
import requests

from horde.db.tables.workers import CHAT_ONLINE_SECONDS
from horde.errors import HordeError
from horde.registry.models import ChatModel, is_known_model, list_chat_models, serving_chat
from horde.registry.revisions import Manifest, revision_key
from horde.usecases.models import find_model, list_models
from tests.support.broker import Broker, open_broker
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker

BODY = {
    "context_length": 2048,
    "block_size": 16,
    "kv_bytes_per_token": 23040,
    "tokenizer_revision": "t1",
    "capabilities": ["tools", "json"],
    "probe": {"prompt": "Hi", "token_ids": [1, 2], "output_token_ids": []},
}
SHOWN = {**BODY, "capabilities": ["json", "tools"]}
MANIFEST = Manifest("r1", "t1", 2048, 16, 1000, 23040, ("json",))


@pytest.fixture
def live(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as broker:
        yield broker
        assert broker.unexpected_errors() == 0


@pytest.fixture
def key(live: LiveBroker) -> str:
    """The key of a trusted worker's owner."""
    return live.user("Trusted", "trusted").api_key


def put(live: LiveBroker, key: str | None, name: str = "m", revision: str = "r1", **changed: Any) -> requests.Response:
    body = {name: value for name, value in {**BODY, **changed}.items() if value is not ...}
    return live.call("PUT", f"models/{quote(name)}/revisions/{quote(revision, safe='')}", key=key, json=body)


def get(live: LiveBroker, path: str) -> requests.Response:
    return live.call("GET", f"models/{path}")


# --- revisions that are published


def test_a_revision_is_published_once_and_stays(live: LiveBroker, key: str) -> None:
    first, again = (put(live, key) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() == {"model": "m", "revision": "r1", **SHOWN}
    assert get(live, "m/revisions/r1").json() == first.json()
    assert put(live, key, capabilities=["json", "tools", "json"]).status_code == 200
    for changed in (
        {"context_length": 2049},
        {"tokenizer_revision": "t2"},
        {"capabilities": []},
        {"probe": ...},
        {"probe": {**BODY["probe"], "output_token_ids": [3]}},  # type: ignore[dict-item]
    ):
        answer = put(live, key, **changed)
        assert (answer.status_code, answer.json()["rc"]) == (422, "RevisionConflict"), changed
    assert get(live, "m/revisions/r1").json() == first.json()
    for statement in ("UPDATE model_revisions SET block_size = 1", "DELETE FROM model_revisions"):
        with pytest.raises(Exception, match="append-only"), live.context.database.transaction() as tx:
            tx.execute(statement)


def test_a_model_lists_its_revisions_the_newest_first(live: LiveBroker, key: str) -> None:
    for revision in ("r1", "r2", "r3"):
        put(live, key, revision=revision, probe=...)
    found = get(live, "m").json()
    assert found["name"] == "m"
    assert [published["revision"] for published in found["revisions"]] == ["r3", "r2", "r1"]
    assert found["revisions"][0] == {"model": "m", "revision": "r3", **SHOWN, "probe": None}


def test_only_trusted_users_and_admins_may_publish(live: LiveBroker, key: str) -> None:
    assert put(live, live.user(None, "admin").api_key).status_code == 201
    assert put(live, live.user().api_key).status_code == 403
    assert put(live, ANONYMOUS).status_code == 403
    assert put(live, "nobody's").status_code == 401
    assert put(live, None).status_code == 400


NAMES = ["a/b", "a/revisions", "Ünï 🙂", "a?b#c", "100%", "a%2Fb", "%(model)s", "a//b", ".", "x" * 255]


def test_a_name_is_what_it_is(live: LiveBroker, key: str) -> None:
    def call(method: str, path: str) -> requests.Response:
        given = requests.Request(method, live.url, json=BODY if method == "PUT" else None, headers={"apikey": key})
        request = live.session.prepare_request(given)
        # As it is: the client's library would take a dot for a step in the path.
        request.url = f"{live.url}/api/v2/models/{path}"
        return live.session.send(request, timeout=60)

    for name in NAMES:
        assert call("PUT", f"{quote(name)}/revisions/r1").status_code == 201, name
        assert call("GET", quote(name)).json()["name"] == name
        assert call("GET", f"{quote(name)}/revisions/r1").json()["model"] == name


def test_what_is_not_there_is_a_404(live: LiveBroker, key: str) -> None:
    put(live, key)
    for path in (
        "m/revisions/r2",
        "n/revisions/r1",
        "n",
        "M",
        "m%00",
        "m%00/revisions/r1",
        "m/revisions/%00",
        "%FF",
        "m/",
    ):
        assert get(live, path).status_code == 404, path
    assert get(live, "n").json()["rc"] == "ModelNotFound"


BAD: list[tuple[str, Any]] = [
    ("context_length", 0),
    ("context_length", 1 << 31),
    ("context_length", "5"),
    ("context_length", ...),
    ("block_size", 1.5),
    ("block_size", True),
    ("kv_bytes_per_token", -1),
    ("kv_bytes_per_token", 1 << 63),
    ("tokenizer_revision", ""),
    ("tokenizer_revision", "a b"),
    ("tokenizer_revision", "é"),
    ("tokenizer_revision", "x" * 129),
    ("tokenizer_revision", None),
    ("capabilities", "json"),
    ("capabilities", ["x"] * 33),
    ("capabilities.0", [""]),
    ("capabilities.0", ["a b"]),
    ("probe", None),
    ("probe.prompt", {**BODY["probe"], "prompt": 5}),  # type: ignore[dict-item]
    ("probe.token_ids.0", {**BODY["probe"], "token_ids": [-1]}),  # type: ignore[dict-item]
    ("probe.output_token_ids", {"prompt": "x", "token_ids": []}),
]


def test_a_value_that_is_none_is_a_400_that_names_its_field(live: LiveBroker, key: str) -> None:
    for field, value in BAD:
        answer = put(live, key, **{field.partition(".")[0]: value})
        assert answer.status_code == 400, (field, answer.text)
        assert list(answer.json()["errors"]) == [field]
    assert get(live, "m").status_code == 404


def test_names_that_cannot_be_are_refused(live: LiveBroker, key: str) -> None:
    for name, revision, field in (
        ("x" * 256, "r", "name"),
        (" ", "r", "name"),
        ("a\tb", "r", "name"),
        ("a/revisions/b", "r", "name"),
        ("a\u200bb", "r", "name"),
        ("a\0", "r", "name"),
        ("m", "x" * 129, "revision"),
        ("m", "a b", "revision"),
        ("m", "é", "revision"),
    ):
        answer = put(live, key, name, revision)
        assert answer.status_code == 400, (name, answer.text)
        assert list(answer.json()["errors"]) == [field]


# --- what workers announce


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made


def announce(
    broker: Broker, key: str, name: str = "worker", manifests: dict[str, Manifest] | None = None, **fields: Any
) -> None:
    """A worker's pop for chat, which finds nothing."""
    manifests = {"m": MANIFEST} if manifests is None else manifests
    values = {"models": list(manifests), "kinds": ["text", "chat"], "progress": True, **fields}
    broker.nothing(key, name=name, manifests=manifests, **values)


def serving(broker: Broker, model: str = "m", user_id: int = 0) -> list[Any]:
    return broker.context.database.read(lambda tx: serving_chat(tx, model, user_id=user_id))


def listed(broker: Broker) -> list[ChatModel]:
    return broker.context.database.read(list_chat_models)


def known(broker: Broker, model: str) -> bool:
    return broker.context.database.read(lambda tx: is_known_model(tx, model))


def set_column(broker: Broker, name: str, value: str, worker: str = "worker") -> None:
    with broker.context.database.transaction() as tx:
        tx.execute(f"UPDATE workers SET {name} = {value} WHERE name = %(worker)s", {"worker": worker})


def test_a_worker_serves_what_it_announced(broker: Broker) -> None:
    owner = broker.user(trusted=True)
    announce(broker, owner.api_key, threads=3, max_length=100, max_context_length=1000)
    (found,) = serving(broker)
    assert (found.trusted, found.threads, found.speed) == (True, 3, None)
    assert (found.max_length, found.max_context_length, found.manifest) == (100, 1000, MANIFEST)
    assert found.worker_id == broker.worker().id
    assert serving(broker, "n") == serving(broker, "m\0") == serving(broker, "") == []
    assert broker.world.scalar("SELECT revisions FROM workers") == [revision_key("m", "r1", "t1")]


def test_only_those_count_that_would_take_a_chat_for_the_model_now(broker: Broker) -> None:
    owner, other = broker.user(), broker.user()
    announce(broker, owner.api_key)
    assert len(serving(broker)) == 1
    for column, off, on in (
        ("kinds", "'{text}'", "'{chat,text}'"),
        ("posts_progress", "false", "true"),
        ("models", "'{n}'", "'{m}'"),
        ("deleted_at", "now()", "NULL"),
    ):
        set_column(broker, column, off)
        assert serving(broker) == [], column
        set_column(broker, column, on)
        assert len(serving(broker)) == 1
    broker.world.advance(CHAT_ONLINE_SECONDS - 1)
    assert len(serving(broker)) == len(listed(broker)) == 1
    broker.world.advance(2)
    assert serving(broker) == listed(broker) == []
    announce(broker, owner.api_key)
    set_column(broker, "maintenance", "true")
    assert serving(broker, user_id=other.id) == []
    assert len(serving(broker, user_id=owner.id)) == 1
    assert listed(broker) == []


BROKEN: list[Any] = [
    None, 5, "x", [], [1], True, {}, {"m": None}, {"m": 5}, {"m": []}, {"m": {}}, {"m": {**MANIFEST.as_json(), "blocks": "9"}},
    {"m": {**MANIFEST.as_json(), "context_length": 1.5}}, {"m": {**MANIFEST.as_json(), "block_size": 0}},
    {"m": {**MANIFEST.as_json(), "capabilities": None}}, {"m": {**MANIFEST.as_json(), "capabilities": [1]}},
    {"m": {**MANIFEST.as_json(), "model_revision": ""}}, {"m": {**MANIFEST.as_json(), "tokenizer_revision": "a b"}},
]  # fmt: skip


def test_a_stored_manifest_that_is_none_is_as_if_it_were_not_there(broker: Broker) -> None:
    key = broker.user().api_key
    announce(broker, key)
    announce(broker, key, "sound")
    for broken in BROKEN:
        set_column(broker, "manifests", f"'{json.dumps(broken)}'::jsonb")
        assert [found.manifest for found in serving(broker)] == [MANIFEST], broken
        assert [model.threads for model in listed(broker)] == [1], broken
        assert known(broker, "m")


def test_a_model_is_known_once_it_was_published_or_a_worker_has_announced_it(broker: Broker) -> None:
    assert not known(broker, "m")
    announce(broker, broker.user().api_key)
    assert known(broker, "m")
    broker.world.advance(30 * 86_400)
    assert known(broker, "m")
    for never in ("n", "", "m\0", "M"):
        assert not known(broker, never)
    with broker.context.database.transaction() as tx:
        tx.execute("INSERT INTO model_revisions VALUES ('n', 'r', 't', 1, 1, 1, '{}', NULL, 1, horde_now())")
    assert known(broker, "n")


def test_models_are_listed_with_what_most_of_their_threads_serve(broker: Broker) -> None:
    key = broker.user().api_key
    small, large = replace(MANIFEST, context_length=512), replace(MANIFEST, model_revision="r2", context_length=4096)
    announce(broker, key, "one", {"m": small}, threads=2)
    announce(broker, key, "two", {"m": large, "a/b": MANIFEST}, threads=3)
    # Of the same revision, and it holds less.
    announce(broker, key, "three", {"m": large}, threads=1, max_context_length=100)
    created = int(broker.world.scalar("SELECT extract(epoch FROM min(created_at)) FROM workers WHERE name = 'one'"))
    two = int(broker.world.scalar("SELECT extract(epoch FROM created_at) FROM workers WHERE name = 'two'"))
    found = listed(broker)
    assert [model.name for model in found] == ["a/b", "m"]
    assert (found[1].threads, found[1].context_length) == (6, 4096)
    assert abs(found[1].created - created) <= 1
    assert (found[0].threads, found[0].context_length) == (3, 2048)
    assert abs(found[0].created - two) <= 1
    announce(broker, key, "one", {"m": small}, threads=9)
    assert [model.context_length for model in listed(broker)] == [2048, 512]
    with broker.context.database.transaction() as tx:
        tx.execute(
            "INSERT INTO model_revisions VALUES ('m', 'r', 't', 1, 1, 1, '{}', NULL, 1, to_timestamp(1234567890))"
        )
    assert listed(broker)[1].created == 1234567890


def test_a_model_is_listed_as_an_order_for_it_is_held_to(broker: Broker) -> None:
    trusted, stranger = broker.user(trusted=True).api_key, broker.user().api_key
    absurd = replace(MANIFEST, model_revision="mine", context_length=1 << 30, blocks=1 << 30)

    def context_length() -> int:
        return next(model.context_length for model in listed(broker) if model.name == "m")

    announce(broker, stranger, "stranger", {"m": absurd}, threads=50, max_context_length=1 << 20)
    assert context_length() == 1 << 20
    announce(broker, trusted, "trusted", {"m": MANIFEST}, max_context_length=1500)
    assert context_length() == 1500
    announce(broker, stranger, "stranger", {"m": MANIFEST}, threads=50, max_context_length=1 << 20)
    assert context_length() == 1500
    announce(broker, trusted, "trusted", {"m": replace(MANIFEST, blocks=10)})
    assert context_length() == 160
    with broker.context.database.transaction() as tx:
        tx.execute("INSERT INTO model_revisions VALUES ('m', 'r1', 't1', 100, 1, 1, '{}', NULL, 1, horde_now())")
    assert context_length() == 100


def test_a_model_that_nobody_serves_now_is_another_answer_than_one_that_never_was(broker: Broker) -> None:
    client = broker.user().api_key
    announce(broker, broker.user().api_key)
    assert find_model(broker.context, client, "m").name == "m"
    assert [model.name for model in list_models(broker.context, client)] == ["m"]
    broker.world.advance(CHAT_ONLINE_SECONDS + 1)
    assert list_models(broker.context, client) == []
    for name, key, status in (("m", client, 503), ("n", client, 404), ("\0", client, 404), ("m", "nobody's", 401)):
        with pytest.raises(HordeError) as refused:
            find_model(broker.context, key, name)
        assert refused.value.status == status


# --- manifests and keys


def test_a_manifest_survives_the_way_through_json() -> None:
    assert Manifest.from_json(json.loads(json.dumps(MANIFEST.as_json()))) == MANIFEST
    assert Manifest.from_json({**MANIFEST.as_json(), "more": 1}) == MANIFEST
    bare = {name: value for name, value in MANIFEST.as_json().items() if name != "capabilities"}
    assert Manifest.from_json(bare) == replace(MANIFEST, capabilities=())


@pytest.mark.parametrize("name", ["model_revision", "tokenizer_revision", "context_length", "block_size", "blocks"])
def test_a_manifest_that_is_none_names_its_field(name: str) -> None:
    for value in (None, "", 0, -1, 1 << 64, 1.0, True, [], "é", "x" * 129):
        if name.endswith("revision") or value != 1.0 or isinstance(value, bool | float):
            with pytest.raises(ValueError, match=f"^{name}"):
                Manifest.from_json({**MANIFEST.as_json(), name: value})
    with pytest.raises(ValueError, match=f"^{name} is missing"):
        Manifest.from_json({key: value for key, value in MANIFEST.as_json().items() if key != name})


def test_a_key_stands_for_one_model_at_one_revision_with_one_tokenizer() -> None:
    parts = [
        ("m", "r", "t"),
        ("mr", "", "t"),
        ("", "mr", "t"),
        ("m", "rt", ""),
        ("m", "r", "u"),
        ("\ud800", "r", "t"),
        ("é", "r", "t"),
    ]
    keys = {revision_key(*part) for part in parts}
    assert len(keys) == len(parts)
    assert all(len(key) == 32 and set(key) <= set("0123456789abcdef") for key in keys)
    assert revision_key("m", "r", "t") == revision_key("m", "r", "t")
