"""Recorded runs: what is replayed equals what the engine says of itself, over every way to reach a core."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from clients import Engine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from walkvllm import LLM, AsyncLLM, EngineArgs, EngineDeadError, LLMEngine, RequestOutput, SamplingParams
from walkvllm.events import PAGES, Event
from walkvllm.replay import check, replay, states
from walkvllm.sampling_params import RequestOutputKind
from walkvllm.show import example
from walkvllm.trace import Run, record

SMALL: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "num_gpu_blocks_override": 15, "max_num_batched_tokens": 16,
    "max_num_seqs": 4, "max_model_len": 96,
}  # fmt: skip
TELL = "Once there was a small dog who lived in a green house."
PROMPTS = [TELL, TELL + " One day", "The sun", "A cat and a bird and a fish went to the market.", "Count"]
WAYS = [(client, pipelined) for client in ("in-process", "child", "async") for pipelined in (False, True)]


@contextmanager
def recording(engine: Engine, **options: Any) -> Iterator[Run]:
    """record() through each of the clients."""
    what = record(engine.engine, **options)
    if engine.client != "async":
        with what as run:
            yield run
        return
    run = engine.run(what.__aenter__())
    try:
        yield run
    finally:
        engine.run(what.__aexit__(None, None, None))


@pytest.fixture(scope="module", params=WAYS, ids=[f"{c}-{'pipelined' if p else 'sync'}" for c, p in WAYS])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    client, pipelined = request.param
    made = Engine(client, async_scheduling=pipelined, **SMALL)
    yield made
    made.close()


@pytest.fixture(params=WAYS[:4], ids=["in-process-sync", "in-process-pipelined", "child-sync", "child-pipelined"])
def fresh(request: pytest.FixtureRequest) -> tuple[bool, bool]:
    return request.param[0] == "child", request.param[1]


def agree(run: Run, outputs: list[RequestOutput]) -> None:
    """The run replays to the engine's own state and to the answers that the caller has."""
    state = check(run)
    for output in outputs:
        for answer in output.outputs:
            name = output.request_id if len(output.outputs) == 1 else f"{answer.index}_{output.request_id}"
            assert state.texts[name] == answer.text
            more = len(answer.token_ids) if isinstance(answer.stop_reason, str) else None
            assert state.token_ids[name][:more] == list(answer.token_ids)  # the core hears late of a stop string
            assert state.finished[name] == answer.finish_reason
    assert len(list(states(run))) == len(run.events) and run.dropped == 0 and not run.problem


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 12, **more})


PARAMS = {
    "plain": greedy(),
    "long, preempting": greedy(max_tokens=50, ignore_eos=True),
    "stop string": greedy(max_tokens=40, stop=["the", "."]),
    "one token": greedy(max_tokens=1),
    "sampled": SamplingParams(temperature=1.0, seed=5, max_tokens=20),
    "stop token": greedy(max_tokens=40, stop_token_ids=[264, 18]),
}


@pytest.mark.parametrize("kind", PARAMS)
def test_replay_equals_the_engine(engine: Engine, kind: str) -> None:
    preempted = kind != "long, preempting"
    for _ in range(5):  # somebody on a busy machine may not send the next prompt before the last one is through
        engine.reset_prefix_cache()
        with recording(engine) as run:
            outputs = engine.generate(PROMPTS, PARAMS[kind])
        agree(run, outputs)
        preempted |= any(event.facts["preempted"] for event in run.events if event.stop == "scheduled")
        if preempted:
            break
    assert preempted
    with recording(engine) as again:  # now with hits
        outputs = engine.generate(PROMPTS, PARAMS[kind])
    agree(again, outputs)
    assert any(event.facts["cached"] for event in again.events if event.stop == "scheduled")
    engine.check_blocks()


