"""Kudos: every payment once, every entry and so the whole ledger summing to zero, and reads that show a write at once."""

from __future__ import annotations

import functools
import random
import uuid
from collections import defaultdict
from collections.abc import Iterator

import pytest

from horde.db.database import Database
from horde.kudos.accounts import read_balance
from horde.kudos.ledger import Line, post_entry
from horde.maintenance.folds import BATCH, fold_batch
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import together
from tests.support.invariants import check_invariants

# 80 tokens of a 70b after a short prompt: 80 x (70 / 13) ^ 0.2 x 70 / 125 x (1.2 + 2.2 ^ -9) = 75.33 kudos.
MODEL, REWARD = "a-70b", 7533
FEE = TAX = 100
LONG_TEXT = "x" * 320


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made


def deliver(broker: Broker, client: str, owner: str, results: int = 1) -> None:
    """One request of so many results, ordered and delivered."""
    broker.order(client, n=results, models=[MODEL])
    for job in broker.pop(owner, name=f"worker of {owner}", models=[MODEL], amount=results).jobs:
        assert broker.submit(owner, job.id, LONG_TEXT) == REWARD / 100


def balance(broker: Broker, kind_or_user: str | int) -> int:
    column = "kind" if isinstance(kind_or_user, str) else "user_id"
    return int(broker.world.scalar(f"SELECT balance FROM accounts WHERE {column} = %(which)s", which=kind_or_user))


def assert_sound(db: Database) -> None:
    """The ledger sums to zero, as does each entry; and balances are the sums of their lines."""
    with db.autocommit() as tx:
        assert tx.execute("SELECT coalesce(sum(amount), 0) FROM ledger").scalar_one() == 0
        assert tx.execute("SELECT sum(balance) FROM accounts").scalar_one() == 0
        assert tx.execute("SELECT entry_id FROM ledger GROUP BY entry_id HAVING sum(amount) <> 0").all() == []
        drift = """SELECT a.id FROM accounts a LEFT JOIN ledger l ON l.account_id = a.id
        GROUP BY a.id HAVING a.balance <> coalesce(sum(l.amount), 0)"""
        assert tx.execute(drift).all() == []


# --- who pays and who earns


def test_a_client_pays_the_worker_and_the_horde_and_nothing_else_moves(broker: Broker) -> None:
    client, owner = broker.user("client", kudos=1000), broker.user("owner", "trusted")
    deliver(broker, client.api_key, owner.api_key, results=2)
    broker.fold()

    assert balance(broker, client.id) == 100_000 - TAX - 2 * (REWARD + FEE)
    assert balance(broker, owner.id) == 2 * REWARD
    assert balance(broker, "horde") == TAX + 2 * FEE
    assert balance(broker, "write_off") == 0
    assert balance(broker, "mint") == -100_000
    check_invariants(broker.context.database, folded=True)


def test_each_stored_result_is_one_payout(broker: Broker) -> None:
    client, owner = broker.user("client", kudos=1000), broker.user("owner", "trusted")
    for _ in range(3):
        deliver(broker, client.api_key, owner.api_key)
    broker.fold()

    payouts = """SELECT e.id, count(*), sum(l.amount) FROM events e JOIN ledger l ON l.event_id = e.id
    JOIN accounts a ON a.id = l.account_id AND a.user_id = e.owner_id WHERE e.kind = 'stored' GROUP BY e.id"""
    assert [row[1:] for row in broker.world.rows(payouts)] == [(1, REWARD)] * 3
    assert broker.world.scalar("SELECT count(*) FROM events WHERE kind = 'stored'") == 3


def test_what_was_not_delivered_costs_the_tax_alone(broker: Broker) -> None:
    client, owner = broker.user("client", kudos=10), broker.user("owner").api_key
    broker.order(client.api_key)
    for _ in range(2):
        broker.submit(owner, broker.job(owner).id, state="faulted")
    broker.fold()
    assert balance(broker, client.id) == 1000 - TAX


def test_a_user_that_serves_itself_pays_the_fees(broker: Broker) -> None:
    user = broker.user("both", "trusted", kudos=100)
    deliver(broker, user.api_key, user.api_key)
    broker.fold()
    assert balance(broker, user.id) == 10_000 - TAX - FEE
    assert_sound(broker.context.database)


# --- floors


def test_an_account_stops_at_its_floor_and_the_worker_is_paid_all_the_same(broker: Broker) -> None:
    owner = broker.user("owner", "trusted")
    deliver(broker, "0000000000", owner.api_key, results=2)
    broker.fold()

    owed = TAX + 2 * (REWARD + FEE)
    assert balance(broker, 0) == -5000
    assert balance(broker, "write_off") == 5000 - owed
    assert balance(broker, owner.id) == 2 * REWARD
    assert balance(broker, "horde") == TAX + 2 * FEE
    check_invariants(broker.context.database, folded=True)


def test_a_registered_user_stops_at_nothing(broker: Broker) -> None:
    client = broker.user("client", kudos=1.5)
    for _ in range(3):
        broker.order(client.api_key)
    broker.fold()
    assert balance(broker, client.id) == 0
    assert balance(broker, "write_off") == -150
    assert_sound(broker.context.database)


