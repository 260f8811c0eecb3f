"""transformers `generate`, one static batch. Prompts of one length are its best case; others are padded on the left."""

from __future__ import annotations

from peer import serve, settings

wanted = settings()

import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(wanted["threads"])
model = transformers.AutoModelForCausalLM.from_pretrained(wanted["model"], dtype=getattr(torch, wanted["dtype"])).eval()
model.generation_config.eos_token_id = None
model.generation_config.pad_token_id = 0


@torch.inference_mode()
def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_tokens)
    rows: list[list[int]] = made[:, width:].tolist()
    return rows


serve(transformers.__version__, generate)
