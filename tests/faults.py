"""Things that go wrong at the process boundary, done for real: each is one function that says what the caller saw.

`run_fault(name, rng)` does one of FAULTS and returns a row: what, when, what was seen, after how long, what was left.
tests/test_process.py runs them; the page 04d shows their table.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import walkvllm.mp_client as mp_client
from walkvllm import EngineArgs, SamplingParams
from walkvllm.async_llm import AsyncLLM
from walkvllm.config import VllmConfig
from walkvllm.frames import Kind, pack
from walkvllm.messages import EngineCoreRequest
from walkvllm.mp_client import CoreProcess, EngineDeadError, SyncMPClient

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 40,
    "max_num_batched_tokens": 24, "attention_backend": "cpu",
}  # fmt: skip
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
ROOT = Path(__file__).resolve().parent.parent


def config() -> VllmConfig:
    return EngineArgs(**SMALL).create_engine_config()


def request(name: str, params: SamplingParams = LONG, start: int = 70) -> EngineCoreRequest:
    return EngineCoreRequest(name, list(range(start, start + 9)), params.clone(), 0.0)


@dataclass
class Row:
    """What happened in one fault."""

    what: str
    when: str
    saw: str
    seconds: float  # from the fault to the caller's knowing
    left: str


# ---- what must be gone ----

def runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z" if stat.exists() else True
    except OSError:
        return False


def left_behind(pid: int, directory: Path, ours: bool = True) -> str:
    """What there still is of an engine: its process, a zombie of it, its sockets."""
    left = ["process"] * runs(pid) + ["sockets"] * directory.exists()
    if ours:
        with suppress(ChildProcessError):
            left += ["zombie"] * (os.waitpid(pid, os.WNOHANG) != (0, 0))
    return ", ".join(left) or "nothing"


@contextmanager
def started() -> Iterator[list[CoreProcess]]:
    """The core processes that are started in the body, as soon as they run."""
    made: list[CoreProcess] = []
    original = CoreProcess.__init__

    def init(self: CoreProcess) -> None:
        original(self)
        made.append(self)

    CoreProcess.__init__ = init  # type: ignore[method-assign]
    try:
        yield made
    finally:
        CoreProcess.__init__ = original  # type: ignore[method-assign]


class Bomb:
    """Does something after a while, in a thread, and knows when it did."""

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self.at, self.act = 0.0, act
        self.timer = threading.Timer(seconds, self.explode)
        self.timer.start()

    def explode(self) -> None:
        self.at = time.perf_counter()
        self.act()

    def join(self) -> None:
        self.timer.join()


def seen(error: BaseException) -> str:
    """An error as the table shows it: its type and the cause."""
    first = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {first}"


# ---- a core that dies ----

def dies(send: signal.Signals, when: str, rng: random.Random) -> Row:
    """The core is killed while its caller does something."""
    client = SyncMPClient(config())
    pid, directory = client.child.process.pid, client.child.directory
    names = [f"r{i}" for i in range(rng.randint(1, 6))]
    if when != "idle":
        for name in names:
            client.add_request(request(name))
    try:
        bomb = Bomb(rng.uniform(0.0, 0.25), lambda: os.kill(pid, send))
        if when == "idle":
            bomb.join()
            time.sleep(rng.uniform(0.0, 0.3))
            bomb.at = time.perf_counter()
            client.add_request(request("late"))
            while True:  # the signal may need a moment to end it
                client.get_output()
        while when == "it answers questions":
            client.stats()
        while True:
            client.get_output()
            if not client.book.wire_ids:  # it was faster than the signal
                client.add_request(request("more"))
    except EngineDeadError as error:
        now = time.perf_counter()
        bomb.join()
        row = Row(f"{send.name} to the core", when, seen(error), now - bomb.at, "")
        for again in (client.get_output, client.stats, lambda: client.add_request(request("again"))):
            assert isinstance(caught(again), EngineDeadError)
    client.shutdown()
    row.left = left_behind(pid, directory)
    return row


def caught(call: Callable[[], Any]) -> BaseException | None:
    """The error that a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def dies_at_start(rng: random.Random) -> Row:
    """The core is killed before it is ready."""
    with started() as made:
        bomb = Bomb(0.0, lambda: None)

        def kill() -> None:
            nonlocal bomb
            while not made:
                time.sleep(0.001)
            pid = made[0].process.pid
            bomb = Bomb(rng.uniform(0.0, 1.5), lambda: os.kill(pid, signal.SIGKILL))

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            client = SyncMPClient(config())
            thread.join()
            bomb.join()  # it was ready before
            client.get_output()
            client.stats()
        except EngineDeadError as error:
            now = time.perf_counter()
            text = seen(error).replace(", before it was ready", "")
        thread.join()
    left = left_behind(made[0].process.pid, made[0].directory)
    return Row("SIGKILL to the core", "start-up", text, now - bomb.at, left)


