"""Keys under which full blocks are found again: a hash over the salt, all blocks before, and the block's own tokens.

    key of the start = H("salt", salt)        key of block i = H("block", key of block i - 1, tokens of block i)

Every part is tagged and has its length written before it, so that no salt can be read as tokens, nor the other way
round. H is keyed anew in each process: nobody outside can make up two texts with equal keys. Nothing rests on that
alone; `BlockPool.lookup` compares the content.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Callable

from worker.engine.scheduling.sequence import Sequence

Digest = Callable[[bytes], bytes]


def keyed_digest(secret: bytes | None = None) -> Digest:
    """blake2b of 16 bytes, keyed with `secret`, or with one that nobody knows."""
    key = secrets.token_bytes(32) if secret is None else secret

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=16, key=key).digest()

    return digest


class PrefixKeys:
    """Makes the keys of sequences, each only once.

    Args:
        block_size: tokens a block.
        digest: the hash; a weak one costs cache hits and never a right answer.
    """

    def __init__(self, block_size: int, digest: Digest | None = None) -> None:
        self._block_size = block_size
        self._digest = digest or keyed_digest()

    def start(self, salt: str) -> bytes:
        """The key before the first block."""
        # A salt may come out of JSON with half a surrogate pair in it.
        return self._digest(_tagged(b"salt", salt.encode("utf-8", "surrogatepass")))

    def after(self, key: bytes, tokens: tuple[int, ...]) -> bytes:
        """The key of a block of these tokens after the block of that key."""
        return self._digest(_tagged(b"block", key) + _tagged(b"tokens", array("q", tokens).tobytes()))

    def key(self, sequence: Sequence, index: int) -> bytes:
        """The key of the block of that index, which must be full; kept in `sequence.block_keys`."""
        keys = sequence.block_keys
        while len(keys) <= index:
            before = keys[-1] if keys else self.start(sequence.salt)
            keys.append(self.after(before, sequence.block_tokens(len(keys), self._block_size)))
        return keys[index]


def _tagged(tag: bytes, data: bytes) -> bytes:
    return tag + len(data).to_bytes(8, "big") + data
