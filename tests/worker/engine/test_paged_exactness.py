"""Greedy in fp32, the paged engine chooses the tokens that the plain model chooses, however the work is cut up.

What the plain model chooses is told by one forward pass of transformers' own code over prompt and output: each token
must have been the clear favourite after those before it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.worker.engine.paged_scenes import (
    Run,
    assert_greedy,
    fresh,
    make_engine,
    one_thread,
    plain_logits,
    preempt,
    pristine,
    request,
    run,
)
from worker.engine.execution.linear import choose_path
from worker.engine.interface import GenerationRequest
from worker.engine.kernels.bindings import load_kernels
from worker.engine.paged import PagedEngine
from worker.models.demo import DEMO_MODEL
from worker.models.load import load, resolve
from worker.models.loaded import LoadedModel

BLOCK_SIZES = (1, 4, 16, 32)
CHUNKS = (1, 7, 64)
BACKENDS = ("gather",) if load_kernels() is None else ("kernels", "gather")
AROUND_BLOCKS = (15, 16, 17, 31, 32, 33)
NEW_TOKENS = 8

TEXT = tuple(b"It was a bright cold day in April, and the clocks were striking thirteen. " * 2)
# Some begin like others; some do not.
PROMPTS = {
    **{f"first {n}": TEXT[:n] for n in (1, 7, 8, 16, 33, 40)},
    **{f"other {n}": TEXT[20 : 20 + n] for n in (2, 15, 17, 31, 32)},
    "numbers": tuple(b"3.14159 26535 89793"),
    "bytes": tuple(range(250, 256)) * 3,
}


@pytest.fixture
def thread() -> Iterator[None]:
    with one_thread():
        yield


tiny = pytest.mark.usefixtures("thread")


def requests(names: list[str], **settings) -> list[GenerationRequest]:
    return [request(name, PROMPTS[name], max_new_tokens=NEW_TOKENS, **settings) for name in names]


def shuffled(seed: int) -> list[str]:
    names = list(PROMPTS)
    random.Random(seed).shuffle(names)
    return names


@pytest.fixture(scope="module")
def proven() -> dict[str, list[int]]:
    """The output for each of the prompts, of a whole engine each, held against the plain model."""
    with one_thread():
        found = {name: run(make_engine(), *requests([name])).tokens(name) for name in PROMPTS}
        assert_greedy(pristine(), [(PROMPTS[name], found[name]) for name in PROMPTS])
    assert all(len(text) == NEW_TOKENS for text in found.values())
    return found


def outputs(done: Run) -> dict[str, list[int]]:
    assert not done.failures
    return {name: text.token_ids for (name, _), text in done.texts.items()}


@tiny
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_any_block_size_with_any_chunk_gives_the_same_tokens(proven, block_size, chunk):
    engine = make_engine(block_size=block_size, chunk_limit=chunk)
    assert outputs(run(engine, *requests(shuffled(block_size * chunk)))) == proven
    again = run(engine, *requests(shuffled(block_size + chunk)))
    assert outputs(again) == proven
    # Of a prompt that has come before, all full blocks are found, but its last token is computed.
    assert again.cached("first 40") == 39 // block_size * block_size


@pytest.fixture
def kernels_off(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    choose_path.cache_clear()
    yield
    choose_path.cache_clear()


@tiny
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 64), (4, 7), (16, 1), (32, None)])
def test_without_kernels_the_tokens_are_the_same(proven, kernels_off, block_size, chunk):
    engine = make_engine(block_size=block_size, chunk_limit=chunk, backend="auto")
    assert "attention by gather" in engine.description
    assert outputs(run(engine, *requests(shuffled(3)))) == proven


@tiny
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_asked_for_by_name_is_used(proven, backend):
    engine = make_engine(backend=backend)
    names = {"kernels": "C++ kernels", "gather": "gather"}
    assert f"attention by {names[backend]}" in engine.description
    assert outputs(run(engine, *requests(shuffled(4)))) == proven


@tiny
@pytest.mark.parametrize("max_batch", [1, 2, 32])
def test_the_number_of_neighbours_changes_nothing(proven, max_batch):
    assert outputs(run(make_engine(max_batch=max_batch), *requests(shuffled(max_batch)))) == proven


@tiny
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("block_size", "tokens"), [(1, 64), (4, 64), (16, 80), (32, 160)])
def test_a_cache_that_is_too_small_for_those_it_lets_in_gives_the_same_tokens(proven, block_size, tokens, backend):
    engine = make_engine(context_length=64, tokens=tokens, block_size=block_size, backend=backend)
    names = sorted((name for name in PROMPTS if len(PROMPTS[name]) > 6), key=lambda name: len(PROMPTS[name]))
    done = run(engine, *(request(name, PROMPTS[name], max_new_tokens=24) for name in names))
    assert engine.statistics().preemptions > 0
    assert {name: text[:NEW_TOKENS] for name, text in outputs(done).items()} == {name: proven[name] for name in names}
    assert_greedy(pristine(64), [(PROMPTS[name], done.tokens(name)) for name in names])


@tiny
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_everyone_preempted_after_every_step_gives_the_same_tokens(proven, block_size, prefix_caching):
    engine = make_engine(block_size=block_size, prefix_caching=prefix_caching, max_batch=16)
    done = Run(engine, *requests(shuffled(block_size))).drain(after_each=lambda: preempt(engine))
    assert engine.statistics().preemptions > len(PROMPTS) * (NEW_TOKENS - 1) / 2
    assert outputs(done) == proven


@tiny
@pytest.mark.parametrize("chunk", [1, 7, 8])
def test_the_first_token_comes_with_the_last_chunk_and_not_before(chunk):
    prompts = {str(n): tuple(range(n, 2 * n)) for n in (1, 7, 8, 9, 16, 17, 100)}
    alike = run(make_engine(), *(request(name, prompt) for name, prompt in prompts.items()))
    done = run(make_engine(chunk_limit=chunk), *(request(name, prompt) for name, prompt in prompts.items()))
    assert outputs(done) == outputs(alike)
    for name, prompt in prompts.items():
        # Beside texts that are decoded, a prompt's share of a step can be smaller than its chunk.
        assert done.first_token[name, 0] >= -(-len(prompt) // chunk)
    alone = run(make_engine(chunk_limit=chunk), request("100", prompts["100"]))
    assert alone.first_token["100", 0] == -(-100 // chunk)


@tiny
@pytest.mark.parametrize("length", AROUND_BLOCKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prompt_that_has_been_computed_before_gives_the_tokens_of_a_cold_engine(length, backend):
    prompt = TEXT[:length]
    engine = make_engine(backend=backend)
    cold = run(engine, request("cold", prompt))
    assert_greedy(pristine(), [(prompt, cold.tokens("cold"))])
    assert cold.cached("cold") == 0
    for name in ("again", "and again"):
        warm = run(engine, request(name, prompt))
        assert warm.tokens(name) == cold.tokens("cold")
        assert warm.cached(name) == (length - 1) // 16 * 16
    twice = run(engine, request("twin", prompt), request("other twin", prompt))
    assert twice.tokens("twin") == twice.tokens("other twin") == cold.tokens("cold")
    together = run(make_engine(backend=backend), request("twin", prompt), request("other twin", prompt))
    assert together.tokens("twin") == together.tokens("other twin") == cold.tokens("cold")


@tiny
@pytest.mark.parametrize("length", AROUND_BLOCKS)
def test_a_prompt_that_goes_on_from_an_earlier_answer_finds_it_and_leaves_it_whole(length):
    """The next turn of a talk, while the blocks of the first one are still in use by a twin of it."""
    engine = make_engine()
    first = run(engine, request("first", TEXT[:length], max_new_tokens=20))
    beside = Run(engine, request("twin", TEXT[:length], max_new_tokens=40))
    beside.step()
    prompt = (*TEXT[:length], *first.tokens("first"), 65, 66)
    beside.add(request("second", prompt)).drain()
    assert beside.cached("second") == (length + 19) // 16 * 16
    assert_greedy(pristine(), [(prompt, beside.tokens("second")), (TEXT[:length], beside.tokens("twin"))])


PASSAGES = (
    "The old lighthouse keeper climbed the winding stairs each evening, counting the steps as his father had done. ",
    "def area(radius: float) -> float:\n    if radius < 0:\n        raise ValueError(radius)\n    return 3.14159 * radius**2\n\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144; 2026-11-30 14:45:45; -273.15; 1e-9; 0xff; 1/3; ",
    "Well 😀 done 🎉🎉, see you 👩‍👩‍👧 at the 🏖️ tomorrow 🚀🚀🚀! ",
    "山の上に古い家があります。春になると桜が咲きます。今天天气很好，我们去公园散步吧。",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. L'été dernier, où êtes-vous allé ? ",
    '{"name": "horde", "ports": [7001, 7002], "nested": {"yes": true, "none": null}}\n',
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)
PASSAGE_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 120, 5, 64, 9, 48, 12, 23)
# Of the logits of the first token that differs in bf16, as the fp32 model has them.
BF16_MARGIN = 0.5


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load(resolve(DEMO_MODEL), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def prompts(smollm2) -> dict[str, tuple[int, ...]]:
    """Sixty-four: each passage from several places on, in several lengths."""
    found = {}
    for number in range(64):
        ids = smollm2.tokenizer(PASSAGES[number % 8] * 12).input_ids[number // 8 * 3 :]
        length = PASSAGE_LENGTHS[(number + number // 8) % 16]
        found[str(number)] = tuple(ids[:length])
        assert len(found[str(number)]) == length
    assert len(set(found.values())) == 64
    return found


def ask(prompts: dict[str, tuple[int, ...]], names: list[str], **settings) -> list[GenerationRequest]:
    return [request(n, prompts[n], max_new_tokens=12, **settings) for n in names]


def smol_engine(loaded: LoadedModel, tokens: int = 4096, dtype=torch.float32, **options) -> PagedEngine:
    taken = fresh(loaded)
    taken.model.to(dtype)
    memory = tokens * 30 * 2 * 3 * 64 * dtype.itemsize
    return PagedEngine(taken, cache_memory=memory, **{"max_batch": 32, "step_seconds": 60.0, **options})


@pytest.fixture(scope="module")
def settled(smollm2, prompts) -> dict[str, list[int]]:
    """The sixty-four outputs, all together in shuffled order, held against the plain model, logits included."""
    names = list(prompts)
    random.Random(64).shuffle(names)
    done = run(smol_engine(smollm2), *ask(prompts, names, logprobs=3))
    # A text that is shorter has ended itself.
    whole = {
        name: (text if len(text) == 12 else [*text, smollm2.tokenizer.eos_token_id])
        for name, text in outputs(done).items()
    }
    logits = assert_greedy(smollm2, [(prompts[name], whole[name]) for name in names])
    for name, rows in zip(names, logits, strict=True):
        for row, told in zip(rows.log_softmax(-1), done.texts[name, 0].logprobs, strict=False):
            ids = [token for token, _ in told.top]
            values = torch.tensor([value for _, value in told.top])
            torch.testing.assert_close(values, row[ids], atol=2e-4, rtol=0)
    return outputs(done)


@pytest.mark.needs("model")
def test_sixty_four_texts_of_a_real_model_are_those_of_the_plain_one(settled, prompts):
    assert settled.keys() == prompts.keys()
    assert len({tuple(text) for text in settled.values()}) > 32


@pytest.mark.needs("model")
def test_alone_and_again_a_real_model_writes_the_same(settled, smollm2, prompts):
    engine = smol_engine(smollm2, chunk_limit=64)
    for name in list(prompts)[:60:7]:
        assert run(engine, *ask(prompts, [name])).tokens(name) == settled[name]
    again = list(prompts)[:60:7]
    assert outputs(run(engine, *ask(prompts, again))) == {name: settled[name] for name in again}


@pytest.mark.needs("model")
@pytest.mark.parametrize(("block_size", "chunk"), [(1, 7), (4, 64), (32, 1)])
def test_a_real_model_under_constant_preemption_writes_the_same(settled, smollm2, prompts, block_size, chunk):
    # Chunks of one token take many steps.
    names = [name for name, prompt in prompts.items() if len(prompt) <= (24 if chunk == 1 else 48)][::3]
    engine = smol_engine(smollm2, tokens=256, block_size=block_size, chunk_limit=chunk, max_batch=16)
    done = Run(engine, *ask(prompts, names))

    def rob() -> None:
        if done.steps % 6 == 0:
            preempt(engine, leave=2)

    done.drain(after_each=rob)
    assert engine.statistics().preemptions > 3
    assert outputs(done) == {name: settled[name] for name in names}


@pytest.mark.needs("model")
def test_in_bf16_a_text_departs_only_where_two_tokens_are_nearly_equal(settled, smollm2, prompts):
    names = list(prompts)[::2]
    done = run(smol_engine(smollm2, dtype=torch.bfloat16), *ask(prompts, names))
    same = 0
    for name in names:
        ours, exact = done.tokens(name), settled[name]
        at = next((i for i, (a, b) in enumerate(zip(ours, exact, strict=False)) if a != b), None)
        if at is None:
            same += 1
            continue
        row = plain_logits(smollm2, [[*prompts[name], *exact[:at]]])[0][-1]
        assert row[exact[at]] - row[ours[at]] < BF16_MARGIN
    assert same > len(names) / 2
