"""walkvllm beside what people would use instead: the same weights, precision, threads and work, in alternating rounds.

    make bench                                           everything: an hour, most of it other engines' time
    make bench ARGS="--workloads ab --peers walkvllm,transformers --rounds 3"
    make bench ARGS="--python vllm-0.22.0=ENV/bin/python"            a peer that is installed elsewhere

First the environments of the peers are made, once (environments.py), and the work is written as JSON (workloads.py).
Then, for each model: the greedy float32 tokens of every peer are held against ours, and a peer that differs is not
timed. All peers load; each round gives every workload to every peer. A peer is stopped (SIGSTOP) while others have
their turn. Ratios are taken within a round, so that what else the machine does hits both sides.

Tokens are compared up to a row's first difference. What follows counts as different, unless the two tokens are a near
tie: our two likeliest, less than 0.01 apart in log probability. A model with random weights often has to choose
between such. Below a share of 0.98 a peer is refused.
vLLM runs everything once in four ways, with both of its thread bindings, compiled and not; the fastest one for a
workload takes part in the rounds. Tokens are compared with the compiled one. What "tunables" adds is
GLIBC_TUNABLES for the peers and for us alike: large pages for malloc, and nothing given back between steps.

The result, build/bench/bench.json (--record: also walkvllm/data/bench.json, which the performance page shows beside
the record before it, which becomes bench_before.json):

    {"machine": {"date", "cpu", "cores", "threads", "memory_GB", "flags": {"amx_bf16": bool, "avx512_bf16": bool},
                 "versions": {...}, "load_average": [at the start, at the end], "rounds", "minutes"},
     "yardsticks": {"read_GB_s", "f32_GFLOP_s", "bf16_GFLOP_s"},
     "models": {id: {"parameters", "bytes"}},
     "agreement": [{"engine": "a", "peer", "share", "near_ties"}],
     "runs": [{"workload": "a".."e", "id": "a16" | "d" | "e" | "e-off", "name", "dtype", "batch", "prompt_tokens",
               "output_tokens", "tunables": bool, "prefix_caching": bool (only e),
               "peers": {peer: {"version", "output_tokens_per_s", "seconds": [one a round], "cpu_seconds", "ttft_ms",
                                "ttft_p99_ms", "itl_ms", "itl_p99_ms", "prefill_ms", "decode_ms", "peak_mb",
                                "cpu_share_idle",
                                "ratio": {"all": [median, min, max], "prefill": [...], "decode": [...]},
                                "gain": [median, min, max] (only e, caching on: time without by time with),
                                "way", "ways": {"auto compiled": tokens/s, ...} (only vLLM)}
                         or {"error": why there is no number}}}]}

A ratio is the peer's time by ours: how many times faster ours is. Prefill is until the last request has its first
token; for static batches it is the sum of theirs. Times are medians over rounds; p99 and medians of latencies are
taken over all tokens of a round first.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import environments
import report
from engines import PEERS, Engine, Failed, gguf_of, load, python_for
from workloads import BUILD, ROOT, workloads

SAME, TIE = 0.98, 0.01
LARGE = 400_000_000  # parameters of a model that stays loaded in one way only
ENOUGH = 0.3  # seconds: a shorter run is repeated within its turn
MALLOC = {"hugetlb": 1, "mmap_threshold": 4000000000, "trim_threshold": 8000000000, "top_pad": 1 << 28}
TUNABLES = ":".join(f"glibc.malloc.{key}={value}" for key, value in MALLOC.items())
TUNED = ("a16", "b6", "c1")  # with --tunables both: what is run with them too
GUESS = {"b1": 1.0, "b6": 4.0, "b16": 7.0, "c1": 3.5, "c16": 7.0, "d": 3.5, "e": 1.2, "e-off": 4.0}  # seconds of a turn
RECORD = ROOT / "walkvllm" / "data" / "bench.json"
BEFORE = RECORD.with_name("bench_before.json")


def say(text: str) -> None:
    print(text, flush=True)


# ---- tokens first ----


def check_work(works: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest workload of an engine, cut to 16 requests and 8 tokens each, in float32."""
    largest = max((w for w in works if w["workload"] in "abc"), key=lambda w: w["batch"], default=works[0])
    cut = [{"prompt_token_ids": r["prompt_token_ids"], "max_tokens": 8} for r in largest["requests"][:16]]
    return {**largest, "requests": cut, "dtype": "float32"}


