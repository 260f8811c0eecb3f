"""Paged write and paged read: three backends against attention in float64 that knows nothing of blocks.

The pool is filled with NaN first, so whoever reads a slot that nobody wrote shows it in the result.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from walkvllm import attention
from walkvllm.attention import BACKENDS, CommonAttentionMetadata, get_backend
from walkvllm.kernels import HAS_TRITON, paged_attention, paged_write

ReadConfig, slot_of = paged_attention.ReadConfig, paged_write.slot_of
torch.set_num_threads(1)
RUNS_TRITON = HAS_TRITON and (torch.cuda.is_available() or attention.interpreting())
needs_triton = pytest.mark.skipif(not RUNS_TRITON, reason="needs triton, and a GPU or TRITON_INTERPRET=1")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def device_of(name: str) -> str:
    return "cuda" if name == "triton" and torch.cuda.is_available() else "cpu"


NAMES = [pytest.param(n, marks=needs_triton if n == "triton" else ()) for n in BACKENDS]
WRITERS = {"naive": "write_kv_naive", "torch": "write_kv_torch", "cpu": "write_kv_torch", "triton": "write_kv_triton"}
backends = pytest.mark.parametrize("name", NAMES)


# ---- a sanitizer: the interpreter does not look where it reads and writes ----

def span(x: Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the first one behind it."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


class Sanitizer:
    """Every load and store of a launch must lie inside one of its tensors, and no element may be stored twice."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.stored: list[np.ndarray] = []

    def check(self, what: str, pointers: np.ndarray, mask: np.ndarray, program: object) -> np.ndarray:
        at = np.ravel(pointers)[np.ravel(mask).astype(bool)].astype(np.int64)
        inside = not at.size or any(a <= at.min() and at.max() < b for a, b in self.spans)
        assert inside, f"program {program} {what}s outside every tensor"
        return at

    def finish(self) -> None:
        at = np.concatenate(self.stored) if self.stored else np.zeros(0)
        self.stored = []
        assert len(np.unique(at)) == len(at), "an element is stored twice: on a GPU, either may win"


@pytest.fixture(autouse=True)
def sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    if not attention.interpreting():
        return
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    watch = Sanitizer()
    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        watch.spans, watch.stored = [span(a) for a in args if isinstance(a, Tensor)], []
        launch(self, *args, **kwargs)
        watch.finish()

    def watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.check("load", pointers.data, mask.data, self.grid_idx)
        return load(self, pointers, mask, *rest)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.stored.append(watch.check("store", pointers.data, mask.data, self.grid_idx))
        return store(self, pointers, value, mask, *rest)

    monkeypatch.setattr(GridExecutor, "__call__", watched_launch)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)


# ---- the oracle: one query row, one head at a time, in float64, on K and V that lie in order ----

