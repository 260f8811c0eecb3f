"""The compiled CPU path: functions against float64, mutants of the C, how it is built and kept, the engine on it."""

from __future__ import annotations

import ctypes
import json
import logging
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from test_kernels import CHOSEN, Case, Shape, build, random_shape, write_and_read

from walkvllm import LLM, SamplingParams
from walkvllm.attention import CommonAttentionMetadata, CpuBackend, get_backend
from walkvllm.compiled_model import CompiledLM
from walkvllm.kernels import compiler, cpu, decoder
from walkvllm.models import CausalLM, apply_rope, read_spec

torch.set_num_threads(1)
EMBEDDED = Path(str(files("walkvllm"))) / "tales-3m"
FEW = 4  # query tokens of a request that C reads one by one
MOST_STATES = 2**15  # requests times heads, for requests that share a prefix
needs_compiler = pytest.mark.skipif(cpu.library() is None, reason="needs a C compiler")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


# ---- each function against float64 ----

def rand(gen: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=gen)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert not got.isnan().any()
    return float((got.double() - expected.double()).abs().max())


def linear_case(seed: int) -> None:
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    m, n = rnd.choice([1, 2, 5, 6, 7, 13, 49, 100, 133, 270]), rnd.randint(1, 200)
    k = rnd.choice([1, 31, 128, 129, 300, 512])
    dtype, with_bias = rnd.choice(list(cpu.SUFFIX)), rnd.random() < 0.5
    x, weight, bias = rand(gen, m, k), rand(gen, n, k).to(dtype), rand(gen, n)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
    guarded = torch.full((m + 2, n), 7.0)
    decoder.PackedLinear(weight, bias if with_bias else None)(x, guarded[1:-1])
    assert error(guarded[1:-1], expected) < 1e-5 * k**0.5 * 10
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()


def glue_case(seed: int) -> None:
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, size, eps = rnd.choice([1, 3, 40]), rnd.choice([1, 7, 16, 48, 256, 577]), rnd.choice([1e-6, 0.3])
    x, delta, weight = rand(gen, tokens, size), rand(gen, tokens, size), rand(gen, size)
    total = x.double() + delta.double()
    out = torch.empty_like(x)
    decoder.add_rms_norm(out, x, delta, weight, eps)
    assert error(x, total) < 1e-6 and error(out, F.rms_norm(total, (size,), weight.double(), eps)) < 1e-5
    decoder.add_rms_norm(out, x, None, weight, eps)
    assert error(x, total) < 1e-6 and error(out, F.rms_norm(total, (size,), weight.double(), eps)) < 1e-5
    both = rand(gen, tokens, 2 * size) * rnd.choice([1, 50])
    decoder.silu_and_mul(out, both)
    gate, up = both.double().chunk(2, -1)
    assert error(out, F.silu(gate) * up) < 1e-6 * both.abs().max() ** 2