def common(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two rows have in common at their start."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))


def compare(work: dict[str, Any], ours: list[list[int]], theirs: list[list[int]], engine: Engine) -> dict[str, Any]:
    """The share of equal tokens, and how many rows ended in a near tie."""
    equal = counted = ties = 0
    for request, a, b in zip(work["requests"], ours, theirs, strict=True):
        n = common(a, b)
        equal, counted = equal + n, counted + n
        if n < len(a):
            (first, high), (second, low) = engine.question(request["prompt_token_ids"] + a[:n])
            tie = high - low < TIE and {a[n], b[n]} == {first, second}
            ties, counted = ties + tie, counted + (0 if tie else len(a) - n)
    return {"share": round(equal / max(1, counted), 4), "near_ties": int(ties)}


def remembered(work: dict[str, Any], name: str) -> Path:
    """Where a peer's tokens of this work are kept: another version of the peer has another file."""
    environment = PEERS[name].get("environment")
    version = str(environments.made(environment)) if environment else metadata.version("transformers")
    ways = PEERS[name].get("ways", [])[-1:]
    parts = [version, str(python_for(name)), work["model"], json.dumps(work["requests"]), *ways]
    key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]
    return BUILD / "tokens" / f"{work['engine']}-{name}-{key}.json"


def tokens_of(work: dict[str, Any], name: str, threads: int) -> list[list[int]]:
    """A peer's greedy float32 tokens: from a former run, or it is loaded for that."""
    path = remembered(work, name)
    if name.startswith("walkvllm") or not path.exists():  # ours may have changed
        engine = load(work, name, threads)
        try:
            tokens = engine.ask(work)["tokens"]
        finally:
            engine.close()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(tokens))
    stored: list[list[int]] = json.loads(path.read_text())
    return stored


def agreement(works: list[dict[str, Any]], names: list[str], threads: int, out: list[dict[str, Any]]) -> dict[str, str]:
    """Holds everybody's tokens against those of the first peer. What speaks against timing a peer, by name."""
    work, bad = check_work(works), {}
    ours = load(work, names[0], threads)
    mine = ours.ask(work)["tokens"]
    for name in names:
        try:
            theirs = ours.ask(work)["tokens"] if name == names[0] else tokens_of(work, name, threads)
        except (Failed, environments.NotMade) as reason:
            bad[name] = str(reason)
            say(f"  {name}: {reason}")
            continue
        found = compare(work, mine, theirs, ours)
        out.append({"engine": work["engine"], "peer": name, **found})
        if found["share"] < SAME:
            bad[name] = f"not timed: of its greedy float32 tokens only {found['share']:.1%} are ours"
    ours.close()
    shares = ", ".join(f"{e['peer']} {e['share']}" + (f" ({e['near_ties']} near ties)" if e["near_ties"] else "")
                       for e in out if e["engine"] == work["engine"])  # fmt: skip
    say(f"engine {work['engine']}: same greedy float32 tokens: {shares}")
    return bad


# ---- then the rounds ----


def turn(engine: Engine, work: dict[str, Any]) -> dict[str, float]:
    """One peer's turn: the run, several times if it is short."""
    answers = [engine.ask(work)]
    while sum(a["seconds"] for a in answers) < ENOUGH and len(answers) < 5:
        answers.append(engine.ask(work))
    return report.of_round(report.middle(answers), work["requests"])


def warm(work: dict[str, Any]) -> dict[str, Any]:
    """Some of the same prompts with two tokens each, all there at once."""
    count = 16 if work["workload"] in "abc" else 4
    cut = [{"prompt_token_ids": r["prompt_token_ids"], "max_tokens": 2} for r in work["requests"][:count]]
    return {**work, "requests": cut}


