"""What every peer of the benchmark is: a process that loads a model once and then answers one line after the other.

It is started as `python X_peer.py SETTINGS`, where SETTINGS is JSON with model, dtype, threads, longest and requests.
Each line of its input is {"prompts": [[ids]], "max_tokens": n}; each line of its output {"seconds", "cpu_seconds",
"tokens", "peak_mb"}. All decode greedily and ignore EOS. What a peer prints besides goes to its stderr.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, new tokens for each) -> the new tokens


def settings() -> dict[str, Any]:
    """What the driver asks for. Sets the number of threads before anybody loads torch."""
    wanted: dict[str, Any] = json.loads(sys.argv[1])
    os.environ["OMP_NUM_THREADS"] = str(wanted["threads"])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return wanted


def max_resident() -> int:
    """The most memory in MB that this process has had. (getrusage would count what the driver had before the start.)"""
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) // 1024 if found else 0


def serve(version: str, generate: Generate) -> None:
    """Says that the model is loaded, then measures one request after the other until its input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        tokens = generate(work["prompts"], work["max_tokens"])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        assert all(len(row) == work["max_tokens"] for row in tokens)
        peak = max_resident()
        result = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "peak_mb": peak}
        print(json.dumps(result), file=out, flush=True)
