"""walkvllm beside what people would use instead: the same weights, precision, threads and work, in alternating rounds.

    python tools/bench/run.py                          workloads a and b, walkvllm and transformers
    python tools/bench/run.py --peers walkvllm,vllm --python vllm=ENV/bin/python     vLLM's CPU build, installed there
    python tools/bench/run.py --load my.json           any other work: name, model, dtype, prompts, max_tokens

First the greedy float32 tokens of all must agree, or nothing is timed. Then every peer loads once. Each round asks
every peer for one token (the prompts' time) and for all of them. Ratios are taken within a round, so that what else
the machine does hits both sides. The result is one JSON file.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = ROOT / "build" / "bench"
EMBEDDED = ROOT / "walkvllm" / "tales-3m"
SMOL = ROOT / ".models" / "smollm2-135m-instruct"
PEERS: dict[str, dict[str, Any]] = {  # the script, and what it is told besides
    "walkvllm": {"script": "walkvllm_peer.py", "backend": "cpu"},
    "walkvllm-torch": {"script": "walkvllm_peer.py", "backend": "torch"},
    "transformers": {"script": "transformers_peer.py"},
    "vllm": {"script": "vllm_peer.py", "bind": "auto"},
    "vllm-all-cores": {"script": "vllm_peer.py", "bind": "all"},
}
PYTHONS: dict[str, str] = {}  # of scripts that need another environment than this one
SHAPE = {  # SmolLM2-135M's, for a machine that has not fetched it
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 100000.0,
}  # fmt: skip


def smol_model() -> Path:
    """SmolLM2-135M as fetched by tools/fetch_smollm2.py, else its shape with random weights."""
    folder = BUILD / "smollm2-shape"
    if SMOL.exists() or folder.exists():
        return SMOL if SMOL.exists() else folder
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).bfloat16()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    return folder


def load(name: str, model: Path, dtype: str, batch: int, length: int, max_tokens: int) -> dict[str, Any]:
    """Random prompts of one length."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    rnd = random.Random(batch)
    prompts = [[rnd.randrange(3, vocab) for _ in range(length)] for _ in range(batch)]
    return {"name": f"{name}, batch {batch}", "model": str(model), "dtype": dtype, "prompts": prompts,
            "max_tokens": max_tokens}  # fmt: skip


def loads(which: str) -> list[dict[str, Any]]:
    """a: the embedded model, which measures engines. b: SmolLM2-135M, which measures kernels."""
    made = []
    if "a" in which:
        made += [load("a: embedded, float32", EMBEDDED, "float32", n, 32, 64) for n in (1, 4, 16, 64)]
    if "b" in which:
        made += [load("b: SmolLM2-135M, bfloat16", smol_model(), "bfloat16", n, 64, 32) for n in (1, 6, 16)]
    return made


class Peer:
    """A running peer."""

    def __init__(self, name: str, work: dict[str, Any], dtype: str, threads: int) -> None:
        self.name, count = name, len(work["prompts"])
        longest = max(map(len, work["prompts"])) + work["max_tokens"] + 1
        told = {**PEERS[name], "model": work["model"], "dtype": dtype, "threads": threads, "longest": longest,
                "requests": count}  # fmt: skip
        script = PEERS[name]["script"]
        command = [PYTHONS.get(script, sys.executable), str(HERE / script), json.dumps(told)]
        BUILD.mkdir(parents=True, exist_ok=True)
        self.log = BUILD / f"{name}.log"
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        stderr=self.log.open("w"))  # fmt: skip
        self.version = self.read()["version"]

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; its log: {self.log}\n" + self.log.read_text()[-2000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """One timed run."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "max_tokens": max_tokens}), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


def agree(work: dict[str, Any], names: list[str], threads: int, tokens: int = 8) -> dict[str, float]:
    """The share of the first greedy float32 tokens that each peer has in common with the first one."""
    answers = {}
    for name in names:
        peer = Peer(name, work, "float32", threads)
        answers[name] = peer.ask(work["prompts"], tokens)["tokens"]
        peer.close()
    first = answers[names[0]]
    return {name: sum(a == b for x, y in zip(first, rows, strict=True) for a, b in zip(x, y, strict=True))
            / (tokens * len(first)) for name, rows in answers.items()}  # fmt: skip