class Group:
    """All peers with one model loaded, and the workloads that run on it."""

    def __init__(self, works: list[dict[str, Any]], names: list[str], threads: int, tunables: bool,
                 bad: dict[str, str], ways: dict[tuple[str, str], str]) -> None:  # fmt: skip
        self.works, self.tunables, self.errors, self.ways = works, tunables, dict(bad), ways
        self.names, self.threads = names, threads
        self.engines: dict[tuple[str, str], Engine] = {}
        self.rates: dict[tuple[str, str], dict[str, float]] = {}  # (peer, workload): tokens/s by way
        self.times: dict[tuple[str, str], report.Times] = {}
        able = [name for name in names if name not in bad]
        for name in able:
            if "ways" in PEERS[name] and (name, works[0]["id"]) not in ways:
                self.choose(name)
        self.start(able)

    def ways_of(self, name: str) -> list[str]:
        """The ways of a peer that are still in question."""
        wanted = {self.ways[name, w["id"]] for w in self.works if (name, w["id"]) in self.ways}
        return sorted(wanted) or list(PEERS[name].get("ways", [""]))

    def start(self, names: list[str]) -> None:
        """Loads these peers in the ways that are still in question, all at the same time, unless they are loaded."""
        self.load([(name, way) for name in names for way in self.ways_of(name) if (name, way) not in self.engines])

    def load(self, keys: list[tuple[str, str]]) -> None:
        """Loads these at the same time. What was compiled for one is found by the next, so those come one by one."""
        tunables = TUNABLES if self.tunables else ""
        starting = {key: Engine(self.works[0], key[0], self.threads, key[1], tunables) for key in keys}
        for key, engine in starting.items():
            try:
                engine.wait()
                self.engines[key] = engine
            except Failed as reason:
                self.errors[key[0]] = str(reason)
                engine.kill()

    def choose(self, name: str) -> None:
        """Runs everything in all ways of a peer, and ends those that are the fastest nowhere."""
        for way in PEERS[name]["ways"]:
            self.load([(name, way)])
        loaded, cost = [key for key in self.engines if key[0] == name], dict.fromkeys(PEERS[name]["ways"], 0.0)
        for work in self.works:
            for key in loaded:
                self.attempt(key, warm(work))
                self.attempt(key, work)  # what is compiled at first use
            found = {key[1]: self.attempt(key, work) for key in loaded}
            tokens = sum(r["max_tokens"] for r in work["requests"])
            rates = {way: round(tokens / t["seconds"], 1) for way, t in found.items() if t}
            self.rates[name, work["id"]] = rates
            self.ways[name, work["id"]] = max(rates, key=lambda way: rates[way], default="")
            cost = {way: cost[way] + tokens / rates[way] for way in cost.keys() & rates.keys()}
        if cost and size_of(self.works[0]["model"])["parameters"] > LARGE:  # memory is short
            best = min(cost, key=lambda way: cost[way])
            self.ways.update({(name, work["id"]): best for work in self.works})
        for key in loaded:
            if key in self.engines and key[1] not in self.ways_of(name):
                self.engines.pop(key).close()

    def chosen(self, name: str, work: dict[str, Any]) -> Engine | None:
        """The peer's engine for this workload, in the fastest way."""
        return self.engines.get((name, self.ways.get((name, work["id"]), "")))

    def attempt(self, key: tuple[str, str], work: dict[str, Any]) -> dict[str, float] | None:
        """A turn; a peer that dies is out, and the others go on."""
        if key not in self.engines:
            return None
        try:
            return turn(self.engines[key], work)
        except Failed as reason:
            self.errors[key[0]] = str(reason)
            self.engines.pop(key).kill()
            return None

    def warm_up(self) -> None:
        """Everybody runs everything once, shortened; what is compiled, at full length."""
        for work in self.works:
            for name, way in list(self.engines):
                if way == self.ways.get((name, work["id"]), ""):
                    self.attempt((name, way), work if "compiled" in way else warm(work))

    def round(self, number: int) -> None:
        """Every workload to every peer; another one begins each time."""
        first = number % len(self.names)
        for work in self.works:
            taken = []
            for name in self.names[first:] + self.names[:first]:
                engine = self.chosen(name, work)
                if engine and (found := self.attempt((name, engine.way), work)):
                    self.times.setdefault((name, work["id"]), []).append(found)
                    taken.append(f"{name} {found['seconds']:.2f}")
            say(f"    {work['id']}: {', '.join(taken)} s")

    def run_of(self, work: dict[str, Any]) -> dict[str, Any]:
        """The result of one workload."""
        peers: dict[str, Any] = {}
        ours = self.times[self.names[0], work["id"]]
        for name in self.names:
            engine, times = self.chosen(name, work), self.times.get((name, work["id"]))
            if not engine or not times:
                peers[name] = {"error": self.errors.get(name, "no numbers")}
                continue
            peers[name] = {"version": engine.version, **report.row(work, times, ours), "peak_mb": engine.peak_mb,
                           "cpu_share_idle": engine.cpu_share_idle()}  # fmt: skip
            if "ways" in PEERS[name]:
                peers[name]["way"] = engine.way
                if rates := self.rates.get((name, work["id"])):
                    peers[name]["ways"] = rates
        count = {"prompt_tokens": sum(len(r["prompt_token_ids"]) for r in work["requests"]),
                 "output_tokens": sum(r["max_tokens"] for r in work["requests"])}  # fmt: skip
        caching = {"prefix_caching": work["prefix_caching"]} if work["workload"] == "e" else {}
        kept = {k: work[k] for k in ("workload", "id", "name", "dtype", "batch")}
        return {**kept, **count, "tunables": self.tunables, **caching, "peers": peers}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.let_go()
        for engine in self.engines.values():
            engine.close()


