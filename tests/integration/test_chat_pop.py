"""Workers that take chats: several kinds with one pop, pinned revisions, who may have what, and what a job tells."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from horde.db.tables.workers import CHAT_ONLINE_SECONDS
from horde.errors import HordeError
from horde.lifecycle.enqueue import queue_keys
from horde.lifecycle.words import Kind
from horde.queue.candidates import Popper
from horde.queue.estimate import ASSUMED_SPEED, estimate_wait, is_possible
from horde.registry.check_in import WRITE_EVERY
from horde.registry.revisions import Manifest, revision_key
from horde.usecases import hand_out
from horde.usecases.horde_status import list_models
from horde.usecases.pop import PoppedJob
from horde.usecases.workers import list_workers, update_worker
from tests.support.broker import MODEL, Broker, open_broker
from tests.support.concurrency import together
from tests.support.invariants import check_invariants

ROUNDS = 20
MANIFEST = Manifest("weights-1", "tokens-1", context_length=4096, block_size=16, blocks=256, kv_bytes_per_token=1024)
OTHER = dataclasses.replace(MANIFEST, model_revision="weights-2")


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made
        check_invariants(made.context.database)


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def takes(*kinds: str, models: tuple[str, ...] = (MODEL,), manifest: Manifest = MANIFEST) -> dict[str, Any]:
    """What the pop of a worker says that takes these kinds, chats among them."""
    return {
        "kinds": kinds,
        "models": models,
        "progress": True,
        "manifests": dict.fromkeys(models, manifest),
    }


CHATS, BOTH = takes("chat"), takes("text", "chat")


def key_of(manifest: Manifest = MANIFEST, model: str = MODEL) -> str:
    return revision_key(model, manifest.model_revision, manifest.tokenizer_revision)


def chat(broker: Broker, *, manifest: Manifest = MANIFEST, model: str = MODEL, **fields: Any) -> uuid.UUID:
    """A chat that was admitted with this manifest's tokenizer, and announced."""
    values = {
        "models": [model],
        "revision": key_of(manifest, model),
        "needs_progress": True,
        "payload": {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 80},
        **fields,
    }
    request = broker.world.request(kind=Kind.CHAT, **values)
    broker.context.wakeups.announce(queue_keys(Kind.CHAT, [model]))
    return request


# --- kinds


def test_a_chat_goes_to_a_worker_that_takes_chats_and_to_no_other(broker: Broker, key: str) -> None:
    request = chat(broker)

    # One that takes texts does not even look at it.
    assert broker.nothing(key, name="texts", progress=True, manifests={MODEL: MANIFEST}) == {}

    job = broker.job(key, name="chats", **CHATS)
    assert (job.request_id, job.kind, job.model) == (request, "chat", MODEL)


def test_a_worker_that_takes_chats_alone_gets_no_text(broker: Broker, key: str) -> None:
    broker.order()
    broker.order(models=[])
    assert broker.nothing(key, **CHATS) == {}


def test_texts_and_chats_stand_in_one_line(broker: Broker, key: str) -> None:
    requests = [broker.order(), chat(broker), broker.order(models=[]), chat(broker), broker.order()]

    jobs = [broker.job(key, **BOTH), *broker.pop(key, slots=9, **BOTH).jobs]

    assert [job.request_id for job in jobs] == requests
    assert [job.kind for job in jobs] == ["text", "chat", "text", "chat", "text"]


def test_a_chat_of_the_owner_comes_before_a_strangers_text(broker: Broker, key: str) -> None:
    stranger_s = broker.order()
    own = chat(broker, user=broker.find_user(key).id)
    assert [job.request_id for job in broker.pop(key, slots=2, **BOTH).jobs] == [own, stranger_s]


def test_a_pop_looks_at_each_of_its_models_once_for_each_kind() -> None:
    popper = Popper(uuid.uuid4(), ["text", "chat"], ["m", "n", "m"], 512, 4096, trusted=False, speed=None)
    assert popper.queue_keys() == [("text", "m"), ("text", "n"), ("chat", "m"), ("chat", "n"), ("text", "*")]


def test_a_worker_may_take_texts_today_and_chats_tomorrow(broker: Broker, key: str) -> None:
    broker.nothing(key)
    request = chat(broker)
    assert broker.job(key, **CHATS).request_id == request
    assert broker.nothing(key) == {}


# --- the filter


