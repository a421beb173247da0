"""Chats before anything is enqueued: which revision they are pinned to, how their prompts are read and counted, what fits."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horde.admission.chat import MOST_CHARACTERS_PER_TOKEN, USUAL_MOST_TOKENS
from horde.db.tables.workers import CHAT_ONLINE_SECONDS
from horde.errors import ErrorCode
from horde.registry.chat_tokenizer import ChatTokenizer
from horde.registry.revisions import Manifest, Published, publish_revision
from horde.usecases.chat import order_chat
from horde.usecases.models import find_model
from horde.usecases.progress import post_progress
from horde.usecases.workers import update_worker
from tests.support import tiny_tokenizer
from tests.support.broker import Broker, open_broker
from tests.support.chat_orders import HELLO, MANIFEST, OTHER, PROMPT, TOKENS, UNKNOWN, ChatOrders, order_broker
from tests.support.postgres import Server


@pytest.fixture(scope="module")
def broker(server: Server) -> Iterator[Broker]:
    with order_broker(server) as made:
        yield made


@pytest.fixture
def chats(broker: Broker) -> ChatOrders:
    """For a model of this test's own."""
    return ChatOrders.of(broker)


# --- who could serve it


def test_a_chat_is_pinned_to_the_revision_that_most_threads_serve(chats: ChatOrders) -> None:
    for name, manifest, threads in (("a", MANIFEST, 2), ("b", MANIFEST, 2), ("c", OTHER, 3)):
        chats.serve(manifest, name=name, threads=threads)
    row = chats.asked()
    assert (row.models, row.revision, row.needs_progress) == ([chats.model], chats.pinned(MANIFEST), True)
    chats.serve(OTHER, name="d", threads=2)
    assert chats.asked().revision == chats.pinned(OTHER)


def test_a_stranger_does_not_draw_the_chats_of_a_model_to_itself(chats: ChatOrders) -> None:
    stranger = chats.broker.user()

    def swarm(manifest: Manifest) -> None:
        for number in range(3):
            fields: dict[str, Any] = {"name": f"stranger {number}", "threads": 50, "max_length": 4096}
            chats.broker.pop(stranger.api_key, **chats.offer(manifest, **fields))

    invented = dataclasses.replace(UNKNOWN, model_revision="invented", context_length=1 << 30, blocks=1 << 30)
    swarm(invented)
    # There is nobody else.
    assert chats.asked().revision == chats.pinned(invented)
    chats.serve(threads=1)
    assert chats.asked().revision == chats.pinned()
    assert chats.ask(model_revision="invented").estimated
    # Nor with the tokenizer that everybody knows, or in the very revision with other numbers.
    swarm(dataclasses.replace(OTHER, context_length=1 << 30))
    assert chats.asked().revision == chats.pinned()
    swarm(dataclasses.replace(MANIFEST, context_length=1 << 30, block_size=1 << 30))
    row = chats.asked()
    assert (row.revision, row.payload["blocks"]) == (chats.pinned(), math.ceil((TOKENS + 64) / MANIFEST.block_size))
    assert chats.refusal(max_tokens=4096).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert chats.refusal(max_tokens=4000).code is ErrorCode.UNSUPPORTED_PARAMETER


def test_what_was_published_is_as_good_as_a_trusted_worker_and_bounds_who_serves_it(chats: ChatOrders) -> None:
    first, second = chats.broker.user(), chats.broker.user()
    chats.serve(OTHER, owner=first, name="other", threads=3)
    chats.serve(MANIFEST, owner=second, name="published", threads=1)
    assert chats.asked().revision == chats.pinned(OTHER)
    with chats.broker.context.database.transaction() as tx:
        # The name of a revision alone says nothing: with another tokenizer it is another one.
        for manifest, tokenizer in ((OTHER, "t"), (MANIFEST, MANIFEST.tokenizer_revision)):
            published = Published(chats.model, manifest.model_revision, tokenizer, 1000, 16, 1)
            publish_revision(tx, chats.owner.id, published)
    assert chats.asked().revision == chats.pinned(MANIFEST)
    assert chats.longest(max_tokens=1000 - TOKENS) == 1000 - TOKENS
    assert "1000 tokens" in chats.refusal(max_tokens=1001 - TOKENS).message
    assert find_model(chats.broker.context, chats.client, chats.model).context_length == 1000


