"""`generate/progress` over HTTP: leases that live by posts, what is kept of them, and which jobs a worker is told to stop."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import requests
from horde_sdk.ai_horde_api.apimodels.generate.text._pop import TextGenerateJobPopResponse

from horde.api.horde_v2.chat_work_bodies import MOST_TOKENS
from horde.api.horde_v2.pop_answers import PAYLOAD_DEFAULTS, PopAnswer
from horde.api.horde_v2.progress import MOST_JOBS, ProgressAnswer
from horde.maintenance.passes import run_pass
from tests.support.invariants import check_invariants
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.world import World

AIHORDES_FIELDS = {
    "payload", "id", "ids", "model", "ttl", "softprompt", "messages", "extra_source_images", "skipped",
}  # fmt: skip


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url) as live:
        World(live.context.database).beat()
        yield live
        check_invariants(live.context.database)
        assert live.unexpected_errors() == 0


@pytest.fixture
def world(broker: LiveBroker) -> World:
    return World(broker.context.database, broker.context.terms)


@pytest.fixture
def key(broker: LiveBroker) -> str:
    """The key of a worker's owner."""
    return broker.user("Owner").api_key


def post(broker: LiveBroker, key: str | None, *jobs: Any, worker: str = "worker") -> requests.Response:
    return broker.call("POST", "generate/progress", key=key, json={"worker": worker, "jobs": list(jobs)})


def told(broker: LiveBroker, key: str, *jobs: Any, worker: str = "worker") -> tuple[dict[str, Any], dict[str, str]]:
    """What a post is answered: id -> (accepted, ttl), and id -> reason to stop."""
    answer = post(broker, key, *jobs, worker=worker)
    assert answer.status_code == 200, answer.text
    body = ProgressAnswer.model_validate(answer.json())
    return {job.id: (job.accepted, job.ttl) for job in body.jobs}, {job.id: job.reason for job in body.stop}


def alive(job: str, state: str = "decode", **fields: Any) -> dict[str, Any]:
    return {"id": job, "state": state, **fields}


def pop_jobs(broker: LiveBroker, key: str, slots: int, **body: Any) -> list[str]:
    """Ids of the jobs of a pop by a worker that posts progress."""
    return [job["id"] for job in broker.pop_job(key, slots=slots, progress=True, **body)["jobs"]]


# --- a worker that stops


def leave(
    broker: LiveBroker, key: str | None, *jobs: Any, worker: str = "worker", leaving: Any = True
) -> requests.Response:
    body = {"worker": worker, "jobs": list(jobs), "leaving": leaving}
    return broker.call("POST", "generate/progress", key=key, json=body)


def online(broker: LiveBroker) -> list[str]:
    return [worker["name"] for worker in broker.call("GET", "workers").json()]


def test_a_worker_that_says_that_it_leaves_is_offline_until_its_next_pop(
    broker: LiveBroker, key: str, world: World
) -> None:
    broker.request(params={"n": 2})
    job, *_ = pop_jobs(broker, key, 1)
    world.advance(4)
    assert online(broker) == ["worker"]
    assert leave(broker, key, alive(job), leaving=False).status_code == 200
    assert online(broker) == ["worker"]
    answer = leave(broker, key, alive(job))
    # What it still holds is kept for it.
    assert (answer.status_code, [kept["id"] for kept in answer.json()["jobs"]]) == (200, [job])
    assert online(broker) == []
    uptime = world.scalar("SELECT uptime FROM workers")
    assert uptime == 4
    world.advance(10)
    # Nothing but a pop is counted against what its owner may have online.
    for body in (leave(broker, key), post(broker, key)):
        assert body.status_code == 200
        assert online(broker) == []
    broker.pop_job(key, progress=True)
    assert online(broker) == ["worker"]
    assert world.scalar("SELECT uptime FROM workers") == uptime


def test_only_its_owner_says_that_a_worker_leaves(broker: LiveBroker, key: str) -> None:
    broker.pop(key)
    refused = leave(broker, broker.user("other").api_key)
    assert (refused.status_code, refused.json()["rc"]) == (403, "WrongCredentials")
    for value in ("yes", 1, None):
        wrong = leave(broker, key, leaving=value)
        assert (wrong.status_code, list(wrong.json()["errors"])) == (400, ["leaving"])
    assert online(broker) == ["worker"]


