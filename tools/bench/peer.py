"""What every peer of the benchmark is: a process that loads a model once and then answers one line after the other.

It is started as `python X_peer.py SETTINGS`, where SETTINGS is JSON with model, dtype, threads, longest (tokens of the
longest request), seqs (requests at once), step (tokens of one step) and pool (tokens of KV cache). Each line of its
input is {"requests": [{"prompt_token_ids", "max_tokens", "arrival"}], "prefix_caching"}; each line of its output
{"seconds", "cpu_seconds", "tokens", "times"}, with the time of each token in seconds after the start. All decode
greedily and ignore EOS. What a peer prints besides goes to its stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Requests = list[dict[str, Any]]


class Clock:
    """Tells who has arrived, and keeps the tokens of each request with their times."""

    def __init__(self, requests: Requests) -> None:
        self.requests = requests
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.times: list[list[float]] = [[] for _ in requests]
        self.next, self.missing = 0, sum(r["max_tokens"] for r in requests)
        self.seconds, self.used = 0.0, 0.0  # when the last token came, and the processor time until then
        self.prefill: float | None = None  # the prompts' part, from a peer that takes one batch after the other
        self.begin()

    def begin(self) -> None:
        """Time and processor time count from here: what a peer sets up before is not part of a run."""
        self.start, self.cpu = time.perf_counter(), cpu_seconds()

    def now(self) -> float:
        return time.perf_counter() - self.start

    def arrived(self, wait: bool) -> range:
        """Who has arrived since the last call, as numbers; `wait`: at least one, if any is left."""
        first = self.next
        if wait and first < len(self.requests):
            time.sleep(max(0.0, self.requests[first].get("arrival", 0.0) - self.now()))
        now = self.now()
        while self.next < len(self.requests) and self.requests[self.next].get("arrival", 0.0) <= now:
            self.next += 1
        return range(first, self.next)

    def take(self, number: int, tokens: Sequence[int]) -> None:
        """These tokens of a request are here now. Those beyond what it asked for do not count."""
        room = self.requests[number]["max_tokens"] - len(self.tokens[number])
        new, now = list(tokens[:room]), self.now()
        self.tokens[number] += new
        self.times[number] += [now] * len(new)
        self.missing -= len(new)
        if new and not self.missing:
            self.seconds, self.used = now, cpu_seconds() - self.cpu


def settings() -> dict[str, Any]:
    """What the driver asks for. Sets the number of threads before anybody loads torch."""
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = str(wanted["threads"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return wanted


def cpu_seconds(pid: int | str = "self") -> float:
    """Processor time of a process and of what it has started, so far."""
    total = 0.0
    for member in family(pid):
        try:
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def family(pid: int | str = "self") -> list[int]:
    """A process and all that descend from it."""
    first = os.getpid() if pid == "self" else int(pid)
    found = [first]
    for member in found:
        for path in Path(f"/proc/{member}/task").glob("*/children"):
            try:
                found += [int(child) for child in path.read_text().split()]
            except OSError:
                continue
    return found


def serve(version: str, generate: Callable[[Clock, bool], None], ask: Callable[[Any], Any] | None = None) -> None:
    """Says that the model is loaded, then measures one set of requests after the other until its input ends.

    `generate` is called with the clock, which has the requests, and with whether prefixes may be shared. It returns
    when all tokens were taken. `ask` answers other questions.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        if "question" in work and ask:
            print(json.dumps({"answer": ask(work["question"])}), file=out, flush=True)
            continue
        clock = Clock(work["requests"])
        generate(clock, work.get("prefix_caching", True))
        result = {"seconds": clock.seconds, "prefill": clock.prefill, "cpu_seconds": clock.used}
        assert not clock.missing, f"{clock.missing} tokens are missing"
        rounded = [[round(t, 6) for t in row] for row in clock.times]
        print(json.dumps({**result, "tokens": clock.tokens, "times": rounded}), file=out, flush=True)
