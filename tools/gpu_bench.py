"""What the kernels and the engine do on a GPU, in ten minutes: one JSON, and a short table.

  gpu_bench.py            measure; the JSON goes to gpu.json
  gpu_bench.py --record   also keep it as walkvllm/data/gpu.json, which pages 11a and 12b show
  gpu_bench.py --tiny     tiny sizes, in Triton's interpreter where there is no GPU: does everything run to its end?

Needs CUDA, PyTorch, Triton, transformers (and with it numpy, tokenizers, safetensors) and jinja2, of any version that
came with the machine. Where msgspec is missing, a small stand-in takes its place; zmq is not used. Nothing is compared
with numbers from elsewhere: bandwidth and FLOP rate are fractions of a copy and a matrix product measured in the same
run. A part that cannot run says why, and the rest goes on; what is measured is written to the file after each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

TINY = "--tiny" in sys.argv
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import msgspec  # noqa: F401
except ImportError:
    sys.modules["msgspec"] = import_module("stand_in_msgspec")

import torch.nn.functional as F
from torch import Tensor
from walkvllm.kernels.top_k_top_p import top_k_top_p_naive, top_k_top_p_triton

from walkvllm.kernels import fused, paged_attention, paged_write, triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SECONDS = 600
DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, BLOCK = (4, 2, 16, 8) if TINY else (16, 8, 128, 16)  # Qwen3-0.6B's attention
STARTED = time.monotonic()
Row = dict[str, Any]
Rows = Iterator[Row]  # as they are measured: what came before an error or the end of the time is kept


def milliseconds(run: Callable[[], Any]) -> float:
    """The median time of a call; on a GPU with a cold cache, as triton.testing.do_bench has it."""
    if CUDA:
        return float(triton.testing.do_bench(run, warmup=20, rep=5 if TINY else 100, return_mode="median"))
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def beside(run: Callable[..., Any], *args: Any, **more: Any) -> float | str:
    """The time of a call that may not take these arguments, or not be there at all; or its error."""
    try:
        return round(milliseconds(lambda: run(*args, **more)), 4)
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:120]


# ---- a step ----

@dataclass
class Step:
    """Requests with random K and V in a pool of shuffled blocks."""

    query: Tensor  # [T, H, D]
    kv_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    lengths: list[tuple[int, int]]  # (query tokens, tokens before them)
    slots: Tensor  # of the step's tokens

    @property
    def arguments(self) -> tuple[Any, ...]:
        q, total = max(q for q, _ in self.lengths), max(q + c for q, c in self.lengths)
        scale = self.query.shape[2] ** -0.5
        return (self.query, self.kv_cache, self.block_table, self.seq_lens, self.query_start_loc, scale, q, total)

    def read(self, config: paged_attention.ReadConfig | None = None) -> Tensor:
        return paged_attention.read_triton(*self.arguments, config)

    def contiguous(self, r: int) -> tuple[Tensor, Tensor, Tensor]:
        """Q [Q, H, D], K and V [L, KVH, D] of a request."""
        a, b = self.query_start_loc[r : r + 2].tolist()
        blocks = -(-sum(self.lengths[r]) // self.kv_cache.shape[2])
        kv = self.kv_cache[:, self.block_table[r, :blocks].long()].flatten(1, 2)[:, : sum(self.lengths[r])]
        return self.query[a:b], kv[0], kv[1]


def step(lengths: list[tuple[int, int]], heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = HEAD_DIM,
         dtype: torch.dtype = DTYPE, block: int = BLOCK) -> Step:
    gen = torch.Generator(DEVICE).manual_seed(0)
    counts = [-(-(q + c) // block) for q, c in lengths]
    ids = torch.randperm(sum(counts), generator=gen, device=DEVICE).int() + 1
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=DEVICE)
    for row, ids_of_row in zip(table, ids.split(counts), strict=True):
        row[: len(ids_of_row)] = ids_of_row
    tokens = sum(q for q, _ in lengths)
    kv_cache = torch.randn(2, sum(counts) + 1, block, kv_heads, dim, generator=gen, device=DEVICE, dtype=dtype)
    query = torch.randn(tokens, heads, dim, generator=gen, device=DEVICE, dtype=dtype)
    loc = torch.tensor([0, *(q for q, _ in lengths)], device=DEVICE).cumsum(0).int()
    lens = torch.tensor([q + c for q, c in lengths], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(c, c + q, device=DEVICE) for q, c in lengths])
    return Step(query, kv_cache, table, lens, loc, lengths, fused.slot_mapping_triton(positions, loc, table, block))


# ---- is it right? ----

Check = tuple[str, str, torch.dtype, Callable[[], float]]  # kernel, case, type, and what finds the error


def error(got: Tensor, want: Tensor) -> float:
    """The largest difference, at the size of what was wanted. NaN where something is."""
    return float(((got.double() - want.double()).abs() / want.double().abs().clamp(min=1)).max())


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, cap: float) -> Tensor:
    """The attention [Q, H, D] of a request in float64. window, cap: 0 is none."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    scores = cap * (scores / cap).tanh() if cap else scores
    at = torch.arange(len(k), device=q.device)
    behind = at[len(k) - len(q) :, None] - at  # how far a key lies behind the query
    hidden = (behind < 0) | (behind >= (window or len(k)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def read_error(lengths: list[tuple[int, int]], window: int = 0, cap: float = 0.0, **shape: Any) -> float:
    s = step(lengths, **shape)
    out = paged_attention.read_triton(*s.arguments, None, window, cap).split([q for q, _ in lengths])
    scale = s.arguments[5]
    found = [error(got, attend(*s.contiguous(r), scale, window, cap)) for r, got in enumerate(out)]
    return float(torch.tensor(found).max())  # NaN if one is


def read_checks(dtype: torch.dtype) -> Iterator[Check]:
    mixed = [(1, 40), (7, 9), (1, 0), (20, 0)] if TINY else [(1, 3000), (100, 77), (1, 0), (513, 0), (1, 31), (64, 900)]
    long = [(1, 90)] if TINY else [(1, 20_000)]
    decodes = [(1, 40), (1, 0)] if TINY else [(1, 3000), (1, 0), (1, 31)]
    cases: dict[str, Row] = {}
    for dim in (16,) if TINY else (32, 64, 80, 96, 100, 128, 256):
        cases |= {f"mixed, head size {dim}": {"dim": dim}, f"long, head size {dim}": {"lengths": long, "dim": dim}}
    for group in (1, 7):
        cases[f"group {group}"] = {"heads": 2 * group, "kv_heads": 2, "dim": 16, "block": 32}
    for block in (8,) if TINY else (1, 8, 48, 256):
        cases[f"blocks of {block}"] = {"block": block}
    for window, cap in ((17, 0.0), (0, 2.0)) if TINY else ((1, 0.0), (128, 0.0), (1000, 30.0), (0, 2.0)):
        for name, lengths in (("mixed", mixed), ("decodes", decodes), ("long", long)):
            cases[f"{name}, window {window}, cap {cap}"] = {"lengths": lengths, "window": window, "cap": cap}
    for name, case in cases.items():
        yield "paged_attention", name, dtype, partial(read_error, **{"lengths": mixed, "dtype": dtype, **case})


def fused_checks(dtype: torch.dtype, seed: int = 1) -> Iterator[Check]:
    """Weights of norms lie around 1 and angles on the circle, as in a model."""
    gen = torch.Generator(DEVICE).manual_seed(seed)
    randn = partial(torch.randn, generator=gen, device=DEVICE, dtype=dtype)
    rand = partial(torch.rand, generator=gen, device=DEVICE)
    tokens, width = (5, 48) if TINY else (300, 1000)
    x, residual, weight = randn(tokens, width), randn(tokens, width), (rand(width) + 0.5).to(dtype)
    s = step([(1, 9), (tokens - 1, 3)], dtype=dtype)
    qkv, norm = randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM), (rand(HEADS + KV_HEADS, HEAD_DIM) + 0.5).to(dtype)
    angles = rand(64 + tokens, HEAD_DIM // 2) * 6
    table, positions = torch.stack([angles.cos(), angles.sin()], dim=1).to(dtype), torch.arange(tokens, device=DEVICE)
    key, value = randn(2, tokens, KV_HEADS, HEAD_DIM)

    def add_rms_norm() -> float:
        streams = residual.clone(), residual.to(torch.float64, copy=True)
        want = fused.add_rms_norm_naive(streams[1], x.double(), weight.double(), 1e-6)
        return max_of(error(fused.add_rms_norm_triton(streams[0], x, weight, 1e-6), want), error(*streams))

    def silu_and_mul() -> float:
        return error(fused.silu_and_mul_triton(x), fused.silu_and_mul_naive(x.double()))

    def rope_and_write(norm: Tensor | None) -> float:
        caches = torch.zeros_like(s.kv_cache), torch.zeros_like(s.kv_cache, dtype=torch.float64)
        got = fused.rope_and_write_triton(qkv, positions, table, caches[0], s.slots, norm)
        exact = None if norm is None else norm.double()
        want = fused.rope_and_write_naive(qkv.double(), positions, table.double(), caches[1], s.slots, exact)
        return max_of(error(got, want), error(*caches))

    def reshape_and_cache() -> float:
        caches = torch.zeros_like(s.kv_cache), torch.zeros_like(s.kv_cache)
        paged_write.write_kv_triton(key, value, caches[0], s.slots)
        paged_write.write_kv_torch(key, value, caches[1], s.slots)
        return error(*caches)

    yield "add_rms_norm", f"{width}", dtype, add_rms_norm
    yield "silu_and_mul", f"{width // 2}", dtype, silu_and_mul
    yield "rope_and_write", f"{HEADS}+{KV_HEADS} heads, no norm", dtype, partial(rope_and_write, None)
    yield "rope_and_write", f"{HEADS}+{KV_HEADS} heads, norm", dtype, partial(rope_and_write, norm)
    yield "reshape_and_cache", f"{tokens} tokens", dtype, reshape_and_cache


def max_of(*errors: float) -> float:
    """The largest; NaN if one is, which `max` would pass over."""
    return float(torch.tensor(errors, dtype=torch.float64).max())


def slots_wrong(block: int) -> float:
    """How many rows get another slot than the twin's, rows of padding among them."""
    s = step([(1, 40), (7, 9), (20, 0)] if TINY else [(1, 3000), (100, 77), (513, 0)], block=block)
    positions = torch.cat([torch.arange(c, c + q) for q, c in s.lengths] + [torch.zeros(3, dtype=torch.int64)])
    args = positions.to(DEVICE), s.query_start_loc, s.block_table, block
    return float((fused.slot_mapping_triton(*args) != fused.slot_mapping_naive(*args)).sum())


def sampler_error(top_k: list[int] | None, top_p: list[float] | None) -> float:
    """The probability of all tokens that one keeps and the other does not: with sums in float32, a few at the edge."""
    gen = torch.Generator(DEVICE).manual_seed(2)
    logits = torch.randn(4, 50 if TINY else 151_936, generator=gen, device=DEVICE) * 3
    k = None if top_k is None else torch.tensor(top_k, device=DEVICE)
    p = None if top_p is None else torch.tensor(top_p, device=DEVICE)
    got, want = top_k_top_p_triton(logits.clone(), k, p), top_k_top_p_naive(logits.clone(), k, p)
    changed = (got != logits) & ~got.isinf()  # what stays must stay as it is
    differs = (got.isinf() != want.isinf()) | changed
    wrong = float((logits.double().softmax(-1) * differs).sum(-1).max())
    return wrong if p is not None else float(differs.sum())  # top-k is exact


def checks() -> Iterator[Check]:
    for dtype in ALLOWED:
        yield from read_checks(dtype)
        yield from fused_checks(dtype)
    for block in (1, 8, 16, 256):
        yield "slot_mapping", f"blocks of {block}", torch.float32, partial(slots_wrong, block)
    top_k, top_p = [1, 5, 20, 50], [0.1, 0.5, 0.9, 0.999]
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        name = " and ".join(n for n, given in (("top-k", k), ("top-p", p)) if given)
        yield "top_k_top_p", name, torch.float32, partial(sampler_error, k, p)


ALLOWED = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def correctness() -> Rows:
    """Each kernel against its twin in float64."""
    for kernel, case, dtype, find in checks():
        row: Row = {"kernel": kernel, "case": case, "dtype": str(dtype)[6:]}
        try:
            found = find()
            yield row | {"error": found, "right": found <= ALLOWED[dtype]}
        except Exception as e:
            yield row | {"error": f"{type(e).__name__}: {e}"[:120], "right": False}


# ---- how fast? ----

def yardsticks() -> Rows:
    """A copy's bandwidth in GB/s, read and written bytes together, and a bfloat16 matrix product's TFLOP/s."""
    source = torch.empty(1 << (10 if TINY else 30), dtype=torch.int8, device=DEVICE)
    target, n = torch.empty_like(source), 32 if TINY else 8192
    a, b = (torch.randn(n, n, device=DEVICE, dtype=DTYPE) for _ in range(2))
    copy, product = milliseconds(lambda: target.copy_(source)), milliseconds(lambda: a @ b)
    yield {"copy_GB_s": 2 * source.numel() / copy / 1e6, "matmul_TFLOP_s": 2 * n**3 / product / 1e9}


def of(rate: float, yard: Row, name: str) -> float | None:
    """The rate as a fraction of the yardstick, if that was measured."""
    return rate / yard[name] if name in yard else None


def flash_attention(name: str, *args: Any, **more: Any) -> Any:
    """FlashAttention, where it is installed. What is may still not load."""
    return getattr(import_module("flash_attn"), name)(*args, **more)


def decode(yard: Row) -> Rows:
    """Bandwidth of a decode step's reads in one layer, beside others on the same K and V without pages."""
    shapes = [(1, 40), (3, 20)] if TINY else [(1, 16_384), (1, 131_072), (16, 4096), (64, 2048), (256, 1024)]
    for batch, length in shapes:
        s = step([(1, length - 1)] * batch)
        ours, num_bytes = milliseconds(s.read), 2 * batch * length * KV_HEADS * HEAD_DIM * DTYPE.itemsize
        k, v = (torch.stack([s.contiguous(r)[i] for r in range(batch)]) for i in (1, 2))  # [B, L, KVH, D]
        q, (kt, vt) = s.query[:, :, None], (x.transpose(1, 2) for x in (k, v))
        row: Row = {"requests": batch, "keys": length, "ms": round(ours, 4), "GB_s": num_bytes / ours / 1e6,
               "of_copy": of(num_bytes / ours / 1e6, yard, "copy_GB_s"),
               "sdpa_ms": beside(F.scaled_dot_product_attention, q, kt, vt, enable_gqa=True)}
        if find_spec("flash_attn"):
            args = "flash_attn_with_kvcache", s.query[:, None], k, v
            row["flash_attention_ms"] = beside(flash_attention, *args)
        yield row


def prefill(yard: Row) -> Rows:
    """FLOP rate of whole prompts and of a chunk behind a context."""
    shapes = [(1, 24, 0), (2, 8, 16)] if TINY else [(1, 8192, 0), (8, 1024, 0), (4, 512, 4096)]
    for batch, tokens, context in shapes:
        s = step([(tokens, context)] * batch)
        ours, pairs = milliseconds(s.read), batch * (tokens * context + tokens * (tokens + 1) // 2)
        rate = 4 * pairs * HEADS * HEAD_DIM / ours / 1e9
        row: Row = {"requests": batch, "tokens": tokens, "context": context, "ms": round(ours, 4), "TFLOP_s": rate,
               "of_matmul": of(rate, yard, "matmul_TFLOP_s")}
        if not context:
            q, k, v = (torch.stack([s.contiguous(r)[i] for r in range(batch)]).transpose(1, 2) for i in range(3))
            row["sdpa_ms"] = beside(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
            row["flex_attention_ms"] = beside(flex, q, k, v)
            if find_spec("flash_attn"):
                args = "flash_attn_func", *(x.transpose(1, 2) for x in (q, k, v))
                row["flash_attention_ms"] = beside(flash_attention, *args, causal=True)
        yield row


def flex(q: Tensor, k: Tensor, v: Tensor, made: dict[Any, Any] = {}) -> Tensor:  # noqa: B006  (kept between calls)
    """FlexAttention, compiled once a shape."""
    if not CUDA:
        raise RuntimeError("needs CUDA")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    if q.shape not in made:
        mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device=DEVICE)
        made[q.shape] = torch.compile(flex_attention), mask
    run, mask = made[q.shape]
    return run(q, k, v, block_mask=mask, enable_gqa=True)


def other_cuts() -> Rows:
    """The same steps with other tiles than the table's: is the table right for this GPU?"""
    tall = [(64, 64, 1, 4, 2), (64, 64, 1, 8, 2), (64, 128, 1, 8, 2), (128, 64, 1, 8, 2), (128, 64, 1, 8, 3)]
    flat = [(16, 32, 1, 4, 3), (16, 64, 1, 4, 2), (16, 64, 1, 4, 3), (16, 64, 1, 4, 4), (16, 128, 1, 4, 3),
            (16, 64, 1, 8, 3)]
    tall_256 = [(64, 32, 1, 8, 1), (64, 32, 1, 8, 2), (64, 32, 1, 4, 1), (64, 64, 1, 8, 1), (128, 32, 1, 8, 1)]
    flat_256 = [(16, 32, 1, 4, 3), (16, 32, 1, 4, 2), (16, 32, 1, 8, 3), (16, 64, 1, 4, 2)]
    dim, large = HEAD_DIM, 32 if TINY else 256
    prompts, decodes = ([(9, 0)], [(1, 20)]) if TINY else ([(1024, 0)] * 8, [(1, 2047)] * 64)
    steps = [("prompts", prompts, dim, tall), ("decodes", decodes, dim, flat), ("prompts", prompts, large, tall_256),
             ("decodes", decodes, large, flat_256)]
    if not TINY:
        steps += [("a long decode", [(1, 65_535)], dim, [(16, 64, n, 4, 3) for n in (8, 16, 32, 64)]),
                  ("a long decode", [(1, 65_535)], large, [(16, 32, n, 4, 3) for n in (8, 16, 32)])]
    for name, lengths, head_dim, cuts in steps:
        s = step(lengths, dim=head_dim)
        for cut in cuts[:2] if TINY else cuts:
            config = paged_attention.ReadConfig(*cut)
            yield {"step": name, "head_size": head_dim, "rows_keys_splits_warps_stages": cut,
                   "ms": beside(s.read, config)}


def small_kernels() -> Rows:
    """The fused kernels beside the same in torch, one operation after the other."""
    tokens, width, inner = (3, 32, 48) if TINY else (256, 1024, 3072)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=DTYPE)

    x, residual, weight, gate_up = randn(tokens, width), randn(tokens, width), randn(width), randn(tokens, 2 * inner)
    s, qkv = step([(1, 8)] * tokens), randn(tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    table, positions = randn(64, 2, HEAD_DIM // 2), torch.full((tokens,), 8, device=DEVICE)
    logits = torch.randn(tokens, 100 if TINY else 151_936, device=DEVICE)
    k, p = torch.full((tokens,), 50, device=DEVICE), torch.full((tokens,), 0.9, device=DEVICE)

    def rope_torch() -> None:
        heads = qkv.view(tokens, -1, HEAD_DIM)
        cos, sin = table[positions][:, :, None].unbind(1)
        a, b = heads[:, :-KV_HEADS].chunk(2, dim=-1)
        q = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        paged_write.write_kv_torch(q[:, HEADS:], heads[:, -KV_HEADS:], s.kv_cache, s.slots)

    def sampler_rule() -> None:
        from walkvllm.sampler import apply_top_k, apply_top_p
        apply_top_p(apply_top_k(logits.clone(), k), p)

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "add_rms_norm": (lambda: fused.add_rms_norm_triton(residual, x, weight, 1e-6),
                         lambda: fused.add_rms_norm_naive(residual, x, weight, 1e-6)),
        "silu_and_mul": (lambda: fused.silu_and_mul_triton(gate_up), lambda: fused.silu_and_mul_naive(gate_up)),
        "rope_and_write": (lambda: fused.rope_and_write_triton(qkv, positions, table, s.kv_cache, s.slots), rope_torch),
        "top_k_top_p": (lambda: top_k_top_p_triton(logits.clone(), k, p), sampler_rule)}
    for name, (ours, torchs) in pairs.items():
        yield {"kernel": name, "rows": tokens, "ms": beside(ours), "torch_ms": beside(torchs)}


# ---- the engine ----

def random_model(folder: str) -> Path:
    """A checkpoint of Qwen3-0.6B's shape with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    vocab, hidden, inner, layers, longest = (300, 32, 48, 2, 128) if TINY else (151_936, 1024, 3072, 28, 40_960)
    dtype = "float32" if TINY else "bfloat16"
    config = Qwen3Config(vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
                         max_position_embeddings=longest, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                         head_dim=HEAD_DIM, rope_theta=1e6, tie_word_embeddings=True, dtype=dtype)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.float32 if TINY else DTYPE).save_pretrained(folder)
    return Path(folder)


def workload() -> tuple[list[list[int]], list[int]]:
    """Prompts, and how many tokens each wants: 256 requests, 100 to 1024 of both, always the same."""
    import random

    rnd = random.Random(0)
    requests, low, high, words = (3, 3, 8, 300) if TINY else (256, 100, 1024, 10_000)
    prompts = [[rnd.randrange(words) for _ in range(rnd.randint(low, high))] for _ in range(requests)]
    return prompts, [rnd.randint(low, high) for _ in range(requests)]


def card() -> Any:
    """The GPU; where there is none, one that records and replays what the interpreter does, with memory made up."""
    from walkvllm.cuda_graphs import CudaCard, Memory
    from walkvllm.pretend_card import PretendCard

    return CudaCard() if CUDA else PretendCard([Memory(64 << 20, 64 << 20, 0, 0, 0)] * 10)


def pretend_a_gpu() -> None:
    """Lets the engine take every path that it takes on a GPU."""
    from walkvllm import config, model_runner

    config.on_gpu = lambda backend: True
    model_runner.open_card = card


def generate(model: Path, **more: Any) -> Row:
    """The whole workload through the engine; tokens a second of all that were sampled."""
    from walkvllm import LLM, SamplingParams

    size: dict[str, Any] = {"block_size": BLOCK, "max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 16,
                            } if TINY else {"max_model_len": 4096}
    begun = time.perf_counter()
    with LLM(model=str(model), skip_tokenizer_init=True, attention_backend="triton", gpu_memory_utilization=0.9,
             **size, **more) as llm:
        ready = time.perf_counter() - begun
        prompts, wanted = workload()
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n, detokenize=False) for n in wanted]
        inputs: list[Any] = [{"prompt_token_ids": p} for p in prompts]
        llm.generate(inputs[:2], params[:2], use_tqdm=False)  # compiles
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        if CUDA:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        made, found = sum(len(o.outputs[0].token_ids) for o in outputs), llm.llm_engine.vllm_config
        if made != sum(wanted):
            raise RuntimeError(f"{made} tokens came, {sum(wanted)} were asked for")
        return {**more, "requests": len(prompts), "tokens_in": sum(map(len, prompts)), "tokens_out": made,
                "seconds": round(seconds, 2), "tokens_s": made / seconds, "ready_s": round(ready, 2),
                "blocks": found.cache_config.num_gpu_blocks, "graphs": len(found.cudagraph_capture_sizes)}


def engine() -> Rows:
    """Eager, with graphs, and with the next step scheduled meanwhile; how large the pool is, the engine finds out."""
    if not CUDA:
        pretend_a_gpu()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(folder)
        for eager, pipelined in ((False, True), (True, False), (False, False), (True, True)):
            yield generate(model, enforce_eager=eager, async_scheduling=pipelined)
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()


def relative(got: Tensor, want: Tensor) -> float:
    """The length of the difference, as a fraction of the length of what was wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def graph() -> Rows:
    """One decode step's forward pass, launch by launch and as the runner's recorded graph, with its padding.

    The replay must give what the recorded launches give on the same buffers, bit for bit. The eager step cuts the work
    in another way (fewer rows, another number of splits), so it may differ as 16 bits through all layers do.
    """
    from walkvllm.attention import CommonAttentionMetadata, get_backend
    from walkvllm.config import EngineArgs, capture_sizes
    from walkvllm.cuda_graphs import DecodeGraphs
    from walkvllm.fused_model import FusedLM
    from walkvllm.weights import load_weights

    length = 16 if TINY else 1024
    with tempfile.TemporaryDirectory() as folder:
        path = random_model(folder)
        config = EngineArgs(str(path), skip_tokenizer_init=True, dtype=str(DTYPE), block_size=BLOCK,
                            max_model_len=64 if TINY else 4096, num_gpu_blocks_override=512).create_engine_config()
        spec = config.model_config.spec
        model = FusedLM(spec, load_weights(path, spec, DTYPE, torch.device(DEVICE)))
    for n in (1, 3) if TINY else (1, 8, 30, 100, 250):
        s = step([(1, length - 1)] * n)
        size = next(size for size in capture_sizes(512) if size >= n)
        caches, backend = [s.kv_cache] * spec.num_layers, get_backend("triton")
        meta = CommonAttentionMetadata(n, n, 1, length, s.query_start_loc, s.seq_lens, s.block_table, s.slots)
        ids, positions = torch.zeros(n, dtype=torch.int64, device=DEVICE), (s.seq_lens - 1).long()
        with torch.inference_mode():
            graphs = DecodeGraphs(replace(config, cudagraph_capture_sizes=[size]), model, backend, caches, card())
            graphs.capture([size])
            forward = partial(model.forward, ids, positions, caches, meta, backend)
            run = partial(graphs.run, ids, positions, meta)
            replayed = run()
            replayed = graphs.hidden[:n].clone() if replayed is None else replayed.clone()
            graphs.hidden.fill_(float("nan"))
            graphs.launch(size)
            launched, eager = graphs.hidden[:n].clone(), forward()
            ms = {name: round(milliseconds(way), 4) for name, way in (
                ("eager_ms", forward), ("graph_ms", run), ("replay_ms", graphs.replays[size]))}
        same, off = torch.equal(replayed, launched), relative(eager, launched)
        yield {"requests": n, "padded_to": size, "keys": length, **ms, "same": same,
               "replay_off": relative(replayed, launched), "eager_off": off, "right": same and off < 0.1}


# ---- all of it ----

def show(row: Row) -> None:
    print("  " + "  ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def no_time_left() -> bool:
    return time.monotonic() - STARTED > SECONDS * 0.85


def collect(part: Rows, rows: list[Row]) -> str:
    """Adds what the part measures to `rows`, row by row. Returns why it ended early, or ""."""
    try:
        while not no_time_left():
            row = next(part, None)
            if row is None:
                return ""
            rows.append(row)
            show(row)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return f"no time left after {len(rows)} rows"


def machine() -> Row:
    card = torch.cuda.get_device_properties(0) if CUDA else None
    return {"date": datetime.now(UTC).date().isoformat(), "card": card.name if card else "none: Triton's interpreter",
            "memory_GiB": round(card.total_memory / 2**30) if card else 0, "torch": torch.__version__,
            "triton": triton.__version__, "cuda": torch.version.cuda, "tiny": TINY}


def measure(out: list[Path], result: Row) -> None:
    """Fills `result` part by part, and writes it after each one: lists of rows, and in "problems" what is missing."""
    yard: Row = {}
    parts: dict[str, Callable[[], Rows]] = {
        "correctness": correctness, "yardsticks": yardsticks, "decode": lambda: decode(yard),
        "prefill": lambda: prefill(yard), "small_kernels": small_kernels, "graph": graph, "engine": engine,
        "other_cuts": other_cuts}
    for name, part in parts.items():
        print(f"\n{name}  ({time.monotonic() - STARTED:.0f} s)", flush=True)
        rows = result[name] = []
        if problem := collect(part(), rows):
            result["problems"][name] = problem
            print("  " + problem, flush=True)
        if name == "yardsticks" and rows:
            yard |= rows[0]
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        result["seconds"] = round(time.monotonic() - STARTED)
        for path in out:
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    args = parser.parse_args()
    if not CUDA and not TINY:
        print("There is no GPU here. --tiny runs tiny sizes in Triton's interpreter.")
        return 1
    result: Row = {"machine": machine(), "problems": {}}
    print("machine")
    show(result["machine"])
    record = args.record and CUDA and not TINY
    measure([args.out, *([ROOT / "walkvllm/data/gpu.json"] if record else [])], result)
    wrong = [row for row in result["correctness"] + result["graph"] if not row["right"]]
    print(json.dumps(result))
    print(f"\n{len(result['problems'])} parts not done to the end: {result['problems'] or 'none'}")
    print(f"{len(wrong)} answers wrong, {result['seconds']} s", *wrong, sep="\n")
    return bool(result["problems"] or wrong)


if __name__ == "__main__":
    sys.exit(main())
