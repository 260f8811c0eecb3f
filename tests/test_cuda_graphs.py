"""Decode steps as CUDA graphs, and how large the pool may be: proven with a card that is not there.

`PretendCard` records the launches and repeats them on the same tensors, as a graph does. `Again` calls the model again
instead, on the same buffers: that is for backends that no graph could record, because they ask the device.
"""

from __future__ import annotations

import inspect
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda
from families import make_model
from test_kernels import needs_triton, sanitizer  # noqa: F401  (sanitizer: for every test here)
from torch import Tensor

from walkvllm import LLM, SamplingParams, config, cuda_graphs, model_runner, mp_client
from walkvllm.attention import CommonAttentionMetadata, get_backend
from walkvllm.config import EngineArgs, VllmConfig, block_bytes, capture_sizes
from walkvllm.cuda_graphs import CudaCard, Memory, graph_bytes, kv_cache_bytes
from walkvllm.frames import Ready
from walkvllm.fused_model import FusedLM
from walkvllm.kernels import paged_attention
from walkvllm.model_runner import allocate_kv_cache
from walkvllm.models import CausalLM
from walkvllm.pretend_card import PretendCard
from walkvllm.weights import load_weights

GIB = 1 << 30
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Again:
    "A card whose replay calls the launching function again. It sees the buffers and no new argument."

    def __init__(self) -> None:
        self.order: list[int] = []

    def look(self) -> Memory:
        raise AssertionError("nobody has asked for the pool to be measured")

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.order.append(launch.args[0])  # type: ignore[attr-defined]
        launch()
        return launch


# ---- one model, many decode steps ----

