"""Compiles the Triton kernels for GPUs that are not here, and says what came out.

  compile_kernels.py          compile everything, write walkvllm/data/kernels.json
  compile_kernels.py check    compile everything again, and compare it with the file
  compile_kernels.py quick    the same with a few of them, for two GPUs
  compile_kernels.py stale    compile nothing: does the file belong to these sources and this list of launches?

Triton's wheel brings NVIDIA's assembler and disassembler, and LLVM for AMD. So what the compiler makes of a kernel can
be looked at on any machine: registers, spills, the stack, shared memory, which matrix instructions were chosen, and
whether memory is read 16 bytes at a time.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "0"  # read when the kernels are imported
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # or the result would hold the path of the sources

import argparse
import ast
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
from walkvllm.kernels.top_k_top_p import top_k_top_p_kernel

from walkvllm.kernels import fused, paged_attention, paged_write, triton

DATA = ROOT / "walkvllm/data/kernels.json"
TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32),
           "gfx942": ("hip", "gfx942", 64)}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}  # bytes a program may take
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HEAD_SIZES = (32, 64, 80, 96, 100, 120, 128, 192, 256)
HEADS = (  # query heads, KV heads, head size, are Q and K normed: what models of the accepted families have
    (4, 2, 64, True),  # the model in the package
    (16, 8, 128, True), (32, 8, 128, True), (40, 8, 128, True), (64, 8, 128, True),  # Qwen3
    (14, 2, 64, False), (12, 2, 128, False), (16, 2, 128, False), (28, 4, 128, False), (40, 8, 128, False),  # Qwen2
    (16, 16, 64, False), (16, 16, 128, False), (20, 20, 128, False), (64, 64, 128, False),  # the first of that kind
    (32, 8, 64, False), (24, 8, 128, False), (32, 8, 128, False), (64, 8, 128, False), (128, 8, 128, False),  # Llama 3
    (32, 32, 128, False), (40, 40, 128, False), (52, 52, 128, False), (32, 32, 100, False),  # 1 and 2; OpenLLaMA 3B
    (48, 8, 128, False), (96, 8, 128, False),  # Mistral: Codestral and Small with 22B, Large; the others are as Llama 3
    (9, 3, 64, False), (15, 5, 64, False), (32, 32, 64, False),  # SmolLM2
    (8, 4, 256, False), (12, 4, 256, False),  # Falcon 3
    (16, 8, 96, False), (32, 8, 120, False), (32, 8, 80, False),  # Danube 3 and 2
    (32, 4, 128, False), (56, 8, 128, False),  # Yi, DeepSeek Coder
    (32, 4, 64, False), (12, 12, 64, False), (32, 32, 80, False),  # TinyLlama, Llama 160M, Granite Code 3B
)
OTHER_HEADS = ((1, 256), (8, 256))  # (group, head size) of other families, should they be accepted
STEPS = {"prompts": (8, 512, 4096), "decodes": (64, 1, 4096), "a long decode": (1, 1, 65536)}


@dataclass(frozen=True)
class Launch:
    """One kernel with one set of arguments, as Triton would compile it."""

    kernel: Any
    case: str  # what it is for, in words; with the kernel's name, its key in the file
    types: dict[str, str]  # of the arguments that are not constants
    constants: dict[str, Any]
    aligned: frozenset[str] = frozenset()  # integers known to be divisible by 16, as pointers always are
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})
    quick: bool = False
    matrix: bool = False  # a prompt in 16-bit numbers: must use the newest matrix instructions

    def __str__(self) -> str:
        return f"{self.kernel.__name__}: {self.case}"

    @property
    def hash(self) -> str:
        """Changes with the arguments and options."""
        return short_hash(repr((sorted(self.types.items()), sorted(self.constants.items()), sorted(self.aligned),
                                sorted(self.options.items()))))

    @property
    def source(self) -> Any:
        """What triton.compile takes."""
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        signature = {n: "constexpr" if n in self.constants else self.types[n] for n in names}
        aligned = [i for i, n in enumerate(names) if n in self.aligned or signature[n].startswith("*")]
        return ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants,
                         attrs={(i,): [["tt.divisibility", 16]] for i in aligned})


# ---- which launches there are ----

def attention(dtype: str, head_dim: int, step: str, kv_heads: int = 8, group: int = 2, block_size: int = 16,
              window: int = 0, soft_cap: float = 0.0) -> Iterator[Launch]:
    """The attention kernel as `read_triton` would launch it, and the reduction where it splits."""
    cfg = paged_attention.pick_config(*STEPS[step], kv_heads, head_dim, getattr(torch, dtype), "sm_90")
    pointer, names = f"*{DTYPES[dtype]}", paged_attention.paged_attention_kernel.arg_names
    types = dict.fromkeys(names, "i32") | {n: pointer for n in names if n.endswith("_ptr")}
    types |= {n: "*fp32" for n in names if n.startswith("part_")} | {"scale": "fp32"}
    types |= dict.fromkeys(("block_table_ptr", "seq_lens_ptr", "query_start_loc_ptr"), "*i32")
    block_m = max(cfg.block_m, triton.next_power_of_2(group))
    dims = {"HEAD_DIM": head_dim, "DIM_TILE": max(16, triton.next_power_of_2(head_dim))}
    constants = dims | dict(
        KV_HEADS=kv_heads, GROUP=group, BLOCK_SIZE=block_size, BLOCK_Q=block_m // group, BLOCK_M=block_m,
        TILE_N=cfg.tile_n, SPLIT=cfg.num_splits > 1, WINDOW=window, SOFT_CAP=soft_cap, WIDEN=False)
    extra = "".join(f", {n} {v}" for n, v, usual in (
        ("group", group, 2), ("block size", block_size, 16), ("window", window, 0), ("cap", soft_cap, 0)) if v != usual)
    case = f"{dtype}, head size {head_dim}, {step}{extra}"
    quick = not extra and (dtype, head_dim, step) in (
        ("bfloat16", 128, "prompts"), ("bfloat16", 256, "a long decode"), ("float32", 256, "prompts"))
    yield Launch(paged_attention.paged_attention_kernel, case, types, constants, frozenset({"query_stride"}),
                 {"num_warps": cfg.num_warps if block_m == cfg.block_m else 8, "num_stages": cfg.num_stages}, quick,
                 dtype != "float32" and step == "prompts")
    if cfg.num_splits > 1 and not extra:
        yield reduction(dtype, head_dim, cfg.num_splits)


def reduction(dtype: str, head_dim: int, parts: int) -> Launch:
    """The kernel that merges parts."""
    names = paged_attention.reduce_splits_kernel.arg_names
    types = {n: "*fp32" for n in names if n.startswith("part_")} | {"out_ptr": f"*{DTYPES[dtype]}"}
    constants = {"HEAD_DIM": head_dim, "DIM_TILE": max(16, triton.next_power_of_2(head_dim)), "NUM_SPLITS": parts}
    case = f"{dtype}, head size {head_dim}, {parts} parts"
    return Launch(paged_attention.reduce_splits_kernel, case, types, constants)


def simple(kernel: Any, case: str, dtype: str, constants: dict[str, Any], **types: str) -> Launch:
    """A launch whose pointers are to `dtype` and whose numbers are int32, where `types` does not say otherwise."""
    usual = {n: f"*{DTYPES[dtype]}" if n.endswith("_ptr") else "i32" for n in kernel.arg_names}
    return Launch(kernel, f"{dtype}, {case}", usual | types, constants,
                  frozenset(n for n in kernel.arg_names if n in ("key_stride", "value_stride", "vocab")))


def small(dtype: str) -> Iterator[Launch]:
    """The kernels that only move numbers through memory once."""
    def power(n: int) -> int:
        return triton.next_power_of_2(n)

    for width in (64, 1024, 5120):
        yield simple(paged_write.reshape_and_cache_kernel, f"{width} numbers a token", dtype,
                     {"WIDTH": width, "TILE": power(width)}, slot_mapping_ptr="*i64")
    for width in (1024, 5120, 16384):
        for add in (True, False):
            yield replace(simple(fused.add_rms_norm_kernel, f"{width} numbers, {'add' if add else 'norm only'}", dtype,
                                 {"ADD": add, "WIDTH": width, "TILE": power(width)}, eps="fp32"),
                          options={"num_warps": 4 if width <= 4096 else 8})
    yield simple(fused.silu_and_mul_kernel, "3072 numbers", dtype, {"WIDTH": 3072, "TILE": 1024})
    odd = ((28, 4, 80, False),)  # neither a power of two
    some = [heads for heads in HEADS if heads[3] or heads in ((32, 8, 128, False), (64, 64, 128, False))]
    for heads in (*HEADS, *odd) if dtype == "bfloat16" else (*some, *odd):
        yield rope(dtype, *heads)


def rope(dtype: str, q_heads: int, kv_heads: int, head_dim: int, norm: bool) -> Launch:
    """The kernel that turns Q and K and writes K and V."""
    heads, half, values = (triton.next_power_of_2(n) for n in (q_heads + kv_heads, head_dim // 2, kv_heads * head_dim))
    launch = simple(fused.rope_and_write_kernel, f"{q_heads}+{kv_heads} heads of {head_dim}{', normed' * norm}", dtype,
                    {"NORM": norm, "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "HALF": head_dim // 2,
                     "HEAD_TILE": heads, "HALF_TILE": half, "V_TILE": values},
                    positions_ptr="*i64", slot_mapping_ptr="*i64", eps="fp32")
    return replace(launch, options={"num_warps": 4 if heads * half <= 4096 else 16})


def other() -> Iterator[Launch]:
    """The kernels that see no number of the model's own type."""
    for block_size in (8, 16, 256):
        yield simple(fused.slot_mapping_kernel, f"block size {block_size}", "float32",
                     {"BLOCK_SIZE": block_size, "TILE": 256}, slot_mapping_ptr="*i64", positions_ptr="*i64",
                     query_start_loc_ptr="*i32", block_table_ptr="*i32")
    for k, p in ((True, False), (False, True), (True, True)):
        yield replace(simple(top_k_top_p_kernel, f"151936 words{', top-k' * k}{', top-p' * p}", "float32",
                             {"HAS_K": k, "HAS_P": p, "TILE": 4096}, top_k_ptr="*i64"),
                      options={"num_warps": 8}, quick=k and p)


