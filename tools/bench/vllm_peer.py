"""vLLM's CPU build. `bind` says which cores its threads get: "auto" keeps one for the engine, "all" shares them."""

from __future__ import annotations

import os

from peer import serve, settings


def main() -> None:
    wanted = settings()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if wanted["bind"] == "all":
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{wanted['threads'] - 1}"
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    out = os.dup(1)
    os.dup2(2, 1)  # its worker prints as well
    import vllm  # type: ignore[import-not-found,unused-ignore]

    llm = vllm.LLM(
        model=wanted["model"], dtype=wanted["dtype"], max_model_len=wanted["longest"], max_num_seqs=wanted["requests"],
        max_num_batched_tokens=4096, block_size=32, enable_prefix_caching=False, enforce_eager=True,
        skip_tokenizer_init=True,
    )  # fmt: skip
    os.dup2(out, 1)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = vllm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    serve(vllm.__version__, generate)


if __name__ == "__main__":  # it starts a worker process, which imports this file
    main()
