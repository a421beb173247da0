"""The `horde` commands as a person runs them: real processes, real signals, a real broker and database."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import sqlalchemy as sa

from horde.db import migrate
from horde.db.embedded import EmbeddedPostgres, liveness, running_url
from horde.db.embedded.liveness import State
from tests.support.postgres import open_directory

HORDE = (sys.executable, "-c", "from horde.cli.main import main; main()")
PATIENCE = 120
POP = {"name": "tester", "max_length": 512, "max_context_length": 2048}


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HORDE_")}
    return {**kept, "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **more}


def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HORDE, *map(str, arguments)],
        env=environment(**more),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def read_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """Lines up to the one that holds `wanted`; fails with all of them if the output ends before."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if wanted in line:
            return lines
    pytest.fail(f"it ended without {wanted!r}:\n{''.join(lines)}")


@dataclass
class Up:
    """A running `horde up`."""

    process: subprocess.Popen[str]
    data_dir: Path
    url: str
    api_key: str

    def end(self, number: int = signal.SIGTERM) -> str:
        """Signal it, wait, and answer what it said from then on."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=PATIENCE)
        return output

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> Any:
        headers = {"apikey": key or self.api_key}
        answer = requests.request(method, f"{self.url}/api/v2/{path}", json=body, headers=headers, timeout=30)
        answer.raise_for_status()
        return answer.json()


@contextlib.contextmanager
def horde_up(data_dir: Path, *arguments: str, ready: str = "Ctrl-C ends all of it", **more: str) -> Iterator[Up]:
    port = free_port()
    process = subprocess.Popen(
        [*HORDE, "up", f"--data-dir={data_dir}", f"--port={port}", *arguments],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        read_until(process, ready)
        key = json.loads((data_dir / "first-user.json").read_text(encoding="utf-8"))["api_key"]
        yield Up(process, data_dir, f"http://127.0.0.1:{port}", key)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=PATIENCE)
            finally:
                process.kill()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    """A `horde up` without a worker, shared by tests that do it no harm: each is a worker for a model of its own."""
    with open_directory() as data_dir, horde_up(data_dir, "--no-worker", HORDE_RATE_LIMITS="off") as found:
        yield found


def ask(up: Up, *arguments: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*HORDE, "ask", f"--data-dir={up.data_dir}", *arguments],
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pop(up: Up, model: str) -> dict[str, Any]:
    """The next job for `model`, waited for at the broker."""
    for _ in range(5):
        job: dict[str, Any] = up.call("POST", "generate/text/pop", {**POP, "models": [model], "wait": 10})
        if job["id"]:
            return job
    pytest.fail("no job came")


def test_everything_starts_ends_on_sigterm_and_is_found_again(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker") as first:
        made = run("user", "create", "Ada", "--role=trusted", "--kudos=12", "--json", f"--data-dir={data_dir}")
        ada = json.loads(made.stdout)
        output = first.end()
        assert first.process.returncode == 0, output
        assert output.index("broker      ending") < output.index("PostgreSQL  ending") < output.index("All ended.")
    assert liveness.look(EmbeddedPostgres(data_dir).data) is State.NONE
    assert not (data_dir / "running.json").exists()
    with horde_up(data_dir, "--no-worker") as second:
        assert second.api_key == first.api_key
        found = second.call("GET", "find_user", key=ada["api_key"])
        assert found["username"] == ada["alias"]
        assert found["trusted"] is True


def test_a_second_horde_up_on_the_same_data_gets_a_sentence(up: Up) -> None:
    refused = run("up", "--no-worker", f"--port={free_port()}", f"--data-dir={up.data_dir}")
    assert refused.returncode == 1
    assert f"Another `horde up` (process {up.process.pid}) is using {up.data_dir}" in refused.stderr
    assert up.call("GET", "status/heartbeat")["message"] == "OK"


def test_a_taken_port_is_named_and_nothing_is_left_running(up: Up, data_dir: Path) -> None:
    port = up.url.rpartition(":")[2]
    other = data_dir / "other"
    refused = run("up", "--no-worker", f"--port={port}", f"--data-dir={other}")
    assert refused.returncode == 1
    assert f"port {port}" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert liveness.look(EmbeddedPostgres(other).data) is State.NONE


def test_kill_9_leaves_nothing_that_the_next_start_does_not_mend(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker") as first:
        accepted = first.call("POST", "generate/text/async", {"prompt": "kept"})
        first.process.kill()
        first.process.wait()
    with horde_up(data_dir, "--no-worker") as second:
        assert second.api_key == first.api_key
        assert second.call("GET", f"generate/text/status/{accepted['id']}")["waiting"] == 1


def test_a_killed_postgresql_is_started_again(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker") as up:
        server = liveness.read(EmbeddedPostgres(data_dir).data)
        assert server is not None
        accepted = up.call("POST", "generate/text/async", {"prompt": "kept"})
        os.kill(server.pid, signal.SIGKILL)
        read_until(up.process, "it is up again")
        # Connections that died with the old server are noticed at their next use.
        for _ in range(40):
            answer = requests.get(f"{up.url}/api/v2/generate/text/status/{accepted['id']}", timeout=30)
            if answer.status_code != 503:
                break
        assert answer.json()["waiting"] == 1


def test_a_first_users_key_that_the_database_does_not_know_is_replaced(data_dir: Path) -> None:
    stale = {"id": 1, "alias": "operator#1", "api_key": "of-another-database"}
    (data_dir / "first-user.json").write_text(json.dumps(stale), encoding="utf-8")
    with horde_up(data_dir, "--no-worker") as found:
        assert found.api_key != stale["api_key"]
        assert found.call("GET", "find_user")["username"].startswith("operator#")


def test_ask_shows_where_the_request_stands_and_prints_the_text(up: Up) -> None:
    asking = ask(up, "Say hello", "--model=test/shown", "--max-length=20")
    job = pop(up, "test/shown")
    assert job["payload"]["prompt"] == "Say hello"
    assert job["payload"]["max_length"] == 20
    assert asking.stderr is not None
    seen = ""
    while "A worker is at it" not in seen:
        line = asking.stderr.readline()
        assert line, seen
        seen += line
    up.call("POST", "generate/text/submit", {"id": job["id"], "generation": " hello, 👋 world", "seed": 1})
    output, _ = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 0
    assert output == " hello, 👋 world\n"


def test_ask_prints_every_text_it_asked_for(up: Up) -> None:
    asking = ask(up, "Count", "--model=test/many", "--n=2")
    for text in ("one", "two"):
        up.call("POST", "generate/text/submit", {"id": pop(up, "test/many")["id"], "generation": text, "seed": 1})
    output, _ = asking.communicate(timeout=PATIENCE)
    assert sorted(output.split("\n" + "-" * 40 + "\n")) == ["one", "two\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_on_ask_cancels_the_request_at_the_broker(up: Up, number: signal.Signals) -> None:
    asking = ask(up, "Never mind", "--model=test/nobody")
    assert asking.stderr is not None
    first = asking.stderr.readline()
    assert "No worker" in first or "Position" in first
    asking.send_signal(number)
    _, errors = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 130
    assert "Cancelled." in errors
    url = running_url(up.data_dir)
    assert url is not None
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT outcome, waiting FROM requests ORDER BY created_at DESC LIMIT 1").one()
    engine.dispose()
    assert tuple(row) == ("cancelled", 0)


def test_ask_says_when_the_workers_could_not_do_it(up: Up) -> None:
    asking = ask(up, "Impossible", "--model=test/broken")
    for _ in range(2):
        fault = {"id": pop(up, "test/broken")["id"], "state": "faulted", "generation": "faulted", "seed": -1}
        up.call("POST", "generate/text/submit", fault)
    output, errors = asking.communicate(timeout=PATIENCE)
    assert (asking.returncode, output) == (1, "")
    assert "ended in a fault" in errors


def test_a_refused_prompt_is_explained_by_field(up: Up) -> None:
    refused = run("ask", "hello", "--max-length=5", f"--data-dir={up.data_dir}")
    assert refused.returncode == 1
    assert "max_length" in refused.stderr


def test_status_lists_workers_and_models(up: Up) -> None:
    up.call("POST", "generate/text/pop", {**POP, "models": ["test/listed"]})
    shown = run("status", f"--data-dir={up.data_dir}")
    assert shown.returncode == 0, shown.stderr
    assert up.url in shown.stdout
    assert "tester" in shown.stdout
    assert "test/listed" in shown.stdout


def test_user_create_prints_the_key_once_to_people_and_to_programs(database_url: str) -> None:
    for_people = run("user", "create", "Bob", HORDE_DATABASE_URL=database_url)
    assert for_people.returncode == 0, for_people.stderr
    assert "Bob#" in for_people.stdout
    roles = ("--role=moderator", "--role=admin")
    for_programs = run("user", "create", "Ünï", *roles, "--json", HORDE_DATABASE_URL=database_url)
    made = json.loads(for_programs.stdout)
    assert set(made) == {"id", "username", "alias", "api_key"}
    assert made["alias"] == f"Ünï#{made['id']}"
    engine = sa.create_engine(database_url)
    with engine.connect() as connection:
        row = connection.exec_driver_sql("SELECT moderator, admin FROM users WHERE id = %(id)s", made).one()
        keys = connection.exec_driver_sql("SELECT key_hash FROM users").scalars().all()
    engine.dispose()
    assert tuple(row) == (True, True)
    assert made["api_key"] not in keys


@pytest.mark.parametrize("role", ["king", ""])
def test_a_role_that_does_not_exist_is_refused(role: str, database_url: str) -> None:
    refused = run("user", "create", "Bob", f"--role={role}", HORDE_DATABASE_URL=database_url)
    assert refused.returncode == 2
    assert "trusted" in refused.stderr


def test_db_upgrade_brings_an_empty_database_to_the_newest_tables(empty_database_url: str) -> None:
    def horde_db(command: str) -> str:
        done = run("db", command, HORDE_DATABASE_URL=empty_database_url)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert horde_db("current") == "empty"
    assert horde_db("upgrade").startswith("empty -> ")
    assert horde_db("current") == migrate.current(empty_database_url)
    assert horde_db("upgrade").startswith("already at ")


def test_serve_refuses_a_database_that_is_not_migrated(empty_database_url: str) -> None:
    refused = run("serve", f"--port={free_port()}", HORDE_DATABASE_URL=empty_database_url)
    assert refused.returncode == 1
    assert "horde db upgrade" in refused.stderr


def test_serve_answers_until_it_is_told_to_stop(database_url: str) -> None:
    port = free_port()
    process = subprocess.Popen(
        [*HORDE, "serve", f"--port={port}"],
        env=environment(HORDE_DATABASE_URL=database_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        read_until(process, f"http://127.0.0.1:{port}")
        assert requests.get(f"http://127.0.0.1:{port}/api/v2/status/heartbeat", timeout=30).json()["message"] == "OK"
        process.terminate()
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "variables", "sentence"),
    [
        (("serve",), {}, "HORDE_DATABASE_URL is not set"),
        (("db", "current"), {"HORDE_DATA_DIR": "/nowhere/horde"}, "no `horde up` runs on /nowhere/horde"),
        (("user", "create", "x"), {"HORDE_DATA_DIR": "/nowhere/horde"}, "no `horde up` runs on /nowhere/horde"),
        (("ask", "hello", "--broker=http://127.0.0.1:1"), {}, "No broker answers at http://127.0.0.1:1"),
        (("ask", "hello", "--broker=nonsense"), {}, "nonsense is not the URL of a broker"),
        (("status", "--broker=http://127.0.0.1:1"), {}, "Is `horde up` running?"),
        (("db", "current"), {"HORDE_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "The database does not answer"),
        (("db", "current"), {"HORDE_DATABASE_URL": "rubbish"}, "HORDE_DATABASE_URL is no database URL"),
        (("serve",), {"HORDE_PORT": "x", "HORDE_DATABASE_URL": "postgresql://127.0.0.1:1/x"}, "HORDE_PORT"),
    ],
)
def test_what_went_wrong_is_one_sentence(arguments: tuple[str, ...], variables: dict[str, str], sentence: str) -> None:
    done = run(*arguments, **variables)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.needs("model")
def test_a_real_model_answers_and_ctrl_c_ends_worker_broker_and_postgresql_in_order(data_dir: Path) -> None:
    with horde_up(data_dir) as found:
        listed = found.call("GET", "workers?type=text")
        assert [worker["models"] for worker in listed] == [["SmolLM2-135M-Instruct"]]
        asking = ask(found, "The capital of France is", "--max-length=16")
        output, errors = asking.communicate(timeout=PATIENCE)
        assert asking.returncode == 0, errors
        assert output.strip()
        said = found.end(signal.SIGINT)
        assert found.process.returncode == 0, said
        places = [said.index(line) for line in ("worker      ending", "broker      ending", "PostgreSQL  ending")]
        assert places == sorted(places)