def dies_before_tasks(rng: random.Random) -> Row:
    """The core is killed while several tasks wait for it."""
    engine = AsyncLLM(config())
    pid, directory = engine.engine_core.child.process.pid, engine.engine_core.child.directory
    bomb: Bomb | None = None

    async def wait(name: str) -> tuple[str, float]:
        try:
            while True:
                async for _ in engine.generate({"prompt_token_ids": list(range(70, 79))}, LONG, name):
                    pass
        except EngineDeadError as error:
            return seen(error), time.perf_counter()

    async def main() -> list[tuple[str, float]]:
        nonlocal bomb
        waiting = [asyncio.ensure_future(wait(f"r{i}")) for i in range(5)]
        await asyncio.sleep(0)
        bomb = Bomb(rng.uniform(0.0, 0.3), lambda: os.kill(pid, signal.SIGKILL))
        return await asyncio.gather(*waiting)

    results = asyncio.run(main())
    assert bomb is not None
    engine.shutdown()
    assert len({text for text, _ in results}) == 1
    seconds = max(at for _, at in results) - bomb.at
    return Row("SIGKILL to the core", "five tasks wait", results[0][0], seconds, left_behind(pid, directory))


def dies_while_closing(rng: random.Random) -> Row:
    """The core is killed while its caller shuts it down."""
    client = SyncMPClient(config())
    pid, directory = client.child.process.pid, client.child.directory
    client.add_request(request("a"))
    bomb = Bomb(rng.uniform(0.0, 0.05), lambda: runs(pid) and os.kill(pid, signal.SIGKILL))
    time.sleep(rng.uniform(0.0, 0.05))
    client.shutdown()
    now = time.perf_counter()
    bomb.join()
    return Row("SIGKILL to the core", "shutdown", "nothing", max(now - bomb.at, 0.0), left_behind(pid, directory))


def step_fails(rng: random.Random) -> Row:
    """An error in the middle of a step: a token id that the model does not have."""
    client = SyncMPClient(config())
    pid, directory = client.child.process.pid, client.child.directory
    for i in range(rng.randint(0, 4)):
        client.add_request(request(f"r{i}"))
    for _ in range(rng.randint(0, 10)):
        client.get_output()
    at = time.perf_counter()
    client.add_request(EngineCoreRequest("bad", [10**6], LONG.clone(), 0.0))
    error = None
    while error is None:
        error = caught(client.get_output)
    now = time.perf_counter()
    assert isinstance(error, EngineDeadError) and "Traceback" in str(error) and "execute_model" in str(error)
    return Row("an error in a step", "others run", seen(error), now - at, left_behind(pid, directory))


# ---- messages that are none ----

_alive: SyncMPClient | None = None  # garbage must not end an engine, so one will do


def alive() -> SyncMPClient:
    """An engine for the faults that it has to survive."""
    global _alive
    if _alive is None or _alive.child.closed:
        _alive = SyncMPClient(config())
    return _alive


def garbage(rng: random.Random) -> list[bytes]:
    """Frames that are no message, or one with a byte changed."""
    frames = [bytes(f) for f in pack(Kind.ADD, request(f"g{rng.random()}"))]
    choice = rng.randrange(6)
    if choice == 0:
        return [rng.randbytes(rng.randint(0, 40)) for _ in range(rng.randint(1, 5))]
    if choice == 1:
        return [bytes([rng.randrange(256)]), rng.randbytes(rng.randint(0, 60))]
    if choice == 2:
        return [rng.choice([b"\x00", b"\x01", b"\x03", b"\x05", b"\x20", b"\x21", b"\x22"]), b"\xc0"]
    if choice == 3:
        return [frames[0], frames[1][: rng.randrange(len(frames[1]))]]
    if choice == 4:
        return [frames[0]]
    return [b"\x22", frames[1]]


def answers_right(client: SyncMPClient, disturb: Callable[[], None]) -> float:
    """Runs requests while `disturb` is called between outputs; returns the seconds of the run."""
    at, names, tokens = time.perf_counter(), ["a", "b", "c"], dict[str, list[int]]()
    for i, name in enumerate(names):
        client.add_request(request(name, start=70 + 20 * i))
    while client.book.wire_ids:
        disturb()
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert [tokens[n] for n in names] == expected()
    client.check_blocks()
    stats = client.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return time.perf_counter() - at


_expected: list[list[int]] = []


def expected() -> list[list[int]]:
    """What an engine in this process answers."""
    if not _expected:
        from walkvllm.core_client import InprocClient

        client = InprocClient(config())
        for i in range(3):
            client.add_request(request("x", start=70 + 20 * i))
            tokens: list[int] = []
            while len(tokens) < 50:
                for output in client.get_output().outputs:
                    tokens += output.new_token_ids
            client.get_output()
            _expected.append(tokens)
    return _expected


def garbage_in(rng: random.Random) -> Row:
    """Garbage arrives at the core while it works."""
    client = alive()

    def disturb() -> None:
        if rng.random() < 0.4:
            client.child.input_socket.send_multipart([client.child.identity, *garbage(rng)])

    answers_right(client, disturb)
    return Row("garbage to the core", "it works", "the right answers, and no error", 0.0, "nothing")


