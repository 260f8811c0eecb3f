"""Measures everything but the model, where a step's time goes, and the start, for page 19: walkvllm/data/overhead.json.

    make bench-overhead
    python tools/bench_overhead.py [--only share,growth,trace,start] [--steps N] [--out FILE]

share: a step of SmolLM2-135M in bfloat16 with 16 requests. growth: the same engine with a model that answers at once
with random logits, so that 1,024 requests and contexts of 8,192 tokens cost nothing but what is to be measured. trace:
recorded steps of (a), (b), (c) and (e). start: imports and the first token of a fresh process. The clock of the first
two is the processor time of the thread, which a busy machine disturbs little; trace and start want a quiet one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tools" / "bench")]
os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))  # read once, when torch is loaded; torch may use fewer

import torch
import walkvllm.kernels.decoder as decoder
from bench_boundary import machine
from workloads import EMBEDDED, SHAPES, SMOL, write_model

import walkvllm.compiled_model as compiled
import walkvllm.model_runner as runner_module
from walkvllm import EngineArgs, LLMEngine, RequestOutputKind, SamplingParams, record
from walkvllm.spec import read_spec

DATA = ROOT / "walkvllm" / "data" / "overhead.json"
OUTSIDE = ("schedule", "states", "flatten", "sample", "update", "messages", "output", "rest")  # all but the model
WARM_UP = 10


# ---- a clock with a hand for each part ----

class Clock:
    """Time by part: a part's time is what passes in it, less what passes in the parts that it calls."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.taken, self.inner, self.undo = now, dict[str, float](), [0.0], list[Callable[[], None]]()

    def timed(self, owner: Any, name: str, part: str) -> None:
        """From now on counts the calls of `owner.name` as `part`."""
        inside, work = name in vars(owner), getattr(owner, name)

        @functools.wraps(work)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            self.inner.append(0.0)
            try:
                return work(*args, **kwargs)
            finally:
                passed = self.now() - began
                self.taken[part] = self.taken.get(part, 0.0) + passed - self.inner.pop()
                self.inner[-1] += passed

        setattr(owner, name, timed)
        self.undo.append(lambda: setattr(owner, name, work) if inside else delattr(owner, name))

    def take(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        taken, self.taken = self.taken, {}
        return taken

    def stop(self) -> None:
        """Takes the hands off again."""
        while self.undo:
            self.undo.pop()()


def watch_engine(clock: Clock, engine: LLMEngine) -> None:
    """A hand for each part of a step."""
    core, runner = engine.engine_core.engine_core, engine.engine_core.engine_core.model_runner
    for owner, name, part in (
        (engine, "step", "rest"), (engine.engine_core, "get_output", "messages"), (core, "step", "rest"),
        (core.scheduler, "schedule", "schedule"), (runner, "execute_model", "states"),
        (runner_module, "flatten", "flatten"), (runner.model, "forward", "model"),
        (runner.model, "compute_logits", "logits"), (runner, "sample_tokens", "sample"),
        (core.scheduler, "update_from_output", "update"), (engine.output_processor, "process_outputs", "output"),
    ):  # fmt: skip
        clock.timed(owner, name, part)


def watch_model(clock: Clock, engine: LLMEngine) -> None:
    """A hand for each kernel of the compiled decoder, in so far as Python calls them one by one."""
    for owner, name, part in (
        (compiled, "add_rms_norm", "norms"), (compiled, "silu_and_mul", "activation"),
        (compiled, "rope_and_write", "rope and write"), (decoder.PackedLinear, "__call__", "products"),
        (decoder.OneDnnLinear, "__call__", "products"),
        (engine.engine_core.engine_core.model_runner.backend, "read", "attention"),
    ):  # fmt: skip
        if hasattr(owner, name):  # else its time is its caller's
            clock.timed(owner, name, part)


# ---- engines ----

class RandomLogits:
    """Stands where the model would be: knows no weights and no cache, and answers at once."""

    def __init__(self, spec: Any, weights: object, rows: int, words: list[int]) -> None:
        self.spec, self.calls = spec, 0
        self.table = torch.full((rows + 61, spec.vocab_size), -1e9)
        generator = torch.Generator().manual_seed(0)
        self.table[:, words] = torch.randn(len(self.table), len(words), generator=generator)

    def forward(self, input_ids: torch.Tensor, *rest: object) -> torch.Tensor:
        return torch.zeros(1, 1).expand(len(input_ids), 1)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 7
        return self.table[self.calls % 61 :][: len(hidden)]


@contextmanager
def longer_model() -> Iterator[Path]:
    """The embedded model's files, its config.json for longer texts. There are no weights."""
    with tempfile.TemporaryDirectory() as name:
        for file in EMBEDDED.glob("*"):
            if file.suffix != ".safetensors":
                (Path(name) / file.name).write_bytes(file.read_bytes())
        config = json.loads((EMBEDDED / "config.json").read_text())
        (Path(name) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 15}))
        yield Path(name)


