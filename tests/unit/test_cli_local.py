"""What a data directory tells the commands: the local broker, and a key that goes nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horde.cli.local import (
    ANONYMOUS_KEY,
    DEFAULT_BROKER,
    FIRST_USER,
    FirstUser,
    Running,
    find_broker,
    forget_running,
    read_first_user,
    read_running,
    settings_with,
    write_first_user,
    write_running,
)

LOCAL = "http://127.0.0.1:7123"
USER = FirstUser(id=1, alias="operator#1", api_key="the-local-key")


def test_the_local_broker_and_its_key_are_the_defaults(tmp_path: Path) -> None:
    assert find_broker(None, None, tmp_path) == (DEFAULT_BROKER, ANONYMOUS_KEY)
    write_first_user(tmp_path, USER)
    write_running(tmp_path, Running(os.getpid(), LOCAL))
    assert find_broker(None, None, tmp_path) == (LOCAL, USER.api_key)
    assert find_broker(LOCAL + "/", None, tmp_path) == (LOCAL, USER.api_key)
    assert find_broker(None, "mine", tmp_path) == (LOCAL, "mine")
    forget_running(tmp_path)
    assert find_broker(None, None, tmp_path) == (DEFAULT_BROKER, ANONYMOUS_KEY)


def test_the_local_key_is_not_sent_to_another_broker(tmp_path: Path) -> None:
    write_first_user(tmp_path, USER)
    write_running(tmp_path, Running(os.getpid(), LOCAL))
    assert find_broker("https://horde.example.org", None, tmp_path) == ("https://horde.example.org", ANONYMOUS_KEY)


def test_what_a_killed_horde_up_left_behind_does_not_count(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    write_running(tmp_path, Running(ended.pid, LOCAL))
    assert read_running(tmp_path) is None


def test_keys_are_readable_by_their_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_first_user(tmp_path, USER)
    finally:
        os.umask(before)
    assert (tmp_path / FIRST_USER).stat().st_mode & 0o777 == 0o600
    assert read_first_user(tmp_path) == USER


def test_a_mangled_file_counts_as_none(tmp_path: Path) -> None:
    for content in ("", "{", "[]", '{"id": "x"}', '{"id": 1}'):
        (tmp_path / FIRST_USER).write_text(content, encoding="utf-8")
        assert read_first_user(tmp_path) is None


def test_the_data_directory_follows_the_option_then_the_environment_then_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORDE_DATA_DIR", "/from/environment")
    assert settings_with(data_dir=tmp_path).data_dir == tmp_path
    assert settings_with(data_dir=None).data_dir == Path("/from/environment")
    monkeypatch.delenv("HORDE_DATA_DIR")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert settings_with().data_dir == Path("/var/lib/horde")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert settings_with().data_dir == Path("/xdg/horde")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert settings_with().data_dir == Path("/home/ada/.local/share/horde")
