"""The invariants of the lifecycle, I1 to I9, as one function in plain SQL; a violation is a sentence with its rows.

They hold at every moment between two transactions, over the requests that retention has not removed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping

from horde.db.database import Database, Transaction

# (sentence, query): a row that the query finds violates the sentence; its first column says where.
ALWAYS: tuple[tuple[str, str], ...] = (
    (
        "I3: a slot has at most one processing and one stored job",
        """SELECT request_id, slot_idx FROM jobs WHERE state IN ('processing', 'stored')
        GROUP BY request_id, slot_idx, state HAVING count(*) > 1""",
    ),
    (
        "I3: a slot is processing or stored exactly while one of its jobs is, and waits or is dropped while none is",
        """SELECT s.request_id, s.idx, s.state, array_agg(j.state) FROM slots s
        LEFT JOIN jobs j ON j.request_id = s.request_id AND j.slot_idx = s.idx GROUP BY s.request_id, s.idx
        HAVING CASE WHEN s.state IN ('processing', 'stored')
                    THEN count(*) FILTER (WHERE j.state = s.state) <> 1
                         OR count(*) FILTER (WHERE j.state IN ('processing', 'stored')) <> 1
                    ELSE count(*) FILTER (WHERE j.state IN ('processing', 'stored')) <> 0 END""",
    ),
    (
        "a request has its n slots, 0 to n - 1",
        """SELECT r.id, r.n FROM requests r LEFT JOIN slots s ON s.request_id = r.id GROUP BY r.id
        HAVING count(s.idx) <> r.n OR min(s.idx) <> 0 OR max(s.idx) <> r.n - 1""",
    ),
    (
        "nothing waits after an outcome, and before one every slot waits, is processing or is stored",
        """SELECT r.id, r.outcome, s.idx, s.state FROM requests r JOIN slots s ON s.request_id = r.id
        WHERE CASE WHEN r.outcome IS NULL THEN s.state = 'dropped' ELSE s.state = 'waiting' END""",
    ),
    (
        "I4: no job faults after the second faulted job without a prior outcome, which is the one that sets `faulted`",
        """SELECT f.request_id, array_agg(f.outcome) FROM
            (SELECT e.*, row_number() OVER (PARTITION BY e.request_id ORDER BY e.id) AS nth FROM events e
             WHERE e.kind = 'faulted' AND NOT EXISTS (
                 SELECT FROM events o WHERE o.request_id = e.request_id AND o.outcome IS NOT NULL AND o.id < e.id)) f
        GROUP BY f.request_id
        HAVING max(nth) > 2 OR bool_or(nth = 2 AND outcome IS DISTINCT FROM 'faulted')
            OR bool_or(nth < 2 AND outcome = 'faulted' AND request_kind <> 'image')""",
    ),
    (
        "I4: an image request ends as faulted at its first fault exactly when n attempts have ended",
        """SELECT r.id, r.outcome FROM requests r
        JOIN events e ON e.request_id = r.id AND e.kind = 'faulted'
        WHERE r.kind = 'image'
          AND NOT EXISTS (SELECT FROM events o WHERE o.request_id = r.id AND o.id < e.id
                          AND (o.outcome IS NOT NULL OR o.kind = 'faulted'))
          AND (e.outcome IS NOT DISTINCT FROM 'faulted') <> (
              1 + (SELECT count(*) FROM events o
                   WHERE o.request_id = r.id AND o.kind = 'stored' AND o.id < e.id) >= r.n)""",
    ),
    (
        "a request completes exactly when its last slot is stored and nothing ended it before",
        """SELECT id, outcome, n, stored FROM requests WHERE (outcome IS NOT DISTINCT FROM 'completed') <>
            (stored = n AND outcome IS DISTINCT FROM 'cancelled')""",
    ),
    (
        "an outcome is told of by exactly one event, and an event's outcome is its request's",
        """SELECT r.id, r.outcome, array_agg(e.outcome) FROM requests r
        LEFT JOIN events e ON e.request_id = r.id AND e.outcome IS NOT NULL GROUP BY r.id
        HAVING count(e.outcome) <> (r.outcome IS NOT NULL)::int OR bool_or(e.outcome <> r.outcome)""",
    ),
    (
        "I5: each job has one event of its claim and, once settled, one event of the state it settled to",
        """SELECT j.id, j.state, array_agg(e.kind) FROM jobs j LEFT JOIN events e ON e.job_id = j.id GROUP BY j.id
        HAVING count(*) FILTER (WHERE e.kind = 'claimed') <> 1
            OR count(*) FILTER (WHERE e.kind = j.state) <> (j.state <> 'processing')::int
            OR count(*) FILTER (WHERE e.kind NOT IN ('claimed', j.state)) <> 0""",
    ),
    (
        "I5: no job was stored twice, whether its request is still there or not",
        "SELECT job_id FROM events WHERE kind = 'stored' GROUP BY job_id HAVING count(*) > 1",
    ),
    (
        "I5: a stored job's event has its price, its reward and its own tokens, and nothing else is paid",
        """SELECT j.id, j.state, j.price, j.reward, e.price AS told, e.reward AS paid FROM jobs j JOIN events e ON e.job_id = j.id
        JOIN slots s ON s.request_id = j.request_id AND s.idx = j.slot_idx
        WHERE (e.kind = 'stored' AND (e.price, e.reward, e.tokens) IS DISTINCT FROM
               (j.price, j.reward, greatest(0, j.tokens - CASE
                   WHEN j.result = '' OR j.tokens = cardinality(j.token_ids) THEN coalesce(cardinality(s.prefix_token_ids), 0)
                   -- Counted by the text, so the prefix is too.
                   ELSE ceil(j.tokens * coalesce(char_length(s.prefix_text), 0)::float / char_length(j.result)) END)))
           OR (e.kind <> 'stored' AND (e.price, e.reward) <> (0, 0))
           OR (j.state <> 'stored' AND coalesce(j.price, j.reward, 0) <> 0)""",
    ),
    (
        "I5: the ledger's entries sum to zero, each and all",
        "SELECT entry_id, sum(amount) FROM ledger GROUP BY entry_id HAVING sum(amount) <> 0",
    ),
    (
        "I8: a request's counters equal the rows they count",
        """SELECT r.id, r.waiting, r.processing, r.stored, r.faulted, r.restarted, r.charged FROM requests r,
            LATERAL (SELECT count(*) FILTER (WHERE state = 'waiting') AS waiting,
                            count(*) FILTER (WHERE state = 'processing') AS processing,
                            count(*) FILTER (WHERE state = 'stored') AS stored FROM slots WHERE request_id = r.id) s,
            LATERAL (SELECT count(*) FILTER (WHERE state = 'processing') AS processing,
                            count(*) FILTER (WHERE state = 'stored') AS stored,
                            count(*) FILTER (WHERE state = 'faulted') AS faulted,
                            count(*) FILTER (WHERE state IN ('faulted', 'released')) AS restarted,
                            coalesce(sum(price), 0) AS charged FROM jobs WHERE request_id = r.id) j,
            LATERAL (SELECT coalesce(sum(price), 0) AS tax FROM events
                     WHERE request_id = r.id AND kind = 'enqueued') e
        WHERE (r.waiting, r.processing, r.stored, r.processing, r.stored, r.faulted, r.restarted, r.charged)
              IS DISTINCT FROM
              (s.waiting, s.processing, s.stored, j.processing, j.stored, j.faulted, j.restarted, j.charged + e.tax)""",
    ),
    (
        "whether the latest settled job faulted is what the request says of it",
        """SELECT r.id, r.last_settled_faulted, e.kind FROM requests r LEFT JOIN LATERAL
            (SELECT kind FROM events WHERE request_id = r.id AND kind IN ('stored', 'faulted', 'released', 'rejected')
             ORDER BY id DESC LIMIT 1) e ON true
        WHERE r.last_settled_faulted <> (e.kind IS NOT DISTINCT FROM 'faulted')""",
    ),
    (
        "a request queues exactly while slots wait and it has no outcome, under its models or `*`, at its rank",
        """SELECT coalesce(r.id, q.request_id), r.waiting, r.outcome, q.models FROM requests r FULL JOIN
            (SELECT request_id, array_agg(model ORDER BY model) AS models, min(rank) AS first, max(rank) AS last,
                    min(user_id) AS least_user, max(user_id) AS user_id FROM queue GROUP BY request_id) q
            ON q.request_id = r.id
        WHERE (r.waiting > 0 AND r.outcome IS NULL) IS DISTINCT FROM (q.request_id IS NOT NULL)
           OR q.request_id IS NOT NULL AND (q.first, q.last, q.least_user, q.user_id) IS DISTINCT FROM
              (r.rank, r.rank, r.user_id, r.user_id)
           OR q.models IS DISTINCT FROM CASE WHEN q.request_id IS NULL THEN NULL WHEN r.models = '{}' THEN ARRAY['*']
              ELSE (SELECT array_agg(DISTINCT m ORDER BY m) FROM unnest(r.models) AS m) END""",
    ),
    (
        "a request is done exactly when it has an outcome and no job is processing",
        """SELECT r.id, r.outcome, r.done_at FROM requests r WHERE (r.done_at IS NOT NULL) <> (
            r.outcome IS NOT NULL
            AND NOT EXISTS (SELECT FROM jobs WHERE request_id = r.id AND state = 'processing'))""",
    ),
    (
        "I9: no job was claimed or settled after its request was done",
        """SELECT r.id, j.id AS job, j.state, j.claimed_at, j.settled_at, r.done_at
        FROM requests r JOIN jobs j ON j.request_id = r.id
        WHERE j.claimed_at > r.done_at OR j.settled_at > r.done_at""",
    ),
    (
        "no job was claimed after its request's outcome",
        """SELECT e.request_id, e.job_id FROM events e WHERE e.kind = 'claimed' AND EXISTS (
            SELECT FROM events o WHERE o.request_id = e.request_id AND o.outcome IS NOT NULL AND o.id < e.id)""",
    ),
    (
        "a slot is put back after a release at most 5 times",
        "SELECT request_id, idx, releases FROM slots WHERE releases > 5",
    ),
    (
        "what a client was sent stays: a stored result, and the output of each later attempt, begins with what was posted",
        """SELECT j.id, posted.text, later.text FROM jobs j JOIN requests r ON r.id = j.request_id AND r.attached_until IS NOT NULL
        JOIN progress posted ON posted.job_id = j.id
        JOIN LATERAL (
            SELECT a.claimed_at, a.result AS text, a.token_ids FROM jobs a WHERE a.id = j.id AND a.result_state = 'ok'
            UNION ALL
            SELECT a.claimed_at, coalesce(a.result, p.text), coalesce(a.token_ids, p.token_ids) FROM jobs a
            LEFT JOIN progress p ON p.job_id = a.id
            WHERE (a.request_id, a.slot_idx) = (j.request_id, j.slot_idx) AND a.claimed_at > j.claimed_at
              AND coalesce(a.result_state, 'ok') = 'ok' AND coalesce(a.result, p.text) IS NOT NULL) later ON true
        WHERE NOT starts_with(later.text, posted.text)
           OR later.token_ids[1:cardinality(posted.token_ids)] IS DISTINCT FROM posted.token_ids AND later.token_ids IS NOT NULL""",
    ),
    (
        "logprobs are one a token",
        """SELECT job_id, token_ids, logprobs FROM progress WHERE jsonb_array_length(logprobs) <> cardinality(token_ids)
        UNION ALL SELECT id, token_ids, logprobs FROM jobs WHERE jsonb_array_length(logprobs) <> cardinality(token_ids)""",
    ),
    (
        "a stream that was begun goes on only with a worker that posts, in the revision that began it",
        """SELECT r.id, r.revision, j.revision FROM requests r JOIN slots s ON s.request_id = r.id AND s.prefix_token_ids IS NOT NULL
        LEFT JOIN jobs j ON j.request_id = r.id AND j.claimed_at > (
            SELECT min(a.settled_at) FROM jobs a JOIN progress p ON p.job_id = a.id
            WHERE a.request_id = r.id AND a.state IN ('faulted', 'released') AND p.token_ids <> '{}')
        WHERE NOT r.needs_progress OR j.id IS NOT NULL AND (NOT j.posts_progress OR r.revision <> coalesce(j.revision, ''))""",
    ),
    (
        "as many connections wait as have come and not gone; only an attached request has any",
        "SELECT id, attached_by, attached_until FROM requests WHERE attached_by < 0 OR attached_by > 0 AND attached_until IS NULL",
    ),
    (
        "expiry never lies behind the deadline",
        "SELECT id, expires_at, deadline FROM requests WHERE expires_at > deadline",
    ),
)

# True once every event has been folded.
WHEN_FOLDED: tuple[tuple[str, str], ...] = (
    ("I5: every event is folded", "SELECT event_id FROM events_unfolded"),
    (
        "I5: each event that costs something has one entry of its price, and nothing else has one",
        """SELECT coalesce(e.id, l.event_id), e.kind, e.price, l.entries, l.moved FROM
            (SELECT event_id, count(DISTINCT entry_id) AS entries, sum(amount) FILTER (WHERE amount > 0) AS moved
             FROM ledger WHERE event_id IS NOT NULL GROUP BY event_id) l
        FULL JOIN (SELECT * FROM events WHERE price > 0) e ON e.id = l.event_id
        WHERE (l.entries, l.moved) IS DISTINCT FROM (1, e.price)""",
    ),
    (
        "I5: a worker's owner is paid the reward of each result, in full",
        """SELECT e.id, e.owner_id, e.reward, paid.amount FROM events e JOIN accounts a ON a.user_id = e.owner_id
        LEFT JOIN LATERAL (SELECT sum(amount) AS amount FROM ledger
                           WHERE event_id = e.id AND account_id = a.id AND amount > 0) paid ON true
        WHERE e.reward <> coalesce(paid.amount, 0) AND e.owner_id <> e.user_id""",
    ),
    (
        "I5: a balance is the sum of its account's ledger lines",
        """SELECT a.id, a.kind, a.user_id, a.balance, l.sum FROM accounts a
        LEFT JOIN (SELECT account_id, sum(amount) AS sum FROM ledger GROUP BY account_id) l ON l.account_id = a.id
        WHERE a.balance <> coalesce(l.sum, 0)""",
    ),
)

# I6 needs to be told that maintenance has run: until then a lease that is over is nobody's fault.
SWEPT = (
    "I6: nothing is processing past its lease by two passes",
    """SELECT id, lease_end FROM jobs WHERE state = 'processing'
    AND without_outages(lease_begun, lease_end) < horde_now() - make_interval(secs => %(passes)s)""",
)

IDLE = """
SELECT pid, query FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND starts_with(state, 'idle in transaction')
  AND clock_timestamp() - state_change > interval '1 second'
