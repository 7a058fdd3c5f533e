"""Tiny random PyTorch checkpoints on disk, in the layouts and file forms that convert reads."""

import functools
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch_checkpoints import storage, table, tensor, write

WIDTH, HEADS, LAYERS, VOCABULARY = 64, 4, 2, 300
MARKERS = ["<|user|>", "<|end|>", "\n"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m['content'] }}<|end|>\n{% endfor %}"


@dataclass
class Checkpoint:
    """What a checkpoint holds: config.json, and float32 tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]

    def save(self, folder: Path, form: str = "safetensors", tokenizer: str = "json") -> Path:
        """Writes the folder; forms: safetensors, sharded, bin, sharded bin."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", self.config)
        _write_tokenizer(folder, tokenizer)
        suffix, save = ("bin", _save_bin) if "bin" in form else ("safetensors", save_file)
        stem = "pytorch_model" if suffix == "bin" else "model"
        if "sharded" not in form:
            save(self.tensors, folder / f"{stem}.{suffix}")
            return folder
        names = sorted(self.tensors)
        weight_map = {}
        for number, part in enumerate((names[::2], names[1::2]), 1):
            shard = f"{stem}-{number:05d}-of-00002.{suffix}"
            save({name: self.tensors[name] for name in part}, folder / shard)
            weight_map |= dict.fromkeys(part, shard)
        write_json(folder / f"{stem}.{suffix}.index.json", {"weight_map": weight_map})
        return folder


