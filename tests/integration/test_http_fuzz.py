"""Generated requests for every described route: the description holds, and nothing breaks the broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.live_broker import live_broker

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"


def test_whatever_is_sent_is_answered_as_described(database_url: str) -> None:
    with live_broker(database_url) as broker:
        run = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"{broker.url}/api/openapi.json",
                *("--url", broker.url),
                *("-H", f"apikey: {broker.user().api_key}"),
                *("--checks", CHECKS),
                *("--max-examples", "20"),
                "--continue-on-failure",
                "--no-color",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
        assert "14 passed" in run.stdout, run.stdout[-4000:]
        assert broker.unexpected_errors() == 0
