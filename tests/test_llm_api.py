"""The offline interface as its users meet it: vLLM's names, bad input, errors and interrupts in the middle of a run.

Every test runs a real engine on the embedded model and ends in llm.check_blocks(). Those that need not look inside run
twice: with the engine core in this process, and in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import walkvllm
from walkvllm import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from walkvllm.llm import ONLY_IN_VLLM, ONLY_IN_VLLMS_CALLS
from walkvllm.sampling_params import RequestOutputKind

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "block_size": 8, "num_gpu_blocks_override": 20,
    "max_num_batched_tokens": 24,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS: list[Any] = [list(range(70, 92)), "Once a fox", "Count from three to eleven.", {"prompt": "Why?"}]
EMBEDDED = Path(walkvllm.__file__).parent / "tales-3m"
EMBEDDED_IDS: dict[str, int] = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).get_vocab()
EMBEDDED_TEXT = {token_id: token for token, token_id in EMBEDDED_IDS.items()}


HERE_ONLY = {  # what looks inside the core, needs none, or needs all requests to be there before the first step
    "test_an_error_in_the_middle_of_a_step", "test_ctrl_c_waits_for_the_end_of_the_step",
    "test_arguments_are_built_or_refused", "test_token_ids_equal_transformers", "test_a_begin_token_stands_there_once",
    "test_chat_text_equals_transformers", "test_priority_needs_its_policy",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where the core lives. Tests that start engines of their own do it in a process of its own only with `long`."""
    child = pytest.param("child", marks=() if "llm" in metafunc.fixturenames else pytest.mark.long)
    places = ["here"] if metafunc.function.__name__ in HERE_ONLY else ["here", child]
    metafunc.parametrize("place", places, indirect=True)


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Says where an LLM() that is not told otherwise has its core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if request.param == "child" else "0")
        yield request.param


_children: list[LLM] = []  # starting one takes seconds: the tests share it


@pytest.fixture
def llm(place: str) -> Iterator[LLM]:
    """A small engine; afterwards it must be empty, complete and able to work."""
    if place == "child" and not _children:
        _children.append(LLM(**SMALL))
    engine = _children[0] if place == "child" else LLM(**SMALL)
    assert engine.reset_prefix_cache()
    yield engine
    assert not engine.llm_engine.has_unfinished_requests()
    works(engine)


def teardown_module() -> None:
    for engine in _children:
        engine.shutdown()


def works(llm: LLM) -> None:
    """The engine has all its blocks, answers as a new one does, and has all its blocks after that."""
    llm.check_blocks()
    assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == answers()
    llm.check_blocks()


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [o.outputs[0].token_ids for o in outputs]


_answers: list[list[int]] = []


def answers() -> list[list[int]]:
    """What a new engine answers to PROMPTS, one prompt at a time."""
    if not _answers:
        with LLM(**SMALL, multiprocess=False) as fresh:
            _answers.extend(ids(fresh.generate(p, GREEDY, use_tqdm=False))[0] for p in PROMPTS)
    return _answers


# ---- vLLM's names ----

def test_script_written_for_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    import walkvllm as vllm

    prompts = ["Hello, my name is", "The capital of the night market is", "Tell me a story."]
    sampling_params = vllm.SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    llm = vllm.LLM(
        model=str(EMBEDDED), tokenizer=None, skip_tokenizer_init=False, trust_remote_code=False, tensor_parallel_size=1,
        dtype="float32", quantization=None, seed=0, enforce_eager=True, max_model_len=64, block_size=16,
        num_gpu_blocks_override=16, max_num_batched_tokens=64, max_num_seqs=4, enable_prefix_caching=True,
        enable_chunked_prefill=True, long_prefill_token_threshold=0, disable_log_stats=True,
    )  # fmt: skip
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert isinstance(output, vllm.RequestOutput) and output.prompt == prompt and output.finished
        answer = output.outputs[0]
        assert isinstance(answer, vllm.CompletionOutput) and answer.index == 0 and len(answer.token_ids) <= 16
        assert answer.finish_reason in ("stop", "length") and answer.logprobs is None
        decoded = llm.get_tokenizer().decode(answer.token_ids, skip_special_tokens=True)
        assert decoded.startswith(answer.text.rstrip("�"))
        assert llm.get_tokenizer().encode(prompt) == output.prompt_token_ids
    text = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    chat = llm.chat([{"role": "user", "content": "Hi"}], sampling_params, use_tqdm=False)
    assert chat[0].prompt == text
    assert ids(chat) == ids(llm.generate(text, sampling_params, use_tqdm=False))
    assert "Processed prompts" in capsys.readouterr().err
    llm.check_blocks()
    llm.shutdown()


