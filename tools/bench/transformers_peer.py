"""transformers `generate` in its best case: requests of one length together, and no more than the pool has room for.

Requests that are all there are taken by output and prompt length, and a batch ends where a length changes. Requests
that arrive are taken in order of arrival, whatever their lengths: a batch of theirs is padded on the left and runs
until its longest request is done; what the others made beyond their own end does not count.
"""

from __future__ import annotations

from typing import Any

from peer import Clock, serve, settings

wanted = settings()

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(wanted["threads"])
model = transformers.AutoModelForCausalLM.from_pretrained(
    wanted["model"], dtype=getattr(torch, wanted["dtype"]), attn_implementation="sdpa"
).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


class Listener(transformers.StoppingCriteria):
    """Is called after each step with all ids so far, and hands the new ones to the clock."""

    def __init__(self, clock: Clock, chosen: list[int]) -> None:
        self.clock, self.chosen, self.start, self.steps = clock, chosen, clock.now(), 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 1:
            self.clock.prefill = (self.clock.prefill or 0.0) + self.clock.now() - self.start
        for i, token in zip(self.chosen, input_ids[:, -1].tolist(), strict=True):
            self.clock.take(i, [token])
        return torch.zeros(len(self.chosen), dtype=torch.bool)


def size(requests: list[dict[str, Any]]) -> int:
    """Tokens of KV cache that a batch of these takes, with its padding."""
    return len(requests) * sum(max(r) for r in zip(*[(len(r["prompt_token_ids"]), r["max_tokens"]) for r in requests]))


def lengths(request: dict[str, Any]) -> tuple[int, int]:
    """What the requests of a batch have in common."""
    return request["max_tokens"], len(request["prompt_token_ids"])


def batch(clock: Clock, waiting: list[int], mixed: bool) -> list[int]:
    """Takes the next batch out of `waiting`: of one length, or `mixed`."""
    n, most, requests = 1, min(len(waiting), wanted["seqs"]), [clock.requests[i] for i in waiting]
    while (
        n < most
        and size(requests[: n + 1]) <= wanted["pool"]
        and (mixed or lengths(requests[n]) == lengths(requests[0]))
    ):
        n += 1
    chosen, waiting[:] = waiting[:n], waiting[n:]
    return chosen


@torch.inference_mode()
def generate(clock: Clock, prefix_caching: bool) -> None:
    waiting: list[int] = []
    arriving = any("arrival" in r for r in clock.requests)
    while clock.missing:
        waiting += clock.arrived(wait=not waiting)
        if not arriving:
            waiting.sort(key=lambda i: lengths(clock.requests[i]))
        chosen = batch(clock, waiting, mixed=arriving)
        prompts = [clock.requests[i]["prompt_token_ids"] for i in chosen]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False,
                       max_new_tokens=max(clock.requests[i]["max_tokens"] for i in chosen),
                       stopping_criteria=transformers.StoppingCriteriaList([Listener(clock, chosen)]))  # fmt: skip


serve(transformers.__version__, generate)
