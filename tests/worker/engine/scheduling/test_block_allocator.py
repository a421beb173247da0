"""Prefix hits, growth, copy-on-write and forks, by exact block ids."""

from __future__ import annotations

import pytest

from tests.worker.engine.scheduling.played_model import make_sequence
from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.sequence import Sequence


def computed(allocator: BlockAllocator, sequence: Sequence) -> Sequence:
    """Admitted, with everything computed."""
    assert allocator.admit(sequence)
    sequence.computed = sequence.length
    allocator.register(sequence)
    return sequence


def fork_of(allocator: BlockAllocator, parent: Sequence) -> Sequence:
    child = make_sequence("fork", parent.token_ids)
    allocator.fork(parent, child)
    return child


def append(allocator: BlockAllocator, sequence: Sequence, token: int) -> None:
    """One more token, with its place."""
    sequence.token_ids.append(token)
    assert allocator.grow(sequence, sequence.length)


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_at_least_one_token_of_a_cached_text_is_left_to_compute(length, hit):
    allocator = BlockAllocator(8, 16)
    allocator.release(computed(allocator, make_sequence("a", range(length))))
    again = make_sequence("b", range(length))
    assert allocator.admit(again)
    assert (again.computed, again.cached) == (hit, hit)
    assert (allocator.prefix_queries, allocator.prefix_hits) == (2 * length, hit)


def test_the_last_block_of_a_text_cached_as_a_whole_is_computed_in_a_block_of_its_own():
    allocator = BlockAllocator(8, 2)
    first = computed(allocator, make_sequence("a", [1, 2, 3, 4]))
    second = make_sequence("b", [1, 2, 3, 4])
    assert allocator.admit(second)
    assert (first.block_table, second.block_table) == ([0, 1], [0, 2])
    second.computed = 4
    allocator.register(second)
    assert allocator.pool.lookup(second.block_keys[1], second.chain[0], "", (3, 4)) == (first.chain[1], 1)
    allocator.check([first, second])


def test_hits_stop_at_the_first_block_that_is_gone():
    allocator = BlockAllocator(8, 1)
    allocator.release(computed(allocator, make_sequence("a", b"ABCD")))
    allocator.pool.forget(0)
    again = make_sequence("b", b"ABCD")
    assert allocator.admit(again)
    assert again.computed == 0


def test_blocks_are_never_reused_under_another_beginning():
    allocator = BlockAllocator(8, 1)
    computed(allocator, make_sequence("a", b"ABCD"))
    other = make_sequence("b", b"XBCD")
    assert allocator.admit(other)
    assert other.computed == 0


def test_the_beginning_of_a_text_outlives_its_end():
    allocator = BlockAllocator(4, 1)
    allocator.release(computed(allocator, make_sequence("a", b"ABCD")))
    assert allocator.pool.allocate(2) == [3, 2]
    again = make_sequence("b", b"ABX")
    allocator.pool.release(3)
    assert allocator.admit(again)
    assert again.block_table == [0, 1, 3]


def test_salts_do_not_share():
    allocator = BlockAllocator(8, 1)
    computed(allocator, make_sequence("a", b"ABC", salt="mine"))
    for salt, hit in (("yours", 0), ("", 0), ("mine", 2)):
        other = make_sequence("b", b"ABC", salt=salt)
        assert allocator.admit(other)
        assert other.computed == hit
        allocator.release(other, forget=True)


def test_without_prefix_caching_nothing_is_found():
    allocator = BlockAllocator(4, 1, prefix_caching=False)
    allocator.release(computed(allocator, make_sequence("a", b"ABC")))
    again = make_sequence("b", b"ABC")
    assert allocator.admit(again)
    assert (again.computed, again.cached, allocator.pool.cached) == (0, 0, 0)


def test_admission_keeps_its_reserve_and_changes_nothing_when_refused():
    allocator = BlockAllocator(4, 2)
    sequence = make_sequence("a", range(5))
    assert not allocator.admit(sequence, reserve=2)
    assert (sequence.block_table, allocator.pool.free, allocator.prefix_queries) == ([], 4, 0)
    assert allocator.admit(sequence, reserve=1)


def test_a_hit_that_nobody_uses_counts_as_a_block_taken():
    allocator = BlockAllocator(4, 1)
    allocator.release(computed(allocator, make_sequence("a", b"AB")))
    again = make_sequence("b", b"ABCD")
    assert not allocator.admit(again, reserve=1)
    assert allocator.admit(again)
    assert again.block_table == [0, 1, 2, 3]
    allocator.check([again])


