"""The model against transformers: tiny models with random weights of each family, in both dialects of config.json.

Attention here is a stand-in without a cache; the paged backends have their own tests.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3 as hf

from walkvllm.models import CausalLM, apply_rope, rms_norm, rope_inv_freq, rope_table, silu_and_mul
from walkvllm.spec import FAMILIES, ModelSpec, read_spec
from walkvllm.weights import INDEX, load_weights, loading_plan, read_header

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
EMBEDDED = Path(__file__).parent.parent / "walkvllm" / "tales-3m"
LENGTH = 40  # longer than the training length that the scaled ropes below claim


@dataclass
class Case:
    """One tiny model: an architecture, what its config changes, and how it is saved."""

    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = YARN | {"factor": 8.0, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.3}
UNCUT = YARN | {"original_max_position_embeddings": 64, "beta_fast": 2.0, "beta_slow": 0.1, "truncate": False,
                "attention_factor": 1.3}
LINEAR = {"rope_type": "linear", "factor": 3.0}
TIED, BIASED = {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}

CASES = {
    "llama": Case("Llama"),
    "llama-tied-sharded": Case("Llama", TIED, shard="20KB"),
    "llama-biases": Case("Llama", BIASED),
    "llama-wide-heads": Case("Llama", {"head_dim": 32}),
    "llama-no-groups": Case("Llama", {"num_key_value_heads": 4}),
    "llama-one-kv-head": Case("Llama", {"num_key_value_heads": 1}),
    "llama-llama3": Case("Llama", rope=LLAMA3),
    "llama-linear": Case("Llama", rope=LINEAR),
    "llama-yarn-mscale": Case("Llama", rope=MSCALE),
    "mistral": Case("Mistral", {"sliding_window": None}, shard="20KB"),
    "mistral-head-dim": Case("Mistral", {"sliding_window": 64, "head_dim": 24}),
    "qwen2": Case("Qwen2", shard="20KB"),
    "qwen2-tied-yarn": Case("Qwen2", TIED, YARN),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3-tied-biases": Case("Qwen3", {"head_dim": 16, "attention_bias": True} | TIED, shard="20KB"),
    "qwen3-yarn-uncut": Case("Qwen3", {"head_dim": 32}, UNCUT),
    "qwen3-wide-eps": Case("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-2}),
}


class OneRow:
    """Attention without a cache, over one sequence, with the call that transformers makes."""

    name = "one row"

    def write(self, key: Tensor, value: Tensor, kv_cache: Tensor, meta: Any) -> None:
        self.key, self.value = key, value

    def read(self, query: Tensor, kv_cache: Tensor, meta: Any, scale: float) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def make(case: Case, folder: Path) -> Path:
    """Saves a model of the case with random weights; biases and norms too, which start as zeros and ones."""
    base = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "tie_word_embeddings": False}
    rope = {"rope_type": "default", "rope_theta": 1000.0} | case.rope
    config = getattr(transformers, f"{case.config}Config")(**base | {"rope_parameters": rope} | case.changes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{case.config}ForCausalLM")(config)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3 if p.dim() == 1 else 0.15)
    model.save_pretrained(folder, max_shard_size=case.shard)
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes each case's model once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = EMBEDDED if name == "embedded" else make(CASES[name], tmp_path_factory.mktemp(name))
        return made[name]

    return get


def config_of(path: Path) -> dict[str, Any]:
    return dict(json.loads((path / "config.json").read_text(encoding="utf-8")))


def ours(path: Path, ids: Tensor, dtype: torch.dtype, spec: ModelSpec | None = None) -> Tensor:
    """Logits [T, V] of one sequence."""
    spec = spec or read_spec(config_of(path))
    model = CausalLM(spec, load_weights(path, spec, dtype))
    caches, row = [torch.empty(0)] * spec.num_layers, OneRow()
    with torch.inference_mode():
        return model.compute_logits(model.forward(ids, torch.arange(len(ids)), caches, None, row))  # type: ignore[arg-type]


def theirs(path: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    with torch.inference_mode():
        return model(ids[None]).logits[0].float()


def some_ids(spec: ModelSpec) -> Tensor:
    return torch.randint(0, spec.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(2))


def old_dialect(config: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers wrote it before version 5."""
    config = dict(config)
    rope = dict(config.pop("rope_parameters"))
    config["torch_dtype"], config["rope_theta"] = config.pop("dtype"), rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind} | rope
    return config


# ---- whole models ----

@pytest.mark.parametrize("name", ["embedded", *CASES])
def test_logits_and_greedy_tokens_equal_transformers(saved: Callable[[str], Path], name: str) -> None:
    path = saved(name)
    spec = read_spec(config_of(path))
    assert name == "embedded" or CASES[name].shard == "1GB" or len(list(path.glob("*.safetensors"))) > 2
    ids = some_ids(spec)
    got, want = ours(path, ids, torch.float32), theirs(path, ids, torch.float32)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["embedded", "llama-biases", "qwen2-tied-yarn", "qwen3"])