def test_several_answers(engine: Engine) -> None:
    with recording(engine) as run:
        outputs = engine.generate(PROMPTS[:2], SamplingParams(n=2, seed=1, temperature=1.0, max_tokens=9))
    state = check(run)
    if engine.client != "async":
        agree(run, outputs)
    assert len(state.finished) == 4 and {name[0] for name in state.finished} == {"0", "1"}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [True, False])
def test_priority_aborts_and_late_comers(fresh: tuple[bool, bool], policy: str, chunked: bool) -> None:
    """Requests come and go while others run; some are aborted while they wait, run, or are thrown out."""
    child, pipelined = fresh
    settings = SMALL | {"max_num_batched_tokens": 16 if chunked else 96, "enable_chunked_prefill": chunked}
    engine = LLMEngine.from_engine_args(
        EngineArgs(**settings, scheduling_policy=policy, async_scheduling=pipelined), multiprocess=child
    )
    rng, last = random.Random(3), dict[str, RequestOutput]()
    before = engine.add_request("before", TELL, greedy(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    with record(engine) as run:
        for i in range(16):
            for output in engine.step() if engine.has_unfinished_requests() else ():
                last[output.request_id] = output
            params = greedy(max_tokens=rng.randint(1, 40), ignore_eos=True)
            rank = rng.randint(0, 3) if policy == "priority" else 0
            engine.add_request(f"r{i}", rng.choice(PROMPTS), params, priority=rank)
            if i % 3 == 2:
                engine.abort_request([f"r{rng.randrange(i + 1)}", f"r{i}"] if i % 2 else f"r{i}")
        while engine.has_unfinished_requests():
            for output in engine.step():
                last[output.request_id] = output
    agree(run, [output for output in last.values() if output.finished and output.request_id != before])
    assert any(event.stop == "aborted" for event in run.events) and before in last
    engine.shutdown()


def test_recorded_in_the_middle(fresh: tuple[bool, bool]) -> None:
    """A recording may begin and end while steps are in flight."""
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL, async_scheduling=fresh[1]), multiprocess=fresh[0])
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, greedy(max_tokens=30, ignore_eos=True))
    for _ in range(6):
        engine.step()
    with record(engine) as run:
        for _ in range(5):
            engine.step()
    state = check(run)
    assert state.running or fresh[0]  # a core in its own process may be done before its caller has looked six times
    while engine.has_unfinished_requests():
        engine.step()
    engine.shutdown()


@pytest.mark.parametrize("settings", [
    {"enable_prefix_caching": False}, {"long_prefill_token_threshold": 4}, {"scheduling_policy": "priority"},
    {"scheduler_reserve_full_isl": False, "async_scheduling": True},
])  # fmt: skip
def test_a_long_queue(settings: dict[str, Any]) -> None:
    """More requests wait than an event names."""
    with LLM(**SMALL | settings, multiprocess=False) as llm, record(llm) as run:
        ranks = [i % 5 for i in range(75)] if "scheduling_policy" in settings else None
        outputs = llm.generate(PROMPTS * 15, greedy(), use_tqdm=False, priority=ranks)
    agree(run, outputs)
    assert max(e.facts.get("num_waiting", 0) for e in run.events) == 75
    assert max(len(e.facts.get("waiting", ())) for e in run.events) == 64


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_torn_step(pipelined: bool) -> None:
    """An error in a step ends all requests; the recording goes on and says so."""
    with LLM(**SMALL, multiprocess=False, async_scheduling=pipelined) as llm, record(llm) as run:
        runner = llm.llm_engine.engine_core.engine_core.model_runner
        real, calls = runner.model.forward, []

        def forward(*args: Any) -> Any:
            calls.append(1)
            if len(calls) == 7:
                raise MemoryError("torn")
            return real(*args)

        runner.model.forward = forward
        with pytest.raises(MemoryError):
            llm.generate(PROMPTS, PARAMS["long, preempting"], use_tqdm=False)
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False)
    agree(run, outputs)
    assert [e.facts["requests"] for e in run.events if e.stop == "aborted"][0] == ["0", "1", "2", "3", "4"]


