"""Writes a Llama or Qwen3 model directory as a GGUF file for llama.cpp, without a vocabulary.

    python gguf_model.py MODEL OUT.gguf float32|bfloat16

It runs in llama.cpp's environment, without torch: the safetensors file is read as what it is, a JSON header and bytes.
Matrices get the wanted type, norms are float32 as llama.cpp wants them.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]
import numpy as np

LAYER = {  # a layer's parts, by their names in a checkpoint and in GGUF
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def widened(words: np.ndarray) -> np.ndarray:
    """bfloat16 as float32: its bits are the upper half."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def narrowed(values: np.ndarray) -> np.ndarray:
    """float32 as bfloat16 bits, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of a checkpoint, as float32."""
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        (length,) = struct.unpack("<Q", data[:8].tobytes())
        header = json.loads(data[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (8 + length + at for at in entry["data_offsets"])
            kind = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16}[entry["dtype"]]
            raw = np.frombuffer(data[first:last].tobytes(), kind).reshape(entry["shape"])
            yield name, widened(raw) if kind is np.uint16 else raw.astype(np.float32)


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF."""
    stem, _, last = name.rpartition(".")
    if stem in ENDS:
        return f"{ENDS[stem]}.{last}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{LAYER[part]}.{last}"


def neighbours(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows so that a head's halves lie pair by pair: llama.cpp rotates neighbours in its architecture "llama"."""
    heads = matrix.reshape(-1, 2, head_dim // 2, *matrix.shape[1:])
    return heads.swapaxes(1, 2).reshape(matrix.shape)


def settings(writer: Any, config: dict[str, Any], head_dim: int, dtype: str) -> None:
    """What llama.cpp must know of the model."""
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.MOSTLY_BF16 if dtype == "bfloat16" else kinds.ALL_F32)
    writer.add_tokenizer_model("no_vocab")


def convert(folder: Path, out: Path, dtype: str) -> None:
    """Writes the file."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise SystemExit(f"model_type={kind!r}: only llama and qwen3 are converted")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(str(out), kind)
    settings(writer, config, head_dim, dtype)
    for name, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            values = neighbours(values, head_dim)
        if values.ndim > 1 and dtype == "bfloat16":
            raw = narrowed(values).view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
