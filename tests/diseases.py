"""Runs of the real engine that are slow for one reason each: the diseases of page 17, produced on purpose.

`Ward().produce(name, mode, rng)` makes one, under noise, and returns what was recorded. tests/test_latency.py tells
them apart, and tools/record_latency.py keeps some for the page.
"""

from __future__ import annotations

import asyncio
import hashlib
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from walkvllm import LLM, EngineArgs, SamplingParams
from walkvllm.async_llm import AsyncLLM
from walkvllm.blame import BLOCKS, BUDGET, COMPUTE, CONSUME, HEAD, IDLE, SEQS, STALL, SUBMIT, THRASH
from walkvllm.events import Run
from walkvllm.sampling_params import RequestOutputKind
from walkvllm.trace import record

IN_PROCESS, CHILD, ASYNC = "in-process", "child", "AsyncLLM"
MODES = (IN_PROCESS, CHILD, ASYNC)
ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "block_size": 8, "num_gpu_blocks_override": 512,
    "max_num_batched_tokens": 512, "max_num_seqs": 32, "attention_backend": "cpu", "enable_prefix_caching": False,
}  # fmt: skip


@dataclass
class Ask:
    """One request: how long prompt and answer are, and when it comes."""

    tokens: int
    answer: int
    after: int = 0  # when the caller has had so many messages from the core
    pause: float = 0.0  # when nobody is there, and so many seconds later


Asks = Callable[[random.Random], list[Ask]]


@dataclass
class Case:
    """A disease: how the engine is set, what is asked, and how slow the caller is."""

    engine: dict[str, Any]
    asks: Asks
    read: float = 0.0  # seconds that the tokenizer takes for a prompt
    take: float = 0.0  # seconds that the caller spends on the outputs of a step


def many(number: int, tokens: tuple[int, int], answer: tuple[int, int]) -> Asks:
    """So many requests at once, of sizes between these."""
    return lambda rng: [Ask(rng.randint(*tokens), rng.randint(*answer)) for _ in range(number)]


def talk_and_read(rng: random.Random) -> list[Ask]:
    """Some that decode, and long prompts that come in between."""
    talkers = [Ask(rng.randint(6, 12), 160) for _ in range(4)]
    return talkers + [Ask(rng.randint(400, 480), 1, after=3 + 2 * i) for i in range(9)]


def large_and_small(rng: random.Random) -> list[Ask]:
    """One that holds most of the pool, a large one that does not fit beside it, and small ones behind."""
    return [Ask(200, 80), Ask(300, 2), *(Ask(rng.randint(6, 14), 4) for _ in range(10))]


def outgrow(rng: random.Random) -> list[Ask]:
    """Some that grow over the whole pool, and others that were let in beside them and are thrown out."""
    return [Ask(6, 60) for _ in range(2)] + [Ask(rng.randint(4, 6), rng.randint(24, 28)) for _ in range(11)]


def seldom(rng: random.Random) -> list[Ask]:
    return [Ask(rng.randint(6, 12), 3, pause=0.1 + 0.05 * rng.random()) for _ in range(3)]


CASES: dict[str, Case] = {
    COMPUTE: Case({}, many(12, (20, 60), (30, 40))),
    BUDGET: Case({"max_num_batched_tokens": 4}, many(20, (8, 12), (16, 20))),
    SEQS: Case({"max_num_seqs": 2}, many(18, (100, 140), (3, 4))),
    BLOCKS: Case({"num_gpu_blocks_override": 29, "max_model_len": 128}, many(16, (90, 96), (6, 8))),
    THRASH: Case({"num_gpu_blocks_override": 18, "max_model_len": 128}, outgrow),
    HEAD: Case({"num_gpu_blocks_override": 49, "max_model_len": 376}, large_and_small),
    STALL: Case({}, talk_and_read),
    CONSUME: Case({}, many(4, (10, 20), (8, 10)), take=0.045),
    SUBMIT: Case({}, many(7, (10, 20), (2, 3)), read=0.065),
    IDLE: Case({}, seldom),
}  # fmt: skip


def produce_in(mode: str) -> list[str]:
    """The diseases that a way of calling can have, as far as they are produced here."""
    return [COMPUTE, STALL, CONSUME, SUBMIT, IDLE] if mode == ASYNC else list(CASES)


# ---- noise ----

BURN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@contextmanager
def noise(rng: random.Random) -> Iterator[Callable[[], None]]:
    """A busy process, a busy thread or neither, beside the block; and a function that sometimes sleeps a little."""
    kind, done = rng.choice(("nothing", "process", "thread")), threading.Event()
    process = subprocess.Popen([sys.executable, "-c", BURN]) if kind == "process" else None

    def burn() -> None:
        data = bytes(1 << 18)
        while not done.is_set():
            hashlib.sha256(data)  # without the interpreter's lock, as a tokenizer or a kernel would

    thread = threading.Thread(target=burn, daemon=True)
    if kind == "thread":
        thread.start()
    try:
        yield lambda: time.sleep(0.002 * rng.random()) if rng.random() < 0.05 else None
    finally:
        done.set()
        if process is not None:
            process.kill()
            process.wait()
        if kind == "thread":
            thread.join()


