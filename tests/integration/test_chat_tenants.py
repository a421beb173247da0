"""What a worker has computed of one user's prompt serves that user again, and nobody else: neither in content nor in time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from horde.admission.keys import ANONYMOUS_KEY
from tests.support import engine_worker
from tests.support.chat import COMPLETIONS, ChatBroker, chat_broker
from tests.support.concurrency import eventually
from tests.support.engine_worker import EngineWorker
from tests.support.postgres import Server

BLOCK = 16
PROMPT = "The sea is wide, and what lives in it is seen by few. " * 3
PATIENCE = 30.0


@pytest.fixture(scope="module")
def chat(server: Server) -> Iterator[ChatBroker]:
    url = server.create()
    with chat_broker(url) as broker:
        yield broker
        broker.assert_sound()
    server.drop(url)


@pytest.fixture(scope="module")
def worker(chat: ChatBroker) -> Iterator[EngineWorker]:
    """The only one, so that whoever asks comes to the same cache."""
    with EngineWorker(chat.live.url, chat.owner.api_key) as found:
        yield found


def cached(chat: ChatBroker, key: str, prompt: str = PROMPT, **body: Any) -> int:
    """Tokens of this user's prompt that a streamed answer says were computed already; all but a few, or none."""
    asked = {"model": engine_worker.MODEL, "max_tokens": 4, "stream_options": {"include_usage": True}, **body}
    told = chat.read(chat.open(prompt, key=key, **asked))
    assert told.usage is not None, told.error
    found = int(told.usage["prompt_tokens_details"]["cached_tokens"])
    whole = (told.usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert found in {0, whole}
    return found


def cached_of_a_whole_answer(chat: ChatBroker, key: str) -> int:
    """The same of an answer that is not streamed."""
    asked = {"model": engine_worker.MODEL, "max_tokens": 4, "stream": False}
    answer = json.loads(chat.open(PROMPT, key=key, **asked).text())
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_prompt_is_found_again_for_the_same_user_only(chat: ChatBroker, worker: EngineWorker) -> None:
    first, second = chat.live.user().api_key, chat.live.user().api_key
    hits = worker.figures.prefix_hits
    assert cached(chat, first) == 0
    assert cached(chat, second) == 0
    assert worker.figures.prefix_hits == hits, "nor was any of it saved unsaid, as could be told from the time it took"
    assert cached(chat, first) > 0
    assert cached(chat, second) > 0
    third = chat.live.user().api_key
    assert cached_of_a_whole_answer(chat, third) == 0
    assert cached_of_a_whole_answer(chat, third) > 0


def test_strangers_without_a_key_of_their_own_share_nothing(chat: ChatBroker, worker: EngineWorker) -> None:
    key, hits = chat.live.user().api_key, worker.figures.prefix_hits
    assert cached(chat, key) == 0
    assert [cached(chat, ANONYMOUS_KEY) for _ in range(3)] == [0, 0, 0]
    assert worker.figures.prefix_hits == hits
    assert cached(chat, key) > 0


def test_a_longer_chat_of_the_same_user_goes_on_from_what_was_computed(chat: ChatBroker, worker: EngineWorker) -> None:
    asked = {"model": engine_worker.MODEL, "max_tokens": 4, "stream_options": {"include_usage": True}}
    messages = [{"role": "user", "content": PROMPT}]
    key = chat.live.user().api_key
    told = chat.read(chat.open(messages, key=key, **asked))
    messages += [{"role": "assistant", "content": told.text}, {"role": "user", "content": "And the shore?"}]
    longer = chat.read(chat.open(messages, key=key, **asked)).usage
    strangers = chat.read(chat.open(messages, key=chat.live.user().api_key, **asked)).usage
    assert longer is not None
    assert strangers is not None
    assert longer["prompt_tokens_details"]["cached_tokens"] >= len(PROMPT) // BLOCK * BLOCK
    assert strangers["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_chat_that_is_polled_is_of_the_same_tenant_as_a_stream(chat: ChatBroker, worker: EngineWorker) -> None:
    first, second = chat.live.user().api_key, chat.live.user().api_key
    assert cached(chat, first) == 0
    messages = [{"role": "user", "content": PROMPT}]
    asked = {"model": engine_worker.MODEL, "messages": messages, "params": {"max_tokens": 4}}
    found = []
    for key in (second, first):
        answer = chat.live.call("POST", "generate/chat/async", key=key, json=asked)
        assert answer.status_code == 202, answer.text
        request = answer.json()["id"]
        eventually(lambda request=request: chat.chat_status(request)["done"], "it is answered", within=PATIENCE)
        found.append(chat.chat_status(request)["generations"][0]["usage"]["cached_tokens"])
    assert found[0] == 0
    assert found[1] > 0


def test_all_doors_lead_a_user_to_the_same_cache_and_others_past_it(chat: ChatBroker, worker: EngineWorker) -> None:
    first, second = chat.live.user().api_key, chat.live.user().api_key
    text = {"prompt": PROMPT, "models": [engine_worker.MODEL], "params": {"max_length": 16, "max_context_length": 512}}
    for key in (first, second):
        asked = chat.live.call("POST", "generate/text/async", key=key, json=text)
        assert asked.status_code == 202, asked.text
        request = asked.json()["id"]
        eventually(lambda request=request: chat.live.status(request)["done"], "the text is there", within=PATIENCE)
        if key == first:
            assert cached(chat, second, path=COMPLETIONS) == 0
            assert cached(chat, first, path=COMPLETIONS) > 0
