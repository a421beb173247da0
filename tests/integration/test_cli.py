"""The `horde` commands as a person runs them: real processes, real signals, a real broker and database."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
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

# A shell gives what it starts with `&` an ignored SIGINT, and pytest would pass it on.
CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
HORDE = (sys.executable, "-c", f"{CTRL_C}; from horde.cli.main import main; main()")
PATIENCE = 120
POP = {"name": "tester", "max_length": 512, "max_context_length": 2048}


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HORDE_", "PYTHONUNBUFFERED"))}
    return {**kept, "COLUMNS": "200", **more}


def run(*arguments: str | Path, horde: tuple[str, ...] = HORDE, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*horde, *map(str, arguments)],
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


def read_until(process: subprocess.Popen[str], wanted: str, *, errors: bool = False) -> str:
    """The output up to the line that holds `wanted`; fails with all of it if it ends before, or takes too long."""
    stream = process.stderr if errors else process.stdout
    assert stream is not None
    said = ""
    too_long = threading.Timer(PATIENCE, process.kill)
    too_long.start()
    try:
        for line in stream:
            said += line
            if wanted in line:
                return said
    finally:
        too_long.cancel()
        too_long.join()
    pytest.fail(f"it ended without {wanted!r}:\n{said}")


@contextlib.contextmanager
def started(*arguments: str, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A `horde` command; however the test ends, it ends too: asked first, and then made to."""
    process = subprocess.Popen([*HORDE, *arguments], text=True, stdin=subprocess.DEVNULL, **settings)
    try:
        yield process
    finally:
        try:
            if process.poll() is None:
                process.terminate()
                process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@dataclass
class Up:
    """A running `horde up`, and what it said until it was ready."""

    process: subprocess.Popen[str]
    data_dir: Path
    port: int
    said: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_key(self) -> str:
        key: str = json.loads((self.data_dir / "first-user.json").read_text(encoding="utf-8"))["api_key"]
        return key

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
def horde_up(
    data_dir: Path, *arguments: str, ready: str = "Ctrl-C ends all of it", port: int | None = None, **more: str
) -> Iterator[Up]:
    port = port or free_port()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with started(
        "up", f"--data-dir={data_dir}", f"--port={port}", *arguments, env=environment(**more), **pipes
    ) as process:
        yield Up(process, data_dir, port, read_until(process, ready))


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    """A `horde up` without a worker, shared by tests that do it no harm: each is a worker for a model of its own."""
    with open_directory() as data_dir, horde_up(data_dir, "--no-worker", HORDE_RATE_LIMITS="off") as found:
        yield found


