"""What vLLM 0.22.0's own scheduler and block pool decide for a workload, step by step.

    PYTHONPATH=tools .oracle/bin/python -m oracle.vllm_trace WORKLOAD.json [--free-queue] [--tables] [--hashes]

Workloads and lines have the format of `python -m walkvllm trace-schedule`, which page 07b explains. A file may hold one
workload or a list of them; - is standard input. The scheduler, the KV cache manager and the pool are vLLM's; the model
is a hash of (request, position), so that nothing has to be loaded.
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # resumed requests stay apart from new ones
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",  # vLLM then starts its chains of hashes from a fixed value
}

import torch
from msgspec.structs import asdict
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from walkvllm.schedule_trace import next_token, read_workload

Line = dict[str, Any]
init_none_hash(sha256)


# ---- a scheduler without a model ----


@functools.lru_cache(maxsize=64)
def model_config(vocab_size: int, max_model_len: int) -> ModelConfig:
    "vLLM's description of a model that does not exist; only its length and vocabulary matter."
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64,
        "vocab_size": vocab_size, "max_position_embeddings": max_model_len, "torch_dtype": "float32",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(described))
        return ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len
        )


def vllm_config(cfg: dict[str, Any]) -> VllmConfig:
    "vLLM's settings for a workload. Built with harmless numbers first: what vLLM's checks refuse can be tried too."
    names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "long_prefill_token_threshold",
             "enable_chunked_prefill", "policy", "scheduler_reserve_full_isl", "async_scheduling")  # fmt: skip
    length = cfg["max_model_len"]
    harmless = {"max_num_batched_tokens": 1 << 20, "max_num_seqs": 8, "long_prefill_token_threshold": 0}
    config = VllmConfig(
        model_config=model_config(cfg["vocab_size"], length),
        scheduler_config=SchedulerConfig(
            max_model_len=length, is_encoder_decoder=False, async_scheduling=cfg["async_scheduling"], **harmless
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=cfg["enable_prefix_caching"]),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
    )
    for name in names:
        setattr(config.scheduler_config, name, cfg[name])
    config.scheduler_config.max_num_scheduled_tokens = None  # then it is max_num_batched_tokens
    for name in ("block_size", "enable_prefix_caching", "num_gpu_blocks"):
        setattr(config.cache_config, name, cfg[name])
    return config


def make_scheduler(cfg: dict[str, Any]) -> Any:
    "vLLM's Scheduler or AsyncScheduler, over a pool of `num_gpu_blocks` blocks of one full-attention layer."
    config, blocks = vllm_config(cfg), cfg["num_gpu_blocks"]
    layer = FullAttentionSpec(block_size=cfg["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    pool = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[KVCacheTensor(size=layer.page_size_bytes * blocks, shared_by=["layer"])],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=pool,
        structured_output_manager=StructuredOutputManager(config),
        block_size=cfg["block_size"],
        log_stats=False,
    )


def make_request(cfg: dict[str, Any], index: int, spec: dict[str, Any], hasher: Any) -> Request:
    "The request that a workload lists at `index`, as vLLM's input processor would hand it to the scheduler."
    params = SamplingParams(
        temperature=0.0,
        max_tokens=spec["max_tokens"],
        min_tokens=spec.get("min_tokens", 0),
        ignore_eos=spec.get("ignore_eos", False),
        stop_token_ids=spec.get("stop_token_ids"),
        skip_reading_prefix_cache=spec.get("skip_reading_prefix_cache"),
    )
    if cfg["eos_token_id"] is not None:
        params.update_from_generation_config({}, cfg["eos_token_id"])
    return Request(
        request_id=spec["id"],
        prompt_token_ids=list(spec["prompt_token_ids"]),
        sampling_params=params,
        pooling_params=None,
        arrival_time=spec.get("arrival_time", spec.get("arrival_step", 0) + index * 1e-6),
        priority=spec.get("priority", 0),
        cache_salt=spec.get("cache_salt"),
        block_hasher=hasher,
    )


# ---- what it says, as lines ----


def ids_of(groups: Any) -> list[int]:
    "The block ids of the only KV group."
    return [] if groups is None else list(groups[0])


def describe(out: Any) -> Line:
    "A SchedulerOutput."
    cached = out.scheduled_cached_reqs
    line: Line = {"scheduled": [list(pair) for pair in out.num_scheduled_tokens.items()]}
    line |= {"new": [], "resumed": [], "running": []}
    for r in out.scheduled_new_reqs:
        entry = {"id": r.req_id, "num_computed_tokens": r.num_computed_tokens, "block_ids": ids_of(r.block_ids)}
        line["new"].append(entry)
    for request_id, computed, groups in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        resumed = request_id in cached.resumed_req_ids
        entry = {"id": request_id, "num_computed_tokens": computed}
        line["resumed" if resumed else "running"].append(
            entry | {"block_ids" if resumed else "new_block_ids": ids_of(groups)}
        )
    line["preempted"] = sorted(out.preempted_req_ids or ())
    line["finished_before"] = sorted(out.finished_req_ids)
    line["common_prefix_blocks"] = list(out.num_common_prefix_blocks)
    return line


def describe_state(scheduler: Any, free_queue: bool, tables: bool, hashes: bool) -> Line:
    "Queues and pool after a step."
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    line: Line = {
        "running_ids": [r.request_id for r in scheduler.running],
        "waiting_ids": [r.request_id for r in scheduler.waiting],
        "skipped_waiting_ids": [r.request_id for r in scheduler.skipped_waiting],
        "free_blocks": pool.get_num_free_blocks(),
    }
    if free_queue:
        line["free_queue"] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    if tables:
        line["tables"] = {r.request_id: ids_of(manager.get_block_ids(r.request_id)) for r in scheduler.running}
    if hashes:
        line["hashes"] = {request_id: len(r.block_hashes) for request_id, r in scheduler.requests.items()}
        line["cached"] = len(pool.cached_block_hash_to_block)
    return line


# ---- the loop ----


class VllmTrace:
    "Drives vLLM's scheduler through one workload."

    def __init__(self, workload: dict[str, Any], **show: bool) -> None:
        self.cfg = asdict(read_workload(workload).config)
        self.specs, self.max_steps, self.show = workload["requests"], workload.get("max_steps", 10000), show
        self.scheduler = make_scheduler(self.cfg)
        self.hasher = get_request_block_hasher(self.cfg["block_size"], sha256)
        self.requests: dict[str, Request] = {}
        self.produced = {r["id"]: len(r["prompt_token_ids"]) for r in self.specs}  # what the model knows by now
        self.key = {r["id"]: r.get("token_key", r["id"]) for r in self.specs}
        self.tokens: dict[str, list[int]] = {r["id"]: [] for r in self.specs}
        self.reasons: dict[str, str] = {}
        self.in_flight: deque[tuple[int, Any, ModelRunnerOutput]] = deque()

    def run_model(self, out: Any) -> ModelRunnerOutput:
        "One token for each request whose last known token is computed in this step, none for the others."
        cached = out.scheduled_cached_reqs
        start = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        start |= {r.req_id: r.num_computed_tokens for r in out.scheduled_new_reqs}
        ids = list(out.num_scheduled_tokens)
        sampled: list[list[int]] = [[] for _ in ids]
        for request_id, tokens in zip(ids, sampled, strict=True):
            end = start[request_id] + out.num_scheduled_tokens[request_id]
            if end >= self.produced[request_id]:
                tokens.append(next_token(self.key[request_id], end, self.cfg["vocab_size"]))
                self.produced[request_id] += 1
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=sampled
        )

    def book(self, out: Any, sampled: ModelRunnerOutput) -> Line:
        "Gives the scheduler the tokens of a step. Returns what it passes on."
        line: Line = {"sampled": dict(zip(sampled.req_ids, sampled.sampled_token_ids, strict=True))}
        line |= {"emitted": {}, "finished": {}}
        for per_client in self.scheduler.update_from_output(out, sampled).values():
            for o in per_client.outputs:
                line["emitted"][o.request_id] = list(o.new_token_ids)
                self.tokens[o.request_id] += o.new_token_ids
                if o.finish_reason is not None:
                    line["finished"][o.request_id] = self.reasons[o.request_id] = str(o.finish_reason)
        return line

    def arrive_and_abort(self, todo: deque[tuple[int, dict[str, Any]]], step: int) -> Line:
        "Adds and aborts what is due."
        line: Line = {"step": step, "arrived": [], "aborted": []}
        while todo and todo[0][1].get("arrival_step", 0) <= step:
            index, spec = todo.popleft()
            request = self.requests[spec["id"]] = make_request(self.cfg, index, spec, self.hasher)
            self.scheduler.add_request(request)
            line["arrived"].append(spec["id"])
        due = [spec["id"] for spec in self.specs if spec.get("abort_step") == step]
        line["aborted"] = [request_id for request_id in due if request_id in self.scheduler.requests]
        for request_id in line["aborted"]:  # one by one: given many, vLLM ends them in the order of a set of strings
            self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
            self.reasons[request_id] = "abort"
        return line

    def one_step(self, step: int) -> tuple[Line, bool]:
        "Schedules, and books this batch or, when pipelined, the one before. Says too whether nothing was left to do."
        line: Line = {}
        pipelined, tokens = self.cfg["async_scheduling"], 0
        if self.scheduler.has_requests():
            out = self.scheduler.schedule()
            tokens = out.total_num_scheduled_tokens
            line = describe(out)
            self.in_flight.append((step, out, self.run_model(out)))
        if self.in_flight and (not pipelined or not tokens or len(self.in_flight) == 2):
            number, out, sampled = self.in_flight.popleft()
            line |= ({"output_of": number} if pipelined else {}) | self.book(out, sampled)
        return line | describe_state(self.scheduler, **self.show), not tokens and not self.in_flight

    def lines(self) -> Iterator[Line]:
        "The configuration, a line per step, and a summary. Ends early if three steps in a row do nothing."
        yield {"config": self.cfg}
        todo = deque(sorted(enumerate(self.specs), key=lambda p: (p[1].get("arrival_step", 0), p[0])))
        last_abort = max((spec.get("abort_step") or 0 for spec in self.specs), default=0)
        step = empty = 0
        while step < self.max_steps and empty < 3:
            line = self.arrive_and_abort(todo, step)
            if self.scheduler.has_requests() or self.in_flight:
                more, nothing = self.one_step(step)
                yield line | more
                stuck = nothing and self.scheduler.has_unfinished_requests()
                empty = empty + 1 if stuck else 0
                if empty >= 3 and (todo or last_abort > step):
                    empty = 2  # somebody may still come or go
            elif todo:
                yield {"step": step, "idle": True}
            else:
                break
            step += empty < 3
        preemptions = {request_id: r.num_preemptions for request_id, r in self.requests.items()}
        summary = {"steps": step, "stalled": empty >= 3, "tokens": self.tokens, "finish_reasons": self.reasons}
        yield {"summary": summary | {"num_preemptions": preemptions}}


def main() -> None:
    parser = argparse.ArgumentParser(description="What vLLM's own scheduler decides for a workload.")
    parser.add_argument("workload", help="a JSON file with one workload or a list of them; - is standard input")
    for name in ("free-queue", "tables", "hashes"):
        parser.add_argument(f"--{name}", action="store_true")
    args = vars(parser.parse_args())
    source = args.pop("workload")
    loaded = json.loads(sys.stdin.read() if source == "-" else Path(source).read_text())
    for workload in loaded if isinstance(loaded, list) else [loaded]:
        for line in VllmTrace(workload, **args).lines():
            print(json.dumps(line, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
