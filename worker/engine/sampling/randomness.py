"""Random numbers that depend on nothing but who asks: one uniform number for each (seed, sample, position).

There is no generator to keep, to share or to restore: a text comes out the same beside any neighbours, after a
preemption, and on another worker that continues it.
"""

from __future__ import annotations

from hashlib import blake2b

_PERSON = b"horde.draw"


def uniform(seed: int, sample: int, position: int) -> float:
    """A number in [0, 1), the same on every platform.

    It is the upper 53 bits, read as a binary fraction, of the 64-bit BLAKE2b digest (personalised `horde.draw`) of
    `seed`, `sample` and `position`, each as 8 bytes, lowest first.

    Args:
        seed: any int, taken modulo 2**64.
        sample: which of the samples of one request.
        position: how many output tokens the sample has so far.
    """
    message = b"".join((number % 2**64).to_bytes(8, "little") for number in (seed, sample, position))
    digest = blake2b(message, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
