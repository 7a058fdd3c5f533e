"""A checkpoint with something wrong in it ends in one line that names it, and leaves nothing."""

import functools
import pickle
from pathlib import Path

import numpy as np
import pytest
from damage import INDEX, both, config, cut, indexed, longer, refusal, remove, sizes, tensors, text
from safetensors.numpy import load_file, save_file
from tiny_checkpoints import HEADS, WIDTH, dolomite, gpt_neox, llama
from torch_checkpoints import write

from mlx_selective.convert import convert

NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
CONFIG = {
    "missing": (remove("config.json"), "config.json: no such file"),
    "no JSON": (text("config.json", '{"model_type": "llama",'), "config.json is not readable JSON"),
    "no text": (text("config.json", b"\xff\xfe\x00"), "config.json is not readable JSON"),
    "deep JSON": (text("config.json", "[" * 100_000), "config.json is not readable JSON"),
    "no object": (text("config.json", '["llama"]'), "config.json must hold a JSON object"),
    "no model_type": (config(model_type=None), "model_type None", "llama, gpt_neox, stickbreaking"),
    "unknown model_type": (config(model_type="gemma2"), "model_type 'gemma2'", "llama, gpt_neox"),
    "model_type a list": (config(model_type=["llama"]), "model_type ['llama']"),
    **{
        f"no {field}": (config(**{field: None}), f"config.json: the field {field} is missing")
        for field in ("hidden_size", "num_hidden_layers", "rms_norm_eps", "vocab_size")
    },
    **sizes("num_hidden_layers"),
    **sizes("num_attention_heads"),
    **sizes("num_key_value_heads"),
    **sizes("hidden_size"),
    **sizes("head_dim"),
    **sizes("vocab_size"),
    **sizes("max_position_embeddings"),
    "heads that do not divide": (
        config(num_attention_heads=3, num_key_value_heads=3),
        "hidden_size 64 must be a multiple of num_attention_heads 3",
    ),
    "key heads that do not divide": (
        config(num_key_value_heads=3), "num_attention_heads", "multiple of num_key_value_heads",
    ),
    "epsilon a string": (config(rms_norm_eps="1e-5"), "config.json: rms_norm_eps must", "'1e-5'"),
    "epsilon negative": (config(rms_norm_eps=-1e-5), "config.json: rms_norm_eps must", "-1e-05"),
    "theta a list": (config(rope_theta=[1.0]), "config.json: rope_theta must be", "[1.0]"),
    "tying a string": (config(tie_word_embeddings="no"), "tie_word_embeddings must be", "'no'"),
    "bias a number": (config(attention_bias=1), "attention_bias must be true or false", "1"),
    "activation": (config(hidden_act="relu"), "config.json: hidden_act 'relu' is not supported"),
    "rope type": (
        config(rope_scaling={"type": "spiral", "factor": 2.0}), "config.json", "spiral",
    ),
    "rope without factor": (config(rope_scaling={"type": "linear"}), "config.json", "factor"),
    "rope_scaling a string": (config(rope_scaling="linear"), "config.json: rope_scaling"),
    "rope_parameters a list": (config(rope_parameters=["x"]), "config.json: rope_parameters"),
    "sliding window": (config(layer_types=["sliding_attention", "full_attention"]), "sliding"),
    "layer_types unknown": (config(layer_types=["none", "none"]), "config.json"),
    "layer_types too short": (config(layer_types=["full_attention"]), "config.json: layer_types"),
    "quantised": (config(quantization_config={"quant_method": "gptq"}), "config.json", "quantised"),
    "quantised by mlx": (config(quantization={"bits": 4}), "config.json", "quantised"),
}  # fmt: skip
WEIGHTS = {
    "none": (remove("model.safetensors"), "no weights", "model.safetensors", "pytorch_model.bin"),
    "missing tensor": (tensors({NORM: None}), "tensor model.norm.weight is missing"),
    "missing layer": (config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight"),
    "further layer": (config(num_hidden_layers=1), "tensor model.layers.1."),
    "unknown tensor": (tensors({"visual.proj": np.ones(3, np.float32)}), "visual.proj is not part"),
    "tensor without a place": (
        tensors({"model.layers.0.mlp.up_proj.bias": np.ones(128, np.float32)}),
        "tensor model.layers.0.mlp.up_proj.bias has no place",
    ),
    "wrong shape": (
        tensors({NORM: np.ones(WIDTH + 1, np.float32)}), "model.norm.weight", "(65,)", "(64,)",
    ),
    "wrong vocabulary": (config(vocab_size=301), "model.embed_tokens.weight", "(300,", "(301,"),
    "transposed": (tensors({DOWN: np.ones((128, 64), np.float32)}), DOWN),
    "whole numbers": (tensors({NORM: np.ones(WIDTH, np.int32)}), "model.norm.weight", "int32"),
    **{
        f"cut to {keep}": (cut("model.safetensors", keep), "model.safetensors is not a whole")
        for keep in (0, 0.00001, 0.01, 0.5, 0.999)
    },
    "trailing bytes": (longer("model.safetensors"), "model.safetensors is not a whole"),
    "another kind of file": (text("model.safetensors", "PK\3\4" * 30), "model.safetensors is not"),
    "an LFS pointer": (
        text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "model.safetensors is not a whole",
    ),
}  # fmt: skip
INDEXED = {
    "missing file": (indexed("model-3.safetensors"), "model-3.safetensors: no such file", INDEX),
    "outside": (indexed("../x"), INDEX, "'../x' is not a file of this folder"),
    "absolute": (indexed("/etc/passwd"), INDEX, "'/etc/passwd' is not a file of this folder"),
    "backslash": (indexed("..\\x"), INDEX, "is not a file of this folder"),
    "drive": (indexed("C:x"), INDEX, "is not a file of this folder"),
    "folder": (indexed(".."), INDEX, "'..' is not a file of this folder"),
    "no name": (indexed(7), INDEX, "7 is not a file of this folder"),
    "list": (indexed(["x"]), INDEX, "['x'] is not a file of this folder"),
    "other file": (indexed("tokenizer.json"), "tokenizer.json is not a whole safetensors file"),
    "no JSON": (text(INDEX, "{"), f"{INDEX} is not readable JSON"),
    "no weight_map": (text(INDEX, "{}"), f"{INDEX}: weight_map"),
    "no index": (remove(INDEX), "model-00001-of-00002.safetensors is a shard", INDEX),
    "missing shard": (
        remove("model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors: no such",
    ),
    "cut shard": (cut("model-00002-of-00002.safetensors", 0.5), "model-00002-of-00002.safe"),
}  # fmt: skip
PICKLES = {
    **{
        f"cut to {keep}": (cut("pytorch_model.bin", keep), "pytorch_model.bin: ")
        for keep in (0, 0.01, 0.5, 0.999)
    },
    "text": (text("pytorch_model.bin", "hello"), "pytorch_model.bin: not a zip"),
    "bare pickle": (text("pytorch_model.bin", pickle.dumps({})), "pytorch_model.bin: not a zip"),
}
TOKENIZER = {
    "none": (remove("tokenizer.json"), "no tokenizer (tokenizer.json or tokenizer.model)"),
    "cut": (cut("tokenizer.json", 0.5), "tokenizer.json"),
    "no tokenizer": (text("tokenizer.json", "{}"), "tokenizer.json"),
    "config cut": (cut("tokenizer_config.json", 0.5), "tokenizer_config.json"),
    "generation config cut": (text("generation_config.json", "{"), "generation_config.json"),
    "no end": (
        both(config(eos_token_id=None), text("tokenizer_config.json", "{}")), "eos_token_id",
    ),
    "no config, no end": (
        both(config(eos_token_id=None), remove("tokenizer_config.json")), "eos_token_id",
    ),
    "unknown end": (
        both(config(eos_token_id=None), text("tokenizer_config.json", '{"eos_token": "<x>"}')),
        "eos_token_id",
    ),
    "end a string": (config(eos_token_id="<|end|>"), "config.json: eos_token_id", "'<|end|>'"),
    "end beyond the vocabulary": (config(eos_token_id=300), "config.json: eos_token_id", "300"),
    "empty list of ends": (config(eos_token_id=[]), "config.json: eos_token_id", "[]"),
}  # fmt: skip
SENTENCEPIECE = {
    "cut": (cut("tokenizer.model", 0.5), "tokenizer.model: not a whole SentencePiece model"),
    "empty": (cut("tokenizer.model", 0), "tokenizer.model: not a whole SentencePiece model"),
    "config": (text("tokenizer_config.json", "[]"), "tokenizer_config.json must hold"),
    "no end": (
        both(config(eos_token_id=None), text("tokenizer_config.json", '{"eos_token": null}')),
        "eos_token_id",
    ),
}
NEOX = {
    "no layer_norm_eps": (config(layer_norm_eps=None), "the field layer_norm_eps is missing"),
    "heads that do not divide": (config(num_attention_heads=3), "hidden_size", "multiple of"),
    "hidden_act": (config(hidden_act="tanh"), "config.json: hidden_act 'tanh'"),
    "rotary_pct": (config(rotary_pct="a quarter"), "config.json: rotary_pct must be"),
    "rope scaling": (config(rope_scaling={"type": "linear", "factor": 2}), "config.json", "linear"),
    "nested rope scaling": (
        config(rope_parameters={"rope_type": "linear", "factor": 2}), "config.json", "linear",
    ),
    "ssa no object": (config(selective_self_attention=True), "selective_self_attention must be"),
    "ssa key without its tensors": (
        config(selective_self_attention={"query": False, "value": False, "key": True}),
        "attention.ssa_key.weight is missing",
    ),
    "ssa not per head": (
        config(selective_self_attention={"per_head": False}), "selective_self_attention.per_head",
    ),
    "ssa query a string": (config(selective_self_attention={"query": "yes"}), "query", "'yes'"),
    "ssa token_aware a number": (
        config(selective_self_attention={"token_aware": 1}),
        "selective_self_attention.token_aware must be true or false, got 1",
    ),
    "ssa of neither kind": (
        config(selective_self_attention={"token_aware": False, "position_aware": False}),
        "attention.token_map and attention.position_map are both none",
    ),
    "ssa without its tensors": (
        config(selective_self_attention={}), "attention.ssa_query.weight is missing",
    ),
    "ssa tensors untold": (
        tensors({"gpt_neox.layers.0.attention.ssa_query_alpha": np.ones(HEADS, np.float32)}),
        "tensor gpt_neox.layers.0.attention.ssa_query_alpha has no place",
    ),
    "tied": (
        both(config(tie_word_embeddings=True), tensors({"embed_out.weight": None})),
        "tensor embed_out.weight is missing",
    ),
}  # fmt: skip
DOLOMITE = {
    **{
        f"no {field}": (config(**{field: None}), f"config.json: the field {field} is missing")
        for field in ("n_embd", "n_head", "n_layer", "n_inner", "layer_norm_epsilon")
    },
    **sizes("n_layer"),
    **sizes("n_head"),
    **sizes("n_embd"),
    "n_positions": (config(n_positions="long"), "config.json: n_positions must be", "'long'"),
    "heads that do not divide": (config(n_head=3, num_key_value_heads=3), "n_embd", "multiple of"),
    "grouped heads": (config(num_key_value_heads=2), "config.json: num_key_value_heads 2"),
    "head type": (config(attention_head_type="mqa"), "config.json: attention_head_type 'mqa'"),
    "activation": (config(activation_function="gelu"), "config.json: activation_function 'gelu'"),
    "positions": (config(position_embedding_type="rope"), "position_embedding_type 'rope'"),
    "remainder": (config(sb_remainder="yes"), "config.json: sb_remainder 'yes'"),
    "remainder without its bias": (
        config(sb_remainder=None),
        "tensor transformer.h.0.attn.head_bias is missing",
        '"attention": {"remainder": "value"}',
    ),
    "attention a string": (config(attention="value"), "config.json: attention must be", "'value'"),
    "unknown remainder": (
        config(attention={"remainder": "bias"}), "attention.remainder must be one of", "'bias'",
    ),
    "unknown grouping": (
        config(attention={"grouping": 2}), "attention.grouping must be one of", "got 2",
    ),
    "unknown attention field": (
        config(attention={"norm": True}), "attention.norm is not a field of stick_breaking",
    ),
    "grouped heads of no number": (
        config(attention_head_type="gqa", num_key_value_heads=None),
        "config.json: the field num_key_value_heads is missing",
    ),
    "key heads that do not divide": (
        config(attention_head_type="gqa", num_key_value_heads=3), "multiple of num_key_value_heads",
    ),
    "grouped heads, fused shape": (
        config(attention_head_type="gqa", num_key_value_heads=2),
        "tensor transformer.h.0.attn.c_attn.weight has shape (192, 64)", "(128, 64)",
    ),
    "multiplier": (config(m_emb="6"), "config.json: m_emb must be", "'6'"),
    "bias": (config(add_bias=True), "bias"),
    "fused shape": (
        tensors({"transformer.h.1.attn.c_attn.weight": np.ones((191, 64), np.float32)}),
        "tensor transformer.h.1.attn.c_attn.weight has shape (191, 64)", "(192, 64)",
    ),
}  # fmt: skip
GROUPS = {
    "config": (llama(), "safetensors", "json", CONFIG),
    "weights": (llama(), "safetensors", "json", WEIGHTS),
    "index": (llama(), "sharded", "json", INDEXED),
    "pickle": (llama(), "bin", "json", PICKLES),
    "tokenizer": (llama(), "safetensors", "json", TOKENIZER),
    "sentencepiece": (llama(), "safetensors", "sentencepiece", SENTENCEPIECE),
    "neox": (gpt_neox(), "safetensors", "json", NEOX),
    "dolomite": (dolomite(), "safetensors", "json", DOLOMITE),
}


@pytest.fixture
def refused(tmp_path, capfd):
    """Runs convert on a source; gives the line that refuses it."""
    (tmp_path / "out").mkdir()
    return functools.partial(refusal, tmp_path, capfd)


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group, (*_, cases) in GROUPS.items() for name in cases]
)
def test_a_damaged_source(refused, tmp_path, group, name):
    checkpoint, form, tokenizer, cases = GROUPS[group]
    damage, *words = cases[name]
    source = checkpoint.save(tmp_path / "source", form, tokenizer)
    damage(source)
    line = refused(source)
    assert all(word in line for word in words), line


def test_the_undamaged_sources_convert(tmp_path):
    for group, (checkpoint, form, tokenizer, _) in GROUPS.items():
        convert(str(checkpoint.save(tmp_path / group, form, tokenizer)), tmp_path / f"{group}-out")


class Evil:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


def test_a_pickle_that_calls_something_calls_nothing(refused, tmp_path):
    marker = tmp_path / "executed"
    evil = pickle.dumps({"model.norm.weight": Evil(marker)}, 2)
    source = llama().save(tmp_path / "source", "bin")
    write(source / "pytorch_model.bin", evil, whole=True)
    line = refused(source)
    assert "pytorch_model.bin: the pickle calls " in line and "open" in line
    assert not marker.exists()
    pickle.loads(evil)["model.norm.weight"].close()
    assert marker.exists()


def test_a_tensor_in_two_shards(refused, tmp_path):
    source = llama().save(tmp_path / "source", "sharded")
    first, second = sorted(source.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second)
    assert f"{second}: tensor {name} also stands in another file" in refused(source)