def run_group(works: list[dict[str, Any]], names: list[str], args: argparse.Namespace, tunables: bool,
              bad: dict[str, str], ways: dict[tuple[str, str], str]) -> list[dict[str, Any]]:  # fmt: skip
    """Loads, warms up, runs the rounds, and reports."""
    start = time.time()
    group = Group(works, names, args.threads, tunables, bad, ways)
    loaded = time.time() - start
    try:
        group.warm_up()
        warmed = time.time() - start - loaded
        for number in range(args.rounds):
            group.round(number)
        say(f"engine {works[0]['engine']}: {loaded:.0f} s to load, {warmed:.0f} s to warm up, "
            f"{time.time() - start - loaded - warmed:.0f} s for {args.rounds} rounds")  # fmt: skip
        runs = [group.run_of(work) for work in works]
    finally:
        group.close()
    report.add_gains(runs)
    for run in runs:
        report.show(run, say)
    return runs


# ---- around it ----


def machine(threads: int) -> dict[str, Any]:
    """Where this was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "")
    flags = next((line.split() for line in info.splitlines() if line.startswith("flags")), [])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {"date": date.today().isoformat(), "cpu": name or platform.processor(), "cores": os.cpu_count(),
            "threads": threads, "memory_GB": round(memory), "load_average": [round(os.getloadavg()[0], 1)],
            "flags": {flag: flag in flags for flag in ("avx512f", "avx512_bf16", "amx_bf16")},
            "versions": {"python": platform.python_version(), "torch": metadata.version("torch"),
                         "transformers": metadata.version("transformers")}}  # fmt: skip


def size_of(model: str) -> dict[str, int]:
    """Parameters and bytes of a checkpoint, from the headers of its files."""
    bytes_, parameters = 0, 0
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                bytes_ += last - first
                parameters += (last - first) // {"BF16": 2, "F16": 2, "F32": 4}[entry["dtype"]]
    return {"parameters": parameters, "bytes": bytes_}


def estimate(works: list[dict[str, Any]], names: list[str], args: argparse.Namespace) -> str:
    """How long it will take, from the last run's times where there are any, else from a machine of two cores."""
    last: dict[tuple[str, str], float] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):
        runs = json.loads((BUILD / "bench.json").read_text())["runs"]
        last = {(r["id"], name): max(row["seconds"]) for r in runs for name, row in r["peers"].items()
                if "seconds" in row}  # fmt: skip
    tuned = {"off": [], "on": works, "both": [w for w in works if w["id"] in TUNED]}[args.tunables]
    plain = [] if args.tunables == "on" else works
    turns = sum(max(ENOUGH, last.get((w["id"], n), GUESS.get(w["id"], ENOUGH))) for w in plain + tuned for n in names)
    vllm = sum(name.startswith("vllm") for name in names)  # loads in four ways before it is timed, then in the best one
    loads = len({w["engine"] for w in plain}) * (8 * (len(names) - vllm) + 240 * vllm)
    loads += len({w["engine"] for w in tuned}) * (8 * (len(names) - vllm) + 40 * vllm)
    return f"about {(turns * (args.rounds + 1.5) + loads) / 60:.0f} minutes"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="abcde", help="letters: which of a, b, c, d, e")
    parser.add_argument("--peers", default=",".join(PEERS), help="which; the first one must be one of walkvllm's")
    parser.add_argument("--python", action="append", default=[], metavar="PEER=PATH", help="another Python for a peer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tunables", choices=("off", "on", "both"), default="both",
                        help="malloc settings for all; both: everything without, and some of it with")  # fmt: skip
    parser.add_argument("--small", action="store_true", help="a little of everything, to see that it goes through")
    parser.add_argument("--check-only", action="store_true", help="compare the tokens and time nothing")
    parser.add_argument("--record", action="store_true", help=f"also write {RECORD.relative_to(ROOT)}")
    parser.add_argument("--out", type=Path, default=BUILD / "bench.json")
    args = parser.parse_args()
    args.names = args.peers.split(",")
    for name in args.names:
        if name not in PEERS:
            parser.error(f"--peers: {name!r} is none of {', '.join(PEERS)}")
    if not args.names[0].startswith("walkvllm"):
        parser.error(f"--peers: the first one, {args.names[0]!r}, must be walkvllm or walkvllm-torch")
    for pair in args.python:
        name, _, path = pair.partition("=")
        if name not in PEERS or not Path(path).exists():
            parser.error(f"--python={pair!r} must be PEER=PATH with one of {', '.join(PEERS)}")
        PEERS[name]["python"] = Path(path).absolute()
    if bad := set(args.workloads) - set("abcde"):
        parser.error(f"--workloads: {''.join(sorted(bad))!r} is none of a, b, c, d, e")
    return args


