"""A step on a GPU without a GPU: what the host waits for, what it may overwrite, and that the tokens are the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import DeviceTensor, FakeCuda
from families import make_model
from test_runner import Drunkard, Life, prompts
from torch.utils._python_dispatch import _disable_current_modes

from walkvllm import attention, input_batch, model_runner, sampler, scheduler
from walkvllm.config import EngineArgs
from walkvllm.engine_core import EngineCore
from walkvllm.input_batch import CachedRequestState, InputBatch, flatten
from walkvllm.kernels import HAS_TRITON
from walkvllm.messages import EngineCoreRequest, SchedulerOutput
from walkvllm.model_runner import AsyncModelRunnerOutput, ModelRunner
from walkvllm.models import CausalLM
from walkvllm.sampling_metadata import SamplingColumns
from walkvllm.sampling_params import SamplingParams
from walkvllm.show import example
from walkvllm.weights import load_weights

torch.set_num_threads(1)
interpreted = pytest.mark.skipif(
    not HAS_TRITON or torch.cuda.is_available() or not attention.interpreting(), reason="needs Triton's interpreter"
)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOOKING, SAMPLING = "update waits for tokens", "sample_ahead waits for tokens"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as fake:
        yield fake
        assert not fake.unknown, "is that asynchronous on a GPU? fake_cuda.py does not say"


def args(model: Path, **changes: Any) -> EngineArgs:
    "Settings for a small engine. A GPU would have graphs, which need a GPU."
    settings: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "block_size": 8, "num_gpu_blocks_override": 200,
        "max_num_seqs": 12, "max_num_batched_tokens": 40, "max_model_len": 80, "enforce_eager": True,
        "attention_backend": "triton" if FakeCuda.now else "torch", "async_scheduling": True,
    }  # fmt: skip
    return EngineArgs(str(model), **settings | changes)


def twin(runner: ModelRunner) -> None:
    "Lets page 09's decoder run on the device's numbers: it is quicker than Triton's interpreter, and as right."
    config, cuda = runner.config.model_config, FakeCuda.now
    decoder = CausalLM(config.spec, load_weights(config.model, config.spec, torch.float32, "cpu"))
    backend, caches = attention.TorchBackend(), [kv.raw for kv in runner.kv_caches]  # type: ignore[attr-defined]

    def forward(flat: input_batch.FlatBatch) -> torch.Tensor:
        assert cuda is not None
        cuda.launched += 1
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        raw = {name: getattr(flat.meta, name).raw for name in names}
        ids, positions = flat.input_ids.raw, flat.positions.raw  # type: ignore[attr-defined]
        with _disable_current_modes():
            return DeviceTensor(decoder.forward(ids, positions, caches, replace(flat.meta, **raw), backend))

    runner.forward = forward  # type: ignore[method-assign]


def request(name: str, prompt: list[int], **wish: Any) -> EngineCoreRequest:
    named = {k: wish.pop(k) for k in ("all_stop_token_ids", "bad_words_token_ids", "eos_token_id") if k in wish}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | wish)
    for key, value in named.items():
        setattr(params, key, value)
    return EngineCoreRequest(name, prompt, params, 0.0)


# ---- what the host waits for ----

WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "seed": {"temperature": 0.8, "seed": 5},
    "top-k": {"temperature": 0.8, "top_k": 7},
    "top-k, top-p, min-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "named tokens": {
        "logit_bias": {5: 1.0}, "allowed_token_ids": [4, 5, 6, 9], "min_tokens": 6, "all_stop_token_ids": [3],
    },
    "logprobs": {"logprobs": 3},
}
READING: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
    "bad words": {"bad_words_token_ids": [[5, 6], [7]]},
}


def waits_by_step(core: EngineCore, cuda: FakeCuda, rows: int, wish: dict[str, Any], tokens: int) -> list[list[str]]:
    "What each step waits for while `rows` requests make some tokens each."
    for i in range(rows):
        core.add_request(request(f"r{i}", [3 + i, 7, 9], max_tokens=tokens, ignore_eos=True, **wish))
    steps = []
    while core.has_work():
        cuda.waits.clear()
        core.step()
        steps.append(list(cuda.waits))
    return steps


@interpreted
@pytest.mark.parametrize("wish, rows", [(w, 8 if "top" in w else 2) for w in WISHES] + [("top-k, top-p, min-p", 2)])
def test_a_step_waits_once(model: Path, cuda: FakeCuda, wish: str, rows: int) -> None:
    "The one wait is for the tokens of the step before, when the next one has been launched."
    core, tokens = EngineCore(args(model).create_engine_config()), 2 if rows == 8 else 6
    assert isinstance(core.model_runner.model, model_runner.FusedLM)
    if wish != "greedy":  # once is enough for the model's own kernels
        twin(core.model_runner)
    steps = waits_by_step(core, cuda, rows, WISHES[wish], tokens)
    assert steps[0] == [] and steps[1 : tokens + 1] == [[BOOKING]] * tokens and not any(steps[tokens + 1 :])
    assert cuda.overwritten == 0


@interpreted
def test_a_replayed_step_waits_once(model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    "With decode steps as graphs, though not with recorded ones: the padding of 5 rows to 8 asks nobody either."
    card = SimpleNamespace(capture=lambda launch: launch)
    monkeypatch.setattr(model_runner, "open_card", lambda: card)
    core = EngineCore(args(model, enforce_eager=False).create_engine_config())
    assert core.model_runner.graphs is not None
    steps = waits_by_step(core, cuda, 5, {}, 3)
    assert steps[0] == [] and steps[1:4] == [[BOOKING]] * 3 and cuda.overwritten == 0


@interpreted
@pytest.mark.parametrize("wish", READING)
def test_who_reads_the_answer_waits_earlier(model: Path, cuda: FakeCuda, wish: str) -> None:
    "Penalties and bad words need the last token on the host: between the launch of the model and that of the sampler."
    core = EngineCore(args(model).create_engine_config())
    twin(core.model_runner)
    steps = waits_by_step(core, cuda, 2, READING[wish], 6)
    assert steps[:7] == [[]] + [[SAMPLING]] * 5 + [[BOOKING]] and cuda.overwritten == 0


@interpreted
def test_without_a_pipeline_a_step_waits_for_itself(model: Path, cuda: FakeCuda) -> None:
    core = EngineCore(args(model, async_scheduling=False).create_engine_config())
    twin(core.model_runner)
    assert waits_by_step(core, cuda, 2, {}, 3)[:3] == [["sample_tokens waits for tokens"]] * 3


@interpreted
def test_steps_that_sample_nobody_wait_for_their_buffers(model: Path, cuda: FakeCuda) -> None:
    "Chunks of a long prompt bring no tokens to wait for. The third finds the first one's buffers, and no event later."
    core = EngineCore(args(model, max_num_batched_tokens=10).create_engine_config())
    twin(core.model_runner)
    core.add_request(request("r", list(range(3, 63)), max_tokens=2))
    steps = []
    while core.has_work():
        cuda.waits.clear()
        core.step()
        steps.append(list(cuda.waits))
    assert steps[:8] == [[], []] + [["DeviceInputs.send waits"]] * 4 + [["DeviceInputs.send waits", BOOKING], [BOOKING]]


BREAKS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def breaks(break_it: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    BREAKS[break_it.__name__] = break_it
    return break_it


@breaks
def a_question_in_the_sampler(patch: pytest.MonkeyPatch) -> None:
    sample = sampler.Sampler.sample

    def asks(self: sampler.Sampler, logits: torch.Tensor, meta: Any) -> Any:
        logits.argmax().item()
        return sample(self, logits, meta)

    patch.setattr(sampler.Sampler, "sample", asks)


@breaks
def a_copy_that_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_runner.AsyncModelRunnerOutput, "give_to", lambda self, ids: ids.copy_(torch.zeros(len(ids))))


@breaks
def a_number_at_chosen_places(patch: pytest.MonkeyPatch) -> None:
    sample = sampler.Sampler.sample

    def writes(self: sampler.Sampler, logits: torch.Tensor, meta: Any) -> Any:
        chosen = logits.clone()
        chosen[chosen.argmax(-1)[:1] * 0, chosen.argmax(-1)[:1]] = -torch.inf
        return sample(self, logits, meta)

    patch.setattr(sampler.Sampler, "sample", writes)


@breaks
def memory_that_is_not_pinned(patch: pytest.MonkeyPatch) -> None:
    make = input_batch.DeviceInputs.__init__

    def unpinned(self: Any, *args: Any) -> None:
        make(self, *args)
        self.pinned = [{name: t.clone() for name, t in turn.items()} for turn in self.pinned]

    patch.setattr(input_batch.DeviceInputs, "__init__", unpinned)


@breaks
def one_buffer_for_two_steps(patch: pytest.MonkeyPatch) -> None:
    make = input_batch.DeviceInputs.__init__

    def one(self: Any, *args: Any) -> None:
        make(self, *args)
        self.pinned[1] = self.pinned[0]

    patch.setattr(input_batch.DeviceInputs, "__init__", one)


@breaks
def an_answer_that_is_read_too_early(patch: pytest.MonkeyPatch) -> None:
    build = model_runner.AsyncModelRunnerOutput.__init__

    def hasty(self: Any, *args: Any) -> None:
        build(self, *args)
        self.get_output()

    patch.setattr(model_runner.AsyncModelRunnerOutput, "__init__", hasty)


@interpreted
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_step_is_noticed(model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    BREAKS[name](monkeypatch)
    core = EngineCore(args(model).create_engine_config())
    twin(core.model_runner)
    steps = waits_by_step(core, cuda, 2, {"temperature": 0.8}, 4)
    assert steps[1:5] != [[BOOKING]] * 4 or cuda.overwritten > 0


# ---- the same tokens ----

Script = dict[int, list[EngineCoreRequest | str]]  # before which step who comes, and who is aborted


def play(core: EngineCore, script: Script) -> dict[str, list[list[int]]]:
    "The tokens of each request, by name; a name that comes again has a second list."
    told: dict[str, list[list[int]]] = {}
    for step in range(400):
        for who in script.get(step, ()):
            if isinstance(who, str):
                core.abort_requests([who])
            else:
                core.add_request(who)
                told.setdefault(who.request_id, []).append([])
        for o in core.step().outputs:
            told[o.request_id][-1] += o.new_token_ids
        core.check_blocks()
        if step > max(script) and not core.has_work():
            return told
    raise AssertionError("it does not end")


def random_script(seed: int) -> Script:
    "Requests of all kinds, with aborts and names that come again."
    rng, script, names = random.Random(seed), Script(), [f"r{i}" for i in range(10)]
    for i, name in enumerate(names):
        wish = rng.choice([*WISHES.values(), *READING.values()]) | {"max_tokens": rng.randint(6, 30)}
        if wish.get("temperature"):
            wish |= {"seed": i}
        stops = {"eos_token_id": rng.randrange(160), "all_stop_token_ids": [rng.randrange(160)]}
        prompt = [rng.randrange(3, 160) for _ in range(rng.choice([1, 3, 8, 9, 30, 60]))]
        born = rng.randrange(12)
        script.setdefault(born, []).append(request(name, prompt, **(stops | wish)))
        if rng.random() < 0.3:
            ends = born + rng.randint(1, 8)
            script.setdefault(ends, []).append(name)
            again = request(name, prompt[::-1], **(stops | wish))
            script.setdefault(ends, []).append(again)
    return script


@interpreted
@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_the_same(
    model: Path, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    "With two batches in flight on a device, and without: preemption, aborts, names that come again, stops, lengths."
    monkeypatch.setattr(sampler, "ROWS_FOR_A_KERNEL", 99)  # slow in the interpreter; the draws are compared below
    preempted, preempt = [], scheduler.preempt
    monkeypatch.setattr(scheduler, "preempt", lambda *args: preempted.append(args) or preempt(*args))
    tight = {"num_gpu_blocks_override": 17, "max_num_batched_tokens": 24} if seed % 2 else {}
    answers = []
    for ahead in (True, False):
        core = EngineCore(args(model, async_scheduling=ahead, **tight).create_engine_config())
        twin(core.model_runner)
        answers.append(play(core, random_script(seed)))
    assert cuda.overwritten == 0 and (preempted or not tight)
    with cuda.closed():
        want = play(EngineCore(args(model, **tight).create_engine_config()), random_script(seed))
    for got in answers:  # an aborted request may have come further here than there
        assert {name: lists[-1] for name, lists in got.items()} == {name: lists[-1] for name, lists in want.items()}


@interpreted
@pytest.mark.parametrize("num_blocks, seed", [(64, 0), (12, 1), (12, 2)])
def test_a_drunken_scheduler_a_step_ahead(model: Path, cuda: FakeCuda, num_blocks: int, seed: int) -> None:
    "Placeholders survive pauses, preemptions and rows that move; whoever looks at the runner's tables finds tokens."
    settings = {"num_gpu_blocks_override": num_blocks, "max_num_seqs": 5}
    wanted = {}
    for i, (name, prompt) in enumerate(prompts().items()):
        params = SamplingParams(temperature=0.9, seed=i, frequency_penalty=0.2 * (i % 2), max_tokens=1 + i)
        wanted[name] = ([t % 160 for t in prompt], params)
    answers = []
    for ahead in (0, 1, 2):  # steps whose tokens nobody has asked for when the next is launched; the core has one
        cfg = args(model, **settings).create_engine_config()
        lives = {name: Life(prompt, params) for name, (prompt, params) in wanted.items()}
        drunkard, runner, late = Drunkard(cfg, lives, seed), ModelRunner(cfg), []
        twin(runner)
        for _ in range(300):
            runner.execute_model(drunkard.schedule())
            late.append(runner.sample_ahead())
            while len(late) > ahead:
                made = late.pop(0)
                drunkard.update(made.get_output() if isinstance(made, AsyncModelRunnerOutput) else made)
            placeholders = sum(t < 0 for state in runner.states.values() for t in state.token_ids)
            unknown = [made for made in late if isinstance(made, AsyncModelRunnerOutput) and made.copies]
            assert placeholders == sum(len(made.rows) for made in unknown)
            if all(life.status == "done" for life in lives.values()):
                break
        else:
            raise AssertionError("it does not end")
        answers.append({name: life.outputs for name, life in lives.items()})
    assert answers[0] == answers[1] == answers[2] and cuda.overwritten == 0


# ---- the same batch, and the same draw ----

@interpreted
@pytest.mark.parametrize("seed", range(8))
def test_the_flat_batch_is_the_same(cuda: FakeCuda, seed: int) -> None:
    "On a device it comes through pinned buffers, in turn, and its slots are computed there."
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 4, 16]))
    here, there = (InputBatch(6, 64, size, 99, device, 200) for device in ("cpu", "cuda"))
    for step in range(5):
        for name in [n for n in here.req_ids if rng.random() < 0.4]:
            for batch in (here, there):
                batch.remove_request(name)
        for i in range(int(rng.integers(not here.num_reqs, 7 - here.num_reqs))):
            n = int(rng.integers(1, 60))
            ids, blocks = rng.integers(0, 99, n).tolist(), rng.integers(1, 1 << 30, -(-n // size)).tolist()
            computed = int(rng.integers(0, n))
            state = CachedRequestState(f"{step}-{i}", SamplingParams(), ids, n, blocks, computed)
            for batch in (here, there):
                batch.add_request(state)
        for batch in (here, there):
            batch.condense()
        most = here.num_tokens[: here.num_reqs] - here.num_computed_tokens[: here.num_reqs]
        counts = [min(int(rng.integers(1, n + 1)), 30) for n in most]
        want, got = flatten(here, counts), flatten(there, counts)
        for name in ("input_ids", "positions", "logits_indices"):
            assert torch.equal(getattr(got, name).raw, getattr(want, name))
            assert getattr(got, name).dtype == getattr(want, name).dtype
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(got.meta, name).raw, getattr(want.meta, name))
            assert getattr(got.meta, name).dtype == getattr(want.meta, name).dtype
        width = want.meta.block_table.shape[1]
        assert torch.equal(got.meta.block_table.raw[:, :width], want.meta.block_table)
        assert (got.num_scheduled, got.discard.tolist()) == (want.num_scheduled, want.discard.tolist())


@interpreted
@pytest.mark.parametrize("rows", [3, 8])
def test_the_draw_is_the_same(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    "With page 13e's kernel from eight rows on, and with torch's rule below, as on a CPU."
    logits = torch.randn(rows, 97, generator=torch.Generator().manual_seed(rows)) * 3
    drawn, kernel, launches = [], sampler.top_k_top_p_triton, []
    monkeypatch.setattr(sampler, "top_k_top_p_triton", lambda *args: launches.append(args) or kernel(*args))
    for device in ("cpu", "cuda"):
        columns = SamplingColumns(rows, 97, device)
        for row in range(rows):
            top_k, top_p = (0, 1, 5, 60)[row % 4], (1.0, 0.7, 0.95)[row % 3]
            params = SamplingParams(temperature=0.9, seed=row, top_k=top_k, top_p=top_p)
            columns.add_row(params, sampler.make_generator(params, device), row, 1)
        meta = columns.metadata(np.arange(rows), np.zeros((rows, 4), np.int32), np.full(rows, 2))
        made = sampler.Sampler(0, device).forward(logits.to(device, non_blocking=True), meta)
        drawn.append(made.sampled_token_ids.cpu().tolist())
    assert drawn[0] == drawn[1] and len(launches) == (rows >= 8)


def lists_of(core: EngineCore) -> dict[str, list[Any]]:
    "The log probabilities that a core tells, of two requests."
    core.add_request(request("both", list(range(3, 50)), logprobs=3, prompt_logprobs=2))
    core.add_request(request("own", [9, 4, 7], logprobs=0))
    told: dict[str, list[Any]] = {}
    while core.has_work():
        for o in core.step().outputs:
            told.setdefault(o.request_id, []).extend([o.new_logprobs, o.new_prompt_logprobs])
    return told


@interpreted
def test_log_probabilities_are_the_same(model: Path, cuda: FakeCuda) -> None:
    "They come with the tokens. Those of a prompt are waited for in its own step."
    core = EngineCore(args(model).create_engine_config())
    twin(core.model_runner)
    got = lists_of(core)
    with cuda.closed():
        want = lists_of(EngineCore(args(model).create_engine_config()))
    assert sum(x is not None for x in want["both"]) == 8 + 1
    for name in want:
        assert [x is None for x in got[name]] == [x is None for x in want[name]]
        for a, b in zip(got[name], want[name], strict=True):
            if b is not None:
                (ids, values, ranks), (right, near, order) = a.arrays(), b.arrays()
                assert np.array_equal(ids, right) and np.array_equal(ranks, order)
                assert np.allclose(values, near, atol=1e-5)


# ---- what page 05 shows ----

STEPS = 8
DATA = Path(str(files("walkvllm"))) / "data" / "device_step.json"


def queue_at_each_stop(ahead: bool, steps: int) -> list[list[Any]]:
    "[stop, work order, operations launched and not known to be done, waits so far], of the running example."
    numbers: dict[int, tuple[int, Any]] = {}
    log: list[list[Any]] = []
    with FakeCuda() as cuda:

        class Listener:
            def begin(self) -> None:
                pass

            def __call__(self, stop: str, work: Any, *rest: Any) -> None:
                if not isinstance(work, SchedulerOutput):
                    return
                number = numbers.setdefault(id(work), (len(numbers) + 1, work))[0]
                log.append([stop, number, cuda.launched - cuda.done, len(cuda.waits)])

        core = example.core(async_scheduling=ahead, attention_backend="triton", enforce_eager=True)
        for message in example.requests():
            core.add_request(message)
        cuda.complete(cuda.launched)
        cuda.waits.clear()
        core.listener = Listener()  # type: ignore[assignment]
        for _ in range(steps):
            core.step()
    return log


@interpreted
@pytest.mark.long
@pytest.mark.parametrize("form", ["three phases", "two in flight"])
def test_what_page_05_shows_is_so(form: str) -> None:
    recorded = json.loads(DATA.read_text(encoding="utf-8"))[form]
    assert queue_at_each_stop(form == "two in flight", STEPS) == recorded


# ---- the real thing ----

@on_gpu
@pytest.mark.parametrize("wish", WISHES)
def test_cuda_agrees_that_nothing_waits(model: Path, wish: str) -> None:
    "PyTorch itself raises an error where a step would wait for the device. An event's wait is not among them."
    changes = {"attention_backend": "triton", "enforce_eager": False}
    core = EngineCore(args(model, **changes).create_engine_config())
    for i in range(9):
        core.add_request(request(f"r{i}", [3 + i, 7, 9], max_tokens=30, ignore_eos=True, **WISHES[wish]))
    for _ in range(5):
        core.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            core.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


if __name__ == "__main__":  # records what page 05 shows; TRITON_INTERPRET=1 must be set
    forms = {"three phases": queue_at_each_stop(False, STEPS), "two in flight": queue_at_each_stop(True, STEPS)}
    DATA.write_text(json.dumps(forms) + "\n", encoding="utf-8")
