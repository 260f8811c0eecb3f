"""What can be known of the kernels on a GPU without having one: what the compiler makes of them, and that the script
that measures runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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
ck.paged_attention.TILES[True, True, False] = (16, 64, 4, 2, 2)
flat = next(ck.attention("bfloat16", 128, "prompts"))
for bad in (tall, flat, launch):
    print(ck.complaints(bad, ck.report(bad, "sm_90")))
data = ck.json.loads(ck.DATA.read_text(encoding="utf-8"))
lost = data | {"rows": data["rows"][1:]}
other = data | {"sources": data["sources"] | {"fused": "0"}}
print(len(ck.stale(data)), ck.stale(lost), ck.stale(other))
"""


def run(*command: str, timeout: float = 300) -> str:
    """What a tool prints; its report is the failure."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
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


@pytest.mark.long
def test_the_gpu_script_runs_to_its_end(tmp_path: Path) -> None:
    """In tiny sizes, in the interpreter; so that the first minute on a GPU is not spent on typing errors."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tools/gpu_bench.py", "--tiny", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "gpu.json").read_text())
    assert not [name for name, part in result.items() if isinstance(part, dict) and {"failed", "skipped"} & set(part)]
    assert all(row["right"] for row in result["correctness"]) and all(row["same"] for row in result["graph"])
    assert all(row["tokens_out"] > 0 for row in result["engine"]) and result["engine"][0]["graphs"] > 0
