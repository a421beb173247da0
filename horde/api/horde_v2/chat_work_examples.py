"""Examples of what workers and the broker say to each other about chats, for the API's description."""

from __future__ import annotations

from typing import Any

_MODEL = "smollm2-135m-instruct"
_MODEL_REVISION = "5f2a9d0e4c1b"
_TOKENIZER_REVISION = "0c6f0f2a61c8a2ad1d0e7f6f5b7d4b2f4f1c4c0f7e6b8a9d3e2f1a0b9c8d7e6f"
_JOB = "5b0c2f0a-3d1e-4c57-9a44-0d8a3c5f7b21"
_PROMPT = "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n"

POP: dict[str, Any] = {
    "name": "my worker",
    "kinds": ["text", "chat"],
    "models": [_MODEL],
    "manifests": {
        _MODEL: {
            "model_revision": _MODEL_REVISION,
            "tokenizer_revision": _TOKENIZER_REVISION,
            "context_length": 8192,
            "block_size": 16,
            "blocks": 2048,
            "kv_bytes_per_token": 23040,
            "capabilities": [],
        }
    },
    "max_length": 2048,
    "max_context_length": 8192,
    "threads": 8,
    "slots": 4,
    "progress": True,
    # Whoever tries this out gets an answer at once.
    "wait": 0,
}

_PAYLOAD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "prompt": _PROMPT,
    "prompt_token_ids": [1, 4093, 198, 30959, 33662, 30, 2, 198, 1, 520, 9531, 198],
    "prompt_tokens": 12,
    "estimated": False,
    "max_new_tokens": 64,
    "stop": [],
    "logprobs": None,
    "sampling": {"temperature": 0.7},
    "tools": None,
    "response_format": None,
}

POPPED: dict[str, Any] = {
    "id": _JOB,
    "ids": [_JOB],
    "model": _MODEL,
    "ttl": 60,
    "payload": _PAYLOAD,
    "softprompt": None,
    "messages": [],
    "extra_source_images": None,
    "skipped": {},
    "slot": 0,
    "seed": 1337,
    "jobs": [
        {
            "id": _JOB,
            "kind": "chat",
            "model": _MODEL,
            "model_revision": _MODEL_REVISION,
            "tokenizer_revision": _TOKENIZER_REVISION,
            "slot": 0,
            "seed": 1337,
            "ttl": 60,
            "payload": _PAYLOAD,
            "attached": True,
            "deadline": None,
            "cache_salt": "9f86d081884c7d659a2feaa0c55ad015",
            "prefix_token_ids": [],
            "prefix_text": "",
        }
    ],
}

SUBMIT: dict[str, Any] = {
    "id": _JOB,
    "state": "ok",
    "generation": "Hello!",
    "token_ids": [19556, 17],
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 12, "completion_tokens": 2, "cached_tokens": 0},
}

SUBMITTED: dict[str, Any] = {"reward": 0.12}
