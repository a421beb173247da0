"""Results of chats: whose counts are believed, what they cost, what contradicts a stream, and who is told of it."""

from __future__ import annotations

import dataclasses
import json
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from horde.errors import ErrorCode, HordeError
from horde.kudos.prices import HUNDREDTHS, most_per_text, text_reward
from horde.lifecycle.words import Kind, Outcome
from horde.maintenance.passes import run_pass
from horde.registry.revisions import Manifest, revision_key
from horde.registry.tokenizers import Tokenizers, canonical_form, store_tokenizer
from horde.usecases.chat import cancel_chat
from horde.usecases.pop import PoppedJob
from horde.usecases.progress import Chunk, post_progress
from tests.support import tiny_tokenizer
from tests.support.broker import MODEL, Broker, open_broker
from tests.support.invariants import check_invariants
from tests.support.postgres import Server

PROMPT = tiny_tokenizer.encode("Say something:")
MANIFEST = Manifest.from_json(tiny_tokenizer.manifest())
KEY = revision_key(MODEL, MANIFEST.model_revision, MANIFEST.tokenizer_revision)


@pytest.fixture(scope="module")
def opened(server: Server) -> Iterator[Broker]:
    url = server.create()
    try:
        with open_broker(url, rate_limits="off") as made:
            made.context.start()
            publish(made)
            yield made
            check_invariants(made.context.database)
    finally:
        server.drop(url)


@pytest.fixture
def broker(opened: Broker) -> Iterator[Broker]:
    yield opened
    # What a test left behind is nothing that the next one pops.
    for (request,) in opened.world.rows("SELECT id FROM requests WHERE outcome IS NULL"):
        opened.world.cancel(request)


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner, trusted, so that its rewards go by tokens."""
    return broker.user(None, "trusted").api_key


def publish(broker: Broker) -> None:
    """Store the tokenizer as its route does."""
    canonical = canonical_form(json.dumps(tiny_tokenizer.upload()).encode())
    with broker.context.database.transaction() as tx:
        store_tokenizer(tx, 0, canonical, zlib.compress(canonical))


def chat(broker: Broker, **fields: Any) -> uuid.UUID:
    """An attached chat of which 100 tokens are wanted, counted with the model's tokenizer unless `payload` says otherwise."""
    payload = {
        "messages": [{"role": "user", "content": "Say something:"}],
        "prompt": "Say something:",
        "prompt_token_ids": PROMPT,
        "prompt_tokens": len(PROMPT),
        "estimated": False,
        "max_new_tokens": 100,
        "stop": ["END"],
        "logprobs": None,
        **fields.pop("payload", {}),
    }
    values = {"attached": True, "needs_progress": True, "revision": KEY, "max_length": 100, **fields}
    return broker.world.request(kind=Kind.CHAT, payload=payload, **values)


def take(broker: Broker, key: str, manifest: Manifest = MANIFEST) -> PoppedJob:
    """Pop the one chat that waits."""
    (job,) = broker.pop(
        key, name=f"worker of {key[:8]}", kinds=["chat"], manifests={MODEL: manifest}, progress=True, slots=1
    ).jobs
    return job


def post(broker: Broker, key: str, job: PoppedJob, text: str, *, after: str = "") -> int:
    """Post `text` behind what stands before it; how many tokens the broker has then."""
    ids = tiny_tokenizer.encode(text)
    chunk = Chunk(job.id, len(after), ids, text, len(after))
    (answer,) = post_progress(broker.context, key, f"worker of {key[:8]}", [chunk])
    return answer.accepted


def post_ids(broker: Broker, key: str, job: PoppedJob, ids: list[int], text: str) -> int:
    """Post from the beginning whatever ids and text; how many tokens the broker has then."""
    (answer,) = post_progress(broker.context, key, f"worker of {key[:8]}", [Chunk(job.id, 0, ids, text, 0)])
    return answer.accepted


def stored(broker: Broker, request: uuid.UUID) -> dict[str, Any]:
    """The one result of a request."""
    (result,) = broker.world.status(request).results
    return result


def hand_in(broker: Broker, key: str, job: PoppedJob, text: str, **fields: Any) -> float:
    return broker.submit(
        key, job.id, text, **{"finish_reason": "stop", "token_ids": tiny_tokenizer.encode(text), **fields}
    )


