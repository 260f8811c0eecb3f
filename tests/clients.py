"""The three ways to reach an engine core, behind one face, so that a test can run through each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from walkvllm import LLM, EngineArgs, RequestOutput, SamplingParams
from walkvllm.async_llm import AsyncLLM
from walkvllm.messages import SchedulerStats
from walkvllm.sampling_params import RequestOutputKind

CLIENTS = ("in-process", "child", "async")


class Engine:
    """An engine with generate(), check_blocks() and stats(), whatever is behind it."""

    def __init__(self, client: str, model: str | Path | None = None, **settings: Any) -> None:
        self.client, self.count = client, 0
        if client == "async":
            self.runner = asyncio.Runner()
            args = EngineArgs(model=None if model is None else str(model), **settings)
            self.engine: Any = AsyncLLM.from_engine_args(args)
        else:
            self.engine = LLM(model, multiprocess=client == "child", **settings)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def generate(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        """The final outputs, in the order of the prompts."""
        if self.client != "async":
            return self.engine.generate(list(prompts), params, use_tqdm=False)
        each = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        return self.run(self.all(prompts, each))

    async def all(self, prompts: Sequence[Any], params: Sequence[SamplingParams]) -> list[RequestOutput]:
        """All answers; the first error is raised when everybody has ended."""
        tasks = [self.one(p, q) for p, q in zip(prompts, params, strict=True)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [r for r in results if not isinstance(r, BaseException)]

    async def one(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        """One answer, in one of the three kinds of outputs after the other; what came in parts is put together."""
        self.count += 1
        asked, whole = params.clone(), None
        asked.output_kind = list(RequestOutputKind)[self.count % 3]
        async for output in self.engine.generate(prompt, asked, str(self.count)):
            if whole is None:
                whole = output
            else:
                whole.add(output, aggregate=asked.output_kind is RequestOutputKind.DELTA)
        assert whole is not None and whole.finished
        whole.outputs.sort(key=lambda answer: answer.index)
        return whole

    def check_blocks(self) -> None:
        """Raises RuntimeError unless all blocks add up."""
        if self.client == "async":
            self.run(self.engine.check_blocks())
        else:
            self.engine.check_blocks()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks."""
        done = self.engine.reset_prefix_cache()
        return self.run(done) if self.client == "async" else done

    def stats(self) -> SchedulerStats:
        return self.run(self.engine.stats()) if self.client == "async" else self.engine.llm_engine.engine_core.stats()

    def unfinished(self) -> int:
        """Requests in the caller's book."""
        book = self.engine if self.client == "async" else self.engine.llm_engine
        return book.output_processor.get_num_unfinished_requests()

    def close(self) -> None:
        self.engine.shutdown()
        if self.client == "async":
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