def test_a_chat_waits_for_the_revision_that_it_was_counted_with(broker: Broker, key: str) -> None:
    request = chat(broker)

    other_tokenizer = dataclasses.replace(MANIFEST, tokenizer_revision="tokens-2")
    for differs in (OTHER, other_tokenizer):
        assert broker.nothing(key, name="differs", **takes("chat", manifest=differs)) == {"revision": 1}

    assert broker.job(key, name="serves", **CHATS).request_id == request


def test_one_models_revision_is_not_another_models(broker: Broker, key: str) -> None:
    chat(broker, model="n")
    both = takes("chat", models=(MODEL, "n"))
    both["manifests"]["n"] = OTHER
    assert broker.nothing(key, **both) == {"revision": 1}


def test_what_needs_progress_goes_to_a_worker_that_posts_it(broker: Broker, key: str) -> None:
    request = broker.world.request(needs_progress=True)
    assert broker.nothing(key, name="silent") == {"progress": 1}
    assert broker.job(key, name="posts", progress=True).request_id == request


def test_a_skipped_chat_counts_under_its_first_reason(broker: Broker, key: str) -> None:
    broker.order(max_length=600)
    chat(broker, max_length=600, manifest=OTHER)
    chat(broker, manifest=OTHER)
    chat(broker, max_context_length=8192)
    assert broker.nothing(key, **BOTH) == {"max_length": 2, "revision": 1, "max_context_length": 1}


def test_a_request_for_several_models_runs_on_the_one_that_it_is_pinned_to(
    broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else a model that does not suit would be drawn again and again until one does.
    monkeypatch.setattr(hand_out.random, "choice", lambda models: models[0])
    broker.world.request(models=["a", "b", "c"], revision=key_of(model="b"))
    assert broker.job(key, **takes("text", models=("a", "b", "c"))).model == "b"


# --- who gets the retry


def no_chats(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", progress=True, manifests={MODEL: MANIFEST})


def another_revision(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", **takes("chat", manifest=OTHER))


def too_short(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", **CHATS, max_length=79)


def paused(broker: Broker, key: str) -> None:
    update_worker(broker.context, key, broker.worker_id(key, "other", **CHATS), maintenance=True)


@pytest.mark.parametrize("no_help", [no_chats, another_revision, too_short, paused], ids=lambda case: case.__name__)
def test_a_released_chat_goes_back_to_its_worker_when_nobody_else_could_serve_it(
    broker: Broker, key: str, no_help: Callable[[Broker, str], None]
) -> None:
    no_help(broker, key)
    request = chat(broker)
    broker.submit(key, broker.job(key, name="first", **CHATS).id, state="released")
    assert broker.job(key, name="first", **CHATS).request_id == request


def test_a_released_chat_goes_to_another_worker_of_that_revision_while_there_is_one(broker: Broker, key: str) -> None:
    broker.nothing(key, name="other", **BOTH)
    request = chat(broker)
    broker.submit(key, broker.job(key, name="first", **CHATS).id, state="released")
    assert broker.nothing(key, name="first", **CHATS) == {}
    assert broker.job(key, name="other", **BOTH).request_id == request


def possible(broker: Broker, request: uuid.UUID) -> bool:
    return broker.context.database.read(lambda tx: is_possible(tx, request))


def test_a_chat_is_possible_while_a_worker_online_takes_chats_of_its_revision(broker: Broker, key: str) -> None:
    broker.nothing(key, name="able", **CHATS)
    request = chat(broker)
    assert possible(broker, request)

    broker.world.advance(301)
    for no_help in (no_chats, another_revision, too_short):
        assert not possible(broker, request)
        no_help(broker, key)
    assert not possible(broker, request)


# --- what a job tells


def test_a_chats_job_says_what_it_was_counted_with_and_how_long_somebody_wants_it(broker: Broker, key: str) -> None:
    chat(broker, deadline=100)
    job = broker.job(key, **CHATS)
    assert (job.model_revision, job.tokenizer_revision) == ("weights-1", "tokens-1")
    assert job.deadline == pytest.approx(100, abs=5)
    assert (job.prefix_token_ids, job.prefix_text, job.attached, job.ttl) == ([], "", False, 60)
    assert job.payload == {"messages": [{"role": "user", "content": "Hello"}], "max_new_tokens": 80}
    assert broker.world.rows("SELECT model_revision, tokenizer_revision, revision FROM jobs") == [
        ("weights-1", "tokens-1", key_of())
    ]

    broker.order()
    text = broker.job(key, name="texts")
    assert (text.model_revision, text.tokenizer_revision, text.deadline) == (None, None, None)


def test_a_job_that_goes_on_where_another_ended_has_what_the_client_was_sent(broker: Broker, key: str) -> None:
    request = chat(broker, attached=True)
    first = broker.job(key, **CHATS)
    broker.world.post(first.id, [7, 8, 9], "abc")
    broker.submit(key, first.id, state="faulted")

    assert broker.nothing(key, name="differs", **takes("chat", manifest=OTHER)) == {"revision": 1}
    job = broker.job(key, name="second", idempotency_key="again", **CHATS)

    assert (job.request_id, job.attached, job.seed) == (request, True, first.seed)
    assert (job.prefix_token_ids, job.prefix_text) == ([7, 8, 9], "abc")
    assert broker.job(key, name="second", idempotency_key="again", **CHATS) == job


def test_a_repeat_under_the_key_is_told_all_of_it_again(broker: Broker, key: str) -> None:
    chat(broker, n=2, deadline=1000)
    broker.order()
    first = broker.pop(key, slots=3, idempotency_key="pop-1", **BOTH).jobs
    again = broker.pop(key, slots=3, idempotency_key="pop-1", **BOTH).jobs
    assert [dataclasses.replace(job, deadline=None) for job in again] == [
        dataclasses.replace(job, deadline=None) for job in first
    ]
    assert [job.deadline is None for job in again] == [False, False, True]


# --- what is refused


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"progress": False}, "progress"),
        ({"manifests": {}}, "manifests.m"),
        ({"models": ["m", "a.b"]}, "manifests.a.b"),
        ({"models": []}, "models"),
    ],
)
def test_a_worker_that_takes_chats_posts_progress_and_says_what_it_serves(
    broker: Broker, key: str, changed: dict[str, Any], field: str
) -> None:
    for offer in (CHATS, BOTH):
        with pytest.raises(HordeError) as refused:
            broker.pop(key, **{**offer, **changed})
        assert (refused.value.status, list(refused.value.errors or {})) == (400, [field])
    assert broker.world.scalar("SELECT count(*) FROM workers") == 0


