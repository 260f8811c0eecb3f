"""The runner under a drunken scheduler: random chunks, pauses and preemptions, in step and a step ahead."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import walkvllm
from walkvllm.attention import get_backend
from walkvllm.config import EngineArgs, VllmConfig
from walkvllm.input_batch import CachedRequestState, InputBatch, flatten
from walkvllm.messages import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from walkvllm.model_runner import ModelRunner, allocate_kv_cache
from walkvllm.sampling_params import SamplingParams