def oracle(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int = 0, cap: float = 0.0) -> Tensor:
    """query [Q, H, D] are the last tokens of key, value [L, KVH, D]; returns [Q, H, D] float64."""
    q, k, v = query.double(), key.double(), value.double()
    context, share = k.shape[0] - q.shape[0], q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            seen = slice(max(0, context + i + 1 - window) if window else 0, context + i + 1)
            scores = (k[seen, h // share] @ q[i, h]) * scale
            if cap:
                scores = cap * (scores / cap).tanh()
            weights = (scores - scores.max()).exp()
            out[i, h] = (weights / weights.sum()) @ v[seen, h // share]
    return out


# ---- cases ----

@dataclass(frozen=True)
class Shape:
    requests: tuple[tuple[int, int], ...]  # (query tokens, tokens before them) each
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32
    padding: int = 0  # rows behind the last token
    shared: int = 0  # blocks at the start that all requests have in common
    loud: float = 1.0  # size of the queries: large ones make scores that overflow without the running maximum
    window: int = 0  # a token sees this many, itself included; 0: all
    cap: float = 0.0  # no score is larger; 0: no limit

    def __str__(self) -> str:
        lens = "+".join(f"{q}@{c}" for q, c in self.requests)
        return f"{lens}-{self.kv_heads}x{self.group}-d{self.head_dim}-b{self.block_size}-{str(self.dtype)[6:]}"


@dataclass
class Case:
    query: Tensor
    key: Tensor
    value: Tensor
    kv_cache: Tensor  # holds the context of every request, NaN elsewhere
    meta: CommonAttentionMetadata
    scale: float
    expected: Tensor  # [num_actual_tokens, H, D] float64


def random_shape(seed: int) -> Shape:
    """The first twenty are small; behind them head and block sizes up to 256 and groups up to 16, of whatever size."""
    rnd, wide = random.Random(seed), seed >= 20
    requests = []
    for _ in range(rnd.randint(1, 6)):
        decode = rnd.random() < 0.55
        requests.append((1 if decode else rnd.randint(2, 36), rnd.choice([0, rnd.randint(0, 90 if decode else 40)])))
    block_size = rnd.choice([1, 4, 8, 8, 16, 16, 32])
    if wide:
        block_size = rnd.choice([8, 16, 32, 64, 128, 256, rnd.randint(1, 256)])
        requests[0] = (requests[0][0], rnd.choice([requests[0][1], rnd.randint(0, 300)]))
        if rnd.random() < 0.3 and block_size <= 64:  # all have a block to share
            requests = [(q, c + block_size) for q, c in requests]
    shared = min(c for _, c in requests) // block_size
    dtype = rnd.choice([torch.float32] * 4 + [torch.float16, torch.bfloat16])
    kv_heads, group = rnd.choice([1, 2, 3]), rnd.choice([1, 1, 2, 3, 4, 7, 8])
    head_dim = rnd.choice([16, 24, 32, 64, 80, 128])
    if wide:
        group = rnd.choice([group, rnd.randint(1, 16)])
        head_dim = rnd.choice([32, 64, 96, 128, 256, 8 * rnd.randint(4, 32)])
    return Shape(tuple(requests), kv_heads, group, head_dim, block_size, dtype=dtype,
                 padding=rnd.choice([0, 0, 3]), shared=rnd.choice([0, shared]), loud=rnd.choice([1.0, 1.0, 40.0]))


def block_tables(shape: Shape, rnd: random.Random) -> tuple[Tensor, int]:
    """Block ids in no order, block 0 left out; entries behind a request's last block are nonsense on purpose."""
    counts = [-(-(q + c) // shape.block_size) for q, c in shape.requests]
    free = list(range(1, sum(counts) + 4))
    rnd.shuffle(free)
    common = [free.pop() for _ in range(shape.shared)]
    table = torch.full((len(counts), max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    for row, n in zip(table, counts, strict=True):
        row[:n] = torch.tensor(common + [free.pop() for _ in range(n - shape.shared)])
    return table, sum(counts) + 4


def build(shape: Shape, seed: int = 0, device: str = "cpu") -> Case:
    """A new pool and new metadata for a case, whose numbers are made once."""
    case = _build(shape, seed, device)
    return replace(case, kv_cache=case.kv_cache.clone(), meta=replace(case.meta))


@cache
def _build(shape: Shape, seed: int, device: str) -> Case:
    gen, rnd = torch.Generator().manual_seed(seed), random.Random(seed)
    table, num_blocks = block_tables(shape, rnd)
    heads, size, dtype = shape.kv_heads * shape.group, shape.block_size, shape.dtype
    kv_cache = torch.full((2, num_blocks, size, shape.kv_heads, shape.head_dim), float("nan"), dtype=dtype)
    scale = rnd.choice([shape.head_dim**-0.5, 0.3])
    common = torch.randn(2, shape.shared * size, shape.kv_heads, shape.head_dim, generator=gen)
    parts: list[tuple[Tensor, ...]] = []
    slots: list[int] = []
    for r, (q_len, context) in enumerate(shape.requests):
        kv = torch.randn(2, context + q_len, shape.kv_heads, shape.head_dim, generator=gen)
        kv[:, : common.shape[1]] = common
        k, v = kv.to(dtype)
        q = (torch.randn(q_len, heads, shape.head_dim, generator=gen) * shape.loud).to(dtype)
        where = [slot_of(table[r].tolist(), p, size) for p in range(context + q_len)]
        for p in range(context):
            kv_cache[0, where[p] // size, where[p] % size], kv_cache[1, where[p] // size, where[p] % size] = k[p], v[p]
        slots += where[context:]
        parts.append((q, k[context:], v[context:], oracle(q, k, v, scale, shape.window, shape.cap)))
    query, key, value, expected = (torch.cat(x) for x in zip(*parts, strict=True))
    q_lens, lens = [q for q, _ in shape.requests], [q + c for q, c in shape.requests]
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    meta = CommonAttentionMetadata(
        num_actual_tokens=len(slots), num_reqs=len(lens), max_query_len=max(q_lens), max_seq_len=max(lens),
        query_start_loc=starts.to(device), seq_lens=torch.tensor(lens, dtype=torch.int32).to(device),
        block_table=table.to(device), slot_mapping=torch.tensor(slots + [-1] * shape.padding).to(device))

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_full((shape.padding, *x.shape[1:]), float("nan"))]).to(device)

    return Case(padded(query), padded(key), padded(value), kv_cache.to(device), meta, scale, expected)


def check(out: Tensor, case: Case, dtype: torch.dtype, loud: float = 1.0) -> None:
    n = case.meta.num_actual_tokens
    scores = loud if dtype == torch.float32 else 1.0  # a score of 1000 in float32 is right to 1e-4, and exp() shows it
    assert out.shape == case.query.shape and out.dtype == dtype
    got = out[:n].double().cpu()
    assert not got.isnan().any(), "NaN leaked"
    assert (got - case.expected).abs().max().item() < TOLERANCE[dtype] * scores
    assert out[n:].count_nonzero() == 0, "padding rows must be zeros"


def write_and_read(name: str, shape: Shape, seed: int = 0) -> None:
    case = build(shape, seed, device_of(name))
    backend = get_backend(name)
    backend.write(case.key, case.value, case.kv_cache, case.meta)
    check(backend.read(case.query, case.kv_cache, case.meta, case.scale), case, shape.dtype, shape.loud)


# ---- random shapes ----

@backends
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(name: str, seed: int) -> None:
    write_and_read(name, random_shape(seed), seed)


@pytest.mark.long
@backends
@pytest.mark.parametrize("first", range(20, 500, 20))
def test_more_random_shapes(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        write_and_read(name, random_shape(seed), seed)


# ---- chosen shapes: what random ones might miss ----

CHOSEN = {
    "one token, no context": Shape(((1, 0),), 1, 1, 16, 8),
    "first token of a block": Shape(((1, 16), (1, 8)), 2, 2, 16, 8),
    "last token of a block": Shape(((1, 15), (1, 7)), 2, 2, 16, 8),
    "a whole block at once": Shape(((8, 0), (8, 8)), 2, 2, 16, 8),
    "one decode among prefills": Shape(((9, 0), (1, 30), (17, 13), (1, 0)), 2, 2, 16, 8),
    "decodes of very unlike length": Shape(((1, 200), (1, 0), (1, 3), (1, 130)), 1, 4, 16, 16),
    "two requests share two blocks": Shape(((1, 20), (5, 16), (1, 19)), 2, 2, 16, 8, shared=2),
    "more rows than tokens": Shape(((1, 20), (5, 16)), 2, 2, 16, 8, padding=5),
    "scores that overflow exp": Shape(((1, 70), (9, 3)), 2, 2, 64, 16, loud=100.0),
    "head size that is no power of two": Shape(((1, 20), (7, 9)), 2, 2, 80, 16),
    "head size below a tile": Shape(((1, 20), (7, 9)), 2, 2, 8, 16),
    "group that is no power of two": Shape(((1, 20), (7, 9)), 1, 7, 16, 16),
    "group larger than a tile": Shape(((1, 20), (7, 9)), 1, 24, 16, 16),
    "heads of 32, blocks of 256": Shape(((1, 20), (7, 300)), 1, 2, 32, 256),
    "heads of 192, blocks of 64": Shape(((1, 20), (7, 90)), 1, 3, 192, 64),
    "heads of 256, blocks of 128": Shape(((1, 150), (7, 9)), 2, 2, 256, 128),
    "heads of 256, float16": Shape(((1, 40), (7, 9)), 1, 4, 256, 8, torch.float16),
    "heads of 256, bfloat16": Shape(((1, 40), (7, 9)), 1, 4, 256, 256, torch.bfloat16),
    "blocks of one token": Shape(((1, 20), (7, 9)), 2, 2, 16, 1),
    "blocks of an odd size": Shape(((1, 20), (7, 9)), 2, 2, 16, 11),
    "float16": Shape(((1, 40), (7, 9)), 2, 2, 64, 16, torch.float16),
    "bfloat16": Shape(((1, 40), (7, 9)), 2, 2, 64, 16, torch.bfloat16),
}


@backends
@pytest.mark.parametrize("what", CHOSEN)
def test_chosen_shapes(name: str, what: str) -> None:
    write_and_read(name, CHOSEN[what])


@backends
@pytest.mark.parametrize("chunk", [1, 7, 8, 9, 37])
def test_chunks_of_a_prompt_give_the_same_as_the_whole(name: str, chunk: int) -> None:
    """A prompt of 37 tokens, written and read chunk by chunk: each step sees what the earlier ones wrote."""
    whole = build(Shape(((37, 0),), 2, 2, 16, 8), 5, device_of(name))
    backend, outs = get_backend(name), []
    for a in range(0, 37, chunk):
        b = min(a + chunk, 37)
        meta = replace(whole.meta, num_actual_tokens=b - a, max_query_len=b - a, max_seq_len=b,
                       query_start_loc=torch.tensor([0, b - a], dtype=torch.int32, device=whole.query.device),
                       seq_lens=torch.full_like(whole.meta.seq_lens, b), slot_mapping=whole.meta.slot_mapping[a:b])
        backend.write(whole.key[a:b], whole.value[a:b], whole.kv_cache, meta)
        outs.append(backend.read(whole.query[a:b], whole.kv_cache, meta, whole.scale))
    check(torch.cat(outs), whole, torch.float32)


@backends
def test_a_request_that_is_not_scheduled_costs_nothing(name: str) -> None:
    """query_start_loc may repeat itself: a row without a token in this step, in the middle or at the end."""
    case = build(Shape(((3, 9), (1, 12)), 2, 2, 16, 8), 1, device_of(name))
    m = case.meta
    lens, table = m.seq_lens.tolist(), m.block_table
    idle = torch.zeros_like(table[:1])
    meta = replace(m, num_reqs=4, query_start_loc=m.query_start_loc[[0, 1, 1, 2, 2]].contiguous(),
                   seq_lens=torch.tensor([lens[0], 5, lens[1], 0], dtype=torch.int32, device=table.device),
                   block_table=torch.cat([table[:1], idle, table[1:], idle]))
    backend = get_backend(name)
    backend.write(case.key, case.value, case.kv_cache, meta)
    check(backend.read(case.query, case.kv_cache, meta, case.scale), case, torch.float32)


@backends
def test_slices_of_a_fused_projection(name: str) -> None:
    """Q, K and V as a model has them: views with a stride, cut out of one tensor."""
    case = build(CHOSEN["one decode among prefills"], 2, device_of(name))
    fused = torch.cat([x.flatten(1) for x in (case.query, case.key, case.value)], dim=1)
    q, k, v = fused.split([case.query[0].numel(), case.key[0].numel(), case.value[0].numel()], dim=1)
    backend = get_backend(name)
    assert k.stride(0) != case.value.stride(0)
    backend.write(k.view(case.key.shape), case.value, case.kv_cache, case.meta)  # as after a norm on one of the two
    assert torch.equal(case.kv_cache.view(2, -1, *case.value.shape[1:])[1, case.meta.slot_mapping], case.value)
    case.kv_cache.view(2, -1, *case.value.shape[1:])[:, case.meta.slot_mapping] = float("nan")
    backend.write(k.view(case.key.shape), v.view(case.value.shape), case.kv_cache, case.meta)
    check(backend.read(q.view(case.query.shape), case.kv_cache, case.meta, case.scale), case, torch.float32)
    heads_first = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # no token's heads lie in a row
    check(backend.read(heads_first, case.kv_cache, case.meta, case.scale), case, torch.float32)


# ---- write ----

@backends
def test_write_touches_its_slots_and_nothing_else(name: str) -> None:
    case = build(Shape(((9, 0), (1, 0), (1, 0)), 3, 1, 24, 8), 3, device_of(name))
    slots = case.meta.slot_mapping.clone()
    slots[[2, 6]] = -1  # padding may stand anywhere
    getattr(paged_write, WRITERS[name])(case.key, case.value, case.kv_cache, slots)
    flat = case.kv_cache.view(2, -1, 3, 24)
    real = (slots >= 0).nonzero()[:, 0]
    assert len(real) == 9
    assert torch.equal(flat[0, slots[real]], case.key[real])
    assert torch.equal(flat[1, slots[real]], case.value[real])
    touched = torch.zeros(flat.shape[1], dtype=torch.bool, device=flat.device)
    touched[slots[real]] = True
    assert flat[:, ~touched].isnan().all()


@backends
def test_write_of_padding_only(name: str) -> None:
    case = build(Shape(((3, 0),), 1, 1, 16, 8), 3, device_of(name))
    padding = torch.full_like(case.meta.slot_mapping, -1)
    getattr(paged_write, WRITERS[name])(case.key, case.value, case.kv_cache, padding)
    assert case.kv_cache.isnan().all()


@backends
def test_offsets_beyond_32_bits(name: str) -> None:
    """A pool whose last element has an index above 2**31. Only the touched pages of it become real memory."""
    if device_of(name) == "cuda":
        pytest.skip("the pool is memory that is promised, not taken, which a GPU does not offer")
    kv_heads, head_dim, block_size = 2, 128, 16
    num_blocks = 2**31 // (block_size * kv_heads * head_dim) + 4
    size = 2 * num_blocks * block_size * kv_heads * head_dim * 2
    try:
        noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
    except OSError:
        pytest.skip("no address space for a pool of 8 GiB")
    kv_cache = torch.frombuffer(memory, dtype=torch.float16).view(2, num_blocks, block_size, kv_heads, head_dim)
    case = build(Shape(((1, 0), (20, 0)), kv_heads, 2, head_dim, block_size, torch.float16), 4)
    table = torch.tensor([[num_blocks - 1, 0], [num_blocks - 2, num_blocks - 3]], dtype=torch.int32)
    slots = [slot_of(table[0].tolist(), 0, 16)] + [slot_of(table[1].tolist(), p, 16) for p in range(20)]
    meta = replace(case.meta, block_table=table, slot_mapping=torch.tensor(slots))
    backend = get_backend(name)
    backend.write(case.key, case.value, kv_cache, meta)
    assert torch.equal(kv_cache[0, num_blocks - 1, 0], case.key[0])
    check(backend.read(case.query, kv_cache, meta, case.scale), case, torch.float16)


# ---- the torch path ----

@pytest.mark.parametrize("slots", [1, 50, 10_000])
def test_decodes_are_grouped_within_the_memory_bound(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = CHOSEN["decodes of very unlike length"]
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", slots * shape.kv_heads * shape.head_dim)
    case = build(shape)
    plan = case.meta.read_plan(case.kv_cache)
    assert sorted(r for g in plan.decodes for r in g.rows.tolist()) == [0, 1, 2, 3]
    assert all(g.slots.numel() <= slots or len(g.rows) == 1 for g in plan.decodes)
    assert len(plan.decodes) == {1: 4, 50: 3, 10_000: 1}[slots]
    write_and_read("torch", shape)


def test_long_chunks_are_cut_into_query_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERY_TILE", 5)
    write_and_read("torch", Shape(((17, 12), (5, 3), (6, 0), (1, 4)), 2, 2, 16, 8))


def test_a_plan_is_made_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case, made, plan_read = build(CHOSEN["one decode among prefills"]), [], attention.plan_read

    def counting(*args: Tensor) -> attention.ReadPlan:
        made.append(args)
        return plan_read(*args)

    monkeypatch.setattr(attention, "plan_read", counting)
    backend = get_backend("torch")
    backend.write(case.key, case.value, case.kv_cache, case.meta)
    layers = [backend.read(case.query, case.kv_cache, case.meta, case.scale) for _ in range(3)]
    assert len(made) == 1
    assert all(torch.equal(layers[0], x) for x in layers)  # a reused buffer must not change an earlier result


# ---- the Triton path ----

def read_with(config: ReadConfig, shape: Shape) -> None:
    case = build(shape, 0, device_of("triton"))
    m = case.meta
    paged_write.write_kv_triton(case.key, case.value, case.kv_cache, m.slot_mapping)
    out = paged_attention.read_triton(case.query, case.kv_cache, m.block_table, m.seq_lens, m.query_start_loc,
                                      case.scale, m.max_query_len, m.max_seq_len, config, shape.window, shape.cap)
    check(out, case, shape.dtype, shape.loud)


@needs_triton
@pytest.mark.parametrize("splits", [2, 4, 8])
@pytest.mark.parametrize("what", [
    "decodes of very unlike length", "one token, no context", "scores that overflow exp", "more rows than tokens",
    "one decode among prefills",
    "group that is no power of two", "head size that is no power of two", "bfloat16"])
def test_splits_merge_to_the_same(what: str, splits: int) -> None:
    """Also where a split finds no key at all, where a row of it sees none, and for rows of padding."""
    read_with(ReadConfig(block_m=16, tile_n=16, num_splits=splits), CHOSEN[what])


@needs_triton
@pytest.mark.parametrize("block_m, tile_n", [(16, 16), (16, 32), (32, 16), (64, 128)])
@pytest.mark.parametrize("what", ["one decode among prefills", "blocks of an odd size", "group larger than a tile"])
def test_tiles_of_any_size(what: str, block_m: int, tile_n: int) -> None:
    """Tiles that cross pages, tiles of part of a page, several query tiles a request."""
    read_with(ReadConfig(block_m, tile_n), CHOSEN[what])


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows that are not stored
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window, cap", [(1, 0.0), (17, 0.0), (40, 5.0), (0, 2.0)])
@pytest.mark.parametrize("what", ["one decode among prefills", "decodes of very unlike length"])
def test_windows_and_caps(what: str, window: int, cap: float, splits: int) -> None:
    """Also windows of one token, of a whole tile, of one more, and wider than the request."""
    read_with(ReadConfig(16, 16, splits), replace(CHOSEN[what], window=window, cap=cap))


@needs_triton
def test_a_window_loads_only_its_own_tiles() -> None:
    """What lies before the window of a tile's first token, in tiles of its own, may be anything, even NaN."""
    shape = replace(CHOSEN["decodes of very unlike length"], window=20)
    case = build(shape, 0, device_of("triton"))
    m = case.meta
    paged_write.write_kv_triton(case.key, case.value, case.kv_cache, m.slot_mapping)
    table = m.block_table[0].tolist()
    for position in range(200 + 1 - 20 - 16):  # the first request's decode stands at position 200
        case.kv_cache[:, table[position // 16], position % 16] = float("nan")
    out = paged_attention.read_triton(case.query, case.kv_cache, m.block_table, m.seq_lens, m.query_start_loc,
                                      case.scale, 1, 201, ReadConfig(16, 16), window=20)
    check(out, case, shape.dtype)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 500, 20))
def test_more_splits_windows_and_caps(first: int) -> None:
    """Random shapes again, with keys split, windows, caps, and tiles of other sizes; not so many tokens."""
    for seed in range(first, first + 20):
        rnd = random.Random(-seed)
        shape = replace(random_shape(seed), window=rnd.choice([0, rnd.randint(1, 60)]), cap=rnd.choice([0.0, 0.0, 3.0]))
        config = ReadConfig(rnd.choice([16, 32, 64]), rnd.choice([16, 32, 64]), rnd.choice([1, 2, 4, 16]))
        tokens = 4 * max(1, config.block_m // shape.group)
        if config.num_splits > 1:  # so many programs more
            tokens = 3
            shape = replace(shape, requests=shape.requests[:3], kv_heads=min(shape.kv_heads, 8 // shape.group + 1, 2))
        read_with(config, replace(shape, requests=tuple((min(q, tokens), c) for q, c in shape.requests)))


def test_configurations_for_a_gpu() -> None:
    """Long lone decodes are split, full batches and prefills are not; a split count is a power of two."""

    def splits(num_reqs: int, max_query_len: int, max_seq_len: int, arch: str = "sm_90") -> int:
        config = paged_attention.pick_config(num_reqs, max_query_len, max_seq_len, 8, 128, torch.bfloat16, arch)
        return config.num_splits

    assert splits(1, 1, 8192) == 32
    assert splits(4, 1, 8192) == 8
    assert splits(64, 1, 8192) == 1
    assert splits(1, 1, 100) == 1
    assert splits(1, 512, 8192) == 1
    assert splits(1, 1, 8192, "sm_80") == 16  # 108 processors
    assert splits(4, 1, 8192, "gfx942") == 16  # 304
    assert splits(4, 1, 8192, "a new one") == splits(4, 1, 8192)
    assert paged_attention.architecture(torch.device("cpu")) == "cpu"
    assert all(n & (n - 1) == 0 for n in (splits(r, 1, s) for r in range(1, 40) for s in (1, 300, 1000, 5000)))


# ---- choosing a backend ----

def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=f"attention_backend: 'flash' is not one of {', '.join(BACKENDS)}"):
        get_backend("flash")


def in_a_new_process(code: str, **env: str) -> str:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, **env}, capture_output=True,
                          text=True, timeout=120, check=True)
    return done.stdout.strip()


TRY = """
from walkvllm.attention import get_backend
for name in ("naive", "cpu", "triton"):
    try:
        print(get_backend(name).name)
    except ValueError as e:
        print(e)
"""


def test_triton_not_installed() -> None:
    """The kernels' modules still import, and the other two backends run."""
    out = in_a_new_process("import sys; sys.modules['triton'] = None\n" + TRY)
    assert out.splitlines()[:2] == ["naive", "cpu"]
    assert "not installed" in out.splitlines()[2]


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs triton and no GPU")
def test_triton_without_gpu_and_interpreter() -> None:
    out = in_a_new_process(TRY, TRITON_INTERPRET="0")
    assert out.splitlines()[:2] == ["naive", "cpu"]
    assert "TRITON_INTERPRET=1" in out.splitlines()[2]
