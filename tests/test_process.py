"""The engine core in a process of its own: it answers as in this process, whatever happens to either of the two."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import faults
import pytest
from clients import CLIENTS, Engine
from faults import FAULTS, LONG, SMALL, config, left_behind, request, run_fault, runs

from walkvllm import LLM, EngineArgs, EngineDeadError, LLMEngine, SamplingParams, mp_client
from walkvllm.async_llm import AsyncLLM
from walkvllm.frames import BadFrame, Kind, UtilityCall, pack
from walkvllm.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from walkvllm.mp_client import MPClient, OpenRequests, SyncMPClient, import_zmq, socket_directory
from walkvllm.sampling_params import RequestOutputKind

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Any] = [list(range(70, 92)), "Once a fox", "Count from three to eleven.", {"prompt": "Why?"}]
ROOT = faults.ROOT


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    """One engine in its own process for all tests that leave it as they found it."""
    llm = LLM(**SMALL, multiprocess=True)
    yield llm
    pid, directory = child(llm).process.pid, child(llm).directory
    llm.shutdown()
    assert left_behind(pid, directory) == "nothing"


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert not shared.llm_engine.has_unfinished_requests()
    stats = shared.llm_engine.engine_core.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    works(shared)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "walkvllm")


def child(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.child


_answers: list[list[int]] = []


def answers() -> list[list[int]]:
    """What an engine in this process answers to PROMPTS."""
    if not _answers:
        with LLM(**SMALL, multiprocess=False) as here:
            _answers.extend(o.outputs[0].token_ids for o in here.generate(PROMPTS, GREEDY, use_tqdm=False))
    return _answers


def works(llm: LLM) -> None:
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == answers()
    llm.check_blocks()


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")])
    return os.environ | {"PYTHONPATH": path} | more


# ---- it is there ----

def test_the_core_is_elsewhere_and_answers(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    assert client.child.process.pid != os.getpid() and not hasattr(client, "engine_core")
    assert (client.ready.num_gpu_blocks, client.ready.max_model_len) == (40, 64)
    assert client.child.directory.stat().st_mode & 0o777 == 0o700
    assert os.getsid(client.child.process.pid) != os.getsid(0)
    assert client.clock.low <= client.clock.high < client.clock.low + 1
    if sys.platform == "linux":
        assert client.clock.low <= 0 <= client.clock.high  # one clock for all processes
    works(llm)


SCRIPT = """
from walkvllm import LLM, SamplingParams
import sys
llm = LLM(**{settings}, multiprocess=True)
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
(answer,) = llm.generate([list(range(70, 92))], greedy, use_tqdm=False)
child = llm.llm_engine.engine_core.child
print(answer.outputs[0].token_ids, child.process.pid, child.directory, sep="|")
"""


def test_started_from_anywhere(tmp_path: Path) -> None:
    """From a file without a guard, `python -c`, standard input, a thread; not shut down, and nothing is left."""
    code = SCRIPT.format(settings=SMALL)
    here = tmp_path / "scripts"
    here.mkdir()
    (here / "script.py").write_text(code)
    closed = "import os, sys\nos.close(2)\nos.execv(sys.executable, [sys.executable, '-c', " + repr(code) + "])"
    threaded = "import threading\ndef work():\n" + "".join(f"  {line}\n" for line in code.splitlines())
    threaded += "t = threading.Thread(target=work); t.start(); t.join()\n"
    poisoned = tmp_path / "poisoned"
    poisoned.mkdir()
    for name in ("torch", "random", "zmq", "msgspec", "walkvllm"):
        (poisoned / f"{name}.py").write_text("raise SystemExit('imported from the current directory')")
    ways: list[tuple[list[str], str | None, Path]] = [
        ([str(here / "script.py")], None, poisoned),
        (["-c", code], None, here),
        (["-"], code, here),
        (["-"], threaded, here),
        (["-c", closed], None, here),  # without standard error
    ]
    jobs = []
    for arguments, text, folder in ways:
        job = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment(), text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert job.stdin is not None
        job.stdin.write(text or "")
        job.stdin.close()
        jobs.append(job)
    for job in jobs:
        assert job.stdout is not None
        said = job.stdout.read()
        job.stdout.close()
        assert job.wait(60) == 0, said
        token_ids, pid, directory = said.split("|")
        assert json.loads(token_ids) == answers()[0]
        assert left_behind(int(pid), Path(directory.strip()), ours=False) == "nothing"


NOTEBOOK = """
from walkvllm import LLM, SamplingParams
llm = LLM(**{settings}, multiprocess=True)
child = llm.llm_engine.engine_core.child
print(child.process.pid, child.directory, sep="|", end="")
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_threads_of_the_core_do_not_spin_for_long(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless somebody has said how they are to wait."""
    environment = Path(f"/proc/{child(llm).process.pid}/environ").read_bytes().split(b"\0")
    own = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
    assert own or f"GOMP_SPINCOUNT={mp_client.SPINS}".encode() in environment
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert "GOMP_SPINCOUNT" not in mp_client.child_environment()
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert mp_client.child_environment()["GOMP_SPINCOUNT"] == "7"


def test_in_a_notebook() -> None:
    """In a Jupyter kernel: it starts, the stop button leaves it usable, and it ends with a kernel that is killed."""
    manager = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    kernel, client = manager.manager.start_new_kernel(env=environment(), kernel_name="python3")

    def run(code: str, interrupt_after: float = 0.0) -> tuple[str, str]:
        printed = ""

        def hook(message: dict[str, Any]) -> None:
            nonlocal printed
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed += message["content"]["text"]

        if interrupt_after:
            threading.Timer(interrupt_after, kernel.interrupt_kernel).start()
        reply = client.execute_interactive(code, timeout=120, output_hook=hook, allow_stdin=False)
        return printed, reply["content"].get("ename", "")

    try:
        said, error = run(NOTEBOOK.format(settings=SMALL))
        assert not error
        pid, directory = said.split("|")
        run("params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)")
        generate = f"llm.generate({PROMPTS!r}, params, use_tqdm=False)"
        for _ in range(2):
            assert run(f"while True: {generate}", interrupt_after=0.3) == ("", "KeyboardInterrupt")
            assert json.loads(run(f"print([o.outputs[0].token_ids for o in {generate}])")[0]) == answers()
        run("llm.check_blocks()")
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    at = time.monotonic()
    while runs(int(pid)) and time.monotonic() - at < 5:
        time.sleep(0.02)
    assert left_behind(int(pid), Path(directory), ours=False) == "nothing"


def test_two_engines_side_by_side(llm: LLM) -> None:
    with LLM(**SMALL | {"block_size": 4}, multiprocess=True) as other:
        pid, directory = child(other).process.pid, child(other).directory
        assert directory != child(llm).directory
        for engine in (llm, other, llm):
            works(engine)
        engines = [llm.llm_engine, other.llm_engine]
        for engine in engines:
            for i, prompt in enumerate(PROMPTS):
                engine.add_request(str(i), prompt, GREEDY)
        ended: list[dict[str, list[int]]] = [{}, {}]
        while any(e.has_unfinished_requests() for e in engines):
            for engine, got in zip(engines, ended, strict=True):
                got |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        assert all([got[str(i)] for i in range(len(PROMPTS))] == answers() for got in ended)
    assert left_behind(pid, directory) == "nothing"


def test_closed_engine() -> None:
    llm = LLM(**SMALL, multiprocess=True)
    pid, directory, client = child(llm).process.pid, child(llm).directory, llm.llm_engine.engine_core
    llm.llm_engine.add_request("a", "Once", LONG)
    llm.shutdown()
    assert left_behind(pid, directory) == "nothing"
    llm.shutdown()
    calls: list[Any] = [
        lambda: llm.generate("Once", GREEDY), llm.llm_engine.step, llm.check_blocks, client.stats,
        lambda: client.add_request(request("b")), client.get_output, lambda: llm.walk("Once", GREEDY),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    client.abort_requests(["a"])


def test_collected_engine_ends() -> None:
    client = SyncMPClient(config())
    process, directory = client.child.process, client.child.directory
    del client
    gc.collect()
    assert left_behind(process.pid, directory) == "nothing"


def test_a_fork_of_the_caller_owns_nothing(llm: LLM) -> None:
    """It can neither end nor use the engine, and says so instead of waiting for ever."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        llm.llm_engine.engine_core.shutdown()
        error = faults.caught(lambda: llm.generate("Once", GREEDY, use_tqdm=False))
        os._exit(0 if "another process" in str(error) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    works(llm)


def test_threads_wait_for_one_another(llm: LLM) -> None:
    """A socket belongs to one thread at a time, and so does the scheduler of an engine in this process."""
    here = LLM(**SMALL, multiprocess=False)
    for engine in (llm, here):
        right, errors = answers(), list[BaseException | None]()

        def work(engine: LLM = engine, errors: list[BaseException | None] = errors) -> None:
            for _ in range(3):
                errors.append(faults.caught(lambda: works(engine)))
                errors.append(faults.caught(lambda: engine.llm_engine.abort_request("nobody")))
                errors.append(faults.caught(engine.reset_prefix_cache))

        threads = [threading.Thread(target=work) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == [None] * 45 and right == answers()
    here.shutdown()


@pytest.mark.parametrize("lacks", ["pyzmq", "ipc"])
def test_no_pyzmq_or_no_ipc(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """The in-process engine works all the same, and asking for another process says what is missing."""
    if lacks == "pyzmq":
        monkeypatch.setitem(sys.modules, "zmq", None)
        monkeypatch.setattr("walkvllm.core_client.find_spec", lambda name: None)
    else:
        windows = type("sys", (), {"platform": "win32"})
        monkeypatch.setattr("walkvllm.core_client.sys", windows)
        monkeypatch.setattr("walkvllm.mp_client.sys", windows)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    with LLM(**SMALL) as llm:
        assert llm.llm_engine.engine_core.engine_core
    with pytest.raises(RuntimeError, match=lacks):
        LLM(**SMALL, multiprocess=True)


def test_socket_path_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = socket_directory(107)
    assert directory.parent == Path("/tmp") and not list(deep.iterdir())
    directory.rmdir()
    with pytest.raises(ValueError, match="TMPDIR"):
        socket_directory(10)
    strange = tmp_path / os.fsdecode(b"no utf-8 \xff")
    strange.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(strange))
    directory = socket_directory(107)
    assert directory.parent == Path("/tmp")
    directory.rmdir()


# ---- errors are themselves ----

def test_start_up_errors_are_the_same(tmp_path: Path) -> None:
    model = Path(str(Path(__file__).parent.parent / "walkvllm" / "tales-3m"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:5000])
    said = []
    with faults.started() as made:
        for multiprocess in (False, True):
            with pytest.raises(Exception) as caught:  # noqa: PT011, B017
                LLM(tmp_path, **SMALL, multiprocess=multiprocess)
            said.append((type(caught.value), str(caught.value)))
    assert said[0] == said[1] and "Traceback" in caught.value.__notes__[0]
    assert left_behind(made[0].process.pid, made[0].directory) == "nothing"
    for multiprocess in (False, True):
        with pytest.raises(ValueError, match="'no/such/place' is not a directory"):
            LLM("no/such/place", multiprocess=multiprocess)
    strange = tmp_path / os.fsdecode(b"no utf-8 \xff")
    strange.mkdir()
    (strange / "config.json").write_bytes((model / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"no utf-8 \\udcff: no \*.safetensors"):
        LLM(strange, **SMALL, skip_tokenizer_init=True, multiprocess=True)


def test_a_core_that_does_not_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.3")
    with faults.started() as made, pytest.raises(TimeoutError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
        SyncMPClient(config())
    assert left_behind(made[0].process.pid, made[0].directory) == "nothing"
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match="VLLM_ENGINE_READY_TIMEOUT_S='soon'"):
        SyncMPClient(config())


def test_a_core_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("walkvllm.mp_client.COMMAND", ("-c", "raise SystemExit(7)"))
    wanted = "before it was ready: it ended with exit code 7"
    with faults.started() as made, pytest.raises(EngineDeadError, match=wanted):
        SyncMPClient(config())
    assert left_behind(made[0].process.pid, made[0].directory) == "nothing"


def test_generate_on_a_core_that_dies() -> None:
    llm = LLM(**SMALL, multiprocess=True)
    pid, directory = child(llm).process.pid, child(llm).directory
    bomb = faults.Bomb(0.1, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        while True:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    bomb.join()
    assert not llm.llm_engine.has_unfinished_requests()
    for call in (lambda: llm.generate("Once", GREEDY, use_tqdm=False), llm.check_blocks, llm.reset_prefix_cache,
                 lambda: llm.llm_engine.add_request("a", "Once", GREEDY), llm.llm_engine.step):  # fmt: skip
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            call()
    llm.llm_engine.abort_request("a")
    assert left_behind(pid, directory) == "nothing"
    llm.shutdown()


def test_ctrl_c_at_any_time(llm: LLM) -> None:
    for n in range(10):
        timer = threading.Timer(random.Random(n).uniform(0.0, 0.1), signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate(PROMPTS, LONG, use_tqdm=False)
        timer.join()
        assert not llm.llm_engine.has_unfinished_requests()
        llm.check_blocks()


def test_ctrl_c_while_the_core_is_stuck(llm: LLM) -> None:
    """The caller can leave although nothing comes."""
    pid = child(llm).process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        at = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert time.monotonic() - at < 5
        timer.join()
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_stuck_core_is_shut_down(interrupted: bool) -> None:
    client = SyncMPClient(config())
    pid, directory = client.child.process.pid, client.child.directory
    os.kill(pid, signal.SIGSTOP)
    if interrupted:
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            client.shutdown()
        timer.join()
    else:
        client.child.close(grace=0.2)
    assert left_behind(pid, directory) == "nothing"


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    """Each thing that can go wrong, once. The caller knows in time, and nothing is left."""
    run_fault(name, random.Random(name))


@pytest.mark.long
def test_faults_many_times() -> None:
    """Each at random moments, at least 200 in all. With WALKVLLM_FAULT_TABLE=FILE the table is written there."""
    rng, rows = random.Random(os.environ.get("WALKVLLM_SEED", "1")), []
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for n in range(210):
        rows.append(run_fault(list(FAULTS)[n % len(FAULTS)], rng))
    faults.close_all()
    gc.collect()
    if before:
        assert len(os.listdir("/proc/self/fd")) <= before + 12, "files are left open"
    if where := os.environ.get("WALKVLLM_FAULT_TABLE"):
        content = {"machine": f"{sys.platform}, {os.cpu_count()} cores, Python {sys.version.split()[0]}",
                   "date": date.today().isoformat(), "rows": faults.table(rows)}  # fmt: skip
        Path(where).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def teardown_module() -> None:
    faults.close_all()


# ---- ids ----

def run_to_end(client: SyncMPClient) -> dict[str, list[int]]:
    """The tokens of all open requests."""
    tokens: dict[str, list[int]] = {}
    while client.book.wire_ids:
        for output in client.get_output().outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def test_ids(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    client.add_request(request("a"))
    with pytest.raises(ValueError, match="'a' is already in use"):
        client.add_request(request("a"))
    client.abort_requests(["nobody"])
    client.abort_requests([])
    tokens = run_to_end(client)["a"]
    assert len(tokens) == LONG.max_tokens
    client.abort_requests(["a", "a"])  # finished
    client.add_request(request("a"))
    assert run_to_end(client) == {"a": tokens}
    assert not client.book.owners


def test_an_id_used_again_while_its_abort_is_in_flight(llm: LLM) -> None:
    """Whatever of the old request is still on its way, the new one gets its own tokens, all of them and no others."""
    client, rng = llm.llm_engine.engine_core, random.Random(5)
    client.add_request(request("a", start=200))
    expected = run_to_end(client)["a"]
    aliased = 0
    for _ in range(15):
        client.add_request(request("a"))
        for _ in range(rng.randrange(4)):
            client.get_output()
        for _ in range(rng.randrange(3)):
            client.abort_requests(["a"])
            client.add_request(request("a"))
        client.abort_requests(["a"])
        client.add_request(request("a", start=200))
        aliased += client.book.wire_ids["a"] != "a"
        assert run_to_end(client) == {"a": expected}
    assert aliased > 10
    client.stats()  # all last words have been sent before its answer
    while client.pending:
        client.get_output()
    assert not client.book.owners
    client.check_blocks()


def test_the_core_refuses_what_its_client_would_not_send(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    client.add_request(request("a"))
    client.send(Kind.ADD, request("a", start=200))  # past the book
    client.send(Kind.ABORT, ["nobody", "nobody"])
    client.send(Kind.UTILITY, UtilityCall(10**9, "explode"))
    assert len(run_to_end(client)["a"]) == LONG.max_tokens
    for name, args in (("explode", ()), ("stats", (1,)), ("__init__", ())):
        with pytest.raises((ValueError, TypeError)):
            client.call(name, *args)


def test_a_request_that_cannot_be_read_gets_its_last_word(llm: LLM) -> None:
    client = llm.llm_engine.engine_core
    client.book.enter("broken")
    frames = pack(Kind.ADD, ["broken", [1, 2], {"temperature": -3.0}, 0.0])
    client.child.input_socket.send_multipart([client.child.identity, *frames])
    (output,) = client.get_output().outputs
    assert (output.request_id, output.finish_reason) == ("broken", FinishReason.ERROR)


def test_open_requests_at_random() -> None:
    """The book against a model: outputs go to the youngest owner of an id, everything else to nobody."""
    rng = random.Random(3)
    book, core, serial = OpenRequests(), dict[str, int](), 0  # core: id on the wire -> which request it is
    alive: dict[str, int] = {}
    wire: list[tuple[str, int, FinishReason | None]] = []  # on the way to the caller
    for _ in range(20000):
        name, act = rng.choice("abc"), rng.random()
        if act < 0.3 and name not in alive:
            serial += 1
            wire_id = book.enter(name)
            assert wire_id not in core
            core[wire_id], alive[name] = serial, serial
        elif act < 0.5:
            for wire_id in book.abort([name, "nobody"]):
                if wire_id in core:  # else it has finished, and its last word is on the way
                    wire.append((wire_id, core[wire_id], None))
                    wire.append((wire_id, core.pop(wire_id), FinishReason.ABORT))
            alive.pop(name, None)
        elif act < 0.7 and core:
            wire_id = rng.choice(list(core))
            finished = rng.random() < 0.2
            wire.append((wire_id, core[wire_id], FinishReason.STOP if finished else None))
            if finished:
                del core[wire_id]
        while wire and rng.random() < 0.6:
            wire_id, number, reason = wire.pop(0)
            outputs = book.arrived(EngineCoreOutputs([EngineCoreOutput(wire_id, [number], reason)])).outputs
            if outputs:
                assert outputs[0].new_token_ids == [alive[outputs[0].request_id]]
                if reason is not None:
                    del alive[outputs[0].request_id]
    assert serial > 1000 and len(book.owners) == len(core) + sum(reason is not None for _, _, reason in wire)


# ---- many requests, many aborts ----

def crowd(client: SyncMPClient, here: LLM, total: int, aborts: int, seed: int) -> None:
    """Random requests, some aborted at random moments. The others get the right tokens, and all blocks come home."""
    rng = random.Random(seed)
    prompts = {str(i): [rng.randrange(3, 2000) for _ in range(rng.randint(1, 40))] for i in range(total)}
    params = {i: SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 63 - len(p)), ignore_eos=True)
              for i, p in prompts.items()}  # fmt: skip
    doomed = set(rng.sample(list(prompts), aborts))
    tokens: dict[str, list[int]] = {i: [] for i in prompts}
    waiting, open_ids, ended = list(prompts), set[str](), set[str]()
    while waiting or open_ids:
        for _ in range(min(len(waiting), rng.choice([0, 0, 1, 2, 5, 20]) or (not open_ids))):
            name = waiting.pop()
            client.add_request(EngineCoreRequest(name, prompts[name], params[name], 0.0))
            open_ids.add(name)
        for name in sorted(open_ids & doomed):
            if rng.random() < 0.1:
                client.abort_requests([name])
                open_ids.remove(name)
        for output in client.get_output().outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                open_ids.discard(output.request_id)
                ended.add(output.request_id)
    assert ended >= set(prompts) - doomed
    stats = client.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    client.check_blocks()
    names = sorted(ended)
    right = here.generate([prompts[n] for n in names], [params[n] for n in names], use_tqdm=False)
    assert [tokens[n] for n in names] == [o.outputs[0].token_ids for o in right]
    print(f"{total} requests, {len(set(prompts) - ended)} aborted before their end")


@pytest.mark.parametrize("total,aborts", [(100, 30), pytest.param(1000, 300, marks=pytest.mark.long)])
def test_a_crowd_with_aborts(llm: LLM, total: int, aborts: int) -> None:
    with LLM(**SMALL, multiprocess=False) as here:
        crowd(llm.llm_engine.engine_core, here, total, aborts, seed=total)


# ---- the same through all clients ----

@pytest.fixture(scope="module", params=CLIENTS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(request.param, **SMALL) as engine:
        yield engine


def nobody_left(engine: Engine) -> None:
    assert engine.unfinished() == 0
    for _ in range(200):  # an abort may be on its way
        stats = engine.stats()
        if not stats.num_running_reqs + stats.num_waiting_reqs:
            break
        time.sleep(0.01)
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    engine.check_blocks()


def test_same_answers(engine: Engine) -> None:
    outputs = engine.generate(PROMPTS, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == answers()
    assert [o.prompt for o in outputs] == [None, "Once a fox", "Count from three to eleven.", "Why?"]
    nobody_left(engine)


def test_same_errors(engine: Engine) -> None:
    bad = [("", "empty"), ([5] * 64, "limit is 63"), ([5, 2048], "outside the vocabulary"), (None, "NoneType")]
    for prompt, words in bad:
        with pytest.raises((ValueError, TypeError), match=words):
            engine.generate([prompt], GREEDY)
        nobody_left(engine)
    with pytest.raises((ValueError, TypeError), match="empty"):
        engine.generate(["fine", ""], GREEDY)
    nobody_left(engine)
    assert [o.outputs[0].token_ids for o in engine.generate(PROMPTS, GREEDY)] == answers()


def test_same_stop_strings(engine: Engine) -> None:
    (whole,) = engine.generate([PROMPTS[0]], LONG)
    text = whole.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    stopping = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, stop=[stop])
    (output,) = engine.generate([PROMPTS[0]], stopping)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text[: text.index(stop)], stop)
    nobody_left(engine)


def test_same_seeds_and_cache(engine: Engine) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=8, ignore_eos=True)
    with LLM(**SMALL, multiprocess=False) as here:
        right = [o.outputs[0].token_ids for o in here.generate(PROMPTS, params, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params)] == right
    long = [{"prompt_token_ids": list(range(300, 332))}]
    assert engine.reset_prefix_cache()
    assert [engine.generate(long, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 24]
    nobody_left(engine)


# ---- the asynchronous engine ----

@pytest.fixture(scope="module")
def async_engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
    yield engine
    engine.shutdown()


def test_a_loop_that_ends_and_another_one(async_engine: AsyncLLM) -> None:
    async def one() -> list[int]:
        outputs = [o async for o in async_engine.generate(PROMPTS[0], GREEDY, "a")]
        return outputs[-1].outputs[0].token_ids

    async def left() -> None:
        async for _ in async_engine.generate(PROMPTS[0], LONG, "left"):
            break

    for _ in range(3):
        assert run_loop(one()) == answers()[0]
        run_loop(left())
    assert not async_engine.collectors


def test_nobody_takes_the_wake_up_of_who_waits(async_engine: AsyncLLM) -> None:
    """An answer arrives although somebody else looks whether the core is alive while it comes in."""

    async def main() -> None:
        for _ in range(5):
            asked = asyncio.ensure_future(async_engine.stats())
            await asyncio.sleep(0)
            until = time.monotonic() + 0.1
            while time.monotonic() < until:
                async_engine.engine_core.check_alive()
            await asyncio.wait_for(asked, 20)

    run_loop(main())


def run_loop(work: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run(), but not for ever."""
    return asyncio.run(asyncio.wait_for(work, 120))


def test_two_loops_at_once_are_refused(async_engine: AsyncLLM) -> None:
    async def main() -> None:
        stream = async_engine.generate(PROMPTS[0], LONG, "a")
        await anext(stream)
        errors: list[BaseException | None] = []

        def other() -> None:
            errors.append(faults.caught(lambda: asyncio.run(async_engine.check_blocks())))

        thread = threading.Thread(target=other)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.01)
        assert "another event loop" in str(errors[0])
        await stream.aclose()

    run_loop(main())


def test_tasks_that_come_and_go(async_engine: AsyncLLM) -> None:
    """Fifty tasks, some cancelled, some slow, some that leave: the others are right, and all blocks come home."""
    rng = random.Random(8)

    async def task(n: int) -> tuple[int, list[int]]:
        kind = list(RequestOutputKind)[n % 3]
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, output_kind=kind)
        tokens: list[int] = []
        async for output in async_engine.generate(list(range(70 + n % 5, 85)), params, f"t{n}"):
            new = output.outputs[0].token_ids
            tokens = tokens + new if kind is RequestOutputKind.DELTA else new
            if n % 7 == 3:
                break
            if n % 4 == 1:
                await asyncio.sleep(rng.uniform(0, 0.02))
        return n % 5, tokens

    async def main() -> dict[int, set[tuple[int, ...]]]:
        tasks = [asyncio.ensure_future(task(n)) for n in range(50)]
        for n in range(5, 50, 9):
            asyncio.get_running_loop().call_later(rng.uniform(0, 0.5), tasks[n].cancel)
        seen: dict[int, set[tuple[int, ...]]] = {}
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, tuple) and len(result[1]) == 40:
                seen.setdefault(result[0], set()).add(tuple(result[1]))
            else:
                assert isinstance(result, (tuple, asyncio.CancelledError)), result
        while (await async_engine.stats()).num_running_reqs:
            await asyncio.sleep(0.01)
        await async_engine.check_blocks()
        stats = await async_engine.stats()
        assert stats.num_free_blocks == stats.num_blocks and not async_engine.collectors
        return seen

    seen = run_loop(main())
    assert len(seen) == 5 and all(len(answers) == 1 for answers in seen.values())


def test_a_consumer_that_blocks_holds_up_nobody(async_engine: AsyncLLM) -> None:
    """Whatever piles up for a caller who never takes it is one output."""

    async def main() -> None:
        lazy = [async_engine.add_request(f"lazy{i}", PROMPTS[0], LONG) for i in range(5)]
        last = [o async for o in async_engine.generate(PROMPTS[0], LONG, "quick")][-1]
        while async_engine.collectors:
            await asyncio.sleep(0.01)
        for collector in lazy:
            output = await collector.get()
            assert output.finished and output.outputs[0] == last.outputs[0]

    run_loop(main())


@pytest.mark.parametrize("who", ["health", "generate", "abort", "stats"])
def test_whoever_finds_the_core_dead_wakes_those_who_wait(who: str) -> None:
    """It was the receiving task alone that told them, and nothing wakes it when another has closed its socket."""

    async def wait(engine: AsyncLLM, name: str) -> list[Any]:
        return [o async for o in engine.generate(PROMPTS[0], LONG, name)]

    async def main() -> None:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        tasks = [asyncio.ensure_future(wait(engine, name)) for name in "abc"]
        tasks.append(asyncio.ensure_future(engine.stats()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.engine_core.child.process.kill()
        time.sleep(0.2)  # the loop is busy: the receiving task hears nothing of it
        calls = {"health": engine.check_health, "generate": lambda: wait(engine, "d"), "stats": engine.stats,
                 "abort": lambda: engine.abort("a")}  # fmt: skip
        with suppress(EngineDeadError):
            await calls[who]()
        at = time.monotonic()
        *results, asked = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert time.monotonic() - at < 2 and isinstance(asked, EngineDeadError)
        if who == "abort":
            assert results.pop(0)[-1].outputs[0].finish_reason == "abort"
        assert all(isinstance(r, EngineDeadError) for r in results)
        engine.shutdown()

    run_loop(main())


def test_all_tasks_cancelled_but_one(async_engine: AsyncLLM) -> None:
    """The receiving task too. Whoever is left is told, and the engine goes on."""

    async def main() -> None:
        async def wait() -> list[Any]:
            return [o async for o in async_engine.generate(PROMPTS[0], LONG, "a")]

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        for other in asyncio.all_tasks() - {task, asyncio.current_task()}:
            other.cancel()
        with pytest.raises(RuntimeError, match="cancelled"):
            await asyncio.wait_for(task, 20)
        assert (await asyncio.wait_for(wait(), 20))[-1].finished

    asyncio.run(main())


def test_a_bad_message_does_not_hold_up_the_loop(async_engine: AsyncLLM) -> None:
    async def main() -> None:
        await async_engine.stats()
        child = async_engine.engine_core.child
        push = child.context.socket(import_zmq().PUSH)
        push.connect(f"ipc://{child.directory / 'output'}")
        for frames in ([b"junk"], [Kind.OUTPUTS.value], [Kind.REPLY.value, b"\x93\xcd\xff\xff\xc0\xc0"]):
            push.send_multipart(frames)
        at = time.monotonic()
        await asyncio.sleep(0.1)
        assert time.monotonic() - at < 5
        await asyncio.wait_for(async_engine.check_blocks(), 20)
        push.close(linger=0)

    run_loop(main())


def test_a_wrong_id_is_refused_at_once(async_engine: AsyncLLM) -> None:
    for bad, error in ((7, TypeError), (None, TypeError), ("\ud800", ValueError)):
        with pytest.raises(error, match="request_id"):
            run_loop(anext(async_engine.generate(PROMPTS[0], GREEDY, bad)))  # type: ignore[arg-type]
    assert not async_engine.collectors and not async_engine.output_processor.request_states


def test_shutdown_wakes_who_waits() -> None:
    async def main() -> list[Any]:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL | {"max_model_len": 500, "num_gpu_blocks_override": 250}))
        longer = SamplingParams(temperature=0.0, max_tokens=450, ignore_eos=True)  # nobody ends by himself meanwhile
        process, directory = engine.engine_core.child.process, engine.engine_core.child.directory

        async def wait(n: int) -> None:
            async for _ in engine.generate(PROMPTS[0], longer, str(n)):
                pass

        tasks = [asyncio.ensure_future(wait(n)) for n in range(3)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.ensure_future(engine.ask("stats")))
        await asyncio.sleep(0)
        engine.shutdown()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        with pytest.raises(RuntimeError, match="shut down"):
            await anext(engine.generate(PROMPTS[0], LONG, "late"))
        with pytest.raises(RuntimeError, match="shut down"):
            await engine.check_health()
        assert left_behind(process.pid, directory) == "nothing"
        return results

    for result in run_loop(main()):
        assert isinstance(result, RuntimeError) and "shut down" in str(result)


def test_a_dropped_async_engine_ends() -> None:
    async def main() -> tuple[int, Path]:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        child = engine.engine_core.child
        async for _ in engine.generate(PROMPTS[0], LONG, "a"):
            break
        return child.process.pid, child.directory

    pid, directory = run_loop(main())
    gc.collect()
    assert left_behind(pid, directory) == "nothing"


# ---- the walk ----

def test_walk(llm: LLM) -> None:
    stops, texts = list(llm.walk(PROMPTS, GREEDY)), dict[str, str]()
    for stop in stops:
        texts |= stop.facts["texts"] if stop.name == "text out" else {}
    assert {s.name for s in stops} >= {
        "input processed", "message encoded", "message decoded", "added", "scheduled", "executed", "sampled", "updated",
        "outputs encoded", "outputs decoded", "text out", "blocks home"}  # fmt: skip
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [texts[str(i)] for i in range(4)] == [o.outputs[0].text for o in outputs]


# ---- small things ----

def test_a_client_is_told_only_by_messages() -> None:
    """The two halves share no code that holds state: what crosses is frames."""
    source = Path(sys.modules[MPClient.__module__].__file__ or "").read_text()
    assert "pickle" not in source and "multiprocessing" not in source and "EngineCore(" not in source
    for path in (ROOT / "walkvllm").glob("*.py"):
        assert "import pickle" not in path.read_text(encoding="utf-8"), path


def test_bad_frames_say_why() -> None:
    from walkvllm.frames import FROM_CORE, unpack

    with pytest.raises(BadFrame, match="does not belong here"):
        unpack(pack(Kind.ADD, request("a")), FROM_CORE)


def test_steps_of_an_engine_with_nothing_to_do(llm: LLM) -> None:
    """They do not wait for what never comes."""
    assert llm.llm_engine.step() == []
    llm.llm_engine.add_request("a", "Once", LONG)
    llm.llm_engine.abort_request("a")
    assert llm.llm_engine.step() == []


def test_a_process_of_its_own_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "yes")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING='yes' must be 0 or 1"):
        LLM(**SMALL)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with LLM(**SMALL) as llm:
        assert llm.llm_engine.engine_core.engine_core.scheduler
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    pid = engine.engine_core.child.process.pid
    engine.add_request("a", PROMPTS[0], GREEDY)
    done = []
    while engine.has_unfinished_requests():
        done += [o for o in engine.step() if o.finished]
    assert done[0].outputs[0].token_ids == answers()[0]
    engine.shutdown()
    assert not runs(pid)