@dataclass
class World:
    "A tiny model, requests with a context in a pool that is NaN everywhere else, and the graphs."

    config: VllmConfig
    model: CausalLM
    backend: Any
    caches: list[Tensor]
    tables: list[list[int]]
    lengths: list[int]
    device: str

    def step(self, requests: list[int], seed: int) -> tuple[Tensor, Tensor, CommonAttentionMetadata]:
        "The next token of each of these requests; afterwards they are one token longer."
        size = self.config.cache_config.block_size
        for r in requests:
            self.lengths[r] += 1
        positions = [self.lengths[r] - 1 for r in requests]
        widest = max(-(-self.lengths[r] // size) for r in requests)
        slots = [self.tables[r][p // size] * size + p % size for r, p in zip(requests, positions, strict=True)]
        gen, n = torch.Generator().manual_seed(seed), len(requests)

        def tensor(x: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(x, dtype=dtype, device=self.device)

        table = [self.tables[r][:widest] + [0] * (widest - len(self.tables[r][:widest])) for r in requests]
        meta = CommonAttentionMetadata(
            n, n, 1, max(self.lengths[r] for r in requests), tensor(list(range(n + 1))),
            tensor([self.lengths[r] for r in requests]), tensor(table), tensor(slots, torch.int64))
        ids = torch.randint(0, self.model.spec.vocab_size, (n,), generator=gen).to(self.device)
        return ids, tensor(positions, torch.int64), meta


def world(path: Path, backend: str, lengths: list[int], max_model_len: int = 64, sizes: tuple[int, ...] = (1, 2, 4, 6),
          device: str = "cpu", seed: int = 0) -> World:
    made = EngineArgs(
        str(path), skip_tokenizer_init=True, dtype="float32", block_size=8, max_model_len=max_model_len,
        num_gpu_blocks_override=400, attention_backend=backend).create_engine_config()
    made = replace(made, cudagraph_capture_sizes=list(sizes))
    spec, rnd, gen = made.model_config.spec, random.Random(seed), torch.Generator().manual_seed(seed)
    model_class = FusedLM if backend == "triton" else CausalLM
    model = model_class(spec, load_weights(path, spec, torch.float32, torch.device(device)))
    counts = [-(-(n + 16) // 8) for n in lengths]  # room for sixteen steps
    ids = rnd.sample(range(1, sum(counts) + 6), sum(counts))  # the blocks of nobody lie between
    tables = [[ids.pop() for _ in range(n)] for n in counts]
    caches = [torch.full_like(c, torch.nan) for c in allocate_kv_cache(spec, sum(counts) + 6, 8, torch.float32, device)]
    for cache in caches:
        for table, n in zip(tables, lengths, strict=True):
            for p in range(n):
                shape = cache[:, 0, 0].shape
                cache[:, table[p // 8], p % 8] = torch.randn(shape, generator=gen).to(device)
    return World(made, model, get_backend(backend), caches, tables, list(lengths), device)


STEPS = [[0, 1, 2, 3, 4], [3, 1], [~3, 4, 0, 2], [2], [1, 0], [0, 1, 2, 4, 5], [~5, ~0, 4, 1, 2], [1, 4]]


@torch.inference_mode()
def check_steps(
    w: World, card: Any, steps: list[list[int]], module: Any = cuda_graphs, inputs: dict[str, Tensor] | None = None
) -> Any:
    "Every step through the graphs beside the model itself: the same states, and the same pool down to the last slot."
    untouched = [c.clone() for c in w.caches]
    graphs = module.DecodeGraphs(w.config, w.model, w.backend, w.caches, card, inputs)
    graphs.capture(w.config.cudagraph_capture_sizes)
    for cache, before in zip(w.caches, untouched, strict=True):
        assert torch.equal(cache.nan_to_num(7), before.nan_to_num(7)), "recording has written"
    buffers = [x.data_ptr() for x in (*graphs.inputs.values(), graphs.hidden)]
    assert len(set(buffers)) == 7
    for seed, requests in enumerate(steps):
        for r in requests:
            for cache in w.caches if r < 0 else ():  # ~r: request r has ended, and its blocks are nobody's
                cache[:, w.tables[~r]] = torch.nan
        ids, positions, meta = w.step([r for r in requests if r >= 0], seed)
        eager = [c.clone() for c in w.caches]
        want = w.model.forward(ids, positions, eager, meta, w.backend)
        if inputs:
            ids, positions, meta = lay_into(inputs, ids, positions, meta)
        got = graphs.run(ids, positions, meta)
        assert got is not None and not got.isnan().any() and torch.allclose(got, want, atol=1e-4)
        for cache, right in zip(w.caches, eager, strict=True):
            assert torch.equal(cache.isnan(), right.isnan()), "a slot was written that is not the step's, or was not"
            assert torch.allclose(cache, right, atol=1e-4, equal_nan=True)
            assert cache[:, 0].isnan().all()
    assert buffers == [x.data_ptr() for x in (*graphs.inputs.values(), graphs.hidden)]
    return graphs


def lay_into(
    inputs: dict[str, Tensor], ids: Tensor, positions: Tensor, meta: CommonAttentionMetadata
) -> tuple[Tensor, Tensor, CommonAttentionMetadata]:
    "The same step in buffers that are there, as a GPU's flat batch has it: the table at its full width."
    there = {"input_ids": ids, "positions": positions} | {
        name: getattr(meta, name) for name in ("slot_mapping", "seq_lens", "query_start_loc", "block_table")}
    for name, values in there.items():
        inputs[name][tuple(map(slice, values.shape))] = values
        there[name] = inputs[name][: len(values)]
    return there.pop("input_ids"), there.pop("positions"), replace(meta, **there)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


LENGTHS = [3, 20, 7, 8, 1, 30]


@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_a_padded_step_is_the_step(tiny: Path, backend: str) -> None:
    check_steps(world(tiny, backend, LENGTHS), Again(), STEPS)


def test_a_step_that_lies_in_place(tiny: Path) -> None:
    "Buffers of somebody else are larger than the largest step; nothing is copied into itself, padding is written."
    w = world(tiny, "torch", LENGTHS)
    inputs = {name: torch.zeros(50, dtype=torch.int64) for name in ("input_ids", "positions", "slot_mapping")}
    inputs |= {name: torch.zeros(9, dtype=torch.int32) for name in ("seq_lens", "query_start_loc")}
    inputs["block_table"] = torch.zeros(9, 12, dtype=torch.int32)
    graphs = check_steps(w, Again(), STEPS, inputs=inputs)
    assert graphs.inputs is inputs


@needs_triton
def test_a_recorded_step_is_the_step(tiny: Path) -> None:
    "The Triton kernels, launch by launch as they were recorded, while the contexts grow."
    if torch.cuda.is_available():
        pytest.skip("the card is there")
    check_steps(world(tiny, "triton", LENGTHS), PretendCard(), STEPS[:4])


@pytest.fixture
def cut_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    "The cut of the work that a GPU would get; the list is how many programs share the keys of one token."
    pick, splits = paged_attention.pick_config, []

    def picked(*shape: Any) -> Any:
        made = pick(*shape[:-1], "cuda")
        splits.append(made.num_splits)
        return made

    monkeypatch.setattr(paged_attention, "pick_config", picked)
    return splits


@needs_triton
def test_what_is_decided_while_recording_holds_for_every_length(tiny: Path, cut_for_a_gpu: list[int]) -> None:
    "Keys are shared by as many programs as the longest request would want; short ones find theirs all the same."
    if torch.cuda.is_available():
        pytest.skip("the card is there")
    w = world(tiny, "triton", [1, 150, 9], max_model_len=256, sizes=(1, 2, 4))
    check_steps(w, PretendCard(), [[0, 1, 2], [1], [2, 0]])
    assert 2 in cut_for_a_gpu and 1 in cut_for_a_gpu  # recorded with two, and the eager step of short ones with one


@needs_triton
def test_a_recording_asks_nothing_and_fixes_all(tiny: Path) -> None:
    "No Python of the model runs in a replay, and a replay writes to no other place than the recording."
    if torch.cuda.is_available():
        pytest.skip("the card is there")
    w, card = world(tiny, "triton", LENGTHS, sizes=(2, 4)), PretendCard()
    with torch.inference_mode():
        graphs = cuda_graphs.DecodeGraphs(w.config, w.model, w.backend, w.caches, card)
        graphs.capture([2, 4])
        assert [r.launches[0].shapes[1] for r in card.recordings] == [(4,), (2,)]  # the largest first
        ids, positions, meta = w.step([0, 4], 0)
        want = w.model.forward(ids, positions, [c.clone() for c in w.caches], meta, w.backend)
        w.model.forward = None  # type: ignore[assignment, method-assign]
        assert torch.allclose(graphs.run(ids, positions, meta), want, atol=1e-4)
    kernels = [x.name for x in card.recordings[0].launches if x.grid]
    assert kernels.count("paged_attention_kernel") == kernels.count("rope_and_write_kernel") == w.model.spec.num_layers


def test_what_asks_the_device_cannot_be_recorded(tiny: Path) -> None:
    w = world(tiny, "torch", LENGTHS)
    graphs = cuda_graphs.DecodeGraphs(w.config, w.model, w.backend, w.caches, PretendCard())
    with pytest.raises(RuntimeError, match=r"6 requests cannot be recorded(.|\n)*enforce_eager=True"):
        graphs.capture(w.config.cudagraph_capture_sizes)


# ---- broken on purpose ----

BROKEN = {
    "padding has a slot": ('("slot_mapping", meta.slot_mapping, -1)', '("slot_mapping", meta.slot_mapping, 0)'),
    "padding stays": ("            buffer[rows : rows + size - meta.num_reqs].fill_(padding)\n", ""),
    "padding begins late": ("buffer[rows : rows + size", "buffer[rows + 1 : rows + size"),
    "padding ends early": ("size - meta.num_reqs].fill_", "size - meta.num_reqs - 1].fill_"),
    "recording has slots": ('self.inputs["slot_mapping"].fill_(-1)', 'self.inputs["slot_mapping"].fill_(9)'),
    "padding has tokens": ("meta.query_start_loc, meta.num_reqs)", "meta.query_start_loc, size)"),
    "the table stays": ('            ("block_table", meta.block_table, 0),\n', ""),
    "the lengths stay": ('("seq_lens", meta.seq_lens, 0), ', ""),
    "the positions stay": ('("positions", positions, 0), ', ""),
    "the tokens stay": ('("input_ids", input_ids, 0), ', ""),
    "the starts stay": ('("query_start_loc", meta.query_start_loc, meta.num_reqs),', ""),
    "the answer stays in the pool": ("        self.hidden[:size].copy_(hidden)", "        self.hidden = hidden"),
    "the next smaller size": ("return sizes[i] if", "return sizes[max(i - 1, 0)] if"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_step_is_noticed(tiny: Path, what: str) -> None:
    right, wrong = BROKEN[what]
    source = Path(cuda_graphs.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1
    module = types.ModuleType("walkvllm.broken")
    module.__package__ = "walkvllm"
    exec(compile(source.replace(right, wrong), "broken", "exec"), module.__dict__)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        check_steps(world(tiny, "torch", LENGTHS), Again(), STEPS, module)


# ---- which size? ----

@pytest.mark.parametrize("most", [1, 2, 3, 4, 7, 8, 9, 100, 255, 256, 257, 300, 512, 513, 5000])
def test_the_ladder(most: int) -> None:
    sizes, top = capture_sizes(most), min(most, 512)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == top
    graphs: Any = cuda_graphs.DecodeGraphs.__new__(cuda_graphs.DecodeGraphs)
    graphs.replays = dict.fromkeys(reversed(sizes))
    for n in range(1, top + 2):
        size = graphs.padded_size(types.SimpleNamespace(num_reqs=n, max_query_len=1))
        assert size == min((s for s in sizes if s >= n), default=None)
        assert size is None or size - n < (8 if n <= 256 else 16)
        assert graphs.padded_size(types.SimpleNamespace(num_reqs=n, max_query_len=2)) is None


# ---- in the engine ----

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "skip_tokenizer_init": True, "multiprocess": False, "max_model_len": 64, "block_size": 8,
    "max_num_seqs": 5, "max_num_batched_tokens": 16,
}  # fmt: skip
ROOMY, TIGHT = {"num_gpu_blocks_override": 40}, {"num_gpu_blocks_override": 9}
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 20, 7, 11, 1, 9, 16)]
PARAMS = [SamplingParams(temperature=t, seed=seed, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=p)
          for t, seed, n, p in [(0, None, 9, 2), (0, None, 4, None), (1.0, 7, 12, None), (0, None, 15, 0),
                                (0.8, 3, 6, None), (0, None, 1, None), (0, None, 10, None)]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any]], None]]:
    "Makes the engine believe in a GPU, whose cards the argument makes."

    def believe(card: Callable[[], Any]) -> None:
        monkeypatch.setattr(config, "on_gpu", lambda backend: True)
        monkeypatch.setattr(model_runner, "open_card", card)

    yield believe


def answers(llm: LLM, count: int = len(PROMPTS)) -> list[Any]:
    out = llm.generate(PROMPTS[:count], PARAMS[:count], use_tqdm=False)
    llm.check_blocks()
    return [(o.outputs[0].token_ids, [list(p) for p in o.outputs[0].logprobs or ()]) for o in out]


def replays(llm: LLM) -> list[int | None]:
    "Into how many requests each step that comes will be padded; None for a step without a graph."
    graphs, sizes = llm.llm_engine.engine_core.engine_core.model_runner.graphs, []
    padded = graphs.padded_size

    def size(meta: CommonAttentionMetadata) -> int | None:
        sizes.append(padded(meta))
        return sizes[-1]

    graphs.padded_size = size
    return sizes


@pytest.mark.parametrize("pool", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("pipelined", [None, False])
def test_same_tokens(gpu: Any, pool: dict[str, Any], pipelined: bool | None) -> None:
    "Chunks of prompts, decodes, draws, log probabilities, preemptions: with graphs as without."
    settings = {**SETTINGS, **pool, "attention_backend": "torch", "async_scheduling": pipelined}
    with LLM(**settings) as llm:
        want = answers(llm)
    gpu(Again)
    with LLM(**settings) as llm:
        sizes = replays(llm)
        assert answers(llm) == want and answers(llm) == want  # the second time out of the prefix cache
        assert None in sizes and {1, 2, 4, 5} >= set(sizes) - {None} >= {1, 4}
        core = llm.llm_engine.engine_core.engine_core
        assert core.config.scheduler_config.async_scheduling is (pipelined is None)
        assert core.model_runner.graphs.card.order == [5, 4, 2, 1]
    with LLM(**settings, enforce_eager=True) as llm:
        assert llm.llm_engine.engine_core.engine_core.model_runner.graphs is None and answers(llm) == want


@needs_triton
def test_same_tokens_with_kernels(tiny: Path, gpu: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("the card is there")
    settings = {**SETTINGS, **ROOMY, "attention_backend": "triton", "max_num_seqs": 3}
    with LLM(str(tiny), **settings, async_scheduling=False) as llm:
        want = answers(llm, 3)
    gpu(PretendCard)
    with LLM(str(tiny), **settings) as llm:
        sizes = replays(llm)
        assert answers(llm, 3) == want and {2, 3} <= set(sizes)


def test_a_cpu_has_no_graphs() -> None:
    made = EngineArgs(num_gpu_blocks_override=20).create_engine_config()
    if not torch.cuda.is_available():
        assert made.cudagraph_capture_sizes == [] and not made.scheduler_config.async_scheduling
        with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.9 must be left out on a CPU"):
            EngineArgs(gpu_memory_utilization=0.9).create_engine_config()


# ---- how large is the pool? ----

START = Memory(80 * GIB, 79 * GIB, 0, 0, 5 * GIB)  # some of it is always taken; the peak is history


def test_what_is_left_for_the_pool() -> None:
    after = Memory(80 * GIB, 60 * GIB, 16 * GIB, 15 * GIB, 22 * GIB)  # 3 GiB less that torch knows nothing of
    assert kv_cache_bytes(START, after, GIB, 0.9) == (72 - 22 - 3 - 1) * GIB
    given_back = Memory(80 * GIB, 75 * GIB, 16 * GIB, 15 * GIB, 22 * GIB)  # somebody else has ended: that is not ours
    assert kv_cache_bytes(START, given_back, 0, 0.9) == (72 - 22) * GIB
    second = Memory(80 * GIB, 40 * GIB, 30 * GIB, 30 * GIB, 30 * GIB)  # another engine in this process
    after = Memory(80 * GIB, 30 * GIB, 40 * GIB, 40 * GIB, 45 * GIB)
    assert kv_cache_bytes(second, after, 0, 0.5) == (40 - 15) * GIB
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.92 of this GPU are 73.60 GiB, and only 40.00 GiB"):
        kv_cache_bytes(second, after, 0, 0.92)


def made_up(*graphs: int, peak: int = 8 * GIB, total: int = 80 * GIB) -> Callable[[], PretendCard]:
    "Cards whose memory shrinks as told: after the model, the largest step, and each graph."
    free = [total - GIB, total - 3 * GIB, total - 3 * GIB, total - 3 * GIB]
    for taken in graphs:
        free.append(free[-1] - taken)
    looks = [Memory(total, f, 2 * GIB * (i > 0), 2 * GIB * (i > 0), peak if i == 2 else 0) for i, f in enumerate(free)]
    cards = iter([PretendCard(looks), Again()])
    return lambda: next(cards)  # type: ignore[return-value]


@pytest.mark.parametrize("eager", [True, False])
def test_the_runner_measures(gpu: Any, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    "From the looks at a card to the settings that both sides have."
    monkeypatch.setattr(cuda_graphs, "useful_blocks", lambda *args: 1 << 40)
    allocated = []
    monkeypatch.setattr(model_runner, "allocate_kv_cache",
                        lambda spec, n, *rest: allocated.append(n) or allocate_kv_cache(spec, min(n, 50), *rest))
    small = {**SETTINGS, "attention_backend": "torch", "enforce_eager": eager, "gpu_memory_utilization": 0.5}
    gpu(made_up(*[] if eager else [GIB, GIB // 8]))
    if not eager:  # the torch backend cannot be recorded: its graphs are taken as they are
        monkeypatch.setattr(PretendCard, "capture", Again.capture)
        monkeypatch.setattr(PretendCard, "order", [], raising=False)
    with LLM(**small) as llm:
        graphs = 0 if eager else GIB + 3 * GIB // 8  # sizes 1, 2, 4 and 5
        made, per_block = llm.llm_engine.vllm_config, block_bytes(llm.model_config.spec, "float32", 8)
        assert made.cache_config.num_gpu_blocks == (40 * GIB - 8 * GIB - graphs) // per_block
        assert made is llm.llm_engine.input_processor.config and allocated == [1, made.cache_config.num_gpu_blocks]
        assert len(answers(llm)) == len(PROMPTS)


def test_the_largest_step_is_the_largest(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No real step scores more rows than the one that was measured, and none begins while the last one's are kept."""
    scored: list[int] = []
    compute, forward = CausalLM.compute_logits, model_runner.ModelRunner.forward

    def score(self: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
        scored.append(len(hidden))
        return compute(self, hidden)

    def begin(self: Any, flat: Any) -> torch.Tensor:
        assert self.last_logits is None and self.last_hidden is None
        return forward(self, flat)

    monkeypatch.setattr(CausalLM, "compute_logits", score)
    monkeypatch.setattr(model_runner.ModelRunner, "forward", begin)
    gpu(made_up())
    settings = {**SETTINGS, "max_num_batched_tokens": 30, "max_num_seqs": 3, "max_model_len": 100}
    with LLM(**settings, attention_backend="torch", enforce_eager=True, gpu_memory_utilization=0.2) as llm:
        measured = list(scored)
        asks = SamplingParams(prompt_logprobs=1, logprobs=1, max_tokens=2, ignore_eos=True, detokenize=False)
        llm.generate({"prompt_token_ids": [5] * 80}, asks, use_tqdm=False)
        runner = llm.llm_engine.engine_core.engine_core.model_runner
        assert runner.last_logits is not None
    assert measured == [3, 30] and max(scored[len(measured):]) == 30


def test_a_pool_below_the_longest_request(gpu: Any) -> None:
    "The length that both sides go by is cut, as it is for a pool that was given."
    per_block = block_bytes(EngineArgs().create_engine_config().model_config.spec, "float32", 8)
    gpu(made_up(peak=40 * GIB - 5 * per_block))
    with LLM(**SETTINGS, attention_backend="torch", enforce_eager=True, gpu_memory_utilization=0.5) as llm:
        assert llm.model_config.max_model_len == llm.llm_engine.vllm_config.scheduler_config.max_model_len == 32
        with pytest.raises(ValueError, match="32"):
            llm.generate({"prompt_token_ids": [5] * 40}, use_tqdm=False)
        assert llm.llm_engine.engine_core.engine_core.scheduler.max_model_len == 32


def test_no_room(gpu: Any) -> None:
    for peak, utilization, words in [(50 * GIB, 0.5, "leaves -10.00 GiB for the KV cache.*max_num_batched_tokens"),
                                     (8 * GIB, 1.0, "80.00 GiB, and only 79.00 GiB of its 80.00 GiB are free")]:
        gpu(made_up(peak=peak))
        with pytest.raises(ValueError, match=f"gpu_memory_utilization={utilization}.*{words}"):
            LLM(**SETTINGS, attention_backend="torch", enforce_eager=True, gpu_memory_utilization=utilization)


def test_no_room_for_the_largest_step(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu(made_up())
    monkeypatch.setattr(cuda_graphs, "largest_step", full)
    with pytest.raises(ValueError, match=r"weights \(2.00 GiB\) a GPU of 80.00 GiB .* max_num_seqs"):
        LLM(**SETTINGS, attention_backend="torch")


def test_what_is_given_goes_first(gpu: Any) -> None:
    gpu(Again)  # whoever looks at its memory raises
    for given in ({"num_gpu_blocks_override": 30}, {"kv_cache_memory_bytes": 1 << 21}):
        made = EngineArgs(attention_backend="torch", **given).create_engine_config()  # type: ignore[arg-type]
        assert made.cache_config.num_gpu_blocks > 1
        with pytest.raises(ValueError, match="must be left out"):
            EngineArgs(gpu_memory_utilization=0.9, **given).create_engine_config()  # type: ignore[arg-type]
    made = EngineArgs(attention_backend="torch").create_engine_config()
    assert made.cache_config.num_gpu_blocks == 0 and made.cache_config.gpu_memory_utilization == 0.92
    assert made.cudagraph_capture_sizes == capture_sizes(256)


def test_the_graphs_of_one_size(tiny: Path) -> None:
    "One size has no second graph to be compared with; and a graph takes a MiB at least, whatever is seen."
    for sizes, free, want in [((4,), [9 * GIB, 8 * GIB], GIB), ((), [GIB], 0),
                              ((1, 2, 4), [9 * GIB, 8 * GIB, 8 * GIB], GIB + 2 * (1 << 20))]:
        w = world(tiny, "torch", LENGTHS, sizes=sizes)
        card = Again()
        looks = iter(free)
        card.look = lambda: Memory(80 * GIB, next(looks), 0, 0, 0)  # type: ignore[method-assign]  # noqa: B023
        with torch.inference_mode():
            assert graph_bytes(w.config, w.model, w.backend, w.caches, card) == want


def test_the_caller_learns_what_the_core_found(monkeypatch: pytest.MonkeyPatch) -> None:
    "A core in its own process says how large the pool is, and the settings here follow."
    shake = mp_client.handshake

    def found(*args: Any) -> Any:
        ready, clock = shake(*args)
        return Ready(3, 16, ready.device, ready.received), clock

    monkeypatch.setattr(mp_client, "handshake", found)
    with LLM(**{**SETTINGS, **ROOMY, "multiprocess": True}) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 3 and llm.model_config.max_model_len == 16
        with pytest.raises(ValueError, match="16"):
            llm.generate({"prompt_token_ids": [5] * 40}, use_tqdm=False)


def test_what_is_asked_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    "Every line of `CudaCard`, against a CUDA that only notes what it is asked."
    asked: list[Any] = []

    def note(name: str, answer: Any = None) -> Callable[..., Any]:
        return lambda *args, **kwargs: asked.append((name, *args, *kwargs.values())) or answer

    class Graph:
        replay = "a replay"

    @contextmanager
    def recorder(graph: Graph, pool: str) -> Iterator[None]:
        asked.append(("begin", type(graph), pool))
        yield
        asked.append("end")

    answers = {"mem_get_info": (5, 9), "memory_reserved": 4, "memory_allocated": 2, "max_memory_allocated": 3,
               "graph_pool_handle": "pool", "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None}
    for name, answer in answers.items():
        assert callable(getattr(torch.cuda, name))
        monkeypatch.setattr(torch.cuda, name, note(name, answer))
    assert {"cuda_graph", "pool"} <= set(inspect.signature(torch.cuda.graph.__init__).parameters)
    monkeypatch.setattr(torch.cuda, "graph", recorder)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    card = cuda_graphs.open_card()
    assert card.look() == Memory(total=9, free=5, reserved=4, allocated=2, peak=3)
    names = [a[0] for a in asked]
    assert names.index("synchronize") < names.index("empty_cache") < names.index("mem_get_info")
    assert names.index("max_memory_allocated") < names.index("reset_peak_memory_stats")
    asked.clear()
    assert card.capture(lambda: asked.append("launch")) == "a replay"
    assert asked == ["launch", ("synchronize",), ("begin", Graph, "pool"), "launch", "end"]


@needs_triton
def test_a_device_is_measured_and_replayed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    "The largest step, the graphs and the engine's own steps, all with tensors on a device: the same tokens."
    if torch.cuda.is_available():
        pytest.skip("the card is there")
    small = {**SETTINGS, "attention_backend": "triton", "max_num_seqs": 3, "max_model_len": 40}
    with LLM(str(tiny), **small, num_gpu_blocks_override=16) as llm:
        want = answers(llm, 3)
    with FakeCuda() as device:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(model_runner, "open_card", made_up(GIB, GIB // 8))
        monkeypatch.setattr(PretendCard, "capture", Again.capture)
        monkeypatch.setattr(PretendCard, "order", [], raising=False)
        with LLM(str(tiny), **small) as llm:
            runner = llm.llm_engine.engine_core.engine_core.model_runner
            assert runner.config.cache_config.num_gpu_blocks == 16  # three requests of five blocks, and the null block
            assert runner.config.cudagraph_capture_sizes == [1, 2, 3]
            assert runner.graphs.inputs["input_ids"] is runner.batch.inputs.gpu["input_ids"]
            sizes = replays(llm)
            assert answers(llm, 3) == want and {2, 3} <= set(sizes)
        assert not device.unknown and not device.overwritten


# ---- with a card that is there ----

@needs_cuda
def test_real_graphs(tiny: Path) -> None:
    check_steps(world(tiny, "triton", LENGTHS, device="cuda"), CudaCard(), STEPS)
    check_steps(world(tiny, "triton", [1, 150, 9], 256, (1, 2, 4), "cuda"), CudaCard(), [[0, 1, 2], [1], [2, 0]])


@needs_cuda
@pytest.mark.parametrize("pipelined", [None, False])
def test_same_tokens_on_a_gpu(pipelined: bool | None) -> None:
    settings = {**SETTINGS, **ROOMY, "attention_backend": "triton", "async_scheduling": pipelined}
    with LLM(**settings, enforce_eager=True) as llm:
        want = answers(llm)
    with LLM(**settings) as llm:
        sizes = replays(llm)
        assert answers(llm) == want and None in sizes and set(sizes) > {None}


@needs_cuda
def test_a_gpu_is_measured() -> None:
    "The pool is as large as asked for, and what the engine takes in all is no more than its share."
    total = torch.cuda.mem_get_info()[1]
    with LLM(**SETTINGS, attention_backend="triton", gpu_memory_utilization=0.3) as llm:
        made = llm.llm_engine.vllm_config.cache_config
        assert made.num_gpu_blocks > 1 and len(answers(llm)) == len(PROMPTS)
        assert torch.cuda.max_memory_reserved() < 0.3 * total
    with pytest.raises(ValueError, match="gpu_memory_utilization=1e-06"):
        LLM(**SETTINGS, attention_backend="triton", gpu_memory_utilization=1e-6)