def test_step_by_step_script() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    for i, prompt in enumerate(PROMPTS):
        assert engine.add_request(f"r{i}", prompt, GREEDY) == f"r{i}"
    finished: dict[str, list[int]] = {}
    while engine.has_unfinished_requests():
        finished |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert [finished[f"r{i}"] for i in range(len(PROMPTS))] == answers()
    with pytest.raises(TypeError, match="request_id"):
        engine.add_request(7, "a", GREEDY)  # type: ignore[arg-type]
    engine.add_request("twice", "a", GREEDY)
    with pytest.raises(ValueError, match="twice"):
        engine.add_request("twice", "b", GREEDY)
    engine.step()
    engine.abort_request(["twice"])
    engine.add_request("twice", PROMPTS[0], GREEDY)  # free again
    made = [o for _ in range(20) for o in engine.step() if o.finished]
    assert ids(made) == answers()[:1] and made[0].request_id == "twice"
    engine.engine_core.check_blocks()


def test_order_of_outputs_and_one_params_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 5, 3)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [9, 1, 5, 3]
    assert [o.prompt for o in outputs] == [None, PROMPTS[1], PROMPTS[2], "Why?"]
    assert [a[: len(b)] for a, b in zip(ids(outputs), answers(), strict=True)] == [
        b[: len(a)] for a, b in zip(ids(outputs), answers(), strict=True)]
    assert all(p == SamplingParams(temperature=0.0, max_tokens=p.max_tokens, ignore_eos=True) for p in params)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_progress_bar_is_the_callers(llm: LLM) -> None:
    made: list[Any] = []

    class Bar:
        def __init__(self, **kwargs: Any) -> None:
            self.kwargs, self.n, self.closed, self.format_dict, self.postfix = kwargs, 0, False, {"elapsed": 2.0}, ""
            made.append(self)

        def update(self, n: int) -> None:
            self.n += n

        def close(self) -> None:
            self.closed = True

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=Bar)
    (bar,) = made
    tokens = sum(len(o.prompt_token_ids) for o in outputs), sum(len(o.outputs[0].token_ids) for o in outputs)
    assert bar.n == bar.kwargs["total"] == len(PROMPTS) and bar.closed and bar.kwargs["desc"] == "Processed prompts"
    assert bar.postfix == "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*(t / 2 for t in tokens))


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_output_kinds_tell_the_same(kind: RequestOutputKind) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, output_kind=kind)
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)
    came: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            came.setdefault(output.request_id, []).append(output)
    for i, answer in enumerate(answers()):
        parts = [o.outputs[0] for o in came[str(i)]]
        assert len(parts) == (1 if kind == RequestOutputKind.FINAL_ONLY else 6)
        if kind == RequestOutputKind.DELTA:
            assert [t for p in parts for t in p.token_ids] == answer
        else:
            assert parts[-1].token_ids == answer
            assert all(p.token_ids == answer[: len(p.token_ids)] for p in parts)
        text = "".join(p.text for p in parts) if kind == RequestOutputKind.DELTA else parts[-1].text
        tokenizer = engine.input_processor.tokenizer
        assert tokenizer and text.rstrip("�") in tokenizer.decode(answer, skip_special_tokens=True)
    engine.engine_core.check_blocks()


