"""What can be known of the kernels on a GPU without having one: what the compiler makes of them, and that the script
that measures runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from walkvllm.kernels import HAS_TRITON

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
PLANTED = """
import sys
sys.path.insert(0, "tools")
import compile_kernels as ck
launch = next(la for la in ck.launches() if la.quick and la.matrix)
tall = ck.replace(launch, constants=launch.constants | {"BLOCK_M": 128, "BLOCK_Q": 64, "TILE_N": 128},
                  options={"num_warps": 4, "num_stages": 2})
ck.paged_attention.TILES[True, True, 128] = (16, 64, 4, 2, 2)
flat = next(ck.attention("bfloat16", 128, "prompts"))
for bad in (tall, flat, launch):
    print(ck.complaints(bad, ck.report(bad, "sm_90")))
data = ck.json.loads(ck.DATA.read_text(encoding="utf-8"))
lost = data | {"rows": data["rows"][1:]}
other = data | {"sources": data["sources"] | {"fused": "0"}}
print(len(ck.stale(data)), ck.stale(lost), ck.stale(other))
"""


def run(*command: str, timeout: float = 300, interpret: str = "0") -> str:
    """What a tool prints; its report is the failure."""
    env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        pytest.fail(done.stdout[-3000:] + done.stderr[-3000:], pytrace=False)
    return done.stdout


def test_some_launches_compile_as_the_report_says() -> None:
    """No spill, the matrix instructions of the day, and a report that belongs to these sources."""
    assert "0 complaints" in run("tools/compile_kernels.py", "quick")


def test_the_report_turns_red() -> None:
    """A tile that does not fit the registers, one too flat for wgmma, a lost row and a changed source are noticed."""
    spilled, no_wgmma, good, stale = run("-c", PLANTED).splitlines()
    assert "spills" in spilled and "no wgmma" in no_wgmma and good == "[]"
    assert stale.startswith("0 ['not in the file") and "fused.py has changed" in stale


@pytest.mark.long
def test_every_launch_compiles_as_the_report_says() -> None:
    out = run("tools/compile_kernels.py", "check", timeout=3000)
    assert "0 complaints" in out


BARE = """
import runpy
import sys

class Block:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("msgspec", "zmq"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
sys.path.insert(0, "tools")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def gpu_bench(*command: str, out: Path) -> dict[str, Any]:
    """What tools/gpu_bench.py finds in tiny sizes, in the interpreter."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command, "tools/gpu_bench.py", "--tiny", "--out", str(out)], cwd=ROOT,
                          env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("command", [[], ["-c", BARE]], ids=["", "without msgspec and zmq"])
def test_the_gpu_script_runs_to_its_end(tmp_path: Path, command: list[str]) -> None:
    """So that the first minute on a GPU is not spent on typing errors, nor on packages that its image lacks."""
    result = gpu_bench(*command, out=tmp_path / "gpu.json")
    assert not result["problems"]
    assert all(row["right"] for row in result["correctness"]) and all(row["same"] for row in result["graph"])
    assert all(row["tokens_out"] > 0 for row in result["engine"]) and result["engine"][0]["graphs"] > 0


PARTS = """
import json
import sys
sys.argv = ["gpu_bench.py", "--tiny"]
sys.path.insert(0, "tools")
import gpu_bench as g

def breaks():
    yield {"right": True}
    raise ValueError("by design")

def slow():
    for i in range(3):
        yield {"i": i}
        g.STARTED -= g.SECONDS * 0.3

def no_yardstick():
    raise ValueError("no memory")
    yield {}

for name in ("correctness", "graph", "engine"):
    setattr(g, name, breaks)
g.yardsticks, g.prefill, g.small_kernels, g.other_cuts = no_yardstick, lambda yard: iter([]), slow, slow
result = {"problems": {}}
g.measure([], result)
print(json.dumps(result))
"""


def test_the_gpu_script_keeps_what_it_has() -> None:
    """Rows that came before an error or the end of the time stay, and a fraction of nothing is none."""
    result = json.loads(run("-c", PARTS, interpret="1").splitlines()[-1])
    assert result["correctness"] == [{"right": True}] and result["problems"]["correctness"] == "ValueError: by design"
    assert len(result["decode"]) == 2 and all(row["of_copy"] is None for row in result["decode"])
    assert result["small_kernels"] == [{"i": 0}, {"i": 1}, {"i": 2}] and result["graph"] == result["other_cuts"] == []
    assert result["problems"]["engine"] == "no time left after 0 rows" and "prefill" not in result["problems"]
