"""The border of `horde/lifecycle/`: nothing else in the broker or the worker writes a state or appends an event.

Nor does anything but the session scope end a transaction, or the lifecycle import anything but the database.

Held by reading the syntax trees: every SQL string, every use of a mapped class that could write, every assignment to a
state column. A planted violation of each sort shows that the check can fail.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import horde
import worker
from horde.db.tables import Base

ROOT = Path(horde.__file__).parent.parent
LIFECYCLE = Path("horde/lifecycle")
DB = Path("horde/db")

TABLES = ("requests", "slots", "jobs", "queue", "progress")
MAPPED = {"Request", "Slot", "Job", "QueueRow", "Progress", "Event", "UnfoldedEvent"}
REQUEST_STATE = {
    *("waiting", "processing", "stored", "faulted", "restarted", "last_settled_faulted", "charged", "tried_workers"),
    *(
        "outcome",
        "outcome_reason",
        "error_code",
        "outcome_at",
        "done_at",
        "expires_at",
        "attached_until",
        "attached_by",
    ),
    "needs_progress",
}
JOB_STATE = {
    *("state", "lease_begun", "lease_end", "started_at", "settled_at", "stored_by_cancel", "acknowledged"),
    *("settle_key", "settle_answer"),
}
STATE_COLUMNS = REQUEST_STATE | JOB_STATE | {"releases", "prefix_token_ids", "prefix_text", "prefix_logprobs"}
# They set names made at run time of what is no row: the nodes of a template's syntax tree.
SETS_NODES = {Path("horde/registry/template_sandbox.py")}
# A value put in at run time; a table's name must never be one.
HOLE = "\N{WHITE SQUARE}"


def _writes(tables: str) -> str:
    name = rf'(?:ONLY\s+)?(?:"?public"?\s*\.\s*)?"?(?:{tables})"?'
    return (
        rf"INSERT\s+INTO\s+{name}(?!\w)|MERGE\s+INTO\s+{name}(?!\w)|DELETE\s+FROM\s+{name}(?!\w)"
        rf"|UPDATE\s+{name}\s+(?:AS\s+)?(?:\w+\s+)?SET\b|TRUNCATE\s+(?:TABLE\s+)?{name}(?!\w)|COPY\s+{name}\s*(?:\([^)]*\)\s*)?FROM\b"
    )


WRITES_STATE = re.compile(_writes("|".join(TABLES)), re.IGNORECASE)
WRITES_EVENTS = re.compile(
    rf"{_writes('events')}|INSERT\s+INTO\s+events_unfolded\b|UPDATE\s+events_unfolded\b", re.IGNORECASE
)
WRITES_UNKNOWN = re.compile(
    rf'\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|MERGE\s+INTO)\s+"?(?:{HOLE}|%s|%\(|\{{)', re.IGNORECASE
)
ENDS_TRANSACTION = re.compile(r"\s*(?:COMMIT|ROLLBACK|ABORT)\b(?!\s+TO\b)", re.IGNORECASE)


def sources(*packages: Path) -> list[Path]:
    """Python files of the packages, relative to the repository."""
    found = [path.relative_to(ROOT) for package in packages for path in sorted(package.rglob("*.py"))]
    assert found, "no source found: the check would pass on nothing"
    return found


def violations(source: str, path: Path) -> list[str]:
    """What in `source`, taken to lie at `path`, belongs to another room; one sentence each."""
    tree = ast.parse(source)
    found = list(_imports(tree, path)) if path.is_relative_to(LIFECYCLE) else list(_state_written(tree, path))
    if not path.is_relative_to(DB):
        found += _transaction_ended(tree)
    return [f"{path}:{line}: {what}" for line, what in sorted(found)]


def _state_written(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    for line, text in _strings(tree):
        if WRITES_STATE.search(text):
            yield line, "SQL that writes a table of the lifecycle"
        if WRITES_EVENTS.search(text):
            yield line, "SQL that writes events"
        if WRITES_UNKNOWN.search(text):
            yield line, "SQL that writes a table whose name is made at run time"
    if path.parts[0] == "horde" and not path.is_relative_to(DB / "tables"):
        yield from _mapped_class_used(tree)
        yield from _column_assigned(tree, sets_nodes=path in SETS_NODES)


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Every string literal but docstrings; pieces joined by `+` or an f-string as one."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in docstrings:
            text = _text(node)
            if text is not None:
                yield node.lineno, text


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or HOLE for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        left, right = _text(node.left), _text(node.right)
        if left is not None and isinstance(node.op, ast.Mod):
            return left
        return None if left is None and right is None else (left or HOLE) + (right or HOLE)
    return None


def _mapped_class_used(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("horde.db")
        for alias in node.names
        if alias.name in MAPPED
    }

    def is_mapped(node: ast.AST) -> bool:
        # `tables.Job` counts wherever it comes from: no other `Job` is reached through a module of that name.
        if isinstance(node, ast.Attribute):
            return node.attr in MAPPED and isinstance(node.value, ast.Name) and node.value.id in {"tables", "requests"}
        return isinstance(node, ast.Name) and node.id in names

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__table__" and is_mapped(node.value):
            yield node.lineno, "the table behind a mapped class of the lifecycle"
        if not isinstance(node, ast.Call):
            continue
        if is_mapped(node.func):
            yield node.lineno, "a mapped class of the lifecycle made into a row"
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        writes = called in {"insert", "update", "delete", "bulk_insert_mappings", "bulk_update_mappings"}
        if writes and any(is_mapped(argument) for argument in node.args):
            yield node.lineno, f"{called}() of a mapped class of the lifecycle"


def _column_assigned(tree: ast.Module, *, sets_nodes: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        for target in (inner for outer in targets for inner in ast.walk(outer)):
            if isinstance(target, ast.Attribute) and target.attr in STATE_COLUMNS and not _is_self(target.value):
                yield target.lineno, f"an assignment to the state column {target.attr}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            name = _text(node.args[1])
            if (name is None and not sets_nodes) or name in STATE_COLUMNS:
                yield node.lineno, f"setattr of {name or 'a name made at run time'}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _transaction_ended(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in {"commit", "rollback"}:
            yield node.lineno, f"{node.func.attr}(): only the session scope ends a transaction"
    for line, text in _strings(tree):
        if ENDS_TRANSACTION.match(text) and text.strip("; \n").isupper():
            yield line, "SQL that ends a transaction"


def _imports(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
            if modules == ["horde"]:
                modules = [f"horde.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            room = ".".join(module.split(".")[:2])
            if room not in {"horde.db", "horde.lifecycle"} and module.split(".")[0] not in sys.stdlib_module_names:
                yield node.lineno, f"{path.name} imports {module}: the lifecycle knows the database and nothing else"


@pytest.mark.parametrize("path", sources(ROOT / "horde", ROOT / "worker"), ids=str)
def test_only_the_lifecycle_writes_states_and_only_the_session_scope_commits(path: Path) -> None:
    assert violations((ROOT / path).read_text(), path) == []


def test_both_programs_are_looked_at() -> None:
    assert Path(worker.__file__).is_relative_to(ROOT)
    rooms = {path.parts[0] for path in sources(ROOT / "horde", ROOT / "worker")}
    assert rooms == {"horde", "worker"}


def test_every_column_that_the_check_knows_exists() -> None:
    columns = {column.name for table in Base.metadata.tables.values() for column in table.columns}
    assert columns >= STATE_COLUMNS
    assert Base.metadata.tables.keys() >= {*TABLES, "events", "events_unfolded"}


def test_the_lifecycle_itself_would_be_caught_elsewhere() -> None:
    caught = {
        path.name
        for path in sources(ROOT / LIFECYCLE)
        if violations((ROOT / path).read_text(), Path("horde/usecases") / path.name)
    }
    assert caught >= {
        *("attach.py", "claim.py", "enqueue.py", "events.py", "progress.py", "release.py", "retention.py", "settle.py"),
        "store.py",
    }


PLANTED = {
    "an update of requests": "tx.execute('UPDATE requests SET waiting = 0')",
    "over two lines and in small letters": 'SQL = """\nupdate\n  jobs AS j\n  set state = 1"""',
    "only and the schema": "SQL = 'UPDATE ONLY public.\"slots\" SET state = 1'",
    "a delete": "SQL = 'DELETE FROM queue WHERE request_id = 1'",
    "an insert": "SQL = 'INSERT INTO progress (job_id) VALUES (1)'",
    "inside a WITH": "SQL = 'WITH x AS (DELETE FROM jobs RETURNING *) SELECT 1'",
    "an insert by merge": "SQL = 'MERGE INTO jobs USING x ON true WHEN MATCHED THEN DO NOTHING'",
    "a copy": "cursor.copy_expert('COPY slots (idx) FROM STDIN', file)",
    "truncation": "SQL = 'TRUNCATE requests'",
    "an event": "SQL = 'INSERT INTO events (kind) VALUES (1)'",
    "an event's name among the unfolded": "SQL = 'INSERT INTO events_unfolded VALUES (1)'",
    "a string in two parts": "SQL = 'UPDATE ' + 'requests SET waiting = 0'",
    "an f-string around the columns": "SQL = f'UPDATE jobs SET {column} = 1'",
    "an f-string for the table": "SQL = f'DELETE FROM {table}'",
    "a format for the table": "SQL = 'UPDATE {} SET x = 1'.format(table)",
    "a percent for the table": "SQL = 'INSERT INTO %s VALUES (1)' % table",
    "an assignment": "job.state = 'stored'",
    "an increment": "request.waiting -= 1",
    "an assignment among others": "a, (request.outcome, b) = values",
    "setattr": "setattr(request, 'outcome', None)",
    "setattr of any name": "setattr(request, name, None)",
    "a row": "from horde.db.tables import Job\nsession.add(Job(state='stored'))",
    "a row under another name": "from horde.db.tables.requests import Job as Attempt\nAttempt()",
    "a row through its module": "from horde.db import tables\ntables.Job()",
    "an update by class": "from horde.db.tables import Request\nsa.update(Request).values(x=1)",
    "a table by class": "from horde.db.tables import Slot\nSlot.__table__.insert()",
    "a commit": "connection.commit()",
    "a rollback": "tx.connection.rollback()",
    "a commit by SQL": "tx.execute('COMMIT')",
}

ALLOWED = {
    "a read": "SQL = 'SELECT id FROM requests JOIN jobs USING (id)'",
    "a lock": "SQL = 'SELECT 1 FROM queue JOIN requests ON true FOR UPDATE OF requests SKIP LOCKED'",
    "the fold": "SQL = 'DELETE FROM events_unfolded WHERE event_id = 1 RETURNING event_id'",
    "another table": "SQL = 'UPDATE workers SET models = 1'",
    "a longer name": "SQL = 'UPDATE requests_archive SET x = 1'",
    "prose": "print('we update progress, insert into our jobs, and delete from memory the requests')",
    "a docstring": '"""UPDATE requests SET waiting = 0 is forbidden here."""',
    "an object's own field": "class Panel:\n    def __init__(self):\n        self.state = 'idle'",
    "another class of that name": "from horde.usecases.pop import Job\nJob(id=1)",
}


@pytest.mark.parametrize("source", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(source: str) -> None:
    assert violations(source, Path("horde/usecases/planted.py"))


@pytest.mark.parametrize("source", ALLOWED.values(), ids=ALLOWED.keys())
def test_what_is_allowed_is_not_reported(source: str) -> None:
    assert violations(source, Path("horde/usecases/allowed.py")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import flask",
        "from horde.errors import HordeError",
        "from horde import settings",
        "from horde.kudos import prices",
    ],
)
def test_an_import_into_the_lifecycle_is_found(source: str) -> None:
    assert violations(source, LIFECYCLE / "planted.py")


def test_a_worker_that_writes_sql_is_found() -> None:
    assert violations("SQL = 'UPDATE jobs SET state = 1'", Path("worker/loop.py"))


def test_a_commit_in_the_lifecycle_is_found() -> None:
    assert violations("tx.connection.commit()", LIFECYCLE / "planted.py")
