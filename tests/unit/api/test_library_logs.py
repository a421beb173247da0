"""Libraries log in the broker's format, and nothing of a statement or a request gets out that way."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import sqlalchemy.exc
import structlog

from horde.api.library_logs import LibraryLogs
from horde.app import configure_logging
from horde.settings import Settings

SECRET = "canary-statement"
FAILED = sqlalchemy.exc.DataError(f"INSERT {SECRET}", {"prompt": SECRET}, Exception(SECRET))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    configure_logging(Settings())


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    written = capsys.readouterr()
    assert SECRET not in written.out + written.err
    return [json.loads(line) for line in written.err.splitlines()]


def test_a_failure_of_a_scheduled_job_is_one_line_without_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    try:
        raise FAILED
    except sqlalchemy.exc.DataError:
        logging.getLogger("apscheduler.executors.default").exception('Job "%s" raised an exception', "fold")
    (line,) = logged(capsys)
    assert line["event"] == 'Job "fold" raised an exception'
    assert (line["level"], line["logger"]) == ("error", "apscheduler.executors.default")
    assert "sqlalchemy.exc.DataError" in line["error"]
    assert "test_a_failure_of_a_scheduled_job" in line["lines"]


def test_an_exception_in_the_text_of_a_record_is_told_by_its_type(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Settings(log_format="json"))
    logging.getLogger("somebody").warning("failed: %s", FAILED)
    logging.getLogger("somebody").error(FAILED)
    first, second = logged(capsys)
    assert first["event"].startswith("failed: sqlalchemy.exc.DataError")
    assert second["event"].startswith("sqlalchemy.exc.DataError")


def test_what_is_below_a_warning_is_not_written_and_a_bad_record_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(Settings(log_format="json"))
    logging.getLogger("somebody").info("nothing")
    LibraryLogs().emit(logging.LogRecord("somebody", logging.WARNING, "", 0, "%d of two", ("x",), None))
    (line,) = logged(capsys)
    assert line["event"] == "%d of two"


def test_there_is_one_handler_however_many_applications_there_are() -> None:
    configure_logging(Settings())
    assert sum(isinstance(handler, LibraryLogs) for handler in logging.getLogger().handlers) == 1


def test_a_log_that_cannot_be_written_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    closed = io.StringIO()
    closed.close()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(closed))
    logging.getLogger("somebody").warning(SECRET)
    assert logged(capsys) == []
