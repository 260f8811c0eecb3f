"""The runner under a drunken scheduler: random chunks, pauses, preemptions and tiny pools, in step and a step ahead."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from walkvllm.attention import get_backend
from walkvllm.config import EngineArgs, VllmConfig
from walkvllm.input_batch import CachedRequestState, InputBatch, flatten
from walkvllm.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from walkvllm.model_runner import ModelRunner, allocate_kv_cache
from walkvllm.sampling_params import SamplingParams

LENGTHS = (1, 3, 7, 8, 9, 20, 33, 40)


def config(block_size: int = 8, num_blocks: int = 64) -> VllmConfig:
    return EngineArgs(dtype="float32", max_model_len=80, block_size=block_size, num_gpu_blocks_override=num_blocks,
                      max_num_seqs=5, attention_backend="cpu").create_engine_config()  # fmt: skip


def prompts(seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {f"r{i}": [rng.randrange(3, 2048) for _ in range(n)] for i, n in enumerate(LENGTHS)}


@dataclass
class Life:
    """What the drunken scheduler knows of a request."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0  # sampled, but nobody has told the scheduler yet
    status: str = "waiting"

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.outputs) + self.in_flight


class Drunkard:
    """Writes valid work orders in no sensible order."""

    def __init__(self, cfg: VllmConfig, lives: dict[str, Life], seed: int) -> None:
        self.rng, self.lives, self.finished = random.Random(seed), lives, set[str]()
        self.block_size, self.max_num_seqs = cfg.cache_config.block_size, cfg.scheduler_config.max_num_seqs
        self.free = list(range(1, cfg.cache_config.num_gpu_blocks))
        self.rng.shuffle(self.free)

    def grow(self, life: Life, tokens: int) -> list[int] | None:
        """The blocks that `life` needs for `tokens` more, or None if there are too few."""
        missing = max(0, -(-(life.computed + tokens) // self.block_size) - len(life.blocks))
        if missing > len(self.free):
            return None
        new = [self.free.pop() for _ in range(missing)]
        life.blocks += new
        return new

    def release(self, life: Life, status: str) -> None:
        self.free += life.blocks
        life.blocks, life.computed, life.status = [], 0, status

    def schedule(self) -> SchedulerOutput:
        so = SchedulerOutput([], CachedRequestData(), {}, 0, self.finished, set())
        self.finished = set()
        budget, order = self.rng.randint(1, 40), list(self.lives)
        self.rng.shuffle(order)
        for name in order:
            life = self.lives[name]
            enough = len(life.outputs) + life.in_flight == life.params.max_tokens
            if life.status == "done" or enough or self.rng.random() < 0.15:
                continue
            if life.status == "running" and self.rng.random() < 0.06:
                self.release(life, "preempted")
                so.preempted_req_ids.add(name)
            elif budget > 0:
                budget -= self.try_to_run(name, life, budget, so)
        so.total_num_scheduled_tokens = sum(so.num_scheduled_tokens.values())
        return so

    def try_to_run(self, name: str, life: Life, budget: int, so: SchedulerOutput) -> int:
        """Puts the request into the work order if it fits; returns the tokens that it takes."""
        if life.status != "running" and sum(x.status == "running" for x in self.lives.values()) >= self.max_num_seqs:
            return 0
        if life.status == "preempted" and life.in_flight:
            return 0  # its last token is not known yet, and all of them must be sent
        tokens = self.rng.randint(1, min(budget, life.known - life.computed))
        new_blocks = self.grow(life, tokens)
        if new_blocks is None:
            return 0
        cached = so.scheduled_cached_reqs
        if life.status == "waiting":
            so.scheduled_new_reqs.append(NewRequestData(name, life.prompt, life.params, new_blocks, 0))
        else:
            if life.status == "preempted":
                cached.resumed_req_ids.add(name)
                cached.all_token_ids[name] = life.prompt + life.outputs
            cached.req_ids.append(name)
            cached.new_block_ids.append(new_blocks)
            cached.num_computed_tokens.append(life.computed)
            cached.num_output_tokens.append(len(life.outputs) + life.in_flight)
        so.num_scheduled_tokens[name], life.status = tokens, "running"
        life.computed += tokens
        life.in_flight += life.computed == life.known
        return tokens

    def update(self, out: ModelRunnerOutput) -> None:
        for name, tokens in zip(out.req_ids, out.sampled_token_ids, strict=True):
            life = self.lives[name]
            life.outputs += tokens
            life.in_flight -= len(tokens)
            if tokens and len(life.outputs) == life.params.max_tokens:
                self.release(life, "done")
                self.finished.add(name)


Wanted = dict[str, tuple[list[int], SamplingParams]]


def run(cfg: VllmConfig, wanted: Wanted, seed: int, ahead: bool) -> dict[str, list[int]]:
    """The outputs of all requests; with `ahead`, each order is written before the last step's tokens are known."""
    lives = {name: Life(prompt, params) for name, (prompt, params) in wanted.items()}
    drunkard, runner, late = Drunkard(cfg, lives, seed), ModelRunner(cfg), list[ModelRunnerOutput]()
    for layer in runner.kv_caches:
        layer.fill_(torch.nan)
    for _ in range(2000):
        order = drunkard.schedule()
        runner.execute_model(order)
        late.append(runner.sample_tokens())
        assert sorted(late[-1].req_ids) == sorted(order.num_scheduled_tokens)
        while len(late) > ahead:
            drunkard.update(late.pop(0))
        if all(life.status == "done" for life in lives.values()) and not drunkard.finished:
            break
    assert runner.states == {} and runner.batch.num_reqs == 0
    assert sorted(drunkard.free) == list(range(1, cfg.cache_config.num_gpu_blocks))
    return {name: life.outputs for name, life in lives.items()}


@pytest.fixture(scope="module")
def truth() -> dict[str, list[int]]:
    """Greedy tokens of each prompt: one request, no chunks, and the whole sequence computed again for each token."""
    cfg = config()
    runner, spec, answers = ModelRunner(cfg), cfg.model_config.spec, {}
    for name, prompt in prompts().items():
        tokens = list(prompt)
        for _ in range(12):
            batch = InputBatch(1, 80, 8, spec.vocab_size)
            greedy, blocks = SamplingParams(temperature=0.0), list(range(1, 11))
            batch.add_request(CachedRequestState(name, greedy, tokens, len(prompt), blocks, 0))
            flat, kv = flatten(batch, [len(tokens)]), allocate_kv_cache(spec, 11, 8, torch.float32, "cpu")
            hidden = runner.model.forward(flat.input_ids, flat.positions, kv, flat.meta, get_backend("cpu"))
            tokens.append(int(runner.model.compute_logits(hidden[-1:]).argmax()))
        answers[name] = tokens[len(prompt) :]
    return answers


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("block_size", "num_blocks"), [(8, 64), (8, 12), (16, 7), (1, 90), (5, 30)])
def test_greedy_tokens_do_not_depend_on_the_schedule(
    truth: dict[str, list[int]], block_size: int, num_blocks: int, ahead: bool
) -> None:
    rng = random.Random(block_size)
    wanted = {n: (p, SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 12))) for n, p in prompts().items()}
    for seed in range(2):
        got = run(config(block_size, num_blocks), wanted, seed, ahead)
        assert got == {n: truth[n][: p.max_tokens] for n, (_, p) in wanted.items()}