"""


class Violation(AssertionError):  # noqa: N818 reads as what it is in a test's report
    """One or more invariants do not hold; the message has a sentence and the first rows for each."""


def check_invariants(
    db: Database,
    *,
    acknowledged: Mapping[uuid.UUID, str] | None = None,
    accepted: Iterable[uuid.UUID] | None = None,
    folded: bool = False,
    swept: float | None = None,
) -> None:
    """Check I1 to I9 on all of a database, while nothing writes to it.

    Args:
        acknowledged: text by job, of every submit that was answered 200 and whose request is not removed yet (I2).
        accepted: every request answered 202 and not removed yet (I1).
        folded: events have been folded, so that ledger and balances must be complete.
        swept: seconds that two maintenance passes take; the last two have just run (I6). None: they have not.

    Raises:
        Violation: with a sentence for each that does not hold.
    """
    with db.transaction() as tx:
        # All of it from one snapshot, however long it takes.
        tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        violations = find_violations(tx, acknowledged=acknowledged, accepted=accepted, folded=folded, swept=swept)
    if violations:
        raise Violation("\n".join(violations))


def find_violations(
    tx: Transaction,
    *,
    acknowledged: Mapping[uuid.UUID, str] | None = None,
    accepted: Iterable[uuid.UUID] | None = None,
    folded: bool = False,
    swept: float | None = None,
) -> list[str]:
    """The violations as one transaction sees them; see `check_invariants`."""
    found = [_look(tx, sentence, query) for sentence, query in ALWAYS]
    if folded:
        found += [_look(tx, sentence, query) for sentence, query in WHEN_FOLDED]
    if swept is not None:
        found.append(_look(tx, *SWEPT, passes=swept))
    found += [
        _look(tx, "I7: no connection stays idle in transaction", IDLE),
        _missing_requests(tx, accepted or ()),
        _lost_submits(tx, acknowledged or {}),
    ]
    return [violation for violation in found if violation]


def _look(tx: Transaction, sentence: str, query: str, **parameters: object) -> str:
    rows = tx.execute(query, parameters)[:3]
    return f"not so: {sentence}: {[tuple(row) for row in rows]}" if rows else ""


def _missing_requests(tx: Transaction, accepted: Iterable[uuid.UUID]) -> str:
    query = """SELECT id FROM unnest(%(accepted)s::uuid[]) AS id
    WHERE NOT EXISTS (SELECT FROM requests WHERE requests.id = id.id)"""
    return _look(tx, "I1: every accepted request exists", query, accepted=list(accepted))


def _lost_submits(tx: Transaction, acknowledged: Mapping[uuid.UUID, str]) -> str:
    query = """SELECT told.job, told.text, j.state, j.result
    FROM unnest(%(jobs)s::uuid[], %(texts)s::text[]) AS told (job, text)
    LEFT JOIN jobs j ON j.id = told.job
    WHERE j.state IS DISTINCT FROM 'stored' OR (j.result <> told.text AND NOT j.stored_by_cancel)"""
    return _look(
        tx,
        "I2: every acknowledged submit is stored with its text, or was stored by a cancel before",
        query,
        jobs=list(acknowledged),
        texts=list(acknowledged.values()),
    )
