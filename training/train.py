"""Train the embedded model: a byte-level BPE of 2048 entries and a Qwen3 of 3.5 M parameters.

    python tales.py 60000 --seed 1 > tales.txt
    python train.py tales.txt ../walkvllm/tales-3m

takes about an hour on one core and writes an ordinary Hugging Face directory (bfloat16
safetensors) with its training record. Needs torch, transformers, tokenizers and safetensors.
The same text, seed and library versions give the same batches in the same order.
"""

import argparse
import json
import math
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
CONTEXT = 1024


def make_tokenizer(text: str, vocab_size: int) -> PreTrainedTokenizerFast:
    "A byte-level BPE trained on `text`: every byte has a token, so any text can be written."
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text[i : i + 10000] for i in range(0, len(text), 10000)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    "All documents of `text` as one row of ids, an `<|endoftext|>` after each."
    end = SPECIAL.index("<|endoftext|>")
    documents = [d for d in text.split("\n\n") if d.strip()]
    ids: list[int] = []
    for i in range(0, len(documents), 1000):
        for encoding in tokenizer.backend_tokenizer.encode_batch(documents[i : i + 1000]):
            ids += [*encoding.ids, end]
    return torch.tensor(ids)


def make_model(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def loss_of(model: Qwen3ForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    "Mean cross-entropy of the next token over `rows` of `[batch, seq + 1]` ids."
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def learning_rate(step: int, steps: int, peak: float) -> float:
    "100 steps of warm-up, then a cosine down to a twentieth of `peak`."
    warm = min(1.0, (step + 1) / 100)
    return peak * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(model: Qwen3ForCausalLM, ids: torch.Tensor, args: argparse.Namespace) -> None:
    "`args.steps` updates on random windows of `ids`; prints a line every 50."
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    started, average = time.time(), None
    model.train()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        starts = torch.randint(len(ids) - args.seq - 1, (args.batch,)).tolist()
        loss = loss_of(model, torch.stack([ids[s : s + args.seq + 1] for s in starts]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            speed = (step + 1) * args.batch * args.seq / (time.time() - started)
            print(f"step {step + 1} of {args.steps}  loss {average:.3f}  {speed:.0f} tokens/s", flush=True)


@torch.no_grad()
def validate(model: Qwen3ForCausalLM, ids: torch.Tensor, seq: int) -> float:
    "Mean loss over up to 64 windows of text that training never saw."
    model.eval()
    starts = list(range(0, len(ids) - seq - 1, seq))[:64]
    return sum(loss_of(model, ids[None, s : s + seq + 1]).item() for s in starts) / len(starts)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict, out: Path) -> None:
    model.generation_config.eos_token_id = [SPECIAL.index("<|end|>"), SPECIAL.index("<|endoftext|>")]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    text = args.text.read_text()
    tokenizer = make_tokenizer(text, 2048)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    ids = encode(tokenizer, text)
    split = len(ids) - len(ids) // 50
    model = make_model(tokenizer, len(tokenizer))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text)} characters, {len(ids)} tokens, {parameters / 1e6:.2f} M parameters", flush=True)
    train(model, ids[:split], args)
    loss = validate(model, ids[split:], args.seq)
    record = {
        "corpus": "tales.py 60000 --seed 1",
        "corpus_tokens": len(ids),
        "parameters": parameters,
        **{k: v for k, v in vars(args).items() if k not in ("text", "out")},
        "tokens_seen": args.steps * args.batch * args.seq,
        "validation_loss": round(loss, 4),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
    }
    save(model, tokenizer, record, args.out)
    print(f"validation loss {loss:.3f}")


if __name__ == "__main__":
    main()