def test_priority_needs_its_policy(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompts\[1\]: priority=2 .*fcfs"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0, 2], use_tqdm=False)
    with pytest.raises(ValueError, match="priority: 1 for 2"):
        llm.generate(PROMPTS[:2], GREEDY, priority=[0], use_tqdm=False)
    with LLM(**SMALL, scheduling_policy="priority", max_num_seqs=1) as ranked:
        order: list[str] = []
        get_output = ranked.llm_engine.engine_core.get_output

        def noting() -> Any:
            made = get_output()
            order.extend(o.request_id for o in made.outputs if o.finish_reason is not None)
            return made

        ranked.llm_engine.engine_core.get_output = noting  # type: ignore[method-assign]
        assert ids(ranked.generate(PROMPTS, GREEDY, priority=[3, 1, 2, 0], use_tqdm=False)) == answers()
        assert order == ["3", "1", "2", "0"]
        ranked.check_blocks()


# ---- what ends an answer, and what it says then ----

def directory(tmp_path: Path, **files: dict[str, Any]) -> Path:
    """A copy of the embedded model (weights linked) with other JSON files; None takes one away."""
    for file in EMBEDDED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    for name, changes in files.items():
        file = tmp_path / f"{name}.json"
        old = json.loads(file.read_text())
        file.unlink()
        file.write_text(json.dumps(old | changes))
    return tmp_path


def test_end_tokens_of_the_model(tmp_path: Path) -> None:
    answer = answers()[0]
    last = max(i for i, t in enumerate(answer) if t not in answer[:i])  # its first appearance
    first, second = answer[0], answer[last]
    ends = {"eos_token_id": [second, 10**6]}  # one that the model cannot produce harms nobody
    unused = next(t for t in ("<|system|>", "<|user|>", "<|endoftext|>") if EMBEDDED_IDS[t] not in answer)
    path = directory(tmp_path, generation_config=ends, tokenizer_config={"eos_token": unused})
    with LLM(str(path), **SMALL) as llm:
        (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", second)
        assert output.outputs[0].token_ids == answer[: last + 1]
        stop_first = SamplingParams(temperature=0.0, max_tokens=6, stop_token_ids=[first])
        assert llm.generate(PROMPTS[0], stop_first, use_tqdm=False)[0].outputs[0].stop_reason == first
        assert ids(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == answers()[:1]  # ignore_eos
        held = SamplingParams(temperature=0.0, max_tokens=6, min_tokens=6)
        assert second not in ids(llm.generate(PROMPTS[0], held, use_tqdm=False))[0]
        assert llm.llm_engine.input_processor.generation_config["eos_token_id"] == [second]
        llm.check_blocks()
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EMBEDDED_TEXT[second]}}))
    with LLM(str(path), **SMALL) as llm:  # the tokenizer's own end token gives no stop_reason
        (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        assert output.outputs[0].token_ids == answer[: last + 1]
        llm.check_blocks()


def test_stop_string_ends_the_request_in_the_core(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    text = whole.outputs[0].text
    for begin, end in ((3, 5), (6, 11), (2, 3)):
        stop = text[begin:end]
        for include in (False, True):
            stopped = SamplingParams(
                temperature=0.0, max_tokens=30, ignore_eos=True, stop=["\0", stop], include_stop_str_in_output=include)
            (output,) = llm.generate(PROMPTS[0], stopped, use_tqdm=False)
            answer = output.outputs[0]
            cut = text.index(stop) + (len(stop) if include else 0)
            assert (answer.text, answer.finish_reason, answer.stop_reason) == (text[:cut], "stop", stop)
            assert answer.token_ids == whole.outputs[0].token_ids[: len(answer.token_ids)]
            assert len(answer.token_ids) < 30
            nothing_left(llm)  # in the core neither


def test_without_tokenizer() -> None:
    with LLM(**SMALL, skip_tokenizer_init=True) as llm:
        for bad in ("text", {"prompt": "text"}):
            with pytest.raises(ValueError, match="skip_tokenizer_init"):
                llm.generate(bad, GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.generate([5], SamplingParams(stop="x"), use_tqdm=False)
        with pytest.raises(ValueError, match="skip_tokenizer_init"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (answers()[0], "")
        llm.check_blocks()


def test_defaults_of_the_model(tmp_path: Path) -> None:
    chosen = {"temperature": 0.0, "max_new_tokens": 5, "top_k": 7}
    with LLM(directory(tmp_path, generation_config=chosen), **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5, top_k=7)
        assert len(ids(llm.generate(PROMPTS[0], use_tqdm=False))[0]) <= 5
    with LLM(**SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_prompt_cached_and_salted(llm: LLM) -> None:
    long = list(range(100, 132))
    salts = [None, None, "Ada", "Ada", "Eve"]
    prompts = [{"prompt_token_ids": long} | ({"cache_salt": s} if s else {}) for s in salts]
    outputs = [llm.generate(p, GREEDY, use_tqdm=False)[0] for p in prompts]
    assert [o.num_cached_tokens for o in outputs] == [0, 24, 0, 24, 0]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert llm.reset_prefix_cache()
    assert llm.generate(prompts[0], GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


# ---- bad input ----

FINE = "Count from three to eleven."
TOO_LONG = [70] * 64
BAD_PROMPTS = [  # prompt, words of the error
    ("", "empty"),
    ([], "empty"),
    ({"prompt": ""}, "empty"),
    ({"prompt_token_ids": []}, "empty"),
    (TOO_LONG, "64 tokens, the limit is 63"),
    ([70] * 65, "65 tokens, the limit is 63"),
    ([5, 2048], "2048 is outside the vocabulary"),
    ([5, -1], "-1 is outside"),
    ([5, True], "must be an int"),
    ([5, 6.0], "must be an int"),
    ([5, None], "must be an int"),
    (None, "NoneType"),
    (7, "int"),
    (b"bytes", "bytes"),
    ({}, "needs 'prompt'"),
    ({"prompt_embeds": [0.1]}, "prompt_embeds"),
    ({"prompt": 7}, "must be a string"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
    ("\ud83e", "Unicode"),
]


def nothing_left(llm: LLM) -> None:
    assert not llm.llm_engine.has_unfinished_requests()
    stats = llm.llm_engine.engine_core.stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    llm.check_blocks()


def test_a_bad_prompt_harms_nobody(llm: LLM) -> None:
    for prompt, words in BAD_PROMPTS:
        for place, prompts in ((0, [prompt, FINE]), (1, [FINE, prompt, FINE]), (2, [FINE, FINE, prompt])):
            if isinstance(prompts[0], int):  # that would be one prompt of ids
                continue
            with pytest.raises((ValueError, TypeError)) as caught:
                llm.generate(prompts, GREEDY, use_tqdm=False)
            assert words in str(caught.value) and f"prompts[{place}]" in str(caught.value), caught.value
            nothing_left(llm)
        if prompt != []:  # which is a list without prompts
            with pytest.raises((ValueError, TypeError)) as caught:
                llm.generate(prompt, GREEDY, use_tqdm=False)
            assert words in str(caught.value) and "prompts[" not in str(caught.value)
        with pytest.raises((ValueError, TypeError)):
            llm.llm_engine.add_request("bad", prompt, GREEDY)
        nothing_left(llm)


def test_the_longest_prompt_gets_one_token(llm: LLM) -> None:
    to_the_end = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    outputs = llm.generate([[70] * 63, FINE], to_the_end, use_tqdm=False)
    assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs] == [64, 64]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "length"]


def test_a_prompt_that_never_fits_the_pool() -> None:
    with LLM(**SMALL | {"num_gpu_blocks_override": 5}) as llm:
        with pytest.raises(ValueError, match=r"40 tokens, the limit is 31: the KV pool .* 32 tokens \(4 blocks of 8\)"):
            llm.generate([FINE, [70] * 40], GREEDY, use_tqdm=False)
        nothing_left(llm)
        to_the_end = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        outputs = llm.generate([[70] * 31, [70] * 30, FINE], to_the_end, use_tqdm=False)
        assert [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs] == [32, 32, 32]
        llm.check_blocks()


def test_bad_sampling_params(llm: LLM) -> None:
    for params, words in [
        (SamplingParams(stop_token_ids=[2048]), "stop_token_ids"),
        ({"temperature": 0}, "dict"),
        ([GREEDY], "1 for 2 prompts"),
        ([GREEDY] * 3, "3 for 2 prompts"),
        ([GREEDY, None], r"prompts[1]: sampling_params"),
    ]:
        with pytest.raises((ValueError, TypeError)) as caught:
            llm.generate([FINE, FINE], params, use_tqdm=False)  # type: ignore[arg-type]
        assert words in str(caught.value)
        nothing_left(llm)
    changed = SamplingParams()
    changed.temperature = -1.0  # after it was checked
    with pytest.raises(ValueError, match="temperature"):
        llm.generate(FINE, changed, use_tqdm=False)
    nothing_left(llm)


def test_bad_conversations(llm: LLM) -> None:
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match=r"conversations\[1\]: messages\[0\]"):
        llm.chat([good, [{"content": "hi"}], good], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^messages\[1\]"):
        llm.chat([*good, {"role": "user"}], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"conversations\[1\]: prompt: has .* tokens"):
        llm.chat([good, [{"role": "user", "content": "so " * 200}]], GREEDY, use_tqdm=False)
    nothing_left(llm)
    with pytest.raises(TypeError, match="str"):
        llm.chat("hi", GREEDY, use_tqdm=False)
    assert llm.chat([], GREEDY, use_tqdm=False) == []  # no conversations, as in vLLM
    template, more = "{{ messages[0].content }}{{ mark }}", {"mark": "!"}
    own = llm.chat([good], GREEDY, chat_template=template, chat_template_kwargs=more, use_tqdm=False)
    assert own[0].prompt == "hi!"


def test_arguments_are_built_or_refused() -> None:
    fields = {f.name for f in dataclasses.fields(EngineArgs)}
    assert not fields & set(ONLY_IN_VLLM)
    for name, same in ONLY_IN_VLLM.items():
        for other in ("something", 12345, object()):
            with pytest.raises(ValueError, match=name):
                LLM(**SMALL, **{name: other})
        for value in same:  # reaches the check of the next argument
            arguments: dict[str, Any] = {name: value, "max_model_length": 5}
            with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
                LLM(**arguments)
    with pytest.raises(TypeError, match="'no_such_thing'"):
        LLM(no_such_thing=1)
    with pytest.raises(ValueError, match="tensor_parallel_size=True"):
        LLM(tensor_parallel_size=True)
    with pytest.raises(ValueError, match="model=''"):
        LLM("")


def test_arguments_of_calls_are_built_or_refused(llm: LLM) -> None:
    talk = [{"role": "user", "content": "hi"}]
    for name, same in ONLY_IN_VLLMS_CALLS.items():
        for call, what in ((llm.generate, FINE), (llm.chat, talk)):
            for value in same:
                call(what, GREEDY, use_tqdm=False, **{name: value})
            for other in ("something", object()):
                with pytest.raises(ValueError, match=name):
                    call(what, GREEDY, use_tqdm=False, **{name: other})
    with pytest.raises(TypeError, match="'lora'"):
        llm.generate(FINE, GREEDY, lora=None)


def test_what_cannot_cross_is_refused_at_once(llm: LLM) -> None:
    engine = llm.llm_engine
    for words, error, call in [
        ("request_id", TypeError, lambda: engine.add_request(7, FINE, GREEDY)),
        ("request_id", ValueError, lambda: engine.add_request("\ud800", FINE, GREEDY)),
        ("arrival_time", TypeError, lambda: engine.add_request("a", FINE, GREEDY, arrival_time="now")),
        ("cache_salt", ValueError, lambda: llm.generate({"prompt": FINE, "cache_salt": "\udfff"}, use_tqdm=False)),
    ]:
        with pytest.raises(error, match=words):
            call()
        nothing_left(llm)


def test_closed_engine() -> None:
    with LLM(**SMALL) as llm:
        works(llm)
    calls: list[Callable[[], Any]] = [
        lambda: llm.generate(FINE, GREEDY),
        lambda: llm.chat([{"role": "user", "content": "hi"}]),
        lambda: llm.llm_engine.add_request("a", FINE, GREEDY),
        llm.llm_engine.step,
        llm.check_blocks,
        llm.reset_prefix_cache,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    llm.shutdown()


# ---- errors and interrupts in the middle of a run ----

@pytest.mark.parametrize("where", ["scheduler.schedule", "model_runner.model.forward", "model_runner.sampler.forward",
                                   "scheduler.update_from_output"])  # fmt: skip
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
@pytest.mark.parametrize("late", [False, True])
def test_an_error_in_the_middle_of_a_step(llm: LLM, where: str, error: type[BaseException], late: bool) -> None:
    """Blocks get their names when they are scheduled: what a torn step did not compute must not be hit later."""
    *path, method = where.split(".")
    owner: Any = llm.llm_engine.engine_core.engine_core
    for name in path:
        owner = getattr(owner, name)
    original, left = getattr(owner, method), 0  # calls until the one that fails

    def failing(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and not late:
            raise error("in the middle")
        result = original(*args)
        if left == 0:
            raise error("in the middle")
        return result

    setattr(owner, method, failing)
    for step in (1, 2, 5):
        left = step
        with pytest.raises(error, match="in the middle"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        nothing_left(llm)
        works(llm)
    setattr(owner, method, original)


def test_ctrl_c_at_any_time(llm: LLM) -> None:
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    caught = 0
    for n in range(12):
        timer = threading.Timer(random.Random(n).uniform(0.0, 0.05), signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            llm.generate(PROMPTS, long, use_tqdm=False)
            timer.join()
            time.sleep(0.001)  # a late one still belongs to this round
        except KeyboardInterrupt:
            caught += 1
        timer.join()
        nothing_left(llm)
    assert caught == 12
    works(llm)


def test_ctrl_c_waits_for_the_end_of_the_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = llm.llm_engine.engine_core.engine_core
    forward, update, told = core.model_runner.model.forward, core.scheduler.update_from_output, []

    def interrupted(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        told.append("forward")
        return forward(*args)

    monkeypatch.setattr(core.model_runner.model, "forward", interrupted)
    monkeypatch.setattr(core.scheduler, "update_from_output", lambda *args: told.append("update") or update(*args))
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert told == ["forward", "update"]
    nothing_left(llm)
    monkeypatch.undo()


def test_a_message_that_cannot_be_sent(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output side has the request already when the core refuses it."""
    send = llm.llm_engine.engine_core.add_request
    sent: list[str] = []

    def refusing(request: Any) -> None:
        if len(sent) == 2:
            raise ValueError("no room")
        sent.append(request.request_id)
        send(request)

    monkeypatch.setattr(llm.llm_engine.engine_core, "add_request", refusing)
    with pytest.raises(ValueError, match="no room"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    nothing_left(llm)
    with pytest.raises(ValueError, match="no room"):
        llm.llm_engine.add_request("mine", FINE, GREEDY)
    nothing_left(llm)
    monkeypatch.undo()


def test_requests_of_others_are_not_swallowed(llm: LLM) -> None:
    llm.llm_engine.add_request("0", FINE, GREEDY)
    with pytest.raises(RuntimeError, match="1 unfinished"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert ids(outputs) == answers()[2:3]


# ---- tokenizers, beside transformers ----

TEXTS = ["Once a fox", " leading", "trailing \n\n", "<|user|>\nHi<|end|>", "naïve 🦊 你好", "a" * 50, "1234567"]


@pytest.mark.parametrize("changes", [
    {}, {"add_bos_token": True, "bos_token": "<|user|>"}, {"add_bos_token": False, "bos_token": "<|user|>"},
    {"add_bos_token": True, "bos_token": "<|user|>", "add_eos_token": True},
])  # fmt: skip
def test_token_ids_equal_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from walkvllm.input_processor import HFTokenizer

    path = directory(tmp_path, tokenizer_config=changes)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path), HFTokenizer(path)
    assert ours.eos_token_id == theirs.eos_token_id and ours.bos_token == theirs.bos_token
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_begin_token_stands_there_once(tmp_path: Path) -> None:
    """The tokenizer puts it before a text; a chat template has written it itself."""
    path = directory(tmp_path)
    wanting = Tokenizer.from_file(str(path / "tokenizer.json"))
    plain = wanting.encode("Once a fox").ids
    wanting.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    (path / "tokenizer.json").unlink()
    wanting.save(str(path / "tokenizer.json"))
    with LLM(path, **SMALL) as llm:
        assert llm.generate("Once a fox", GREEDY, use_tqdm=False)[0].prompt_token_ids == [0, *plain]
        messages = [{"role": "user", "content": "hi"}]
        (output,) = llm.chat(messages, GREEDY, chat_template="<|endoftext|>{{ messages[0].content }}", use_tqdm=False)
        assert output.prompt_token_ids == [0, *wanting.encode("hi", add_special_tokens=False).ids]
        asked = llm.get_tokenizer().apply_chat_template(messages, tokenize=True)
        assert asked == wanting.encode(llm.get_tokenizer().apply_chat_template(messages), add_special_tokens=False).ids
        llm.check_blocks()


TEMPLATE = """{{ bos_token }}{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
<{{ message.role }}>{{ message['content'] | trim }}{{ eos_token }}
{%- if tools %} {{ tools | tojson(indent=2) }}{% endif %}
{%- endfor %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}
{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("generation", [True, False])
def test_chat_text_equals_transformers(tmp_path: Path, template: str | None, generation: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from walkvllm.input_processor import HFTokenizer

    path = tmp_path / "model"
    path.mkdir()
    directory(path)
    if template:  # in tokenizer_config.json, as older directories have it
        (path / "chat_template.jinja").unlink()
        config = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": template}
        (path / "tokenizer_config.json").unlink()
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path), HFTokenizer(path)
    messages = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": " Grüße & 你好 \n"}]
    function = {"name": "add", "description": "<adds>", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    for given in (messages, messages[1:]):
        for more in ({}, {"tools": tools}):
            args: dict[str, Any] = {"add_generation_prompt": generation, **more}
            text = ours.apply_chat_template(given, **args)
            assert text == theirs.apply_chat_template(given, tokenize=False, **args)
            wanted = theirs.apply_chat_template(given, tokenize=True, return_dict=False, **args)
            assert ours.apply_chat_template(given, tokenize=True, **args) == wanted


def test_a_directory_without_tokenizer_json(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(EMBEDDED, path, ignore=shutil.ignore_patterns("tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json"):
        LLM(path, **SMALL)
    with LLM(path, **SMALL, tokenizer=str(EMBEDDED)) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == answers()
        llm.check_blocks()
