"""Diseases that are produced for real are told apart, and a server's metrics are read for no more than they say."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from diseases import ASYNC, CASES, CHILD, IN_PROCESS, MODES, Ward, produce_in

import walkvllm
from walkvllm.blame import (
    BLOCKS,
    BUDGET,
    COMPUTE,
    CONSUME,
    HEAD,
    IDLE,
    SEQS,
    STALL,
    SUBMIT,
    THRASH,
    shares_of,
    spans_of,
)  # fmt: skip
from walkvllm.events import Run
from walkvllm.latency import DISEASES, NOT_SURE, diagnose
from walkvllm.metrics import bounds_of, engine_metrics, request_metrics, steps_of
from walkvllm.prometheus import Settings, Window, cannot_tell, diagnose_files, parse, report, windows
from walkvllm.prometheus import diagnose as diagnose_window

TIMES, TRIES = 20, 3
ONE_CHILD = [COMPUTE, STALL, CONSUME, SUBMIT, IDLE]  # all in one engine
ONCE = [(IN_PROCESS, d) for d in CASES] + [(CHILD, d) for d in ONE_CHILD] + [(ASYNC, d) for d in (CONSUME, SUBMIT)]
REAL = (Path(walkvllm.__file__).parent / "data" / "vllm_metrics.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ward() -> Iterator[Ward]:
    ward = Ward()
    yield ward
    ward.close()


# ---- recorded runs ----

@pytest.mark.parametrize(("mode", "disease"), ONCE)
def test_told_apart(ward: Ward, mode: str, disease: str) -> None:
    """Once each, under noise: never a wrong verdict, and the right one if the machine is not too busy for it."""
    for seed in range(TRIES):
        run = ward.produce(disease, mode, random.Random(seed))
        check_twins(run)
        said = diagnose(run)
        assert said.verdict in (disease, NOT_SURE), said
        if said.verdict == disease:
            assert said.knob == DISEASES[disease].knob and len(said.evidence) > 1 and disease in repr(said)
            return
    pytest.fail(f"not sure {TRIES} times: {said}")


@pytest.mark.long
@pytest.mark.parametrize(("mode", "disease"), [(m, d) for m in MODES for d in produce_in(m)])
def test_told_apart_many_times(ward: Ward, mode: str, disease: str) -> None:
    """A row of the confusion table. WALKVLLM_DIAGNOSES=file keeps it, in that file's list."""
    runs = [ward.produce(disease, mode, random.Random(f"{mode} {disease} {seed}")) for seed in range(TIMES)]
    said = Counter(diagnose(run).verdict for run in runs)
    if where := os.environ.get("WALKVLLM_DIAGNOSES"):
        path = Path(where)
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        rows = [row for row in rows if (row["produced"], row["mode"]) != (disease, mode)]
        rows.append({"produced": disease, "mode": mode, "said": dict(sorted(said.items()))})
        rows.sort(key=lambda row: (list(DISEASES).index(row["produced"]), MODES.index(row["mode"])))
        path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
    assert set(said) <= {disease, NOT_SURE}, said


def check_twins(run: Run) -> None:
    """Slow ways to the same numbers: shares by looking at single moments, latencies by looking for single events."""
    spans, (start, end) = spans_of(run), bounds_of(run)
    shares, rng, tries = shares_of(spans, start, end), random.Random(0), 2000
    counted: Counter[str] = Counter()
    for _ in range(tries):
        now = rng.uniform(start, end)
        there = [s for s in spans if s.began <= now < s.ended]
        assert len({s.request for s in there}) == len(there), "somebody is in two places"
        for span in there:
            for cause, part in span.causes.items():
                counted[cause] += part / len(there)  # type: ignore[assignment]
        counted[IDLE] += not there
    assert abs(sum(shares.values()) - 1) < 1e-6 and all(abs(sum(s.causes.values()) - 1) < 1e-9 for s in spans)
    assert all(abs(counted[cause] / tries - share) < 0.06 for cause, share in shares.items()), (counted, shares)
    busy = sum(end - start for start, end in ((s.began, s.ended) for s in steps_of(run)))
    assert engine_metrics(run).busy == pytest.approx(busy / (end - start))
    for name, got in request_metrics(run).items():
        check_request(run, name, got)


def check_request(run: Run, name: str, got: Any) -> None:
    arrived = next(e.began for e in run.events if e.stop == "input processed" and e.request == name)
    queued = next(e.ended for e in run.events if e.stop == "added" and e.request == name)
    first = next(e.began for e in run.events if e.stop == "scheduled" and name in e.facts["tokens"])
    booked = [e for e in run.events if e.stop == "updated" and name in e.facts["token_ids"]]
    came = {e.step: e.ended for e in reversed(run.events) if e.stop in ("outputs decoded", "text out")}
    times = [e.ended for e in booked]
    assert got.num_generation_tokens == len(times) and got.finished
    assert got.queued_time == pytest.approx(first - queued)
    assert got.prefill_time == pytest.approx(times[0] - first)
    assert got.inference_time == pytest.approx(times[-1] - first) == pytest.approx(got.prefill_time + got.decode_time)
    assert got.inter_token_latencies == pytest.approx([b - a for a, b in zip(times, times[1:], strict=False)])
    assert got.time_to_first_token == pytest.approx(came[booked[0].step] - arrived)
    assert got.e2e_latency == pytest.approx(came[booked[-1].step] - arrived)
    assert got.queued_time >= 0 and got.input_time <= got.submit_time <= got.time_to_first_token <= got.e2e_latency