# --- pops over HTTP


def test_a_worker_that_knows_nothing_of_this_is_answered_as_ever(broker: LiveBroker, key: str) -> None:
    for _ in range(2):
        broker.request(params={"n": 2})
    job = broker.pop_job(key, amount=5)
    assert set(job) == AIHORDES_FIELDS
    assert len(job["ids"]) == 2, "of one request"
    assert job["ttl"] == 150
    TextGenerateJobPopResponse.model_validate(job)
    assert set(broker.pop(key, models=["else"]).json()) == AIHORDES_FIELDS


def test_a_pop_with_slots_answers_each_job_with_what_its_worker_needs(broker: LiveBroker, key: str) -> None:
    requests_ = [broker.request(prompt=f"p{number}", params={"n": 2, "max_length": 20}) for number in range(2)]

    answer = broker.pop_job(key, slots=3)

    PopAnswer.model_validate(answer)
    jobs = answer["jobs"]
    assert [(job["kind"], job["slot"], job["payload"]["prompt"], job["attached"]) for job in jobs] == [
        ("text", 0, "p0", False),
        ("text", 1, "p0", False),
        ("text", 0, "p1", False),
    ]
    for job in jobs:
        assert set(job) == {
            "id", "kind", "model", "model_revision", "tokenizer_revision", "slot", "seed", "ttl", "payload", "attached",
            "deadline", "cache_salt", "prefix_token_ids", "prefix_text",
        }  # fmt: skip
        assert job["payload"] == {**PAYLOAD_DEFAULTS, "prompt": job["payload"]["prompt"], "n": 1, "max_length": 20}
    # Today's fields are the first job's, and those that share its payload.
    assert {name: answer[name] for name in ("id", "model", "ttl", "seed", "slot", "payload")} == {
        name: jobs[0][name] for name in ("id", "model", "ttl", "seed", "slot", "payload")
    }
    assert answer["ids"] == [jobs[0]["id"], jobs[1]["id"]]
    TextGenerateJobPopResponse.model_validate(answer)
    # A request's id is the secret of who asked.
    assert not any(request in str(answer) for request in requests_)


def test_a_pop_with_slots_that_gets_nothing_has_the_shape_of_any_other(broker: LiveBroker, key: str) -> None:
    empty = broker.pop(key, slots=8, progress=True).json()
    assert set(empty) == AIHORDES_FIELDS
    assert (empty["id"], empty["ids"]) == (None, [])
    TextGenerateJobPopResponse.model_validate(empty)


def test_a_pop_with_room_or_promises_that_make_no_sense_is_refused_by_name(broker: LiveBroker, key: str) -> None:
    changes: list[dict[str, Any]] = [
        *({"slots": value} for value in (0, 51, -1, 2.5, "3", True, None, [1])),
        *({"progress": value} for value in ("yes", 1, None)),
    ]
    for change in changes:
        answer = broker.pop(key, **change)
        assert (answer.status_code, list(answer.json()["errors"])) == (400, list(change)), change


def test_a_lost_answer_with_slots_is_given_again_whole(broker: LiveBroker, key: str) -> None:
    for _ in range(3):
        broker.request()
    header = {"Idempotency-Key": "k"}
    first = broker.pop(key, slots=2, headers=header).json()
    assert broker.pop(key, slots=2, headers=header).json() == first
    assert len(first["jobs"]) == 2


# --- leases


def test_a_post_that_names_a_job_starts_it_and_renews_its_lease(broker: LiveBroker, key: str, world: World) -> None:
    broker.request(params={"n": 3})
    running, queued, silent = pop_jobs(broker, key, 3)
    for _ in range(3):
        world.advance(14)
        jobs, stop = told(broker, key, alive(running), alive(queued, "queued"))
        assert (jobs, stop) == ({running: (0, 60), queued: (0, 60)}, {})
    assert run_pass(broker.context).unstarted == 1

    world.advance(59)
    assert run_pass(broker.context).stale == 0
    world.advance(2)
    assert run_pass(broker.context).stale == 2
    assert told(broker, key, alive(running), alive(queued), alive(silent)) == (
        {},
        {running: "stale", queued: "stale", silent: "stale"},
    )
    assert broker.submit(key, running).json()["rc"] == "AbortedGen"


