"""Any two transitions of one request, the first held at several points between its statements while the second arrives.

Whatever the moment, the two end as if one had run after the other: the results of both orders are taken from real runs,
one after the other, and every interleaving must equal one of them, down to slots, jobs, events and queue rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from horde.lifecycle.claim import Claimant, ClaimedJob
from horde.lifecycle.settle import Settlement
from horde.lifecycle.words import CancelReason, Kind
from tests.support.concurrency import Stage
from tests.support.invariants import check_invariants
from tests.support.world import World, open_world


@dataclass(frozen=True)
class Scene:
    """A request in the middle of its life: `job` runs, `other` runs beside it where the scene has it; `hand` is free."""

    world: World
    hand: Claimant
    request: uuid.UUID
    job: uuid.UUID
    other: uuid.UUID | None = None


Move = Callable[[Scene], Any]


def other(scene: Scene) -> uuid.UUID:
    assert scene.other is not None, "this scene has one job only"
    return scene.other


MOVES: dict[str, Move] = {
    "store": lambda on: on.world.store(on.job, "one text"),
    "store another text": lambda on: on.world.store(on.job, "another text"),
    "fault": lambda on: on.world.fault(on.job),
    "release": lambda on: on.world.release(on.job),
    "reject": lambda on: on.world.reject(on.job),
    "stale": lambda on: on.world.fault_stale(on.job),
    "store the other": lambda on: on.world.store(other(on), "the other's text"),
    "fault the other": lambda on: on.world.fault(other(on)),
    "the other never started": lambda on: on.world.release_unstarted(other(on)),
    "claim": lambda on: on.world.claim(on.request, on.hand),
    "cancel": lambda on: on.world.cancel(on.request),
    "expire": lambda on: on.world.cancel_if_due(on.request, CancelReason.EXPIRED),
    "disconnect": lambda on: on.world.cancel_if_due(on.request, CancelReason.DISCONNECT),
    "post": lambda on: on.world.post(on.job, [3], "c", offset=2),
    "store what goes on": lambda on: on.world.store(on.job, "abcd", tokens=4, token_ids=[1, 2, 3, 4]),
    "stay attached": lambda on: on.world.stay_attached(on.request),
    "join": lambda on: on.world.join(on.request),
    "leave": lambda on: on.world.leave(on.request),
}

REPORTS = ("store", "store another text", "fault", "release", "reject")


class Scenes:
    """The scenes of a world, all played by the same three workers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.hands = [world.worker(), world.worker(), world.worker(posts_progress=True)]

    def running(self) -> Scene:
        request = self.world.request(2)
        return Scene(self.world, self.hands[1], request, self.world.claim_one(request, self.hands[0]))

    def overdue(self) -> Scene:
        scene = self.running()
        self.world.pass_lease(scene.job)
        return scene

    def expired(self) -> Scene:
        scene = self.running()
        self.world.pass_time(scene.request, "expires_at")
        return scene

    def one_fault_before(self) -> Scene:
        request = self.world.request(3)
        self.world.fault(self.world.claim_one(request, self.hands[0]))
        first, second, _ = self.world.claim(request, self.hands[1], count=3)
        self.world.pass_lease(second.id)
        return Scene(self.world, self.hands[1], request, first.id, second.id)

    def streamed(self) -> Scene:
        request = self.world.request(3, kind=Kind.CHAT, attached=True)
        first, second = self.world.claim(request, self.hands[2], count=2, lease=60)
        self.world.post(first.id, [1, 2], "ab")
        self.world.pass_time(request, "attached_until")
        return Scene(self.world, self.hands[1], request, first.id, second.id)

    def continued(self) -> Scene:
        request = self.world.request(2, kind=Kind.CHAT, attached=True, payload={"logprobs": None})
        begun = self.world.claim_one(request, self.hands[2], lease=60)
        self.world.post(begun, [1], "a")
        self.world.release(begun)
        (job,) = self.world.claim(request, self.hands[2], lease=60)
        self.world.post(job.id, [2], "b", offset=1)
        self.world.pass_time(request, "attached_until")
        return Scene(self.world, self.hands[2], request, job.id)

    def image(self) -> Scene:
        request = self.world.request(2, kind=Kind.IMAGE)
        first, second = self.world.claim(request, self.hands[0], count=2)
        self.world.store(first.id)
        self.world.pass_lease(second.id)
        return Scene(self.world, self.hands[1], request, second.id)