def test_a_run_that_is_not_whole(ward: Ward, tmp_path: Path) -> None:
    for disease, mode in ((HEAD, IN_PROCESS), (CONSUME, CHILD), (THRASH, IN_PROCESS), (IDLE, IN_PROCESS)):
        run = ward.produce(disease, mode, random.Random(0), noisy=False)
        for cut in random.Random(0).sample(range(1, len(run.events)), 40):  # a run may end anywhere
            diagnose(Run(run.engine, run.events[:cut], 1))
    run.save(tmp_path / "run.jsonl")
    assert list(diagnose_files([tmp_path / "run.jsonl"])) == [repr(diagnose(run))]
    assert "no room for 7 events" in repr(diagnose(Run(run.engine, run.events, 7)))
    assert diagnose(Run(run.engine, run.events, 0, "the core has died")).verdict == NOT_SURE


# ---- a server's metrics ----

def after_some(requests: int, mean: dict[str, float], text: str = REAL, **gauges: float) -> str:
    """The real text after `requests` more, which took `mean` seconds in each part; gauges and counters as given."""
    parts = {"queue": 0.0, "prefill": 0.1, "decode": 0.5, "before": 0.0, "after": 0.0} | mean
    inference = parts["prefill"] + parts["decode"]
    ttft = parts["queue"] + parts["prefill"] + parts["before"]
    grows = {
        "time_to_first_token_seconds": ttft, "e2e_request_latency_seconds": ttft + parts["decode"] + parts["after"],
        "request_queue_time_seconds": parts["queue"], "request_prefill_time_seconds": parts["prefill"],
        "request_decode_time_seconds": parts["decode"], "request_inference_time_seconds": inference,
    }  # fmt: skip
    lines = []
    for line in text.splitlines():
        name, (head, _, value) = line.partition("{")[0].removeprefix("vllm:"), line.rpartition(" ")
        family, _, suffix = name.rpartition("_")
        if name in gauges:
            line = f"{head} {gauges[name]}"
        elif family in grows:
            line = f"{head} {float(value) + requests * (1 if suffix == 'count' else grows[family])}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def with_buckets(text: str, family: str, counts: dict[float, int]) -> str:
    """The text with buckets for a histogram that has none; counts are of single buckets, by their upper bound."""
    labels, total, lines = 'engine="0",model_name="tiny"', 0, []
    for bound in sorted(counts):
        total += counts[bound]
        le = "+Inf" if bound == inf else str(bound)
        lines.append(f'{family}_bucket{{{labels},le="{le}"}} {float(total)}\n')
    head, found, tail = text.partition(f"{family}_count{{")
    assert found
    return head + "".join(lines) + found + tail


def verdict_of(before: str, after: str, settings: Settings) -> tuple[str, tuple[str, ...]]:
    (window,) = windows(parse(after), parse(before))
    said = diagnose_window(window, settings)
    assert cannot_tell(window, settings)
    return said.verdict, said.between


KNOWN = Settings(max_num_seqs=4, max_num_batched_tokens=64)
QUEUE = {"queue": 2.0}
HERE = {"num_requests_running": 2.0, "num_requests_waiting": 9.0}


@pytest.mark.parametrize(("mean", "gauges", "settings", "verdict"), [
    ({}, HERE, Settings(), COMPUTE),
    (QUEUE, HERE | {"kv_cache_usage_perc": 0.97}, Settings(), BLOCKS),
    (QUEUE, HERE | {"num_requests_running": 4.0}, KNOWN, SEQS),
    (QUEUE, HERE | {"iteration_tokens_total_count": 120.0, "iteration_tokens_total_sum": 6048.0}, KNOWN, BUDGET),
    (QUEUE, HERE, KNOWN, HEAD),
    ({}, HERE | {"num_preemptions_total": 30.0}, Settings(), THRASH),
    ({"before": 2.0}, HERE, Settings(), SUBMIT),
    ({"after": 2.0}, HERE, Settings(), CONSUME),
    ({}, {}, Settings(seconds=100), IDLE),
])  # fmt: skip
def test_metrics_told_apart(mean: dict[str, float], gauges: dict[str, float], settings: Settings, verdict: str) -> None:
    moments = {k: v for k, v in gauges.items() if k.startswith(("num_requests", "kv"))}  # at both moments
    assert verdict_of(after_some(0, {}, **moments), after_some(40, mean, **gauges), settings) == (verdict, ())