def write_case(seed: int) -> None:
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, kv_heads, dim = rnd.choice([1, 4, 33]), rnd.choice([1, 2, 3]), rnd.choice([2, 12, 24, 64, 128])
    heads, dtype = kv_heads * rnd.choice([1, 2, 3]), rnd.choice(list(cpu.SUFFIX))
    pool = torch.full((4, 12, 4, kv_heads, dim), torch.nan, dtype=dtype)  # what lies before and behind is a guard
    slots = torch.randperm(48, generator=gen)[:tokens]
    slots[torch.rand(tokens, generator=gen) < 0.2] = -1
    qkv, norm = rand(gen, tokens, heads + 2 * kv_heads, dim), rand(gen, heads + kv_heads, dim)
    angle = 9 * rand(gen, tokens, 1, dim // 2)
    normed = rnd.random() < 0.5
    qk, v = qkv[:, :-kv_heads].double(), qkv[:, -kv_heads:].clone()
    if normed:
        qk = F.rms_norm(qk, (dim,), None, 1e-5) * norm
    qk = apply_rope(qk, angle.double().cos(), angle.double().sin())
    angles = torch.cat((angle.cos(), angle.sin()), 1)
    cpu.rope_and_write(qkv, pool[1:3], slots, angles, norm if normed else None, 1e-5)
    assert error(qkv[:, :-kv_heads], qk) < 1e-4
    k_pool, v_pool = pool[1:3].view(2, 48, kv_heads, dim)
    real = slots >= 0
    assert torch.equal(v_pool[slots[real]], v[real].to(dtype))
    assert torch.equal(k_pool[slots[real]], qkv[real, heads:-kv_heads].to(dtype))
    assert int((~pool.isnan()).sum()) == 2 * int(real.sum()) * kv_heads * dim


def read_case(seed: int) -> None:
    shape = random_shape(seed)
    if seed % 3 == 0:  # blocks longer than what is taken at a time
        shape = replace(shape, block_size=random.Random(seed).choice([33, 64, 100, 256]), shared=0)
    write_and_read("cpu", shape, seed)


def tile_case(seed: int) -> None:
    "Parts of prompts that are long enough for tiles."
    rnd = random.Random(seed)
    queries, before = [1, FEW + 1, rnd.randint(2, 40), rnd.randint(2, 250)], [0, 1, 63, 64, rnd.randint(0, 200)]
    requests = tuple((rnd.choice(queries), rnd.choice(before)) for _ in range(rnd.randint(1, 3)))
    heads = rnd.choice([1, 2]), rnd.choice([1, 2, 3, 7]), rnd.choice([2, 20, 64, 80, 128])
    dtype = rnd.choice(list(cpu.SUFFIX))
    shape = Shape(requests, *heads, rnd.choice([4, 16, 100]), dtype=dtype, padding=rnd.choice([0, 3]))
    write_and_read("cpu", shape, seed)


def shared_case(seed: int) -> None:
    "Many requests with one token each and the same first blocks; some have a block or a token of their own."
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    heads = rnd.choice([(1, 3, 20), (2, 2, 64), (1, 7, 12), (2, 1, 128), (1, 3, 80), (1, 70, 12)])
    size, tile = rnd.choice([4, 16, 64]), max(1, cpu.functions().lanes() * 4 // heads[1])
    common = rnd.choice([0, 60, 64, 130, 200]) // size
    number = rnd.choice([tile // 2 + 1, tile, tile + 9, 40])
    requests = [(1, common * size + rnd.choice([0, 1, 40])) for _ in range(number)]
    if rnd.random() < 0.3:
        requests[rnd.randrange(len(requests))] = (rnd.choice([2, 9]), common * size + 9)
    dtype = rnd.choice(list(cpu.SUFFIX))
    shape = Shape(tuple(requests), *heads, size, dtype=dtype, shared=common, padding=rnd.choice([0, 3]))
    case, backend = build(shape, seed), get_backend("cpu")
    backend.write(case.key, case.value, case.kv_cache, case.meta)
    if common and rnd.random() < 0.5:
        swap_a_block(case, shape, rnd, gen)
    query, n = case.query.float(), case.meta.num_actual_tokens
    expected = get_backend("naive").read(query.double(), case.kv_cache.double(), case.meta, case.scale)
    with tiles_counted(case, shape):
        assert error(backend.read(query, case.kv_cache, case.meta, case.scale)[:n], expected[:n]) < 2e-5


def swap_a_block(case: Case, shape: Shape, rnd: random.Random, gen: torch.Generator) -> None:
    "One request gets something else at one place of what all have in common."
    table, pool = case.meta.block_table.clone(), case.kv_cache
    lens = [-(-(q + c) // shape.block_size) for q, c in shape.requests]
    used = {block for row, n in zip(table.tolist(), lens, strict=True) for block in row[:n]}
    other = next(block for block in range(pool.shape[1]) if block not in used)
    pool[:, other] = rand(gen, *pool[:, other].shape).to(pool.dtype)
    table[rnd.randrange(len(lens)), rnd.randrange(shape.shared)] = other
    case.meta = replace(case.meta, block_table=table)


def find_shared(table: torch.Tensor, lens: list[int], tokens: list[int], size: int, heads: int,
                kv_heads: int) -> list[int]:  # fmt: skip
    starts, found = torch.tensor([0, *tokens]).cumsum(0).int(), torch.full((len(lens) + 1,), -1, dtype=torch.int32)
    lengths = torch.tensor(lens).int()
    some = cpu.functions().find_shared(found.data_ptr(), table.data_ptr(), table.stride(0), lengths.data_ptr(),
                                       starts.data_ptr(), len(lens), size, heads, kv_heads)  # fmt: skip
    assert some == any(found[:-1]) and found[-1] == -1
    return found[:-1].tolist()


# How a result was found cannot be seen in it: this library says how many tiles of several requests it has read.
COUNTING = "long tiles;\n" + cpu.SOURCE.replace(
    "if (shared[r]) tile_of_", "if (shared[r]) __atomic_add_fetch(&tiles, 1, __ATOMIC_SEQ_CST), tile_of_")


def tiles_read() -> int | None:
    "None in a library that does not count."
    try:
        return ctypes.c_long.in_dll(cpu.functions(), "tiles").value
    except ValueError:
        return None


@contextmanager
def tiles_counted(case: Case, shape: Shape, layers: int = 1) -> Iterator[None]:
    "If the library counts, it must read as many tiles here as there are."
    before = tiles_read()
    yield
    if before is not None:
        tokens, lens = [q for q, _ in shape.requests], case.meta.seq_lens.tolist()
        heads = shape.kv_heads * shape.group, shape.kv_heads
        found = find_shared(case.meta.block_table, lens, tokens, shape.block_size, *heads)
        tile = max(1, cpu.functions().panel_width() // shape.group)
        assert tiles_read() == before + layers * shape.kv_heads * sum(map(bool, found[::tile]))


def together_case(seed: int) -> None:
    "Who shares keys, by lists of ids."
    rnd = random.Random(seed)
    group, size = rnd.choice([1, 2, 3, 7, 33, 64, 70]), rnd.choice([4, 16, 64, 100])
    kv_heads, panel, n = rnd.choice([1, 2, 128]), cpu.functions().panel_width(), rnd.choice([1, 7, 22, 40, 130])
    row = list(range(210 // size + 1))
    rows = [[*row[:-1], 100 + r] for r in range(n)]
    for one in rnd.sample(rows, n // 40):
        one[rnd.randrange(len(row))] = 1000
    lens = [rnd.choice([200, 190 + rnd.randrange(20), 64]) if rnd.random() < 0.1 else 200 for _ in range(n)]
    tokens = [rnd.choice([0, 2, 9]) if rnd.random() < 0.03 else 1 for _ in range(n)]
    tile, fits, expected = max(1, panel // group), n * group * kv_heads <= MOST_STATES, list[int]()
    for first in range(0, n, tile):
        mates = range(first, min(first + tile, n))
        common = 0
        if len(mates) > 1 and len(mates) * group * 3 >= panel and all(tokens[r] == 1 for r in mates):
            whole = [rows[r][: lens[r] // size] for r in mates]
            common = len(os.path.commonprefix(whole)) * size
        expected += [common if fits and common >= 64 else 0] * len(mates)
    assert find_shared(torch.tensor(rows).int(), lens, tokens, size, group * kv_heads, kv_heads) == expected


def random_model(rnd: random.Random, gen: torch.Generator, **options: int) -> CompiledLM:
    "Two small layers with some of a decoder's options."
    spec = replace(
        read_spec(json.loads((EMBEDDED / "config.json").read_text())), vocab_size=50, num_layers=2,
        hidden_size=rnd.choice([24, 96]), intermediate_size=rnd.choice([40, 130]), head_dim=rnd.choice([12, 64]),
        num_kv_heads=rnd.choice([1, 2]), qk_norm=rnd.random() < 0.5)  # fmt: skip
    spec = replace(spec, num_heads=spec.num_kv_heads * rnd.choice([1, 3]))
    spec = replace(spec, **options)
    hidden, inner, wide = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    rows = wide + 2 * spec.num_kv_heads * spec.head_dim
    shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "qkv_proj": (rows, hidden),
              "o_proj": (hidden, wide), "gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}  # fmt: skip
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    weights = {"embed_tokens.weight": rand(gen, 50, hidden), "norm.weight": rand(gen, hidden)}
    for i in range(2):
        weights |= {f"layers.{i}.{name}.weight": rand(gen, *shape) / 4 for name, shape in shapes.items()}
        if rnd.random() < 0.5:
            weights[f"layers.{i}.qkv_proj.bias"] = rand(gen, rows)
    if rnd.random() < 0.5:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    with patch("walkvllm.compiled_model.make_linear", decoder.PackedLinear):  # also where there are units for bfloat16
        return CompiledLM(spec, weights)


def decoder_case(seed: int) -> None:
    "All layers in one call, against the same calls one by one."
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    model, dtype = random_model(rnd, gen), rnd.choice(list(cpu.SUFFIX))
    requests = tuple((rnd.choice([1, 1, 5, 40]), rnd.choice([0, 7, 20])) for _ in range(rnd.randint(1, 4)))
    spec, padding = model.spec, rnd.choice([0, 2])
    shape = Shape(requests, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, 8, dtype=dtype,
                  padding=padding)  # fmt: skip
    both_ways(model, build(shape, seed), shape, gen)


@torch.inference_mode()
def both_ways(model: CompiledLM, case: Case, shape: Shape, gen: torch.Generator) -> None:
    "In one call, and in pieces by one thread: the same states, the same pools, and as many tiles of several requests."
    threads = torch.get_num_threads()
    tokens, rounding = len(case.query), 1e-3 if shape.dtype == torch.float32 else 0.05
    pools = [[case.kv_cache.clone(), case.kv_cache.flip(0).contiguous()] for _ in range(2)]
    ids, positions = torch.randint(50, (tokens,), generator=gen), torch.randint(900, (tokens,), generator=gen)
    both = []
    for model.in_one_call, pool in zip((True, False), pools, strict=True):
        torch.set_num_threads(threads if model.in_one_call else 1)
        with tiles_counted(case, shape, layers=2):
            both.append(model.forward(ids, positions, pool, case.meta, get_backend("cpu")))
        last = model.forward(ids, positions, pool, case.meta, get_backend("cpu"), only_last=True)
        assert error(last, both[-1][case.meta.query_start_loc[1:] - 1]) < 1e-3
    torch.set_num_threads(threads)
    assert error(both[0], both[1]) < 1e-3
    for one, other in zip(*pools, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=rounding, equal_nan=True)


def decoder_shares_case(seed: int) -> None:
    "The same, where many requests with one token each have their first keys in common; sometimes one has more tokens."
    rnd, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    model, dtype, common = random_model(rnd, gen), rnd.choice(list(cpu.SUFFIX)), rnd.choice([8, 9, 11])
    requests = [(1, 8 * common + rnd.choice([0, 1, 9])) for _ in range(rnd.randint(22, 70))]
    if rnd.random() < 0.5:
        requests[rnd.randrange(len(requests))] = (rnd.choice([2, FEW + 1, 30]), 8 * common + 3)
    spec, padding = model.spec, rnd.choice([0, 2])
    shape = Shape(tuple(requests), spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim, 8,
                  dtype=dtype, padding=padding, shared=common)  # fmt: skip
    case = build(shape, seed)
    if rnd.random() < 0.5:
        swap_a_block(case, shape, rnd, gen)
    both_ways(model, case, shape, gen)


CASES: dict[str, Callable[[int], None]] = {
    "linear": linear_case, "glue": glue_case, "write": write_case, "read": read_case, "tile": tile_case,
    "shared": shared_case, "together": together_case, "decoder": decoder_case, "decoder shares": decoder_shares_case,
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("what", CASES)
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(30, 510, 30))])
def test_random_cases(what: str, first: int, threads: int) -> None:
    for seed in range(first, first + 30):
        CASES[what](seed)


@pytest.fixture(scope="module")
def counting_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return cpu.load(compiler.build(COUNTING, tmp_path_factory.mktemp("counting"), compiler.compiler()))


@pytest.fixture
def counting(counting_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    "A library that counts takes the place of the usual one. Returns how many tiles it has read since."
    monkeypatch.setattr(cpu, "library", lambda: counting_library)
    before = tiles_read() or 0
    return lambda: (tiles_read() or 0) - before


@needs_compiler
@pytest.mark.parametrize("what", ["shared", "decoder shares"])
def test_prefixes_are_read_together(what: str, counting: Callable[[], int]) -> None:
    for seed in range(20):
        CASES[what](seed)
    assert counting() > 0


def on_a_small_stack(requests: int) -> None:
    "Requests of 64 heads each that share a prefix: read, and through a decoder, in a thread of half a megabyte."
    gen, ids = torch.Generator().manual_seed(0), torch.arange(requests)
    model = random_model(random.Random(0), gen, num_heads=64, num_kv_heads=16, head_dim=4)
    table = torch.cat((torch.arange(4).expand(requests, 4), 4 + ids[:, None]), 1).int()
    meta = CommonAttentionMetadata(
        num_actual_tokens=requests, num_reqs=requests, max_query_len=1, max_seq_len=70,
        query_start_loc=torch.arange(requests + 1).int(), seq_lens=torch.full((requests,), 70).int(),
        block_table=table, slot_mapping=16 * (4 + ids) + 5)  # fmt: skip
    pool, query, out = rand(gen, 2, 4 + requests, 16, 16, 4), rand(gen, requests, 64, 4), torch.empty(requests, 64, 4)
    small, usual = [pool.clone(), pool.clone()], [pool.clone(), pool.clone()]

    @torch.inference_mode()
    def through_the_decoder(pools: list[torch.Tensor]) -> torch.Tensor:
        return model.forward(ids % 50, ids % 900, pools, meta, get_backend("cpu"))

    threading.stack_size(512 * 1024)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(cpu.read_paged, out, query, pool, table, meta.seq_lens, meta.query_start_loc, 0.5).result()
        states = thread.submit(through_the_decoder, small).result()
    assert error(out, get_backend("torch").read(query, pool, meta, 0.5)) < 2e-5
    model.in_one_call = False
    assert error(states, through_the_decoder(usual)) < 1e-3


@needs_compiler
@pytest.mark.parametrize("requests", [MOST_STATES // 64, 2000])
def test_states_fit_on_a_small_stack(requests: int) -> None:
    "In a process of its own, which a stack that is too small would kill."
    process = multiprocessing.get_context("spawn").Process(target=on_a_small_stack, args=(requests,), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@needs_compiler
def test_how_many_states_are_too_many() -> None:
    table, most = torch.arange(5).int().expand(2000, 5).contiguous(), MOST_STATES // 64
    assert set(find_shared(table, [70] * most, [1] * most, 16, 64, 16)) == {64}
    assert set(find_shared(table, [70] * (most + 1), [1] * (most + 1), 16, 64, 16)) == {0}


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have vectors of one length")
@pytest.mark.parametrize("march, lanes, needed", [
    ("x86-64", 4, set()), ("haswell", 8, {"avx2", "fma", "bmi2"}), ("skylake-avx512", 16, {"avx512bw", "avx512vl"}),
])  # fmt: skip
def test_vectors_of_other_machines(march: str, lanes: int, needed: set[str], tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if needed - compiler.cpu_features():
        pytest.skip(f"this processor has no {', '.join(sorted(needed - compiler.cpu_features()))}")
    flags = [f"-march={march}" if flag == "-march=native" else flag for flag in compiler.FLAGS]
    monkeypatch.setattr(compiler, "FLAGS", flags)
    made = cpu.load(compiler.build(cpu.SOURCE, tmp_path, compiler.compiler()))
    monkeypatch.setattr(cpu, "library", lambda: made)
    assert made.lanes() == lanes
    for what in CASES.values():
        for seed in range(10):
            what(seed)


@needs_compiler
@pytest.mark.parametrize("what", CHOSEN)
def test_chosen_shapes_with_threads(what: str, threads: int) -> None:
    write_and_read("cpu", CHOSEN[what])


@needs_compiler
@pytest.mark.parametrize("queries", [FEW, FEW + 1, 97, 200])
@pytest.mark.parametrize("heads", [(2, 2, 64), (1, 7, 20), (2, 1, 128), (1, 3, 80), (2, 70, 12)])
def test_prompts_on_both_sides_of_the_limit(queries: int, heads: tuple[int, int, int], threads: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        shape = Shape(((queries, 5), (1, 40), (queries, 0), (2, 2), (queries, 130)), *heads, 8, dtype=dtype, padding=2)
        write_and_read("cpu", shape)


@needs_compiler
def test_a_float32_query_on_a_bfloat16_pool() -> None:
    "The compiled model's way: nothing is rounded but what lies in the pool."
    shape = Shape(((1, 37), (3, 5), (20, 9)), 2, 3, 64, 8, dtype=torch.bfloat16)
    case = build(shape)
    backend = CpuBackend()
    backend.write(case.key, case.value, case.kv_cache, case.meta)
    out = backend.read(case.query.float(), case.kv_cache, case.meta, case.scale)
    assert out.dtype == torch.float32
    assert error(out[: case.meta.num_actual_tokens], case.expected) < 1e-5


@needs_compiler
def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = torch.arange(2**16).to(torch.int32) << 16 | torch.tensor([0, 0x7FFF, 0x8000, 0x8001, 0xFFFF])[:, None]
    values = bits.to(torch.int32).view(torch.float32).reshape(1, 1, -1)
    values = values[..., values.isfinite()[0, 0]]
    values = values[..., : values.shape[-1] // 2 * 2]
    qkv = torch.cat([torch.zeros_like(values)] * 2 + [values], dim=1)
    pool = torch.zeros(2, 1, 1, 1, values.shape[-1], dtype=torch.bfloat16)
    half = values.shape[-1] // 2
    angles = torch.stack((torch.ones(1, half), torch.zeros(1, half)), 1)
    cpu.rope_and_write(qkv, pool, torch.zeros(1, dtype=torch.int64), angles, None, 1e-6)
    assert torch.equal(pool[1].view(torch.int16), values.bfloat16().view(torch.int16).view_as(pool[1]))


@needs_compiler
def test_nan_and_infinity_pass_through() -> None:
    weight = torch.tensor([[torch.nan], [1.0], [torch.inf]])
    for dtype in cpu.SUFFIX:
        out = decoder.PackedLinear(weight.to(dtype))(torch.ones(1, 1))
        assert out.isnan().tolist() == [[True, False, False]] and out[0, 2] == torch.inf


@needs_compiler
def test_the_units_for_bfloat16_are_used_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(4, 4)
    for features, dtype, kind in [
        ({"amx_bf16"}, torch.bfloat16, decoder.OneDnnLinear), ({"avx512_bf16"}, torch.bfloat16, decoder.OneDnnLinear),
        ({"amx_bf16"}, torch.float32, decoder.PackedLinear), ({"avx2"}, torch.bfloat16, decoder.PackedLinear),
    ]:  # fmt: skip
        monkeypatch.setattr(decoder, "cpu_features", lambda features=features: frozenset(features))
        assert type(decoder.make_linear(weight.to(dtype))) is kind


@needs_compiler
def test_the_engine_with_matrix_units(monkeypatch: pytest.MonkeyPatch) -> None:
    "On this machine they may be slow or not there at all; the way through oneDNN is the same."
    prompts = [[5, 6, 7, 8], [9] * 20]
    expected = answers(prompts, "bfloat16", 8, attention_backend="torch")
    monkeypatch.setattr("walkvllm.compiled_model.make_linear", decoder.OneDnnLinear)
    assert answers(prompts, "bfloat16", 8)[0][:2] == expected[0][:2]


# ---- mutants: one change in the C, and a case must fail ----

MUTANTS = {
    "no causal bound": ("read", "seq_lens[r] - (starts[r + 1] - 1 - t)", "seq_lens[r]"),
    "one key too few": ("read", "(starts[r + 1] - 1 - t)", "(starts[r + 1] - t)"),
    "the whole last block": ("read", "keys - first < block_size ? keys - first : block_size", "block_size"),
    "no last partial block": ("read", "first < keys; first +=", "first + block_size <= keys; first +="),
    "another request's table": ("read", "table[r * table_stride +", "table["),
    "the wrong KV head": ("read", "RUN, g = h * group;", "RUN, g = (kv_heads - 1 - h) * group;"),
    "no fading": ("read", "sum[g] * fade[g] + weight", "sum[g] + weight"),
    "no running maximum": ("read", "highest = top[g], weight = 0;", "highest = -INFINITY, weight = 0;"),
    "no scale": ("read", "s[g][i] * scale", "s[g][i]"),
    "offset in the block": ("read", "block * block_size + j)", "block * block_size)"),
    "short heads": ("read", "if (n >= LANES) return", "if (n >= 1) return"),
    "a tile sees one key too many": ("tile", "(base + j - first) * group", "(base + j - 1 - first) * group"),
    "a tile sees its first token's keys": ("tile", "i < (base + j - first) * group", "base + j > first"),
    "a tile does not fade": ("tile", "o[d * PANEL + i] *= fade[i]", "o[d * PANEL + i] *= 1"),
    "a tile's sum does not fade": ("tile", "sum[i] *= fade[i]", "sum[i] *= 1"),
    "a tile's first block again": ("tile", "blocks[(base + j) / block_size]", "blocks[j / block_size]"),
    "a tile's last queries left out": ("tile", "end - t < tile ? end - t : tile", "end - t < tile ? 1 : tile"),
    "short requests twice, long ones not": ("tile", "end - starts[r] <= FEW ||", "end - starts[r] > FEW ||"),
    "shared keys twice": ("shared", "first = done; first < keys", "first = 0; first < keys"),
    "only neighbours compared": ("together", "if (i < count) break;", "if (i < 2) break;"),
    "the first block compared": ("together", "r * table_stride + keys / block_size;", "r * table_stride;"),
    "the first request's length": ("together", "seq_lens[i] < least ? seq_lens[i] : least", "least"),
    "a request with two tokens": ("together", "starts[i + 1] - starts[i] != 1 ? 0 : ", ""),
    "the state's maximum forgotten": ("shared", "done ? state[2 * (r * heads + h)] :", "done ? 0 :"),
    "the state's sum forgotten": ("shared", "done ? state[2 * (r * heads + h) + 1] : 0", "0"),
    "the state of other heads": ("shared", "state + 2 * (r * heads + h));", "state + 2 * r * heads);"),
    "the queries of the first tile": ("shared", "q + t * q_stride + h * dim, q_stride,", "q + h * dim, q_stride,"),
    "done too early": ("shared", "part = state ? 1 :", "part ="),
    "no limit for the stack": ("together", "fits = requests * heads <= STATES", "fits = 1"),
    "nobody shares": ("shared", "shared, any ? state : NULL", "shared, NULL"),
    "nobody shares in one call": ("decoder shares", "*state = any ? space : NULL", "*state = NULL"),
    "only one layer shares": ("decoder shares", "l, s, asked, shared, state",
                              "l, s, asked, shared, l == layers ? state : NULL"),
    "every query head a KV head": ("decoder shares", "s->heads, s->kv_heads);", "s->heads, s->heads);"),
    "all queries of one KV head": ("decoder shares", "s->heads, s->kv_heads);", "s->heads, 1);"),
    "all rows as the first": ("decoder shares", "find_shared(shared, s->table, s->table_stride,",
                              "find_shared(shared, s->table, 0,"),
    "a mixed step for a step of decodes": ("decoder shares", "starts[i + 1] - starts[i] != 1 ? 0 : ", ""),
    "the residual forgotten": ("decoder", "l == layers ? NULL : s->delta", "NULL"),
    "one norm for both": ("decoder", "s->delta, l->second_norm", "s->delta, l->first_norm"),
    "the first layer's cache": ("decoder", "attend_and_write_f32(l, s,", "attend_and_write_f32(layers, s,"),
    "last rows too early": ("decoder", "l + 1 == end) asked", "l == layers) asked"),
    "the first rows are kept": ("decoder", "t = s->starts[r + 1] - 1;  //", "t = s->starts[r];  //"),
    "x of other rows": ("decoder", "s->hidden, s->x + t *", "s->hidden, s->x + r *"),
    "q of other rows": ("decoder", "row, s->qkv + t *", "row, s->qkv + r *"),
    "the last rows of all tokens": ("decoder", "s->seq_lens, asked->starts", "s->seq_lens, s->starts"),
    "the output forgets the last layer": ("decoder", "norm(s->out, s->x, s->delta,", "norm(s->out, s->x, NULL,"),
    "turned backwards": ("write", "a * c[i] - b * s[i]", "a * c[i] + b * s[i]"),
    "padding is written": ("write", "if (slots[t] < 0) continue;", ""),
    "V where K goes": ("write", "row[heads * dim + width + i]", "row[heads * dim + i]"),
    "cut, not rounded": ("write", "(u + 0x7fff + (u >> 16 & 1)) >> 16", "u >> 16"),
    "one norm for all heads": ("write", "norm[h * dim + i]", "norm[i]"),
    "no epsilon": ("glue", "sum / size + eps", "sum / size"),
    "delta forgotten": ("glue", "row[i] += delta[t * size + i]", "row[i] += 0"),
    "gate and up swapped": ("glue", "*gate = x + 2 * t * size, *up = gate", "*up = x + 2 * t * size, *gate = up"),
    "no bias": ("linear", "if (bias) for", "if (0) for"),
    "bands where panels were meant": ("linear", "m > n ? item / panels", "m > n ? item % bands"),
    "the last inputs left out": ("linear", "p < k; p += DEPTH", "p + DEPTH <= k; p += DEPTH"),
    "the last panel too wide": ("linear", "width = n - left < PANEL ? n - left : PANEL", "width = PANEL"),
    "the halves swapped": ("linear", "(two << 16), b[j + 1] = (vec)(two & 0xffff0000)",
                           "(two & 0xffff0000), b[j + 1] = (vec)(two << 16)"),
    "rows of a tile": ("linear", "PANEL, sum + i * PANEL, some", "PANEL, sum, some"),
}  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what, good, bad = MUTANTS[name]
    assert good in COUNTING
    monkeypatch.setattr(compiler, "FLAGS", [f for f in compiler.FLAGS if f != "-O3"])  # it takes seconds
    mutant = cpu.load(compiler.build(COUNTING.replace(good, bad), tmp_path, compiler.compiler()))
    monkeypatch.setattr(cpu, "library", lambda: mutant)
    with pytest.raises(AssertionError):
        for seed in range(60):
            CASES[what](seed)


# ---- building ----

TINY = "int answer(void) { return 42; }"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "walkvllm"


def fresh_library() -> Any:
    "What library() says in a new process."
    return cpu.library.__wrapped__()


@needs_compiler
def test_a_library_is_kept_privately_and_found_again(home: Path) -> None:
    with compiler.private_directory() as directory:
        assert directory == home and home.stat().st_mode & 0o777 == 0o700
        made = compiler.build(TINY, directory, compiler.compiler())
        assert made.stat().st_mode & 0o777 == 0o700 and [p.name for p in home.iterdir()] == [made.name]
        when = made.stat().st_mtime_ns
        assert compiler.build(TINY, directory, compiler.compiler()) == made and made.stat().st_mtime_ns == when
        assert compiler.build(TINY + "\n", directory, compiler.compiler()) != made


@needs_compiler
def test_a_library_that_others_can_write_is_made_again(home: Path) -> None:
    with compiler.private_directory() as directory:
        made = compiler.build(TINY, directory, compiler.compiler())
        made.write_bytes(b"something else")
        made.chmod(0o722)
        again = compiler.build(TINY, directory, compiler.compiler())
        assert again == made and compiler.is_private(made) and made.read_bytes() != b"something else"


@needs_compiler
@pytest.mark.parametrize("change", [
    lambda whole: whole[: len(whole) // 2], lambda whole: b"", lambda whole: b"x" + whole[1:]])
def test_half_a_library_is_made_again(home: Path, change: Callable[[bytes], bytes]) -> None:
    """Who loads half of one may be killed by it, so it must be noticed before."""
    with compiler.private_directory() as directory:
        made = compiler.build(TINY, directory, compiler.compiler())
        whole = made.read_bytes()
        made.write_bytes(change(whole))
        assert compiler.is_private(made)
        assert compiler.build(TINY, directory, compiler.compiler()) == made and made.read_bytes() == whole
        assert [p.name for p in home.iterdir()] == [made.name]


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_of_others_is_not_used(home: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    home.mkdir()
    home.chmod(mode)
    with caplog.at_level(logging.WARNING, "walkvllm"), compiler.private_directory() as directory:
        assert directory != home and compiler.is_private(directory)
    assert "not by us alone" in caplog.text and not directory.exists() and not list(home.iterdir())


def test_somebody_elses_file_is_not_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.touch(0o700)
    assert compiler.is_private(path)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert not compiler.is_private(path)


def test_a_home_that_is_no_directory(home: Path) -> None:
    home.write_text("a file")
    with compiler.private_directory() as directory:
        assert directory != home and directory.is_dir()


@pytest.mark.parametrize("cc, words", [
    ("no-such-compiler", "no-such-compiler"), ('"cc', "quotation"), ("false", "failed")])
def test_without_a_compiler_torch_goes_on(
    home: Path, cc: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if cc == "false":  # a program that is there on every machine, and compiles nothing
        (home.parent / "false").write_text("#!/bin/sh\nexit 1\n")
        (home.parent / "false").chmod(0o700)
        cc = str(home.parent / "false")
    monkeypatch.setenv("CC", cc)
    with caplog.at_level(logging.WARNING, "walkvllm"):
        assert fresh_library() is None
    assert words in caplog.text and "plain torch" in caplog.text
    monkeypatch.setattr("walkvllm.attention.library", lambda: None)
    assert get_backend("cpu").name == "torch"
    llm = LLM(multiprocess=False, attention_backend="cpu")
    runner = llm.llm_engine.engine_core.engine_core.model_runner
    assert type(runner.model) is CausalLM and runner.backend.name == "torch"
    assert len(llm.generate("Once", SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids) == 3


def build_in(directory: str, barrier: Any, results: Any) -> None:
    barrier.wait(60)
    results.put(compiler.build(TINY, Path(directory), compiler.compiler()).name)


@needs_compiler
def test_two_processes_build_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    both = [context.Process(target=build_in, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for process in both:
        process.start()
    names = {results.get(timeout=60) for _ in both}
    for process in both:
        process.join(60)
    assert len(names) == 1 and [p.name for p in tmp_path.iterdir()] == [*names]


@needs_compiler
def test_loading_changes_no_arithmetic_of_the_process() -> None:
    "A library linked with -ffast-math would make tiny numbers zero everywhere, from then on."
    code = ("import torch; from walkvllm.kernels import cpu; assert cpu.library() is not None; "
            "print((torch.tensor([1e-38]) / 100).item() > 0)")  # fmt: skip
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]


# ---- the engine ----

def answers(prompts: list[list[int]], dtype: str, tokens: int = 24, **settings: object) -> list[list[int]]:
    llm = LLM(multiprocess=False, skip_tokenizer_init=True, dtype=dtype, **settings)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    llm.check_blocks()
    return [list(o.outputs[0].token_ids) for o in outputs]


@needs_compiler
def test_the_engine_says_the_same_on_every_path(threads: int) -> None:
    rnd = random.Random(0)
    prompts = [[rnd.randrange(3, 2048) for _ in range(n)] for n in (1, 7, 40, 16, 17, 90)]
    tokens = 24 if threads == 1 else 4  # on a busy machine two threads wait for each other a thousand times a step
    expected = answers(prompts, "float32", tokens, attention_backend="torch")
    assert answers(prompts, "float32", tokens) == expected
    assert answers(prompts, "float32", tokens, max_num_batched_tokens=17, block_size=8, max_num_seqs=4) == expected


@needs_compiler
@pytest.mark.parametrize("budget", [4096, 150])
def test_requests_that_share_a_prefix_get_the_same_answers(budget: int, counting: Callable[[], int]) -> None:
    "With the small budget they come one after the other, into steps where others decode already."
    rnd = random.Random(2)
    prefix = [rnd.randrange(3, 2048) for _ in range(90)]
    prompts = [prefix + [rnd.randrange(3, 2048) for _ in range(rnd.randint(1, 12))] for _ in range(48)]
    expected = answers(prompts, "float32", 8, attention_backend="torch")
    assert counting() == 0
    assert answers(prompts, "float32", 8, max_num_batched_tokens=budget) == expected
    layers, kv_heads, steps = 5, 2, 5  # in which most of them decode
    assert counting() >= layers * kv_heads * steps


@needs_compiler
def test_bfloat16_stays_close_to_float32() -> None:
    "Only weights and cache are rounded; the embedded model's weights are bfloat16 anyway."
    rnd = random.Random(1)
    prompts = [[rnd.randrange(3, 2048) for _ in range(20)] for _ in range(4)]
    exact, rounded = answers(prompts, "float32"), answers(prompts, "bfloat16")
    assert sum(a == b for x, y in zip(exact, rounded, strict=True) for a, b in zip(x, y, strict=True)) > 48


@needs_compiler
@pytest.mark.parametrize("dtype, compiled", [("float32", True), ("bfloat16", True), ("float16", False)])
def test_which_model_runs(dtype: str, compiled: bool) -> None:
    llm = LLM(multiprocess=False, dtype=dtype, attention_backend="cpu")
    assert isinstance(llm.llm_engine.engine_core.engine_core.model_runner.model, CompiledLM) == compiled
    assert llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


@needs_compiler
@pytest.mark.parametrize("what", ["slot", "block"])
def test_the_decoder_refuses_bad_ids_before_it_writes(what: str) -> None:
    rnd, gen = random.Random(0), torch.Generator().manual_seed(0)
    model, case = random_model(rnd, gen), build(CHOSEN["a whole block at once"])
    spec, meta = model.spec, case.meta
    pools = [torch.zeros(2, case.kv_cache.shape[1], 8, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    meta.slot_mapping, meta.block_table = meta.slot_mapping.clone(), meta.block_table.clone()
    if what == "slot":
        meta.slot_mapping[-1] = case.kv_cache.shape[1] * 8
    else:
        meta.block_table[0, 0] = case.kv_cache.shape[1]
    ids = torch.zeros(len(meta.slot_mapping), dtype=torch.int64)
    with torch.inference_mode(), pytest.raises(IndexError, match=what):
        model.forward(ids, ids, pools, meta, get_backend("cpu"))
    assert not any(pool.any() for pool in pools)


@needs_compiler
def test_a_bad_id_is_an_error_and_no_strange_read() -> None:
    case = build(CHOSEN["a whole block at once"])
    case.meta.block_table = case.meta.block_table.clone()
    case.meta.block_table[0, 0] = case.kv_cache.shape[1]
    with pytest.raises(IndexError, match="outside of the pool"):
        CpuBackend().read(case.query, case.kv_cache, case.meta, case.scale)
