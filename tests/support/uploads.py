"""Uploads of tokenizers as their publishers make them, and what has been stored."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import requests
from tokenizers import Tokenizer, models

from tests.support import tiny_tokenizer
from tests.support.live_broker import LiveBroker

JSON = {"Content-Type": "application/json"}
TINY = tiny_tokenizer.upload()
REVISION = tiny_tokenizer.revision_of(TINY)
MEBIBYTE = 1 << 20


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def put(
    broker: LiveBroker, body: Any, key: str | None, *, revision: str | None = None, **options: Any
) -> requests.Response:
    data = body if isinstance(body, bytes) or hasattr(body, "__next__") else canonical(body)
    revision = revision or (hashlib.sha256(data).hexdigest() if isinstance(data, bytes) else "0" * 64)
    return broker.call(
        "PUT", f"tokenizers/{revision}", key=key, data=data, headers=options.pop("headers", JSON), **options
    )


def stored(broker: LiveBroker) -> int:
    with broker.context.database.autocommit() as tx:
        return int(tx.execute("SELECT count(*) FROM tokenizers").scalar_one())


def large(size: int) -> dict[str, Any]:
    """A tokenizer of about that many bytes."""
    words = {f"{number:06}" + "x" * 90: number for number in range(size // 108)}
    raw = Tokenizer(models.WordLevel({"a": len(words), **words}, unk_token="a"))
    return {"tokenizer": json.loads(raw.to_str()), "chat_template": None, "special_tokens": {}}
