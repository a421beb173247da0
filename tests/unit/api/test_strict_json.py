"""What counts as a JSON body, for clients and for the results of workers."""

from __future__ import annotations

import json
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horde.api.strict_json import MAX_DEPTH, BodyError, read_repaired, read_strict


def refused(body: bytes) -> BodyError:
    with pytest.raises(BodyError) as caught:
        read_strict(body)
    return caught.value


@pytest.mark.parametrize(
    ("literal", "shown"),
    [("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ("1e999", "1e999"), ("-1e999", "-1e999")],
)
def test_a_number_that_json_does_not_have_is_refused_by_its_path(literal: str, shown: str) -> None:
    error = refused(f'{{"params": {{"list": [1, {literal}]}}}}'.encode())
    assert list(error.errors) == ["params.list.1"]
    assert error.errors["params.list.1"].startswith(shown)


@pytest.mark.parametrize("digits", [400, 5000])
def test_an_integer_of_hundreds_of_digits_is_refused_by_its_path(digits: int) -> None:
    error = refused(b'{"seed": 1' + b"0" * digits + b"}")
    assert list(error.errors) == ["seed"]
    assert len(error.errors["seed"]) < 100


def test_a_lone_surrogate_is_refused_by_its_path() -> None:
    assert list(refused(rb'{"prompt": "a\ud800b"}').errors) == ["prompt"]
    assert list(refused(b'{"prompt": "a\xed\xa0\x80b"}').errors) == ["prompt"]


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert read_strict(rb'{"prompt": "\ud83d\ude42"}') == {"prompt": "\U0001f642"}


def test_a_nul_is_refused_by_its_path_wherever_it_stands() -> None:
    error = refused(rb'{"a": ["x", {"b": "\u0000"}]}')
    assert (list(error.errors), error.nul) == (["a.1.b"], True)
    assert refused(rb'{"a\u0000": 1}').nul


def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    assert read_strict(rb'{"a": "\\u0000"}') == {"a": "\\u0000"}


def test_the_last_value_of_a_repeated_key_counts() -> None:
    assert read_strict(b'{"a": 1, "a": 2}') == {"a": 2}


def test_the_deepest_allowed_body_is_read_and_one_level_more_is_refused() -> None:
    assert read_strict(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert "nested" in refused(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1)).message
    assert "nested" in refused(b'{"a":' * 100_000).message


def test_brackets_within_text_are_not_depth() -> None:
    prompt = '[{\\"' * 500
    assert read_strict(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"{'a': 1}", b'{"a": 1,}', b"\xff\xfe{}", b'{"a": "x\x00"}', b"\xef\xbb\xbf{}"]
)
def test_what_is_not_json_is_refused_without_a_path(body: bytes) -> None:
    error = refused(body)
    assert error.errors == {}
    assert error.message


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'{"generation": "a\u0000b"}', "a\ufffdb"),
        (rb'{"generation": "a\ud800b"}', "a\ufffdb"),
        (b'{"generation": "a\x00b\nc"}', "a\ufffdb\nc"),
        (b'{"generation": "a\xffb"}', "a\ufffdb"),
        (rb'{"generation": "\ud83d\ude42\u0000"}', "\U0001f642\ufffd"),
        (rb'{"generation": "a\\u0000b"}', "a\\u0000b"),
    ],
)
def test_text_of_a_worker_that_nobody_can_store_is_repaired(body: bytes, text: str) -> None:
    assert read_repaired(body) == {"generation": text}


def test_half_a_character_in_raw_bytes_of_a_worker_is_repaired() -> None:
    assert set(read_repaired(b'{"generation": "\xed\xa0\x80"}')["generation"]) == {"\ufffd"}


def test_keys_and_metadata_of_a_worker_are_repaired_too() -> None:
    assert read_repaired(rb'{"m": [{"ref\u0000": "\u0000"}]}') == {"m": [{"ref\ufffd": "\ufffd"}]}


def test_a_worker_may_not_send_numbers_that_json_does_not_have() -> None:
    with pytest.raises(BodyError) as caught:
        read_repaired(rb'{"generation": "\u0000", "seed": NaN}')
    assert list(caught.value.errors) == ["seed"]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_whatever_is_read_can_be_written_and_stored(value: object) -> None:
    body = json.dumps(value).encode()
    for read in (read_strict, read_repaired):
        try:
            parsed = read(body)
        except BodyError:
            assert read is read_strict
            assert rb"\u0000" in body
            continue
        assert b"\\u0000" not in orjson.dumps(parsed).replace(rb"\\", b"")


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(body: bytes) -> None:
    for read in (read_strict, read_repaired):
        with suppress(BodyError):
            read(body)