# ---- callers ----

def params(ask: Ask) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=ask.answer, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


def prompt(ask: Ask, rng: random.Random, case: Case) -> Any:
    """A text for the tokenizer where it is what is slow, and otherwise ids, whose number is known."""
    return "fox " * (ask.tokens // 2) if case.read else [rng.randrange(70, 1900) for _ in range(ask.tokens)]


@contextmanager
def slow_tokenizer(engine: Any, seconds: float) -> Iterator[None]:
    """The tokenizer takes so much longer for each text."""
    tokenizer = engine.input_processor.tokenizer
    encode = tokenizer.encode

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return encode(*args, **kwargs)

    if seconds:
        tokenizer.encode = slow
    try:
        yield
    finally:
        vars(tokenizer).pop("encode", None)


@contextmanager
def reader(seconds: float) -> Iterator[Callable[[Any], None]]:
    """A thread that needs so long for each step's outputs, and takes the next when it is done with the last."""
    handed: queue.Queue[Any] = queue.Queue(maxsize=1)

    def read() -> None:
        while handed.get() is not None:
            time.sleep(seconds)

    thread = threading.Thread(target=read, daemon=True)
    if seconds:
        thread.start()
    yield handed.put if seconds else lambda outputs: None
    if seconds:
        handed.put(None)
        thread.join()


def call(llm: LLM, case: Case, rng: random.Random, rest: Callable[[], None]) -> None:
    """A caller who submits and steps in one loop, and hands the outputs to a reader."""
    engine, todo, messages = llm.llm_engine, list(enumerate(case.asks(rng))), 0
    with reader(case.take) as hand:
        while todo or engine.has_unfinished_requests():
            while todo and (todo[0][1].after <= messages or not engine.has_unfinished_requests()):
                if todo[0][1].pause and engine.has_unfinished_requests():
                    break
                number, ask = todo.pop(0)
                time.sleep(ask.pause) if ask.pause else rest()
                engine.add_request(f"r{number}", prompt(ask, rng, case), params(ask))
            if outputs := engine.step():
                messages += 1
                hand(outputs)
            rest()


async def call_async(llm: AsyncLLM, case: Case, rng: random.Random, rest: Callable[[], None]) -> None:
    """A task for each request; what a task does with an output keeps the event loop from everybody else."""
    tokens, asks = [0], case.asks(rng)  # tokens: of the first request; several may come together

    async def one(number: int, ask: Ask) -> None:
        while tokens[0] < min(ask.after, asks[0].answer):
            await asyncio.sleep(0.001)
        async for output in llm.generate(prompt(ask, rng, case), params(ask), f"r{number}"):
            if number == 0:
                tokens[0] += len(output.outputs[0].token_ids)
            if case.take:
                time.sleep(case.take)
            rest()

    if asks[0].pause:
        for number, ask in enumerate(asks):
            await asyncio.sleep(ask.pause)
            await one(number, ask)
    else:
        await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks)))


class Ward:
    """Engines, each made when it is first needed. `close` ends them."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.loop = asyncio.new_event_loop()

    def engine(self, case: Case, mode: str) -> Any:
        key = f"{mode} {case.engine}"
        if key not in self.engines:
            settings = ENGINE | case.engine
            if mode == ASYNC:
                self.engines[key] = AsyncLLM.from_engine_args(EngineArgs(**settings))
            else:
                self.engines[key] = LLM(multiprocess=mode == CHILD, **settings)
            self.run(self.engines[key], Case({}, many(1, (9, 9), (3, 3))), random.Random(0), lambda: None)  # warm it up
        return self.engines[key]

    def produce(self, name: str, mode: str, rng: random.Random, noisy: bool = True) -> Run:
        """One run with this disease."""
        return self.produce_case(CASES[name], mode, rng, noisy)

    def produce_case(self, case: Case, mode: str, rng: random.Random | None = None, noisy: bool = False) -> Run:
        """One run of a case; without noise if not told."""
        rng = rng or random.Random(0)
        llm = self.engine(case, mode)
        with slow_tokenizer(getattr(llm, "llm_engine", llm), case.read):
            if not noisy:
                return self.run(llm, case, rng, lambda: None)
            with noise(rng) as rest:
                return self.run(llm, case, rng, rest)

    def run(self, llm: Any, case: Case, rng: random.Random, rest: Callable[[], None]) -> Run:
        if isinstance(llm, AsyncLLM):
            return self.loop.run_until_complete(recorded(llm, case, rng, rest))
        with record(llm) as run:
            call(llm, case, rng, rest)
        return run

    def close(self) -> None:
        for engine in self.engines.values():
            engine.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


async def recorded(llm: AsyncLLM, case: Case, rng: random.Random, rest: Callable[[], None]) -> Run:
    async with record(llm) as run:
        await call_async(llm, case, rng, rest)
    return run
