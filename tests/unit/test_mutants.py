"""The mutants themselves: each still fits the code, and one that proves nothing is told from one that is caught."""

from __future__ import annotations

import psycopg2
import psycopg2.errorcodes
import pytest
import sqlalchemy as sa

from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import ROOT, Mismatch, Mutant

SOURCE = '''FIRST = """
UPDATE a WHERE id = 1 AND state = 'processing'
"""

SECOND = """
UPDATE b WHERE id = 2 AND state = 'processing'
"""


def first() -> bool:
    """One.

    More of it.
    """
    return a() and b()


def second() -> bool:
    return a() and b()
'''


def mutant(**fields: str) -> Mutant:
    return Mutant("a guard", "a test", module="horde.lifecycle.settle", **fields)


def test_a_guard_is_taken_out_of_its_block_only() -> None:
    changed = mutant(within="SECOND = ", old=" AND state = 'processing'").apply(SOURCE)
    assert "id = 1 AND state" in changed
    assert "id = 2\n" in changed


def test_a_function_is_a_block_with_its_empty_lines() -> None:
    changed = mutant(within="def first(", old="a() and ", new="").apply(SOURCE)
    assert changed.count("a() and ") == 1
    assert changed.index("a() and ") > changed.index("def second(")


@pytest.mark.parametrize(
    ("within", "old"),
    [
        pytest.param("", " AND state = 'processing'", id="it is there twice"),
        pytest.param("FIRST = ", "id = 2", id="it is in another block"),
        pytest.param("THIRD = ", "id = 2", id="the block is gone"),
        pytest.param("", "", id="nothing is named"),
    ],
)
def test_a_guard_that_is_not_there_exactly_once_is_an_error(within: str, old: str) -> None:
    with pytest.raises(Mismatch):
        mutant(within=within, old=old).apply(SOURCE)


@pytest.mark.parametrize("found", MUTANTS, ids=[found.guard for found in MUTANTS])
def test_every_mutant_fits_the_code_and_names_a_test(found: Mutant) -> None:
    found.check()
    path, _, name = found.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_every_guard_has_a_name_of_its_own() -> None:
    assert len({found.guard for found in MUTANTS}) == len(MUTANTS)


def test_sql_that_a_mutant_broke_is_told_from_a_guard_that_spoke() -> None:
    from tests.mutants.plugin import _is_broken_sql

    def raised(code: str) -> sa.exc.DBAPIError:
        error = type("Error", (psycopg2.Error,), {"pgcode": code})()
        return sa.exc.DBAPIError("UPDATE", {}, error)

    above = RuntimeError("a broker that has wrapped it")
    above.__cause__ = raised(psycopg2.errorcodes.UNDEFINED_COLUMN)
    assert _is_broken_sql(above)
    assert _is_broken_sql(raised(psycopg2.errorcodes.SYNTAX_ERROR))
    assert not _is_broken_sql(raised(psycopg2.errorcodes.CHECK_VIOLATION))
    assert not _is_broken_sql(AssertionError("1 == 2"))
