"""The tool behind page 19b: its clock adds up, and every part of a step has a hand. No time is asserted."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from cells import ROOT

sys.path.append(str(ROOT / "tools" / "bench"))
import bench_overhead as tool


class Fake:
    """Work that takes as long as it says."""

    def __init__(self) -> None:
        self.now = 0.0

    def inner(self) -> None:
        self.now += 3.0

    def outer(self) -> None:
        self.now += 1.0
        self.inner()
        self.now += 1.0
        self.inner()


def test_a_part_is_without_what_it_calls() -> None:
    fake = Fake()
    clock = tool.Clock(lambda: fake.now)
    clock.timed(fake, "inner", "i")
    clock.timed(fake, "outer", "o")
    fake.outer()
    assert clock.take() == {"i": 6.0, "o": 2.0} and clock.take() == {}
    clock.stop()
    fake.outer()
    assert clock.take() == {} and vars(fake) == {"now": 16.0}


def test_a_missing_part_is_an_error() -> None:
    with pytest.raises(AttributeError):
        tool.Clock(float).timed(Fake(), "gone", "g")


def test_every_part_is_seen() -> None:
    with tool.longer_model() as model:
        row = tool.growth_row(tool.Load(3, waiting=2, context=40), 12, model, tool.plain_words())
    assert all(row[part] > 0 for part in tool.OUTSIDE) and row["outside"] > 0
    assert "model" not in row


def test_a_step_makes_as_many_calls_with_longer_contexts() -> None:
    """Page 19 says so where it tells why a token costs more among many long requests."""
    found = []
    with tool.longer_model() as model:
        for context in (64, 1024):
            load, calls = tool.Load(4, context=context), list[str]()
            longest = 60 + context // 8
            engine = tool.stub_engine(load, longest, model, tool.plain_words())
            tool.begin(engine, load, longest, 2048)
            sys.setprofile(lambda frame, event, arg, calls=calls: calls.append(event))
            engine.step()
            sys.setprofile(None)
            engine.shutdown()
            found.append((calls.count("call"), calls.count("c_call")))
    assert found[0] == found[1]


def test_a_recorded_step_has_all_stops() -> None:
    load = tool.Load(2, context=20)
    engine = tool.real_engine(tool.EMBEDDED, "float32", load, 80)
    found = tool.recorded(engine, load, 12)
    engine.shutdown()
    step = tool.picked(found, found, slice(tool.WARM_UP, None))
    assert [stop for stop, _ in step["stops"]] == list(tool.STOPS) and step["step"] > tool.WARM_UP
    assert {"states", "flatten", "rest of the model"} <= step["executed"].keys()


def test_a_shared_prefix_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second run on a prefill computes what is not shared, and nothing less."""
    load = tool.Load(2, context=52, shared=32)
    engine = tool.real_engine(tool.EMBEDDED, "float32", load, 80)
    scheduler, tokens = engine.engine_core.engine_core.scheduler, list[int]()
    plan = scheduler.schedule

    def schedule() -> Any:
        plans = plan()
        tokens.append(plans.total_num_scheduled_tokens)
        return plans

    monkeypatch.setattr(scheduler, "schedule", schedule)
    for run in range(3):
        tokens.clear()
        tool.recorded(engine, load, 3, run)
        assert run == 0 or tokens[0] == 2 * 20
    engine.shutdown()


def test_sizes_of_the_models() -> None:
    sizes = tool.sizes()
    assert sizes["a"]["head"] == 2048 * 256 and sizes["c"]["head"] == 151936 * 1024
    assert sizes["b"]["layers"] == 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
