"""The ledger: append-only double entry, folded from events exactly once.

The lines of an entry sum to zero. A debit stops at the account's floor; what is missing is a line of the write-off account, so
that the worker is paid and the whole ledger sums to zero at every moment.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horde.db.database import Transaction

# By id: transfers and folds that meet on two accounts take them in the same order.
LOCK_ACCOUNTS = """
SELECT id, kind, user_id, balance, floor FROM accounts
WHERE id = ANY (%(ids)s) OR user_id = ANY (%(users)s) OR (user_id IS NULL AND kind = ANY (%(kinds)s))
ORDER BY id FOR UPDATE
"""

ADD_TO_BALANCES = """
UPDATE accounts SET balance = balance + change.amount
FROM unnest(%(accounts)s::bigint[], %(amounts)s::bigint[]) AS change (account_id, amount)
WHERE accounts.id = change.account_id
"""

APPEND_LINES = """
INSERT INTO ledger (entry_id, event_id, account_id, amount, reason, created_at)
SELECT line.entry_id, line.event_id, line.account_id, line.amount, line.reason, (SELECT horde_now())
FROM unnest(%(entries)s::uuid[], %(events)s::bigint[], %(accounts)s::bigint[], %(amounts)s::bigint[], %(reasons)s::text[])
     AS line (entry_id, event_id, account_id, amount, reason)
"""


@dataclass(frozen=True)
class Line:
    """One side of an entry: hundredths onto (or off) an account."""

    account_id: int
    amount: int


@dataclass
class Balance:
    """What is on an account while events are counted, in hundredths; no payment takes it below its floor."""

    amount: int
    floor: int | None

    def pay(self, amount: int) -> int:
        """Take up to `amount` without passing below the floor; returns what was taken."""
        payable = amount if self.floor is None else max(0, min(amount, self.amount - self.floor))
        self.amount -= payable
        return payable

    def earn(self, amount: int) -> None:
        """Put `amount` on it."""
        self.amount += amount


@dataclass
class _Account:
    id: int
    balance: Balance


def post_entry(tx: Transaction, lines: Sequence[Line], *, reason: str) -> None:
    """Post one entry; raises ValueError when its lines do not sum to zero."""
    if sum(line.amount for line in lines) != 0:
        raise ValueError("the lines of an entry sum to zero")
    tx.execute(LOCK_ACCOUNTS, {"ids": [line.account_id for line in lines], "users": [], "kinds": []})
    entry = uuid.uuid4()
    _write(tx, [(entry, None, line.account_id, line.amount, reason) for line in lines])


def fold_into_ledger(tx: Transaction, events: Sequence[Any]) -> None:
    """Post an entry for each event that costs or earns something.

    Args:
        events: rows of `events` whose unfolded mark the caller has just deleted in this transaction.
    """
    paying = [event for event in events if event.price or event.reward]
    if not paying:
        return
    users = sorted({event.user_id for event in paying} | {event.owner_id for event in paying if event.reward})
    rows = tx.execute(LOCK_ACCOUNTS, {"ids": [], "users": users, "kinds": ["horde", "write_off"]}).all()
    by_user = {
        row.user_id: _Account(row.id, Balance(row.balance, row.floor)) for row in rows if row.user_id is not None
    }
    system = {row.kind: row.id for row in rows if row.user_id is None}
    lines: list[tuple[uuid.UUID, int | None, int, int, str]] = []
    for event in paying:
        entry = uuid.uuid4()
        amounts = _entry(event, by_user, system)
        lines.extend((entry, event.id, account, amount, event.kind) for account, amount in amounts if amount)
    _write(tx, lines)


def _entry(event: Any, by_user: dict[int, _Account], system: dict[str, int]) -> list[tuple[int, int]]:
    payer = by_user[event.user_id]
    paid = payer.balance.pay(event.price)
    amounts = [
        (payer.id, -paid),
        (system["write_off"], paid - event.price),
        (system["horde"], event.price - event.reward),
    ]
    if event.reward:
        owner = by_user[event.owner_id]
        owner.balance.earn(event.reward)
        amounts.append((owner.id, event.reward))
    return amounts


def _write(tx: Transaction, lines: Sequence[tuple[uuid.UUID, int | None, int, int, str]]) -> None:
    changes: dict[int, int] = {}
    for _entry_id, _event, account, amount, _reason in lines:
        changes[account] = changes.get(account, 0) + amount
    tx.execute(ADD_TO_BALANCES, {"accounts": list(changes), "amounts": list(changes.values())})
    entries, events, accounts, amounts, reasons = (list(column) for column in zip(*lines, strict=True))
    tx.execute(
        APPEND_LINES,
        {"entries": entries, "events": events, "accounts": accounts, "amounts": amounts, "reasons": reasons},
    )