def llama(kv_heads: int = HEADS, tied: bool = True, bias: bool = False, **extra) -> Checkpoint:
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "attention_bias": bias,
        "eos_token_id": 4,
        "torch_dtype": "float32",
    } | extra
    size, inner = config.get("head_dim", WIDTH // HEADS), config["intermediate_size"]
    projections = {
        "self_attn.q_proj": (HEADS * size, WIDTH),
        "self_attn.k_proj": (kv_heads * size, WIDTH),
        "self_attn.v_proj": (kv_heads * size, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * size),
    }
    layer = {f"{name}.weight": shape for name, shape in projections.items()}
    if bias:
        layer |= {f"{name}.bias": shape[:1] for name, shape in projections.items()}
    layer |= dict.fromkeys(["mlp.gate_proj.weight", "mlp.up_proj.weight"], (inner, WIDTH))
    layer |= {"mlp.down_proj.weight": (WIDTH, inner)}
    layer |= dict.fromkeys(["input_layernorm.weight", "post_attention_layernorm.weight"], (WIDTH,))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    return Checkpoint(config, _random(shapes, "model.layers", layer))


def gpt_neox(ssa: dict[str, bool] | None = None, **extra) -> Checkpoint:
    """Without ``ssa`` settings an ordinary GPT-NeoX; {} has query and value temperatures."""
    config = {
        "model_type": "gpt_neox",
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "use_parallel_residual": True,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "eos_token_id": 4,
        "torch_dtype": "float32",
    } | extra
    linears = {
        "attention.query_key_value": (3 * WIDTH, WIDTH),
        "attention.dense": (WIDTH, WIDTH),
        "mlp.dense_h_to_4h": (4 * WIDTH, WIDTH),
        "mlp.dense_4h_to_h": (WIDTH, 4 * WIDTH),
    }
    norms = dict.fromkeys(["input_layernorm", "post_attention_layernorm"], (WIDTH,))
    layer = {f"{name}.weight": shape for name, shape in (linears | norms).items()}
    layer |= {f"{name}.bias": shape[:1] for name, shape in (linears | norms).items()}
    if ssa is not None:
        parts = ("query", "value", "token_aware", "position_aware")
        ssa = {"key": False, "per_head": True, **dict.fromkeys(parts, True), **ssa}
        config["selective_self_attention"] = ssa
        for part in filter(ssa.get, ("query", "key", "value")):
            if ssa["token_aware"]:
                layer[f"attention.ssa_{part}.weight"] = (HEADS, WIDTH)
            if ssa["position_aware"]:
                layer[f"attention.ssa_{part}_alpha"] = (HEADS,)
    shapes = dict.fromkeys(["gpt_neox.embed_in.weight", "embed_out.weight"], (VOCABULARY, WIDTH))
    shapes |= dict.fromkeys(
        [f"gpt_neox.final_layer_norm.{p}" for p in ("weight", "bias")], (WIDTH,)
    )
    return Checkpoint(config, _random(shapes, "gpt_neox.layers", layer))


def dolomite(
    tied: bool = True, kv_heads: int | None = None, remainder: str = "none", **extra
) -> Checkpoint:
    """``kv_heads`` makes grouped heads; ``remainder`` is a form of the stick_breaking settings."""
    config = {
        "model_type": "stickbreaking",
        "activation_function": "swiglu",
        "add_bias": False,
        "attention_head_type": "gqa" if kv_heads else "mha",
        "attention_multiplier": 0.3,
        "layer_norm_epsilon": 1e-5,
        "m_emb": 3.0,
        "m_residual": 0.6,
        "m_width": 1.5,
        "n_embd": WIDTH,
        "n_head": HEADS,
        "n_inner": 128,
        "n_layer": LAYERS,
        "n_positions": 128,
        "normalization_function": "rmsnorm",
        "num_key_value_heads": kv_heads or HEADS,
        "position_embedding_type": "nope",
        "sb_remainder": remainder != "none",
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "eos_token_id": 4,
        "torch_dtype": "float32",
    } | extra
    layer = {
        "ln_1.weight": (WIDTH,),
        "attn.c_attn.weight": (WIDTH + 2 * (kv_heads or HEADS) * WIDTH // HEADS, WIDTH),
        "attn.c_proj.weight": (WIDTH, WIDTH),
        "ln_2.weight": (WIDTH,),
        "mlp.c_fc.weight": (2 * 128, WIDTH),
        "mlp.c_proj.weight": (WIDTH, 128),
    }
    if "head_bias" in remainder:
        layer["attn.head_bias"] = (HEADS, WIDTH // HEADS)
    if "norm" in remainder:
        layer |= dict.fromkeys(["attn.norm.weight", "attn.norm.bias"], (WIDTH,))
    shapes = {"transformer.wte.weight": (VOCABULARY, WIDTH), "transformer.ln_f.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    return Checkpoint(config, _random(shapes, "transformer.h", layer))


def _random(shapes, layers: str, layer: dict) -> dict[str, np.ndarray]:
    """Tensors with values that let every part of the model show in the logits."""
    shapes = shapes | {
        f"{layers}.{index}.{name}": shape
        for index in range(LAYERS)
        for name, shape in layer.items()
    }
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in shapes.items():
        is_norm = name.endswith(".weight") and len(shape) == 1
        spread = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = (is_norm + spread * random.standard_normal(shape)).astype(np.float32)
    return tensors


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")


def _save_bin(tensors: dict[str, np.ndarray], file: Path) -> None:
    """As torch.save writes a state dict."""
    entries, storages = {}, {}
    for key, (name, array) in enumerate(tensors.items()):
        strides = tuple(stride // array.itemsize for stride in array.strides)
        of = storage("torch.FloatStorage", array.size, str(key))
        entries[name] = tensor(array.shape, strides, of=of)
        storages[str(key)] = array.tobytes()
    write(file, table(entries), storages)


def _write_tokenizer(folder: Path, kind: str) -> None:
    names = {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": TEMPLATE}
    if kind == "sentencepiece":
        config["tokenizer_class"] = "LlamaTokenizer"
        (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    else:
        byte_level().save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", config)


@functools.cache
def sentencepiece_model() -> bytes:
    """A SentencePiece BPE model trained in a moment; <|end|> has id 4."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the user said hello to the world", "hello hello the user"] * 5),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=MARKERS,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return model.getvalue()


def byte_level() -> Tokenizer:
    """A byte-level BPE tokenizer without merges; <|end|> has id 4."""
    pieces = ["<unk>", "<s>", "</s>", *MARKERS[:2], *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, []))
    tokenizer.add_special_tokens(pieces[:5])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
