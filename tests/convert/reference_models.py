"""The architectures that convert knows, in plain NumPy (float64), from a checkpoint's own tensors.

Each model takes the tensors by their names in the PyTorch checkpoint, the checkpoint's
config.json and one sequence of token ids; it returns the logits (T, vocabulary).
"""

import math

import numpy as np


def softmax(z):
    weights = np.exp(z - z.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def rms_norm(x, weight, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * weight


def layer_norm(x, tensors, name, epsilon):
    x = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(x, tensors[name + ".weight"], epsilon) + tensors[name + ".bias"]


def linear(x, tensors, name):
    return x @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0)


def split(x, heads):
    """(T, heads * D) to (heads, T, D)."""
    return x.reshape(len(x), heads, -1).swapaxes(0, 1)


def merge(x):
    return x.swapaxes(0, 1).reshape(x.shape[1], -1)


def rope(x, dims, base):
    """Rotates the first ``dims`` of each head, the first half of them against the second."""
    if not dims:
        return x
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., dims:]], axis=-1)


# Attention: q, k, v (H, T, D) ---------------------------------------------------------------------


def softmax_attention(q, k, v, scale, forgotten=0):
    z = q @ k.swapaxes(-1, -2) * scale - forgotten
    future = np.triu(np.ones(z.shape[1:], bool), 1)
    return softmax(np.where(future, -np.inf, z)) @ v


def selective_attention(q, k, v, scale):
    selected = np.tril(np.maximum(q[0] @ k[0].T * scale, 0), -1)
    selected[:, 0] = 0
    forgotten = np.cumsum(selected, axis=0) - selected
    return softmax_attention(q, k, v, scale, forgotten)


def stick_breaking_attention(q, k, v, scale):
    beta = sigmoid(q @ k.swapaxes(-1, -2) * scale)
    output = np.zeros_like(v)
    for query in range(q.shape[1]):
        left = np.ones(len(q))
        for key in reversed(range(query)):
            share = beta[:, query, key] * left
            output[:, query] += share[:, None] * v[:, key]
            left = left - share
    return output


def temperature(x, tensors, name, settings):
    """tanh(W x) + 1 + sigmoid(alpha) ln n for the attention's input x, as (H, T, 1)."""
    tau = np.ones((1, len(x)))
    if settings["position_aware"]:
        log_count = np.log(np.arange(1, len(x) + 1))
        tau = tau + sigmoid(tensors[name + "_alpha"])[:, None] * log_count
    if settings["token_aware"]:
        tau = tau + np.tanh(x @ tensors[name + ".weight"].T).T
    return tau[..., None]


# Models -------------------------------------------------------------------------------------------


