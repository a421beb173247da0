"""Generated requests for every described route: the description holds, and nothing breaks the broker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.live_broker import live_broker

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"
# Each route is of exactly one of these.
PARTS = {
    "text": "^/api/v2/generate/(text|progress)",
    "chat": "^/api/v2/generate/(?!text|progress)",
    "others": "^/api/v2/(?!generate/)",
    "openai": "^/v1/",
}


@pytest.mark.parametrize("part", PARTS)
def test_whatever_is_sent_is_answered_as_described(database_url: str, part: str) -> None:
    with live_broker(database_url) as broker:
        described = broker.session.get(f"{broker.url}/api/openapi.json", timeout=30).json()["paths"]
        assert all(sum(bool(re.search(routes, path)) for routes in PARTS.values()) == 1 for path in described)
        operations = sum(len(methods) for path, methods in described.items() if re.search(PARTS[part], path))
        assert operations
        key = broker.user().api_key
        run = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"),
                "run",
                f"{broker.url}/api/openapi.json",
                *("--url", broker.url),
                *("-H", f"Authorization: Bearer {key}" if part == "openai" else f"apikey: {key}"),
                *("--include-path-regex", PARTS[part]),
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
        assert f"{operations} passed" in run.stdout, run.stdout[-4000:]
        assert broker.unexpected_errors() == 0
