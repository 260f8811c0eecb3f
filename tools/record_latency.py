"""Records the runs that page 17 shows: python tools/record_latency.py. Takes some seconds on a quiet machine.

Two look alike to the user, an engine at work and a caller who is slow; each of the others has one disease. Of every
event only what page 17b reads is kept.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from statistics import fmean
from types import UnionType
from typing import Any, get_origin

import torch
from cells import ROOT

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests"))

import diseases  # type: ignore[import-not-found]  # noqa: E402
from diseases import CHILD, IN_PROCESS, Ask, Case, Ward, many  # noqa: E402
from msgspec.structs import replace as changed  # noqa: E402

from walkvllm.blame import BUDGET, CONSUME, HEAD, STALL, THRASH  # noqa: E402
from walkvllm.events import FACTS, Run  # noqa: E402
from walkvllm.latency import diagnose  # noqa: E402
from walkvllm.metrics import lives_of, request_metrics, steps_of  # noqa: E402

DATA = ROOT / "walkvllm" / "data"
READ = {  # the facts of each stop that pages 17b and 17c read
    "recording began": (), "input processed": ("tokens", "n"), "message encoded": (), "message sent": (), "added": (),
    "scheduled": ("tokens", "decode", "computed_before", "budget", "left", "why", "waiting", "num_waiting", "preempted",
                  "free_blocks", "kv_usage"),
    "sampled": ("token_ids",), "updated": ("finished",), "waited": (), "outputs decoded": (), "text out": (),
    "taken": (), "aborted": ("requests",), "recording ended": (),
}  # fmt: skip
CASES = {
    "budget": replace(diseases.CASES[BUDGET], asks=many(12, (8, 12), (10, 12))),
    "blocks": Case({"num_gpu_blocks_override": 41, "max_model_len": 128}, many(12, (90, 97), (6, 8))),
    "thrash": replace(diseases.CASES[THRASH], asks=lambda rng: [Ask(6, 60)] * 2 + [Ask(5, 24) for _ in range(10)],
                      engine={"num_gpu_blocks_override": 18, "max_model_len": 128}),
    "head": replace(diseases.CASES[HEAD], asks=lambda rng: [Ask(200, 40), Ask(300, 2), *[Ask(9, 4)] * 10]),
    "stall": replace(diseases.CASES[STALL], asks=lambda rng: [Ask(9, 60)] * 4
                     + [Ask(440, 1, after=3 + 2 * i) for i in range(7)]),
}  # fmt: skip


def empty(kind: Any) -> Any:
    """Nothing, in the type of a fact."""
    if isinstance(kind, UnionType):
        return None
    return [0, 0] if get_origin(kind) is tuple else (get_origin(kind) or kind)()


def slim(run: Run) -> Run:
    """The run with nothing in the facts that pages 17b and 17c do not read."""
    events = []
    for event in run.events:
        if event.stop in READ:
            facts: dict[str, Any] = {name: empty(kind) for name, kind in FACTS[event.stop].items()}
            facts |= {name: event.facts[name] for name in READ[event.stop]}
            if event.stop == "scheduled":
                facts |= {"waiting": facts["waiting"][:1], "preempted": dict.fromkeys(facts["preempted"], [])}
            times = {"began": round(event.began, 5), "ended": round(event.ended, 5)}
            events.append(changed(event, facts=facts, **times))
    return Run(run.engine, events, run.dropped, run.problem)


def seconds(run: Run) -> float:
    """From a request's arrival to the end of its answer, on average."""
    return fmean(life.end - life.arrived for life in lives_of(run).values())


def lags(run: Run) -> float:
    """How long outputs lay, in all; what a busy machine adds."""
    return sum(sum(metrics.output_lags) + (metrics.queued_time or 0.0) for metrics in request_metrics(run).values())


def main() -> None:
    torch.set_num_threads(1)
    ward, runs = Ward(), dict[str, Run]()
    busy = Case({}, many(24, (20, 28), (28, 28)))
    runs["first"] = min((ward.produce_case(busy, CHILD) for _ in range(15)), key=lags)  # the least disturbed
    take = seconds(runs["first"]) / len(steps_of(runs["first"]))
    for _ in range(8):  # until the two look alike
        runs["second"] = ward.produce_case(Case({}, many(6, (20, 28), (28, 28)), take=take), CHILD)
        if abs((alike := seconds(runs["first"]) / seconds(runs["second"])) - 1) < 0.05:
            break
        take *= alike
    for name, case in CASES.items():
        runs[name] = ward.produce_case(case, IN_PROCESS)
    ward.close()
    if diagnose(runs["second"]).verdict != CONSUME:
        sys.exit("the machine is too busy: the two runs do not look alike; nothing is written")
    for name, run in runs.items():
        small = slim(run)
        small.save(path := DATA / f"latency_{name}.jsonl")
        print(f"{name:8} {diagnose(small).verdict:32} {seconds(small) * 1e3:6.0f} ms {path.stat().st_size:8} bytes")


if __name__ == "__main__":
    main()