PLAYED: dict[str, tuple[Callable[[Scenes], Scene], tuple[str, ...]]] = {
    "running": (Scenes.running, (*REPORTS, "claim", "cancel")),
    "overdue": (Scenes.overdue, ("store", "fault", "release", "reject", "claim", "cancel", "stale")),
    "expired": (Scenes.expired, ("store", "fault", "release", "claim", "cancel", "stale", "expire")),
    "one fault before": (
        Scenes.one_fault_before,
        ("store", "fault", "release", "reject", "store the other", "fault the other", "stale", "cancel"),
    ),
    "streamed": (
        Scenes.streamed,
        ("store", "fault", "the other never started", "claim", "cancel", "disconnect", "post", "stay attached"),
    ),
    "continued": (
        Scenes.continued,
        ("store", "store what goes on", "release", "claim", "disconnect", "post", "join", "leave"),
    ),
    "image": (Scenes.image, ("store", "fault", "release", "stale", "claim", "cancel")),
}


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=4) as made:
        yield made


@pytest.mark.parametrize("scene", PLAYED)
def test_two_transitions_at_once_end_like_one_after_the_other(world: World, scene: str) -> None:
    make, names = PLAYED[scene]
    scenes = Scenes(world)
    with Stage(world.db) as stage:
        orders = {(first, second): play(stage, make(scenes), first, second) for first in names for second in names}
        wrong = [
            f"{first!r} held before {stop.split()[:4]}, then {second!r}: {found}"
            for first, second in orders
            for stop, skip in stops(orders[first, second].statements)
            if (found := interleave(stage, make(scenes), first, second, stop, skip))
            not in (orders[first, second].ending, orders[second, first].reversed())
        ]

    assert not wrong, f"{len(wrong)} interleavings are like neither order; the first: {wrong[0]}"
    check_invariants(world.db)


@dataclass(frozen=True)
class Played:
    """Two moves, one after the other: both answers, all that the database then says, the statements of the first."""

    first: Any
    second: Any
    picture: Any
    statements: list[str]

    @property
    def ending(self) -> tuple[Any, Any, Any]:
        return self.first, self.second, self.picture

    def reversed(self) -> tuple[Any, Any, Any]:
        return self.second, self.first, self.picture


def play(stage: Stage, scene: Scene, first: str, second: str) -> Played:
    """One after the other."""
    leading = stage.start(lambda: MOVES[first](scene))
    answers = plain(leading.result()), plain(MOVES[second](scene))
    return Played(*answers, picture(scene), leading.statements)


def stops(statements: list[str]) -> list[tuple[str, int]]:
    """Behind the first read, in the middle of the work, and with little but the commit ahead: (statement, how many before)."""
    places = {1, len(statements) // 2, len(statements) - 1} & set(range(1, len(statements)))
    return [(statements[place], statements[:place].count(statements[place])) for place in sorted(places)]


def interleave(stage: Stage, scene: Scene, first: str, second: str, before: str, skip: int) -> tuple[Any, Any, Any]:
    """The first is held before a statement until the second has ended or waits for it."""
    leading = stage.hold(lambda: MOVES[first](scene), before=before, skip=skip)
    following = stage.start(lambda: MOVES[second](scene))
    following.blocked_or_finished(stage.monitor)
    leading.go_on()
    return plain(leading.result()), plain(following.result()), picture(scene)


def plain(answer: Any) -> Any:
    """An answer without what differs from run to run."""
    if isinstance(answer, Settlement):
        return answer.verdict, answer.reward, answer.put_back, answer.outcome
    if isinstance(answer, list):
        return [(job.slot, job.seed, job.prefix_text) if isinstance(job, ClaimedJob) else job for job in answer]
    return (answer.accepted, answer.stop) if hasattr(answer, "accepted") else answer


PICTURE = """
SELECT outcome, outcome_reason, error_code, waiting, processing, stored, faulted, restarted, charged, last_settled_faulted,
       done_at IS NOT NULL AS done, cardinality(tried_workers) AS tried, attached_until > horde_now() AS attached,
       attached_by, needs_progress,
       (SELECT json_agg((idx, state, releases, prefix_text)::text ORDER BY idx) FROM slots WHERE request_id = r.id) AS slots,
       (SELECT json_agg((slot_idx, state, reason, result, jobs.token_ids, reward, stored_by_cancel, acknowledged, progress.text)::text
                        ORDER BY slot_idx, claimed_at)
        FROM jobs LEFT JOIN progress ON progress.job_id = jobs.id WHERE request_id = r.id) AS jobs,
       (SELECT json_agg(event ORDER BY event) FROM (
            SELECT (kind, slot_idx, reason, outcome, price, reward)::text AS event
            FROM events WHERE request_id = r.id) e) AS events,
       (SELECT count(*) FROM queue WHERE request_id = r.id) AS queued
FROM requests r WHERE id = %(request)s
"""


def picture(scene: Scene) -> Any:
    """All that the database says of the request, without ids and times."""
    return scene.world.rows(PICTURE, request=scene.request)
