"""Tests that need more than pip: left out with a reason, or failing where the machine is meant to have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import needs

REPOSITORY = Path(__file__).parents[2]

SUITE = """
import pytest

@pytest.mark.needs("compiler")
def test_with_a_compiler():
    pass

@pytest.mark.needs("compiler")
def test_with_a_compiler_again():
    pass

def test_without():
    pass
"""


def run_suite(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The suite above under this project's conftest, on a machine with an empty PATH and so without a compiler."""
    (directory / "test_suite.py").write_text(SUITE, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", directory],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": str(directory), "HORDE_TEST_REQUIRE": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_what_is_missing_is_left_out_and_listed_at_the_end(tmp_path: Path) -> None:
    done = run_suite(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    assert "left out" in done.stdout
    assert "2 tests without compiler: no C++ compiler" in done.stdout


def test_what_is_required_and_missing_fails(tmp_path: Path) -> None:
    done = run_suite(tmp_path, HORDE_TEST_REQUIRE="compiler")
    assert done.returncode == 1
    assert "HORDE_TEST_REQUIRE names compiler, and it is missing" in done.stdout


def test_a_misspelt_requirement_fails() -> None:
    assert needs.required({"HORDE_TEST_REQUIRE": "model, browser"}) == {"model", "browser"}
    assert needs.required({}) == frozenset()
    with pytest.raises(ValueError, match="unknown brwoser"):
        needs.required({"HORDE_TEST_REQUIRE": "brwoser"})