def test_a_sequence_grows_by_a_block_when_its_last_one_is_full():
    allocator = BlockAllocator(4, 2)
    sequence = computed(allocator, make_sequence("a", [1, 2, 3]))
    append(allocator, sequence, 4)
    assert sequence.block_table == [0, 1]
    sequence.computed = 4
    append(allocator, sequence, 5)
    assert sequence.block_table == [0, 1, 2]
    assert allocator.copies == []


def test_growth_without_a_free_block_changes_nothing():
    allocator = BlockAllocator(1, 2)
    sequence = computed(allocator, make_sequence("a", [1, 2]))
    sequence.token_ids.append(3)
    assert not allocator.grow(sequence, 3)
    assert sequence.block_table == [0]
    allocator.check([sequence])


def test_whoever_writes_a_shared_block_first_gets_a_copy_and_the_last_keeps_it():
    allocator = BlockAllocator(8, 4)
    parent = computed(allocator, make_sequence("a", [1, 2, 3, 4, 5]))
    one, two = fork_of(allocator, parent), fork_of(allocator, parent)
    assert [allocator.pool.references(block) for block in (0, 1)] == [3, 3]
    for token, sequence in enumerate((parent, one, two)):
        append(allocator, sequence, token)
    assert (parent.block_table, one.block_table, two.block_table) == ([0, 2], [0, 3], [0, 1])
    assert allocator.copies == [(1, 2), (1, 3)]
    allocator.check([parent, one, two])
    allocator.copied()
    assert allocator.copies == []
    assert allocator.pool.references(1) == 1
    allocator.check([parent, one, two])


def test_forks_of_full_blocks_copy_nothing():
    allocator = BlockAllocator(8, 2)
    parent = computed(allocator, make_sequence("a", [1, 2]))
    child = fork_of(allocator, parent)
    append(allocator, parent, 3)
    append(allocator, child, 4)
    assert (parent.block_table, child.block_table, allocator.copies) == ([0, 1], [0, 2], [])


def test_the_source_of_a_copy_is_kept_until_the_copy_is_made():
    allocator = BlockAllocator(4, 4)
    parent = computed(allocator, make_sequence("a", [1]))
    child = fork_of(allocator, parent)
    append(allocator, parent, 2)
    allocator.release(child)
    assert allocator.pool.references(0) == 1
    assert allocator.copies == [(0, 1)]
    allocator.copied()
    assert allocator.pool.references(0) == 0
    allocator.check([parent])


def test_a_released_sequence_is_owed_no_copy():
    allocator = BlockAllocator(4, 4)
    parent = computed(allocator, make_sequence("a", [1]))
    child = fork_of(allocator, parent)
    append(allocator, parent, 2)
    allocator.release(parent)
    assert allocator.copies == []
    append(allocator, child, 3)
    assert (child.block_table, allocator.copies) == ([0], [])
    allocator.check([child])


def test_a_block_that_is_written_anew_cannot_be_found_meanwhile():
    allocator = BlockAllocator(4, 2)
    sequence = computed(allocator, make_sequence("a", [1, 2]))
    sequence.computed = 1
    assert allocator.grow(sequence, 2)
    other = make_sequence("b", [1, 2, 3])
    assert allocator.admit(other)
    assert other.computed == 0


def test_distrusted_blocks_leave_the_cache_unless_somebody_else_uses_them():
    allocator = BlockAllocator(8, 1)
    first = computed(allocator, make_sequence("a", b"ABC"))
    second = computed(allocator, make_sequence("b", b"ABXY"))
    allocator.release(second, forget=True)
    assert allocator.pool.cached == 0
    again = make_sequence("c", b"ABXY")
    assert allocator.admit(again)
    assert again.computed == 2
    allocator.check([first, again])


def test_own_blocks_are_registered_when_an_equal_one_that_stood_for_them_is_gone():
    allocator = BlockAllocator(8, 1)
    one, two = make_sequence("a", b"AB"), make_sequence("b", b"AB")
    assert allocator.admit(one)
    assert allocator.admit(two)
    for sequence in (one, two):
        sequence.computed = 2
        allocator.register(sequence)
    assert [entry.block for entry in two.chain] == [0, 1]
    allocator.release(one, forget=True)
    append(allocator, two, 67)
    two.computed = 3
    allocator.register(two)
    assert [entry.block for entry in two.chain] == two.block_table == [2, 3, 0]
    again = make_sequence("c", b"ABCD")
    assert allocator.admit(again)
    assert again.block_table[:3] == [2, 3, 0]
    allocator.check([two, again])


def test_a_block_has_room_for_at_least_one_token():
    with pytest.raises(ValueError, match="at least one token"):
        BlockAllocator(4, 0)
