"""Which server tests run on: guards that keep them off other machines and keep a missing one from looking green."""

from __future__ import annotations

import pytest

from tests.support.postgres import NoServerError, choose_source, require_local


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///horde",
        "postgresql://localhost/horde",
        "postgresql://user:secret@127.0.0.1:5433/horde",
        "postgresql+psycopg2://127.8.9.1/horde",
        "postgresql://[::1]:5432/horde",
        "postgresql:///horde?host=/var/run/postgresql",
        "postgresql:///horde?host=localhost:5432",
    ],
)
def test_a_database_on_this_machine_is_taken(url: str) -> None:
    require_local(url, {})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://db.example.org/horde",
        "postgresql://10.0.0.5/horde",
        "postgresql://localhost.example.org/horde",
        "postgresql://127.0.0.1.example.org/horde",
        "postgresql://[2001:db8::1]/horde",
        "postgresql:///horde?host=db.example.org",
        "postgresql:///horde?host=/run/postgresql,db.example.org",
        "postgresql://localhost/horde?hostaddr=10.0.0.5",
        "postgresql:///horde?host=localhost:5432&host=db.example.org:5432",
    ],
)
def test_a_database_on_another_machine_is_refused(url: str) -> None:
    with pytest.raises(NoServerError, match="this machine's databases only"):
        require_local(url, {})


def test_a_silent_url_is_judged_by_the_host_that_libpq_would_take() -> None:
    with pytest.raises(NoServerError, match="not on db"):
        require_local("postgresql:///horde", {"PGHOST": "db.example.org"})
    require_local("postgresql://localhost/horde", {"PGHOST": "db.example.org"})


def test_a_pinned_source_that_is_missing_fails_instead_of_falling_back() -> None:
    with pytest.raises(NoServerError, match="url: HORDE_TEST_DATABASE_URL is not set"):
        choose_source({"HORDE_TEST_POSTGRES": "url"})


def test_a_misspelt_source_fails() -> None:
    with pytest.raises(NoServerError, match="expected one of auto, url, docker, embedded, system"):
        choose_source({"HORDE_TEST_POSTGRES": "embeded"})


def test_a_given_url_that_does_not_answer_fails_instead_of_falling_back() -> None:
    with pytest.raises(NoServerError, match="does not answer"):
        choose_source({"HORDE_TEST_DATABASE_URL": "postgresql://127.0.0.1:1/horde"})