def prepare(args: argparse.Namespace, works: list[dict[str, Any]]) -> dict[str, str]:
    """Makes environments and model files. Which peers are not to be had, and why."""
    missing = {}
    for name in args.names:
        try:
            python_for(name)
            if PEERS[name].get("gguf"):
                for work in works:
                    for dtype in {work["dtype"], "float32"}:
                        gguf_of(work["model"], dtype)
        except (environments.NotMade, subprocess.CalledProcessError) as reason:
            missing[name] = f"no environment: {reason}"
            say(f"  {name}: {missing[name]}")
    return missing


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that the peers are ended as well
    args = arguments()
    start = time.time()
    works = workloads(args.workloads, args.out.parent / "workloads", args.small)
    missing = prepare(args, works)
    former = RECORD.read_text() if args.record else ""
    say(f"{len(works)} workloads, {len(args.names)} peers, {args.rounds} rounds: {estimate(works, args.names, args)}")
    yardsticks = json.loads(subprocess.check_output([sys.executable, str(ROOT / "tools/bench/yardsticks.py"),
                                                     str(args.threads)]))  # fmt: skip
    say(", ".join(f"{key} {value}" for key, value in yardsticks.items()))
    result: dict[str, Any] = {"machine": {**machine(args.threads), "rounds": args.rounds}, "yardsticks": yardsticks,
                              "models": {w["engine"]: size_of(w["model"]) for w in works},
                              "agreement": [], "runs": []}  # fmt: skip
    ways: dict[tuple[str, str], str] = {}
    for kind in sorted({w["engine"] for w in works}):
        mates = [w for w in works if w["engine"] == kind]
        able = [name for name in args.names if name not in missing]
        bad = {**missing, **agreement(mates, able, args.threads, result["agreement"])}
        if args.check_only:
            continue
        if args.tunables != "on":
            result["runs"] += run_group(mates, args.names, args, False, bad, ways)
        tuned = mates if args.tunables == "on" else [w for w in mates if w["id"] in TUNED]
        if args.tunables != "off" and tuned:
            result["runs"] += run_group(tuned, args.names, args, True, bad, ways)
        result["machine"]["minutes"] = round((time.time() - start) / 60, 1)
        write(result, args, former)
    say(f"\n{(time.time() - start) / 60:.1f} minutes; written: {args.out}")


def write(result: dict[str, Any], args: argparse.Namespace, former: str) -> None:
    """Stores what is there so far, and with --record the `former` record beside it."""
    result["machine"]["load_average"][1:] = [round(os.getloadavg()[0], 1)]
    text = json.dumps(result, indent=1) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    if args.record:
        RECORD.write_text(text)
        BEFORE.write_text(former)


if __name__ == "__main__":
    main()
