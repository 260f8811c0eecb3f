"""The benchmark's driver and its peers go through on a tiny workload. No time is looked at."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cells import ROOT

BENCH = ROOT / "tools" / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_two_peers(tmp_path: Path) -> None:
    """The driver loads them, compares their tokens, gives them all work of the embedded model, and writes the rows."""
    out = tmp_path / "bench.json"
    run = subprocess.run(
        [sys.executable, str(BENCH / "run.py"), "--small", "--workloads", "ade", "--rounds", "1", "--threads", "1",
         "--peers", "walkvllm-torch,transformers", "--tunables", "off", "--out", str(out)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(out.read_text())
    assert [found["share"] for found in result["agreement"]] == [1.0, 1.0]
    assert [made["id"] for made in result["runs"]] == ["a1", "a4", "d", "e", "e-off"]
    for made in result["runs"]:
        assert list(made["peers"]) == ["walkvllm-torch", "transformers"]
        for row in made["peers"].values():
            assert row["output_tokens_per_s"] > 0 and row["ttft_ms"] > 0 and row["itl_ms"] > 0 and row["peak_mb"] > 50
            assert ("prefill" in row["ratio"]) == (made["workload"] != "d")
        assert made["peers"]["walkvllm-torch"]["ratio"]["all"] == [1.0, 1.0, 1.0]
    assert "gain" in result["runs"][3]["peers"]["walkvllm-torch"]
    assert json.loads((tmp_path / "workloads" / "a4.json").read_text())["batch"] == 4


def test_refused_arguments() -> None:
    """What does not exist is refused by name before anything starts."""
    cases = {"--peers=walkvllm,vlm": "'vlm' is none of", "--peers=transformers": "must be walkvllm",
             "--workloads=az": "'z' is none of", "--python=vllm=x": "must be PEER=PATH"}  # fmt: skip
    for argument, said in cases.items():
        run = subprocess.run([sys.executable, str(BENCH / "run.py"), argument], capture_output=True, text=True)
        assert run.returncode == 2 and said in run.stderr


def test_what_is_set_up_does_not_count(bench: Any) -> None:
    """A clock that begins anew has neither the time nor the processor time of before."""
    peer = bench("peer")
    clock = peer.Clock([{"max_tokens": 1}])
    start = clock.start
    while peer.cpu_seconds() == clock.cpu:  # its ticks are hundredths
        pass
    cpu = clock.cpu
    clock.begin()
    assert clock.start > start and clock.cpu > cpu and clock.missing == 1
    clock.take(0, [7, 8])
    assert clock.tokens == [[7]] and clock.seconds > 0 and clock.used >= 0


def test_times_become_rows(bench: Any) -> None:
    """Latencies, prefill and ratios from hand-made times."""
    report = bench("report")
    requests = [{"max_tokens": 3, "arrival": 0.0}, {"max_tokens": 2, "arrival": 0.5}]
    answer = {"seconds": 3.0, "times": [[1.0, 1.5, 3.0], [2.0, 2.25]]}
    found = report.of_round(answer, requests)
    assert (found["prefill"], found["decode"], found["ttft"]) == (2.0, 1.0, 1.25)
    assert (found["itl"], found["itl_p99"]) == (0.5, 1.5)
    assert report.of_round({**answer, "prefill": 0.75}, requests)["decode"] == 2.25
    slow = {key: 2 * value for key, value in found.items()}
    assert report.ratios([found, found], [slow, found], arrivals=False)["all"] == [1.5, 1.0, 2.0]
    assert list(report.ratios([found], [slow], arrivals=True)) == ["all"]


def test_tokens_are_held_against_ours(bench: Any) -> None:
    """After a row's first difference the rest counts as different, unless it is a near tie."""
    run = bench("run")

    class Asked:
        def question(self, token_ids: list[int]) -> list[list[float]]:
            return [[7, -1.0], [8, -1.0005]] if token_ids[-1] == 1 else [[7, -1.0], [8, -1.5]]

    work = {"requests": [{"prompt_token_ids": [0], "max_tokens": 4}] * 3}
    ours = [[1, 2, 3, 4], [1, 7, 3, 4], [2, 7, 3, 4]]
    assert run.compare(work, ours, [list(row) for row in ours], Asked()) == {"share": 1.0, "near_ties": 0}
    tied = [[1, 2, 3, 4], [1, 8, 9, 9], [2, 7, 3, 4]]
    assert run.compare(work, ours, tied, Asked()) == {"share": 1.0, "near_ties": 1}
    wrong = [[1, 2, 3, 4], [1, 7, 3, 4], [2, 8, 3, 4]]
    assert run.compare(work, ours, wrong, Asked()) == {"share": 0.75, "near_ties": 0}


def test_bfloat16_bits_for_gguf(bench: Any) -> None:
    """What is written for llama.cpp is what torch rounds to."""
    pytest.importorskip("gguf")
    import torch

    model = bench("gguf_model")
    values = torch.randn(1000)
    bits = torch.from_numpy(model.narrowed(values.numpy()).view("int16"))
    assert torch.equal(bits, values.bfloat16().view(torch.int16))
    assert torch.equal(torch.from_numpy(model.widened(model.narrowed(values.numpy()))), values.bfloat16().float())
    assert model.gguf_name("model.layers.3.self_attn.q_norm.weight") == "blk.3.attn_q_norm.weight"
    assert model.gguf_name("lm_head.weight") == "output.weight"