def test_a_balance_shown_never_lies_below_the_floor(broker: Broker) -> None:
    for _ in range(55):
        broker.order()
    assert broker.find_user("0000000000").kudos == -50
    broker.fold()
    assert broker.find_user("0000000000").kudos == -50


# --- reads


def test_a_balance_shows_a_write_at_once_and_the_fold_changes_nothing_about_it(broker: Broker) -> None:
    client, owner = broker.user("client", kudos=1000), broker.user("owner", "trusted", kudos=5)
    shown = []
    deliver(broker, client.api_key, owner.api_key)
    shown.append((broker.find_user(client.api_key).kudos, broker.find_user(owner.api_key).kudos))
    broker.fold()
    shown.append((broker.find_user(client.api_key).kudos, broker.find_user(owner.api_key).kudos))
    assert shown == [(1000 - 1 - 76.33, 5 + 75.33)] * 2

    # Half of it folded, half not.
    deliver(broker, client.api_key, owner.api_key)
    assert broker.find_user(owner.api_key).kudos == pytest.approx(5 + 2 * 75.33)
    assert broker.find_user(client.api_key).kudos == pytest.approx(1000 - 2 * 77.33)


class Tells:
    """What a balance is said to be before and after each fold."""

    def __init__(self, broker: Broker, user: int, *, kudos: int = 0, floor: int = 0) -> None:
        self._broker, self._user = broker, user
        with broker.context.database.transaction() as tx:
            tx.execute(
                "UPDATE accounts SET balance = %(balance)s, floor = %(floor)s WHERE user_id = %(user)s",
                {"balance": kudos, "floor": floor, "user": user},
            )

    def happen(self, *events: tuple[int, int]) -> None:
        """So much is paid, then so much earned, in one event each."""
        columns = {"prices": [price for price, _ in events], "rewards": [reward for _, reward in events]}
        users = {"users": [self._user] * len(events), "owners": [self._user] * len(events)}
        with self._broker.context.database.transaction() as tx:
            tx.execute(RECORD, {"worker": uuid.uuid4(), **users, **columns})

    def said(self) -> int:
        return self._broker.context.database.read(lambda tx: read_balance(tx, self._user))

    def folded(self) -> int:
        self._broker.fold()
        assert self.said() == balance(self._broker, self._user)
        return balance(self._broker, self._user)


def test_what_is_written_off_and_then_earned_is_said_as_the_fold_will_count_it(broker: Broker) -> None:
    tells = Tells(broker, broker.user().id, kudos=100)
    # 300 to pay, of which 200 are written off; then 500 earned, of which nothing goes there.
    tells.happen((300, 0), (0, 500))
    assert tells.said() == 500
    assert tells.folded() == 500
    # Earned first, the same is paid in full.
    tells.happen((0, 500), (300, 0))
    assert tells.said() == tells.folded() == 700


def test_an_account_below_its_floor_pays_nothing_until_it_is_above_again(broker: Broker) -> None:
    tells = Tells(broker, broker.user().id, kudos=-300)
    tells.happen((100, 0), (50, 200), (50, 150), (30, 0))
    assert tells.said() == tells.folded() == 20


def test_an_account_without_a_floor_pays_everything(broker: Broker) -> None:
    user = broker.user().id
    tells = Tells(broker, user)
    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE accounts SET floor = NULL WHERE user_id = %(user)s", {"user": user})
    tells.happen((300, 0), (0, 100))
    assert tells.said() == tells.folded() == -200


def test_a_balance_near_its_floor_never_moves_at_a_fold(broker: Broker) -> None:
    draw = random.Random(5)
    tells = Tells(broker, broker.user().id, kudos=50, floor=-100)
    moments = set()
    for _ in range(40):
        events = [draw.choice([(draw.randrange(300), 0), (0, draw.randrange(300)), (90, 80)]) for _ in range(6)]
        tells.happen(*events)
        before = tells.said()
        assert tells.folded() == before, events
        moments.add(before > -100)
    assert moments == {True, False}, "it was at its floor, and above it"


# --- sizes told by names


def test_a_size_that_a_stranger_made_up_earns_and_costs_next_to_nothing(broker: Broker) -> None:
    client, stranger = broker.user("client", kudos=30_000), broker.user("stranger")
    quoted = broker.ask(client.api_key, models=[], max_length=512).kudos
    job = broker.job(stranger.api_key, models=["nice-2000B"])
    assert job.model == "nice-2000B"
    reward = broker.submit(stranger.api_key, job.id, "x" * 4 * 512)
    broker.fold()
    # The context multiplier of a two-token prompt.
    assert reward == 1.2
    charged = 3_000_000 - balance(broker, client.id)
    assert charged == TAX + FEE + 120 <= 100 * quoted
    assert balance(broker, "write_off") == 0