def test_a_fixed_lease_is_the_posts_lease_too(database_url: str) -> None:
    with live_broker(database_url, job_ttl_seconds=7) as broker:
        key = broker.user().api_key
        broker.request()
        (job,) = pop_jobs(broker, key, 1)
        assert told(broker, key, alive(job)) == ({job: (0, 7)}, {})


def test_a_job_popped_without_the_promise_keeps_its_lease_and_nothing_of_it_is_kept(
    broker: LiveBroker, key: str, world: World
) -> None:
    broker.request()
    job = broker.pop_job(key, slots=1)["id"]
    end = "SELECT lease_end FROM jobs WHERE id = %(id)s"
    before = world.scalar(end, id=job)

    assert told(broker, key, alive(job, token_ids=[1, 2], text="ab")) == ({job: (0, 150)}, {})

    assert world.scalar(end, id=job) == before
    assert world.scalar("SELECT count(*) FROM progress") == 0


def test_a_worker_that_posts_stays_online_however_long_it_does_not_pop(
    broker: LiveBroker, key: str, world: World
) -> None:
    broker.pop(key)
    for _ in range(3):
        world.advance(200)
        assert told(broker, key) == ({}, {})
    (worker,) = broker.call("GET", "workers?type=text").json()
    assert (worker["name"], worker["uptime"]) == ("worker", 600)

    # One that has been away comes back by a pop, which counts its owner's workers.
    world.advance(301)
    told(broker, key)
    assert broker.call("GET", "workers?type=text").json() == []


# --- what is kept


def test_tokens_are_kept_once_whatever_is_repeated_or_comes_too_early(
    broker: LiveBroker, key: str, world: World
) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)

    def accepted(offset: int, tokens: list[int], text: str) -> int:
        return int(
            told(broker, key, alive(job, offset=offset, token_ids=tokens, text=text, text_offset=offset))[0][job][0]
        )

    assert accepted(0, [1, 2], "ab") == 2
    assert accepted(0, [1, 2], "ab") == 2
    assert accepted(3, [4], "d") == 2, "a gap"
    assert accepted(1, [2, 3, 4], "bcd") == 4
    assert told(broker, key, alive(job))[0][job] == (4, 60)
    assert world.rows("SELECT token_ids, text FROM progress") == [([1, 2, 3, 4], "abcd")]


def test_a_job_named_twice_is_answered_once_with_what_both_brought(broker: LiveBroker, key: str) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)
    chunks = [alive(job, offset=at, token_ids=[at], text="x", text_offset=at) for at in range(2)]
    answer = post(broker, key, *chunks).json()
    assert answer == {"jobs": [{"id": job, "accepted": 2, "ttl": 60}], "stop": []}


def test_what_a_worker_tells_of_its_work_is_taken_and_what_nobody_knows_is_ignored(
    broker: LiveBroker, key: str
) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)
    full = alive(
        job, token_ids=[5], text="x", logprobs=[[5, -0.1, [[5, -0.1], [7, -3]]]], prefill_ms=12.5,
        decode_ms=3, batch=32, preemptions=0, mood="fine",
    )  # fmt: skip
    assert told(broker, key, full) == ({job: (1, 60)}, {})


def test_output_that_nobody_can_store_is_repaired_so_that_the_job_goes_on(
    broker: LiveBroker, key: str, world: World
) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)
    body = (
        '{"worker": "worker", "jobs": [{"id": "%s", "state": "decode", "token_ids": [1], "text": "a\\u0000\\ud800b"}]}'
    )
    answer = broker.call(
        "POST", "generate/progress", key=key, data=body % job, headers={"Content-Type": "application/json"}
    )
    assert answer.json()["jobs"][0]["accepted"] == 1
    assert world.rows("SELECT text FROM progress") == [("a\ufffd\ufffdb",)]


def test_a_retry_of_a_text_begins_anew_since_nobody_has_the_beginning(broker: LiveBroker, key: str) -> None:
    request = broker.request()
    (job,) = pop_jobs(broker, key, 1)
    told(broker, key, alive(job, token_ids=[1, 2, 3], text="abc"))
    broker.submit(key, job, state="released")

    (again,) = pop_jobs(broker, key, 1)

    assert told(broker, key, alive(again, "queued")) == ({again: (0, 60)}, {})
    assert told(broker, key, alive(again, token_ids=[9], text="z"))[0] == {again: (1, 60)}
    assert broker.submit(key, again, generation="z").status_code == 200
    assert [result["text"] for result in broker.status(request)["generations"]] == ["z"]


