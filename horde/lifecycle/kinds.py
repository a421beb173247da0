"""What differs between kinds of request: when a faulted job's slot is put back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from horde.lifecycle.words import Kind


@dataclass(frozen=True)
class KindRules:
    """Rules of one kind.

    Attributes:
        restarts: (n, stored, faulted) -> whether a faulted job's slot is put back; `faulted` counts that job.
    """

    restarts: Callable[[int, int, int], bool]


def _always(_n: int, _stored: int, _faulted: int) -> bool:
    return True


def _while_attempts_remain(n: int, stored: int, faulted: int) -> bool:
    return stored + faulted < n


RULES: dict[Kind, KindRules] = {
    Kind.TEXT: KindRules(restarts=_always),
    Kind.CHAT: KindRules(restarts=_always),
    Kind.IMAGE: KindRules(restarts=_while_attempts_remain),
}
