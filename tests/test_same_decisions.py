"""The scheduler and the pool decide what vLLM 0.22.0's own classes decided on recorded workloads, line by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from walkvllm.schedule_trace import trace_schedule

DATA = Path(__file__).parent / "data" / "schedule"


def recorded() -> list[Any]:
    "Every recorded workload with the lines that vLLM printed for it."
    cases = []
    for file in sorted(DATA.glob("*.json")):
        groups: list[list[dict[str, Any]]] = []
        for line in file.with_suffix(".jsonl").read_text().splitlines():
            entry = json.loads(line)
            if "config" in entry:
                groups.append([])
            groups[-1].append(entry)
        for i, (workload, lines) in enumerate(zip(json.loads(file.read_text()), groups, strict=True)):
            cases.append(pytest.param(workload, lines, id=f"{file.stem}-{i}"))
    return cases


@pytest.mark.parametrize("workload,expected", recorded())
def test_same_decisions(workload: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    show = {k: any(k in line for line in expected) for k in ("free_queue", "tables", "hashes")}
    lines = json.loads(json.dumps(trace_schedule(workload, **show)))
    for ours, theirs in zip(lines, expected, strict=False):
        assert ours == theirs
    assert len(lines) == len(expected)