# --- what stops


def test_the_other_jobs_of_a_request_that_faulted_are_told_to_stop(broker: LiveBroker, key: str) -> None:
    broker.request(params={"n": 3})
    first, second, third = pop_jobs(broker, key, 3)
    told(broker, key, alive(first), alive(second), alive(third))
    for job in (first, second):
        broker.submit(key, job, state="faulted")

    assert told(broker, key, alive(first), alive(second), alive(third)) == (
        {},
        {first: "stale", second: "stale", third: "voided"},
    )


def test_a_rejected_request_stops_its_jobs(broker: LiveBroker, key: str) -> None:
    broker.request(params={"n": 2})
    first, second = pop_jobs(broker, key, 2)
    broker.submit(key, first, state="rejected", error_code="unsupported_parameter")
    assert told(broker, key, alive(first), alive(second))[1] == {first: "rejected", second: "voided"}


def test_what_a_cancel_stored_is_told_as_cancelled(broker: LiveBroker, key: str, world: World) -> None:
    request = world.request(attached=True)
    (entry,) = broker.pop_job(key, slots=1, progress=True)["jobs"]
    assert entry["attached"] is True
    told(broker, key, alive(entry["id"], token_ids=[1], text="a"))
    world.cancel(request)

    assert told(broker, key, alive(entry["id"])) == ({}, {entry["id"]: "cancelled"})


def test_a_cancelled_text_that_runs_goes_on(broker: LiveBroker, key: str) -> None:
    request = broker.request()
    (job,) = pop_jobs(broker, key, 1)
    broker.call("DELETE", f"generate/text/status/{request}")
    assert told(broker, key, alive(job)) == ({job: (0, 60)}, {})
    assert broker.submit(key, job).json()["reward"] > 0


def test_a_job_that_is_not_the_callers_is_stale_and_stays_as_it_is(broker: LiveBroker, key: str, world: World) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)
    stranger = broker.user("Stranger").api_key
    broker.pop(stranger, name="theirs", models=["else"])
    unknown = str(uuid.uuid4())
    row = "SELECT started_at, lease_end FROM jobs"
    before = world.rows(row)

    answer = told(broker, stranger, alive(job, token_ids=[1], text="x"), alive(unknown), worker="theirs")

    assert answer == ({}, {job: "stale", unknown: "stale"})
    assert world.rows(row) == before
    assert world.scalar("SELECT count(*) FROM progress") == 0


def test_posts_and_submits_at_once_end_every_job_once(broker: LiveBroker, key: str, world: World) -> None:
    for _ in range(10):
        for _ in range(6):
            broker.request()
        jobs = pop_jobs(broker, key, 6)
        posting = [alive(job, token_ids=[1], text="x") for job in jobs]
        calls = [partial(post, broker, key, *some) for some in (posting, posting[::-1], posting)]
        calls += [partial(broker.submit, key, job) for job in jobs]

        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(lambda call: call(), calls))

        assert [answer.status_code for answer in answers] == [200] * len(calls), [answer.text for answer in answers]
        assert told(broker, key, *posting) == ({}, dict.fromkeys(jobs, "stale"))
    assert world.scalar("SELECT count(*) FROM jobs WHERE state = 'stored'") == 60


# --- what is refused


def test_a_post_is_from_a_worker_of_the_callers(broker: LiveBroker, key: str) -> None:
    broker.pop(key)
    stranger = broker.user("Stranger").api_key
    for caller, worker in ((stranger, "worker"), (key, "nobody"), (stranger, "nobody")):
        answer = post(broker, caller, worker=worker)
        assert (answer.status_code, answer.json()["rc"]) == (403, "WrongCredentials")


def test_a_deleted_worker_may_finish_what_it_holds(broker: LiveBroker, key: str, world: World) -> None:
    broker.request()
    (job,) = pop_jobs(broker, key, 1)
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE workers SET deleted_at = horde_now()")
    stranger = broker.user("Stranger").api_key
    broker.pop(stranger, models=["else"])

    assert told(broker, key, alive(job)) == ({job: (0, 60)}, {})
    assert broker.submit(key, job).status_code == 200