def llama(tensors, config, ids, attention=softmax_attention):
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    epsilon = config["rms_norm_eps"]
    base = config.get("rope_parameters", config)["rope_theta"]
    # Stick-breaking takes the place of the position embedding.
    rotated = 0 if attention is stick_breaking_attention else size
    x = tensors["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(x, tensors[layer + "input_layernorm.weight"], epsilon)
        q = split(linear(h, tensors, layer + "self_attn.q_proj"), heads)
        k = split(linear(h, tensors, layer + "self_attn.k_proj"), kv_heads)
        v = split(linear(h, tensors, layer + "self_attn.v_proj"), kv_heads)
        k, v = (np.repeat(part, heads // kv_heads, axis=0) for part in (k, v))
        q, k = (rope(part, rotated, base) for part in (q, k))
        h = merge(attention(q, k, v, size**-0.5))
        x = x + linear(h, tensors, layer + "self_attn.o_proj")
        h = rms_norm(x, tensors[layer + "post_attention_layernorm.weight"], epsilon)
        gate = silu(linear(h, tensors, layer + "mlp.gate_proj"))
        h = gate * linear(h, tensors, layer + "mlp.up_proj")
        x = x + linear(h, tensors, layer + "mlp.down_proj")
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return rms_norm(x, tensors["model.norm.weight"], epsilon) @ tensors[head].T


def gpt_neox(tensors, config, ids, attention=softmax_attention):
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]
    size = config["hidden_size"] // heads
    rotated = int(size * config["rotary_pct"])
    activation = gelu if config["hidden_act"] == "gelu" else gelu_tanh
    settings = config.get("selective_self_attention") or {}
    x = tensors["gpt_neox.embed_in.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"gpt_neox.layers.{i}."
        h = layer_norm(x, tensors, layer + "input_layernorm", epsilon)
        # rows of query_key_value: per head [q; k; v]
        qkv = split(linear(h, tensors, layer + "attention.query_key_value"), heads)
        q, k, v = np.split(qkv, 3, axis=-1)
        q, k = (rope(part, rotated, config["rotary_emb_base"]) for part in (q, k))
        if settings.get("query"):
            q = q * temperature(h, tensors, layer + "attention.ssa_query", settings)
        if settings.get("key"):
            k = k * temperature(h, tensors, layer + "attention.ssa_key", settings)
        if settings.get("value"):
            v = v * temperature(h, tensors, layer + "attention.ssa_value", settings)
        attended = merge(attention(q, k, v, size**-0.5))
        attended = linear(attended, tensors, layer + "attention.dense")
        fed = x if config["use_parallel_residual"] else x + attended
        h = layer_norm(fed, tensors, layer + "post_attention_layernorm", epsilon)
        h = activation(linear(h, tensors, layer + "mlp.dense_h_to_4h"))
        x = x + attended + linear(h, tensors, layer + "mlp.dense_4h_to_h")
    x = layer_norm(x, tensors, "gpt_neox.final_layer_norm", epsilon)
    return x @ tensors["embed_out.weight"].T


def grouped_qkv(rows, config):
    """Rows of c_attn, per key head [its query heads; k; v], as q, k, v of as many heads."""
    key_heads = config["num_key_value_heads"]
    size, each = config["n_embd"] // config["n_head"], config["n_head"] // key_heads
    parts = rows.reshape(len(rows), key_heads, each + 2, size)
    q = parts[:, :, :each].reshape(len(rows), -1, size).swapaxes(0, 1)
    k, v = (parts[:, :, part].swapaxes(0, 1) for part in (each, each + 1))
    if config.get("attention", {}).get("grouping") == "interleaved":
        return q, np.repeat(k, each, axis=0), np.repeat(v, each, axis=0)
    return q, np.tile(k, (each, 1, 1)), np.tile(v, (each, 1, 1))


def dolomite(tensors, config, ids, attention=stick_breaking_attention):
    heads, epsilon = config["n_head"], config["layer_norm_epsilon"]
    residual, scale = config["m_residual"], config["attention_multiplier"]
    x = tensors["transformer.wte.weight"][ids] * config["m_emb"]
    for i in range(config["n_layer"]):
        layer = f"transformer.h.{i}."
        h = rms_norm(x, tensors[layer + "ln_1.weight"], epsilon)
        q, k, v = grouped_qkv(linear(h, tensors, layer + "attn.c_attn"), config)
        h = attention(q, k, v, scale)
        if config["sb_remainder"]:
            remainder = 1 - attention(q, k, np.ones_like(v), scale)
            bias = tensors.get(layer + "attn.head_bias")
            h = h + remainder * (v if bias is None else bias[:, None])
        if layer + "attn.norm.weight" in tensors:  # GroupNorm: each head by itself
            h = h - h.mean(axis=-1, keepdims=True)
            h = h / np.sqrt((h**2).mean(axis=-1, keepdims=True) + 1e-5)
            weight, bias = (tensors[layer + f"attn.norm.{part}"] for part in ("weight", "bias"))
            h = split(merge(h) * weight + bias, heads)
        h = merge(h)
        x = x + residual * linear(h, tensors, layer + "attn.c_proj")
        h = rms_norm(x, tensors[layer + "ln_2.weight"], epsilon)
        # rows of c_fc: [up; gate]
        up, gate = np.split(linear(h, tensors, layer + "mlp.c_fc"), 2, axis=-1)
        x = x + residual * linear(up * silu(gate), tensors, layer + "mlp.c_proj")
    x = rms_norm(x, tensors["transformer.ln_f.weight"], epsilon)
    tied = config.get("tie_word_embeddings", True)
    head = "transformer.wte.weight" if tied else "lm_head.weight"
    return x @ tensors[head].T / config["m_width"]
