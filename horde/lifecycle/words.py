"""The words of the lifecycle as enums, and its limits. The tables' CHECKs hold the same words."""

from __future__ import annotations

from enum import StrEnum

# A request faults when this many of its jobs have faulted.
FAULTED_GENERATIONS_LIMIT = 2
# A slot is put back after a release this often; the next one counts as a fault.
RELEASES_PER_SLOT = 5
# Of an order's `max_length` this many characters a token are kept, more than any tokenizer's tokens have on average. A result
# must always be storable, so what is longer is cut: twenty of them are read in one status.
CHARACTERS_KEPT_PER_TOKEN = 100


class Kind(StrEnum):
    """What a request asks for; differences between kinds are `KindRules`."""

    TEXT = "text"
    CHAT = "chat"
    IMAGE = "image"


class JobState(StrEnum):
    """`processing`, then one of the others, once."""

    PROCESSING = "processing"
    STORED = "stored"
    FAULTED = "faulted"
    RELEASED = "released"
    REJECTED = "rejected"
    VOIDED = "voided"


class Outcome(StrEnum):
    """How a request ended; set once."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAULTED = "faulted"
    REJECTED = "rejected"


class CancelReason(StrEnum):
    """Who or what cancelled."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    EXPIRED = "expired"
    DEADLINE = "deadline"
    ADMIN = "admin"


class FaultReason(StrEnum):
    """Why a job faulted; all but `release_cap` are aborts of its worker."""

    REPORTED = "reported"
    CONTRADICTED = "contradicted"
    STALE = "stale"
    RELEASE_CAP = "release_cap"


class ResultState(StrEnum):
    """What a stored result is; censored and csam results are stored and shown as such."""

    OK = "ok"
    CENSORED = "censored"
    CSAM = "csam"


class Verdict(StrEnum):
    """What a report about a job came to."""

    SETTLED = "settled"
    REPEATED = "repeated"  # the first call's Idempotency-Key again: the first answer again
    ACKNOWLEDGED = "acknowledged"  # stored by a cancel before; its worker's own first submit
    DUPLICATE = "duplicate"  # stored already
    ABORTED = "aborted"  # faulted, released, rejected or voided already
    CONTRADICTED = "contradicted"  # the result does not go on from what was posted; nothing changed
    NOT_DUE = "not_due"  # maintenance looked again after the lock: no reason to act
    GONE = "gone"  # no such job (any more)