def test_a_worker_that_has_not_been_heard_of_for_a_minute_is_not_waited_for(chats: ChatOrders) -> None:
    worker = chats.serve()
    for seconds, is_there in ((CHAT_ONLINE_SECONDS - 10, True), (CHAT_ONLINE_SECONDS + 1, False)):
        with chats.broker.context.database.transaction() as tx:
            tx.execute(
                "UPDATE workers SET last_check_in = horde_now() - make_interval(secs => %(s)s) WHERE id = %(id)s",
                {"id": worker, "s": seconds},
            )
        if is_there:
            chats.ask()
        else:
            assert chats.refusal().code is ErrorCode.NO_CAPACITY
    post_progress(chats.broker.context, chats.owner.api_key, chats.name(), [])
    chats.ask()
    post_progress(chats.broker.context, chats.owner.api_key, chats.name(), [], leaving=True)
    assert chats.refusal().code is ErrorCode.NO_CAPACITY


def test_one_tokenizer_with_two_templates_is_two_revisions(chats: ChatOrders) -> None:
    short = chats.with_template("{{ messages[0]['content'] }}")
    chats.serve(MANIFEST, name="long", threads=1)
    chats.serve(short, name="short", threads=2)
    accepted = chats.ask()
    assert accepted.prompt_tokens == len("Hello")
    assert chats.row(accepted).revision == chats.pinned(short)
    assert chats.row(accepted).payload["prompt"] == "Hello"


def test_a_revision_that_is_asked_for_is_taken_however_few_serve_it(chats: ChatOrders) -> None:
    chats.serve(MANIFEST, name="many", threads=9)
    chats.serve(OTHER, name="few", threads=1)
    asked = chats.ask(model_revision=OTHER.model_revision)
    assert chats.row(asked).revision == chats.pinned(OTHER)
    error = chats.refusal(model_revision="weights-3")
    assert (error.code, error.status, error.rc) == (ErrorCode.NO_CAPACITY, 503, "NoCapacity")


def test_of_several_models_the_first_that_is_served_is_taken(chats: ChatOrders) -> None:
    chats.serve()
    second = ChatOrders.of(chats.broker)
    second.serve()
    a, b = chats.model, second.model
    for models, taken in (([a, b], chats), ([b, a], second), (["no/such", "*", b], second)):
        row = chats.asked(models=models)
        assert (row.models, row.revision) == ([taken.model], taken.pinned())


@pytest.mark.parametrize("name", ["no/such", "*", "", "m\0", "'; --", "x" * 255, "🤗"])
def test_a_model_that_nobody_ever_served_is_not_found(chats: ChatOrders, name: str) -> None:
    error = chats.refusal(models=[name])
    assert (error.code, error.status, error.rc) == (ErrorCode.MODEL_NOT_FOUND, 404, "ModelNotFound")
    assert error.param == "model"


def test_a_model_that_is_served_for_texts_alone_is_not_found(chats: ChatOrders) -> None:
    chats.broker.worker_id(chats.owner.api_key, name=chats.name("texts"), models=[chats.model])
    assert chats.refusal().code is ErrorCode.MODEL_NOT_FOUND


def test_a_model_that_nobody_serves_now_is_another_answer(chats: ChatOrders) -> None:
    worker = chats.serve()
    chats.ask()
    with chats.broker.context.database.transaction() as tx:
        tx.execute(
            "UPDATE workers SET last_check_in = horde_now() - interval '1 hour' WHERE id = %(id)s", {"id": worker}
        )
    error = chats.refusal()
    assert (error.code, error.status, error.rc) == (ErrorCode.NO_CAPACITY, 503, "NoCapacity")
    assert error.retry_after is not None
    assert error.retry_after > 0
    # Known is known, also where others never were.
    assert chats.refusal(models=["no/such", chats.model]).code is ErrorCode.NO_CAPACITY


