"""More families of mlx-lm than the full matrix has: a line each, over one shared config."""

VOCABULARY = 97
_FULL = {"layer_types": ["full_attention"] * 3}
_ROPES = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_GROUPS = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}

#: fields that most families read, with one meaning
SHARED = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    **{"max_position_embeddings": 512, "rope_theta": 1e4, "rope_scaling": None},
    **{"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5},
    **{"attention_bias": False, "mlp_bias": False, "use_qkv_bias": False, "use_bias": False},
    **{"tie_word_embeddings": True, "partial_rotary_factor": 1.0, "norm_topk_prob": True},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []},
}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 512, "n_inner": 64}
_GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}


def _inside(model_type, **differences):
    """The config of a model that also sees, around one of its language model."""
    return {"text_config": {**SHARED, "model_type": model_type, **differences}}


#: family -> what its config has beside or instead of the shared fields
MORE = {
    "Klear": {"n_shared_experts": 1},
    "afmoe": {**_FULL, "num_shared_experts": 1, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "bailing_moe": {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "cohere": {},
    "dbrx": {
        **{"d_model": 32, "n_layers": 3, "n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    },
    "deepseek": {},
    "dots1": {**_EXPERTS, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 16, "moe_k": 2},
    "exaone": {"num_layers": 3},
    "exaone4": {"sliding_window": None, "sliding_window_pattern": None},
    "exaone_moe": {
        **_FULL,
        **{"num_shared_experts": 1, "sliding_window": None, "is_moe_layer": [False, True, True]},
    },
    "gear": {**_FULL},
    "gemma": {},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {**_EXPERTS, **_GROUPS, "use_qk_norm": True},
    "gpt_bigcode": _GPT2,
    "gptj": {**_GPT2, "rotary_dim": 4},
    "granitemoe": {**_GRANITE, "logits_scaling": 2.0},
    "granitemoehybrid": {
        **{**_GRANITE, "logits_scaling": 2.0, "layer_types": ["attention"] * 3},
        **{"num_local_experts": None, "shared_intermediate_size": 32},
    },
    "helium": {},
    "hunyuan_v1_dense": {"use_qk_norm": True},
    "internlm2": {"bias": False},
    "internlm3": {"bias": False, "qkv_bias": True},
    "laguna": {"shared_expert_intermediate_size": 32},
    "lille-130m": {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_kv_heads": 2, "block_size": 512},
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 0, 1], "use_qk_norm": True},
    "mellum": {**_FULL, **_ROPES, "sliding_window": None},
    "mimo": {},
    "minicpm": {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0},
    "ministral3": {
        "rope_parameters": {
            **{"rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings": 16,
        }
    },
    "mistral3": _inside("mistral"),
    "mixtral": {},
    "muse_glimmer": {
        **_FULL,
        "layer_rope_theta": [1e4] * 3,
        "rope_parameters": {"rope_theta": 1e4},
    },
    "nanbeige": {},
    "nanochat": {},
    "nemotron": {"hidden_act": "relu2", "partial_rotary_factor": 0.5},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 3
    },
    "olmoe": {},
    "openelm": {
        **{"model_dim": 32, "num_transformer_layers": 3, "ffn_dim_divisor": 8},
        **{"num_query_heads": [4, 4, 8], "num_kv_heads": [2, 2, 4]},
        "ffn_multipliers": [1.0, 2.0, 2.0],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phimoe": {
        "rope_scaling": {
            **{"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
            **{"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 256},
        }
    },
    "phixtral": {
        **{"num_vocab": VOCABULARY, "model_dim": 32, "num_heads": 4, "num_layers": 3},
        "rotary_dim": 4,
    },
    "pixtral": _inside("mistral"),
    "plamo": {"n_shared_head": 2},
    "qwen": {"kv_channels": 8},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "qwen2_vl": _inside("qwen2"),
    "qwen3_moe": {},
    "qwen3_vl": _inside("qwen3"),
    "qwen3_vl_moe": _inside("qwen3_moe"),
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {**_EXPERTS, "routed_scaling_factor": 1.0},
    "spark2_5": {**_FULL, **_ROPES, "sliding_window": 8},
    "stablelm": {"partial_rotary_factor": 0.25, "qk_layernorm": True},
    "starcoder2": {},
    "step3p5": {
        **{**_FULL, "num_attention_groups": 2, "share_expert_dim": 16, "moe_layers_enum": "1,2"},
        **{"moe_num_experts": 4, "moe_top_k": 2, "moe_intermediate_size": 16},
    },
    "talkie": {},
    "telechat3": {},
}
