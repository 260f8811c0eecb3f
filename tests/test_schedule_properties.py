"""Random walks over add, step, abort and reset: whatever happens, the books of the scheduler and the pool add up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from walkvllm.config import CacheConfig, SchedulerConfig
from walkvllm.kv_cache import BlockHasher, KVCacheBlock, KVCacheManager, Request, RequestStatus, check_blocks
from walkvllm.messages import ModelRunnerOutput, SchedulerOutput
from walkvllm.sampling_params import SamplingParams
from walkvllm.scheduler import AsyncScheduler, Scheduler

EXAMPLES = int(os.environ.get("WALKVLLM_EXAMPLES", "200"))  # make test-long raises it
EOS, STOP = 1, 2
SEEN: Counter[str] = Counter()  # what the walks came across


class SchedulerWalk(RuleBasedStateMachine):
    """One scheduler, requests that come and go, and a shadow of what every block holds.

    The shadow is the slow twin of the prefix cache: it writes down which tokens (with all those before them) were
    computed into each block, and compares whenever a request says that a block holds a part of it.
    """

    @initialize(
        block_size=st.integers(1, 6), blocks=st.sampled_from([*range(4, 25)]), budget=st.sampled_from([*range(1, 41)]),
        seqs=st.sampled_from([4, 3, 2, 6, 8, 1]),
        threshold=st.sampled_from([0, 0, 3, 7]), chunked=st.booleans(), caching=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]), gate=st.booleans(), pipelined=st.booleans(),
        share=st.sampled_from([1, 1, 0.6]),
    )  # fmt: skip
    def start(
        self, block_size: int, blocks: int, budget: int, seqs: int, threshold: int, chunked: bool, caching: bool,
        policy: str, gate: bool, pipelined: bool, share: float,
    ) -> None:  # fmt: skip
        # as the settings page has it: one request alone never outgrows the pool, two together do
        longest = max(2, int((blocks - 1) * block_size * share))
        budget = budget if chunked else max(budget, longest)
        config = SchedulerConfig(budget, seqs, longest, threshold, chunked, policy, gate, pipelined)
        self.scheduler = (AsyncScheduler if pipelined else Scheduler)(
            config, CacheConfig(block_size, blocks, caching, "sha256")
        )
        self.block_size, self.pipelined = block_size, pipelined
        allocate = self.scheduler.kv_cache_manager.allocate_slots

        def watched(request: Request, num_new_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> object:
            blocks = allocate(request, num_new_tokens, hits)
            self.lacked = request if blocks is None else None
            return blocks

        self.scheduler.kv_cache_manager.allocate_slots = watched
        self.hasher = BlockHasher(block_size) if caching else None
        self.count = self.idle = 0
        self.flying: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
        self.known: dict[str, list[int]] = {}  # the runner's tokens, ahead of the scheduler's while some are in flight
        self.tables: dict[str, list[int]] = {}  # the runner's block tables
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its last written slot
        self.asked: dict[str, Request] = {}
        self.told: dict[str, list[int]] = {}
        self.stop_after: dict[str, tuple[int, int]] = {}  # from this length on the model makes this token

    # ---- the outside world ----

    @precondition(lambda self: hasattr(self, "scheduler"))
    @rule(
        prefix=st.integers(0, 3), length=st.sampled_from([*range(1, 40), 999, 999]), tokens=st.integers(1, 12),
        grows=st.booleans(), priority=st.integers(0, 2), tie=st.booleans(), end_after=st.integers(1, 14),
        end_with=st.sampled_from([EOS, STOP]), min_tokens=st.integers(0, 12), stops=st.booleans(),
        ignore_eos=st.booleans(), salt=st.sampled_from([None, None, "a"]), again=st.booleans(),
    )  # fmt: skip
    def add(
        self, prefix: int, length: int, tokens: int, grows: bool, priority: int, tie: bool, end_after: int,
        end_with: int, min_tokens: int, stops: bool, ignore_eos: bool, salt: str | None, again: bool,
    ) -> None:  # fmt: skip
        "`length` 999 fills the model's length; `grows` asks for all that is left of it; `again` takes a used id."
        limit = self.scheduler.max_model_len
        length = min(length, limit - 1)
        tokens = limit if grows else tokens
        self.count += 1
        gone = [n for n in self.asked if n not in self.scheduler.requests]
        name = gone[-1] if again and gone else f"{'zyx'[self.count % 3]}{self.count}"
        # one of a few streams of tokens, so that starts are shared
        prompt = [10 + (prefix * 7 + i * i) % 50 for i in range(length)]
        params = SamplingParams(
            max_tokens=tokens, temperature=0, eos_token_id=None if ignore_eos else EOS, ignore_eos=ignore_eos,
            stop_token_ids=[STOP] if stops else None, min_tokens=min(min_tokens, tokens, limit - length),
        )  # fmt: skip
        arrival = 0.0 if tie else float(self.count)
        request = Request(name, prompt, params, arrival, priority, salt, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        self.asked[name], self.told[name], self.known[name] = request, [], [*prompt]
        self.stop_after[name] = (length + end_after, end_with)

    @precondition(lambda self: getattr(self, "known", None))
    @rule(which=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def abort(self, which: list[int]) -> None:
        "Several in one call: running, waiting, ended, unknown, some of them twice."
        names = [list(self.known)[i % len(self.known)] for i in which]
        alive = [n for n in dict.fromkeys(names) if n in self.scheduler.requests]
        SEEN.update(f"aborted {self.asked[n].status.name}" for n in alive)
        ended = self.scheduler.finish_requests([*names, "nobody", *names], RequestStatus.FINISHED_ABORTED)
        assert ended == alive and not set(names) & set(self.scheduler.requests)

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
            self.lacked: Request | None = None
            work = self.scheduler.schedule()
            self.check_limits(work)
            SEEN["preempted"] += len(work.preempted_req_ids)
            SEEN["preempted itself"] += self.lacked is not None and self.lacked.request_id in work.preempted_req_ids
            SEEN[work.admission_stopped] += 1
            self.flying.append((work, self.compute(work)))
        empty = work is None or not work.total_num_scheduled_tokens
        if self.flying and (not self.pipelined or empty or len(self.flying) == 2):
            self.listen(*self.flying.pop(0))
        # nobody may wait for ever: a step without work, with requests and nothing in flight, must not happen twice
        self.idle = self.idle + 1 if empty and not self.flying and self.scheduler.requests else 0
        assert self.idle < 2, "the scheduler makes empty steps"

    def listen(self, work: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        "Books a step. What is told must be what the model made, up to the end that the request has asked for."
        for o in self.scheduler.update_from_output(work, sampled).outputs:
            request, told = self.asked[o.request_id], self.told[o.request_id]
            for token in o.new_token_ids:
                assert self.end_of(request, told) is None, "told more than was asked for"
                told.append(token)
            assert (o.finish_reason is None) == (self.end_of(request, told) is None)
            if o.finish_reason is not None:
                assert str(o.finish_reason) == self.end_of(request, told)
                SEEN[f"ended by {told[-1] if o.stop_reason or told[-1] == EOS else 'length'}"] += 1
            prompt = request.num_prompt_tokens
            assert told == self.known[o.request_id][prompt : prompt + len(told)]

    def end_of(self, request: Request, outputs: list[int]) -> str | None:
        "Why `request` ends with these outputs, or None: written down from the last token, as a user would."
        params, n = request.sampling_params, len(outputs)
        if n == 0 or n < params.min_tokens:
            return None
        if (outputs[-1] == EOS and not params.ignore_eos) or outputs[-1] in (params.stop_token_ids or ()):
            return "stop"
        full = request.num_prompt_tokens + n >= self.scheduler.max_model_len
        return "length" if full or n >= params.max_tokens else None

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
            tokens, (length, token) = self.known[name], self.stop_after[name]
            sampled.append([] if end < len(tokens) else [token if end + 1 >= length else 20 + end % 30])
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

    @precondition(lambda self: hasattr(self, "scheduler"))
    @invariant()
    def remembered_answers_are_right(self) -> None:
        "A remembered answer is what a fresh look says. The looks leave no trace, so that they hide nothing."
        scheduler, kv = self.scheduler, self.scheduler.kv_cache_manager
        before = kv.common, kv.held_up
        if scheduler.running and kv.enable_caching:
            table, holders = kv.req_to_blocks[scheduler.running[0].request_id], len(kv.req_to_blocks)
            fresh = next((i for i, block in enumerate(table) if block.ref_cnt != holders), len(table))
            assert kv.get_num_common_prefix_blocks(scheduler.running[0].request_id) == fresh
        for request in scheduler.waiting:
            if kv.still_held_up(request):
                SEEN["a refusal was repeated"] += 1
                assert not kv.can_fit_full_sequence(request, kv.get_computed_blocks(request))
                kv.held_up = before[1]
        kv.common, kv.held_up = before

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
    derandomize=EXAMPLES <= 200,
    suppress_health_check=list(HealthCheck),
)
TestSchedulerWalk = SchedulerWalk.TestCase


def test_the_walks_came_across_everything() -> None:
    "What the walks above are meant to try has happened in them; in a short run one situation may be missing."
    if not SEEN or EXAMPLES < 200:
        pytest.skip("no walk was made, or few")
    situations = [
        "preempted", "preempted itself", "a refusal was repeated", "blocks (the whole prompt does not fit)", "blocks",
        "token budget", "token budget (chunked prefill is off)", "max_num_seqs", "preemption", "aborted RUNNING",
        "aborted WAITING", "aborted PREEMPTED", "ended by length", f"ended by {EOS}", f"ended by {STOP}",
    ]  # fmt: skip
    rare = [s for s in situations if not SEEN[s]]
    assert len(rare) <= (1 if EXAMPLES < 1000 else 0), {s: SEEN[s] for s in situations}


def test_a_refusal_is_remembered_no_longer_than_it_holds() -> None:
    "Too few blocks: asked again when as many have come back as were lacking, or when more of it is in the cache."
    kv, hasher, params = KVCacheManager(8, 8, True, 64), BlockHasher(8), SamplingParams(max_tokens=8)

    def request(name: str, start: int, length: int) -> Request:
        return Request(name, range(start, start + length), params, block_hasher=hasher)

    def refused() -> bool:
        return not kv.can_fit_full_sequence(late, kv.get_computed_blocks(late)) and kv.still_held_up(late)

    holders = [request(f"r{i}", 1000 * i, 8) for i in range(5)]
    for holder in holders:
        kv.allocate_slots(holder, 8)
    late = request("late", 100, 32)  # needs four blocks; two are free
    assert refused() and not kv.still_held_up(request("another", 100, 32))
    kv.free(holders[0])
    assert kv.still_held_up(late)
    kv.free(holders[1])
    assert not kv.still_held_up(late)
    kv.allocate_slots(request("other", 200, 16), 16)
    assert refused()
    kv.allocate_slots(request("same start", 100, 9), 9)
    assert not kv.still_held_up(late)
    late.append_output_token_id(1)
    assert not kv.still_held_up(late)
    check_blocks(kv)


@pytest.mark.parametrize("names", ["ab", "ba", "abc", "cab", "bca", "cba"])
@pytest.mark.parametrize("blocks", [4, 5])
def test_requests_equal_in_everything_end(names: str, blocks: int) -> None:
    "Equal in priority and arrival, too big for the pool together: whoever has the first name is never the victim."
    scheduler = Scheduler(
        SchedulerConfig(16, 8, 12, 4, True, "priority", False, False), CacheConfig(4, blocks, False, "sha256")
    )
    for step in range(300):
        if step < len(names):  # one after the other, so that the admissions are not in the names' order
            scheduler.add_request(Request(names[step], range(3), SamplingParams(max_tokens=9), arrival_time=0.0))
        elif not scheduler.requests:
            return
        work = scheduler.schedule()
        req_ids = list(work.num_scheduled_tokens)
        tokens = [[] if scheduler.requests[r].is_prefill_chunk else [7] for r in req_ids]
        scheduler.update_from_output(work, ModelRunnerOutput(req_ids, tokens))
    pytest.fail(f"{', '.join(scheduler.requests)} throw each other out for ever")


def test_a_victim_finds_only_what_was_written() -> None:
    "A victim whose grant is taken back leaves no names on blocks that the grant was to fill (page 07)."
    scheduler = Scheduler(
        SchedulerConfig(32, 8, 128, 16, True, "priority", True, False), CacheConfig(8, 11, True, "sha256")
    )
    hasher = BlockHasher(8)

    def add(name: str, prompt: range, tokens: int, priority: int) -> None:
        params = SamplingParams(max_tokens=tokens)
        scheduler.add_request(Request(name, prompt, params, 0.0, priority, block_hasher=hasher))

    def step() -> SchedulerOutput:
        work = scheduler.schedule()
        due = [scheduler.requests[i] for i in work.num_scheduled_tokens]
        sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in due]
        scheduler.update_from_output(work, ModelRunnerOutput(list(work.num_scheduled_tokens), sampled))
        check_blocks(scheduler.kv_cache_manager)
        return work

    add("low", range(64), 50, 9)
    step()
    add("high", range(100, 115), 4, 0)
    works = [step() for _ in range(5)]
    assert works[2].preempted_req_ids == {"low"}  # with 48 tokens written, and 16 granted
    assert works[-1].scheduled_cached_reqs.num_computed_tokens == [48]
