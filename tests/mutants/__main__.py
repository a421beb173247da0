"""Take every guard out in turn, see that its test goes red, print guard -> test -> verdict; exit 1 if one survives.

First all named tests must be green as they stand. One PostgreSQL serves all; four mutants run at a time, since they mostly wait.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.guards import MUTANTS
from tests.mutants.mutant import ROOT, Mismatch, Mutant
from tests.support.postgres import Server, choose_source

AT_ONCE = 4
SECONDS_EACH = 60
SECONDS_GREEN = 240
MARKS = {"caught": "+", "survived": "-", "broken": "!"}


@dataclass(frozen=True)
class Verdict:
    """`caught`, `survived`, or `broken`: the mutant proves nothing; with the reason and the seconds it took."""

    word: str
    reason: str
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run those mutants whose guard or test contains one of the given words; all without any."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose guard or test contains one of these")
    parser.add_argument("--why", action="store_true", help="print how each test failed")
    parser.add_argument("--list", action="store_true", help="print guard -> test and run nothing")
    chosen = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if not chosen.words or _mentions(mutant, chosen.words)]
    problems = _problems(mutants)
    if problems or not mutants:
        print("\n".join(problems or ["no mutant of that name"]))
        return 1
    if chosen.list:
        for mutant in mutants:
            print(f"{mutant.guard} -> {mutant.test}")
        return 0
    begun = time.monotonic()
    with choose_source(os.environ).open() as url, tempfile.TemporaryDirectory() as directory:
        server = Server(choose_source(os.environ), url)
        server.prepare()
        try:
            runner = Runner(url, server._template, Path(directory), why=chosen.why)
            if not runner.green(mutants):
                return 1
            verdicts = runner.run_all(mutants)
        finally:
            server.close()
    return _conclude(mutants, verdicts, time.monotonic() - begun)


def _mentions(mutant: Mutant, words: Sequence[str]) -> bool:
    return any(word in mutant.guard or word in mutant.test for word in words)


def _problems(mutants: Sequence[Mutant]) -> list[str]:
    problems = []
    guards = [mutant.guard for mutant in MUTANTS]
    problems += [f"{guard}: there twice" for guard in sorted(set(guards)) if guards.count(guard) > 1]
    for mutant in mutants:
        try:
            mutant.check()
        except Mismatch as mismatch:
            problems.append(str(mismatch))
    return problems


class Runner:
    """Runs pytest for one mutant at a time, each in a process of its own."""

    def __init__(self, url: str, template: str, directory: Path, *, why: bool) -> None:
        self._directory = directory
        self._why = why
        self._environment = {
            **os.environ,
            # Installed plugins cost more than most of these tests do.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "HORDE_TEST_POSTGRES": "url",
            "HORDE_TEST_DATABASE_URL": url,
            "HORDE_MUTANT_TEMPLATE": template,
        }

    def green(self, mutants: Sequence[Mutant]) -> bool:
        """Whether every named test passes with all guards in place."""
        tests = sorted({mutant.test for mutant in mutants})
        print(f"{len(tests)} tests with every guard in place ...", flush=True)
        code, report, output = self._pytest(tests, "", SECONDS_GREEN)
        if code == 0 and report and report["ran"] >= len(tests):
            return True
        print(output)
        print("the tests must be green before a guard is taken out")
        return False

    def run_all(self, mutants: Sequence[Mutant]) -> list[Verdict]:
        """Every verdict, in order, two mutants at a time; a line for each as it comes."""
        width = max(len(mutant.guard) for mutant in mutants)

        def run(mutant: Mutant) -> Verdict:
            verdict = self._run(mutant)
            name = mutant.test.rpartition("::")[2]
            because = f"\n    {verdict.reason}" if self._why else ""
            print(f"{MARKS[verdict.word]} {mutant.guard:{width}}  {verdict.word:8}  {name}{because}", flush=True)
            return verdict

        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(run, mutants))

    def _run(self, mutant: Mutant) -> Verdict:
        begun = time.monotonic()
        code, report, output = self._pytest([mutant.test], mutant.guard, SECONDS_EACH)
        seconds = time.monotonic() - begun
        if report is None or code not in {0, 1}:
            return Verdict("broken", f"pytest ended with {code}: {output[-2000:]}", seconds)
        if report["broken"]:
            return Verdict("broken", report["broken"], seconds)
        if code == 0:
            return Verdict("survived", "the test passes without the guard", seconds)
        return Verdict("caught", next(iter(report["failures"].values()), ""), seconds)

    def _pytest(self, tests: Sequence[str], guard: str, seconds: float) -> tuple[int, dict[str, Any] | None, str]:
        with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".json") as report:
            options = [
                "-x",
                "-q",
                "--no-header",
                "-o",
                "addopts=",
                "--strict-markers",
                "--tb=short",
                "-p",
                "no:cacheprovider",
            ]
            command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.plugin", *options, *tests]
            environment = {**self._environment, "HORDE_MUTANT": guard, "HORDE_MUTANT_REPORT": report.name}
            try:
                done = subprocess.run(
                    command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
                )
            except subprocess.TimeoutExpired:
                return -1, None, f"not finished after {seconds:.0f} s"
            text = Path(report.name).read_text()
            return done.returncode, json.loads(text) if text else None, done.stdout + done.stderr


def _conclude(mutants: Sequence[Mutant], verdicts: Sequence[Verdict], seconds: float) -> int:
    failed = [(mutant, verdict) for mutant, verdict in zip(mutants, verdicts, strict=True) if verdict.word != "caught"]
    for mutant, verdict in failed:
        print(f"\n{verdict.word}: {mutant.guard}\n  {mutant.test}\n  {verdict.reason}")
    caught = len(mutants) - len(failed)
    print(f"\n{caught} of {len(mutants)} guards are held by their test; {seconds:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
