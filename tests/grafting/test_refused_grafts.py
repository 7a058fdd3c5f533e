"""What a graft would silently lose is refused by name, on models of mlx-lm that have it."""

import ast
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache
from tiny import attention_of, config_of, grafted, module_of, present, randomise, stock, tokens
from tiny_families import SHARED

from mlx_selective import UserError, graft
from mlx_selective.grafting.refusals import refuse_parameters
from mlx_selective.grafting.trial import try_out
from mlx_selective.model import Model, ModelArgs

_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_EXPERTS = {"n_routed_experts": 4, "first_k_dense_replace": 1, "v_head_dim": 8}
_SIZES = {"vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8}
_GEMMA3N = {
    **{**SHARED, **_ALTERNATING, **_SIZES, "sliding_window": 8, "num_kv_shared_layers": 2},
    **{"model_type": "gemma3n_text", "intermediate_size": [48] * 4, "laurel_rank": 8},
    **{"rope_local_base_freq": 1e4, "activation_sparsity_pattern": [0.0] * 4},
    **{"altup_num_inputs": 2, "altup_active_idx": 0, "altup_correct_scale": True},
    **{"altup_coef_clip": None, "query_pre_attn_scalar": 8, "final_logit_softcapping": None},
}
_LLAMA4 = {
    **{**SHARED, "num_hidden_layers": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8},
    **{"model_type": "llama4_text", "intermediate_size_mlp": 48},
    **{"interleave_moe_layer_step": 2, "use_qk_norm": True},
}
_LINEAR = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2},
}
_PHI3SMALL = {
    **{"dense_attention_every_n_layers": 2, "ff_intermediate_size": 48, "gegelu_limit": 20.0},
    **{"blocksparse_block_size": 64, "blocksparse_num_local_blocks": 1},
    **{"blocksparse_vert_stride": 2, "rope_embedding_base": 1e4, "rope_position_scale": 1.0},
    **{"mup_attn_multiplier": 1.0, "mup_use_scaling": True},
    **{"mup_embedding_multiplier": 1.0, "mup_width_multiplier": 1.0},
}
_HUNYUAN = {
    **{"moe_topk": 1, "num_shared_expert": 1, "use_mixed_mlp_moe": False, "use_qk_norm": True},
    **{"rope_scaling": {"alpha": 1.0, "factor": 1.0, "type": "dynamic"}, "cla_share_factor": 2},
}
_JAMBA = {
    **{"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1},
    **{"expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2},
}
_MINICPM3 = {
    **{**_LATENT, "dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    "rope_scaling": {
        **{"type": "longrope", "original_max_position_embeddings": 512},
        **{"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    },
}
_AFM7 = {
    **{"hidden_dim": 32, "num_layers": 3, "num_kv_reuse_layers": 1, "num_heads": 4},
    **{"num_kv_heads": 2, "hidden_dim_scale_factor": 1.5},
}

SHARED_KV = "keys and values shared between layers"
RECURRENCE = "layer 0 of this model has a recurrence or a convolution, which a graft would lose."
TWICE = "3 layers and 6 caches: its layers share keys and values or run more than once"
#: family -> what its config has beside or instead of the shared fields, words of the refusal
FEATURES = {
    "gemma2": ({}, "logit soft-capping (attn_logit_softcapping 50.0)"),
    "gemma3_text": (
        {"num_hidden_layers": 6, "sliding_window": 512, "sliding_window_pattern": 3},
        "layer 0 of this model has a sliding window",
    ),
    "olmo3": ({**_ALTERNATING, "sliding_window": 8}, "sliding_attention layers (layer_types)"),
    "llama": ({**_ALTERNATING, "sliding_window": 8}, "sliding_attention layers (layer_types)"),
    "cohere2": ({"sliding_window": 8, "sliding_window_pattern": 2}, "(sliding_window 8)"),
    "gpt_oss": (
        {**_ALTERNATING, "sliding_window": 8, "rope_scaling": {"rope_type": "default"}},
        "sliding_attention layers (layer_types)",
    ),
    "deepseek_v3": ({**_LATENT, **_EXPERTS}, "latent attention (kv_lora_rank 16)"),
    "minicpm3": (_MINICPM3, "latent attention (kv_lora_rank 16)"),
    "youtu_llm": ({**_LATENT, "v_head_dim": 8}, "has latent attention (kv_lora_rank"),
    "gemma3n": ({"text_config": _GEMMA3N}, f"{SHARED_KV} (num_kv_shared_layers 2)"),
    "gemma4_text": (
        {**_SIZES, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 3},
        f"{SHARED_KV} (num_kv_shared_layers 1)",
    ),
    "afm7": (_AFM7, f"{SHARED_KV} (num_kv_reuse_layers 1)"),
    "hunyuan": ({**_HUNYUAN, "use_cla": True}, f"{SHARED_KV} (use_cla True)"),
    "llama4": ({"text_config": _LLAMA4}, "layer 0 of this model has attention in chunks"),
    "mamba": (
        {"state_size": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_rank": 4},
        RECURRENCE,
    ),
    "jamba": (_JAMBA, RECURRENCE),
    "qwen3_next": ({**_LINEAR, "shared_expert_intermediate_size": 16}, RECURRENCE),
    "falcon_h1": ({}, "has several caches in one, as hybrid layers and indexers do"),
    "iquestloopcoder": ({"loop_num": 2, "loop_window_size": 8}, TWICE),
    "nanbeige": ({"num_loops": 2}, TWICE),
    "phi3small": (_PHI3SMALL, "block-sparse attention (block_sparse)"),
}


def with_feature(family):
    """mlx-lm's model, tiny, with the feature."""
    module = module_of(family)
    config = {**SHARED, **FEATURES[family][0]}
    args = module.ModelArgs.from_dict({"model_type": family, **config})
    return randomise(module.Model(args), 0)


@pytest.mark.parametrize("kind", ["softmax", "selective"])
@pytest.mark.parametrize("family", present(FEATURES))
def test_what_would_be_lost_is_named_and_nothing_changes(family, kind):
    model = with_feature(family)
    before = dict(tree_flatten(model.parameters()))
    classes = [type(module) for module in model.modules()]
    with pytest.raises(UserError) as refusal:
        graft(model, {"kind": kind})
    assert FEATURES[family][1] in str(refusal.value)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 200
    assert [type(module) for module in model.modules()] == classes
    after = dict(tree_flatten(model.parameters()))
    assert after.keys() == before.keys()
    assert all(mx.array_equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", present(FEATURES))
def test_a_config_that_asks_for_it_builds_nothing(family):
    """The same through base_model_type: some in the config's fields, some in mlx-lm's model."""
    config = {**SHARED, **FEATURES[family][0], "attention": {"kind": "selective"}}
    with pytest.raises(UserError) as refusal:
        Model(ModelArgs({"base_model_type": family, **config}))
    assert FEATURES[family][1] in str(refusal.value)


@pytest.mark.parametrize(
    "family, fields, words",
    [  # the config tells; mlx-lm's ModelArgs drop the field and attend to everything
        ("mistral", {"sliding_window": 8}, "a sliding window (sliding_window 8)"),
        ("mixtral", {"sliding_window": 8, "max_position_embeddings": None}, "(sliding_window 8)"),
        ("phi3", {"sliding_window": 511}, "a sliding window (sliding_window 511)"),
        ("starcoder2", {"sliding_window": 4096, "max_position_embeddings": 16384}, "4096"),
        ("qwen2", {"use_sliding_window": True}, "a sliding window (sliding_window 4)"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention la"),
        ("llama", {"alibi": True}, "ALiBi biases (alibi True)"),
    ],
)
def test_a_config_with_a_field_that_mlx_lm_drops(family, fields, words):
    with pytest.raises(UserError) as refusal:
        grafted(family, {"kind": "selective"}, **fields)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    "family, fields",
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 512, "max_position_embeddings": 512}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen3", {"layer_types": ["full_attention"] * 3, "sliding_window": 8}),
        ("llama", {"layer_types": ["full_attention"] * 3, "alibi": False}),
    ],
)
def test_a_window_that_is_switched_off_is_none(family, fields):
    config, ids = {**fields, "attention_bias": False}, tokens(1, 20)
    assert mx.array_equal(
        grafted(family, {"kind": "softmax"}, **config)(ids), stock(family, **config)(ids)
    )


def test_attention_sinks_are_named():
    """Sinks come with windows in mlx-lm's models, which are named first; so the module itself."""
    attention = attention_of(with_feature("gpt_oss").layers[0])
    with pytest.raises(UserError, match=r"AttentionBlock has attention sinks \(sinks\)"):
        refuse_parameters(attention)
    with pytest.raises(UserError, match="AttentionBlock cannot be grafted: attention sinks"):
        try_out(attention, 32)


@pytest.mark.parametrize(
    "family, words",
    [
        ("deepseek_v3", "a mask or bias of its own"),
        ("hunyuan", "it takes kv_states beside input, mask and cache"),
        ("gemma4_text", "it takes shared_kv, offset beside input, mask and cache"),
        ("phi3small", "it calls scaled_dot_product_attention 0 times, not once"),
    ],
)
def test_the_trial_run_sees_it_without_a_name(family, words):
    """Whatever field may tell of it: what the code does is what counts."""
    with pytest.raises(UserError, match=f"cannot be grafted: {words}"):
        try_out(attention_of(with_feature(family).layers[0]), 32)


@pytest.mark.parametrize(
    "name", ["x", "../llama", "/etc/passwd", "os", "llama.", "cache", "", None, 3, ["llama"], {}]
)
def test_base_model_type_is_a_module_of_mlx_lm(name):
    config = {**config_of("llama"), "attention": {"kind": "softmax"}, "base_model_type": name}
    with pytest.raises(UserError) as refusal:
        ModelArgs(config)
    assert "base_model_type must be a model type of mlx-lm" in str(refusal.value)
    assert repr(name) in str(refusal.value)


ALL = [path.stem for path in Path(mlx_lm.models.__file__).parent.glob("*.py")]


@pytest.mark.parametrize("name", ALL)
def test_any_model_type_is_grafted_or_refused(name):
    """Whatever its code makes of a config that is not its own."""
    try:
        Model(ModelArgs({**SHARED, "base_model_type": name, "attention": {"kind": "selective"}}))
    except UserError as refusal:
        assert "\n" not in str(refusal)


# What refusals.py assumes of mlx-lm's files -------------------------------------------------------

SOURCES = [
    path
    for path in Path(mlx_lm.models.__file__).parent.glob("*.py")
    if path.stem not in ("base", "cache") and "scaled_dot_product_attention" in path.read_text()
]
#: windows in fields that mlx-lm reads and then leaves aside
UNUSED = {"nemotron-nas"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_window_of_mlx_lm_has_a_cache_of_its_own(path):
    """refuse_caches tells a window by its cache; a mask alone would be lost without a word."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    caches = {name for name in made if name.endswith(("Cache", "CacheList"))} - {"KVCache"}
    if any(word.arg == "window_size" for call in calls for word in call.keywords):
        assert caches & {"RotatingKVCache", "ChunkedKVCache"}
    if any(word in path.read_text().lower() for word in ("window", "sliding", "chunked_attention")):
        assert caches or path.stem in UNUSED


# What is no model, or has no attention for each layer ---------------------------------------------


@pytest.mark.parametrize("thing", [None, nn.Linear(3, 4), (stock("llama"), "tokenizer")])
def test_what_is_no_model_is_told(thing):
    with pytest.raises(UserError, match="graft takes a model, the first of what mlx_lm.load"):
        graft(thing, {"kind": "selective"})


@pytest.mark.parametrize("part", ["layer", "attention"])
def test_layers_that_share_their_attention(part):
    model, ids = stock("llama"), tokens(1, 9)
    if part == "layer":
        model.model.layers[1] = model.model.layers[0]
    else:
        model.layers[1].self_attn = model.layers[0].self_attn
    before = model(ids)
    with pytest.raises(UserError, match="share one attention"):
        graft(model, {"kind": "selective"})
    assert mx.array_equal(model(ids), before)


def test_stick_breaking_refuses_a_rotating_cache():
    """Once it has wrapped, its keys are out of order."""
    model = grafted("llama", {"kind": "stick_breaking"})
    with pytest.raises(UserError, match="rotating KV cache"):
        model(tokens(1, 4), cache=[RotatingKVCache(8) for _ in model.layers])