def test_only_workers_that_may_take_it_count(chats: ChatOrders) -> None:
    stranger = chats.broker.user()
    first = chats.serve(MANIFEST, owner=stranger, name="first", threads=9)
    second = chats.serve(OTHER, name="second", threads=1)

    def revision(**fields: Any) -> str:
        return str(chats.asked(**fields).revision)

    # A stranger is asked where nobody else may be.
    assert revision() == chats.pinned(OTHER)
    assert revision(worker_ids=[first]) == chats.pinned(MANIFEST)
    assert revision(worker_ids=[second]) == chats.pinned(OTHER)
    assert revision(worker_ids=[first, second]) == chats.pinned(OTHER)
    assert revision(worker_ids=[second], worker_blacklist=True) == chats.pinned(MANIFEST)
    assert revision(worker_ids=[first], worker_blacklist=True) == chats.pinned(OTHER)
    assert revision(trusted_workers=True) == chats.pinned(OTHER)
    for fields in (
        {"worker_ids": [first, second], "worker_blacklist": True},
        {"worker_ids": [first], "trusted_workers": True},
        {"worker_ids": [first], "model_revision": OTHER.model_revision},
    ):
        assert chats.refusal(**fields).code is ErrorCode.NO_CAPACITY
    missing = chats.refusal(worker_ids=[uuid.uuid4()])
    assert (missing.status, missing.rc) == (404, "WorkerNotFound")


def test_who_wants_no_slow_workers_is_not_kept_waiting_for_one(chats: ChatOrders) -> None:
    slow = chats.serve(MANIFEST, name="slow", threads=9)
    with chats.broker.context.database.transaction() as tx:
        tx.execute(
            "INSERT INTO worker_totals (worker_id, recent_tokens, recent_seconds) VALUES (%(id)s, 49, 10)",
            {"id": slow},
        )
    assert chats.refusal(slow_workers=False).code is ErrorCode.NO_CAPACITY
    assert chats.asked().revision == chats.pinned(MANIFEST)
    # One that was never measured is not slow.
    chats.serve(OTHER, name="new", threads=1)
    row = chats.asked(slow_workers=False)
    assert (row.revision, row.slow_workers) == (chats.pinned(OTHER), False)


def test_a_worker_that_is_paused_serves_its_owner_alone(chats: ChatOrders) -> None:
    worker = chats.serve()
    update_worker(chats.broker.context, chats.owner.api_key, worker, maintenance=True)
    assert chats.refusal().code is ErrorCode.NO_CAPACITY
    accepted = chats.ask(chats.owner.api_key)
    assert chats.take().request_id == accepted.id


# --- the pinned revision, and who is given the job


def test_only_a_worker_of_the_pinned_revision_is_offered_a_chat(chats: ChatOrders) -> None:
    chats.serve(threads=2)
    accepted = chats.ask()
    assert chats.nothing(OTHER, name="other") == {"revision": 1}
    assert chats.nothing(name="texts", kinds=["text"], manifests={}) == {}
    job = chats.take()
    assert job.request_id == accepted.id
    assert (job.model_revision, job.tokenizer_revision) == (MANIFEST.model_revision, MANIFEST.tokenizer_revision)


def test_a_worker_that_finds_itself_to_be_another_hands_back_without_blame(chats: ChatOrders) -> None:
    chats.serve()
    accepted = chats.ask()
    job = chats.take()
    assert chats.report(job, "released") == 0
    status = chats.status(accepted)
    assert (status.waiting, status.restarted, status.faulted, status.done) == (1, 1, False, False)
    assert chats.broker.worker(chats.name()).uncompleted_jobs == 0
    again = chats.take(name="other")
    assert (again.request_id, again.seed, again.payload) == (accepted.id, job.seed, job.payload)


def test_a_chat_is_offered_to_those_who_have_room_for_it(chats: ChatOrders) -> None:
    small: dict[str, Any] = {"name": "small", "max_context_length": 100}
    short: dict[str, Any] = {"name": "short", "max_length": 50}
    chats.serve()
    chats.serve(**small)
    chats.serve(**short)
    accepted = chats.ask(max_tokens=101)
    assert chats.nothing(**small) == {"max_context_length": 1}
    assert chats.nothing(**short) == {"max_length": 1}
    assert chats.take().request_id == accepted.id
    # One that just fits.
    fits = chats.ask(max_tokens=100 - TOKENS)
    assert chats.take(**small).request_id == fits.id


# --- its prompt


