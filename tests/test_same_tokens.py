"""Greedy float32 tokens equal transformers', whatever the chunk size, block size, pool, cache, step and backend."""

from __future__ import annotations

import itertools
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from clients import CLIENTS, Engine
from families import FAMILIES, Case, case, greedy
from test_kernels import needs_triton

from walkvllm import LLM, SamplingParams

EMBEDDED = Path(str(files("walkvllm"))) / "tales-3m"
MODELS = ["embedded", *FAMILIES]
UNLIMITED = 4096  # tokens a step
AMPLE = 256  # blocks


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def get(name: str, models: Path) -> Case:
    return case(name, models, EMBEDDED if name == "embedded" else None)


def check(c: Case, rounds: int = 1, **settings: object) -> LLM:
    "Runs all prompts `rounds` times in one engine and compares every token; every block must come home."
    llm = LLM(str(c.path), dtype="float32", skip_tokenizer_init=True, multiprocess=False, **settings)
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in c.max_tokens
    ]
    for _ in range(rounds):
        outputs = llm.generate([{"prompt_token_ids": p} for p in c.prompts], params, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == c.expected
        llm.check_blocks()
    return llm


def check_through(client: str, c: Case, rounds: int = 1, **settings: object) -> None:
    "The same through any client."
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in c.max_tokens]
    with Engine(client, c.path, dtype="float32", skip_tokenizer_init=True, **settings) as engine:
        for _ in range(rounds):
            outputs = engine.generate([{"prompt_token_ids": p} for p in c.prompts], params)
            assert [list(o.outputs[0].token_ids) for o in outputs] == c.expected
            engine.check_blocks()


def chunks(block_size: int) -> list[int]:
    return [1, block_size - 1, block_size, block_size + 1, UNLIMITED]


TABLE = [
    (name, size, chunk, pool, caching)
    for name, size in itertools.product(MODELS, (8, 16, 32))
    for chunk, pool, caching in itertools.product(chunks(size), ("ample", "tight"), (True, False))
]


@pytest.mark.parametrize("name,block_size,chunk,pool,caching", TABLE)
def test_same_tokens(models: Path, name: str, block_size: int, chunk: int, pool: str, caching: bool) -> None:
    c = get(name, models)
    check(c, 2 if caching else 1, **table_settings(c, block_size, chunk, pool, caching))


def table_settings(c: Case, block_size: int, chunk: int, pool: str, caching: bool) -> dict[str, object]:
    "What a row of the table means."
    longest = max(len(p) + n for p, n in zip(c.prompts, c.max_tokens, strict=True))
    blocks = 2 + -(-longest // block_size) + (32 // block_size) if pool == "tight" else AMPLE
    return {
        "block_size": block_size, "max_num_batched_tokens": chunk, "max_num_seqs": 8, "num_gpu_blocks_override": blocks,
        "enable_prefix_caching": caching, "max_model_len": 128 if pool == "ample" else None,
    }  # fmt: skip


QUICK = {("qwen3", 8, 7, "tight", True)}  # a process takes seconds to start: the other rows with `long`


@pytest.mark.parametrize("client", CLIENTS[1:])
@pytest.mark.parametrize(
    "name,block_size,chunk,pool,caching",
    [pytest.param(*row, marks=() if row in QUICK else pytest.mark.long) for row in TABLE],
)
def test_same_tokens_from_a_process(
    models: Path, client: str, name: str, block_size: int, chunk: int, pool: str, caching: bool
) -> None:
    c = get(name, models)
    check_through(client, c, 2 if caching else 1, **table_settings(c, block_size, chunk, pool, caching))


def preemptions(llm: LLM, c: Case) -> int:
    "How often somebody is thrown out while the prompts of `c` run."
    from walkvllm import scheduler

    count, preempt = 0, scheduler.preempt

    def counting(*args: object) -> object:
        nonlocal count
        count += 1
        return preempt(*args)  # type: ignore[arg-type]

    scheduler.preempt = counting  # type: ignore[assignment]
    try:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in c.max_tokens]
        llm.generate([{"prompt_token_ids": p} for p in c.prompts], params, use_tqdm=False)
    finally:
        scheduler.preempt = preempt
    return count


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_tight_pool_preempts(models: Path, block_size: int) -> None:
    "The table's tight pools are tight: preemption really happens in them."
    c = get("qwen3", models)
    blocks = 2 + -(-47 // block_size) + (32 // block_size)
    llm = check(c, block_size=block_size, num_gpu_blocks_override=blocks, max_num_seqs=8, enable_prefix_caching=False)
    assert preemptions(llm, c) > 0
    llm.check_blocks()


SETTINGS: list[dict[str, object]] = [
    {"async_scheduling": True},
    {"async_scheduling": True, "num_gpu_blocks_override": 12, "block_size": 8, "max_num_batched_tokens": 9},
    {"attention_backend": "naive", "block_size": 8, "max_num_batched_tokens": 13},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 12, "block_size": 8},
    {"long_prefill_token_threshold": 5},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 256, "max_model_len": 128},
    {"max_num_seqs": 1},
    {"max_num_seqs": 2, "block_size": 5, "num_gpu_blocks_override": 14},
    {"prefix_caching_hash_algo": "blake2b", "block_size": 1, "num_gpu_blocks_override": 90},
]


