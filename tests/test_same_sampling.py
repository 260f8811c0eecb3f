"""Recorded answers of vLLM 0.22.0's own sampler, detokenizer and whole engine; ours must be the same, case by case."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clients import CLIENTS, Engine
from tokenizers import Tokenizer

from walkvllm import RequestOutput, SamplingParams
from walkvllm.detokenizer import IncrementalDetokenizer
from walkvllm.input_processor import load_tokenizer
from walkvllm.messages import EngineCoreRequest
from walkvllm.sampler import Sampler, SamplerOutput
from walkvllm.sampling_metadata import SamplingColumns

DATA = Path(__file__).parent / "data"
MODEL = DATA / "tales-v1"  # the model and the tokenizer that the recordings were made with
TOLERANCE = 1e-4


def recorded(kind: str) -> list[Any]:
    "The cases of one kind, each with what vLLM printed for it."
    cases = json.loads((DATA / kind / "cases.json").read_text(encoding="utf-8"))
    lines = (DATA / kind / "expected.jsonl").read_text(encoding="utf-8").splitlines()
    return [pytest.param(c, json.loads(e), id=f"{kind}-{i}") for i, (c, e) in enumerate(zip(cases, lines, strict=True))]


def close(ours: float | None, theirs: float | None) -> bool:
    return ours == theirs or (ours is not None and theirs is not None and abs(ours - theirs) < TOLERANCE)


# ---- the sampler ----


def made_up_logits(seed: int, row: int, vocab_size: int, scale: float) -> list[float]:
    "The recipe of the recordings: a hash of seed, row and token."
    hashes = (hashlib.blake2b(f"{seed}:{row}:{t}".encode(), digest_size=8).digest() for t in range(vocab_size))
    return [(int.from_bytes(h, "big") % 2**32 / 2**32 - 0.5) * 2 * scale for h in hashes]


def sampling_params(request: dict[str, Any]) -> SamplingParams:
    given = dict(request.get("params", {}))
    if given.get("logit_bias"):  # JSON has string keys only
        given["logit_bias"] = {int(t): b for t, b in given["logit_bias"].items()}
    params = SamplingParams(**given)
    params.all_stop_token_ids = params.stop_token_ids or []
    params.bad_words_token_ids = request.get("bad_words_token_ids")
    return params


def sample(case: dict[str, Any], mode: str, all_logprobs: bool = False) -> SamplerOutput:
    "One step of our sampler for the whole batch; every row has a generator, as in the recordings."
    requests, vocab_size = case["requests"], case["vocab_size"]
    columns = SamplingColumns(len(requests), vocab_size)
    table = np.zeros((len(requests), 32), np.int32)
    known = np.zeros(len(requests), np.int32)
    for row, request in enumerate(requests):
        params, tokens = sampling_params(request), request["prompt_token_ids"] + request.get("output_token_ids", [])
        seed = row if params.seed is None else params.seed
        if all_logprobs:
            params.logprobs = -1
        columns.add_row(params, torch.Generator().manual_seed(seed), row, len(request["prompt_token_ids"]))
        table[row, : len(tokens)], known[row] = tokens, len(tokens)
    seed, scale = case.get("logits_seed", 0), case.get("logits_scale", 4.0)
    logits = torch.tensor(
        [r.get("logits") or made_up_logits(seed, i, vocab_size, scale) for i, r in enumerate(requests)]
    )
    meta = columns.metadata(np.arange(len(requests)), table, known)
    return Sampler(logprobs_mode=mode).forward(logits, meta)


@pytest.mark.parametrize("case,expected", recorded("sampler"))
def test_sampler(case: dict[str, Any], expected: dict[str, Any]) -> None:
    "The token that is drawn, what could have been drawn and how likely, the likeliest tokens, the rank."
    raw, processed = sample(case, "raw_logprobs"), sample(case, "processed_logprobs", all_logprobs=True)
    assert processed.logprobs is not None
    for i, (request, want) in enumerate(zip(case["requests"], expected["requests"], strict=True)):
        ids, values, _ = (x[i].tolist() for x in processed.logprobs)
        can_be_drawn = dict(sorted((t, v) for t, v in zip(ids, values, strict=True) if v > -torch.inf))
        assert list(can_be_drawn) == want["kept"]
        assert all(map(close, can_be_drawn.values(), want["logprobs_processed"]))
        assert raw.sampled_token_ids[i] == want["sampled"]
        if "top" in want:
            assert raw.logprobs is not None
            n = request["params"]["logprobs"] + 1
            ids, values = raw.logprobs.token_ids[i, :n].tolist(), raw.logprobs.logprobs[i, :n].tolist()
            assert ids == [t for t, _ in want["top"]]
            assert all(close(v, w) for v, (_, w) in zip(values, want["top"], strict=True))
            assert raw.logprobs.ranks[i] == want["rank"]


# ---- the detokenizer ----


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL)


@pytest.mark.parametrize("case,expected", recorded("detok"))
def test_detokenizer(tokenizer: Tokenizer, case: dict[str, Any], expected: dict[str, Any]) -> None:
    "The text that each step shows, the stop string that is found, the whole text, the ids that are kept."
    params = SamplingParams(max_tokens=None, **case["params"])
    detokenizer = IncrementalDetokenizer(tokenizer, EngineCoreRequest("r", case["prompt_token_ids"], params, 0.0))
    deltas, stop = [], None
    for n, ids in enumerate(case["steps"], start=1):
        last = n == len(case["steps"])
        stop = detokenizer.update(ids, last and case.get("stop_terminated", False))
        deltas.append(detokenizer.get_next_output_text(finished=last or stop is not None, delta=True))
        if stop is not None:
            break
    assert (deltas, stop) == (expected["deltas"], expected["stop"])
    assert (detokenizer.output_text, detokenizer.token_ids) == (expected["text"], expected["output_token_ids"])


# ---- the whole engine ----

ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 512, "block_size": 16,
}  # fmt: skip
REQUESTS = recorded("engine")


def ask(llm: Engine, cases: list[dict[str, Any]]) -> list[RequestOutput]:
    prompts = [{k: v for k, v in c.items() if k in ("prompt", "prompt_token_ids")} for c in cases]
    return llm.generate(prompts, [SamplingParams(**c["params"]) for c in cases])


@pytest.fixture(scope="module", params=CLIENTS)
def together(request: pytest.FixtureRequest) -> dict[int, RequestOutput]:
    "All recorded requests in one call, in the engine that they were recorded in; by the id() of the case."
    with Engine(request.param, MODEL, **ENGINE) as llm:
        outputs = ask(llm, [p.values[0] for p in REQUESTS])
        llm.check_blocks()
    return {id(p.values[0]): output for p, output in zip(REQUESTS, outputs, strict=True)}


@pytest.fixture(scope="module", params=CLIENTS)
def small(request: pytest.FixtureRequest) -> Iterator[Engine]:
    "An engine in which prompts are cut into chunks, and requests are thrown out and come back."
    tight = ENGINE | {"max_num_batched_tokens": 11, "block_size": 8, "num_gpu_blocks_override": 40}
    with Engine(request.param, MODEL, **tight) as llm:
        yield llm
        llm.check_blocks()


def compare_logprobs(ours: Any, theirs: Any) -> None:
    "Equal tokens at each position, equal ranks, and log probabilities within the tolerance."
    assert (ours is None) == (theirs is None)
    for mine, want in zip(ours or [], theirs or [], strict=True):
        assert (mine is None) == (want is None)
        for (token, entry), (wanted, value, rank) in zip((mine or {}).items(), want or [], strict=True):
            assert token == wanted and close(entry.logprob, value)
            # among hundreds of likelier tokens, one can be so close that rounding decides
            assert abs(entry.rank - rank) <= rank // 500


def compare_text(ours: RequestOutput, theirs: dict[str, Any], skip_special_tokens: bool) -> None:
    """Equal, unless the prompt ends inside a character.

    The stream that vLLM primes with such a prompt hands the whole prompt out with the first token. Ours does not.
    """
    (mine,), (want,) = ours.outputs, theirs["outputs"]
    if mine.text != want["text"]:
        prompt = load_tokenizer(MODEL).decode(ours.prompt_token_ids, skip_special_tokens=skip_special_tokens)
        assert prompt.endswith("\ufffd") and want["text"] == prompt + mine.text


def compare(ours: RequestOutput, case: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.prompt_token_ids == theirs["prompt_token_ids"]
    compare_logprobs(ours.prompt_logprobs, theirs["prompt_logprobs"])
    compare_text(ours, theirs, case["params"].get("skip_special_tokens", True))
    for mine, want in zip(ours.outputs, theirs["outputs"], strict=True):
        for name in ("token_ids", "finish_reason", "stop_reason"):
            assert getattr(mine, name) == want[name], name
        compare_logprobs(mine.logprobs, want["logprobs"])
        total, tolerance = want["cumulative_logprob"], TOLERANCE * len(mine.token_ids)
        assert total is mine.cumulative_logprob or abs(mine.cumulative_logprob - total) < tolerance


@pytest.mark.parametrize("case,expected", REQUESTS)
def test_engine(together: dict[int, RequestOutput], case: Any, expected: dict[str, Any]) -> None:
    "Text, ids, reasons, log probabilities, and how much of the prompt was found in the cache."
    ours = together[id(case)]
    compare(ours, case, expected)
    assert ours.num_cached_tokens == expected["num_cached_tokens"]


def test_texts_differ_only_where_they_should(together: dict[int, RequestOutput]) -> None:
    "Two recorded prompts of random ids end inside a character; all other texts are equal to the letter."
    differ = [p.id for p in REQUESTS if together[id(p.values[0])].outputs[0].text != p.values[1]["outputs"][0]["text"]]
    assert differ == ["engine-37", "engine-41"]


@pytest.mark.parametrize("case,expected", REQUESTS)
def test_engine_one_by_one_in_chunks(small: Engine, case: dict[str, Any], expected: dict[str, Any]) -> None:
    "The same answers from a request that is alone, in small chunks, over what the others have left in the cache."
    compare(ask(small, [case])[0], case, expected)