def test_an_id_that_is_used_again(fresh: tuple[bool, bool]) -> None:
    """After an abort the new request may travel under another name; its text must not become the old one's."""
    engine = LLMEngine.from_engine_args(EngineArgs(**SMALL, async_scheduling=fresh[1]), multiprocess=fresh[0])
    last = dict[str, RequestOutput]()
    with record(engine) as run:
        for prompt in (TELL, "The sun", "Count"):
            engine.abort_request("a")
            engine.add_request("a", prompt, greedy(max_tokens=30, ignore_eos=True))
            for _ in range(6):
                last |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
    engine.shutdown()
    state, (name, *_) = check(run), [event.request for event in run.events if event.stop == "message encoded"][::-1]
    assert name is not None and state.texts[name] == last["a"].outputs[0].text
    assert state.token_ids[name] == last["a"].outputs[0].token_ids and state.finished[name] == "length"
    ends = {"abort", "length"} if fresh[0] else {"abort"}  # a core of its own may be through before it hears of it
    assert all(why in ends for other, why in state.finished.items() if other != name)


def test_a_recording_that_is_used_again() -> None:
    with LLM(**SMALL, multiprocess=False) as llm:
        again = record(llm)
        runs = []
        for prompt in ("a", TELL):
            with again as run:
                llm.generate(prompt, greedy(), use_tqdm=False)
            runs.append(run)
        assert runs[0] is not runs[1]
        assert [len(check(run).texts) for run in runs] == [1, 1] and runs[0].events != runs[1].events


def test_reset_is_an_event(fresh: tuple[bool, bool]) -> None:
    with LLM(**SMALL, multiprocess=fresh[0], async_scheduling=fresh[1]) as llm, record(llm) as run:
        llm.generate(TELL, greedy(), use_tqdm=False)
        assert llm.reset_prefix_cache()
    assert not check(run).remembered


# ---- without a child: many small workloads ----

@pytest.fixture(scope="module")
def engines() -> dict[tuple[bool, str], LLMEngine]:
    return {
        (p, q): LLMEngine.from_engine_args(EngineArgs(**SMALL, async_scheduling=p, scheduling_policy=q), False)
        for p in (False, True) for q in ("fcfs", "priority")
    }  # fmt: skip


ACTION = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 4), st.integers(1, 40), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0)),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(pipelined=st.booleans(), policy=st.sampled_from(["fcfs", "priority"]), actions=st.lists(ACTION, max_size=15))
def test_any_workload_replays(
    engines: dict[tuple[bool, str], LLMEngine], pipelined: bool, policy: str, actions: list[tuple[str, int, int, int]]
) -> None:
    engine, count = engines[pipelined, policy], 0
    with record(engine) as run:
        for what, n, length, priority in actions:
            if what == "add":
                rank = priority if policy == "priority" else 0
                engine.add_request(f"r{count}", PROMPTS[n], greedy(max_tokens=length, ignore_eos=True), None, rank)
                count += 1
            elif what == "abort":
                engine.abort_request(f"r{n}")
            for _ in range(n if what == "step" and engine.has_unfinished_requests() else 0):
                engine.step()
    state = check(run)
    assert set(state.waiting) | set(state.running) == set(engine.engine_core.engine_core.scheduler.requests)
    engine.abort_request([f"r{i}" for i in range(count)])
    while engine.engine_core.engine_core.has_work():
        engine.engine_core.get_output()


# ---- break it ----

@pytest.fixture(scope="module")
def crowded() -> Run:
    """A run in which requests wait, are thrown out and come back."""
    with LLM(**SMALL, multiprocess=False) as llm, record(llm) as run:
        llm.generate(PROMPTS, PARAMS["long, preempting"], use_tqdm=False)
    check(run)
    return run


CORE = ("added", "scheduled", "executed", "sampled", "updated", "recording began", "recording ended")


