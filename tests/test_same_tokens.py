"""Greedy float32 tokens equal transformers', whatever the chunk size, block size, pool, cache, step and backend."""

from __future__ import annotations

import itertools
from importlib.resources import files
from pathlib import Path

import pytest
from clients import CLIENTS, Engine
from families import FAMILIES, Case, case

from walkvllm import LLM, SamplingParams

EMBEDDED = Path(str(files("walkvllm"))) / "tales-3m"
MODELS = ["embedded", *FAMILIES]
UNLIMITED = 4096


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
    blocks = 2 + -(-longest // block_size) + (32 // block_size) if pool == "tight" else 256
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


def test_same_tokens_through_triton(models: Path) -> None:
    "The Triton sources, in the interpreter: slow, so one small family and short answers."
    pytest.importorskip("triton")
    c = get("qwen3", models)
    small = Case(c.path, c.prompts[:4], [3, 2, 3, 2], [e[:n] for e, n in zip(c.expected, [3, 2, 3, 2], strict=False)])
    check(small, attention_backend="triton", block_size=8, max_num_batched_tokens=12)


def test_the_embedded_models_text() -> None:
    "One greedy answer, to the letter."
    llm = LLM(dtype="float32", multiprocess=False)
    messages = [{"role": "user", "content": "Tell me a story about a fox called Juno."}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=300), use_tqdm=False)
    expected = (Path(__file__).parent / "data" / "fox.txt").read_text(encoding="utf-8").rstrip("\n")
    assert output.outputs[0].text == expected
    assert output.outputs[0].finish_reason == "stop"
    llm.check_blocks()
