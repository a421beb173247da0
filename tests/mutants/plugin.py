"""A pytest plugin (`-p tests.mutants.plugin`): takes one guard out of the code or the database, and reports the verdict.

`HORDE_MUTANT` is the guard's text, `HORDE_MUTANT_TEMPLATE` a migrated database to copy, `HORDE_MUTANT_REPORT` the file
for the verdict. Loaded before any of the broker is imported, so that every import sees the changed source.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import Mutant

# SQLSTATEs of SQL that the mutant broke: every test would fail, which proves nothing.
BROKEN_SQL = ("42", "0A")


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, mutant: Mutant, fullname: str, path: str) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> types.CodeType:
        # Never from the byte code cache, nor into it.
        source = self._mutant.apply(Path(self.path).read_text())
        code = compile(source, self.path, "exec", dont_inherit=True)
        assert isinstance(code, types.CodeType)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _Loader(self.mutant, fullname, spec.origin)
        return spec


class Witness:
    """Sees what the one test comes to, and writes it down at the end."""

    def __init__(self, mutant: Mutant | None, report: Path) -> None:
        self.mutant = mutant
        self.report = report
        self.failures: dict[str, str] = {}
        self.broken = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            error = call.excinfo.value if call.excinfo else None
            self.failures.setdefault(item.nodeid, _in_a_line(error))
            if _is_broken_sql(error):
                self.broken = _in_a_line(error)
            elif report.when == "setup":
                self.broken = f"failed before the test began: {_in_a_line(error)}"
        return report

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        module = self.mutant.module if self.mutant else None
        if module and not isinstance(getattr(sys.modules.get(module), "__loader__", None), _Loader):
            self.broken = f"the test never imports {module}"
        verdict = {"failures": self.failures, "broken": self.broken, "ran": session.testscollected}
        self.report.write_text(json.dumps(verdict))


def _in_a_line(error: BaseException | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def _is_broken_sql(error: BaseException | None) -> bool:
    while error is not None:
        if (getattr(getattr(error, "orig", error), "pgcode", None) or "").startswith(BROKEN_SQL):
            return True
        error = error.__cause__ or error.__context__
    return False


def _copy_template(name: str, sql: str | None) -> None:
    """Make the tests' template from the one migrated for all mutants, changed by `sql`."""
    from tests.support.postgres import Server

    def prepare(server: Server) -> None:
        server._execute(f'CREATE DATABASE "{server._template}" TEMPLATE "{name}"')
        engine = sa.create_engine(server.url_of(server._template))
        with engine.begin() as connection:
            # As fresh as if it had just been migrated.
            connection.exec_driver_sql("UPDATE heartbeat SET beat_at = horde_now()")
            if sql:
                connection.exec_driver_sql(sql.replace("%", "%%"))
        engine.dispose()

    setattr(Server, "prepare", prepare)  # noqa: B010 a plain assignment would have to be typed as a method


def _chosen() -> Mutant | None:
    guard = os.environ.get("HORDE_MUTANT")
    return next(mutant for mutant in MUTANTS if mutant.guard == guard) if guard else None


_MUTANT = _chosen()
if _MUTANT is not None and _MUTANT.module is not None:
    assert _MUTANT.module not in sys.modules, "imported before it could be changed"
    sys.meta_path.insert(0, _Finder(_MUTANT))


def pytest_configure(config: pytest.Config) -> None:
    _copy_template(os.environ["HORDE_MUTANT_TEMPLATE"], _MUTANT.sql if _MUTANT else None)
    config.pluginmanager.register(Witness(_MUTANT, Path(os.environ["HORDE_MUTANT_REPORT"])))
