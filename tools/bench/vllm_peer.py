"""vLLM's CPU build, in one of four ways: "auto", "all", "auto compiled", "all compiled".

"auto" keeps a core for the engine, "all" gives the threads all of them. "compiled" is vLLM's default, torch.compile;
without it the model runs eagerly.
"""

from __future__ import annotations

import os
from typing import Any

from peer import Clock, serve, settings


def main() -> None:
    wanted = settings()
    bind, *compiled = wanted["way"].split()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    if bind == "all":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{wanted['threads'] - 1}"
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    out = os.dup(1)
    os.dup2(2, 1)  # its worker prints as well
    import vllm  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

    llm = vllm.LLM(
        model=wanted["model"], dtype=wanted["dtype"], max_model_len=wanted["longest"] + 1, max_num_seqs=wanted["seqs"],
        max_num_batched_tokens=wanted["step"], block_size=32, enable_prefix_caching=True, enforce_eager=not compiled,
        num_gpu_blocks_override=1 + wanted["pool"] // 32, skip_tokenizer_init=True,
    )  # fmt: skip
    os.dup2(out, 1)
    engine = llm.llm_engine
    counter = [0]

    def generate(clock: Clock, prefix_caching: bool) -> None:
        llm.reset_prefix_cache()
        clock.begin()
        counter[0] += 1
        while clock.missing:
            for i in clock.arrived(wait=not engine.has_unfinished_requests()):
                request = clock.requests[i]
                params = vllm.SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True,
                                             detokenize=False, output_kind=RequestOutputKind.DELTA)  # fmt: skip
                prompt: dict[str, Any] = {"prompt_token_ids": request["prompt_token_ids"]}
                if not prefix_caching:
                    prompt["cache_salt"] = str(i)
                engine.add_request(f"{counter[0]}-{i}", prompt, params)
            for output in engine.step():
                clock.take(int(output.request_id.split("-")[1]), output.outputs[0].token_ids)

    serve(vllm.__version__, generate)


if __name__ == "__main__":  # it starts a worker process, which imports this file
    main()
