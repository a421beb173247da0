"""Races for a slot, a broker killed in the middle of a claim, whole requests played by several workers, and clocks."""

from __future__ import annotations

import random
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from horde.lifecycle.words import Outcome, Verdict
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants
from tests.support.world import PRICE, World, open_world

ROUNDS = 50


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=36) as made:
        yield made
        check_invariants(made.db)


@pytest.fixture
def stage(world: World) -> Iterator[Stage]:
    with Stage(world.db) as made:
        yield made


def test_thirty_two_claims_of_one_slot_at_once_hand_it_out_once(world: World) -> None:
    workers = [world.worker() for _ in range(32)]
    for _ in range(ROUNDS):
        request = world.request()

        found = together(*[partial(world.claim, request, worker) for worker in workers])

        assert sum(len(jobs) for jobs in found) == 1
        assert len(world.jobs(request)) == 1


def test_twenty_claims_of_twenty_slots_at_once_get_one_each(world: World) -> None:
    workers = [world.worker() for _ in range(20)]
    for _ in range(ROUNDS):
        request = world.request(20)

        found = together(*[partial(world.claim, request, worker) for worker in workers])

        assert sorted(job.slot for jobs in found for job in jobs) == list(range(20)), "nobody got nothing"
        assert world.status(request).processing == 20


def test_claims_of_several_slots_at_once_share_what_there_is(world: World) -> None:
    workers = [world.worker() for _ in range(4)]
    for _ in range(ROUNDS):
        request = world.request(10)

        found = together(*[partial(world.claim, request, worker, count=4) for worker in workers])

        assert sorted(job.slot for jobs in found for job in jobs) == list(range(10))
        assert sorted(len(jobs) for jobs in found) == [0, 2, 4, 4]


def test_claims_and_put_backs_at_once_hand_each_slot_to_one_worker_at_a_time(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request(4)
        jobs = [job.id for job in world.claim(request, worker, count=4)]

        *_, one, two = together(
            partial(world.release, jobs[0]),
            partial(world.fault, jobs[1]),
            partial(world.store, jobs[2]),
            partial(world.claim, request, worker, count=2),
            partial(world.claim, request, worker, count=2),
        )

        slots = [job.slot for job in [*one, *two]]
        assert len(slots) == len(set(slots))
        assert set(slots) <= {0, 1}


HOLD_A_CLAIM = """
import sys, uuid
from horde.db.database import Database
from horde.lifecycle.claim import Claimant, claim

with Database(sys.argv[1]).transaction() as tx:
    assert claim(tx, uuid.UUID(sys.argv[2]), Claimant(uuid.uuid4(), "doomed", 0), model="m", lease=150)
    print("claimed", flush=True)
    sys.stdin.read()
"""


def test_a_broker_killed_in_the_middle_of_a_claim_leaves_no_trace(world: World, stage: Stage) -> None:
    requests = [world.request() for _ in range(200)]
    workers = [world.worker() for _ in range(8)]
    broker = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_CLAIM, world.db.url, str(requests[0])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == "claimed\n"
        waiting = stage.blocked(partial(world.claim, requests[0], workers[0]))
        broker.kill()
    (first,) = waiting.result()

    def pop_all(worker: int) -> list[uuid.UUID]:
        mine = random.Random(worker).sample(requests, len(requests))
        return [job.id for request in mine for job in world.claim(request, workers[worker])]

    found = together(*[partial(pop_all, worker) for worker in range(8)], within=60)

    handed_out = Counter([first.id, *(job for jobs in found for job in jobs)])
    assert (len(handed_out), max(handed_out.values())) == (200, 1)
    assert world.scalar("SELECT count(*) FROM jobs") == 200


# --- whole requests


def test_a_slot_that_every_worker_faults_ends_the_request_with_the_other_results(world: World) -> None:
    request = world.request(3)
    good = [world.claim_one(request, world.worker()) for _ in range(2)]
    for job in good:
        world.store(job, "good")
        assert_adds_up(world, request, 3)
    for _ in range(2):
        world.fault(world.claim_one(request, world.worker()))
        assert_adds_up(world, request, 3)

    status = world.status(request)
    assert (status.done, status.faulted, status.finished, status.charged) == (True, True, 2, 2 * PRICE)
    assert world.claim(request, world.worker()) == []


def assert_adds_up(world: World, request: uuid.UUID, n: int) -> bool:
    """What a client polls is consistent at any moment; returns whether the request is done."""
    status = world.status(request)
    total = status.finished + status.processing + status.waiting
    assert total == n if status.outcome is None else total <= n
    assert len(status.results) == status.finished
    return status.done


def test_a_poll_sees_counters_that_add_up_while_everything_moves(world: World) -> None:
    worker = world.worker()

    def play(request: uuid.UUID, luck: random.Random) -> None:
        while not world.status(request).done:
            for job in world.claim(request, worker, count=2):
                luck.choice([world.store, world.store, world.release, world.fault])(job.id)

    def poll(request: uuid.UUID) -> None:
        while not assert_adds_up(world, request, 5):
            pass

    for seed in range(20):
        request = world.request(5)
        players = [partial(play, request, random.Random(seed + player)) for player in (0, 1000)]
        together(*players, partial(poll, request))
        assert world.status(request).outcome in {Outcome.COMPLETED, Outcome.FAULTED}


# --- clocks


@pytest.mark.parametrize("zone", ["Pacific/Auckland", "America/New_York", "UTC"])
def test_leases_go_by_the_databases_clock_whatever_a_brokers_zone(database_url: str, zone: str) -> None:
    with (
        open_world(database_url, connections=1) as here,
        open_world(database_url, connections=1, settings={"timezone": zone}) as there,
    ):
        assert there.scalar("SHOW timezone") == zone
        job = here.claim_one(here.request(), here.worker())
        here.advance(149)
        assert there.fault_stale(job).verdict is Verdict.NOT_DUE
        here.advance(2)
        assert there.fault_stale(job).put_back
        assert there.scalar("SELECT extract(epoch FROM lease_end - claimed_at)::int FROM jobs") == 150


TEN_MINUTES_AHEAD = """
import sys, time, uuid
# This process believes that it is ten minutes later than it is.
real, ahead = time.time, float(sys.argv[3])
time.time = lambda: real() + ahead
from horde.db.database import Database
from tests.support.world import World

print(World(Database(sys.argv[1])).fault_stale(uuid.UUID(sys.argv[2])).verdict.value)
"""


@pytest.mark.parametrize("ahead", ["600", "-600"])
def test_a_broker_whose_clock_is_wrong_takes_no_live_job_away(world: World, ahead: str) -> None:
    job = world.claim_one(world.request(), world.worker())
    arguments = [sys.executable, "-c", TEN_MINUTES_AHEAD, world.db.url, str(job), ahead]

    told = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    world.pass_lease(job)
    told_later = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout

    assert (told.strip(), told_later.strip()) == ("not_due", "settled")


def test_the_clock_moves_within_a_transaction(world: World) -> None:
    with world.db.transaction() as tx:
        first, second = (tx.execute("SELECT horde_now() AS clock, now() AS begun").one() for _ in range(2))

    assert first.begun == second.begun
    assert first.clock < second.clock
