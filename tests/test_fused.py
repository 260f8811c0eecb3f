"""The kernels beside attention, in the interpreter or on a GPU, against float64, on random shapes."""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_kernels import TOLERANCE, device_of, needs_triton, sanitizer  # noqa: F401  (sanitizer: for every test here)
from torch import Tensor
from walkvllm.kernels.paged_read import attend

from walkvllm import attention, sampler
from walkvllm.kernels import fused, paged_attention, paged_write, top_k_top_p

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]  # 1 / inf is right
DEVICE = device_of("triton")
DTYPES = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
quick_and_long = [*range(16), *[pytest.param(first, marks=pytest.mark.long) for first in range(16, 500, 22)]]


def seeds(first: int) -> range:
    """One seed in the usual run, a run of them in the long one."""
    return range(first, first + 1 if first < 16 else min(first + 22, 500))


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Equal to what the type can tell, at the size of what was wanted."""
    got = got.double().cpu()
    assert got.shape == want.shape and torch.equal(got.isnan(), want.isnan())
    bound = TOLERANCE[dtype] * want.abs().nan_to_num().clamp(min=1)
    assert ((got - want).abs().nan_to_num() <= bound).all()


def randn(gen: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=gen).to(dtype)


# ---- add and norm ----

@pytest.mark.parametrize("first", quick_and_long)
def test_add_rms_norm(first: int) -> None:
    for seed in seeds(first):
        rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        tokens, width, dtype = rnd.randint(1, 9), rnd.choice([1, 8, 96, rnd.randint(2, 300)]), rnd.choice(DTYPES)
        eps, loud = rnd.choice([1e-6, 1e-5, 0.1]), rnd.choice([1.0, 1e-3, 30.0])
        residual = (randn(gen, tokens, width) * loud).to(dtype)
        x = rnd.choice([None, (randn(gen, tokens, width) * loud).to(dtype)])
        weight = (torch.rand(width, generator=gen) + 0.5).to(dtype)
        total = residual.double() if x is None else residual.double() + x.double()
        want = total / (total.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
        for add_rms_norm, where in ((fused.add_rms_norm_triton, DEVICE), (fused.add_rms_norm_naive, "cpu")):
            stream = residual.to(where, copy=True)
            out = add_rms_norm(stream, None if x is None else x.to(where), weight.to(where), eps)
            close(out, want, dtype)
            close(stream, total, dtype)
            assert x is not None or torch.equal(stream.cpu(), residual)


# ---- gate and multiply ----

@pytest.mark.parametrize("first", quick_and_long)
def test_silu_and_mul(first: int) -> None:
    for seed in seeds(first):
        rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        tokens, dtype = rnd.randint(1, 7), rnd.choice(DTYPES)
        width = rnd.choice([1, 64, 1024, 1025, rnd.randint(2, 300), rnd.randint(1000, 2500)])
        x = randn(gen, tokens, 2 * width, dtype=dtype) * rnd.choice([1, 1, 10, 200 if dtype == torch.float32 else 10])
        gate, up = x.double().chunk(2, dim=-1)
        want = gate * gate.sigmoid() * up
        close(fused.silu_and_mul_triton(x.to(DEVICE)), want, dtype)
        close(fused.silu_and_mul_naive(x), want, dtype)


# ---- norm, turn and write ----

def rope_oracle(qkv: Tensor, positions: Tensor, table: Tensor, kv_cache: Tensor, slots: Tensor,
                weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The queries and the pool [2, slots, KVH, D] that must come out, head by head, in float64."""
    kv_heads, dim = kv_cache.shape[3:]
    heads = qkv.double().view(qkv.shape[0], -1, dim)
    q_heads = heads.shape[1] - 2 * kv_heads
    query, pool = torch.empty(len(heads), q_heads, dim).double(), kv_cache.double().view(2, -1, kv_heads, dim).clone()
    for t, row in enumerate(heads):
        cos, sin = table[positions[t]].double()
        for h in range(q_heads + kv_heads):
            x = row[h]
            if weight is not None:
                x = x / (x.square().mean() + eps).sqrt() * weight[h].double()
            turned = torch.cat([x[: dim // 2] * cos - x[dim // 2 :] * sin, x[dim // 2 :] * cos + x[: dim // 2] * sin])
            if h < q_heads:
                query[t, h] = turned
            elif slots[t] >= 0:
                pool[0, slots[t], h - q_heads] = turned
        if slots[t] >= 0:
            pool[1, slots[t]] = row[q_heads + kv_heads :]
    return query, pool


@pytest.mark.parametrize("first", quick_and_long)
def test_rope_and_write(first: int) -> None:
    """Every slot that is not named stays NaN."""
    for seed in seeds(first):
        rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        kv_heads, dim, dtype = rnd.choice([1, 2, 3]), rnd.choice([2, 16, 24, 64, 80]), rnd.choice(DTYPES)
        q_heads, tokens, size = kv_heads * rnd.choice([1, 2, 7]), rnd.randint(1, 8), rnd.choice([1, 8, 11])
        qkv = randn(gen, tokens, (q_heads + 2 * kv_heads) * dim, dtype=dtype)
        angles = torch.rand(40, dim // 2, generator=gen) * 6
        table = torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype)
        positions = torch.randint(0, 40, (tokens,), generator=gen)
        blocks = 2 + tokens
        slots = torch.randperm((blocks - 1) * size, generator=gen)[:tokens] + size
        if size == 1:
            slots = torch.arange(1, tokens + 1)
        slots[torch.rand(tokens, generator=gen) < 0.2] = -1
        weight = rnd.choice([None, (torch.rand(q_heads + kv_heads, dim, generator=gen) + 0.5).to(dtype)])
        empty = torch.full((2, blocks, size, kv_heads, dim), float("nan"), dtype=dtype)
        query, pool = rope_oracle(qkv, positions, table, empty, slots, weight, 1e-5)
        for run, where in ((fused.rope_and_write_triton, DEVICE), (fused.rope_and_write_naive, "cpu")):
            kv_cache = empty.to(where, copy=True)
            args = [None if t is None else t.to(where) for t in (qkv, positions, table, kv_cache, slots, weight)]
            close(run(*args, 1e-5), query, dtype)  # type: ignore[arg-type]
            close(args[3].view(2, -1, kv_heads, dim), pool, dtype)  # type: ignore[union-attr]


# ---- slots ----

@pytest.mark.parametrize("first", quick_and_long)
def test_slot_mapping(first: int) -> None:
    for seed in seeds(first):
        rnd = random.Random(seed)
        size, requests = rnd.choice([1, 8, 11, 16, 256]), rnd.randint(1, 6)
        counts = [rnd.choice([0, 1, 1, rnd.randint(2, 40), rnd.choice([256, 257, 300])]) for _ in range(requests)]
        starts = [rnd.choice([0, rnd.randint(0, 500)]) for _ in range(requests)]
        wide = max((s + n) // size + 1 for s, n in zip(starts, counts, strict=True))
        table = torch.tensor([[rnd.randint(1, 2**31 - 1) for _ in range(wide)] for _ in range(requests)])
        padding = rnd.choice([0, 0, 1, 300])
        positions = torch.tensor([s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]
                                 + [7] * padding, dtype=torch.int64)
        rows = [r for r, n in enumerate(counts) for _ in range(n)]
        want = [int(table[r, p // size]) * size + p % size for r, p in zip(rows, positions.tolist(), strict=False)]
        loc = torch.tensor([0, *counts]).cumsum(0).int()
        for run, where in ((fused.slot_mapping_triton, DEVICE), (fused.slot_mapping_naive, "cpu")):
            got = run(positions.to(where), loc.to(where), table.int().to(where), size)
            assert got.dtype == torch.int64 and got.tolist() == want + [-1] * padding


# ---- top-k and top-p ----

def kept(row: list[float], k: Any, p: Any) -> tuple[list[int], list[int]]:
    """The ids that must stay, and those at the edge of top-p, which a sum in float32 may decide either way."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if k is not None:
        order = [i for i in order if row[i] >= row[order[k - 1]]]
    if p is None:
        return order, []
    order = [i for i in order if row[i] > float("-inf")]
    weights = torch.tensor([row[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    left_out, stay, edge = 0.0, list(order), []
    for i, w in zip(reversed(order[1:]), reversed(weights[1:]), strict=True):
        left_out += w
        if abs(left_out - (1 - p)) < 3e-6:
            edge.append(i)
        elif left_out > 1 - p:
            break
        else:
            stay.remove(i)
    return [i for i in stay if i not in edge], edge


def sampler_rule(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """What the sampler does in torch."""
    if top_k is not None:
        logits = sampler.apply_top_k(logits, top_k)
    return logits if top_p is None else sampler.apply_top_p(logits, top_p)


RULES: list[tuple[Callable[..., Tensor], str]] = [
    (top_k_top_p.top_k_top_p_triton, DEVICE), (top_k_top_p.top_k_top_p_naive, "cpu"), (sampler_rule, "cpu")]


@pytest.mark.parametrize("first", quick_and_long)
def test_top_k_top_p(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many equal and nearly equal logits, -inf, -0.0, far below 0; k of 1 and all, p near 0 and 1; unfilled tiles."""
    for seed in seeds(first):
        rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
        rows, vocab = rnd.randint(1, 3), rnd.choice([1, 2, 64, *[rnd.randint(3, 200)] * 5])
        logits = randn(gen, rows, vocab) * rnd.choice([0.1, 1.0, 3.0, 10.0])
        if rnd.random() < 0.5:
            logits = (logits * 2).round() / 2 * torch.where(torch.rand(rows, vocab, generator=gen) < 0.5, 1.0, -1.0)
        if rnd.random() < 0.3:
            logits[:, 1:][torch.rand(rows, vocab - 1, generator=gen) < 0.7] = float("-inf")
        logits -= 300.0 * (seed % 3 == 0)  # all of them far below 0: what lies beside a row must not weigh more
        k = rnd.choice([None, torch.tensor([rnd.choice([1, vocab, rnd.randint(1, vocab)]) for _ in range(rows)])])
        p = torch.tensor([rnd.choice([1e-9, 1e-6, rnd.random(), 0.9, 0.999]) for _ in range(rows)])
        p = p if k is None or rnd.random() < 0.7 else None
        if rnd.random() < 0.4 and vocab > 1:  # neighbours that differ in their last bit
            logits[:, 1::2] = torch.nextafter(logits[:, : vocab // 2 * 2 : 2], torch.tensor(float("-inf")))
        if DEVICE == "cpu":  # a kernel that sees several tiles a row
            monkeypatch.setattr(top_k_top_p, "triton", SmallTiles(rnd.choice([16, 64, 4096])))
        for run, where in RULES:
            got = run(*(None if t is None else t.to(where, copy=True) for t in (logits, k, p)))
            for r in range(rows):
                stay, edge = kept(logits[r].tolist(), *(None if t is None else t[r].item() for t in (k, p)))
                left = {i for i, x in enumerate(got[r].tolist()) if x > float("-inf")}
                real = {i for i in stay if logits[r, i] > float("-inf")}
                assert real - set(edge) <= left <= real | set(edge), (run.__name__, seed, r)
                assert left and all(got[r, i] == logits[r, i] for i in left)


@pytest.mark.parametrize("top_k", [None, 3, 5])
def test_a_row_without_top_p_keeps_all(top_k: int | None) -> None:
    """p = 1 beside a row with the rule: nothing goes, also where a weight is 0 in float32, and even in float64."""
    logits = torch.tensor([[3.0, 2.0, -200.0, -2000.0, 1.0, float("-inf")]]).repeat(2, 1)
    p, k = torch.tensor([1.0, 0.9]), None if top_k is None else torch.tensor([top_k] * 2)
    for run, where in RULES[:2]:  # the torch path does as vLLM's does: what weighs 0 goes, and could not be drawn
        got = run(*(None if t is None else t.to(where, copy=True) for t in (logits, k, p))).cpu()
        want = [0, 1, 4] if top_k == 3 else [0, 1, 2, 3, 4]
        assert (got[0] > float("-inf")).nonzero()[:, 0].tolist() == want, run.__name__
        assert (got[1] > float("-inf")).nonzero()[:, 0].tolist() == [0, 1]


def test_zeros_of_both_signs_are_equal() -> None:
    """As the k-th largest, they all stay."""
    logits, k = torch.tensor([[-0.0, 0.0, -1.0, 0.0, -0.0]]), torch.tensor([1])
    for run, where in RULES:
        got = run(logits.to(where, copy=True), k.to(where), None).cpu()
        assert (got[0] > float("-inf")).nonzero()[:, 0].tolist() == [0, 1, 3, 4], run.__name__


class SmallTiles:
    """Stands for `triton` where a launch chooses its tile."""

    def __init__(self, tile: int) -> None:
        self.tile = tile

    def next_power_of_2(self, n: int) -> int:
        return min(self.tile, 1 << (n - 1).bit_length())


# ---- 64 bits: the first program thinks that it is far behind 2**31 elements; the memory is promised, not taken ----

def promised(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros, of which only the touched pages become real memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    try:
        return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
    except OSError:
        pytest.skip("no address space for so much memory")


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """far(n): the number of each program along the first axis is n more than it is."""
    if not attention.interpreting():
        pytest.skip("only the interpreter can be told")
    from triton.runtime.interpreter import InterpreterBuilder

    ask = InterpreterBuilder.create_get_program_id

    def set_offset(n: int) -> None:
        def answer(self: object, axis: int) -> object:
            handle = ask(self, axis)  # type: ignore[arg-type]
            handle.data = handle.data + (n if axis == 0 else 0)
            return handle
        monkeypatch.setattr(InterpreterBuilder, "create_get_program_id", answer)
    return set_offset


def far_add_rms_norm(row: int, width: int, launch: Callable[[int], None]) -> None:
    out, residual, x = (promised((row + 1) * width, torch.float16).view(-1, width) for _ in range(3))
    residual[row], x[row] = torch.randn(2, width)
    want = fused.add_rms_norm_naive(residual[row:].clone(), x[row:], torch.ones(width).half(), 1e-6)
    launch(row)
    fused.add_rms_norm_kernel[(1,)](out, residual, x, torch.ones(width).half(), 1e-6, ADD=True, WIDTH=width, TILE=width)
    close(out[row:], want.double(), torch.float16)


def far_silu_and_mul(row: int, width: int, launch: Callable[[int], None]) -> None:
    out, x = promised((row + 1) * width, torch.float16), promised((row + 1) * 2 * width, torch.float16)
    out, x = out.view(-1, width), x.view(-1, 2 * width)
    x[row] = torch.randn(2 * width)
    launch(row)
    fused.silu_and_mul_kernel[(1, 1)](out, x, WIDTH=width, TILE=width)
    close(out[row:], fused.silu_and_mul_naive(x[row:]).double(), torch.float16)


def far_rope_and_write(row: int, width: int, launch: Callable[[int], None]) -> None:
    """Row, slot and position are all far."""
    dim = width // 4
    qkv, query = promised((row + 1) * width, torch.float16), promised((row + 1) * 2 * dim, torch.float16)
    qkv, query = qkv.view(-1, width), query.view(-1, 2, dim)
    slot = 2**31 // dim + 5
    pool = [promised((slot + 1) * dim, torch.float16).view(-1, 1, 1, dim) for _ in range(2)]
    table = promised((slot + 1) * dim, torch.float16).view(-1, 2, dim // 2)
    qkv[row], table[slot, 0] = torch.randn(width), 0.5
    slots, positions = (promised(row + 1, torch.int64) for _ in range(2))
    slots[row], positions[row] = slot, slot
    launch(row)
    fused.rope_and_write_kernel[(1,)](
        query, *pool, qkv, positions, slots, table, qkv, 1e-6, NORM=False, Q_HEADS=2, KV_HEADS=1, HALF=dim // 2,
        HEAD_TILE=4, HALF_TILE=dim // 2, V_TILE=dim)
    close(query[row].flatten(), qkv[row, : 2 * dim].double() / 2, torch.float16)
    close(pool[0][slot].flatten(), qkv[row, 2 * dim : 3 * dim].double() / 2, torch.float16)
    close(pool[1][slot].flatten(), qkv[row, 3 * dim :].double(), torch.float16)


def far_top_k(row: int, width: int, launch: Callable[[int], None]) -> None:
    logits = promised((row + 1) * width, torch.float32).view(-1, width)
    logits[row], top_k = torch.randn(width), promised(row + 1, torch.int64)
    top_k[row] = 3
    want = top_k_top_p.top_k_top_p_naive(logits[row:].clone(), torch.tensor([3]), None)
    launch(row)
    top_k_top_p.top_k_top_p_kernel[(1,)](logits, top_k, logits, width, HAS_K=True, HAS_P=False, TILE=width)
    assert torch.equal(logits[row:], want)


def far_write(row: int, width: int, launch: Callable[[int], None]) -> None:
    key, value = (promised((row + 1) * width, torch.float16).view(-1, width) for _ in range(2))
    key[row], value[row] = torch.randn(2, width)
    slots, pool = promised(row + 1, torch.int64), torch.zeros(2, 4, width).half()
    slots[row] = 2
    launch(row)
    paged_write.reshape_and_cache_kernel[(1,)](key, value, *pool, slots, width, width, WIDTH=width, TILE=width)
    assert torch.equal(pool[0, 2], key[row]) and torch.equal(pool[1, 2], value[row])


def far_slots(row: int, width: int, launch: Callable[[int], None]) -> None:
    """A request's row of the block table is far."""
    starts, table = promised(row + 2, torch.int32), promised((row + 1) * width, torch.int32).view(-1, width)
    starts[row + 1], table[row, 0] = 1, 7
    slots, positions = torch.zeros(1, dtype=torch.int64), torch.tensor([3])
    launch(row)
    fused.slot_mapping_kernel[(1,)](slots, positions, starts, table, 1, width, BLOCK_SIZE=8, TILE=16)
    assert slots.tolist() == [7 * 8 + 3]


def far_read(row: int, width: int, launch: Callable[[int], None], tokens_before: int = 0, splits: int = 1) -> None:
    """A request's row of the block table is far, or its token behind so many of another request."""
    dim = width // 4  # 4 query heads, 2 KV heads
    request, tokens = (1, tokens_before + 1) if tokens_before else (row, 1)
    starts, lens = promised(request + 2, torch.int32), promised(request + 1, torch.int32)
    table, pool = promised((request + 1) * width, torch.int32).view(-1, width), torch.randn(2, 3, 8, 2, dim).half()
    starts[request], starts[request + 1], lens[request] = tokens - 1, tokens, 5
    table[request, 0] = 2
    query, out = (promised(tokens * width, torch.float16).view(tokens, 4, dim) for _ in range(2))
    query[tokens - 1] = torch.randn(4, dim)
    parts = [promised(tokens * 4 * splits * n if splits > 1 else 1, torch.float32) for n in (dim, 1, 1)]
    launch((tokens - 1) // 8 + request)  # the number of the request's tile
    paged_attention.paged_attention_kernel[(1, 2, splits)](
        out, query, *parts, *pool, table, lens, starts, request + 1, 0.1, width, width, splits,
        KV_HEADS=2, GROUP=2, HEAD_DIM=dim, DIM_TILE=dim, BLOCK_SIZE=8, BLOCK_Q=8, BLOCK_M=16, TILE_N=16,
        SPLIT=splits > 1, WINDOW=0, SOFT_CAP=0.0, WIDEN=False)
    if splits > 1:
        for head in range(4):
            launch((tokens - 1) * 4 + head)
            paged_attention.reduce_splits_kernel[(1,)](out, *parts, HEAD_DIM=dim, DIM_TILE=dim, NUM_SPLITS=splits)
    want = attend(query[tokens - 1 :], pool[0, 2, :5], pool[1, 2, :5], 0.1, torch.float64)
    close(out[tokens - 1 :], want.double(), torch.float16)


FAR_READS = [far_read, partial(far_read, tokens_before=2**31 // 1024 + 3),
             partial(far_read, tokens_before=2**20 + 3, splits=2)]
FAR = [far_add_rms_norm, far_silu_and_mul, far_rope_and_write, far_top_k, far_write, far_slots, *FAR_READS]


@pytest.mark.parametrize("run", FAR)
def test_rows_beyond_32_bits(run: Callable[..., None], far: Callable[[int], None]) -> None:
    run(2**31 // 1024 + 3, 1024, far)