# --- check-in


def announced(broker: Broker) -> Any:
    (row,) = broker.world.rows("SELECT kinds, manifests, revisions, kind, last_check_in FROM workers")
    return row


def test_what_a_worker_serves_is_kept_as_it_says_and_written_when_it_changes(broker: Broker, key: str) -> None:
    broker.nothing(key, **BOTH)
    first = announced(broker)
    assert first[:4] == (["chat", "text"], {MODEL: MANIFEST.as_json()}, [key_of()], "text")
    assert Manifest.from_json(first[1][MODEL]) == MANIFEST

    broker.nothing(key, **takes("chat", "text"))
    assert announced(broker) == first

    for changed in (
        CHATS,
        takes("chat", manifest=dataclasses.replace(MANIFEST, blocks=255)),
        takes("chat", manifest=OTHER),
        takes("chat", models=(MODEL, "n")),
    ):
        before = announced(broker)
        broker.nothing(key, **changed)
        after = announced(broker)
        manifests = {model: manifest.as_json() for model, manifest in changed["manifests"].items()}
        assert after[:3] == (["chat"], manifests, [key_of(m, model) for model, m in changed["manifests"].items()])
        assert after[4] > before[4]

    broker.world.advance(WRITE_EVERY + 1)
    broker.nothing(key)
    assert announced(broker)[:4] == (["text"], {}, [], "text")


def test_manifests_of_models_that_a_worker_does_not_name_count_for_nothing(broker: Broker, key: str) -> None:
    offer = {**CHATS, "manifests": {MODEL: MANIFEST, "n": MANIFEST}}
    broker.nothing(key, **offer)
    assert announced(broker)[1:3] == ({MODEL: MANIFEST.as_json()}, [key_of()])
    chat(broker, model="n")
    assert broker.nothing(key, **offer) == {}


def test_workers_are_listed_by_their_type_and_by_what_they_take(broker: Broker, key: str) -> None:
    for name, offer in (("texts", {}), ("chats", CHATS), ("both", BOTH)):
        broker.nothing(key, name=name, **offer)

    def names(kind: str | None) -> set[str]:
        return {worker.name for worker in list_workers(broker.context, kind)}

    assert (names("chat"), names("image")) == ({"chats", "both"}, set())
    # A worker's type is the one family that texts and chats are.
    assert names("text") == names(None) == {"texts", "chats", "both"}
    assert (broker.worker("both").type, broker.worker("both").kinds) == ("text", ["chat", "text"])