def test_a_worker_gets_text_ids_and_bounds_as_they_were_counted(chats: ChatOrders) -> None:
    chats.serve()
    sampling = {"temperature": 0.5, "logit_bias": {"65": -1.0}}
    accepted = chats.ask(stop=["END"], sampling=sampling, logprobs=3, n=2)
    assert (accepted.prompt_tokens, accepted.estimated, accepted.message) == (TOKENS, False, None)
    assert chats.take().payload == {
        "messages": HELLO,
        "prompt": PROMPT,
        "prompt_token_ids": tiny_tokenizer.encode(PROMPT),
        "prompt_tokens": TOKENS,
        "estimated": False,
        "max_new_tokens": 64,
        "blocks": math.ceil((TOKENS + 64) / MANIFEST.block_size),
        "stop": ["END"],
        "logprobs": 3,
        "sampling": sampling,
        "tools": None,
        "response_format": None,
    }
    row = chats.row(accepted)
    assert (row.max_length, row.max_context_length, row.waiting) == (64, TOKENS + 64, 1)


@pytest.mark.parametrize("prompt", ["Once upon ça", [79, 110, 99, 101, tiny_tokenizer.TURN_END]])
def test_a_completion_is_continued_as_it_is(chats: ChatOrders, prompt: str | list[int]) -> None:
    chats.serve()
    accepted = chats.ask(messages=None, prompt=prompt)
    payload = chats.take().payload
    ids = tiny_tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    assert (payload["messages"], payload["prompt_token_ids"]) == (None, ids)
    assert payload["prompt"] == (prompt if isinstance(prompt, str) else None)
    assert accepted.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError"),
        ("{{ messages[7]['content'] }}", "fails at these messages"),
        ("{% if false %}{% endif %}", "Nothing is left"),
    ],
)
def test_messages_that_a_template_does_not_take_are_refused_by_name(
    chats: ChatOrders, template: str, said: str
) -> None:
    chats.serve(chats.with_template(template))
    error = chats.refusal()
    assert (error.code, error.status, error.param) == (ErrorCode.INVALID_REQUEST, 400, "messages")
    assert said in error.message
    # A prompt needs no template.
    assert chats.ask(messages=None, prompt="Hello").prompt_tokens == 5


def test_a_model_without_a_template_completes_prompts_alone(chats: ChatOrders) -> None:
    chats.serve(chats.with_template(None))
    error = chats.refusal()
    assert (error.code, error.status, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, 400, "messages")
    assert chats.ask(messages=None, prompt="Hello").prompt_tokens == 5


def test_tokens_that_the_model_does_not_have_are_refused(chats: ChatOrders) -> None:
    chats.serve()
    last = max(tiny_tokenizer.SPECIAL)
    chats.ask(sampling={"logit_bias": {"0": 1.0, str(last): 1.0}})
    chats.ask(messages=None, prompt=[0, last])
    for fields, field in (
        ({"sampling": {"logit_bias": {"0": 1.0, str(last + 1): 1.0}}}, "logit_bias"),
        ({"messages": None, "prompt": [0, last + 1]}, "prompt"),
        ({"messages": None, "prompt": [-1]}, "prompt"),
    ):
        error = chats.refusal(**fields)
        assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, field)


def test_no_connection_to_the_database_is_held_while_a_prompt_is_rendered_and_counted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    url = server.create()
    try:
        with open_broker(url, database_pool=2, database_pool_wait_seconds=1) as broker:
            chats = ChatOrders.of(broker)
            chats.publish()
            chats.serve()
            for name in ("render", "encode"):
                monkeypatch.setattr(ChatTokenizer, name, _asking(broker, getattr(ChatTokenizer, name), asked))
            # Of two connections this is one: whoever holds the other while the database is asked waits for itself.
            with broker.context.database.autocommit() as tx:
                tx.execute("SELECT 1")
                for fields in ({}, {"messages": None, "prompt": "Hello"}, {"idempotency_key": "once"}):
                    order_chat(broker.context, chats.client, chats.order(**fields))
    finally:
        server.drop(url)
    assert asked == ["render", "encode", "encode", "render", "encode"]