def garbage_out(rng: random.Random) -> Row:
    """Garbage arrives at the caller while it waits."""
    client, zmq = alive(), mp_client.import_zmq()
    push = client.child.context.socket(zmq.PUSH)
    push.connect(f"ipc://{client.child.directory / 'output'}")

    def disturb() -> None:
        frames = garbage(rng)
        if rng.random() < 0.4 and frames[0] != b"\x22":
            push.send_multipart(frames)

    answers_right(client, disturb)
    push.close(linger=0)
    return Row("garbage to the caller", "it waits", "the right answers, and no error", 0.0, "nothing")


def interrupted_core(rng: random.Random) -> Row:
    """SIGINT for the core, as a terminal or a notebook may send it to everybody."""
    client = alive()

    def disturb() -> None:
        if rng.random() < 0.2:
            os.kill(client.child.process.pid, signal.SIGINT)

    answers_right(client, disturb)
    return Row("SIGINT to the core", "it works", "the right answers, and no error", 0.0, "nothing")


def sockets_removed(rng: random.Random) -> Row:
    """Somebody cleans up the temporary directory."""
    client = SyncMPClient(config())
    pid, directory = client.child.process.pid, client.child.directory
    for name in ("input", "output"):
        (directory / name).unlink()
    directory.rmdir()
    answers_right(client, lambda: None)
    client.shutdown()
    return Row("socket files removed", "it works", "the right answers, and no error", 0.0, left_behind(pid, directory))


# ---- a caller that dies ----

CALLER = """
import sys
from faults import SyncMPClient, config, request, started
with started() as made:
    if sys.argv[1] == "start-up":
        import threading
        def tell():
            while not made: pass
            print(made[0].process.pid, made[0].directory, flush=True)
        threading.Thread(target=tell, daemon=True).start()
    client = SyncMPClient(config())
if sys.argv[1] != "start-up":
    print(client.child.process.pid, client.child.directory, flush=True)
if sys.argv[1] == "a fork of it lives":
    import os, time
    if os.fork() == 0:
        os.close(1)
        time.sleep(8)
        os._exit(0)
n = 0
while True:
    if sys.argv[1] == "idle":
        sys.stdin.read()
    n += 1
    client.add_request(request(str(n)))
    while client.book.wire_ids:
        client.get_output()
"""


def caller_dies(when: str, rng: random.Random) -> Row:
    """The caller is killed. Its core must end by itself, and take the sockets with it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")])}
    caller = subprocess.Popen([sys.executable, "-c", CALLER, when], env=env, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert caller.stdout is not None and caller.stdin is not None
    pid, directory = caller.stdout.readline().split()
    time.sleep(rng.uniform(0.0, 1.5 if when == "start-up" else 0.3))
    at = time.perf_counter()
    caller.kill()
    caller.wait()
    while runs(int(pid)) and time.perf_counter() - at < 20:
        time.sleep(0.01)
    now = time.perf_counter()
    caller.stdout.close()
    caller.stdin.close()
    left = left_behind(int(pid), Path(directory), ours=False)
    return Row("SIGKILL to the caller", when, "(the core ends)", now - at, left)


FAULTS: dict[str, Callable[[random.Random], Row]] = {
    "killed while it is waited for": lambda rng: dies(signal.SIGKILL, "its caller waits", rng),
    "killed while it answers": lambda rng: dies(signal.SIGKILL, "it answers questions", rng),
    "killed while idle": lambda rng: dies(signal.SIGKILL, "idle", rng),
    "killed at start": dies_at_start,
    "killed before tasks": dies_before_tasks,
    "killed while closing": dies_while_closing,
    "terminated": lambda rng: dies(signal.SIGTERM, "its caller waits", rng),
    "crashed": lambda rng: dies(signal.SIGSEGV, "its caller waits", rng),
    "step fails": step_fails,
    "garbage in": garbage_in,
    "garbage out": garbage_out,
    "interrupted": interrupted_core,
    "sockets removed": sockets_removed,
    "caller killed at start": lambda rng: caller_dies("start-up", rng),
    "caller killed while waiting": lambda rng: caller_dies("it waits", rng),
    "caller killed while idle": lambda rng: caller_dies("idle", rng),
    "caller killed, its fork not": lambda rng: caller_dies("a fork of it lives", rng),
}
LIMITS = {"SIGKILL to the caller": 5.0}  # seconds; 2 for everything else


def run_fault(name: str, rng: random.Random) -> Row:
    """Does one fault, and checks what must hold for each."""
    row = FAULTS[name](rng)
    assert row.left == "nothing", row
    assert row.seconds <= LIMITS.get(row.what, 2.0), row
    return row


def close_all() -> None:
    """Ends the engine that survived the garbage."""
    if _alive is not None:
        _alive.shutdown()


def table(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows, put together by what and when."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.what, row.when), []).append(row)
    return [
        {
            "what": what, "when": when, "times": len(group),
            "the caller saw": " / ".join(dict.fromkeys(r.saw for r in group)),
            "after at most": f"{max(r.seconds for r in group):.2f} s" if any(r.seconds for r in group) else "–",
            "left behind": ", ".join(dict.fromkeys(r.left for r in group)),
        }
        for (what, when), group in groups.items()
    ]  # fmt: skip