def ask(up: Up, *arguments: str, **more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return started("ask", f"--data-dir={up.data_dir}", *arguments, env=environment(**more), **pipes)


def pop(up: Up, model: str) -> dict[str, Any]:
    """The next job for `model`, waited for at the broker."""
    for _ in range(5):
        job: dict[str, Any] = up.call("POST", "generate/text/pop", {**POP, "models": [model], "wait": 10})
        if job["id"]:
            return job
    pytest.fail("no job came")


def wait_for_broker(up: Up) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(requests.ConnectionError, FileNotFoundError):
            up.call("GET", "find_user")
            return
        assert time.monotonic() < deadline, "the broker never answered"
        assert up.process.poll() is None, "it has ended"
        time.sleep(0.1)


def assert_nothing_is_left(data_dir: Path) -> None:
    assert liveness.look(EmbeddedPostgres(data_dir).data) is State.NONE
    assert not (data_dir / "running.json").exists()


def test_everything_starts_ends_on_sigterm_and_is_found_again(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker") as first:
        made_key = first.api_key
        made = run("user", "create", "Ada", "--role=trusted", "--kudos=12", "--json", f"--data-dir={data_dir}")
        ada = json.loads(made.stdout)
        output = first.end()
        assert first.process.returncode == 0, output
        assert output.index("broker      ending") < output.index("PostgreSQL  ending") < output.index("All ended.")
    assert_nothing_is_left(data_dir)
    with horde_up(data_dir, "--no-worker") as second:
        assert second.api_key == made_key
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
    assert 'make run ARGS="--port 8000"' in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (other / "postgres").exists(), "a server was started for nothing"


def test_a_port_that_is_none_is_blamed_on_the_option_it_came_with() -> None:
    refused = run("up", "--port=99999")
    assert refused.returncode == 2
    assert "--port" in refused.stderr
    assert "HORDE_PORT" not in refused.stderr


def test_without_a_worker_nobody_is_said_to_answer_and_the_brokers_log_is_quiet(up: Up) -> None:
    assert "Nobody answers until a worker is there" in up.said
    assert f"horde-worker run --broker {up.url}" in up.said
    assert "--max-length 20 'The capital of France is'" in up.said
    assert "listening" not in up.said


def test_a_model_that_cannot_be_loaded_ends_everything_with_a_sentence(data_dir: Path) -> None:
    done = run("up", "--model=/no/such/model", f"--port={free_port()}", f"--data-dir={data_dir}")
    assert done.returncode == 1
    assert "/no/such/model is not there" in done.stdout
    assert "Ask it something" not in done.stdout
    assert "The worker could not begin (status 2)" in done.stderr
    assert_nothing_is_left(data_dir)


def test_without_the_brokers_packages_horde_up_says_how_to_get_them(data_dir: Path) -> None:
    bare = (sys.executable, "-c", "import sys; sys.modules['psycopg2'] = None\nfrom horde.cli.main import main; main()")
    done = run("up", f"--data-dir={data_dir}", f"--port={free_port()}", horde=bare)
    assert done.returncode == 1
    assert "psycopg2 is not installed here" in done.stderr
    assert "pip install 'horde[broker]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_horde_up_whose_output_nobody_reads_any_more_goes_on_and_ends_in_order(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker", ready="PostgreSQL  starting") as up:
        assert up.process.stdout is not None
        up.process.stdout.close()
        wait_for_broker(up)
        assert up.call("GET", "find_user")["username"].startswith("operator#")
        up.process.terminate()
        assert up.process.wait(PATIENCE) == 0
    assert_nothing_is_left(data_dir)


def test_a_closed_terminal_ends_everything_in_order(data_dir: Path) -> None:
    ours, theirs = pty.openpty()
    # The first terminal that the leader of a session opens is the one whose end it is told of.
    in_terminal = "import os, sys; os.open(os.ttyname(1), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    arguments = ["up", "--no-worker", f"--data-dir={data_dir}", f"--port={free_port()}"]
    process = subprocess.Popen(
        [sys.executable, "-c", in_terminal, *HORDE, *arguments],
        env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    try:
        os.close(theirs)
        seen = b""
        while b"Ctrl-C ends all of it" not in seen:
            readable, _, _ = select.select([ours], [], [], PATIENCE)
            assert readable, seen
            seen += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
    assert_nothing_is_left(data_dir)


def test_kill_9_leaves_nothing_that_the_next_start_does_not_mend(data_dir: Path) -> None:
    with horde_up(data_dir, "--no-worker") as first, ask(first, "kept", "--model=test/kept") as asking:
        key = first.api_key
        read_until(asking, "No worker", errors=True)
        first.process.kill()
        first.process.wait()
        read_until(asking, "The broker does not answer; trying again", errors=True)
        with horde_up(data_dir, "--no-worker", port=first.port) as second:
            assert second.api_key == key
            done = {"id": pop(second, "test/kept")["id"], "generation": "still here", "seed": 1}
            second.call("POST", "generate/text/submit", done)
            output, errors = asking.communicate(timeout=PATIENCE)
            assert (asking.returncode, output) == (0, "still here\n"), errors


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
    with ask(up, "Say hello", "--model=test/shown", "--max-length=20") as asking:
        job = pop(up, "test/shown")
        assert job["payload"]["prompt"] == "Say hello"
        assert job["payload"]["max_length"] == 20
        read_until(asking, "A worker is at it", errors=True)
        up.call("POST", "generate/text/submit", {"id": job["id"], "generation": " hello, 👋 world", "seed": 1})
        output, _ = asking.communicate(timeout=PATIENCE)
    assert asking.returncode == 0
    assert output == " hello, 👋 world\n"


def test_ask_prints_every_text_it_asked_for(up: Up) -> None:
    with ask(up, "Count", "--model=test/many", "--n=2") as asking:
        for text in ("one", "two"):
            up.call("POST", "generate/text/submit", {"id": pop(up, "test/many")["id"], "generation": text, "seed": 1})
        output, _ = asking.communicate(timeout=PATIENCE)
    assert sorted(output.split("\n" + "-" * 40 + "\n")) == ["one", "two\n"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_on_ask_cancels_the_request_at_the_broker(up: Up, number: signal.Signals) -> None:
    with ask(up, "Never mind", "--model=test/nobody") as asking:
        read_until(asking, "No worker", errors=True)
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
    def fail() -> None:
        fault = {"id": pop(up, "test/broken")["id"], "state": "faulted", "generation": "faulted", "seed": -1}
        up.call("POST", "generate/text/submit", fault)

    with ask(up, "Impossible", "--model=test/broken") as asking:
        fail()
        read_until(asking, "tried again (1)", errors=True)
        fail()
        output, errors = asking.communicate(timeout=PATIENCE)
    assert (asking.returncode, output) == (1, "")
    assert "ended in a fault" in errors


def test_a_refused_prompt_is_explained_by_field(up: Up) -> None:
    refused = run("ask", "hello", "--max-length=5", f"--data-dir={up.data_dir}")
    assert refused.returncode == 1
    assert "max_length" in refused.stderr


def test_a_refusal_is_said_once(up: Up) -> None:
    refused = run("ask", "", f"--data-dir={up.data_dir}")
    assert refused.returncode == 1
    assert refused.stderr.lower().count("prompt") == 1, refused.stderr


def test_status_lists_workers_and_models(up: Up) -> None:
    up.call("POST", "generate/text/pop", {**POP, "models": ["test/listed"]})
    shown = run("status", f"--data-dir={up.data_dir}")
    assert shown.returncode == 0, shown.stderr
    assert up.url in shown.stdout
    assert "tester" in shown.stdout
    assert "test/listed" in shown.stdout


def test_status_names_its_figures_and_says_where_nobody_serves(up: Up) -> None:
    accepted = up.call("POST", "generate/text/async", {"prompt": "unserved", "models": ["test/unserved"]})
    try:
        shown = run("status", f"--data-dir={up.data_dir}")
    finally:
        up.call("DELETE", f"generate/text/status/{accepted['id']}")
    assert "1 requests" not in shown.stdout
    assert "threads" in shown.stdout
    assert "mean tokens/s" in shown.stdout
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("test/unserved")]
    assert line.rstrip().endswith("no worker")


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
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started("serve", f"--port={port}", env=environment(HORDE_DATABASE_URL=database_url), **pipes) as process:
        read_until(process, f"http://127.0.0.1:{port}")
        assert requests.get(f"http://127.0.0.1:{port}/api/v2/status/heartbeat", timeout=30).json()["message"] == "OK"
        process.terminate()
        output, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, output


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
        assert re.search(r"^worker    \| \d\d:\d\d:\d\d loading SmolLM2", found.said, re.MULTILINE), found.said
        assert "worker    | serves SmolLM2-135M-Instruct\n" in found.said
        with ask(found, "The capital of France is", "--max-length=16") as asking:
            output, errors = asking.communicate(timeout=PATIENCE)
        assert asking.returncode == 0, errors
        assert output.strip()
        said = found.end(signal.SIGINT)
        assert found.process.returncode == 0, said
        places = [said.index(line) for line in ("worker      ending", "broker      ending", "PostgreSQL  ending")]
        assert places == sorted(places)
