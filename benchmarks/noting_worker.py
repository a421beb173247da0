"""`horde-worker`, which notes each post of progress with output in it: `python -m benchmarks.noting_worker FILE run ...`.

A line of JSON for each: when it was handed to the HTTP client and answered (`time.monotonic()`), how many tokens were in it,
and job -> characters of its slot that are shown with it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from worker import cli
from worker.broker import BrokerClient


def main() -> None:
    """Run the command line behind the file's name."""
    with Path(sys.argv.pop(1)).open("a", encoding="utf-8") as notes:
        _note_posts(notes)
        cli.main()


def _note_posts(notes: TextIO) -> None:
    post = BrokerClient.post_progress

    def noted(self: BrokerClient, body: dict[str, Any], **options: float) -> dict[str, Any]:
        handed_at = time.monotonic()
        answer = post(self, body, **options)
        told = [job for job in body["jobs"] if job.get("token_ids")]
        if told:
            shown = {job["id"]: job["text_offset"] + len(job["text"]) for job in told}
            tokens = sum(len(job["token_ids"]) for job in told)
            note = {"handed_at": handed_at, "answered_at": time.monotonic(), "shown": shown, "tokens": tokens}
            notes.write(json.dumps(note) + "\n")
            notes.flush()
        return answer

    # The command makes its clients itself, and nothing else of them is to be different.
    BrokerClient.post_progress = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
