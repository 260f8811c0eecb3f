"""The path of one request through vLLM V1, small enough to read and real enough to use.

The names here are vLLM's. They are imported when they are first used, so that `import walkvllm` is quick.
This file is written by hand; the modules beside it are exported from nbs/.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from walkvllm.async_llm import AsyncLLM
    from walkvllm.config import EngineArgs
    from walkvllm.events import Run
    from walkvllm.llm import LLM, LLMEngine
    from walkvllm.mp_client import EngineDeadError
    from walkvllm.output_processor import CompletionOutput, RequestOutput
    from walkvllm.sampling_params import RequestOutputKind, SamplingParams
    from walkvllm.trace import record

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "EngineArgs", "EngineDeadError", "LLMEngine", "RequestOutput",
           "RequestOutputKind", "Run", "SamplingParams", "record"]

_HOME = {
    "LLM": "llm",
    "LLMEngine": "llm",
    "AsyncLLM": "async_llm",
    "EngineDeadError": "mp_client",
    "EngineArgs": "config",
    "SamplingParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "RequestOutput": "output_processor",
    "CompletionOutput": "output_processor",
    "Run": "events",
    "record": "trace",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that holds it, once."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
