"""A real model, SmolLM2-135M-Instruct, that `make test-real` fetches: transformers' tokens, and a sensible answer."""

from __future__ import annotations

import pytest
from fetch_smollm2 import TARGET

pytestmark = pytest.mark.real

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water",
    "Once upon a time there was a small lighthouse at the end of a long pier. Every evening its keeper climbed the "
    "ninety-nine steps, lit the lamp, and wrote one line in a book. On the last evening of the year she wrote:",
    "1, 2, 3, 4, 5,",
]
TOKENS = 24


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens by transformers, one prompt at a time, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
        answers.append(out[0, ids["input_ids"].shape[1]:].tolist())
    return answers


@pytest.mark.parametrize("settings", [
    {},
    {"block_size": 8, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_model_len": 128},
], ids=["defaults", "small pool, small chunks"])
def test_same_tokens_as_transformers(expected: list[list[int]], settings: dict[str, int]) -> None:
    from walkvllm import LLM, SamplingParams
    llm = LLM(model=str(TARGET), dtype="float32", **settings)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def test_chat() -> None:
    from walkvllm import LLM, SamplingParams
    llm = LLM(model=str(TARGET), dtype="bfloat16")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = llm.chat(question, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].outputs[0].text
    print(text)
    assert "Paris" in text
