"""The benchmark's work, written as JSON: build/bench/workloads/NAME.json, from fixed seeds.

    {"workload": "b", "name", "model", "dtype", "batch", "requests": [{"prompt_token_ids", "max_tokens", "arrival"}],
     "pool": tokens of KV cache, "longest": tokens of the longest request, "seqs": requests at once,
     "step": tokens of a step}

An arrival is in seconds after the start. Workloads with one `engine` are run by one set of loaded engines.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "bench"
EMBEDDED = ROOT / "walkvllm" / "tales-3m"
SMOL = ROOT / ".models" / "smollm2-135m-instruct"
SHAPES: dict[str, dict[str, Any]] = {  # models with random weights, by the name of their folder in build/bench
    "smollm2-shape": {  # for a machine that has not fetched the real one
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 100000.0,
    },
    "qwen3-0.6b-shape": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6,
    },
}  # fmt: skip
PROMPTS_B = {1: [128], 6: [32, 32, 64, 64, 128, 512], 16: [32] * 9 + [64] * 4 + [128] * 2 + [512]}
POOLS = {"a": 6400, "b": 2560, "c": 2560}  # tokens of KV cache; d and e run on the engines of a
STEPS = {"a": 4096, "b": 1536, "c": 512}  # tokens of one step: vLLM runs one of that size when it starts
TEXTS = {
    "a": "embedded model, float32: measures engines",
    "b": "SmolLM2-135M, bfloat16, prompts of 32 to 512: measures kernels",
    "c": "Qwen3-0.6B's shape with random weights, bfloat16",
    "d": "200 requests of 16 to 512 tokens that arrive at random, pool too small for all",
    "e": "64 requests that share 512 tokens",
}


def write_model(name: str) -> Path:
    """A model of one of the shapes with random bfloat16 weights, made once."""
    folder = BUILD / name
    if not (folder / "model.safetensors").exists():
        command = [sys.executable, str(Path(__file__).resolve()), "--model", name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def make_model(name: str) -> None:
    """Writes the model. Its weights are as large as trained ones, so that its choices are no ties."""
    import torch
    import transformers

    shape = dict(SHAPES[name])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.05)
    model.save_pretrained(BUILD / name)


def requests(seed: int, vocab: int, lengths: list[int], tokens: list[int], shared: int = 0) -> list[dict[str, Any]]:
    """Random ids; `shared` of them are the same at each prompt's start."""
    rnd = random.Random(seed)
    prefix = [rnd.randrange(3, vocab) for _ in range(shared)]
    return [{"prompt_token_ids": prefix + [rnd.randrange(3, vocab) for _ in range(n)], "max_tokens": m}
            for n, m in zip(lengths, tokens, strict=True)]  # fmt: skip


def arriving(made: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    """The same requests, each at a random time in these seconds."""
    rnd = random.Random(0)
    times = sorted(rnd.uniform(0, seconds) for _ in made)
    return [{**request, "arrival": round(at, 4)} for request, at in zip(made, times, strict=True)]


def work(which: str, model: Path, dtype: str, made: list[dict[str, Any]], engine: str, **more: Any) -> dict[str, Any]:
    """One workload, complete but for what its engine must hold."""
    name = f"{which}{len(made)}" if which in "abc" else which + ("" if more.get("prefix_caching", True) else "-off")
    return {"workload": which, "id": name, "name": TEXTS[which], "model": str(model), "dtype": dtype,
            "batch": len(made), "requests": made, "engine": engine, "pool": POOLS[engine],
            "step": STEPS[engine], **more}  # fmt: skip


def workloads(which: str, folder: Path, small: bool = False) -> list[dict[str, Any]]:
    """The workloads of these letters, written to the folder. `small`: a little of each."""
    made = []
    rnd = random.Random(1)
    if "a" in which:
        for n in (1, 4) if small else (1, 4, 16, 64):
            made.append(work("a", EMBEDDED, "float32", requests(n, 2048, [32] * n, [64] * n), "a"))
    if "d" in which:
        n = 12 if small else 200
        lengths = [round(16 * 32 ** rnd.random()) for _ in range(n)]  # 16 to 512, as many from 16 to 32 as from 256 on
        tokens = [rnd.randint(8, 32) for _ in range(n)]
        made.append(work("d", EMBEDDED, "float32", arriving(requests(7, 2048, lengths, tokens), 0.0025 * n), "a"))
    if "e" in which:
        n = 4 if small else 64
        same = requests(8, 2048, [32] * n, [16] * n, shared=512)
        for caching in (True, False):
            made.append(work("e", EMBEDDED, "float32", same, "a", prefix_caching=caching))
    if "b" in which:
        model = SMOL if SMOL.exists() else write_model("smollm2-shape")
        for n in (1,) if small else (1, 6, 16):
            made.append(work("b", model, "bfloat16", requests(n, 49152, PROMPTS_B[n], [16] * n), "b"))
    if "c" in which:
        model = write_model("qwen3-0.6b-shape")
        for n, length, tokens_each in [(1, 128, 12)] if small else [(1, 128, 12), (16, 16, 8)]:
            made.append(work("c", model, "bfloat16", requests(n, 151936, [length] * n, [tokens_each] * n), "c"))
    for one in made:
        mates = [two for two in made if two["engine"] == one["engine"]]
        one["longest"] = max(len(r["prompt_token_ids"]) + r["max_tokens"] for two in mates for r in two["requests"])
        one["seqs"] = min(64, max(len(two["requests"]) for two in mates))
        path = folder / f"{one['id']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one) + "\n")
    return made


if __name__ == "__main__":
    make_model(sys.argv[-1])
