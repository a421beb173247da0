"""Kudos: prices, accounts, and the ledger folded from events. Amounts are integers of a hundredth of a kudos."""
