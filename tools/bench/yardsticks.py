"""What this machine can do, as one line of JSON: GB/s read from memory, GFLOP/s of matrix products, on all threads."""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable

threads = int(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(threads)

import torch  # noqa: E402

torch.set_num_threads(threads)


def best(what: Callable[[], object], tries: int = 7) -> float:
    """The seconds of the best of some tries, after one that does not count."""
    what()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        what()
        times.append(time.perf_counter() - start)
    return min(times)


def read_rate(size: int = 1 << 30) -> float:
    """GB/s of a sum over memory far larger than the caches, in large pages where the system has them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(memory, dtype=torch.float32)
    numbers.fill_(1)
    return size / best(numbers.sum) / 1e9


def matrix_rate(dtype: torch.dtype, size: int) -> float:
    """GFLOP/s of a square product."""
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype)
    return 2 * size**3 / best(lambda: a @ b, 5) / 1e9


print(json.dumps({
    "read_GB_s": round(read_rate(), 1),
    "f32_GFLOP_s": round(matrix_rate(torch.float32, 2048)),
    "bf16_GFLOP_s": round(matrix_rate(torch.bfloat16, 1024)),
}))  # fmt: skip
