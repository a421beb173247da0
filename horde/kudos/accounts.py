"""Accounts: opening one, and reading a balance that shows every settlement at once."""

from __future__ import annotations

from horde.db.database import Transaction
from horde.kudos.ledger import Balance, Line, post_entry

OPEN_ACCOUNT = "INSERT INTO accounts (kind, user_id, floor) VALUES ('user', %(user)s, %(floor)s) RETURNING id"

SYSTEM_ACCOUNT = "SELECT id FROM accounts WHERE kind = %(kind)s AND user_id IS NULL"

# The folded balance and what the fold has yet to see, in one snapshot: as sums, and, where the floor may stop a payment, one
# by one in the order in which the fold will count them.
READ_BALANCE = """
WITH fresh AS MATERIALIZED (
    SELECT e.id, CASE WHEN e.user_id = %(user)s THEN e.price ELSE 0 END AS price,
           CASE WHEN e.owner_id = %(user)s THEN e.reward ELSE 0 END AS reward
    FROM events_unfolded u JOIN events e ON e.id = u.event_id
    WHERE (e.owner_id = %(user)s AND e.reward <> 0) OR (e.user_id = %(user)s AND e.price <> 0)),
sums AS (SELECT coalesce(sum(price), 0) AS price, coalesce(sum(reward), 0) AS reward FROM fresh),
account AS (
    SELECT balance, floor, floor IS NOT NULL AND balance - sums.price < floor AS near_floor, sums.price, sums.reward
    FROM accounts, sums WHERE user_id = %(user)s)
SELECT balance, floor, near_floor, price, reward,
       CASE WHEN near_floor THEN ARRAY(SELECT price FROM fresh ORDER BY id) END AS prices,
       CASE WHEN near_floor THEN ARRAY(SELECT reward FROM fresh ORDER BY id) END AS rewards
FROM account
"""


def open_account(tx: Transaction, user_id: int, grant: int = 0) -> None:
    """Open a user's account with `grant` hundredths fresh from the mint."""
    account = tx.execute(OPEN_ACCOUNT, {"user": user_id, "floor": 0}).scalar_one()
    if grant:
        mint = tx.execute(SYSTEM_ACCOUNT, {"kind": "mint"}).scalar_one()
        post_entry(tx, [Line(mint, -grant), Line(account, grant)], reason="grant")


def read_balance(tx: Transaction, user_id: int) -> int:
    """Hundredths that a user has, the events not folded yet included, as the fold will count them.

    What a floor leaves unpaid is written off at that event, and nothing earned later pays for it.
    """
    row = tx.execute(READ_BALANCE, {"user": user_id}).one_or_none()
    if row is None:
        return 0
    if not row.near_floor:
        return int(row.balance - row.price + row.reward)
    balance = Balance(row.balance, row.floor)
    for price, reward in zip(row.prices, row.rewards, strict=True):
        balance.pay(price)
        balance.earn(reward)
    return balance.amount
