"""Measures the process boundary and stores what pages 04b and 16c show: walkvllm/data/boundary.json and busy_loop.json.

Decode steps of the embedded model with 1, 64 and 256 running requests, through the in-process client and through a core
in its own process, in turns. Run it on a quiet machine: make bench-boundary
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from walkvllm import LLM, EngineArgs, SamplingParams
from walkvllm.core_client import EngineCoreClient, InprocClient
from walkvllm.frames import FROM_CORE, Kind, pack, unpack
from walkvllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from walkvllm.mp_client import SyncMPClient
from walkvllm.recording import record_walk, spans_of, stops_of
from walkvllm.show import example

DATA = ROOT / "walkvllm" / "data"
REQUESTS = (1, 64, 256)
TOKENS, ROUNDS = 40, 5


def machine() -> str:
    """What the numbers belong to."""
    model = ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{model or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, 1 thread{load}"


def median_us(work: Any, times: int = 400) -> float:
    """The median time of one call, in microseconds."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def config(requests: int) -> Any:
    return EngineArgs(
        dtype="float32", max_model_len=128, num_gpu_blocks_override=requests * 8 + 1, max_num_seqs=requests,
        enable_prefix_caching=False,
    ).create_engine_config()  # fmt: skip


def step_ms(client: EngineCoreClient, requests: int) -> float:
    """The median time between two outputs while all requests decode, in milliseconds."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for i in range(requests):
        client.add_request(EngineCoreRequest(str(i), [100 + (i + j) % 900 for j in range(8)], params, 0.0))
    left, taken, last = requests, [], 0.0
    while left:
        client.wait()
        outputs = client.get_output().outputs
        now = time.perf_counter()
        if len(outputs) == requests and last and left == requests:
            taken.append(now - last)
        last = now
        left -= sum(o.finish_reason is not None for o in outputs)
    return statistics.median(taken) * 1e3


def send_us(requests: int) -> float:
    """From when the core begins to encode a step's outputs until the caller is awake, in microseconds."""
    settings: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": requests, "enable_prefix_caching": False}
    with LLM(dtype="float32", multiprocess=True, num_gpu_blocks_override=requests * 8 + 1, **settings) as llm:
        params = [SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)] * requests
        prompts = [{"prompt_token_ids": [100 + (i + j) % 900 for j in range(8)]} for i in range(requests)]
        stops = stops_of(record_walk(llm, prompts, params, [str(i) for i in range(requests)]))
    sent = {s.step: s for s in stops if s.name == "outputs encoded"}
    woken = {s.step: s for s in stops if s.name == "waited" and s.step in sent}
    ways = [woken[n].ended - sent[n].began for n in woken if len(sent[n].facts["requests"]) == requests]
    return statistics.median(ways) * 1e6


def row(requests: int) -> dict[str, Any]:
    """All that is measured for one number of running requests."""
    clients: dict[str, EngineCoreClient] = {
        "here": InprocClient(config(requests)), "there": SyncMPClient(config(requests))
    }  # fmt: skip
    rounds = [{name: step_ms(client, requests) for name, client in clients.items()} for _ in range(ROUNDS)]
    steps = {name: min(r[name] for r in rounds) for name in clients}
    for client in clients.values():
        client.shutdown()
    outputs = EngineCoreOutputs([EngineCoreOutput(str(i), [1000 + i]) for i in range(requests)])
    frames = pack(Kind.OUTPUTS, outputs)
    encode, decode = median_us(lambda: pack(Kind.OUTPUTS, outputs)), median_us(lambda: unpack(frames, FROM_CORE))
    send = max(min(send_us(requests) for _ in range(2)) - encode, 0.0)
    return {
        "requests": requests, "bytes": len(frames[1]), "encode, µs": round(encode, 1), "decode, µs": round(decode, 1),
        "send and wake, µs": round(send), "step in this process, ms": round(steps["here"], 2),
        "step in its own, ms": round(steps["there"], 2),
        "encode, send, decode: share of a step": f"{(encode + send + decode) / steps['here'] / 10:.1f} %",
    }  # fmt: skip


def write(name: str, content: dict[str, Any]) -> None:
    text = json.dumps({"machine": machine(), "date": date.today().isoformat(), **content}, ensure_ascii=False, indent=1)
    (DATA / name).write_text(text + "\n", encoding="utf-8")
    print(f"wrote {(DATA / name).relative_to(ROOT)}")


def main() -> None:
    rows = []
    for requests in REQUESTS:
        rows.append(row(requests))
        print(rows[-1], flush=True)
    write("boundary.json", {"rows": rows})
    with example.llm(multiprocess=True) as llm:
        llm.generate(example.prompts, example.params, use_tqdm=False)  # the first run is not like the others
        llm.reset_prefix_cache()
        stops = stops_of(record_walk(llm, example.prompts, example.params, example.names, together=False))
    spans = [[track, name, step, round(a, 4), round(b, 4)] for track, name, step, a, b in spans_of(stops)]
    write("busy_loop.json", {"spans": spans})


if __name__ == "__main__":
    main()
