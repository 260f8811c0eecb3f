"""Random walks over add, step, abort and reset: whatever happens, the books of the scheduler and the pool add up."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from walkvllm.config import CacheConfig, SchedulerConfig
from walkvllm.kv_cache import BlockHasher, Request, RequestStatus, check_blocks
from walkvllm.messages import ModelRunnerOutput, SchedulerOutput
from walkvllm.sampling_params import SamplingParams
from walkvllm.scheduler import AsyncScheduler, Scheduler

EXAMPLES = int(os.environ.get("WALKVLLM_EXAMPLES", "60"))  # make test-long raises it
EOS = 1


class SchedulerWalk(RuleBasedStateMachine):
    """One scheduler, requests that come and go, and a shadow of what every block holds.

    The shadow is the slow twin of the prefix cache: it writes down which tokens (with all those before them) were
    computed into each block, and compares whenever a request says that a block holds a part of it.
    """

    @initialize(
        block_size=st.integers(1, 6), blocks=st.integers(4, 24), budget=st.integers(1, 40), seqs=st.integers(1, 6),
        threshold=st.sampled_from([0, 0, 3, 7]), chunked=st.booleans(), caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]), gate=st.booleans(), pipelined=st.booleans(),
    )  # fmt: skip
    def start(
        self, block_size: int, blocks: int, budget: int, seqs: int, threshold: int, chunked: bool, caching: bool,
        policy: str, gate: bool, pipelined: bool,
    ) -> None:  # fmt: skip
        longest = (blocks - 1) * block_size  # as the settings page has it: no request outgrows the pool
        budget = budget if chunked else max(budget, longest)
        config = SchedulerConfig(budget, seqs, longest, threshold, chunked, policy, gate, pipelined)
        self.scheduler = (AsyncScheduler if pipelined else Scheduler)(
            config, CacheConfig(block_size, blocks, caching, "sha256")
        )
        self.block_size, self.pipelined = block_size, pipelined
        self.hasher = BlockHasher(block_size) if caching else None
        self.count = self.idle = 0
        self.flying: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.known: dict[str, list[int]] = {}  # the runner's tokens, ahead of the scheduler's while some are in flight
        self.tables: dict[str, list[int]] = {}  # the runner's block tables
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its last written slot
        self.stop_after: dict[str, int] = {}

    # ---- the outside world ----

    @precondition(lambda self: hasattr(self, "scheduler"))
    @rule(
        prefix=st.integers(0, 3), length=st.integers(1, 60), tokens=st.integers(1, 12), priority=st.integers(0, 3),
        eos_after=st.integers(1, 14), salt=st.sampled_from([None, None, "a"]),
    )  # fmt: skip
    def add(self, prefix: int, length: int, tokens: int, priority: int, eos_after: int, salt: str | None) -> None:
        length = min(length, self.scheduler.max_model_len - 1)
        if length < 1:
            return
        self.count += 1
        name = f"r{self.count}"
        # one of a few streams of tokens, so that starts are shared
        prompt = [10 + (prefix * 7 + i * i) % 50 for i in range(length)]
        params = SamplingParams(max_tokens=tokens, temperature=0, eos_token_id=EOS)
        self.scheduler.add_request(
            Request(name, prompt, params, float(self.count), priority, salt, block_hasher=self.hasher)
        )
        self.known[name] = [*prompt]
        self.stop_after[name] = len(prompt) + eos_after

    @precondition(lambda self: getattr(self, "known", None))
    @rule(which=st.integers(0, 100), twice=st.booleans())
    def abort(self, which: int, twice: bool) -> None:
        name = list(self.known)[which % len(self.known)]
        self.scheduler.finish_requests([name] * (1 + twice) + ["nobody"], RequestStatus.FINISHED_ABORTED)
        assert name not in self.scheduler.requests

    @precondition(lambda self: hasattr(self, "scheduler"))
    @rule()
    def reset(self) -> None:
        busy = bool(self.scheduler.kv_cache_manager.req_to_blocks)
        assert self.scheduler.kv_cache_manager.reset_prefix_cache() is not busy

    @precondition(lambda self: hasattr(self, "scheduler"))
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    # ---- one step, with a runner that keeps its own books ----

    def one_step(self) -> None:
        work = None
        if self.scheduler.has_requests():
            work = self.scheduler.schedule()
            self.check_limits(work)
            self.flying.append((work, self.compute(work)))
        empty = work is None or not work.total_num_scheduled_tokens
        if self.flying and (not self.pipelined or empty or len(self.flying) == 2):
            self.scheduler.update_from_output(*self.flying.pop(0))
        # nobody may wait for ever: a step without work, with requests and nothing in flight, must not happen twice
        self.idle = self.idle + 1 if empty and not self.flying and self.scheduler.requests else 0
        assert self.idle < 2, "the scheduler makes empty steps"

    def check_limits(self, work: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert work.total_num_scheduled_tokens == sum(work.num_scheduled_tokens.values())
        assert work.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert all(n > 0 for n in work.num_scheduled_tokens.values())
        assert len(self.scheduler.running) <= config.max_num_seqs
        if config.long_prefill_token_threshold:
            assert max(work.num_scheduled_tokens.values(), default=0) <= config.long_prefill_token_threshold

    def compute(self, work: SchedulerOutput) -> ModelRunnerOutput:
        "Writes the step's tokens into their blocks, reads the context, and makes a token for whoever is due one."
        start, cached = {}, work.scheduled_cached_reqs
        for new in work.scheduled_new_reqs:
            start[new.req_id], self.tables[new.req_id] = new.num_computed_tokens, list(new.block_ids)
        for i, name in enumerate(cached.req_ids):
            start[name] = cached.num_computed_tokens[i]
            if name in cached.resumed_req_ids:
                self.tables[name] = list(cached.new_block_ids[i])
                assert cached.all_token_ids[name] == self.known[name]
            else:
                self.tables[name] += cached.new_block_ids[i]
        for name, count in work.num_scheduled_tokens.items():  # all writes come before all reads
            for position in range(start[name], start[name] + count):
                block = self.tables[name][position // self.block_size]
                assert block != 0, "the null block is written"
                self.content[block] = tuple(self.known[name][: position + 1])
        sampled = []
        for name, count in work.num_scheduled_tokens.items():
            end = start[name] + count
            self.check_context(name, end)
            tokens = self.known[name]
            sampled.append([] if end < len(tokens) else [EOS if end + 1 >= self.stop_after[name] else 20 + end % 30])
            tokens += sampled[-1]
        return ModelRunnerOutput(list(work.num_scheduled_tokens), sampled)

    def check_context(self, name: str, end: int) -> None:
        "Every position that attention would read holds this request's own token, behind this request's own past."
        for i in range(-(-end // self.block_size)):
            last = min((i + 1) * self.block_size, end)
            held = self.content[self.tables[name][i]]
            assert held[:last] == tuple(self.known[name][:last]), f"{name}: block {i} holds somebody else's past"

    # ---- what must hold between any two actions ----

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def blocks_add_up(self) -> None:
        check_blocks(self.scheduler.kv_cache_manager)

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def every_request_is_in_one_place(self) -> None:
        running = [r.request_id for r in self.scheduler.running]
        waiting = [r.request_id for r in self.scheduler.waiting]
        assert sorted(running + waiting) == sorted(self.scheduler.requests)
        assert all(not r.is_finished for r in self.scheduler.requests.values())
        holders = set(self.scheduler.kv_cache_manager.req_to_blocks)
        assert holders == set(running), "somebody who does not run holds blocks, or somebody who runs holds none"

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def shared_blocks_are_named(self) -> None:
        kv = self.scheduler.kv_cache_manager
        names = {b: block.block_hash for b, block in enumerate(kv.block_pool.blocks)}
        for name, table in kv.req_to_blocks.items():
            hashes = self.scheduler.requests[name].block_hashes
            for i, block in enumerate(table):
                assert block.ref_cnt == 1 or block.block_hash is not None, "an unnamed block is shared"
                if block.block_hash is not None:
                    assert names[block.block_id] == hashes[i], "a block's name does not tell its content"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):  # every request ends
            if not self.scheduler.has_requests() and not self.flying:
                break
            self.one_step()
        assert not self.scheduler.requests and not self.scheduler.kv_cache_manager.req_to_blocks
        check_blocks(self.scheduler.kv_cache_manager)
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == (
            self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
        )


SchedulerWalk.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    derandomize=EXAMPLES == 60,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerWalk = SchedulerWalk.TestCase
