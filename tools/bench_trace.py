"""Measures what the listening costs and stores it for page 16e: walkvllm/data/trace_cost.json.

The same decode steps by four engines in one process, in turns: the engine as it is with nobody listening; the engine
with a recording on; and twice a copy of the package from which the hooks are cut out (every
`if (listen := ...) is not None:` and what hangs on it), twice because the difference of those two is the noise. Each
step of the one stands beside a step of the others, and what is compared is the CPU time of the thread, so that a busy
machine disturbs all of them alike. make bench-trace
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
import timeit
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
os.environ["OMP_NUM_THREADS"] = "1"
HOOKED = ("engine_core", "core_client", "engine_core_proc", "mp_client", "llm", "async_llm")
WAYS = ("without hooks", "without hooks again", "nobody listens", "recorded")
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


def copy_without_hooks(parent: Path) -> int:
    """Puts a package `barevllm` without hooks into a directory. Returns how many hooks were cut."""
    package, count = parent / "barevllm", 0
    shutil.copytree(ROOT / "walkvllm", package)
    shutil.copytree(ROOT / "kernels", parent / "kernels")
    for path in [*package.glob("*.py"), *(parent / "kernels").glob("*.py")]:
        text = re.sub(r"\bwalkvllm\b", "barevllm", path.read_text(encoding="utf-8"))
        if path.stem in HOOKED and path.parent == package:
            cut = Cut()
            text = ast.unparse(ast.fix_missing_locations(cut.visit(ast.parse(text))))
            assert cut.count, f"{path.stem} has no hooks"
            count += cut.count
        path.write_text(text, encoding="utf-8")
    return count


def engine_with(package: str, requests: int, steps: int) -> Any:
    """An engine of this package with requests that all have a step behind them."""
    module: Any = importlib.import_module(package)
    engine = module.LLM(dtype="float32", multiprocess=False, max_model_len=steps + 24, max_num_seqs=requests,
                        max_num_batched_tokens=max(2048, requests * 8), enable_prefix_caching=False,
                        num_gpu_blocks_override=requests * (steps // 16 + 3) + 1).llm_engine  # fmt: skip
    params = module.SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(requests):
        engine.add_request(str(i), {"prompt_token_ids": [100 + (i + j) % 900 for j in range(8)]}, params)
    engine.step()
    return engine


def measure(requests: int, steps: int) -> dict[str, list[float]]:
    """The CPU time of each step, in microseconds, by way."""
    from walkvllm.trace import record

    engines = {way: engine_with("barevllm" if way in WAYS[:2] else "walkvllm", requests, steps) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    with record(engines["recorded"], limit=2**30) as run:
        for n in range(steps):
            for way in WAYS[n % 4 :] + WAYS[: n % 4]:  # each begins as often as the others
                began = time.thread_time()
                engines[way].step()
                taken[way].append((time.thread_time() - began) * 1e6)
    assert not run.dropped and not run.problem and sum(e.stop == "scheduled" for e in run.events) == steps
    return {way: times[5:] for way, times in taken.items()}


def row(requests: int, steps: int, rounds: int) -> dict[str, Any]:
    """What is stored for one number of running requests."""
    all_rounds = [measure(requests, steps) for _ in range(rounds)]
    result: dict[str, Any] = {"requests": requests}
    for way in WAYS:
        result[f"{way}, µs"] = round(statistics.median(t for each in all_rounds for t in each[way]), 1)
    for way in WAYS[1:]:  # each step by what the same step took without hooks
        pairs = [[a / b for a, b in zip(each[way], each[WAYS[0]], strict=True)] for each in all_rounds]
        ratios = sorted(map(statistics.median, pairs))
        whole = statistics.median(ratio for each in pairs for ratio in each)
        result |= {f"{way}: ratio": round(whole, 4), f"{way}: from": round(ratios[0], 4)}
        result |= {f"{way}: to": round(ratios[-1], 4)}
    return result


def nanoseconds_of_a_test() -> float:
    """What one `if (listen := core.listener) is not None` takes where it is None."""
    class Core:
        listener = None

    core, number = Core(), 1_000_000
    with_test = "if (listen := core.listener) is not None:\n    listen()"
    return min(timeit.repeat(with_test, globals={"core": core}, number=number, repeat=7)) / number * 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        hooks = copy_without_hooks(Path(name))
        sys.path[:0] = [str(ROOT), str(ROOT / "tools"), name]
        import torch
        from bench_boundary import machine

        torch.set_num_threads(1)
        rows = []
        for requests in REQUESTS:
            rows.append(row(requests, args.steps, args.rounds))
            print(rows[-1], flush=True)
    content = {"machine": machine(), "date": date.today().isoformat(), "hooks": hooks, "rounds": args.rounds,
               "steps": args.steps, "one test, ns": round(nanoseconds_of_a_test(), 1), "rows": rows}  # fmt: skip
    path = ROOT / "walkvllm" / "data" / "trace_cost.json"
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
