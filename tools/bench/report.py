"""From the answers of the peers to rows: medians over rounds, ratios within a round, and lines for whoever waits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

Answer = dict[str, Any]
Times = list[dict[str, float]]  # one for each round: seconds, prefill, decode, and the four latencies


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def middle(answers: list[Answer]) -> Answer:
    """The answer of median duration."""
    return sorted(answers, key=lambda a: a["seconds"])[len(answers) // 2]


def of_round(answer: Answer, requests: list[dict[str, Any]]) -> dict[str, float]:
    """One run in numbers. Prefill ends when the last request has its first token; decode is what follows. Seconds."""
    first = [times[0] - r.get("arrival", 0.0) for times, r in zip(answer["times"], requests, strict=True)]
    gaps = [b - a for times in answer["times"] for a, b in zip(times, times[1:])]
    prefill = answer.get("prefill") or max(times[0] for times in answer["times"])
    return {
        "seconds": answer["seconds"], "prefill": prefill, "decode": answer["seconds"] - prefill,
        "cpu": answer.get("cpu_seconds", 0.0),
        "ttft": statistics.median(first), "ttft_p99": quantile(first, 0.99),
        "itl": statistics.median(gaps) if gaps else 0.0, "itl_p99": quantile(gaps, 0.99),
    }  # fmt: skip


def three(values: Iterable[float]) -> list[float]:
    """Median, smallest and largest."""
    found = list(values)
    return [round(f(found), 3) for f in (statistics.median, min, max)]


def ratios(ours: Times, theirs: Times, arrivals: bool) -> dict[str, list[float]]:
    """How many times faster ours is, for the whole and its parts: the other's time by ours, round by round."""
    parts = ["seconds"] if arrivals else ["seconds", "prefill", "decode"]
    return {{"seconds": "all"}.get(part, part): three(b[part] / a[part] for a, b in zip(ours, theirs) if a[part] > 0)
            for part in parts}  # fmt: skip


def row(work: dict[str, Any], times: Times, ours: Times) -> dict[str, Any]:
    """A peer's row, without what does not come from its times."""
    tokens = sum(r["max_tokens"] for r in work["requests"])
    arrivals = any("arrival" in r for r in work["requests"])

    def ms(key: str) -> float:
        return round(1000 * statistics.median(t[key] for t in times), 3)

    made = {
        "output_tokens_per_s": round(tokens / statistics.median(t["seconds"] for t in times), 1),
        "seconds": [round(t["seconds"], 4) for t in times],
        "cpu_seconds": round(statistics.median(t["cpu"] for t in times), 3),
        "ttft_ms": ms("ttft"), "ttft_p99_ms": ms("ttft_p99"), "itl_ms": ms("itl"), "itl_p99_ms": ms("itl_p99"),
        "ratio": ratios(ours, times, arrivals),
    }  # fmt: skip
    if not arrivals:
        made["prefill_ms"], made["decode_ms"] = ms("prefill"), ms("decode")
    return made


def add_gains(runs: list[dict[str, Any]]) -> None:
    """To the rows with prefix caching on: how much longer the same round took without it."""
    for on in runs:
        if on["workload"] == "e" and on["prefix_caching"]:
            off = next(r for r in runs if r["id"] == "e-off" and r["tunables"] == on["tunables"])
            for name, mine in on["peers"].items():
                if name == "transformers":
                    continue  # nothing is shared here
                slow = off["peers"].get(name, {}).get("seconds")
                if slow and "seconds" in mine:
                    mine["gain"] = three(b / a for a, b in zip(mine["seconds"], slow))


def show(run: dict[str, Any], say: Callable[[str], None]) -> None:
    """A run as lines of text."""
    caching = "" if "prefix_caching" not in run else f", prefix caching {'on' if run['prefix_caching'] else 'off'}"
    say(f"\n{run['workload']}, batch {run['batch']}{caching}, {'with' if run['tunables'] else 'no'} malloc tunables"
        f" ({run['name']})")  # fmt: skip
    for name, mine in run["peers"].items():
        if "error" in mine:
            say(f"  {name:24} {mine['error']}")
            continue
        ratio = "  ".join(f"{what} {m} ({low} to {high})" for what, (m, low, high) in mine["ratio"].items())
        gain = f"  gain {mine['gain'][0]}" if "gain" in mine else ""
        ways = "  " + ", ".join(f"{k} {v}" for k, v in mine["ways"].items()) if "ways" in mine else ""
        say(f"  {name:24}{mine['output_tokens_per_s']:9.1f} tokens/s  first {mine['ttft_ms']:8.1f} ms  next"
            f" {mine['itl_ms']:7.2f} ms (p99 {mine['itl_p99_ms']:.1f})  {mine['peak_mb']:5} MB  "
            f"ours faster by: {ratio}{gain}{ways}")  # fmt: skip