def worth(tokens: int) -> float:
    """What a trusted worker earns for so many tokens behind this prompt."""
    one = text_reward(tokens=tokens, prompt_tokens=len(PROMPT), model=MODEL, trusted=True, validated=True)
    return min(one, most_per_text(max_length=100, prompt_tokens=len(PROMPT), models=[MODEL]) - HUNDREDTHS) / HUNDREDTHS


# --- counts


def test_tokens_are_counted_by_the_ids_that_the_text_is_made_of(broker: Broker, key: str) -> None:
    request = chat(broker)
    text = "ж" * 30

    reward = hand_in(broker, key, take(broker, key), text, cached_tokens=5)

    result = stored(broker, request)
    assert (result["tokens"], result["cached_tokens"], result["finish_reason"]) == (60, 5, "stop")
    assert result["token_ids"] == tiny_tokenizer.encode(text)
    assert reward == pytest.approx(worth(60))
    assert broker.world.status(request).charged == round(worth(60) * HUNDREDTHS) + HUNDREDTHS


@pytest.mark.parametrize(
    ("text", "ids", "tokens"),
    [
        ("hello", tiny_tokenizer.encode("hello world"), 5),
        ("hello", [1, 2, 3, 4, 5, 6, 7, 8], 5),
        ("hello", [*tiny_tokenizer.encode("hello"), tiny_tokenizer.END, tiny_tokenizer.END], 5),
        ("hello", [], 5),
        ("hello", None, 5),
        ("hello", [99_999_999], 5),
        ("hello", tiny_tokenizer.encode("helloEND"), 8),
    ],
    ids=[
        "more than the text",
        "junk",
        "control tokens",
        "none",
        "not told",
        "no tokens at all",
        "cut at a stop string",
    ],
)
def test_what_a_worker_says_counts_only_where_it_is_what_the_text_is_made_of(
    broker: Broker, key: str, text: str, ids: list[int] | None, tokens: int
) -> None:
    request = chat(broker)
    hand_in(broker, key, take(broker, key), text, token_ids=ids)
    assert stored(broker, request)["tokens"] == tokens


def test_no_more_tokens_count_than_were_ordered(broker: Broker, key: str) -> None:
    request = chat(broker)
    hand_in(broker, key, take(broker, key), "x" * 140)
    assert (stored(broker, request)["tokens"], len(stored(broker, request)["token_ids"])) == (100, 100)


def test_without_the_tokenizer_a_token_is_four_characters(broker: Broker, key: str) -> None:
    manifest = Manifest.from_json({**tiny_tokenizer.manifest(), "tokenizer_revision": "f" * 64})
    revision = revision_key(MODEL, manifest.model_revision, manifest.tokenizer_revision)
    request = chat(broker, revision=revision, payload={"estimated": True, "prompt_token_ids": None})
    hand_in(broker, key, take(broker, key, manifest), "eight of them and then some more", token_ids=[1, 2, 3])
    assert stored(broker, request)["tokens"] == 8


def test_no_more_of_a_prompt_was_computed_before_than_it_has(broker: Broker, key: str) -> None:
    request = chat(broker)
    hand_in(broker, key, take(broker, key), "hello", cached_tokens=1_000_000)
    assert stored(broker, request)["cached_tokens"] == len(PROMPT)


# --- counts of what a cancel leaves


@pytest.fixture
def tokenizer(broker: Broker) -> None:
    """The model's tokenizer at hand, as where one of its chats was admitted."""
    assert broker.context.tokenizers.load(broker.context.database, MANIFEST.tokenizer_revision)


CONTROL = [tiny_tokenizer.END] * 100


