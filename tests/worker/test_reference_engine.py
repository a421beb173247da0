"""The reference engine on a tiny random model, against plain `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from tests.worker.tiny_model import EOS, make_tiny_model
from worker.engine.interface import (
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestRefusedError,
    Sampling,
)
from worker.engine.reference import ReferenceEngine
from worker.models.loaded import LoadedModel

GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=1.2, top_p=0.95)


class Run:
    """Runs requests to their end, side by side, and keeps what came out of each."""

    def __init__(self, engine: ReferenceEngine, *requests: GenerationRequest) -> None:
        self.token_ids: dict[str, list[int]] = {r.id: [] for r in requests}
        self.text: dict[str, str] = {r.id: "" for r in requests}
        self.end: dict[str, Event] = {}
        for request in requests:
            engine.add(request)
        while engine.running:
            for event in engine.step():
                self._take(event)

    def _take(self, event: Event) -> None:
        assert event.request_id not in self.end, "an event after the end"
        if isinstance(event, Delta):
            self.token_ids[event.request_id] += event.token_ids
            self.text[event.request_id] += event.text
        else:
            self.end[event.request_id] = event


def request(name: str = "a", prompt: str | tuple[int, ...] = "The capital", **settings) -> GenerationRequest:
    usual = {"id": name, "prompt": prompt, "max_new_tokens": 24, "seed": 5, "sampling": GREEDY}
    return GenerationRequest(**{**usual, **settings})


def engine_for(tiny: LoadedModel, max_batch: int = 8, eos: tuple[int, ...] = (EOS,)) -> ReferenceEngine:
    loaded = LoadedModel(tiny.model, tiny.tokenizer, tiny.context_length, eos)
    return ReferenceEngine(loaded, max_batch=max_batch)


def generated(tiny: LoadedModel, prompt: str, count: int) -> list[int]:
    """What one plain greedy call of `generate` makes of it."""
    ids = torch.tensor([tiny.tokenizer(prompt).input_ids])
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=EOS, pad_token_id=0)
    whole = tiny.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return whole[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prompt", ["The capital", "x", "a much longer prompt, with 42 numbers and ümläüts 😀"])
def test_greedy_tokens_are_those_of_one_plain_generate_call(tiny, prompt):
    run = Run(engine_for(tiny), request(prompt=prompt))
    assert run.token_ids["a"] == generated(tiny, prompt, 24)
    assert run.text["a"] == tiny.tokenizer.decode(run.token_ids["a"], skip_special_tokens=True)
    assert run.end["a"] == Finished("a", FinishReason.LENGTH, len(tiny.tokenizer(prompt).input_ids), 24)


def test_a_seed_gives_the_same_text_alone_among_neighbours_and_whatever_came_before(tiny):
    alone = Run(engine_for(tiny), request("a", sampling=WARM)).token_ids["a"]
    engine = engine_for(tiny)
    crowd = [request(f"n{i}", prompt="noise " * i, seed=i, sampling=WARM, max_new_tokens=5 + i) for i in range(6)]
    torch.manual_seed(99)
    assert Run(engine, *crowd[:3], request("a", sampling=WARM), *crowd[3:]).token_ids["a"] == alone
    assert Run(engine, request("again", sampling=WARM)).token_ids["again"] == alone


def test_other_seeds_give_other_texts(tiny):
    run = Run(engine_for(tiny), *(request(str(seed), seed=seed, sampling=WARM) for seed in range(4)))
    assert len({tuple(ids) for ids in run.token_ids.values()}) == 4


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(tiny):
    whole = Run(engine_for(tiny), request()).text["a"]
    stop = whole[6:9]
    assert len(stop) == 3
    run = Run(engine_for(tiny), request(stop=("never seen", stop)))
    assert run.text["a"] == whole[: whole.index(stop)]
    end = run.end["a"]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_string) == (FinishReason.STOP, stop)
    assert end.completion_tokens == len(run.token_ids["a"]) < 24


def test_a_stop_string_in_the_prompt_does_not_count(tiny):
    whole = Run(engine_for(tiny), request(prompt="### end")).text["a"]
    assert Run(engine_for(tiny), request(prompt="### end", stop=("end",))).text["a"] == whole


def test_an_end_token_ends_the_text_and_is_no_part_of_it(tiny):
    tokens = generated(tiny, "The capital", 24)
    end_token = tokens[10]
    first = tokens.index(end_token)
    run = Run(engine_for(tiny, eos=(end_token,)), request())
    assert run.token_ids["a"] == tokens[:first]
    assert run.end["a"] == Finished("a", FinishReason.STOP, 11, first)


def test_a_banned_end_token_lets_the_text_go_on(tiny):
    end_token = generated(tiny, "The capital", 24)[3]
    sampling = Sampling(temperature=0.0, ban_eos=True)
    run = Run(engine_for(tiny, eos=(end_token,)), request(sampling=sampling))
    assert len(run.token_ids["a"]) == 24
    assert end_token not in run.token_ids["a"]


def test_an_end_token_in_the_prompt_does_not_end_the_text(tiny):
    ids = tuple(tiny.tokenizer("a").input_ids)
    assert len(Run(engine_for(tiny), request(prompt=(EOS, *ids, EOS, *ids))).token_ids["a"]) == 24


def test_a_long_prompt_loses_its_beginning(tiny):
    long = "0123456789" * 10
    cut = Run(engine_for(tiny), request(prompt=long, max_context=50)).token_ids["a"]
    assert cut == Run(engine_for(tiny), request(prompt=long[-26:])).token_ids["a"]
    beyond_the_model = Run(engine_for(tiny), request(prompt=long * 10, max_context=100_000))
    assert beyond_the_model.token_ids["a"] == generated(tiny, (long * 10)[-(512 - 24) :], 24)


def test_an_answer_as_long_as_the_context_still_sees_a_token_of_its_prompt(tiny):
    run = Run(engine_for(tiny), request(prompt="abcdef", max_new_tokens=80, max_context=80))
    assert run.end["a"] == Finished("a", FinishReason.LENGTH, 1, 79)


@pytest.mark.parametrize(("tokens", "fits"), [(511, True), (512, True), (513, False)])
def test_without_max_context_what_does_not_fit_the_model_is_refused(tiny, tokens, fits):
    engine = engine_for(tiny)
    prompt = tuple([65] * (tokens - 1))
    if fits:
        assert len(Run(engine, request(prompt=prompt, max_new_tokens=1)).token_ids["a"]) == 1
        return
    with pytest.raises(RequestRefusedError) as refused:
        engine.add(request(prompt=prompt, max_new_tokens=1))
    assert refused.value.code == "context_length_exceeded"
    assert engine.running == 0


@pytest.mark.parametrize(
    "bad",
    [{"prompt": (5, 10**9)}, {"prompt": (-1,)}, {"prompt": "\ud800"}, {"max_new_tokens": 0}],
    ids=["id beyond the vocabulary", "negative id", "lone surrogate", "no tokens wanted"],
)
def test_a_request_that_can_never_run_is_refused_and_leaves_no_trace(tiny, bad):
    engine = engine_for(tiny)
    with pytest.raises(RequestRefusedError) as refused:
        engine.add(request(**bad))
    assert refused.value.code == "invalid_request"
    assert engine.running == 0


def test_an_empty_prompt_begins_from_the_end_token(tiny):
    empty = Run(engine_for(tiny), request(prompt=""))
    assert empty.token_ids["a"] == Run(engine_for(tiny), request(prompt=(EOS,))).token_ids["a"]


def test_a_poisoned_request_fails_alone(tiny):
    """Token 7 turns the model's output into NaN, for whoever has it in the prompt."""
    poison = 7
    loaded = make_tiny_model()

    def poisoned(module, args, kwargs, output):
        if poison in kwargs["input_ids"].flatten().tolist():
            output.logits = output.logits * float("nan")
        return output

    loaded.model.register_forward_hook(poisoned, with_kwargs=True)
    engine = ReferenceEngine(loaded, max_batch=3)
    good = [request("a"), request("b", prompt="other", sampling=WARM)]
    run = Run(engine, good[0], request("poison", prompt=(60, poison)), good[1])
    failure = run.end["poison"]
    assert isinstance(failure, Failed)
    assert "not finite" in failure.message
    assert run.token_ids["a"] == Run(engine_for(tiny), good[0]).token_ids["a"]
    assert run.token_ids["b"] == Run(engine_for(tiny), good[1]).token_ids["b"]


def test_an_abort_frees_a_place_and_is_harmless_where_nothing_runs(tiny):
    engine = engine_for(tiny, max_batch=1)
    engine.add(request("a"))
    assert engine.capacity == 0
    with pytest.raises(ValueError, match="room for 0"):
        engine.add(request("b"))
    engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never heard of")
    assert engine.capacity == 1
    assert engine.step() == []
    assert len(Run(engine, request("b")).token_ids["b"]) == 24


def test_an_id_cannot_be_used_twice_at_a_time(tiny):
    engine = engine_for(tiny)
    engine.add(request("a"))
    with pytest.raises(ValueError, match="running already"):
        engine.add(request("a"))


def test_defaults_that_a_model_brings_do_not_change_a_request():
    loaded = make_tiny_model()
    loaded.model.generation_config.repetition_penalty = 5.0
    loaded.model.generation_config.min_new_tokens = 3
    run = Run(ReferenceEngine(loaded), request())
    assert run.token_ids["a"] == generated(make_tiny_model(), "The capital", 24)
