"""Each rule of the scheduler and the pool, broken one at a time in a copy of the project: some test must turn red."""

# ruff: noqa: E501

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
RULES: dict[str, tuple[str, str, str]] = {  # what is broken: module, the line as it is, the line as it must not be
    "eviction forgets the name": ("kv_cache", "            self.forget_name(block)\n            block.ref_cnt = 1", "            block.ref_cnt = 1"),
    "one token is left to compute": ("kv_cache", "(request.num_tokens - 1) // self.block_size]", "request.num_tokens // self.block_size]"),
    "a hit leaves the free queue": ("kv_cache", "            if block.ref_cnt == 0:\n                self.free_block_queue.remove(block)\n", ""),
    "tokens in flight are not named": ("kv_cache", "min(num_tokens, request.num_tokens))", "num_tokens)"),
    "names are chained": ("kv_cache", "parent = hashes[-1] if hashes else NONE_HASH", "parent = NONE_HASH"),
    "the salt is part of the name": ("kv_cache", '(request.cache_salt or "").encode()', 'b""'),
    "free hits count as needed": ("kv_cache", " + sum(hit.ref_cnt == 0 for hit in hits)", ""),
    "the last block goes first": ("kv_cache", "reversed(self.req_to_blocks.pop", "list(self.req_to_blocks.pop"),
    "a freed block keeps its name": ("kv_cache", "            if block.ref_cnt == 0:\n                self.free_block_queue.append(block)", "            if block.ref_cnt == 0:\n                self.forget_name(block)\n                self.free_block_queue.append(block)"),
    "new blocks come from the head": ("kv_cache", "        block = self.head.next_free\n        if", "        block = self.tail.prev_free\n        if"),
    "a hit is the first of its name": ("kv_cache", "return next(iter(found.values())) if found", "return next(reversed(found.values())) if found"),
    "the null block is set aside": ("kv_cache", "self.null_block = self.free_block_queue.popleft()", "self.null_block = self.free_block_queue.tail.prev_free"),
    "a refusal ends when blocks come back": ("kv_cache", "return not found and pool.num_returned < last.num_returned", "return not found"),
    "a refusal ends when more is found": ("kv_cache", "return not found and pool.num_returned < last.num_returned", "return pool.num_returned < last.num_returned"),
    "a refusal is one request's": ("kv_cache", "last.request is not request or ", ""),
    "who comes changes the common start": ("kv_cache", 'self.req_to_blocks[request.request_id], self.common = table, ("", 0)', "self.req_to_blocks[request.request_id] = table"),
    "a victim's grant takes its names along": ("scheduler", "if granted and not scheduler.like_vllm:", "if False:"),
    "equal in everything: the last by name": ("scheduler", "2 if scheduler.like_vllm else 3", "2"),
    "a victim starts again": ("scheduler", "    victim.num_computed_tokens = 0\n", ""),
    "the last admitted is the victim": ("scheduler", "victim = scheduler.running.pop()", "victim = scheduler.running.pop(0)"),
    "the least important is the victim": ("scheduler", "max(scheduler.running, key", "min(scheduler.running, key"),
    "a victim's tokens go back": ("scheduler", "self.token_budget += self.num_scheduled_tokens.pop(request.request_id)", "self.num_scheduled_tokens.pop(request.request_id)"),
    "the index follows the list": ("scheduler", "            index -= granted", "            index -= 0"),
    "nobody is let in after a preemption": ("scheduler", "        if not plan.preempted:", "        if True:"),
    "a victim waits in front": ("scheduler", "self.queue.appendleft(request)", "self.queue.append(request)"),
    "running before waiting": ("scheduler", "        schedule_running(self, plan)\n        if not plan.preempted:", "        schedule_waiting(self, plan)\n        schedule_running(self, plan)\n        if not plan.preempted:"),
    "long prompts are cut": ("scheduler", "        num_new_tokens = threshold\n", "        pass\n"),
    "the budget holds": ("scheduler", "return min(num_new_tokens, token_budget,", "return min(num_new_tokens, token_budget + 1,"),
    "the model's length holds": ("scheduler", "scheduler.max_model_len - 1 - request.num_computed_tokens)", "scheduler.max_model_len + 5)"),
    "the count limit holds": ("scheduler", "len(scheduler.running) >= config.max_num_seqs", "len(scheduler.running) > config.max_num_seqs"),
    "whole prompts without chunking": ("scheduler", "if not config.enable_chunked_prefill and", "if False and"),
    "the gate": ("scheduler", "if config.scheduler_reserve_full_isl and not", "if False and not"),
    "a resumed request is computed with its outputs": ("scheduler", "num_new_tokens = request.num_tokens - num_computed ", "num_new_tokens = request.num_prompt_tokens - num_computed "),
    "priority before arrival": ("kv_cache", "return self.priority, self.arrival_time, self.request_id", "return self.arrival_time, self.priority, self.request_id"),
    "no step beyond max_tokens in flight": ("scheduler", "    if in_flight and request", "    if False and request"),
    "placeholders for those who caught up": ("scheduler", "            if not request.is_prefill_chunk:\n", "            if True:\n"),
    "placeholders go when tokens come": ("scheduler", "        request.num_output_placeholders -= len(token_ids)\n", ""),
    "a block with a token in flight has no name yet": ("scheduler", "known = request.num_computed_tokens - request.num_output_placeholders", "known = request.num_computed_tokens"),
    "blocks go home": ("update", "    scheduler.kv_cache_manager.free(request)\n", ""),
    "the runner is told": ("update", "    scheduler.finished_req_ids.add(request.request_id)\n", ""),
    "EOS before length": ("update", "    if last == params.eos_token_id:", "    if last == params.eos_token_id and num_output_tokens < request.max_tokens:"),
    "min_tokens": ("update", "    if num_output_tokens < params.min_tokens:", "    if False:"),
    "stop token ids": ("update", "last in params.stop_token_ids:", "last in params.stop_token_ids[:0]:"),
    "the model's length ends a request": ("update", "request.num_tokens >= max_model_len or ", ""),
    "an ended request leaves the queue": ("update", "        scheduler.waiting.remove_ids(ended)", "        pass"),
    "an aborted request leaves the queue": ("update", "    scheduler.waiting.remove([", "    list(["),
}  # fmt: skip
TESTS = ["tests/test_same_decisions.py", "tests/test_schedule_properties.py", "nbs/06_blocks.ipynb", "nbs/07_scheduler.ipynb"]


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("broken") / "walkvllm"
    skip = shutil.ignore_patterns(".*", "__pycache__", "training", "docs")
    shutil.copytree(ROOT, target, ignore=skip)
    return target


def red_test(copy: Path, tests: list[str]) -> str | None:
    "The first test that fails in the copy, or None."
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "WALKVLLM_EXAMPLES": "60"}
    for test in tests:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
        try:
            run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=180)
        except subprocess.TimeoutExpired:
            return f"{test}: no end"
        if run.returncode == 1:
            return next(line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return None


def break_rule(copy: Path, rule: str, broken: tuple[str, str, str], tests: list[str]) -> None:
    "Breaks one line in the copy: some test must turn red."
    module, right, wrong = broken
    file = copy / "walkvllm" / f"{module}.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(right) == 1, f"the line of {rule!r} is not there, or not once"
    try:
        file.write_text(source.replace(right, wrong), encoding="utf-8")
        found = red_test(copy, tests)
        print(found)
        assert found, f"nobody noticed that {rule!r} is broken"
    finally:
        file.write_text(source, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(copy: Path, rule: str) -> None:
    break_rule(copy, rule, RULES[rule], TESTS)
