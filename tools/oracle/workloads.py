"""Random workloads of many kinds, for comparing schedulers: small pools and budgets, where decisions differ first.

    PYTHONPATH=tools python -m oracle.workloads COUNT [--seed SEED] [--kind KIND]      (a JSON list on standard output)

A workload depends on its seed and number alone. Its kind says what it is about; pipelined steps and the priority policy
come up in all kinds.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    "From what a workload is drawn: ranges with both ends, lists to choose from, probabilities."

    block_size: tuple[int, ...] = (1, 2, 3, 4, 8, 16)
    longest: tuple[int, ...] = (24, 48, 96)  # max_model_len
    pool: tuple[float, float] = (1.0, 3.0)  # usable blocks, in requests of max_model_len
    budget: tuple[int, ...] = (5, 8, 16, 32, 64)  # max_num_batched_tokens
    seats: tuple[int, int] = (1, 6)  # max_num_seqs
    threshold: tuple[int, ...] = (0, 0, 4, 7)  # long_prefill_token_threshold
    caching: float = 0.7
    whole_prompts: float = 0.1  # enable_chunked_prefill=False
    no_gate: float = 0.3  # scheduler_reserve_full_isl=False
    priority: float = 0.35
    pipelined: float = 0.4
    requests: tuple[int, int] = (1, 10)
    pause: tuple[int, ...] = (0, 0, 1, 2, 5)  # steps between arrivals
    prompt: tuple[float, float] = (0.01, 0.9)  # length, in max_model_len
    answer: tuple[float, float] = (0.01, 1.0)  # max_tokens, in what is left then
    over: float = 0.0  # a max_tokens that goes beyond max_model_len
    shared: float = 0.5  # starts like others
    exact: float = 0.2  # shared part and prompt are whole blocks
    same_tokens: float = 0.2  # its answer is that of others with the same prompt
    abort: float = 0.12
    abort_after: tuple[int, int] = (-1, 12)  # steps after its arrival; -1 is too early to count
    vocab: tuple[int, ...] = (50, 1000)
    eos: float = 0.4  # the workload has an EOS id
    stop_ids: float = 0.2
    min_tokens: float = 0.2
    ignore_eos: float = 0.2
    salt: float = 0.1
    skip_reading: float = 0.05
    own_arrival_time: float = 0.1  # not in the order of arrival, with ties


KINDS = {
    "plain": Kind(priority=0.0, pipelined=0.0),
    "pipelined": Kind(priority=0.0, pipelined=1.0),
    "priority": Kind(priority=1.0, pool=(1.0, 1.6), requests=(4, 12), own_arrival_time=0.4, seats=(2, 8)),
    "tight pool": Kind(pool=(1.0, 1.3), requests=(4, 12), prompt=(0.05, 0.4), no_gate=0.5, seats=(3, 8)),
    "tiny pool": Kind(pool=(0.2, 1.0), longest=(8, 16, 32), block_size=(1, 2, 3, 4), prompt=(0.05, 1.0)),
    "shared starts": Kind(shared=0.95, exact=0.6, caching=1.0, same_tokens=0.6, requests=(4, 14), pool=(1.0, 2.0)),
    "evictions": Kind(shared=0.8, exact=0.4, caching=1.0, requests=(8, 20), pool=(1.0, 1.2), pause=(1, 3, 6, 10),
                      answer=(0.01, 0.3), seats=(1, 3)),
    "aborts": Kind(abort=0.7, requests=(3, 12), pool=(1.0, 1.8)),
    "ends": Kind(vocab=(6, 12, 20), eos=0.8, stop_ids=0.6, min_tokens=0.6, ignore_eos=0.4),
    "thresholds": Kind(threshold=(1, 2, 3, 5, 8, 13, 40), prompt=(0.3, 0.95)),
    "whole prompts": Kind(whole_prompts=1.0, budget=(16, 32, 64, 96), prompt=(0.01, 0.6)),
    "no gate": Kind(no_gate=1.0, pool=(1.0, 1.4), threshold=(0,), prompt=(0.3, 0.9), requests=(3, 10)),
    "salts": Kind(salt=0.6, skip_reading=0.3, shared=0.9, caching=1.0, exact=0.5, requests=(3, 12)),
    "length limit": Kind(over=0.6, longest=(8, 17, 32, 48), prompt=(0.3, 1.0), eos=0.1),
    "few seats": Kind(seats=(1, 2), requests=(5, 14), answer=(0.01, 0.3), pause=(0, 0, 0, 1)),
    "small budget": Kind(budget=(1, 2, 3, 4), seats=(1, 8), longest=(16, 24, 32), requests=(3, 9)),
    "too large": Kind(pool=(0.3, 0.9), prompt=(0.2, 0.98), over=0.2, no_gate=0.5, abort=0.3, abort_after=(0, 60)),
    "crowd": Kind(requests=(25, 60), seats=(6, 32), budget=(32, 64, 128, 256), longest=(64, 128), pool=(1.5, 6.0),
                  prompt=(0.02, 0.5), answer=(0.02, 0.4), pause=(0, 0, 0, 0, 1, 3)),
    "edges": Kind(block_size=(1, 2, 16), longest=(4, 6, 9, 16), pool=(1.0, 1.6), budget=(1, 2, 3, 5, 16), seats=(1, 2),
                  threshold=(0, 1, 2, 3), whole_prompts=0.5, no_gate=0.5, priority=0.5, requests=(2, 9), over=0.4,
                  prompt=(0.01, 1.0), exact=0.5, same_tokens=0.5, abort=0.5, abort_after=(0, 8), vocab=(3, 6), eos=0.8,
                  stop_ids=0.5, min_tokens=0.5, salt=0.3, skip_reading=0.2, own_arrival_time=0.6),
    "anything": Kind(whole_prompts=0.3, no_gate=0.5, pool=(0.5, 2.0), over=0.15, abort=0.3, salt=0.25, skip_reading=0.2,
                     requests=(2, 16), exact=0.4, vocab=(10, 50, 1000), budget=(2, 5, 9, 17, 33, 64)),
}  # fmt: skip
LONGEST_RUN = 400  # steps: a request that outgrows the pool can throw itself out and come back for ever


def make_config(rng: random.Random, kind: Kind) -> Config:
    "The settings of a workload."
    block, longest, vocab = rng.choice(kind.block_size), rng.choice(kind.longest), rng.choice(kind.vocab)
    usable = max(1, round(-(-longest // block) * rng.uniform(*kind.pool)))
    return {
        "block_size": block,
        "num_gpu_blocks": usable + 1,
        "max_num_batched_tokens": rng.choice(kind.budget),
        "max_num_seqs": rng.randint(*kind.seats),
        "long_prefill_token_threshold": rng.choice(kind.threshold),
        "enable_prefix_caching": rng.random() < kind.caching,
        "enable_chunked_prefill": rng.random() >= kind.whole_prompts,
        "policy": "priority" if rng.random() < kind.priority else "fcfs",
        "max_model_len": longest,
        "scheduler_reserve_full_isl": rng.random() >= kind.no_gate,
        "async_scheduling": rng.random() < kind.pipelined,
        "vocab_size": vocab,
        "eos_token_id": rng.randrange(vocab) if rng.random() < kind.eos else None,
    }


def make_prompt(rng: random.Random, kind: Kind, config: Config, stems: list[list[int]]) -> list[int]:
    "Token ids, from 1 to `max_model_len` - 1 of them; the start may be a part of one of the `stems`."
    block, limit = config["block_size"], config["max_model_len"] - 1
    length = round(config["max_model_len"] * rng.uniform(*kind.prompt))
    if rng.random() < kind.exact:
        length = max(block, length // block * block)
    length = min(max(length, 1), limit)
    shared = rng.randint(0, length) if rng.random() < kind.shared else 0
    if shared and rng.random() < kind.exact:
        shared = min(length, -(-shared // block) * block)
    return rng.choice(stems)[:shared] + [rng.randrange(config["vocab_size"]) for _ in range(length - shared)]


def make_request(rng: random.Random, kind: Kind, config: Config, prompt: list[int], step: int) -> dict[str, Any]:
    "What one request asks for, without its name."
    left = config["max_model_len"] - len(prompt)
    max_tokens = max(1, round(left * rng.uniform(*kind.answer)))
    if rng.random() < kind.over:
        max_tokens = left + rng.randint(1, config["max_model_len"])
    request: dict[str, Any] = {"arrival_step": step, "prompt_token_ids": prompt, "max_tokens": max_tokens}
    if config["policy"] == "priority":
        request["priority"] = rng.randint(-1, 2)
    if rng.random() < kind.own_arrival_time:
        request["arrival_time"] = float(rng.randint(0, 3))
    if rng.random() < kind.abort:
        request["abort_step"] = max(0, step + rng.randint(*kind.abort_after))
    if rng.random() < kind.stop_ids:
        request["stop_token_ids"] = [rng.randrange(config["vocab_size"]) for _ in range(rng.randint(1, 3))]
    if rng.random() < kind.min_tokens:
        request["min_tokens"] = rng.randint(0, min(max_tokens, left))  # with more than `left` nothing can end it
    if rng.random() < kind.ignore_eos:
        request["ignore_eos"] = True
    if rng.random() < kind.same_tokens:
        request["token_key"] = "same"
    if rng.random() < kind.salt:
        request["cache_salt"] = rng.choice(["red", "blue"])
    if rng.random() < kind.skip_reading:
        request["skip_reading_prefix_cache"] = True
    return request


def make_workload(kind_name: str, seed: int, number: int) -> dict[str, Any]:
    "The workload of this kind, seed and number."
    rng, kind = random.Random(f"{kind_name}/{seed}/{number}"), KINDS[kind_name]
    config = make_config(rng, kind)
    stems = [[rng.randrange(config["vocab_size"]) for _ in range(config["max_model_len"])] for _ in range(2)]
    count = rng.randint(*kind.requests)
    names = [f"r{i}" for i in range(count)]
    if rng.random() < 0.3:
        rng.shuffle(names)  # a name decides between equals
    requests, step = [], 0
    for name in names:
        step += rng.choice(kind.pause)
        prompt = make_prompt(rng, kind, config, stems)
        requests.append({"id": name} | make_request(rng, kind, config, prompt, step))
    return {"config": config, "requests": requests, "max_steps": LONGEST_RUN}


def make_workloads(count: int, seed: int, kinds: list[str]) -> list[tuple[str, dict[str, Any]]]:
    "`count` workloads with the names of their kinds, all kinds in turn."
    return [(kinds[i % len(kinds)], make_workload(kinds[i % len(kinds)], seed, i // len(kinds))) for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Random workloads for schedulers, as a JSON list.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=KINDS, help="can be given several times; default: all")
    args = parser.parse_args()
    print(json.dumps([w for _, w in make_workloads(args.count, args.seed, args.kind or list(KINDS))]))


if __name__ == "__main__":
    main()