def plain_words() -> list[int]:
    """The token ids that are text, so that random answers are decoded as text is."""
    from walkvllm.show import token_text

    return [i for i in range(2, 2048) if "�" not in token_text(i)]


@dataclass(frozen=True)
class Load:
    """What runs: so many requests with so many tokens behind them."""

    running: int
    waiting: int = 0  # in the queue, never to be served
    context: int = 128
    blocks: int = 0  # in the pool; 0: as many as are needed
    shared: int = 0  # tokens at the start of every prompt that are the same, and cached

    def needed(self, steps: int) -> int:
        return 2 + self.running * (2 + (self.context + steps) // 16)


def args_for(load: Load, steps: int) -> dict[str, Any]:
    return {
        "max_model_len": load.context + steps, "max_num_seqs": load.running, "max_num_batched_tokens": 1 << 15,
        "num_gpu_blocks_override": max(load.blocks, load.needed(steps)),
    }  # fmt: skip


def begin(engine: LLMEngine, load: Load, steps: int, vocab: int) -> None:
    """Queues the requests and steps until all of `load.running` decode."""
    params = SamplingParams(
        temperature=0.0, max_tokens=steps, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    for i in range(load.running + load.waiting):
        length = max(load.context - i % 16, 1)  # so that not all need their next block in the same step
        prompt = [(7 * i + 31 * j + i * j) % (vocab - 5) + 5 for j in range(length)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    while len(engine.step()) < load.running:
        pass
    for _ in range(WARM_UP):
        engine.step()


def stub_engine(load: Load, steps: int, model: Path, words: list[int]) -> LLMEngine:
    """The engine with RandomLogits in it."""
    stand_ins: dict[str, Any] = {
        "CausalLM": functools.partial(RandomLogits, rows=load.running, words=words),
        "load_weights": lambda *args: {}, "allocate_kv_cache": lambda *args: [],
    }  # fmt: skip
    args = EngineArgs(str(model), dtype="float32", attention_backend="torch", **args_for(load, steps))
    with patch.multiple(runner_module, **stand_ins):
        return LLMEngine.from_engine_args(args, multiprocess=False)


# ---- share and growth ----

def by_part(clock: Clock, step: Callable[[], object], steps: int) -> dict[str, float]:
    """The median microseconds of each part, and of their sum; its mean too, which garbage collections count in."""
    rows = []
    for _ in range(steps):
        step()
        rows.append(clock.take())
    parts = {part: statistics.median(row.get(part, 0.0) for row in rows) * 1e6 for part in {p for r in rows for p in r}}
    outside = [sum(row.get(part, 0.0) for part in OUTSIDE) * 1e6 for row in rows]
    parts |= {"outside": statistics.median(outside), "outside, mean": statistics.fmean(outside)}
    parts["step"] = statistics.median(sum(row.values()) * 1e6 for row in rows)
    return {part: round(us, 2) for part, us in sorted(parts.items())}


def growth_row(load: Load, steps: int, model: Path, words: list[int]) -> dict[str, float]:
    """Microseconds of a step by part, everything but the model."""
    longest = steps + 2 * WARM_UP + 30 + load.context // 8
    engine = stub_engine(load, longest, model, words)
    begin(engine, load, longest, 2048)
    clock = Clock(time.thread_time)
    watch_engine(clock, engine)
    row = by_part(clock, engine.step, steps)
    engine.shutdown()
    return {part: us for part, us in row.items() if part not in ("model", "logits", "step")}


GROWTH: dict[str, tuple[str, list[Load]]] = {  # what varies, by which of a load's numbers
    "running requests": ("running", [Load(n) for n in (1, 4, 16, 64, 256, 1024)]),
    "waiting requests": ("waiting", [Load(64, waiting=n) for n in (0, 16, 256, 1024, 4096)]),
    "tokens of context": ("context", [Load(64, context=n) for n in (128, 512, 2048, 8192)]),
    "context of 1,024 requests": ("context", [Load(1024, context=n) for n in (128, 1024, 8192)]),
    "blocks in the pool": ("blocks", [Load(64, blocks=n) for n in (1000, 10_000, 100_000)]),
}


def growth(steps: int) -> list[dict[str, Any]]:
    """A row for each load: what varies, and microseconds by part."""
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    with longer_model() as model:
        words = plain_words()
        for what, (varying, loads) in GROWTH.items():
            for load in loads:
                taken = growth_row(load, max(steps // 4, 20) if load.running > 256 else steps, model, words)
                each = round(taken["outside"] / load.running, 3)
                head = {"what": what, "size": getattr(load, varying), "running": load.running}
                rows.append(head | {"per token": each} | taken)
                print(rows[-1], flush=True)
    return rows


def smol_model() -> Path:
    """SmolLM2-135M, or a model of its shape."""
    return SMOL if SMOL.exists() else write_model("smollm2-shape")


def real_engine(model: Path, dtype: str, load: Load, steps: int) -> LLMEngine:
    tokenizer = model if (model / "tokenizer.json").exists() else EMBEDDED  # random weights have none
    args = EngineArgs(
        str(model), str(tokenizer), dtype=dtype, enable_prefix_caching=load.shared > 0, **args_for(load, steps)
    )
    return LLMEngine.from_engine_args(args, multiprocess=False)


def share(steps: int, most_threads: int) -> list[dict[str, Any]]:
    """Microseconds of a decode step by part, in workload (b) with 16 requests: on one thread, and on all of them."""
    rows, load = [], Load(16, context=64)
    for threads in sorted({1, most_threads}):
        torch.set_num_threads(threads)
        engine = real_engine(smol_model(), "bfloat16", load, steps + 40)
        begin(engine, load, steps + 40, 49152)
        # On one thread its processor time is the step's time. On several the others' time must be waited for.
        clock = Clock(time.thread_time if threads == 1 else time.perf_counter)
        watch_engine(clock, engine)
        row = by_part(clock, engine.step, steps)
        clock.stop()
        engine.shutdown()
        rows.append({"threads": threads, "clock": "processor" if threads == 1 else "wall"} | row)
        print(rows[-1], f"{row['outside'] / row['step']:.2%}", flush=True)
    return rows


# ---- a recorded step ----

@dataclass
class Recorded:
    """Steps of one workload: the recording's events, and what the model did in each step."""

    parts: list[dict[str, float]] = field(default_factory=list)
    spans: list[list[tuple[str, float]]] = field(default_factory=list)  # (stop, seconds), in order


LAYERS = ("norms", "products", "rope and write", "attention", "activation", "rest of the model")
STOPS = ("scheduled", "executed", "sampled", "updated", "outputs encoded", "outputs decoded", "text out")


def record_steps(engine: LLMEngine, steps: int) -> Recorded:
    """Records steps as page 16e does, and beside it counts the kernels' time."""
    found, clock = Recorded(), Clock(time.perf_counter)
    core, model = engine.engine_core.engine_core, engine.engine_core.engine_core.model_runner.model
    clock.timed(core.model_runner, "execute_model", "states")
    clock.timed(runner_module, "flatten", "flatten")
    clock.timed(model, "forward", "rest of the model")
    watch_model(clock, engine)
    clock.timed(model, "compute_logits", "logits")
    recording = record(engine)
    with recording as run:
        for _ in range(steps):
            engine.step()
            found.parts.append(clock.take())
    clock.stop()
    for number in range(1, steps + 1):
        events = [e for e in run.events if e.step == number and e.stop in STOPS]
        found.spans.append([(e.stop, e.ended - e.began) for e in events])
    return found


def picked(found: Recorded, pieces: Recorded, steps: slice) -> dict[str, Any]:
    """The step of median length: milliseconds by stop, and by part of `executed`.

    If all layers are one call, its time is split as that of the same step's layers in pieces.
    """
    totals = [sum(seconds for _, seconds in spans) for spans in found.spans[steps]]
    number = (steps.start or 0) + totals.index(sorted(totals)[len(totals) // 2])
    inside, rows = dict(found.parts[number]), pieces.parts[steps]
    if pieces is not found:
        parts = {part: statistics.median(row.get(part, 0.0) for row in rows) for part in LAYERS}
        parts["products"] = max(parts["products"] - inside["products"], 0.0)  # less the head, a call of its own
        whole = inside.pop("rest of the model") / sum(parts.values())
        inside |= {part: inside.get(part, 0.0) + whole * seconds for part, seconds in parts.items()}
    milli = [[stop, round(seconds * 1e3, 4)] for stop, seconds in found.spans[number]]
    return {"step": number + 1, "in one call": pieces is not found, "stops": milli,
            "executed": {part: round(seconds * 1e3, 4) for part, seconds in inside.items()}}  # fmt: skip


def recorded(engine: LLMEngine, load: Load, steps: int, run: int = 0) -> Recorded:
    """The steps of a new batch of requests, from their prompts on. Another `run` has other prompts after the prefix."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(load.running):
        first = [5 + 3 * j % 2000 for j in range(load.shared)]
        prompt = first + [5 + (i + 100 * run + 3 * j) % 2000 for j in range(load.context - load.shared)]
        engine.add_request(f"r{i}", {"prompt_token_ids": prompt}, params)
    found = record_steps(engine, steps)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def traced() -> tuple[tuple[str, Path, str, Load], ...]:
    """The workloads whose steps are recorded: the letter, the model, the precision, and what runs."""
    return (
        *(("a", EMBEDDED, "float32", Load(n, context=32)) for n in (1, 16, 64)),
        ("b", smol_model(), "bfloat16", Load(16, context=64)),
        ("c", write_model("qwen3-0.6b-shape"), "bfloat16", Load(1, context=128)),
        ("e", EMBEDDED, "float32", Load(64, context=544, shared=512)),
    )  # fmt: skip


def trace(steps: int, threads: int) -> list[dict[str, Any]]:
    """A prefill step and a median decode step of some workloads."""
    rows, steps = [], min(steps, 100)
    torch.set_num_threads(threads)
    for name, path, dtype, load in traced():
        engine = real_engine(path, dtype, load, steps + 60)
        model: Any = engine.engine_core.engine_core.model_runner.model
        recorded(engine, load, 5)  # the first run is not like the others
        found = pieces = recorded(engine, load, steps, run=1)
        if getattr(model, "in_one_call", False):
            model.in_one_call = False
            pieces = recorded(engine, load, WARM_UP + steps // 4, run=2)
        engine.shutdown()
        head = {"workload": name, "batch": load.running, "threads": threads}
        prompts = {"kind": "prefill", "tokens": load.running * (load.context - load.shared)}
        rows.append(head | prompts | picked(found, pieces, slice(0, 1)))
        rows.append(head | {"kind": "decode", "tokens": load.running} | picked(found, pieces, slice(WARM_UP, None)))
        print(*rows[-2:], sep="\n", flush=True)
    return rows


# ---- the start ----

IMPORT = "import time; a = time.perf_counter(); import walkvllm; print(time.perf_counter() - a)"
IMPORT_LLM = (
    "import time, torch; a = time.perf_counter(); from walkvllm import LLM, SamplingParams; "
    "import walkvllm.engine_core; print(time.perf_counter() - a)"
)
FIRST_TOKEN = (
    "import time; from walkvllm import LLM, SamplingParams\n"
    "if __name__ == '__main__':\n"
    "    llm = LLM({options}); "
    "llm.generate('One day', SamplingParams(max_tokens=1), use_tqdm=False); print(time.time())\n"
)


def start(rounds: int) -> dict[str, Any]:
    """Seconds of a fresh process, the best of some: imports, and until the embedded model's first token is there."""
    def run(code: str, cache: str) -> float:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(code)
            script.flush()
            env = os.environ | {"XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)}
            began = time.time()
            said = subprocess.run([sys.executable, script.name], env=env, capture_output=True, text=True)
            if said.returncode:
                raise SystemExit(said.stderr)
            value = float(said.stdout.split()[-1])
            return value - began if value > 1e9 else value

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as warm:
        for name, code in (
            ("import walkvllm", IMPORT), ("import torch", IMPORT.replace("walkvllm", "torch")),
            ("import the engine after torch", IMPORT_LLM),
        ):  # fmt: skip
            result[name] = round(min(run(code, warm) for _ in range(rounds)), 3)
        for where, options in (("one process", "multiprocess=False"), ("two processes", "")):
            code, cold = FIRST_TOKEN.format(options=options), []
            for _ in range(rounds):
                with tempfile.TemporaryDirectory() as empty:
                    cold.append(run(code, empty))
            run(code, warm)
            result[f"first token, {where}, to be compiled"] = round(min(cold), 2)
            result[f"first token, {where}"] = round(min(run(code, warm) for _ in range(rounds)), 2)
    for name, seconds in result.items():
        print(f"{seconds:8.3f} s  {name}", flush=True)
    return result


# ---- the models ----

def sizes() -> dict[str, dict[str, int]]:
    """What one token costs in each workload's model: numbers in the matrices of its layers and of its head, numbers
    written into the KV cache, and multiplications of its attention for each token that it looks at. And which of
    these the last layer spends on a token that nobody asks about: page 09 leaves them out."""
    kinds = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    configs = {"a": json.loads((EMBEDDED / "config.json").read_text()), "b": SHAPES["smollm2-shape"],
               "c": SHAPES["qwen3-0.6b-shape"]}  # fmt: skip
    found = {}
    for name, config in configs.items():
        s = read_spec({"architectures": [kinds[config["model_type"]]], **config})
        behind = s.hidden_size * (s.q_size + 3 * s.intermediate_size)  # behind attention
        layer = s.hidden_size * (s.q_size + 2 * s.kv_size) + behind
        found[name] = {"layers": s.num_layers * layer, "head": s.vocab_size * s.hidden_size,
                       "kv": 2 * s.num_layers * s.kv_size, "attention": 2 * s.num_layers * s.q_size,
                       "last layer": behind, "last attention": 2 * s.q_size}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="models,share,growth,trace,start", help="the rest stays as it is")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="the most, for share and trace")
    parser.add_argument("--rounds", type=int, default=3, help="of the start")
    parser.add_argument("--out", type=Path, default=DATA)
    args = parser.parse_args()
    assert args.steps > WARM_UP, f"--steps {args.steps} must be more than {WARM_UP}"
    content: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    work: dict[str, Callable[[], Any]] = {
        "models": sizes, "share": lambda: share(args.steps, args.threads), "growth": lambda: growth(args.steps),
        "trace": lambda: trace(args.steps, args.threads), "start": lambda: start(args.rounds),
    }  # fmt: skip
    for name in args.only.split(","):
        content[name] = work[name]()
        content |= {"machine": machine().replace(", 1 thread", f", torch {torch.__version__}")}
        content |= {"date": date.today().isoformat()}
    args.out.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