def test_who_may_not_post_is_told_so(broker: LiveBroker, key: str) -> None:
    assert (post(broker, None).status_code, list(post(broker, None).json()["errors"])) == (400, ["apikey"])
    assert post(broker, "nobody").status_code == 401
    anonymous = post(broker, "0000000000")
    assert (anonymous.status_code, anonymous.json()["rc"]) == (403, "AnonForbiddenWorker")


ID = str(uuid.uuid4())


NO_SENSE: list[tuple[dict[str, Any], str]] = [
    ({"jobs": []}, "worker"),
    ({"worker": "worker"}, "jobs"),
    ({"worker": 5, "jobs": []}, "worker"),
    ({"worker": "", "jobs": []}, "worker"),
    ({"worker": "worker", "jobs": {}}, "jobs"),
    ({"worker": "worker", "jobs": [alive(ID)] * (MOST_JOBS + 1)}, "jobs"),
    *(
        ({"worker": "worker", "jobs": [alive(ID), {**alive(ID), **change}]}, f"jobs.1.{field}")
        for change, field in [
            ({"id": "x"}, "id"),
            ({"id": 5}, "id"),
            ({"state": "asleep"}, "state"),
            ({"offset": -1}, "offset"),
            ({"offset": "1"}, "offset"),
            ({"offset": None}, "offset"),
            ({"token_ids": [1, -1]}, "token_ids.1"),
            ({"token_ids": [True]}, "token_ids.0"),
            ({"token_ids": [1 << 31]}, "token_ids.0"),
            ({"token_ids": [0] * (MOST_TOKENS + 1)}, "token_ids"),
            ({"text": 5}, "text"),
            ({"text_offset": 1.5}, "text_offset"),
            ({"logprobs": 1}, "logprobs"),
            ({"logprobs": [[1, -0.5, []]]}, "logprobs"),
            ({"token_ids": [2], "logprobs": [[1, -0.5, []]]}, "logprobs"),
            ({"token_ids": [1], "logprobs": [[1, "low", []]]}, "logprobs.0.1"),
            ({"token_ids": [1], "logprobs": [[1, -0.5]]}, "logprobs.0.2"),
            ({"token_ids": [1], "logprobs": [[1, -0.5, [[1, -0.5]] * 21]]}, "logprobs.0.2"),
            ({"prefill_ms": -1}, "prefill_ms"),
            ({"decode_ms": "1"}, "decode_ms"),
            ({"batch": -1}, "batch"),
            ({"preemptions": True}, "preemptions"),
        ]
    ),
    ({"worker": "worker", "jobs": [{"id": ID}]}, "jobs.0.state"),
    ({"worker": "worker", "jobs": [{"state": "queued"}]}, "jobs.0.id"),
]


def test_a_post_that_makes_no_sense_is_refused_by_field(broker: LiveBroker, key: str) -> None:
    broker.pop(key)
    for body, field in NO_SENSE:
        answer = broker.call("POST", "generate/progress", key=key, json=body)
        assert (answer.status_code, list(answer.json()["errors"])) == (400, [field]), body


def test_a_post_is_strict_json_of_at_most_a_mebibyte(broker: LiveBroker, key: str) -> None:
    broker.pop(key)
    head = {"Content-Type": "application/json"}
    odd = b'{"worker": "worker", "jobs": [{"id": "%s", "state": "decode", "decode_ms": NaN}]}' % ID.encode()
    refused = broker.call("POST", "generate/progress", key=key, data=odd, headers=head)
    assert (refused.status_code, list(refused.json()["errors"])) == (400, ["jobs.0.decode_ms"])

    largest = b'{"worker": "worker", "jobs": []%s}'
    room = (1 << 20) - len(largest % b"")
    fits = broker.call("POST", "generate/progress", key=key, data=largest % (b" " * room), headers=head)
    assert fits.status_code == 200
    beyond = broker.call("POST", "generate/progress", key=key, data=largest % (b" " * (room + 1)), headers=head)
    assert beyond.status_code == 413
    assert post(broker, key, *[alive(str(uuid.uuid4())) for _ in range(MOST_JOBS)]).status_code == 200