@pytest.mark.parametrize(
    ("text", "ids", "tokens"),
    [
        ("ж" * 30, tiny_tokenizer.encode("ж" * 30), 60),
        ("", CONTROL, 0),
        ("hello", [*tiny_tokenizer.encode("hello"), *CONTROL[5:]], 5),
        ("hello", [1, 2, 3, 4, 5, 6, 7, 8], 5),
        ("hello", [1], 1),
    ],
    ids=["what it is made of", "control tokens", "control tokens behind text", "junk", "fewer than the text"],
)
@pytest.mark.usefixtures("tokenizer")
def test_what_is_left_by_a_cancel_counts_as_a_result_does(
    broker: Broker, key: str, text: str, ids: list[int], tokens: int
) -> None:
    request = chat(broker)
    post_ids(broker, key, take(broker, key), ids, text)

    cancel_chat(broker.context, request)

    result = stored(broker, request)
    assert (result["tokens"], result["token_ids"], result["text"]) == (tokens, ids, text)
    assert broker.world.status(request).charged == (
        round(worth(max(20, tokens)) * HUNDREDTHS) + HUNDREDTHS if tokens else 0
    )


@pytest.mark.usefixtures("tokenizer")
@pytest.mark.parametrize("text", ["", "eight of them and then some more", "abc"])
def test_maintenance_counts_with_a_tokenizer_that_it_has_not_met_before(broker: Broker, key: str, text: str) -> None:
    request = chat(broker)
    post_ids(broker, key, take(broker, key), CONTROL, text)
    broker.world.advance(31)
    # As a process of maintenance alone, which has admitted nothing.
    assert run_pass(dataclasses.replace(broker.context, tokenizers=Tokenizers())).cancelled == 1
    assert stored(broker, request)["tokens"] == len(tiny_tokenizer.encode(text))


@pytest.mark.usefixtures("tokenizer")
def test_who_adds_nothing_but_ids_to_a_prefix_earns_nothing_at_a_cancel(broker: Broker, key: str) -> None:
    request = chat(broker)
    first, text = take(broker, key), "a" * 40
    post(broker, key, first, text)
    broker.submit(key, first.id, state="faulted")
    other = broker.user(None, "trusted").api_key
    post_ids(broker, other, take(broker, other), [*tiny_tokenizer.encode(text), *CONTROL[:50]], text)

    cancel_chat(broker.context, request)

    paid = broker.world.rows(
        "SELECT tokens, reward FROM jobs WHERE request_id = %(id)s AND state = 'stored'", id=request
    )
    assert paid == [(40, 0)]


@pytest.mark.usefixtures("tokenizer")
def test_ids_that_are_no_tokens_are_not_taken(broker: Broker, key: str) -> None:
    request = chat(broker)
    job = take(broker, key)
    assert post_ids(broker, key, job, [104, tiny_tokenizer.TURN_END + 1], "h") == 0
    assert post(broker, key, job, "hello") == 5
    assert post_ids(broker, key, job, [*tiny_tokenizer.encode("hello"), 99_999_999], "hello there") == 5
    broker.submit(key, job.id, state="faulted")
    assert take(broker, broker.user().api_key).prefix_token_ids == tiny_tokenizer.encode("hello")
    assert broker.world.status(request).outcome is None


# --- prices


def test_a_chat_without_a_word_earns_nothing_and_costs_the_fee(broker: Broker, key: str) -> None:
    request = chat(broker)
    assert hand_in(broker, key, take(broker, key), "", token_ids=CONTROL) == 0
    assert broker.world.status(request).charged == HUNDREDTHS


def test_a_prompt_that_nobody_has_counted_earns_no_more_than_one_of_a_thousand_tokens(broker: Broker, key: str) -> None:
    rewards = []
    for prompt_tokens, estimated in ((1024, True), (250_000, True), (250_000, False)):
        chat(broker, payload={"prompt_tokens": prompt_tokens, "estimated": estimated})
        rewards.append(hand_in(broker, key, take(broker, key), "x" * 50))
    assert rewards[0] == rewards[1] < rewards[2]


def test_who_goes_on_with_a_stream_earns_for_its_own_tokens_and_the_client_pays_for_all(
    broker: Broker, key: str
) -> None:
    request = chat(broker)
    first, text = take(broker, key), "a" * 40
    post(broker, key, first, text)
    broker.submit(key, first.id, state="faulted")
    other = broker.user(None, "trusted").api_key
    second = take(broker, other)
    assert (second.prefix_text, second.prefix_token_ids) == (text, tiny_tokenizer.encode(text))

    reward = hand_in(broker, other, second, text + "b" * 30)

    assert reward == pytest.approx(worth(30))
    assert broker.world.status(request).charged == round(worth(70) * HUNDREDTHS) + HUNDREDTHS
    assert worth(30) < worth(70)