def test_a_model_is_listed_for_texts_where_a_worker_takes_texts(broker: Broker, key: str) -> None:
    broker.nothing(key, name="chats", **takes("chat", models=("a",)))
    broker.nothing(key, name="both", **takes("text", "chat", models=("b",)))
    listed = list_models(broker.context, "text", min_count=None, max_count=None)
    assert [model.name for model in listed] == ["b"]


# --- estimates


def wait_for(broker: Broker, *, rank_offset: float = 0.0, model: str = MODEL) -> float:
    return broker.context.database.read(
        lambda tx: estimate_wait(tx, kind=Kind.CHAT, model=model, rank_offset=rank_offset)
    )


def test_a_new_chat_waits_for_what_its_rank_puts_behind_and_all_who_serve_it(broker: Broker, key: str) -> None:
    assert wait_for(broker) == 0
    chat(broker, max_length=100)
    chat(broker, max_length=200, n=2)
    chat(broker, max_length=400, rank_offset=50)
    chat(broker, model="n", max_length=1000)
    broker.world.request(max_length=512)

    # Nobody serves it: as if all together did one token a second.
    assert wait_for(broker) == 500
    broker.worker_id(key, "chats", **CHATS, max_length=10)
    assert wait_for(broker) == 500 / ASSUMED_SPEED
    broker.worker_id(key, "both", **BOTH, threads=4, max_length=10)
    assert wait_for(broker) == 500 / ASSUMED_SPEED / 5
    assert wait_for(broker, rank_offset=60) == 900 / ASSUMED_SPEED / 5
    assert wait_for(broker, rank_offset=-60) == 0
    # Who takes no chats is no help, nor is who is away.
    broker.worker_id(key, "texts", max_length=10, models=["n"])
    assert wait_for(broker) == 500 / ASSUMED_SPEED / 5
    broker.world.advance(CHAT_ONLINE_SECONDS + 1)
    assert wait_for(broker) == 900
    assert wait_for(broker, model="unheard-of") == 0


# --- at once


def test_texts_and_chats_are_shared_out_among_workers_that_pop_at_once(broker: Broker, key: str) -> None:
    offers = {"texts": {}, "chats": CHATS, "both": BOTH, "also": BOTH}
    for name, offer in offers.items():
        broker.worker_id(key, name, **offer)
    expected = []
    for number in range(40):
        n = 1 + number % 3
        request = broker.order(n=n) if number % 2 else chat(broker, n=n)
        expected += [(request, slot) for slot in range(n)]

    def pop_until_nothing(name: str) -> list[PoppedJob]:
        jobs: list[PoppedJob] = []
        while popped := broker.pop(key, name=name, slots=3, **offers[name]).jobs:
            jobs += popped
        return jobs

    found = together(*[partial(pop_until_nothing, name) for name in offers], within=60)

    jobs = [job for some in found for job in some]
    assert sorted((job.request_id, job.slot) for job in jobs) == sorted(expected)
    assert {job.kind for job in found[0]} <= {"text"}
    assert {job.kind for job in found[1]} <= {"chat"}


def test_a_chat_that_is_cancelled_as_it_is_popped_is_given_out_or_was_never_there(broker: Broker, key: str) -> None:
    broker.worker_id(key, **CHATS)
    for _ in range(ROUNDS):
        request = chat(broker, n=2, attached=True)

        popped, _ = together(partial(broker.pop, key, slots=2, **CHATS), partial(broker.world.cancel, request))

        status = broker.world.status(request)
        assert (status.cancelled, status.done, status.waiting) == (True, True, 0)
        # Either its worker has it, and what it had posted, which is nothing, was stored by the cancel; or nobody ever had it.
        assert status.finished == len(popped.jobs)
        assert len(popped.jobs) in (0, 2)


@pytest.mark.parametrize("call", [1, 2])
def test_a_chat_never_stays_with_a_worker_that_has_hung_up(broker: Broker, key: str, call: int) -> None:
    broker.worker_id(key, "dead", **CHATS)
    request = chat(broker, n=2)
    asked = iter(range(1, 1000))
    gone = broker.pop(key, name="dead", slots=2, client_gone=lambda: next(asked) >= call, **CHATS)
    assert gone.jobs == []
    assert [job[1:3] for job in broker.world.jobs(request)] == [("released", "not_delivered")] * 2 * (call - 1)
    assert [job.request_id for job in broker.pop(key, name="alive", slots=2, **CHATS).jobs] == [request] * 2
    assert broker.worker("dead").uncompleted_jobs == 0