def measure(work: dict[str, Any], names: list[str], rounds: int, threads: int, clock: str) -> dict[str, Any]:
    """Times all peers in alternating rounds, after one that does not count."""
    same = agree(work, names, threads)
    if min(same.values()) < 0.98:
        raise SystemExit(f"{work['name']}: the greedy float32 tokens differ, nothing is timed: {same}")
    peers = [Peer(name, work, work["dtype"], threads) for name in names]
    prompts, n = work["prompts"], work["max_tokens"]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    peak = {}
    for i in range(rounds + 1):
        for peer in peers:
            first, full = peer.ask(prompts, 1), peer.ask(prompts, n)
            peak[peer.name] = full["peak_mb"]
            if i:
                times[peer.name].append((first[clock], full[clock]))
    for peer in peers:
        peer.close()
    result: dict[str, Any] = {"workload": work["name"], "requests": len(prompts), "tokens_each": n,
                              "dtype": work["dtype"], "same_tokens": same, "peers": {}}  # fmt: skip
    ours = times[names[0]]
    for peer in peers:
        mine = times[peer.name]
        decode = [full - first for first, full in mine]
        ratios = {
            "all": [b[1] / a[1] for a, b in zip(ours, mine, strict=True)],
            "prefill": [b[0] / a[0] for a, b in zip(ours, mine, strict=True)],
            "decode": [(b[1] - b[0]) / (a[1] - a[0]) for a, b in zip(ours, mine, strict=True)],
        }
        result["peers"][peer.name] = {
            "version": peer.version, "peak_mb": peak[peer.name], "seconds": [round(full, 4) for _, full in mine],
            "prefill_seconds": [round(first, 4) for first, _ in mine],
            "output_tokens_per_s": round(len(prompts) * n / statistics.median(full for _, full in mine), 1),
            "ms_per_step": round(1000 * statistics.median(decode) / (n - 1), 3),
            "ours_is_faster_by": {
                what: [round(f(r), 2) for f in (statistics.median, min, max)] for what, r in ratios.items()},
        }  # fmt: skip
    return result


def show(result: dict[str, Any]) -> None:
    """A few lines for whoever waits."""
    print(f"{result['workload']}, {result['tokens_each']} tokens each")
    for name, row in result["peers"].items():
        ratio = row["ours_is_faster_by"]
        spread = ", ".join(f"{what} {m} ({low} to {high})" for what, (m, low, high) in ratio.items())
        print(f"  {name:16}{row['output_tokens_per_s']:9.1f} tokens/s {row['ms_per_step']:8.2f} ms a step "
              f"{row['peak_mb']:6} MB   ours is faster by: {spread}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="ab", help="letters of the built-in workloads")
    parser.add_argument("--load", type=Path, action="append", default=[], help="a workload in a JSON file")
    parser.add_argument("--peers", default="walkvllm,walkvllm-torch,transformers", help="the first, beside the others")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="another Python for a peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time of a peer's process: on a busy machine")
    parser.add_argument("--out", type=Path, default=BUILD / "bench.json")
    args = parser.parse_args()
    PYTHONS.update((PEERS[name]["script"], path) for name, path in (pair.split("=", 1) for pair in args.python))
    works = [json.loads(path.read_text()) for path in args.load] or loads(args.workloads)
    clock = "cpu_seconds" if args.cpu_time else "seconds"
    results = []
    for work in works:
        results.append(measure(work, args.peers.split(","), args.rounds, args.threads, clock))
        show(results[-1])
    machine = {"machine": platform.machine(), "python": platform.python_version(), "threads": args.threads,
               "clock": clock}  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    print(f"written: {args.out}")


if __name__ == "__main__":
    main()
