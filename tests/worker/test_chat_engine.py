"""A chat on the real engine with a tiny model: what a broker sees of it is what the engine alone writes, from any prefix on."""

from __future__ import annotations

import dataclasses

import pytest

from tests.worker.started_worker import Started
from tests.worker.tiny_model import make_tiny_model
from worker.chat_template import render
from worker.engine.interface import Delta, GenerationRequest, RequestRefusedError, Sampling, TokenLogprob
from worker.engine.paged import PagedEngine
from worker.models.loaded import LoadedModel

CACHE = 1 << 21
MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@pytest.fixture
def engine() -> PagedEngine:
    return PagedEngine(make_tiny_model(), max_batch=4, cache_memory=CACHE)


@pytest.fixture
def alone(engine):
    """Ids, text and logprobs of each token that the engine gives to one request by itself."""

    def run(request: GenerationRequest) -> tuple[list[int], list[str], list[TokenLogprob]]:
        engine.add(request)
        events = []
        while engine.running:
            events += engine.step()
        deltas = [event for event in events if isinstance(event, Delta)]
        return (
            [i for delta in deltas for i in delta.token_ids],
            [delta.text for delta in deltas],
            [entry for delta in deltas for entry in delta.logprobs],
        )

    return run


def request(prompt: tuple[int, ...]) -> GenerationRequest:
    return GenerationRequest("alone", prompt, 40, seed=7, logprobs=2, sampling=Sampling(temperature=0.8))


def test_chats_side_by_side_come_out_as_alone_and_as_they_were_posted(broker, engine, alone):
    prompt = tuple(b"<user>Tell me.\n<bot>")
    ids, pieces, logprobs = alone(request(prompt))
    entries = [
        [e.token_id, pytest.approx(e.logprob, abs=1e-6), [[i, pytest.approx(p, abs=1e-6)] for i, p in e.top]]
        for e in logprobs
    ]
    worker = Started(broker, chat=True, engine=engine, max_batch=4, stream=0.005)
    try:
        payload = {
            "prompt_token_ids": list(prompt), "max_new_tokens": 40, "logprobs": 2, "sampling": {"temperature": 0.8},
            "seed": 7,
        }  # fmt: skip
        broker.give_chat("whole", **payload)
        # As a second worker gets it, when the first one was lost after nine tokens.
        broker.give_chat("continued", **payload)
        broker.jobs[-1].update(prefix_token_ids=ids[:9], prefix_text="".join(pieces[:9]))
        broker.give("text", "Something else", max_length=30)
        broker.wait_until(lambda: len(broker.settled) == 3)
    finally:
        worker.close()
    for name, begun in (("whole", 0), ("continued", 9)):
        result = broker.settled[name]
        assert result["token_ids"] == ids
        assert result["generation"] == "".join(pieces)
        assert result["logprobs"] == entries[begun:]
        assert result["usage"]["completion_tokens"] == 40
        for held in broker.seen[name]:
            there = len(held.token_ids)
            assert held.token_ids == ids[:there]
            assert held.text == "".join(pieces[:there])
            assert held.logprobs == entries[begun:there]
    assert len(broker.seen["whole"]) > 2
    engine.check()
    assert engine.running == 0


def with_template(loaded: LoadedModel, template: str | None) -> LoadedModel:
    tokenizer = loaded.tokenizer.__class__(tokenizer_object=loaded.tokenizer.backend_tokenizer, eos_token="<end>")
    tokenizer.chat_template = template
    return dataclasses.replace(loaded, tokenizer=tokenizer)


def test_messages_are_rendered_with_the_models_own_template(tiny):
    loaded = with_template(tiny, TEMPLATE)
    ids = render(loaded.tokenizer, MESSAGES)
    assert loaded.tokenizer.decode(list(ids)) == "<user>Tell me of the sea.\n<bot>"


def test_special_tokens_are_left_to_the_template(tiny):
    from tokenizers.processors import TemplateProcessing

    loaded = with_template(tiny, TEMPLATE)
    loaded.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", loaded.tokenizer.eos_token_id)]
    )
    try:
        assert loaded.tokenizer("a").input_ids[0] == loaded.tokenizer.eos_token_id
        assert loaded.tokenizer.eos_token_id not in render(loaded.tokenizer, MESSAGES)
    finally:
        loaded.tokenizer.backend_tokenizer.post_processor = None


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no: ' + messages[0].content) }}", "{{ 1 / 0 }}", "{%"])
def test_what_a_template_does_not_take_is_refused_without_quoting_it(tiny, template):
    loaded = with_template(tiny, template)
    with pytest.raises(RequestRefusedError) as refused:
        render(loaded.tokenizer, MESSAGES)
    assert refused.value.code == "invalid_request"
    assert "sea" not in str(refused.value)
