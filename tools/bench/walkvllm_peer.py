"""walkvllm in this process. `backend` is "cpu" (compiled) or "torch" (what a machine without a compiler runs)."""

from __future__ import annotations

import sys
from pathlib import Path

from peer import serve, settings

wanted = settings()
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch  # noqa: E402

from walkvllm import LLM, SamplingParams, __version__  # noqa: E402

torch.set_num_threads(wanted["threads"])
llm = LLM(
    wanted["model"], dtype=wanted["dtype"], attention_backend=wanted["backend"], skip_tokenizer_init=True,
    multiprocess=False,
    max_model_len=wanted["longest"], max_num_seqs=wanted["requests"], enable_prefix_caching=False,
    num_gpu_blocks_override=1 + wanted["requests"] * -(-wanted["longest"] // 16),
)  # fmt: skip


def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


serve(__version__, generate)