@cache
def launches() -> list[Launch]:
    """What the engine launches on a GPU for the heads of the families it accepts, and some more."""
    found = [launch for dtype in DTYPES for head_dim in HEAD_SIZES for step in STEPS
             for launch in attention(dtype, head_dim, step)]
    groups = dict.fromkeys((q // kv, size) for q, kv, size, _ in HEADS if q // kv != 2) | dict.fromkeys(OTHER_HEADS)
    both: dict[str, Any] = {"window": 4096, "soft_cap": 50.0}
    for step in STEPS:
        for group, head_dim in groups:
            found += attention("bfloat16", head_dim, step, group=group)
        for more in ({"block_size": 8}, {"block_size": 256}, {"window": 4096}, {"soft_cap": 50.0}, both):
            found += attention("bfloat16", 128, step, **more)
        found += attention("bfloat16", 256, step, **both)
        found += attention("float16", 128, step, kv_heads=1, group=64)  # a tile taller than the table's
        found += [*attention("float32", 128, step, group=8), *attention("float32", 256, step, group=12)]
    found += [reduction("bfloat16", 128, parts) for parts in (2, 4, 8, 16)]
    return found + [launch for dtype in DTYPES for launch in small(dtype)] + list(other())


# ---- what one compilation says ----

def nvidia(compiled: Any, target: str) -> dict[str, Any]:
    """Facts out of the binary, by NVIDIA's own tools."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        commands = ([f"{tools}/cuobjdump", "--dump-resource-usage", f.name], [f"{tools}/nvdisasm", "-c", f.name])
        usage, code = (subprocess.run(c, capture_output=True, text=True, env=env, check=True).stdout for c in commands)
    used = dict(re.findall(r"(REG|STACK):(\d+)", usage))

    def count(pattern: str) -> int:
        return len(re.findall(rf"\s{pattern}\b", code))

    return {"registers": int(used["REG"]), "spills": count(r"(?:LDL|STL)[.\w]*"), "stack": int(used["STACK"]),
            "mma": count(r"[HI]MMA[.\w]*"), "wgmma": count(r"HGMMA[.\w]*"), "tcgen05": count(r"UTC\w*MMA[.\w]*"),
            "loads": count(r"LDG(?:STS)?[.\w]*"), "loads_16_bytes": count(r"LDG(?:STS)?\.[.\w]*128[.\w]*")}


def amd(compiled: Any, target: str) -> dict[str, Any]:
    """The same out of the assembly text for AMD."""
    text = compiled.asm["amdgcn"]

    def says(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])  # type: ignore[index]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, text))

    return {"registers": says("vgpr_count"), "spills": says("vgpr_spill_count") + says("sgpr_spill_count"),
            "stack": says("private_segment_fixed_size"), "mma": count(r"v_mfma"), "wgmma": 0, "tcgen05": 0,
            "loads": count(r"(?:global|buffer)_load_"), "loads_16_bytes": count(r"(?:global|buffer)_load_dwordx4")}


def report(launch: Launch, target: str) -> dict[str, Any]:
    """One row of the file."""
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(launch.source, target=GPUTarget(*TARGETS[target]), options=launch.options)
    facts = (nvidia if TARGETS[target][0] == "cuda" else amd)(compiled, target)
    return {"kernel": launch.kernel.__name__, "case": launch.case, "target": target, "launch": launch.hash,
            "warps": launch.options["num_warps"], "shared": compiled.metadata.shared, **facts}


def complaints(launch: Launch, row: dict[str, Any]) -> list[str]:
    """What must not be in a row."""
    found = []
    if row["spills"] or row["stack"]:
        found.append(f"{row['spills']} spills, {row['stack']} bytes of stack")
    if row["shared"] > SHARED[row["target"]]:
        found.append(f"{row['shared']} bytes of shared memory, of {SHARED[row['target']]}")
    newest = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mma"}[row["target"]]
    if launch.matrix and not row[newest]:
        found.append(f"no {newest} instruction")
    attention = launch.kernel is paged_attention.paged_attention_kernel
    head_bytes = launch.constants.get("HEAD_DIM", 0) * (4 if launch.types.get("k_cache_ptr") == "*fp32" else 2)
    in_rows = head_bytes % 16 == 0  # else heads begin between two such loads
    if attention and in_rows and TARGETS[row["target"]][0] == "cuda" and not row["loads_16_bytes"]:
        found.append("no load of 16 bytes")
    return [f"{launch}, {row['target']}: {what}" for what in found]


# ---- does the file belong to the sources? ----

def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def code_hash(path: Path) -> str:
    """Changes with the code of a module's kernels, not with their comments, and not with what stands beside them."""
    tree, kernels = ast.parse(path.read_text(encoding="utf-8")), []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list):
            node.body = node.body[ast.get_docstring(node) is not None :]
            kernels.append(ast.dump(node))
    return short_hash("".join(kernels))


def hashes() -> dict[str, str]:
    """Of each module that holds a kernel among the launches."""
    modules = {sys.modules[launch.kernel.fn.__module__].__file__ for launch in launches()}
    return {Path(str(m)).stem: code_hash(Path(str(m))) for m in sorted(map(str, modules))}


def stale(data: dict[str, Any]) -> list[str]:
    """Why the file does not belong to what is here."""
    found = [f"kernels/{name}.py has changed" for name, now in hashes().items() if data["sources"].get(name) != now]
    have = {(r["kernel"], r["case"], r["target"], r["launch"]) for r in data["rows"]}
    want = {(la.kernel.__name__, la.case, t, la.hash) for la in launches() for t in TARGETS}
    found += [f"not in the file: {' / '.join(key)}" for key in sorted(want - have)]
    found += [f"no longer launched: {' / '.join(key)}" for key in sorted(have - want)]
    return [f"{f}. Run: make compile-report" for f in found[:5]]


def compile_all(chosen: list[Launch], targets: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and what is wrong with them."""
    rows, bad = [], []
    for launch in chosen:
        for target in targets:
            row = report(launch, target)
            rows.append(row)
            bad += complaints(launch, row)
        print(f"{launch}: " + "  ".join(f"{r['target']} {r['registers']} registers" for r in rows[-len(targets):]),
              flush=True)
    return rows, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="write", choices=["write", "check", "quick", "stale"])
    what = parser.parse_args().what
    chosen = [la for la in launches() if la.quick] if what == "quick" else launches() if what != "stale" else []
    rows, bad = compile_all(chosen, ("sm_80", "sm_90") if what == "quick" else tuple(TARGETS))
    if what == "write":
        data = {"triton": triton.__version__, "sources": hashes(), "rows": rows}
        lines = ",\n  ".join(json.dumps(r) for r in rows)
        head = json.dumps({k: v for k, v in data.items() if k != "rows"})
        DATA.write_text(f'{head[:-1]}, "rows": [\n  {lines}]}}\n', encoding="utf-8")
    else:
        data = json.loads(DATA.read_text(encoding="utf-8"))
        bad += stale(data)
        if data["triton"] == triton.__version__:  # another one chooses other registers
            kept = {(r["kernel"], r["case"], r["target"]): r for r in data["rows"]}
            keys = [(r["kernel"], r["case"], r["target"]) for r in rows]
            bad += [f"differs from the file: {kept.get(k)}, now {r}" for k, r in zip(keys, rows) if kept.get(k) != r]
    print(*bad, f"{len(rows)} compiled, {len(bad)} complaints", sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