def named(settings: object) -> str:
    return "-".join(f"{k}={v}" for k, v in settings.items()) if isinstance(settings, dict) else str(settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("settings", SETTINGS, ids=named)
def test_same_tokens_with(models: Path, name: str, settings: dict[str, object]) -> None:
    check(get(name, models), 2, **settings)


@pytest.mark.parametrize("client", CLIENTS[1:])
@pytest.mark.parametrize(
    "name,settings",
    [
        pytest.param(name, settings, marks=() if name == "embedded" and i == 1 else pytest.mark.long)
        for name, (i, settings) in itertools.product(MODELS, enumerate(SETTINGS))
    ],
    ids=named,
)
def test_same_tokens_from_a_process_with(models: Path, client: str, name: str, settings: dict[str, object]) -> None:
    check_through(client, get(name, models), 2, **settings)


# ---- each backend ----

@cache
def tiny(name: str, models: Path, block_size: int) -> Case:
    "Two or three short prompts about the edge of a block, for those who take long over a token."
    c, size = get(name, models), max(block_size, 8)
    generator = torch.Generator().manual_seed(size)
    lengths = [size - 1, size + 1, *[10] * (size == 8)]
    prompts = [torch.randint(3, 150, (n,), generator=generator).tolist() for n in lengths]
    prompts[2:] = [prompts[1][:8] + p[:2] for p in prompts[2:]]  # shares a block with the one before
    counts = [3, 3, 2][: len(prompts)]  # the first one grows into a second block while the next one is there
    return Case(c.path, prompts, counts, greedy(c.path, prompts, counts))


def check_tiny(backend: str, name: str, models: Path, rounds: int, settings: dict[str, object]) -> LLM:
    "As `check`; where the settings make a pool small, it is one that the tiny prompts do not fit into together."
    size = int(str(settings.get("block_size", 16)))
    if "num_gpu_blocks_override" in settings and settings["num_gpu_blocks_override"] != AMPLE:
        settings = {**settings, "num_gpu_blocks_override": 1 + max(3, -(-19 // size))}
    return check(tiny(name, models, size), rounds, **{**settings, "attention_backend": backend})


OTHERS = ("naive", "torch", "triton")  # the compiled one for CPUs stands in all tables above


def row(*values: object, quick: bool) -> object:
    "A row of a test's table: of those in Triton's interpreter, only a few are quick."
    marks = [] if values[0] != "triton" else [needs_triton] if quick else [needs_triton, pytest.mark.long]
    return pytest.param(*values, marks=marks)


@pytest.mark.parametrize(
    "backend,name,block_size,chunk,pool,caching",
    [
        row(backend, *r, quick=r in {("qwen3", 8, 7, "tight", True), ("llama-bias", 8, UNLIMITED, "tight", False)})
        for backend, r in itertools.product(OTHERS, TABLE)
    ],
)
def test_same_tokens_with_each_backend(
    models: Path, backend: str, name: str, block_size: int, chunk: int, pool: str, caching: bool
) -> None:
    settings = table_settings(tiny(name, models, block_size), block_size, chunk, pool, caching)
    check_tiny(backend, name, models, 2 if caching else 1, settings)


@pytest.mark.parametrize(
    "backend,name,settings",
    [
        row(backend, name, settings, quick=name == "qwen3" and settings is SETTINGS[1])
        for backend, name, settings in itertools.product(OTHERS, MODELS, SETTINGS)
    ],
    ids=named,
)
def test_same_tokens_with_each_backend_and(models: Path, backend: str, name: str, settings: dict[str, object]) -> None:
    check_tiny(backend, name, models, 2, settings)


@pytest.mark.long
@pytest.mark.parametrize("name,block_size,chunk,pool,caching", TABLE)
@pytest.mark.parametrize("backend", ["naive", "torch"])
def test_same_tokens_of_all_prompts_with_each_backend(
    models: Path, backend: str, name: str, block_size: int, chunk: int, pool: str, caching: bool
) -> None:
    c = get(name, models)
    settings = table_settings(c, block_size, chunk, pool, caching)
    check(c, 2 if caching else 1, attention_backend=backend, **settings)


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32])
def test_the_tiny_pools_preempt_too(models: Path, block_size: int) -> None:
    settings = {"block_size": block_size, "num_gpu_blocks_override": 0, "enable_prefix_caching": False}
    llm = check_tiny("cpu", "qwen3", models, 1, settings)
    assert preemptions(llm, tiny("qwen3", models, block_size)) > 0


def test_the_embedded_models_text() -> None:
    "One greedy answer, to the letter."
    llm = LLM(dtype="float32", multiprocess=False)
    messages = [{"role": "user", "content": "Tell me a story about a fox called Juno."}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=300), use_tqdm=False)
    expected = (Path(__file__).parent / "data" / "fox.txt").read_text(encoding="utf-8").rstrip("\n")
    assert output.outputs[0].text == expected
    assert output.outputs[0].finish_reason == "stop"
    llm.check_blocks()
