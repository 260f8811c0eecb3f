"""transformers' continuous batching, which takes the sizes of its cache and of a step from whoever knows them."""

from __future__ import annotations

from peer import Clock, serve, settings

wanted = settings()

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

torch.set_num_threads(wanted["threads"])
PAGE = 32
model = transformers.AutoModelForCausalLM.from_pretrained(
    wanted["model"], dtype=getattr(torch, wanted["dtype"]), attn_implementation="sdpa"
).eval()
generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)


def generate(clock: Clock, prefix_caching: bool) -> None:
    config = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=wanted["pool"] // PAGE, max_batch_tokens=min(wanted["step"], wanted["pool"]),
        max_requests_per_batch=wanted["seqs"], use_async_batching=False, use_cuda_graph=False,
        allow_block_sharing=prefix_caching,
    )  # fmt: skip
    with model.continuous_batching_context_manager(generation_config=generation, continuous_batching_config=config,
                                                   block=True, timeout=60, warmup=False) as manager:  # fmt: skip
        manager.add_request([1, 2, 3], "first", 1)  # its thread makes the cache when the first request comes
        manager.get_result(timeout=60)
        clock.begin()
        while clock.missing:
            for i in clock.arrived(wait=clock.next == 0):
                request = clock.requests[i]
                manager.add_request(request["prompt_token_ids"], str(i), request["max_tokens"], streaming=True)
            more = clock.next < len(clock.requests)
            if (result := manager.get_result(timeout=0.002 if more else 60)) is not None:
                number = int(result.request_id)
                clock.take(number, result.generated_tokens[len(clock.tokens[number]) :])
                if result.error:
                    raise RuntimeError(result.error)
            elif not manager.is_running():
                raise RuntimeError("the manager stopped")


serve(transformers.__version__, generate)