def _asking(broker: Broker, method: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    """The same method, which asks the database for something first."""

    def asks(*arguments: Any, **named: Any) -> Any:
        assert broker.world.scalar("SELECT 1") == 1
        asked.append(method.__name__)
        return method(*arguments, **named)

    return asks


# --- a tokenizer that nobody has published


@pytest.mark.parametrize("revision", ["f" * 64, "of-my-own"])
def test_without_its_tokenizer_a_prompt_is_guessed_at_and_said_to_be(chats: ChatOrders, revision: str) -> None:
    manifest = dataclasses.replace(MANIFEST, tokenizer_revision=revision)
    chats.serve(manifest)
    messages = [{"role": "system", "content": "x" * 401}, {"role": "user", "content": "y"}]
    accepted = chats.ask(messages=messages)
    assert (accepted.prompt_tokens, accepted.estimated) == (101, True)
    assert "estimate" in str(accepted.message)
    payload = chats.take(manifest).payload
    assert payload["messages"] == messages
    assert (payload["prompt"], payload["prompt_token_ids"], payload["estimated"]) == (None, None, True)
    status = chats.status(accepted)
    assert (status.prompt_tokens, status.estimated) == (101, True)


def test_a_guess_refuses_nobody_for_the_length_of_a_prompt(chats: ChatOrders) -> None:
    chats.serve(UNKNOWN)
    long = [{"role": "user", "content": "x" * 100_000}]
    for max_tokens in (64, None):
        accepted = chats.ask(messages=long, max_tokens=max_tokens)
        assert chats.row(accepted).max_context_length == UNKNOWN.context_length
        assert chats.take(UNKNOWN).request_id == accepted.id


def test_of_unknown_tokens_none_can_be_shown(chats: ChatOrders) -> None:
    chats.serve(UNKNOWN)
    error = chats.refusal(logprobs=0)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "logprobs")


@pytest.mark.parametrize("code", [ErrorCode.CONTEXT_LENGTH_EXCEEDED, ErrorCode.UNSUPPORTED_PARAMETER])
def test_where_the_broker_guessed_the_workers_refusal_stands_and_blames_nobody(
    chats: ChatOrders, code: ErrorCode
) -> None:
    chats.serve(UNKNOWN)
    accepted = chats.ask()
    job = chats.take(UNKNOWN)
    assert chats.report(job, "rejected", error_code=code) == 0
    status = chats.status(accepted)
    assert (status.error_code, status.faulted, status.done) == (code, True, True)
    assert chats.broker.worker(chats.name()).uncompleted_jobs == 0


def test_once_its_tokenizer_is_published_the_next_prompt_is_counted(chats: ChatOrders) -> None:
    body = tiny_tokenizer.upload(tiny_tokenizer.TEMPLATE + "{# new #}")
    manifest = dataclasses.replace(MANIFEST, tokenizer_revision=tiny_tokenizer.revision_of(body))
    chats.serve(manifest)
    assert chats.ask().estimated
    chats.publish(body)
    accepted = chats.ask()
    assert (accepted.estimated, accepted.prompt_tokens) == (False, TOKENS)


# --- how long an answer may be


def test_an_answer_that_names_no_length_gets_what_fits(chats: ChatOrders) -> None:
    chats.serve()
    assert chats.longest(max_tokens=None) == USUAL_MOST_TOKENS
    assert chats.longest(max_tokens=2048) == 2048
    long = [{"role": "user", "content": "x" * (4096 - 100 - TOKENS + len("Hello"))}]
    assert chats.longest(max_tokens=None, messages=long) == 100
    error = chats.refusal(max_tokens=101, messages=long)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens")
    assert "4096" in error.message
    assert "4097" in error.message
    prompt = chats.refusal(max_tokens=1, messages=None, prompt="x" * 4096)
    assert (prompt.code, prompt.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt")


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_a_text_far_beyond_any_context_is_refused_without_counting_it(chats: ChatOrders, field: str) -> None:
    chats.serve()
    text = "x" * (4096 * MOST_CHARACTERS_PER_TOKEN)
    asked: dict[str, Any] = {"messages": None, "prompt": text}
    if field == "messages":
        asked = {"messages": [{"role": "user", "content": text}]}
    error = chats.refusal(**asked)
    assert (error.code, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, field)
    assert "4096 tokens, and this is at least 409" in error.message


def test_the_cache_of_a_worker_bounds_what_it_is_asked(chats: ChatOrders) -> None:
    chats.serve(dataclasses.replace(MANIFEST, blocks=10))
    assert chats.longest(max_tokens=160 - TOKENS) == 160 - TOKENS
    error = chats.refusal(max_tokens=161 - TOKENS)
    assert error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "160" in error.message


def test_no_worker_is_asked_for_more_than_it_says_it_generates(chats: ChatOrders) -> None:
    chats.serve(max_length=100)
    assert chats.longest(max_tokens=None) == 100
    assert chats.longest(max_tokens=100) == 100
    error = chats.refusal(max_tokens=101)
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "max_tokens")
    assert "100 tokens" in error.message