def test_what_the_anonymous_account_owes_is_bounded_by_what_was_quoted(broker: Broker) -> None:
    stranger = broker.user("stranger").api_key
    quoted = 0.0
    for _ in range(5):
        quoted += broker.ask(models=["nice-2000B"], max_length=512).kudos
        broker.submit(stranger, broker.job(stranger, models=["nice-2000B"]).id, "x" * 4 * 512)
    broker.fold()
    assert -balance(broker, "write_off") / 100 <= quoted
    assert broker.find_user(stranger).kudos == 5 * 1.2


def test_an_order_that_names_no_model_is_quoted_for_what_trusted_workers_serve(broker: Broker) -> None:
    client, trusted = broker.user("client", kudos=1000), broker.user("trusted", "trusted").api_key
    stranger = broker.user("stranger").api_key
    broker.nothing(stranger, name="a", models=["b-2000b"])
    of_nobody = broker.ask(client.api_key, models=[], dry_run=True).kudos
    broker.nothing(trusted, name="b", models=["small-7b", MODEL])
    quoted = broker.ask(client.api_key, models=[], dry_run=True).kudos
    assert quoted == (TAX + FEE + REWARD) / 100 > of_nobody

    broker.order(client.api_key, models=[])
    job = broker.job(trusted, name="b", models=[MODEL])
    broker.submit(trusted, job.id, LONG_TEXT)
    broker.fold()
    assert 100_000 - balance(broker, client.id) == 100 * quoted


# --- the ledger itself


def test_an_entry_that_does_not_sum_to_zero_is_refused(broker: Broker) -> None:
    accounts = [row[0] for row in broker.world.rows("SELECT id FROM accounts ORDER BY id LIMIT 2")]
    lines = [Line(accounts[0], -100), Line(accounts[1], 99)]
    with pytest.raises(ValueError, match="sum to zero"), broker.context.database.transaction() as tx:
        post_entry(tx, lines, reason="test")
    assert broker.world.scalar("SELECT count(*) FROM ledger") == 0


def test_a_grant_comes_from_the_mint(broker: Broker) -> None:
    user = broker.user("rich", kudos=12.34)
    assert (balance(broker, user.id), balance(broker, "mint")) == (1234, -1234)
    assert_sound(broker.context.database)


def test_the_ledger_sums_to_zero_between_any_two_folds(broker: Broker) -> None:
    users = [broker.user(None, "trusted", kudos=kudos) for kudos in (0, 3, 500)]
    for client in (*users, users[0]):
        for owner in users:
            deliver(broker, client.api_key, owner.api_key)
            assert_sound(broker.context.database)
        broker.context.database.run(lambda tx: fold_batch(tx, max_aborts=20))
        assert_sound(broker.context.database)
    check_invariants(broker.context.database, folded=True)


# --- ten thousand


USERS, OPERATIONS = 8, 10_000

RECORD = """
WITH event AS (
    INSERT INTO events (at, kind, request_kind, request_id, job_id, user_id, worker_id, worker_name, owner_id, model, price,
                        reward, tokens)
    SELECT horde_now(), 'stored', 'text', gen_random_uuid(), gen_random_uuid(), u.user_id, %(worker)s, 'worker', u.owner_id, 'm',
           u.price, u.reward, 1
    FROM unnest(%(users)s::bigint[], %(owners)s::bigint[], %(prices)s::bigint[], %(rewards)s::bigint[])
         AS u (user_id, owner_id, price, reward)
    RETURNING id)
INSERT INTO events_unfolded (event_id) SELECT id FROM event
"""


def test_ten_thousand_operations_folded_by_four_at_once_leave_no_drift(broker: Broker) -> None:
    # Everybody is rich enough, so that what each should have is plain addition.
    users = [broker.user(kudos=10_000_000).id for _ in range(USERS)]
    wanted: dict[int, int] = defaultdict(lambda: 10_000_000 * 100)
    draw = random.Random(20)
    operations = []
    for _ in range(OPERATIONS):
        client, owner, reward = draw.choice(users), draw.choice(users), draw.randrange(0, 20_000)
        price = reward + draw.choice([0, 100, 300])
        operations.append((client, owner, price, reward))
        wanted[client] -= price
        wanted[owner] += reward
    columns = [list(column) for column in zip(*operations, strict=True)]
    names = ("users", "owners", "prices", "rewards")
    with broker.context.database.transaction() as tx:
        tx.execute(RECORD, {"worker": uuid.uuid4(), **dict(zip(names, columns, strict=True))})

    def fold_until_empty() -> int:
        total = 0
        work = functools.partial(fold_batch, max_aborts=20)
        while folded := broker.context.database.run(work):
            total += folded
        return total

    assert sum(together(*[fold_until_empty] * 4, within=120)) == OPERATIONS > 4 * BATCH
    assert {user: balance(broker, user) for user in users} == {user: wanted[user] for user in users}
    assert balance(broker, "horde") == sum(price - reward for _, _, price, reward in operations)
    assert balance(broker, "write_off") == 0
    assert_sound(broker.context.database)
    once = "SELECT count(*) FROM (SELECT event_id FROM ledger WHERE event_id IS NOT NULL GROUP BY event_id) AS folded"
    assert broker.world.scalar(once) == sum(price > 0 for _, _, price, _ in operations)