# --- contradictions


def test_a_result_that_contradicts_the_stream_is_refused_and_its_job_faulted(broker: Broker, key: str) -> None:
    request = chat(broker)
    job = take(broker, key)
    post(broker, key, job, "hello")

    for again in range(2):
        with pytest.raises(HordeError) as refused:
            hand_in(broker, key, job, "howdy", idempotency_key="k")
        assert (refused.value.status, refused.value.rc, again) == (400, "ContradictsProgress", again)
    with pytest.raises(HordeError) as late:
        hand_in(broker, key, job, "hello you")

    assert late.value.rc == "AbortedGen"
    assert broker.world.jobs(request) == [(0, "faulted", "contradicted", None, None, None)]
    status = broker.world.status(request)
    assert (status.waiting, status.restarted, status.outcome) == (1, 1, None)
    assert take(broker, broker.user().api_key).prefix_text == "hello"


@pytest.mark.parametrize("told", [None, []])
def test_a_result_that_is_silent_about_the_ids_that_were_posted_contradicts_them(
    broker: Broker, key: str, told: list[int] | None
) -> None:
    chat(broker)
    job = take(broker, key)
    post(broker, key, job, "hello")
    with pytest.raises(HordeError) as refused:
        hand_in(broker, key, job, "hello you", token_ids=told)
    assert refused.value.rc == "ContradictsProgress"


def test_a_polled_chat_has_sent_nobody_anything(broker: Broker, key: str) -> None:
    request = chat(broker, attached=False)
    job = take(broker, key)
    post(broker, key, job, "hello")
    hand_in(broker, key, job, "howdy")
    assert stored(broker, request)["text"] == "howdy"


# --- rejections


@pytest.mark.parametrize(
    ("estimated", "code", "outcome"),
    [
        (False, "context_length_exceeded", None),
        (True, "context_length_exceeded", Outcome.REJECTED),
        (False, "unsupported_parameter", None),
        (True, "unsupported_parameter", Outcome.REJECTED),
    ],
)
def test_a_worker_may_say_that_an_order_cannot_be_served_where_the_broker_has_not_counted_it(
    broker: Broker, key: str, estimated: bool, code: str, outcome: Outcome | None
) -> None:
    request = chat(broker, payload={"estimated": estimated})
    broker.submit(key, take(broker, key).id, state="rejected", error_code=code)
    status = broker.world.status(request)
    assert (status.outcome, status.error_code) == (outcome, code if outcome else None)
    assert broker.world.jobs(request)[0][1] == ("rejected" if outcome else "faulted")


# --- who is told


def test_whoever_waits_hears_of_posts_of_the_result_and_of_what_maintenance_ends(broker: Broker, key: str) -> None:
    streams = broker.context.streams
    request = chat(broker)
    job = take(broker, key)
    with streams.follow(request, 1) as follower:
        follower.next(1)
        post(broker, key, job, "hel")
        assert [slot.text for slot in heard(follower).slots] == ["hel"]
        hand_in(broker, key, job, "hello")
        output = heard(follower)
        assert (output.done, output.outcome, output.slots[0].text) == (True, "completed", "lo")

    lapsed, waiting = chat(broker), chat(broker, deadline=50)
    with streams.follow(lapsed, 1) as one, streams.follow(waiting, 1) as other:
        one.next(1), other.next(1)
        broker.world.advance(51)
        assert run_pass(broker.context).cancelled == 2
        assert (heard(one).outcome_reason, heard(other).outcome_reason) == ("disconnect", "deadline")


def heard(follower: Any) -> Any:
    """The next output, which an announcement brings long before anybody looks by themselves."""
    output = follower.next(3)
    assert output is not None, "nobody said anything"
    return output


def test_what_a_submit_is_refused_for_is_told_by_name(broker: Broker, key: str) -> None:
    chat(broker)
    job = take(broker, key)
    post(broker, key, job, "hello")
    with pytest.raises(HordeError) as refused:
        hand_in(broker, key, job, "x")
    assert refused.value.code is ErrorCode.INVALID_REQUEST
    assert list(refused.value.errors or {}) == ["generation"]