@pytest.mark.parametrize("asked", [False, True])
def test_a_prompt_leaves_one_row_unless_somebody_asks_about_it(asked: bool) -> None:
    runner, cfg = ModelRunner(config()), config()
    params = SamplingParams(temperature=0.0, prompt_logprobs=1 if asked else None)
    new = [NewRequestData("a", [5, 6, 7], SamplingParams(temperature=0.0), [1], 0),
           NewRequestData("b", list(range(5, 25)), params, [2, 3, 4], 0)]  # fmt: skip
    order = SchedulerOutput(new, CachedRequestData(), {"a": 3, "b": 12}, 15, set(), set())
    runner.execute_model(order)  # b's prompt is not complete
    assert runner.last_hidden is not None and runner.last_logits is not None
    assert len(runner.last_hidden) == (15 if asked else 2) and len(runner.last_logits) == 2
    assert [len(ids) for ids in runner.sample_tokens().sampled_token_ids] == [1, 0]
    flat, backend = runner.last_batch, get_backend("naive")
    assert flat is not None
    kv = allocate_kv_cache(cfg.model_config.spec, 64, 8, torch.float32, "cpu")
    with torch.inference_mode():
        hidden = runner.model.forward(flat.input_ids, flat.positions, kv, flat.meta, backend)
        want = runner.model.compute_logits(hidden[[2, 14]])
    assert torch.allclose(runner.last_logits, want, atol=1e-3)
    for ours, theirs in zip(runner.kv_caches, kv, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    new = [NewRequestData("c", [5, 6, 7], SamplingParams(temperature=0.0), [5], 0)]
    runner.execute_model(SchedulerOutput(new, CachedRequestData(), {"c": 3}, 3, set(), set()))  # b waits
    assert runner.last_hidden is not None and len(runner.last_hidden) == 1


def test_seeded_tokens_do_not_depend_on_schedule_or_mates() -> None:
    def params(i: int) -> SamplingParams:
        return SamplingParams(temperature=0.9 + i % 2, top_k=(0, 50)[i % 2], top_p=(1.0, 0.9, 0.5)[i % 3],
                              seed=None if i % 4 == 3 else i, max_tokens=10)  # fmt: skip

    wanted = {n: (p, params(i)) for i, (n, p) in enumerate(prompts().items())}
    seeded = [n for n, (_, p) in wanted.items() if p.seed is not None]
    alone = {n: run(config(), {n: wanted[n]}, 0, False)[n] for n in seeded}
    for seed, ahead in ((0, False), (1, True), (2, True)):
        together = run(config(8, 14), wanted, seed, ahead)
        assert {n: together[n] for n in seeded} == alone