def test_metrics_long_gaps() -> None:
    family = "vllm:inter_token_latency_seconds"
    sums = {"inter_token_latency_seconds_count": 116.0, "inter_token_latency_seconds_sum": 14.0}
    before = with_buckets(after_some(0, {}, **HERE), family, {0.01: 0, 0.025: 16, 1.0: 0, inf: 0})
    for tail, verdict in (({0.025: 80, 1.0: 20}, STALL), ({0.025: 100, 1.0: 0}, COMPUTE)):
        text = after_some(40, {}, **(HERE | sums))
        after = with_buckets(text, family, {0.01: 0, 0.025: 16 + tail[0.025], 0.5: 0, 1.0: tail[1.0], inf: 0})
        before_too = with_buckets(after_some(0, {}, **HERE), family, {0.01: 0, 0.025: 16, 0.5: 0, 1.0: 0, inf: 0})
        assert verdict_of(before_too, after, Settings()) == (verdict, ())
    assert "no buckets" not in "".join(cannot_tell(*windows(parse(before)), Settings()))


def test_metrics_that_do_not_say() -> None:
    still = after_some(0, {})
    assert verdict_of(still, still, Settings()) == (IDLE, ())
    here = after_some(0, {}, **HERE)
    assert verdict_of(here, here, Settings()) == (NOT_SURE, (COMPUTE,))
    queue = after_some(40, QUEUE, **HERE)
    assert verdict_of(here, queue, Settings()) == (NOT_SURE, (BUDGET, SEQS, HEAD))
    assert verdict_of(here, queue, Settings(max_num_seqs=9)) == (NOT_SURE, (BUDGET, HEAD))
    (whole,) = windows(parse(REAL))
    assert any("one snapshot" in line for line in cannot_tell(whole, Settings()))


def test_two_engines() -> None:
    """Data parallel servers have their metrics by engine, and so are the verdicts."""
    second = [line.replace('engine="0"', 'engine="1"') for line in REAL.splitlines() if 'engine="0"' in line]
    both = parse(REAL + "\n".join(second) + "\n")
    assert [w.engine for w in windows(both)] == ["0", "1"]
    assert [line for line in report(both, None, Settings()) if line.startswith("engine ")] == ["engine 0", "engine 1"]


@pytest.mark.parametrize(("line", "words"), [
    ("vllm:num_requests_running", "no number"),
    ('vllm:num_requests_running{engine="0} 1', "pairs"),
    ("# TYPE vllm:num_requests_running gauge", "already"),
    ('vllm:num_requests_running{engine="0",model_name="tiny"} 2.0', "second time"),
    ('vllm:generation_tokens_total{engine="7",model_name="tiny"} -4', "counts"),
])  # fmt: skip
def test_bad_lines_are_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "metrics.txt"
    path.write_text(f"{REAL}{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=rf"metrics.txt, line {len(REAL.splitlines()) + 1}: .*{words}"):
        list(diagnose_files([path]))


def test_every_cut_is_noticed() -> None:
    """A text that ends in the middle of a line is refused; one that lacks lines lacks what is asked of it."""
    rng = random.Random(0)
    for cut in rng.sample(range(1, len(REAL)), 60):
        if REAL[cut - 1] != "\n":
            with pytest.raises(ValueError, match="metrics"):
                parse(REAL[:cut])
    for name in ("vllm:num_requests_running", "vllm:request_queue_time_seconds_sum", "vllm:num_preemptions_total"):
        less = "".join(line for line in REAL.splitlines(True) if not line.startswith(name + "{"))
        with pytest.raises(ValueError, match=name):
            list(report(parse(less), None, Settings()))


def test_wrong_files(tmp_path: Path) -> None:
    good, binary = tmp_path / "good.txt", tmp_path / "binary.txt"
    good.write_text(REAL, encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    later = tmp_path / "later.txt"
    later.write_text(after_some(3, {}), encoding="utf-8")
    assert list(diagnose_files([good, later], Settings(seconds=3)))
    for paths, settings, words in (
        ([later, good], Settings(), "wrong order"),
        ([binary], Settings(), "not a text"),
        ([good] * 3, Settings(), "3 files"),
        ([good], Settings(seconds=3), "there is one"),
        ([good, later], Settings(max_num_seqs=0), "max_num_seqs=0"),
        ([tmp_path / "run.jsonl", good], Settings(), "alone"),
    ):
        with pytest.raises(ValueError, match=words):
            list(diagnose_files(paths, settings))


def test_window_sums_labels() -> None:
    (window,) = windows(parse(REAL))
    assert isinstance(window, Window) and window.total("vllm:request_success_total") == 4
    assert window.total("vllm:request_success_total", finished_reason="stop") == 0
    assert window.total("vllm:prompt_tokens_by_source_total", source="local_compute") == 28
