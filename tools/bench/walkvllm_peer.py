"""walkvllm in this process. `backend` is "cpu" (compiled) or "torch" (what a machine without a compiler runs)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from peer import Clock, serve, settings

wanted = settings()
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

from walkvllm import LLM, SamplingParams, __version__  # noqa: E402
from walkvllm.sampling_params import RequestOutputKind  # noqa: E402

torch.set_num_threads(wanted["threads"])
llm = LLM(
    wanted["model"], dtype=wanted["dtype"], attention_backend=wanted["backend"], skip_tokenizer_init=True,
    multiprocess=False, max_model_len=wanted["longest"] + 1, max_num_seqs=wanted["seqs"],
    max_num_batched_tokens=wanted["step"], num_gpu_blocks_override=1 + wanted["pool"] // 16,
)  # fmt: skip


def generate(clock: Clock, prefix_caching: bool) -> None:
    engine = llm.llm_engine
    while clock.missing:
        for i in clock.arrived(wait=not engine.has_unfinished_requests()):
            request = clock.requests[i]
            params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False,
                                    output_kind=RequestOutputKind.DELTA)  # fmt: skip
            prompt = {"prompt_token_ids": request["prompt_token_ids"]}
            engine.add_request(str(i), prompt if prefix_caching else {**prompt, "cache_salt": str(i)}, params)
        for output in engine.step():
            clock.take(int(output.request_id), output.outputs[0].token_ids)


def reset(clock: Clock, prefix_caching: bool) -> None:
    """Nothing stays cached from the last time."""
    llm.reset_prefix_cache()
    clock.begin()
    generate(clock, prefix_caching)


def choices(token_ids: list[int]) -> list[list[float]]:
    """The two tokens that are likeliest after these, each with its log probability."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    first: Any = output.outputs[0].logprobs
    return sorted(([token, entry.logprob] for token, entry in first[0].items()), key=lambda pair: -pair[1])[:2]


serve(__version__, reset, choices)
