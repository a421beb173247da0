"""Which blocks are given out, and when what they held is forgotten."""

from __future__ import annotations

import pytest

from worker.engine.scheduling.block_pool import BlockPool, CachedBlock, OutOfBlocksError


def cached(pool: BlockPool, block: int, key: bytes, parent: CachedBlock | None = None) -> CachedBlock:
    return pool.register(block, key, parent, "", tuple(key))


def found(pool: BlockPool, key: bytes, parent: CachedBlock | None = None, salt: str = "") -> int | None:
    hit = pool.lookup(key, parent, salt, tuple(key))
    return None if hit is None else hit[1]


def test_blocks_are_given_out_from_the_first_and_taken_again_when_they_are_back():
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release(1)
    assert pool.allocate(2) == [1, 3]
    pool.check({0: 1, 1: 1, 2: 1, 3: 1})


def test_all_wanted_blocks_are_given_or_none():
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.free == 2
    pool.check({})


def test_a_shared_block_is_free_when_its_last_user_has_gone():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.share(0)
    pool.release(0)
    assert (pool.free, pool.references(0)) == (0, 1)
    pool.release(0)
    assert pool.free == 1


def test_a_block_cannot_be_freed_twice():
    pool = BlockPool(1)
    pool.allocate(1)
    pool.release(0)
    with pytest.raises(ValueError, match="block 0 is free already"):
        pool.release(0)
    pool.check({})


def test_a_block_without_content_cannot_be_shared_or_registered():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="nothing to share"):
        pool.share(0)
    with pytest.raises(ValueError, match="cannot be registered"):
        cached(pool, 0, b"a")


def test_a_cached_block_is_found_until_its_room_is_needed():
    pool = BlockPool(2)
    pool.allocate(2)
    cached(pool, 0, b"a")
    pool.release(0)
    pool.release(1)
    assert (pool.free, pool.cached) == (2, 1)
    assert pool.allocate(1) == [1]
    assert found(pool, b"a") == 0
    assert pool.allocate(1) == [0]
    assert found(pool, b"a") is None
    pool.check({0: 1, 1: 1})


def test_the_least_recently_used_cached_block_goes_first():
    pool = BlockPool(3)
    pool.allocate(3)
    for block, key in enumerate((b"a", b"b", b"c")):
        cached(pool, block, key)
        pool.release(block)
    pool.share(0)
    pool.release(0)
    assert pool.allocate(2) == [1, 2]
    assert found(pool, b"a") == 0


def test_a_block_in_use_is_found_too_and_is_not_given_out():
    pool = BlockPool(2)
    pool.allocate(1)
    cached(pool, 0, b"a")
    assert found(pool, b"a") == 0
    assert pool.cached == 0
    assert pool.allocate(1) == [1]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_the_first_block_of_a_content_stays_the_one_that_is_found():
    pool = BlockPool(2)
    pool.allocate(2)
    first = cached(pool, 0, b"a")
    assert cached(pool, 1, b"a") is first
    assert found(pool, b"a") == 0
    pool.check({0: 1, 1: 1})


def test_equal_keys_of_other_content_are_no_hit():
    pool = BlockPool(4)
    pool.allocate(4)
    first = pool.register(0, b"same", None, "", (1, 2))
    assert pool.lookup(b"same", None, "", (1, 2)) == (first, 0)
    assert pool.lookup(b"same", None, "", (1, 3)) is None
    assert pool.lookup(b"same", None, "salt", (1, 2)) is None
    other = pool.register(1, b"other", None, "", (9, 9))
    assert pool.lookup(b"same", other, "", (1, 2)) is None


def test_the_same_tokens_after_another_beginning_are_no_hit_even_when_the_keys_collide():
    pool = BlockPool(3)
    pool.allocate(3)
    a = pool.register(0, b"a", None, "", (1,))
    b = pool.register(1, b"b", None, "", (2,))
    pool.register(2, b"collides", a, "", (7,))
    assert pool.lookup(b"collides", b, "", (7,)) is None


def test_what_collides_with_an_entry_takes_its_place():
    pool = BlockPool(2)
    pool.allocate(2)
    old = pool.register(0, b"key", None, "", (1,))
    new = pool.register(1, b"key", None, "", (2,))
    assert old.block is None
    assert pool.lookup(b"key", None, "", (1,)) is None
    assert pool.lookup(b"key", None, "", (2,)) == (new, 1)
    pool.check({0: 1, 1: 1})


def test_a_block_stands_for_one_content_only():
    pool = BlockPool(1)
    pool.allocate(1)
    old = cached(pool, 0, b"a")
    cached(pool, 0, b"b")
    assert (old.block, found(pool, b"a"), found(pool, b"b")) == (None, None, 0)
    pool.check({0: 1})


def test_a_beginning_that_is_gone_takes_what_followed_it_out_of_reach():
    pool = BlockPool(2)
    pool.allocate(2)
    head = cached(pool, 0, b"a")
    tail = cached(pool, 1, b"b", head)
    pool.forget(0)
    assert found(pool, b"a") is None
    again = cached(pool, 0, b"a")
    assert found(pool, b"b", again) is None
    assert tail.parent is head
    assert cached(pool, 1, b"b", again) is not tail
    assert found(pool, b"b", again) == 1
    pool.check({0: 1, 1: 1})


def test_a_forgotten_block_is_no_longer_found_and_stays_with_its_users():
    pool = BlockPool(2)
    pool.allocate(2)
    cached(pool, 0, b"a")
    cached(pool, 1, b"b")
    pool.release(1)
    pool.forget(0)
    pool.forget(1)
    pool.forget(1)
    assert (found(pool, b"a"), found(pool, b"b")) == (None, None)
    assert (pool.references(0), pool.free, pool.cached) == (1, 1, 0)
    pool.check({0: 1})


def test_books_that_do_not_agree_are_noticed():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="block 0: 1 references, 0 users"):
        pool.check({})
    pool._empty.append(1)
    with pytest.raises(RuntimeError, match="free twice"):
        pool.check({0: 1})


def test_a_pool_has_at_least_one_block():
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
