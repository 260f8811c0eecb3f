"""llama.cpp with continuous batching over its own C interface, as its server does it.

One KV cache for all sequences; every call takes a token of each running request and then what fits of the prompts. A
request starts when the cache has room for all that it may become, so nothing is ever thrown out. One that begins like
a running one waits until that prefix is computed, and then shares its cells. The model is a GGUF file.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Any

from peer import Clock, serve, settings

wanted = settings()

import llama_cpp as lib  # type: ignore[import-not-found,unused-ignore]  # noqa: E402


@lib.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
def silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp's log, dropped."""


lib.llama_log_set(silent, ctypes.c_void_p(0))
lib.llama_backend_init()
model = lib.llama_model_load_from_file(wanted["model"].encode(), lib.llama_model_default_params())
options = lib.llama_context_default_params()
options.n_ctx = wanted["pool"]
step_tokens = wanted["step"]
options.n_batch, options.n_ubatch = step_tokens, 512
options.n_seq_max = wanted["seqs"]
options.n_threads = options.n_threads_batch = wanted["threads"]
options.kv_unified = True
if wanted["dtype"] == "float32":  # else its cache has 16 bits, as the others' in bfloat16
    options.type_k = options.type_v = lib.GGML_TYPE_F32
context = lib.llama_init_from_model(model, options)
if not context:
    raise SystemExit("llama.cpp could not load the model")
memory = lib.llama_get_memory(context)
greedy = lib.llama_sampler_init_greedy()
batch = lib.llama_batch_init(step_tokens, 0, 1)


PREFIX = 16  # tokens that two requests must share at least: a block of the paged engines


class Sequence:
    """A running request: its place in the cache, and how much of it is computed."""

    def __init__(self, number: int, request: dict[str, Any], slot: int) -> None:
        self.number, self.slot, self.computed = number, slot, 0
        self.ids = list(request["prompt_token_ids"])
        self.key = tuple(self.ids[:PREFIX])
        self.reserved = len(self.ids) + request["max_tokens"]
        self.left = request["max_tokens"]
        self.shares: Sequence | None = None  # whose cells are its first ones

    def common(self, other: Sequence) -> int:
        """How many tokens both begin with; the last one of this prompt has to be computed."""
        pairs = list(zip(self.ids[:-1], other.ids))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))

    def share(self, other: Sequence, count: int) -> None:
        """Takes the first cells from another one."""
        lib.llama_memory_seq_cp(memory, other.slot, self.slot, 0, count)
        self.shares, self.computed = other, count
        self.reserved -= count


def held(running: list[Sequence]) -> int:
    """Cells of the cache that these may fill. Those that are shared stay when their first owner is done."""
    owners = set[Sequence]()
    for one in running:
        owner: Sequence | None = one
        while owner and owner not in owners:
            owners.add(owner)
            owner = owner.shares
    return sum(one.reserved for one in owners)


def fill(running: list[Sequence]) -> list[tuple[Sequence, int]]:
    """Puts the next tokens into the batch, the short work first. Who gets a token, and from which row."""
    n, asking = 0, []
    for one in sorted(running, key=lambda s: len(s.ids) - s.computed > 1):
        new = one.ids[one.computed : one.computed + step_tokens - n]
        for token in new:
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, one.computed, 1
            batch.seq_id[n][0], batch.logits[n] = one.slot, 0
            one.computed, n = one.computed + 1, n + 1
        if new and one.computed == len(one.ids):
            batch.logits[n - 1] = 1
            asking.append((one, n - 1))
    batch.n_tokens = n
    return asking


def generate(clock: Clock, prefix_caching: bool) -> None:
    waiting: deque[int] = deque()
    running: list[Sequence] = []
    newest: dict[tuple[int, ...], Sequence] = {}  # of those that run, by how they begin
    free = list(range(wanted["seqs"]))
    while clock.missing:
        waiting += clock.arrived(wait=not running and not waiting)
        while waiting and free:
            new = Sequence(waiting[0], clock.requests[waiting[0]], free[-1])
            other = newest.get(new.key) if prefix_caching else None
            shared = new.common(other) if other else 0
            if other and other.computed < shared:
                break  # after the next call it will be there
            if running and held(running) + new.reserved - shared > wanted["pool"]:
                break
            if other:
                new.share(other, shared)
            newest[new.key] = new
            waiting.popleft()
            free.pop()
            running.append(new)
        asking = fill(running)
        if code := lib.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: {code}")
        for one, row in asking:
            token = lib.llama_sampler_sample(greedy, context, row)
            clock.take(one.number, [token])
            one.ids.append(token)
            one.left -= 1
            if not one.left:
                running.remove(one)
                if newest.get(one.key) is one:
                    del newest[one.key]
                lib.llama_memory_seq_rm(memory, one.slot, -1, -1)
                free.append(one.slot)


serve(lib.__version__, generate)
