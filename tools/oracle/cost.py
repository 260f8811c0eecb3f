"""What a step of the scheduler and the block pool costs: ours beside vLLM 0.22.0's own classes, in one process.

    make bench-schedule
    PYTHONPATH=tools .oracle/bin/python -m oracle.cost [--steps N] [--write]

Both get the same requests and the same tokens, and must decide the same. They take turns step by step, and who goes first
changes. Timed are `schedule` and `update_from_output`; the time of a setting is the median over its steps. --write puts
the result into walkvllm/data/schedule_cost.json, for page 07.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import vllm_trace
from walkvllm import schedule_trace

DATA = Path(__file__).resolve().parents[2] / "walkvllm" / "data" / "schedule_cost.json"
SIZES = (1, 16, 64, 256, 1024)
BLOCK = 16
SHARED = [7 * i % 997 for i in range(1 << 15)]  # the start that all prompts of a prefix-heavy load have


@dataclass(frozen=True)
class Load:
    "What runs. `prompt` and `answer` are ranges of tokens; whoever ends is followed by another request."

    running: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    shared: int = 0  # first tokens that all prompts have in common, beside those of `prompt`
    waiting: int = 0  # requests in the queue, never to be served
    blocks: int = 0  # in the pool; 0: as many as are needed

    def request(self, number: int) -> dict[str, Any]:
        "The request of this number, for both sides."
        rng = random.Random(number)
        own = [rng.randrange(1000) for _ in range(rng.randint(*self.prompt))]
        name = f"r{number}"
        return {"id": name, "prompt_token_ids": SHARED[: self.shared] + own, "max_tokens": rng.randint(*self.answer)}

    def workload(self) -> dict[str, Any]:
        longest = self.shared + self.prompt[1] + self.answer[1]
        needed = 2 + (self.running + 1) * (2 + longest // BLOCK)
        config = {
            "block_size": BLOCK, "num_gpu_blocks": self.blocks or needed, "max_num_batched_tokens": 8192,
            "max_num_seqs": self.running, "max_model_len": max(2 * longest, 2048), "scheduler_reserve_full_isl": False,
        }  # fmt: skip
        return {"config": config, "requests": []}


@dataclass
class Side:
    "One scheduler with what drives it, and its times in seconds."

    trace: Any  # ScheduleTrace or VllmTrace
    make_request: Any
    run_model: Any
    times: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)

    def add(self, spec: dict[str, Any]) -> None:
        self.trace.key[spec["id"]] = spec["id"]
        (self.trace.known if hasattr(self.trace, "known") else self.trace.produced)[spec["id"]] = len(
            spec["prompt_token_ids"]
        )
        start = time.thread_time()
        self.trace.scheduler.add_request(self.make_request(spec))
        self.added.append(time.thread_time() - start)

    def step(self) -> tuple[dict[str, int], list[str]]:
        "One step. Returns what it scheduled and who ended."
        scheduler = self.trace.scheduler
        t0 = time.thread_time()
        work = scheduler.schedule()
        t1 = time.thread_time()
        sampled = self.run_model(work)
        t2 = time.thread_time()
        out = scheduler.update_from_output(work, sampled)
        self.times.append(time.thread_time() - t2 + t1 - t0)
        messages = out.values() if isinstance(out, dict) else [out]
        ended = [o.request_id for m in messages for o in m.outputs if o.finish_reason is not None]
        return work.num_scheduled_tokens, ended


def both(load: Load) -> tuple[Side, Side]:
    "vLLM's side and ours."
    theirs = vllm_trace.VllmTrace(load.workload(), free_queue=False, tables=False, hashes=False)
    ours = schedule_trace.ScheduleTrace(load.workload(), False, False, False)
    return (
        Side(theirs, lambda s: vllm_trace.make_request(theirs.cfg, 0, s, theirs.hasher), theirs.run_model),
        Side(ours, lambda s: our_request(ours, s), ours.model),
    )


def our_request(trace: schedule_trace.ScheduleTrace, spec: dict[str, Any]) -> Any:
    params = schedule_trace.SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"])
    return schedule_trace.Request(spec["id"], spec["prompt_token_ids"], params, block_hasher=trace.hasher)


def warm_up(load: Load, sides: tuple[Side, Side]) -> Iterator[dict[str, Any]]:
    "Steps until everybody runs and decodes. Returns the requests that may follow."
    numbers = iter(range(1 << 30))
    for _ in range(load.running + load.waiting):
        spec = load.request(next(numbers))
        for side in sides:
            side.add(spec)
    while True:
        scheduled, _ = sides[0].step()
        assert sides[1].step()[0] == scheduled
        if len(scheduled) == load.running and sum(scheduled.values()) == load.running:
            return (load.request(n) for n in numbers)


def measure(load: Load, steps: int) -> dict[str, float]:
    "Median microseconds of a step on both sides, and of adding a request."
    sides = both(load)
    more = warm_up(load, sides)
    for side in sides:
        side.times, side.added = [], []
    gc.collect()
    gc.disable()
    for i in range(steps):
        order = sides if i % 2 else sides[::-1]
        (scheduled, ended), other = order[0].step(), order[1].step()
        assert other == (scheduled, ended), "the two sides decide differently"
        for _ in ended:
            spec = next(more)
            for side in order:
                side.add(spec)
    gc.enable()
    vllm, ours = (1e6 * statistics.median(side.times) for side in sides)
    result = {"vllm_us": round(vllm, 1), "ours_us": round(ours, 1), "ratio": round(ours / vllm, 3)}
    if sides[0].added:
        vllm, ours = (1e6 * statistics.median(side.added) for side in sides)
        result |= {"vllm_add_us": round(vllm, 1), "ours_add_us": round(ours, 1)}
    return result


LOADS = {
    "decode": lambda n: Load(n, (96, 160), (4000, 4000)),
    "mixed": lambda n: Load(n, (64, 384), (16, 144)),
    "prefix-heavy": lambda n: Load(n, (1, 64), (16, 144), shared=1024),
}
GROWTH = {
    "blocks in the pool": (lambda x: Load(64, (64, 384), (16, 144), blocks=x), (3000, 12000, 48000, 192000)),
    "waiting requests": (lambda x: Load(64, (64, 384), (16, 144), waiting=x), (1, 100, 1000, 10000)),
    "tokens of context": (lambda x: Load(64, (x, x), (4000, 4000)), (128, 1024, 8192, 32768)),
    "tokens of context, one request": (lambda x: Load(1, (x, x), (4000, 4000)), (128, 1024, 8192, 32768)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of the scheduler costs, ours beside vLLM's own.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name}")
    args = parser.parse_args()
    table, growth = [], []
    print(f"{'load':<32}{'running':>8}{'vLLM µs':>10}{'ours µs':>10}{'ratio':>8}{'add: vLLM':>11}{'ours':>8}")
    for name, load in LOADS.items():
        for n in SIZES:
            row = measure(load(n), args.steps)
            table.append({"load": name, "running": n} | row)
            show(name, n, row)
    for name, (load, sizes) in GROWTH.items():
        for x in sizes:
            row = measure(load(x), args.steps)
            growth.append({"grows": name, "size": x} | row)
            show(name, x, row)


def show(name: str, size: int, row: dict[str, float]) -> None:
    print(f"{name:<32}{size:>8}{row['vllm_us']:>10.1f}{row['ours_us']:>10.1f}{row['ratio']:>8.3f}"
          f"{row.get('vllm_add_us', 0):>11.1f}{row.get('ours_add_us', 0):>8.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