def changed(run: Run, events: list[Event]) -> Run:
    return Run(run.engine, events)


@pytest.mark.parametrize("stop", [*CORE, "text out"])
def test_a_missing_event_is_noticed(crowded: Run, stop: str) -> None:
    places = [i for i, event in enumerate(crowded.events) if event.stop == stop]
    for i in places:
        with pytest.raises(ValueError):
            check(changed(crowded, crowded.events[:i] + crowded.events[i + 1 :]))


def test_swapped_events_are_noticed(crowded: Run) -> None:
    core = [i for i, event in enumerate(crowded.events) if event.stop in CORE[1:5]]
    for i, k in zip(core, core[1:], strict=False):
        events = list(crowded.events)
        events[i], events[k] = events[k], events[i]
        with pytest.raises(ValueError, match=r"event \d+"):
            check(changed(crowded, events))


def test_a_changed_fact_is_noticed(crowded: Run) -> None:
    """One number changed in a fact that the state depends on."""
    def wrong(facts: dict[str, Any], name: str) -> dict[str, Any]:
        value = facts[name]
        if isinstance(value, int):
            return facts | {name: value + 1}
        if isinstance(value, list):
            return facts | {name: value[1:] if value else ["nobody"]}
        key = next(iter(value), "nobody")
        return facts | {name: {k: v for k, v in value.items() if k != key} if value else {key: [1]}}

    seen = 0
    for stop, names in (("scheduled", ("blocks", "preempted", "waiting", "running", "free_blocks", "tokens")),
                        ("updated", ("token_ids", "released", "free_blocks", "running")), ("sampled", ("token_ids",))):
        for i, event in enumerate(crowded.events):
            for name in names if event.stop == stop else ():
                if stop == "updated" and name == "token_ids" and not event.facts[name] \
                        or stop == "sampled" and not event.facts[name]:
                    continue
                events = list(crowded.events)
                events[i] = msgspec.structs.replace(event, facts=wrong(event.facts, name))
                with pytest.raises(ValueError):
                    check(changed(crowded, events))
                seen += 1
    assert seen > 200


# ---- bounded, and harmless ----

def test_the_limit(fresh: tuple[bool, bool]) -> None:
    """A full recording is a whole beginning, says what is missing, and the engine does not mind."""
    with LLM(**SMALL, multiprocess=fresh[0], async_scheduling=fresh[1]) as llm:
        with record(llm, limit=20_000) as run:
            outputs = llm.generate(PROMPTS, PARAMS["long, preempting"], use_tqdm=False)
        assert run.dropped > 100 and "dropped" in repr(run) and len(outputs) == len(PROMPTS)
        assert len(msgspec.json.encode(run.events)) < 80_000
        replay(run)
        with pytest.raises(ValueError, match="recording ended"):
            check(run)
        with record(llm) as run:
            llm.generate(PROMPTS, greedy(), use_tqdm=False)
        check(run)
        for bad in (0, -1, "1"):
            with pytest.raises(ValueError, match="limit"):
                record(llm, limit=bad)  # type: ignore[arg-type]


def test_one_recording_at_a_time(fresh: tuple[bool, bool]) -> None:
    with LLM(**SMALL, multiprocess=fresh[0], async_scheduling=fresh[1]) as llm:
        with record(llm) as run:
            with pytest.raises(RuntimeError, match="already"), record(llm):
                pass
            if not fresh[0] and not fresh[1]:
                with pytest.raises(ValueError, match="recorded"):
                    llm.walk("a", greedy())
            llm.generate("a", greedy(), use_tqdm=False)
        check(run)
        assert llm.llm_engine.engine_core.listener is None
    for wrong in (None, 3, "llm"):
        with pytest.raises(TypeError, match="llm must be"):
            record(wrong)


