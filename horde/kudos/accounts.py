"""Accounts: opening one, and reading a balance that shows every settlement at once."""

from __future__ import annotations

from horde.db.database import Prepared, Transaction
from horde.kudos.ledger import Line, post_entry

OPEN_ACCOUNT = "INSERT INTO accounts (kind, user_id, floor) VALUES ('user', %(user)s, %(floor)s) RETURNING id"

SYSTEM_ACCOUNT = "SELECT id FROM accounts WHERE kind = %(kind)s AND user_id IS NULL"

READ_FOLDED_BALANCE = Prepared("SELECT balance FROM accounts WHERE user_id = %(user)s")

# The folded balance plus what the fold has yet to see, in one snapshot.
READ_BALANCE = """
SELECT a.balance
    + coalesce((SELECT sum(CASE WHEN e.owner_id = %(user)s THEN e.reward ELSE 0 END
                           - CASE WHEN e.user_id = %(user)s THEN e.price ELSE 0 END)
                FROM events_unfolded u JOIN events e ON e.id = u.event_id
                WHERE e.owner_id = %(user)s OR e.user_id = %(user)s), 0) AS balance, a.floor
FROM accounts a WHERE a.user_id = %(user)s
"""


def open_account(tx: Transaction, user_id: int, grant: int = 0) -> None:
    """Open a user's account with `grant` hundredths fresh from the mint."""
    account = tx.execute(OPEN_ACCOUNT, {"user": user_id, "floor": 0}).scalar_one()
    if grant:
        mint = tx.execute(SYSTEM_ACCOUNT, {"kind": "mint"}).scalar_one()
        post_entry(tx, [Line(mint, -grant), Line(account, grant)], reason="grant")


def read_folded_balance(tx: Transaction, user_id: int) -> int:
    """Hundredths as of the last fold: for what may lag a little, such as a place in the queue."""
    return int(tx.execute(READ_FOLDED_BALANCE, {"user": user_id}).scalar_one_or_none() or 0)


def read_balance(tx: Transaction, user_id: int) -> int:
    """Hundredths that a user has, the events not folded yet included."""
    row = tx.execute(READ_BALANCE, {"user": user_id}).one_or_none()
    if row is None:
        return 0
    return int(row.balance if row.floor is None else max(row.balance, row.floor))
