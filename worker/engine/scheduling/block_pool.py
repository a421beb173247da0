"""The blocks of the cache: who is free, who is used how often, and which hold computed tokens worth keeping.

A block is a number; its keys and values lie in the attention backend's pools. A registered block stays findable after
its last user has gone, until its room is needed: blocks that hold nothing are given out first, then the least recently
used of those.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free; nothing was given."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """What one full block holds. Two are the same only if they are the same object.

    The parent stands for everything before the block, so an object stands for one chain of tokens under one salt.

    Attributes:
        key: where the pool finds it.
        parent: the block before it; None for the first of a text, and once this one is out of the cache.
        salt: of the whole chain.
        tokens: of this block.
        block: its id; None once it is out of the cache.
    """

    key: bytes
    parent: CachedBlock | None = field(repr=False)
    salt: str
    tokens: tuple[int, ...]
    block: int | None

    def holds(self, parent: CachedBlock | None, salt: str, tokens: tuple[int, ...]) -> bool:
        """Whether it is this very content; a key alone does not tell, because keys can collide."""
        return self.parent is parent and self.tokens == tokens and self.salt == salt


class BlockPool:
    """Blocks 0 to `total` - 1, all of them free at first.

    Raises:
        ValueError: fewer than one block.
    """

    def __init__(self, blocks: int) -> None:
        if blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {blocks}")
        self.total = blocks
        self._references = [0] * blocks
        self._empty = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached and unused, least recently used first
        self._cached: list[CachedBlock | None] = [None] * blocks
        self._by_key: dict[bytes, CachedBlock] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses, `cached` ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that can still be found."""
        return len(self._idle)

    def references(self, block: int) -> int:
        """How often a block is in use."""
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Blocks for one user each, all or none.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.free} free")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._drop_entry(block)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more user for a block that is used or cached.

        Raises:
            ValueError: it is neither.
        """
        if self._references[block] == 0:
            if block not in self._idle:
                raise ValueError(f"block {block} holds nothing to share")
            del self._idle[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One user less. Without any it is free; registered, it is the most recently used of the cached ones.

        Raises:
            ValueError: it has no user.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free already")
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._cached[block] is not None:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def lookup(
        self, key: bytes, parent: CachedBlock | None, salt: str, tokens: tuple[int, ...]
    ) -> tuple[CachedBlock, int] | None:
        """The cached block of exactly this content, and its id."""
        known = self._by_key.get(key)
        if known is None or known.block is None or not known.holds(parent, salt, tokens):
            return None
        return known, known.block

    def register(
        self, block: int, key: bytes, parent: CachedBlock | None, salt: str, tokens: tuple[int, ...]
    ) -> CachedBlock:
        """Make a used block findable; if another holds the same already, that one stays and is given back.

        An entry of other content under the same key makes way: either the keys collide, or its parent is gone and it
        could not be found any more.

        Raises:
            ValueError: nobody uses the block.
        """
        if self._references[block] == 0:
            raise ValueError(f"block {block} is free and cannot be registered")
        known = self._by_key.get(key)
        if known is not None and known.block is not None:
            if known.holds(parent, salt, tokens):
                return known
            self.forget(known.block)
        self.forget(block)
        entry = CachedBlock(key, parent, salt, tokens, block)
        self._cached[block] = entry
        self._by_key[key] = entry
        return entry

    def forget(self, block: int) -> None:
        """Take a block out of the cache, if it is there; its users keep it."""
        if self._cached[block] is None:
            return
        self._drop_entry(block)
        if self._references[block] == 0:
            del self._idle[block]
            self._empty.append(block)

    def _drop_entry(self, block: int) -> None:
        entry = self._cached[block]
        assert entry is not None
        self._cached[block] = None
        del self._by_key[entry.key]
        entry.block = None
        # Those that follow it know it as an object only; cut here, chains of dropped ones do not pile up.
        entry.parent = None

    def check(self, used: Mapping[int, int]) -> None:
        """See that the books agree with each other and with who uses what.

        Args:
            used: how often each block is in use; blocks that are not in it are not.

        Raises:
            RuntimeError: they do not; what is wrong.
        """
        for block, count in enumerate(self._references):
            _require(count == used.get(block, 0), f"block {block}: {count} references, {used.get(block, 0)} users")
        idle, empty = set(self._idle), set(self._empty)
        _require(len(empty) == len(self._empty), "a block is free twice")
        _require(not idle & empty, "a block is both cached and empty")
        unused = {block for block in range(self.total) if not self._references[block]}
        _require(idle | empty == unused, "free blocks and unused blocks differ")
        registered = {block: entry for block, entry in enumerate(self._cached) if entry is not None}
        _require(idle == unused & registered.keys(), "cached blocks and registered unused blocks differ")
        _require(len(registered) == len(self._by_key), "keys and registered blocks differ in number")
        for block, entry in registered.items():
            _require(entry.block == block and self._by_key.get(entry.key) is entry, f"block {block}: wrong entry")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
