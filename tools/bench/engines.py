"""The peers as processes: how each is started, asked, stopped while others have their turn, and weighed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import environments
from peer import cpu_seconds, family
from workloads import BUILD

HERE = Path(__file__).resolve().parent
PATIENCE = 900  # seconds for one answer
WAYS = ["auto", "all", "all compiled", "auto compiled"]  # of vLLM
PEERS: dict[str, dict[str, Any]] = {  # the script, what it is told besides, and the environment it runs in
    "walkvllm": {"script": "walkvllm_peer.py", "told": {"backend": "cpu"}},
    "walkvllm-torch": {"script": "walkvllm_peer.py", "told": {"backend": "torch"}},
    "transformers": {"script": "transformers_peer.py"},
    "transformers-continuous": {"script": "continuous_peer.py"},
    "llama.cpp": {"script": "llamacpp_peer.py", "environment": "llamacpp", "gguf": True},
    "vllm-0.22.0": {"script": "vllm_peer.py", "environment": "vllm-0.22.0", "ways": WAYS},
    "vllm-newest": {"script": "vllm_peer.py", "environment": "vllm-newest", "ways": WAYS},
}


class Failed(Exception):
    """A peer ended, or did not answer."""


def python_for(name: str) -> Path:
    """The Python that a peer runs on; its environment is made if need be."""
    if "python" in PEERS[name]:
        found: Path = PEERS[name]["python"]
        return found
    environment = PEERS[name].get("environment")
    return environments.make(environment) if environment else Path(sys.executable)


def gguf_of(model: str, dtype: str) -> Path:
    """The model as a GGUF file, written once by llama.cpp's environment."""
    out = BUILD / f"{Path(model).name}-{dtype}.gguf"
    if not out.exists() or out.stat().st_mtime < (Path(model) / "config.json").stat().st_mtime:
        part = out.with_suffix(".part")
        command = [str(python_for("llama.cpp")), str(HERE / "gguf_model.py"), model, str(part), dtype]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        part.rename(out)
    return out


def memory_mb(pid: int) -> int:
    """The most memory that a process and its descendants have had; file pages that several map count once."""
    peaks, files = [], []
    for member in family(pid):
        try:
            status = Path(f"/proc/{member}/status").read_text().split()
        except OSError:
            continue
        found = {key: int(status[status.index(key) + 1]) for key in ("VmHWM:", "RssFile:") if key in status}
        peaks.append(found.get("VmHWM:", 0))
        files.append(found.get("RssFile:", 0))
    return (sum(peaks) - sum(files) + max(files, default=0)) // 1024


RUNNING: list[Engine] = []


@atexit.register
def end_all() -> None:
    """Nobody outlives the driver."""
    for engine in list(RUNNING):
        engine.kill()


class Engine:
    """A running peer with a model. It runs only during its turns."""

    def __init__(self, work: dict[str, Any], name: str, threads: int, way: str = "", tunables: str = "") -> None:
        self.name, self.way, self.peak_mb, self.version = name, way, 0, ""
        told = {**PEERS[name].get("told", {}), "model": work["model"], "dtype": work["dtype"], "threads": threads,
                "longest": work["longest"], "seqs": work["seqs"], "pool": work["pool"], "step": work["step"],
                "way": way}  # fmt: skip
        if PEERS[name].get("gguf"):
            told["model"] = str(gguf_of(work["model"], work["dtype"]))
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        if tunables:
            environment["GLIBC_TUNABLES"] = tunables
        self.log = BUILD / "logs" / f"{work['engine']}-{'-'.join([name, *way.split()])}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python_for(name)), str(HERE / PEERS[name]["script"]), json.dumps(told)]
        # A process group of its own: if the driver dies, the system wakes and ends a group that is stopped.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
                                        stderr=self.log.open("w"), process_group=0)  # fmt: skip
        RUNNING.append(self)
        self.idle_cpu = self.idle_seconds = 0.0
        self.idle_since: tuple[float, float] | None = None

    def wait(self) -> None:
        """Returns when the model is loaded."""
        self.version = str(self.read()["version"])
        self.rest()

    def read(self) -> dict[str, Any]:
        """The peer's next line."""
        out = self.process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], PATIENCE)
        line = out.readline() if ready else b""
        if not line:
            last = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()][-1:]
            what = "it ended" if ready else f"no answer in {PATIENCE} s"
            raise Failed(f"{what}: {' '.join(last)[:200]} (its log: {self.log})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, message: dict[str, Any]) -> dict[str, Any]:
        """Wakes the peer, asks, and lets it rest again."""
        assert self.process.stdin is not None
        self.wake()
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it is gone: reading says so, with its log
        answer = self.read()
        self.rest()
        return answer

    def ask(self, work: dict[str, Any]) -> dict[str, Any]:
        """One timed run."""
        answer = self.send({"requests": work["requests"], "prefix_caching": work.get("prefix_caching", True)})
        self.peak_mb = max(self.peak_mb, memory_mb(self.process.pid))
        return answer

    def question(self, token_ids: list[int]) -> list[list[float]]:
        """The two likeliest tokens after these, with log probabilities. Only walkvllm answers."""
        found: list[list[float]] = self.send({"question": token_ids})["answer"]
        return found

    def signal(self, number: int) -> None:
        for member in family(self.process.pid):
            try:
                os.kill(member, number)
            except ProcessLookupError:
                continue

    def rest(self) -> None:
        """Stops all threads, those that would spin as well."""
        self.signal(signal.SIGSTOP)
        self.idle_since = (time.time(), cpu_seconds(self.process.pid))

    def wake(self) -> None:
        if self.idle_since:
            before, cpu = self.idle_since
            self.idle_seconds += time.time() - before
            self.idle_cpu += cpu_seconds(self.process.pid) - cpu
        self.signal(signal.SIGCONT)

    def cpu_share_idle(self) -> float:
        """The part of a core that the peer has used while others had their turn."""
        return round(self.idle_cpu / self.idle_seconds, 3) if self.idle_seconds else 0.0

    def let_go(self) -> None:
        """Nothing more will be asked: the peer ends in its own way."""
        assert self.process.stdin is not None
        self.signal(signal.SIGCONT)
        self.process.stdin.close()

    def close(self) -> None:
        """Ends the process and all it has started."""
        self.let_go()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        if self in RUNNING:
            RUNNING.remove(self)


def load(work: dict[str, Any], name: str, threads: int) -> Engine:
    """A peer that is ready."""
    engine = Engine(work, name, threads, PEERS[name].get("ways", [""])[-1])
    try:
        engine.wait()
    except Failed:
        engine.kill()
        raise
    return engine
