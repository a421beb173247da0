"""Keys tell salts, beginnings and tokens apart, and no outsider can foresee them."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from tests.worker.engine.scheduling.played_model import make_sequence
from worker.engine.scheduling.prefix_keys import PrefixKeys, keyed_digest


def keys_of(tokens, salt="", block_size=2, digest=None):
    keys = PrefixKeys(block_size, digest or keyed_digest(b"secret"))
    sequence = make_sequence("a", tokens, salt=salt)
    return [keys.key(sequence, index) for index in range(len(tokens) // block_size)]


def test_equal_beginnings_have_equal_keys_up_to_where_they_part():
    one, other = keys_of([1, 2, 3, 4, 5, 6]), keys_of([1, 2, 3, 4, 5, 7])
    assert one[:2] == other[:2]
    assert one[2] != other[2]


def test_the_same_tokens_have_other_keys_after_another_beginning_or_salt():
    keys = [keys_of([1, 2, 8, 9])[1], keys_of([1, 3, 8, 9])[1], keys_of([1, 2, 8, 9], "salt")[1], keys_of([8, 9])[0]]
    assert len(set(keys)) == len(keys)


@given(
    st.lists(st.tuples(st.text(max_size=8), st.lists(st.integers(0, 3), max_size=6).map(tuple)), min_size=2, max_size=6)
)
@example([("", (0, 0)), ("\0" * 16, ())])
@example([("a", (0, 0, 0, 0)), ("a" + "\0" * 16, (0, 0))])
def test_no_salt_can_be_written_so_that_it_reads_as_another_text(texts):
    """The hashed bytes themselves differ, so this does not rest on the strength of the hash."""
    seen: dict[bytes, object] = {}
    for salt, tokens in texts:
        keys = PrefixKeys(2, lambda data: data)
        for end in range(0, len(tokens) + 1, 2):
            key = keys.start(salt)
            for start in range(0, end, 2):
                key = keys.after(key, tokens[start : start + 2])
            assert seen.setdefault(key, (salt, tokens[:end])) == (salt, tokens[:end])


def test_a_salt_may_be_any_string():
    salts = ["", "\ud800", "\x00", "ä", "block", "salt" * 1000]
    keys = [keys_of([1, 2], salt)[0] for salt in salts]
    assert all(one != other for one, other in itertools.combinations(keys, 2))


def test_two_processes_make_different_keys():
    assert keys_of([1, 2], digest=keyed_digest()) != keys_of([1, 2], digest=keyed_digest())


def test_each_key_is_made_once():
    hashed = []

    def digest(data: bytes) -> bytes:
        hashed.append(data)
        return bytes([len(hashed)])

    keys = PrefixKeys(2, digest)
    sequence = make_sequence("a", range(8))
    assert keys.key(sequence, 1) == bytes([3])
    assert len(hashed) == 3
    assert [keys.key(sequence, index) for index in range(4)] == [bytes([number]) for number in (2, 3, 4, 5)]
    assert len(hashed) == 5