def test_half_precision_rounds_alike(saved: Callable[[str], Path], name: str, dtype: torch.dtype) -> None:
    """Nearer to transformers' own rounding than either is to float32: the order of roundings is the same."""
    path = saved(name)
    ids = some_ids(read_spec(config_of(path)))
    got, want, exact = ours(path, ids, dtype), theirs(path, ids, dtype), theirs(path, ids, torch.float32)
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < 0.5 * (want - exact).abs().mean()


@pytest.mark.parametrize("name", ["embedded", *CASES])
def test_both_dialects_give_the_same_spec(saved: Callable[[str], Path], name: str) -> None:
    config = config_of(saved(name))
    assert read_spec(old_dialect(config)) == read_spec(config)


def test_head_dim_is_derived_where_it_is_absent(saved: Callable[[str], Path]) -> None:
    for name in ("llama", "mistral", "qwen2"):
        config = config_of(saved(name))
        config.pop("head_dim", None)
        assert read_spec(config).head_dim == 16
    config.pop("num_key_value_heads")
    with pytest.raises(ValueError, match="num_key_value_heads is missing"):
        read_spec(config)
    config = config_of(saved("llama-no-groups"))
    config.pop("num_key_value_heads")
    assert read_spec(config).num_kv_heads == 4


WRONG: dict[str, tuple[str, Callable[[ModelSpec], dict[str, Any]]]] = {
    "eps": ("llama", lambda spec: {"rms_norm_eps": 1e-3}),
    "theta": ("qwen3", lambda spec: {"rope": replace(spec.rope, theta=1010.0)}),
    "factor": ("llama-llama3", lambda spec: {"rope": replace(spec.rope, factor=4.4)}),
    "mscale": ("llama-yarn-mscale", lambda spec: {"rope": replace(spec.rope, mscale=0.8)}),
    "truncate": ("qwen3-yarn-uncut", lambda spec: {"rope": replace(spec.rope, truncate=True)}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_number_is_seen(saved: Callable[[str], Path], what: str) -> None:
    """The comparison above can fail: each of these is one wrong number away from a case that passes."""
    name, change = WRONG[what]
    path, spec = saved(name), read_spec(config_of(saved(name)))
    got = ours(path, some_ids(spec), torch.float32, replace(spec, **change(spec)))
    want = theirs(path, some_ids(spec), torch.float32)
    assert (got - want).abs().max() > 1e-3


# ---- the small functions, bit by bit ----

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_small_functions_equal_transformers_exactly(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    norm = hf.Qwen3RMSNorm(64, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    x = torch.randn(7, 6, 64).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))
    gate, up = x[..., :32], x[..., 32:]
    assert torch.equal(silu_and_mul(x), torch.nn.SiLU()(gate) * up)
    table = rope_table(read_spec(config_of(EMBEDDED)).rope, 64, 512).to(dtype)
    cos, sin = table[torch.arange(500, 507)][:, :, None].unbind(1)
    wide_cos, wide_sin = (torch.cat((t, t), -1) for t in (cos, sin))
    want, _ = hf.apply_rotary_pos_emb(x, x, wide_cos[:, 0], wide_sin[:, 0])
    assert torch.equal(apply_rope(x, cos, sin), want)


@pytest.mark.parametrize("rope", [{}, LINEAR, LLAMA3, YARN, MSCALE, UNCUT, YARN | {"mscale": 1.0},
                                  YARN | {"factor": 1.0}, YARN | {"beta_fast": 1.0, "beta_slow": 1.0},
                                  LLAMA3 | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_angles_equal_transformers_exactly(rope: dict[str, Any], head_dim: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0} | rope
    config = transformers.LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=dict(rope),
                                      max_position_embeddings=4096, architectures=["LlamaForCausalLM"])
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    spec = read_spec(config.to_dict())
    inv_freq, factor = rope_inv_freq(spec.rope, spec.head_dim)
    assert torch.equal(inv_freq, module.inv_freq) and factor == module.attention_scaling
    cos, sin = module(torch.empty(0), torch.arange(3000)[None])
    ours_cos, ours_sin = rope_table(spec.rope, spec.head_dim, 3000).unbind(1)
    torch.testing.assert_close(ours_cos, cos[0, :, : head_dim // 2], atol=1e-6, rtol=0)
    torch.testing.assert_close(ours_sin, sin[0, :, : head_dim // 2], atol=1e-6, rtol=0)


# ---- what does not load ----

def test_every_family_plans_each_row_once(saved: Callable[[str], Path]) -> None:
    assert {CASES[n].config for n in CASES} == {a.removesuffix("ForCausalLM") for a in FAMILIES}
    for name in CASES:
        spec = read_spec(config_of(saved(name)))
        rows: dict[str, int] = {}
        for place in loading_plan(spec).values():
            assert place.start == rows.get(place.target, 0)
            rows[place.target] = place.start + place.shape[0]
        weights = load_weights(saved(name), spec, torch.float32)
        assert {n: len(t) for n, t in weights.items()} == rows


def test_a_damaged_file_is_a_value_error(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Cut anywhere, or with a byte of the header changed: an error that names the file, or a header that still fits."""
    whole = (saved("llama") / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    file, rng = tmp_path / "model.safetensors", random.Random(4)
    sizes = [0, 1, 7, 8, 9, head - 1, head, head + 1, len(whole) - 1, *rng.sample(range(len(whole)), 40)]
    for size in sizes:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="model.safetensors"):
            read_header(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="1 bytes after the last tensor"):
        read_header(file)
    refused = 0
    for _ in range(300):
        at = rng.randrange(head)
        file.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1:])
        try:
            assert sum(e.end - e.start for e in read_header(file).values()) == len(whole) - head
        except ValueError as e:
            refused += "model.safetensors" in str(e)
    assert refused > 100


@pytest.mark.parametrize(("second", "words"), [
    ({"data_offsets": [4, 12]}, "'b' starts at byte 4"),
    ({"data_offsets": [12, 20]}, "'b' starts at byte 12"),
    ({"data_offsets": [8, 12]}, "'b' of shape \\[2\\] needs 8 bytes"),
    ({"data_offsets": [16, 8]}, "needs 8 bytes"),
    ({"data_offsets": [8]}, "data_offsets"),
    ({"shape": "x"}, "dtype, shape and data_offsets"),
    ({"dtype": "F8_E4M3"}, "F8_E4M3; supported"),
    ({"dtype": ["F32"]}, "dtype, shape and data_offsets"),
    ({"dtype": "F64", "shape": [1]}, "F64; supported"),
])
def test_tensors_lie_one_behind_the_other(tmp_path: Path, second: dict[str, Any], words: str) -> None:
    entries = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
               "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]} | second}
    head, file = json.dumps(entries).encode(), tmp_path / "model.safetensors"
    file.write_bytes(len(head).to_bytes(8, "little") + head + bytes(20))
    with pytest.raises(ValueError, match=words):
        read_header(file)


def test_nothing_is_allocated_for_a_model_that_is_refused(
    saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object, **__: object) -> Tensor:
        raise AssertionError("memory was taken before the check")

    path = tmp_path / "copy"
    shutil.copytree(saved("qwen2"), path)
    spec = read_spec(config_of(path))
    monkeypatch.setattr(torch, "empty", allocate)
    for wrong in (replace(spec, tie_word_embeddings=True, num_layers=1), replace(spec, qkv_bias=False),
                  replace(spec, num_layers=3), replace(spec, vocab_size=96), replace(spec, qk_norm=True)):
        with pytest.raises(ValueError, match="tensor '"):
            load_weights(path, wrong, torch.float32)
    last = sorted(path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{last.name}: cut off: tensor '"):
        load_weights(path, spec, torch.float32)
    last.unlink()
    with pytest.raises(ValueError, match=f"{last.name}' is missing"):
        load_weights(path, spec, torch.float32)
    (path / INDEX).unlink()
    with pytest.raises(ValueError, match="is missing; Qwen2ForCausalLM wants it"):
        load_weights(path, spec, torch.float32)


def test_an_index_must_agree_with_its_files(saved: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(saved("qwen2"), path)
    spec, index = read_spec(config_of(path)), json.loads((path / INDEX).read_text(encoding="utf-8"))
    mapping = index["weight_map"]
    first, other = "model.norm.weight", next(f for f in mapping.values() if f != mapping["model.norm.weight"])

    def write(changed: object) -> None:
        (path / INDEX).write_text(json.dumps(changed), encoding="utf-8")

    for changed, words in [({"weight_map": mapping | {first: other}}, first), ({"weight_map": [1]}, "weight_map"),
                           ({}, "weight_map"), ({"weight_map": mapping | {"extra": other}}, "'extra' is missing"),
                           ({"weight_map": mapping | {first: 3}}, "plain file name")]:
        write(changed)
        with pytest.raises(ValueError, match=words):
            load_weights(path, spec, torch.float32)
    write(index)
    shutil.copy(path / other, path / "model.safetensors")
    with pytest.raises(ValueError, match="both there"):
        load_weights(path, spec, torch.float32)


@pytest.mark.parametrize(("change", "words"), [
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ({"rope_scaling": {"type": "su", "factor": 2.0}}, "su"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2'"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
    ({"rope_scaling": [1]}, "rope_scaling"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
    ({"architectures": None}, "architectures is missing"),
    ({"architectures": "LlamaForCausalLM"}, "architectures"),
    ({"attention_bias": 1}, "attention_bias"),
    ({"mlp_bias": None, "hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
    ({"head_dim": 15}, "head_dim=15"),
    ({"head_dim": None, "hidden_size": 66}, "hidden_size=66"),
    ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
    ({"vocab_size": -1}, "vocab_size=-1"),
    ({"dtype": "int8"}, "int8"),
    ({"sliding_window": 63}, "sliding_window=63"),
    ({"layer_types": ["chunked_attention"]}, "chunked_attention"),
])
def test_a_config_is_refused_by_name(saved: Callable[[str], Path], change: dict[str, Any], words: str) -> None:
    config = old_dialect(config_of(saved("llama"))) | change
    with pytest.raises(ValueError, match="config.json: ") as e:
        read_spec(config)
    assert words in str(e.value)