def test_errors_in_the_block(fresh: tuple[bool, bool]) -> None:
    with LLM(**SMALL, multiprocess=fresh[0], async_scheduling=fresh[1]) as llm:
        with pytest.raises(ValueError, match="max_model_len"), record(llm) as run:
            llm.generate(["a", "tale " * 200], greedy(), use_tqdm=False)
        check(run)
        with record(llm) as run:
            llm.generate("a", greedy(), use_tqdm=False)
        check(run)


def test_a_listener_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from walkvllm.trace import CoreRecorder

    def broken(*args: Any) -> None:
        raise KeyError("oops")

    with LLM(**SMALL, multiprocess=False) as llm:
        plain = llm.generate(PROMPTS, greedy(), use_tqdm=False)
        monkeypatch.setattr(CoreRecorder, "executed", broken)
        with record(llm) as run:
            watched = llm.generate(PROMPTS, greedy(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in plain] == [o.outputs[0].token_ids for o in watched]
        assert "oops" in run.problem and "oops" in repr(run)


def test_the_core_dies_in_the_block() -> None:
    llm = LLM(**SMALL, multiprocess=True)
    with pytest.raises(EngineDeadError), record(llm) as run:
        os.kill(llm.llm_engine.engine_core.child.process.pid, signal.SIGKILL)
        llm.generate(PROMPTS, greedy(), use_tqdm=False)
    assert "lost" in run.problem and any(event.process == "caller" for event in run.events)
    llm.shutdown()


def test_the_caller_dies_in_the_block(tmp_path: Path) -> None:
    """A recording core ends as any other does when its caller is gone."""
    source = """
import sys
from walkvllm import LLM, SamplingParams
from walkvllm.trace import record
if __name__ == "__main__":
    llm = LLM(dtype="float32", multiprocess=True, num_gpu_blocks_override=64, max_model_len=256)
    with record(llm):
        print(llm.llm_engine.engine_core.child.process.pid, flush=True)
        llm.generate("Once", SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0), use_tqdm=False)
        sys.stdin.read()
"""
    (tmp_path / "caller.py").write_text(source)
    path = os.pathsep.join(p for p in sys.path if p)
    caller = subprocess.Popen([sys.executable, str(tmp_path / "caller.py")], stdout=subprocess.PIPE,
                              stdin=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})  # fmt: skip
    assert caller.stdout is not None
    core = int(caller.stdout.readline())
    caller.kill()
    caller.wait()
    for _ in range(150):
        try:
            os.kill(core, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{core}/stat").exists() and Path(f"/proc/{core}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the core outlives its caller")


def test_an_abandoned_recording_is_taken_over() -> None:
    """Whoever was cancelled while a recording ended leaves a core that listens; the next recording takes it over."""
    async def main() -> Run:
        engine = AsyncLLM.from_engine_args(EngineArgs(**SMALL))
        try:
            await record(engine).__aenter__()
            engine.engine_core.listener = None  # as after a cancelled end
            async with record(engine) as run:
                async for _ in engine.generate(TELL, greedy(), "a"):
                    pass
            return run
        finally:
            engine.shutdown()

    check(asyncio.run(main()))


def test_many_callers_and_slow_ones() -> None:
    async def main() -> tuple[Run, dict[str, str]]:
        engine, texts = AsyncLLM.from_engine_args(EngineArgs(**SMALL)), dict[str, str]()

        async def one(i: int) -> None:
            params = greedy(max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            async for output in engine.generate(PROMPTS[i % 5], params, f"r{i}"):
                texts[f"r{i}"] = texts.get(f"r{i}", "") + output.outputs[0].text
                if i == 3:
                    await asyncio.sleep(0.02)
                if i == 4:
                    break  # leaves early

        try:
            async with record(engine) as run:
                await asyncio.gather(*map(one, range(8)))
            with pytest.raises(TypeError, match="async with"), record(engine):
                pass
            return run, texts
        finally:
            engine.shutdown()

    run, texts = asyncio.run(main())
    state = check(run)
    assert all(state.texts[name] == text for name, text in texts.items() if name != "r4")
    taken = [event for event in run.events if event.stop == "taken"]
    slow = max(event.facts["lay"] for event in taken if event.request == "r3")
    assert slow > 0.005 and any(event.stop == "aborted" for event in run.events)


# ---- order and clocks ----

def test_effects_follow_causes(engine: Engine) -> None:
    with recording(engine) as run:
        engine.generate(PROMPTS, greedy())
    client = engine.engine.engine_core if engine.client == "async" else engine.engine.llm_engine.engine_core
    unsure = client.clock.high - client.clock.low if engine.client != "in-process" else 0.0
    at: dict[tuple[str, Any], Event] = {(e.stop, e.request or e.step): e for e in run.events}
    for earlier, later in (("message encoded", "message decoded"), ("message decoded", "added"),
                           ("outputs encoded", "outputs decoded"), ("outputs decoded", "text out")):
        pairs = [(at[key], at[later, key[1]]) for key in at if key[0] == earlier]
        assert pairs and all(b.ended - a.began > -unsure for a, b in pairs), (earlier, later)
    assert [e.ended for e in run.events] == sorted(e.ended for e in run.events)
    for track in {e.track for e in run.events}:
        mine = sorted((e for e in run.events if e.track == track), key=lambda e: e.began)
        assert all(a.ended <= b.began + 1e-6 for a, b in zip(mine, mine[1:], strict=False)), track
    assert all(e.page == PAGES[e.stop] for e in run.events)
    assert all(e.facts["encoded_at"] < e.ended + unsure for e in run.events if "encoded_at" in e.facts)


# ---- files ----

def test_saved_and_loaded(crowded: Run, tmp_path: Path) -> None:
    crowded.save(tmp_path / "run.jsonl")
    again = Run.load(tmp_path / "run.jsonl")
    assert again.events == crowded.events and again.engine == crowded.engine and replay(again) == replay(crowded)


def test_bad_files_are_refused(crowded: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    crowded.save(path)
    lines = path.read_text().splitlines()
    head = json.loads(lines[0])

    def refused(text: str, *words: str) -> None:
        path.write_text(text)
        with pytest.raises(ValueError) as error:
            Run.load(path)
        assert all(word in str(error.value) for word in (str(path), *words)), str(error.value)

    body = lines[1:]
    refused("\n".join([json.dumps(head | {"version": 2}), *body]), "version=2")
    refused("\n".join([json.dumps({"version": 2, "engine": 7, "more": {}})]), "version=2")
    refused("\n".join([json.dumps({k: v for k, v in head.items() if k != "version"}), *body]), "line 1", "version")
    refused("\n".join(lines[:-5]), f"{len(body) - 5} events")
    refused("\n".join(lines)[:-20], f"line {len(lines)}")
    refused("", "line 1")
    refused("\n".join([lines[0], body[0].replace('"page"', '"pages"'), *body[1:]]), "line 2")
    refused("\n".join([lines[0], body[0].replace('"step":0', '"step":"0"'), *body[1:]]), "line 2", "step")
    refused("\n".join([lines[0], body[0].replace("recording began", "teapot"), *body[1:]]), "line 2", "teapot")
    refused("[" * 100_000, "line 1")
    refused("\n".join([lines[0], body[0].replace('"track":"c', '"track":"d'), *body[1:]]), "line 2", "track")
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match="line 1"):
        Run.load(path)


def test_facts_of_another_kind_are_refused(crowded: Run, tmp_path: Path) -> None:
    """Each fact of each kind of event: left out, and of another type."""
    path, places = tmp_path / "run.jsonl", {event.stop: i for i, event in enumerate(crowded.events) if event.facts}
    for i in places.values():
        event = crowded.events[i]
        for name, value in event.facts.items():
            wrong: Any = 5 if isinstance(value, (str, list, dict)) or value is None else "5"
            rest = {k: v for k, v in event.facts.items() if k != name}
            for facts in (rest, rest | {name: wrong}):
                if facts == rest and name == "encoded_at" or not facts:
                    continue
                events = list(crowded.events)
                events[i] = msgspec.structs.replace(event, facts=facts)
                changed(crowded, events).save(path)
                if name == "encoded_at":
                    Run.load(path)
                    continue
                with pytest.raises(ValueError, match=rf"line {i + 2}: .*{name}"):
                    Run.load(path)
    assert places.keys() | {"aborted", "waited", "taken", "prefix cache reset"} == PAGES.keys()


def test_perfetto(crowded: Run, tmp_path: Path) -> None:
    """What the trace-event format asks for: named processes and threads, and slices that do not overlap on one."""
    made = json.loads(crowded.to_perfetto(tmp_path / "run.json"))
    assert json.loads((tmp_path / "run.json").read_text()) == made
    events = made["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == len(crowded.events) and {(e["pid"], e["tid"]) for e in slices} <= named
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices)
    for place in named:
        mine = sorted((e for e in slices if (e["pid"], e["tid"]) == place), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in zip(mine, mine[1:], strict=False))
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    assert starts and all(starts[e["id"]] <= e["ts"] for e in events if e["ph"] == "f")
    assert {e["name"] for e in events if e["ph"] == "C"} == {"kv_usage", "num_waiting"}


def test_pandas(crowded: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        crowded.to_pandas()
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas")
    frame = crowded.to_pandas()
    assert isinstance(frame, pandas.DataFrame) and len(frame) == len(crowded.events)
    steps = frame[frame.stop == "scheduled"]
    assert (steps["facts.left"] >= 0).all() and (frame.ms >= 0).all() and set(frame.process) == {"caller", "core"}


def test_generate_with_trace(tmp_path: Path) -> None:
    with LLM(**SMALL, multiprocess=False) as llm:
        runs: list[Run] = []
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False, trace=runs.append)
        agree(runs[0], outputs)
        outputs = llm.generate(PROMPTS, greedy(), use_tqdm=False, trace=tmp_path / "run.jsonl")
        agree(Run.load(tmp_path / "run.jsonl"), outputs)
        with pytest.raises(ValueError, match=r"trace=.*no such directory"):
            llm.generate("a", greedy(), trace=str(tmp_path / "no" / "run.jsonl"))
        with pytest.raises(ValueError, match=r"trace=.*must be a file"):
            llm.generate("a", greedy(), trace=tmp_path)
        for wrong in (True, 1, []):
            with pytest.raises(TypeError, match="trace"):
                llm.generate("a", greedy(), trace=wrong)  # type: ignore[arg-type]
        assert llm.llm_engine.engine_core.listener is None


def test_nothing_is_left_behind(crowded: Run) -> None:
    """Without a listener the engine is as before: nothing stands in for a method, and nothing grows."""
    with LLM(**SMALL, multiprocess=False) as llm:
        core = llm.llm_engine.engine_core.engine_core
        with record(llm):
            llm.generate("a", greedy(), use_tqdm=False)
        assert core.listener is None and "free" not in vars(core.scheduler.kv_cache_manager)
        outputs = llm.llm_engine.engine_core.get_output()
        assert outputs.stamp is None


# ---- the running example's run, which lies beside the package ----

def test_the_stored_example_is_what_the_engine_does() -> None:
    from walkvllm.trace import example_run

    stored, llm = example_run(), example.llm()
    from walkvllm.recording import record_walk

    fresh = record_walk(llm, example.prompts, example.params, example.names)
    check(stored)
    assert timeless(stored) == timeless(fresh) and stored.engine == fresh.engine


def timeless(run: Run) -> list[Any]:
    """The events without what differs from run to run."""
    times = ("arrival", "encoded_at", "lay")
    facts = [{k: v for k, v in event.facts.items() if k not in times} for event in run.events]
    return [(e.stop, e.process, e.track, e.step, e.request, f) for e, f in zip(run.events, facts, strict=True)]
