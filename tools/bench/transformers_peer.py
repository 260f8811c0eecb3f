"""transformers `generate` in its best case: requests of one length together, and no more than the pool has room for.

Requests that are there are taken in order of their output and prompt lengths, requests that arrive in order of arrival.
A batch is padded on the left and runs until its longest request is done; what the others made beyond their own end
does not count.
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


def batch(clock: Clock, waiting: list[int]) -> list[int]:
    """Takes the next batch out of `waiting`."""
    n, most = 1, min(len(waiting), wanted["seqs"])
    while n < most and size([clock.requests[i] for i in waiting[: n + 1]]) <= wanted["pool"]:
        n += 1
    chosen, waiting[:] = waiting[:n], waiting[n:]
    return chosen


@torch.inference_mode()
def generate(clock: Clock, prefix_caching: bool) -> None:
    waiting: list[int] = []
    while clock.missing:
        waiting += clock.arrived(wait=not waiting)
        if not any("arrival" in r for r in clock.requests):
            waiting.sort(key=lambda i: (clock.requests[i]["max_tokens"], len(clock.requests[i]["prompt_token_ids"])))
        chosen = batch(clock, waiting)
        prompts = [clock.requests[i]["prompt_token_ids"] for i in chosen]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False,
                       max_new_tokens=max(clock.requests[i]["max_tokens"] for i in chosen),
                       stopping_criteria=transformers.StoppingCriteriaList([Listener(clock, chosen)]))  # fmt: skip


serve(transformers.__version__, generate)
