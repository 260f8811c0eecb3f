"""Each line that a kernel's answer hangs on, broken one at a time, in a module of its own: some check must turn red."""

# ruff: noqa: E501, F811

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import test_fused as fused_cases
import test_kernels as cases
from test_fused import far  # noqa: F401  (a fixture)
from test_kernels import RUNS_TRITON, sanitizer  # noqa: F401  (a fixture, for every test here)

from walkvllm import attention

pytestmark = [
    pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not (RUNS_TRITON and attention.interpreting()), reason="needs Triton's interpreter")]

ROOT = Path(__file__).resolve().parent.parent
Far = Callable[[int], None]
READ, WRITE, NAIVE, FUSED, TOP, TORCH = (
    "kernels/paged_attention.py", "kernels/paged_write.py", "kernels/paged_read.py", "kernels/fused.py", "kernels/top_k_top_p.py", "walkvllm/attention.py")
BROKEN: dict[str, tuple[str, str, str]] = {  # what is broken: file, the text as it is, the text as it must not be
    # the paged read
    "causal, one key short": (READ, "else behind >= 0", "else behind > 0"),
    "causal, one key far": (READ, "else behind >= 0", "else behind >= -1"),
    "the last partial block is forgotten": (READ, "num_keys = context + tl.minimum(first + BLOCK_Q, query_len)", "num_keys = (context + tl.minimum(first + BLOCK_Q, query_len)) // BLOCK_SIZE * BLOCK_SIZE"),
    "no guard against NaN": (READ, "key_ok = position < num_keys", "key_ok = position < end * TILE_N"),
    "no guard against -inf": (READ, 'base = tl.where(new_peak == float("-inf"), 0.0, new_peak)', "base = new_peak"),
    "heads interleaved": (READ, "kv_head * GROUP + row % GROUP", "kv_head + row % GROUP * KV_HEADS"),
    "block id and offset swapped": (READ, "return block_id * BLOCK_SIZE + position % BLOCK_SIZE", "return block_id + position % BLOCK_SIZE * BLOCK_SIZE"),
    "a slot in 32 bits": (READ, ".to(tl.int64)\n    return block_id", ".to(tl.int32)\n    return block_id"),
    "the table of the first request": (READ, "request.to(tl.int64) * table_stride + position", "position"),
    "0 / 0 in rows of padding": (READ, "peak, total = torch.ones(", "peak, total = torch.zeros("),
    "parts merged as if equal": (READ, "worth = tl.exp2(peak - tl.max(peak, 0))", "worth = tl.exp2(peak - peak)"),
    "the total does not shrink": (READ, "total = total * shrink + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)"),
    "the sum does not shrink": (READ, "acc = acc * shrink[:, None] +", "acc = acc +"),
    "the peak is forgotten": (READ, "tl.maximum(peak, tl.max(scores, 1))", "tl.max(scores, 1)"),
    "the search stops early": (READ, "// BLOCK_Q + middle <= tile", "// BLOCK_Q + middle < tile"),
    "rows that belong to nobody": (READ, "(row < BLOCK_Q * GROUP) & (token < query_len)", "(token < query_len)"),
    "tokens of the next request": (READ, "(row < BLOCK_Q * GROUP) & (token < query_len)", "(row < BLOCK_Q * GROUP)"),
    "numbers of the next head": (READ, "(d < HEAD_DIM)[None, :]", "(d >= 0)[None, :]"),
    "the grid is too small": (READ, "tokens // block_q + num_reqs", "-(-tokens // block_q)"),
    "K and V swapped in the read": (READ, "k, v = load_keys(k_cache_ptr, v_cache_ptr", "k, v = load_keys(v_cache_ptr, k_cache_ptr"),
    "bit patterns multiplied": (READ, 'WIDEN=arch == "cpu" and query.dtype == torch.bfloat16', "WIDEN=False"),
    "the last round is lost": (READ, "begin + rounds_each, end)", "begin + rounds_each, end - 1)"),
    "splits overlap": (READ, "begin += split * rounds_each", "begin += split * (rounds_each - 1)"),
    "the window is one too wide": (READ, "(behind < WINDOW)", "(behind <= WINDOW)"),
    "the window begins a tile late": (READ, "context + first - WINDOW + 1, 0) // TILE_N", "context + first - WINDOW + 1, 0) // TILE_N + 1"),
    "the window begins at its last token": (READ, "context + first - WINDOW + 1, 0)", "context + first + BLOCK_Q - WINDOW, 0)"),
    "the window does not spare the loads": (READ, "tl.maximum(context + first - WINDOW + 1, 0) // TILE_N if WINDOW else 0", "0"),
    "the cap is twice as high": (READ, "SOFT_CAP - 2 * SOFT_CAP / (1 +", "2 * SOFT_CAP - 4 * SOFT_CAP / (1 +"),
    "the cap comes before the scale": (READ, 'cap_scores(tl.dot(q, k, input_precision="ieee") * scale, SOFT_CAP)', 'cap_scores(tl.dot(q, k, input_precision="ieee"), SOFT_CAP) * scale'),
    "the row of the answer in 32 bits": (READ, "flat = (query_start + token).to(tl.int64)", "flat = query_start + token"),
    "the table's row in 32 bits": (READ, "request.to(tl.int64) * table_stride", "request * table_stride"),
    "the merged row in 32 bits": (READ, "    row = tl.program_id(0).to(tl.int64)\n    part", "    row = tl.program_id(0)\n    part"),
    "all read the first head": (READ, "at = slot * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM", "at = slot * (KV_HEADS * HEAD_DIM)"),
    "a slice is taken for whole rows": (READ, "flat[:, None] * query_stride", "flat[:, None] * (KV_HEADS * GROUP * HEAD_DIM)"),
    "a group does not fit its tile": (READ, "block_m = max(cfg.block_m, triton.next_power_of_2(group))", "block_m = cfg.block_m"),
    "padding keeps what memory held": (READ, "out = torch.zeros_like(query)", "out = torch.full_like(query, 7.0)"),
    "the merged total counts all alike": (READ, "tl.sum(tl.load(part_total_ptr + part) * worth, 0)", "tl.sum(tl.load(part_total_ptr + part), 0)"),
    # the paged write
    "V in the place of K": (WRITE, "tl.store(k_cache_ptr + slot * WIDTH + i, key", "tl.store(k_cache_ptr + slot * WIDTH + i, value"),
    "padding is written": (WRITE, "    if slot < 0:\n        return\n", ""),
    "the store has no mask": (WRITE, "key, mask=inside)", "key, mask=i >= 0)"),
    "the stride of K for V": (WRITE, "value_ptr + token * value_stride", "value_ptr + token * key_stride"),
    "the written slot in 32 bits": (WRITE, "slot = tl.load(slot_mapping_ptr + token).to(tl.int64)", "slot = tl.load(slot_mapping_ptr + token).to(tl.int32)"),
    "the written token in 32 bits": (WRITE, "token = tl.program_id(0).to(tl.int64)", "token = tl.program_id(0)"),
    "torch writes K twice": (WRITE, "flat[1].index_copy_(0, slots, value)", "flat[1].index_copy_(0, slots, key)"),
    "padding only at the end": (WRITE, "if n and int(slots.min()) < 0:", "if n and int(slots[-1]) < 0:"),
    "the twin writes K twice": (WRITE, "kv_cache[1, block_id, offset] = value[i]", "kv_cache[1, block_id, offset] = key[i]"),
    "views are taken for rows": (WRITE, "return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()", "return x"),
    # the naive read, and the one in torch
    "the twin is one key short": (NAIVE, ".tril(context)", ".tril(context - 1)"),
    "the twin is one key far": (NAIVE, ".tril(context)", ".tril(context + 1)"),
    "the twin mixes heads": (NAIVE, "k.repeat_interleave(group, dim=1), v.repeat", "k.repeat(1, group, 1), v.repeat"),
    "the twin reads to the block's end": (NAIVE, "for p in range(seq_len)]", "for p in range(-(-seq_len // block_size) * block_size)]"),
    "positions run past the end": (TORCH, "torch.minimum(columns[None, :], lengths[:, None] - 1)", "torch.minimum(columns[None, :], lengths[:, None])"),
    "one key of padding counts": (TORCH, ">= lengths[group, None]", "> lengths[group, None]"),
    "the second query tile sees too little": (TORCH, ".tril_(context + first)", ".tril_(context)"),
    "V gathered from K": (TORCH, "torch.index_select(flat[1], 0, slots, out=v)", "torch.index_select(flat[0], 0, slots, out=v)"),
    "rows are not sorted with their lengths": (TORCH, "block_table, lengths, rows = block_table[order], lengths[order], rows[order]", "block_table, lengths = block_table[order], lengths[order]"),
    "no bound on memory": (TORCH, "max(1, max_slots // lengths[start])", "len(lengths)"),
    "idle requests are decodes": (TORCH, "one = query_lens == 1", "one = query_lens <= 1"),
    # add and norm
    "the sum is not stored": (FUSED, "        tl.store(residual_ptr + at, row, mask=inside)\n", ""),
    "the norm before the sum": (FUSED, "(row + tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)", "row.to(dtype)"),
    "the mean of the tile": (FUSED, "tl.sum(row * row, 0) / WIDTH", "tl.sum(row * row, 0) / TILE"),
    "no epsilon": (FUSED, "tl.sum(row * row, 0) / WIDTH + eps", "tl.sum(row * row, 0) / WIDTH"),
    "the norm stores past its row": (FUSED, "tl.store(out_ptr + at, (normed * weight).to(dtype), mask=inside)", "tl.store(out_ptr + at, (normed * weight).to(dtype))"),
    "the normed row in 32 bits": (FUSED, "at = tl.program_id(0).to(tl.int64) * WIDTH + i", "at = tl.program_id(0) * WIDTH + i"),
    # gate and multiply
    "gate and up swapped": (FUSED, "silu = (gate / (1 + tl.exp(-gate)))", "silu = (up / (1 + tl.exp(-up)))"),
    "a sigmoid only": (FUSED, "(gate / (1 + tl.exp(-gate)))", "(1 / (1 + tl.exp(-gate)))"),
    "the second tile is the first": (FUSED, "i = tl.program_id(1) * TILE + tl.arange(0, TILE)", "i = tl.arange(0, TILE)"),
    "a tile is lost": (FUSED, "triton.cdiv(width, tile)", "width // tile + (width < tile)"),
    "the gated token in 32 bits": (FUSED, "    token = tl.program_id(0).to(tl.int64)\n    i = ", "    token = tl.program_id(0)\n    i = "),
    # norm, turn and write
    "turned the other way": (FUSED, "turned_a, turned_b = (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)", "turned_a, turned_b = (a * cos + b * sin).to(dtype), (b * cos - a * sin).to(dtype)"),
    "K is not turned": (FUSED, "tl.store(key_ptr, turned_a, mask=is_key)", "tl.store(key_ptr, a.to(dtype), mask=is_key)"),
    "the queries' norm for K": (FUSED, "tl.load(norm_weight_ptr + at, mask=ok", "tl.load(norm_weight_ptr + i, mask=ok"),
    "half of a head is normed": (FUSED, "tl.sum(a * a + b * b, 1) / (2 * HALF)", "tl.sum(a * a, 1) / HALF"),
    "padding is turned and written": (FUSED, "    if slot >= 0:\n", "    if slot >= -1:\n"),
    "K a head too far": (FUSED, "+ at - Q_HEADS * 2 * HALF", "+ at - (Q_HEADS - 1) * 2 * HALF"),
    "V is K": (FUSED, "row_ptr + (Q_HEADS + KV_HEADS) * 2 * HALF + j", "row_ptr + Q_HEADS * 2 * HALF + j"),
    "V past its heads": (FUSED, "inside = j < KV_HEADS * 2 * HALF", "inside = j >= 0"),
    "queries into the keys' place": (FUSED, "is_key = ok & (head >= Q_HEADS)", "is_key = ok"),
    "the fused slot in 32 bits": (FUSED, "k_cache_ptr + slot.to(tl.int64) *", "k_cache_ptr + slot.to(tl.int32) *"),
    "the angle in 32 bits": (FUSED, "position.to(tl.int64) * (2 * HALF)", "position.to(tl.int32) * (2 * HALF)"),
    "the turned token in 32 bits": (FUSED, "    token = tl.program_id(0).to(tl.int64)\n    slot, ", "    token = tl.program_id(0)\n    slot, "),
    # slots
    "padding has slots": (FUSED, "tl.where(real, block_id", "tl.where(row >= 0, block_id"),
    "the mapped slot in 32 bits": (FUSED, "mask=real, other=0).to(tl.int64)", "mask=real, other=0)"),
    "only the first tile of a request": (FUSED, "for first in range(tl.load(query_start_loc_ptr + request), end, TILE):", "for first in range(tl.load(query_start_loc_ptr + request), min(end, tl.load(query_start_loc_ptr + request) + 1), TILE):"),
    "a request's rows run on": (FUSED, "slot_mapping_ptr + row, slot, mask=row < end)", "slot_mapping_ptr + row, slot, mask=row < num_rows)"),
    "the mapped request in 32 bits": (FUSED, "request = tl.program_id(0).to(tl.int64)", "request = tl.program_id(0)"),
    # top-k and top-p
    "ties with the k-th go": (TOP, ">= k, bit, 0)", "> k, bit, 0)"),
    "negative logits in the wrong order": (TOP, "tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits"),
    "-0.0 is below 0.0": (TOP, "tl.where(x == 0.0, 0.0, x)", "x"),
    "the lowest bit is not asked": (TOP, "    for _ in range(32):\n        floor +=", "    for _ in range(31):\n        floor +="),
    "top-p does not stop at its mass": (TOP, "tl.where(mass <= allowed, bit, 0)", "tl.where(mass <= allowed * 1.05, bit, 0)"),
    "top-p weighs what top-k took out": (TOP, "(floor <= order) & (order < ceiling)", "(order < ceiling)"),
    "all may go": (TOP, "return tl.minimum(ceiling, in_order(peak))", "return ceiling"),
    "every tie at the edge goes": (TOP, "kept_ties = ties - tl.minimum(gone, ties - 1)", "kept_ties = ties - (ties - 1)"),
    "every tie at the edge stays": (TOP, "kept_ties = ties - tl.minimum(gone, ties - 1)", "kept_ties = ties"),
    "ties start again in each tile": (TOP, "        seen += tl.sum(tie, 0)\n", ""),
    "the row behind is counted": (TOP, "& (order < ceiling) & (i < vocab)", "& (order < ceiling)"),
    "the next row is written": (TOP, "mask=goes & (i < vocab))", "mask=goes)"),
    "a row without top-p is cut": (TOP, "    if p < 1:", "    if p <= 1:"),
    "the row of logits in 32 bits": (TOP, "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
}  # fmt: skip


def far_away(run: Callable[..., None], far: Far) -> None:
    """One of the checks of rows behind 2**31 elements; then the programs are told their own numbers again."""
    try:
        run(2**31 // 1024 + 3, 1024, far)
    finally:
        far(0)


def reads(far: Far) -> Iterator[Callable[[], None]]:
    """Checks of the paged read, the quick and telling ones first."""
    for what in ("one decode among prefills", "more rows than tokens", "a whole block at once", "scores that overflow exp",
                 "head size that is no power of two", "group that is no power of two", "group larger than a tile", "bfloat16"):
        yield partial(cases.test_chosen_shapes, "triton", what)
    for run in fused_cases.FAR_READS:
        yield partial(far_away, run, far)
    yield partial(cases.test_offsets_beyond_32_bits, "triton")
    yield partial(cases.test_slices_of_a_fused_projection, "triton")
    yield cases.test_a_window_loads_only_its_own_tiles
    yield partial(cases.test_tiles_of_any_size, "one decode among prefills", 16, 16)
    yield partial(cases.test_tiles_of_any_size, "group larger than a tile", 16, 16)
    for splits in (2, 8):
        for what in ("decodes of very unlike length", "more rows than tokens", "one decode among prefills"):
            yield partial(cases.test_splits_merge_to_the_same, what, splits)
        for window, cap in ((1, 0.0), (17, 0.0), (0, 2.0)):
            yield partial(cases.test_windows_and_caps, "decodes of very unlike length", window, cap, splits)
    for seed in range(20):
        yield partial(cases.test_random_shapes, "triton", seed)


def writes(far: Far) -> Iterator[Callable[[], None]]:
    for name in ("triton", "torch", "naive"):
        yield partial(cases.test_write_touches_its_slots_and_nothing_else, name)
        yield partial(cases.test_slices_of_a_fused_projection, name)
        yield partial(cases.test_write_of_padding_only, name)
    yield partial(cases.test_random_shapes, "triton", 0)
    yield partial(cases.test_offsets_beyond_32_bits, "triton")
    yield partial(far_away, fused_cases.far_write, far)


def torch_reads(name: str) -> Iterator[Callable[[], None]]:
    for what in cases.CHOSEN:
        yield partial(cases.test_chosen_shapes, name, what)
    for seed in range(20):
        yield partial(cases.test_random_shapes, name, seed)
    yield partial(cases.test_a_request_that_is_not_scheduled_costs_nothing, name)
    if name == "torch":
        for slots, test in ((n, cases.test_decodes_are_grouped_within_the_memory_bound) for n in (1, 50, 10_000)):
            yield partial(with_patch, test, slots)
        yield partial(with_patch, cases.test_long_chunks_are_cut_into_query_tiles)


def with_patch(test: Callable[..., None], *args: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test(*args, monkeypatch=patch)


def fused_checks(far: Far) -> Iterator[Callable[[], None]]:
    for run in (fused_cases.far_add_rms_norm, fused_cases.far_silu_and_mul, fused_cases.far_rope_and_write,
                fused_cases.far_slots):
        yield partial(far_away, run, far)
    for test in (fused_cases.test_add_rms_norm, fused_cases.test_silu_and_mul, fused_cases.test_rope_and_write,
                 fused_cases.test_slot_mapping):
        for seed in range(16):
            yield partial(test, seed)


def top_checks(far: Far) -> Iterator[Callable[[], None]]:
    yield partial(far_away, fused_cases.far_top_k, far)
    yield partial(fused_cases.test_a_row_without_top_p_keeps_all, None)
    yield fused_cases.test_zeros_of_both_signs_are_equal
    for seed in range(17):  # 16: a run of them
        yield partial(with_patch, fused_cases.test_top_k_top_p, seed)


def checks(name: str, far: Far) -> Iterator[Callable[[], None]]:
    """What is tried on a file, one after the other, until something turns red."""
    return {READ: partial(reads, far), WRITE: partial(writes, far), NAIVE: partial(torch_reads, "naive"), FUSED: partial(fused_checks, far),
            TORCH: partial(torch_reads, "torch"), TOP: partial(top_checks, far)}[name]()


@contextmanager
def replaced(module: ModuleType, source: str, path: Path) -> Iterator[None]:
    """The module as if it had this text; everywhere else its functions and classes are exchanged too.

    The text must lie in a file: Triton reads its kernels' source there.
    """
    path.write_text(source, encoding="utf-8")
    before = dict(vars(module))
    with pytest.MonkeyPatch.context() as patch:
        try:
            exec(compile(source, str(path), "exec"), vars(module))
            new = {id(v): vars(module)[k] for k, v in before.items() if callable(v) and vars(module)[k] is not v}
            for other in list(sys.modules.values()):
                if getattr(other, "__name__", "").startswith(("walkvllm", "test_kernels", "test_fused")):
                    for name in [k for k, v in vars(other).items() if id(v) in new]:
                        patch.setattr(other, name, new[id(vars(other)[name])])
            yield
        finally:
            vars(module).clear()
            vars(module).update(before)


@pytest.mark.parametrize("name", [READ, WRITE, NAIVE, TORCH, FUSED, TOP])
def test_nothing_is_red_before(name: str, far: Far) -> None:
    for check in checks(name, far):
        check()


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_kernel_is_noticed(what: str, tmp_path: Path, far: Far) -> None:
    name, right, wrong = BROKEN[what]
    source = (ROOT / name).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"the text of {what!r} is not there, or not once"
    module = import_module(f"walkvllm.{name.removeprefix('walkvllm/').removesuffix('.py').replace('/', '.')}")
    with replaced(module, source.replace(right, wrong), tmp_path / "broken.py"):
        for check in checks(name, far):
            try:
                check()
            except Exception as e:  # an AssertionError, or whatever the broken line leads to
                print(f"{check}: {type(e).__name__}: {e}"[:300])
                return
    pytest.fail(f"nobody noticed that {what!r} is broken")
