"""Measures what the listening costs and stores it for page 16e: walkvllm/data/trace_cost.json.

The same decode steps three ways, in turns: the engine as it is with nobody listening; a copy of it from which the hooks
are cut out (every `if (listen := ...) is not None:` and what hangs on it); and with a recording on. Each way is a process
of its own, and says the median time of a step. Run it on a quiet machine: make bench-trace
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["OMP_NUM_THREADS"] = "1"
HOOKED = ("engine_core", "core_client", "engine_core_proc", "mp_client", "llm", "async_llm")
WAYS = ("without hooks", "nobody listens", "recorded")
REQUESTS = (1, 16, 64)


class Cut(ast.NodeTransformer):
    """Removes what has to do with a listener."""

    def __init__(self) -> None:
        self.count = 0

    def visit_If(self, node: ast.If) -> Any:
        if "listen" in ast.unparse(node.test):
            self.count += 1
            return None
        return self.generic_visit(node)


def cut_hooks(package: Path) -> int:
    """Cuts the hooks out of the modules of a copy of the package. Returns how many there were."""
    count = 0
    for name in HOOKED:
        path, cut = package / f"{name}.py", Cut()
        tree = ast.fix_missing_locations(cut.visit(ast.parse(path.read_text(encoding="utf-8"))))
        path.write_text(ast.unparse(tree), encoding="utf-8")
        count += cut.count
        assert cut.count, f"{name} has no hooks"
    return count


def measure(way: str, requests: int, steps: int) -> None:
    """In a process of its own: prints the median of a decode step, in microseconds."""
    import torch

    from walkvllm import LLM, SamplingParams
    torch.set_num_threads(1)
    llm = LLM(dtype="float32", multiprocess=False, max_model_len=steps + 16, max_num_seqs=requests,
              num_gpu_blocks_override=requests * (steps // 16 + 2) + 1, enable_prefix_caching=False)  # fmt: skip
    engine, taken = llm.llm_engine, list[float]()
    for i in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": [100 + (i + j) % 900 for j in range(8)]}, params)
    recording = None
    if way == "recorded":
        from walkvllm.trace import record

        recording = record(llm)
        recording.__enter__()
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    if recording is not None:
        recording.__exit__(None, None, None)
        assert not recording.run.dropped and not recording.run.problem, recording.run
    print(statistics.median(taken[steps // 10 : -steps // 10]) * 1e6)


def run(way: str, requests: int, steps: int, bare: Path) -> float:
    """One measurement in a fresh process."""
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", way, str(requests), str(steps)]
    where = bare if way == "without hooks" else ROOT
    env = os.environ | {"PYTHONPATH": str(where)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=where)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--measure", nargs=3, metavar=("WAY", "REQUESTS", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]), int(args.measure[2]))
        return
    from bench_boundary import machine

    rows = []
    with tempfile.TemporaryDirectory() as name:
        bare = Path(name)
        shutil.copytree(ROOT / "walkvllm", bare / "walkvllm")
        shutil.copytree(ROOT / "kernels", bare / "kernels")
        hooks = cut_hooks(bare / "walkvllm")
        for requests in REQUESTS:
            rounds = []
            for n in range(args.rounds):  # each round begins with another way
                order = WAYS[n % 3 :] + WAYS[: n % 3]
                rounds.append({way: run(way, requests, args.steps, bare) for way in order})
            best = {way: min(r[way] for r in rounds) for way in WAYS}
            ratios = {way: [r[way] / r["without hooks"] for r in rounds] for way in WAYS[1:]}
            rows.append({
                "requests": requests, **{f"{way}, µs": round(best[way], 1) for way in WAYS},
                **{f"{way}: ratio": round(best[way] / best["without hooks"], 4) for way in ratios},
                **{f"{way}: ratios": [round(r, 4) for r in sorted(each)] for way, each in ratios.items()},
            })  # fmt: skip
            print(rows[-1], flush=True)
    content = {"machine": machine(), "date": date.today().isoformat(), "hooks": hooks, "rounds": args.rounds,
               "steps": args.steps, "rows": rows}  # fmt: skip
    path = ROOT / "walkvllm" / "data" / "trace_cost.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
