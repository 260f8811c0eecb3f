"""Tiny random-weight models of every supported family, made with transformers, and what transformers generates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers

SHAPE = {
    "vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "eos_token_id": 2,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Case:
    "A model directory, prompts of mixed lengths, how many tokens to make for each, and the right ones."

    path: Path
    prompts: list[list[int]]
    max_tokens: list[int]
    expected: list[list[int]]


def make_model(name: str, directory: Path) -> Path:
    "A random model of family `name`, with weights large enough that no two logits are nearly equal."
    family, extra = FAMILIES[name]
    torch.manual_seed(7)
    config = getattr(transformers, family + "Config")(**{**SHAPE, **extra})
    model = getattr(transformers, family + "ForCausalLM")(config).float().eval()
    for key, value in model.named_parameters():
        if key.endswith("norm.weight") or key.endswith(".bias"):
            torch.nn.init.normal_(value, 1.0 if "norm" in key else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def greedy(path: Path, prompts: list[list[int]], max_tokens: list[int]) -> list[list[int]]:
    "What transformers generates, one prompt at a time, with the margin of every choice checked."
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers = []
    for prompt, count in zip(prompts, max_tokens, strict=True):
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        top = torch.stack([step[0].topk(2).values for step in out.logits])
        assert float((top[:, 0] - top[:, 1]).min()) > 1e-4, "a near tie: choose another seed"
        answers.append(out.sequences[0, len(prompt) :].tolist())
    return answers


@cache
def case(name: str, directory: Path, embedded: Path | None = None) -> Case:
    "The model `name` with its prompts and the right answers. Made once."
    torch.set_num_threads(1)
    path = embedded or make_model(name, directory / name)
    vocab = transformers.AutoConfig.from_pretrained(path).vocab_size
    generator = torch.Generator().manual_seed(11)
    lengths, counts = [1, 7, 8, 9, 16, 33, 20], [9, 12, 3, 10, 1, 14, 11]
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    prompts[6] = prompts[5][:16] + prompts[6][:4]  # shares its start with the one before
    return Case(path, prompts, counts, greedy(path, prompts, counts))
