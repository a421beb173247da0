"""Gives sequences their blocks: prefix hits, growth, copy-on-write, forks.

A block that is used more than once, or that others can find, is never written: its writer gets a copy, or the block
leaves the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from worker.engine.scheduling.block_pool import BlockPool, CachedBlock
from worker.engine.scheduling.prefix_keys import Digest, PrefixKeys
from worker.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Copy:
    """Owed to `sequence`; until it is made, the sequence holds a reference on `source` beside the one on `target`."""

    sequence: Sequence
    source: int
    target: int


class BlockAllocator:
    """Owns the block pool of one engine.

    Args:
        blocks: in the pool.
        block_size: tokens a block.
        prefix_caching: find blocks of others with the same beginning and the same salt.
        digest: see `PrefixKeys`.
    """

    def __init__(
        self, blocks: int, block_size: int, *, prefix_caching: bool = True, digest: Digest | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"a block needs room for at least one token, not {block_size}")
        self.pool = BlockPool(blocks)
        self.block_size = block_size
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._keys = PrefixKeys(block_size, digest) if prefix_caching else None
        self._copies: list[_Copy] = []

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.block_size)

    def admit(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Give a waiting sequence blocks for all its tokens and set `computed` to what is found in them.

        At least one token is left to compute, because its logits are wanted: of a text that is cached as a whole, the
        last block is computed once more, in a block of its own.

        Args:
            sequence: without blocks.
            reserve: blocks that must stay free.

        Returns:
            False: there are not enough free blocks; nothing has changed.
        """
        hits = self._find_prefix(sequence)
        wanted = self.blocks_for(sequence.length) - len(hits)
        idle_hits = sum(self.pool.references(block) == 0 for _, block in hits)
        if wanted + reserve > self.pool.free - idle_hits:
            return False
        # Shared before anything is allocated, so that the new blocks are not taken from the hits.
        for _, block in hits:
            self.pool.share(block)
        sequence.block_table = [block for _, block in hits] + self.pool.allocate(wanted)
        sequence.chain = [entry for entry, _ in hits]
        sequence.computed = len(hits) * self.block_size
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
            self.prefix_queries += sequence.prompt_length
            self.prefix_hits += sequence.cached
        return True

    def _find_prefix(self, sequence: Sequence) -> list[tuple[CachedBlock, int]]:
        hits: list[tuple[CachedBlock, int]] = []
        if self._keys is None:
            return hits
        parent = None
        for index in range((sequence.length - 1) // self.block_size):
            tokens = sequence.block_tokens(index, self.block_size)
            hit = self.pool.lookup(self._keys.key(sequence, index), parent, sequence.salt, tokens)
            if hit is None:
                break
            hits.append(hit)
            parent = hit[0]
        return hits

    def grow(self, sequence: Sequence, end: int) -> bool:
        """Make the places of the tokens from `computed` up to `end` exist and writable.

        What is to be copied for that is added to `copies`.

        Returns:
            False: there are not enough free blocks; nothing has changed.
        """
        table = sequence.block_table
        first = sequence.computed // self.block_size
        missing = max(0, self.blocks_for(end) - len(table))
        written = range(first, min(self.blocks_for(end), len(table)))
        shared = [index for index in written if self._is_shared(table[index])]
        if missing + len(shared) > self.pool.free:
            return False
        for index in shared:
            (target,) = self.pool.allocate(1)
            self._copies.append(_Copy(sequence, table[index], target))
            table[index] = target
        for index in written:
            self.pool.forget(table[index])
        table += self.pool.allocate(missing)
        return True

    def _is_shared(self, block: int) -> bool:
        references = self.pool.references(block)
        if references > 1:
            # One that waits for its copy reads the block once more, before anyone writes: no reason for a further copy.
            references -= sum(copy.source == block for copy in self._copies)
        return references > 1

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks that are to be copied, in this order, before the next step computes anything."""
        return [(copy.source, copy.target) for copy in self._copies]

    def copied(self) -> None:
        """The `copies` have been made. Until then their sources are kept, so that they can be made again."""
        for copy in self._copies:
            self.pool.release(copy.source)
        self._copies.clear()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a new sequence with the same tokens share all blocks."""
        for block in parent.block_table:
            self.pool.share(block)
        child.block_table = list(parent.block_table)
        child.chain = list(parent.chain)
        child.computed = parent.computed

    def register(self, sequence: Sequence) -> None:
        """Make its full computed blocks findable; after the step that computed them."""
        full = sequence.computed // self.block_size
        chain = sequence.chain
        if self._keys is None or full <= len(chain):
            return
        # An equal block of another sequence may have stood for ours and be gone: then ours takes its place.
        del chain[next((i for i, entry in enumerate(chain) if entry.block is None), len(chain)) :]
        for index in range(len(chain), full):
            key = self._keys.key(sequence, index)
            tokens = sequence.block_tokens(index, self.block_size)
            parent = chain[-1] if chain else None
            chain.append(self.pool.register(sequence.block_table[index], key, parent, sequence.salt, tokens))

    def release(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take its blocks back, the last one first, so that the end of a text leaves the cache before its beginning.

        Args:
            sequence: with or without blocks.
            forget: its content is not to be trusted: blocks that only it holds leave the cache.
        """
        for copy in self._copies:
            if copy.sequence is sequence:
                self.pool.release(copy.source)
        self._copies = [copy for copy in self._copies if copy.sequence is not sequence]
        for block in reversed(sequence.block_table):
            if forget and self.pool.references(block) == 1:
                self.pool.forget(block)
            self.pool.release(block)
        sequence.block_table = []
        sequence.chain = []
        sequence.computed = 0

    def check(self, sequences: Iterable[Sequence]) -> None:
        """See that the books are right when these sequences, and no others, have blocks.

        Raises:
            RuntimeError: they are not; what is wrong.
        """
        used = Counter(copy.source for copy in self._copies)
        for sequence in sequences:
            used.update(sequence.block_table)
            if sequence.block_table and len(sequence.block_table) < self.blocks_for(sequence.computed):
                raise RuntimeError(f"{sequence.request_id}: fewer blocks than computed tokens")
            for index, entry in enumerate(sequence.chain):
                if entry.tokens != sequence.block_tokens(index, self.block_size) or entry.salt != sequence.salt:
                    raise RuntimeError(f"{sequence.request_id}: block {index} stands for other tokens")
        self.pool.check(used)
