"""Tiny checkpoints of every layout: the converted folder is whole and gives the right logits."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import reference_models
import sentencepiece
import tiny_checkpoints
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_checkpoints import Checkpoint, dolomite, gpt_neox, llama, sentencepiece_model

from mlx_selective import UserError, load
from mlx_selective.convert import convert

IDS = np.arange(40) * 7 % tiny_checkpoints.VOCABULARY
REFERENCE = {
    "llama": reference_models.llama,
    "gpt_neox": reference_models.gpt_neox,
    "stickbreaking": reference_models.dolomite,
}
ATTENTION = {
    "selective": reference_models.selective_attention,
    "stick_breaking": reference_models.stick_breaking_attention,
    "softmax": reference_models.softmax_attention,
    # The temperatures are in the model; fresh ones are 1.
    "ssa": reference_models.softmax_attention,
}
SSA = {"kind": "ssa", "query": True, "key": False, "value": True}
SSA |= {"token_map": "linear", "position_map": "alpha"}
STICK_BREAKING = {"kind": "stick_breaking", "attend_current": False}
STICK_BREAKING |= {"remainder": "none", "grouping": "interleaved"}


class Case(NamedTuple):
    """A checkpoint, the ``attention`` that its converted config.json has, and --attention."""

    make: Callable[..., Checkpoint]
    settings: dict[str, Any]
    written: dict[str, Any]
    flag: str | None = None


SOFTMAX = {"kind": "softmax"}
VALUE, NORM, TILED = {"remainder": "value"}, {"remainder": "head_bias_norm"}, {"grouping": "tiled"}
NESTED = {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_theta": 10000.0}
CASES = {
    "llama": Case(llama, {}, SOFTMAX),
    "llama, grouped heads": Case(llama, {"kv_heads": 2}, SOFTMAX),
    "llama, untied": Case(llama, {"tied": False}, SOFTMAX),
    "llama, biases": Case(llama, {"bias": True}, SOFTMAX),
    "llama, wide heads": Case(llama, {"head_dim": 32, "kv_heads": 1}, SOFTMAX),
    "llama, nested rope_theta": Case(llama, NESTED, SOFTMAX),
    "llama, selective": Case(
        llama, {"kv_heads": 2}, {"kind": "selective", "budget": None}, "selective"
    ),
    "llama, stick-breaking": Case(llama, {"bias": True}, STICK_BREAKING, "stick_breaking"),
    "llama, fresh SSA": Case(llama, {"tied": False}, SSA, "ssa"),
    "neox": Case(gpt_neox, {}, SOFTMAX),
    "neox, approximate GELU": Case(gpt_neox, {"hidden_act": "gelu_new"}, SOFTMAX),
    "neox, sequential": Case(gpt_neox, {"use_parallel_residual": False}, SOFTMAX),
    "neox, wholly rotated": Case(gpt_neox, {"rotary_pct": 1.0}, SOFTMAX),
    "neox, selective": Case(gpt_neox, {}, {"kind": "selective", "budget": None}, "selective"),
    "neox, SSA": Case(gpt_neox, {"ssa": {}}, SSA),
    "neox, SSA told twice": Case(gpt_neox, {"ssa": {}}, SSA, "ssa"),
    "neox, SSA without query": Case(gpt_neox, {"ssa": {"query": False}}, SSA | {"query": False}),
    "neox, SSA without value": Case(gpt_neox, {"ssa": {"value": False}}, SSA | {"value": False}),
    "neox, SSA with key": Case(gpt_neox, {"ssa": {"key": True}}, SSA | {"key": True}),
    "neox, SSA by position only": Case(
        gpt_neox, {"ssa": {"token_aware": False}}, SSA | {"token_map": "none"}
    ),
    "neox, SSA by token only": Case(
        gpt_neox, {"ssa": {"position_aware": False}}, SSA | {"position_map": "none"}
    ),
    "dolomite": Case(dolomite, {}, STICK_BREAKING),
    "dolomite, untied": Case(dolomite, {"tied": False}, STICK_BREAKING),
    "dolomite, m_width 1": Case(dolomite, {"m_width": 1.0, "m_residual": 1.0}, STICK_BREAKING),
    **{
        f"dolomite, {name}": Case(dolomite, settings, STICK_BREAKING | written)
        for name, settings, written in (
            ("value", VALUE, VALUE),
            ("head_bias", {"remainder": "head_bias"}, {"remainder": "head_bias"}),
            ("norm", NORM, NORM),
            ("grouped heads", {"kv_heads": 2}, TILED),
            ("interleaved", {"kv_heads": 2, "attention": {"grouping": "interleaved"}}, {}),
            ("all", {"kv_heads": 2, **NORM}, TILED | NORM),
        )
    },
}
LAYOUTS = {name: CASES[name] for name in ("llama", "neox, SSA", "dolomite")}


def expected_logits(case: Case) -> np.ndarray:
    checkpoint = case.make(**case.settings)
    tensors = {name: array.astype(np.float64) for name, array in checkpoint.tensors.items()}
    reference = REFERENCE[checkpoint.config["model_type"]]
    return reference(tensors, checkpoint.config, IDS, ATTENTION[case.written["kind"]])


def logits(model, cache=None, ids=IDS) -> np.ndarray:
    return np.array(model(mx.array(ids)[None], cache=cache)[0].astype(mx.float32))


@pytest.fixture
def converted(tmp_path):
    """Converts a case in a chosen form; gives the new folder."""

    def run(case, form="safetensors", tokenizer="json", target="model", **options):
        source = case.make(**case.settings).save(tmp_path / "source", form, tokenizer)
        options.setdefault("attention", case.flag)
        return convert(str(source), tmp_path / "converted" / target, **options)

    return run


@pytest.mark.parametrize("name", CASES)
def test_logits(converted, name):
    case = CASES[name]
    folder = converted(case)
    assert json.loads((folder / "config.json").read_text())["attention"] == case.written
    model, _ = load(folder)
    expected = expected_logits(case)
    assert np.abs(logits(model) - expected).max() < 1e-4
    cache = make_prompt_cache(model)
    parts = [logits(model, cache, part) for part in (IDS[:30], IDS[30:39], IDS[39:])]
    assert np.abs(np.concatenate(parts) - expected).max() < 1e-4


@pytest.mark.parametrize("form", ["sharded", "bin", "sharded bin"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_file_form_gives_the_same_weights(converted, name, form):
    plain, other = converted(LAYOUTS[name]), converted(LAYOUTS[name], form, target="other")
    assert weight_bytes(other) == weight_bytes(plain)


@pytest.mark.parametrize("name", LAYOUTS)
def test_converting_twice_gives_the_same_files(converted, name):
    once, twice = (converted(LAYOUTS[name], target=target) for target in ("a", "b"))
    for file in once.iterdir():
        assert (twice / file.name).read_bytes() == file.read_bytes(), file.name


BUFFERS = {
    "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"],
    "neox, SSA": [
        "gpt_neox.layers.1.attention.bias",
        "gpt_neox.layers.1.attention.masked_bias",
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq",
    ],
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_and_the_copy_of_tied_weights_are_left_out(converted, tmp_path, name):
    checkpoint = LAYOUTS[name].make(**LAYOUTS[name].settings)
    checkpoint.tensors |= {buffer: np.ones(3, np.float32) for buffer in BUFFERS[name]}
    source = checkpoint.save(tmp_path / "with buffers")
    folder = convert(str(source), tmp_path / "from buffers")
    assert weight_bytes(folder) == weight_bytes(converted(LAYOUTS[name]))


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_from_the_hub_only_what_is_read_is_downloaded(tmp_path, monkeypatch, form):
    source, asked = llama().save(tmp_path / "cached", form), []

    def snapshot(repo, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(source)

    names = [path.name for path in source.iterdir()] + ["pytorch_model.bin"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, revision: names)
    convert("owner/name", tmp_path / "model", revision="v1")
    load(tmp_path / "model")
    assert [(repo, revision) for repo, revision, _ in asked] == [("owner/name", "v1")] * 2
    assert not any(p.endswith((".bin", ".safetensors", ".py", "*")) for p in asked[0][2])
    assert asked[1][2] == [f"*.{form}"]


def weight_bytes(folder) -> dict[str, bytes]:
    return {
        name: bytes(value) for name, value in mx.load(str(folder / "model.safetensors")).items()
    }


# The folder ---------------------------------------------------------------------------------------

BASES = {"llama": "llama", "neox, SSA": "gpt_neox", "dolomite": "granite"}


@pytest.mark.parametrize("tokenizer", ["json", "sentencepiece"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_folder_is_whole(converted, name, tokenizer):
    case = LAYOUTS[name]
    folder = converted(case, tokenizer=tokenizer)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    written = {path.name for path in folder.iterdir()}
    # tokenizer.model is translated, not kept: transformers would read it in its own way
    assert written == {
        "config.json",
        "mlx_selective_model.py",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "mlx_selective"
    assert config["base_model_type"] == BASES[name]
    assert config["model_file"] == "mlx_selective_model.py"
    assert config["attention"] == case.written
    assert config["eos_token_id"] == 4
    assert config["torch_dtype"] == "float32"
    assert config["max_position_embeddings"] == 128
    assert config["vocab_size"] == tiny_checkpoints.VOCABULARY


def test_the_sentencepiece_tokenizer_gives_its_own_ids(converted):
    _, tokenizer = load(converted(LAYOUTS["llama"], tokenizer="sentencepiece"))
    own = sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model())
    message = [{"role": "user", "content": "hello the user 12"}]
    rendered = "<|user|>\nhello the user 12<|end|>\n"
    assert tokenizer.apply_chat_template(message) == [own.bos_id(), *own.encode(rendered)]
    assert tokenizer.eos_token_ids == {4}


END = {
    "config.json": ({"config.json": {"eos_token_id": [2, 4]}}, [2, 4]),
    "generation_config.json": ({"generation_config.json": {"eos_token_id": 2}}, 2),
    "both, as mlx-lm reads them": (
        {
            "config.json": {"eos_token_id": 4},
            "generation_config.json": {"eos_token_id": [2, 4]},
        },
        [2, 4],
    ),
    "tokenizer_config.json": ({}, 4),
    "the token's fields": (
        {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "</s>"}}},
        2,
    ),
}


@pytest.mark.parametrize("tokenizer", ["json", "sentencepiece"])
@pytest.mark.parametrize("holder", END)
def test_the_end_token_is_found(tmp_path, holder, tokenizer):
    files, expected = END[holder]
    source = llama(eos_token_id=None).save(tmp_path / "source", tokenizer=tokenizer)
    for name, fields in files.items():
        old = json.loads((source / name).read_text()) if (source / name).exists() else {}
        (source / name).write_text(json.dumps(old | fields))
    folder = convert(str(source), tmp_path / "model")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == expected
    ids = expected if isinstance(expected, list) else [expected]
    assert set(ids) <= load(folder)[1].eos_token_ids


def test_a_tokenizer_that_could_not_be_opened_is_refused(tmp_path):
    """Token fields without their type: transformers opens no such folder."""
    source = llama().save(tmp_path / "source")
    file = source / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": {"content": "</s>"}}))
    with pytest.raises(UserError, match="tokenizer_config.json: the tokenizer cannot be opened"):
        convert(str(source), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_code_of_the_source_is_not_named(converted):
    """config.json's auto_map names files that are not copied, so transformers would stumble."""
    auto_map = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.X"}
    folder = converted(Case(llama, {"auto_map": auto_map}, SOFTMAX))
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    load(folder)


# Options ------------------------------------------------------------------------------------------

#: largest difference between logits, whose standard deviation is about 1
TOLERANCE = {"float16": 0.05, "bfloat16": 0.4, "float32": 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", LAYOUTS)
def test_dtype(converted, name, dtype):
    folder = converted(LAYOUTS[name], dtype=dtype)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == dtype
    model, _ = load(folder)
    for path, value in tree_flatten(model.parameters()):
        assert value.dtype == (mx.float32 if "temperature" in path else getattr(mx, dtype)), path
    assert np.abs(logits(model) - expected_logits(LAYOUTS[name])).max() < TOLERANCE[dtype]


@pytest.mark.parametrize(("written", "dtype"), [("torch_dtype", "float16"), ("dtype", "bfloat16")])
def test_dtype_is_that_of_the_source(converted, written, dtype):
    folder = converted(Case(llama, {"torch_dtype": None, written: dtype}, SOFTMAX))
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == dtype and "dtype" not in config
    model, _ = load(folder)
    assert model.model.norm.weight.dtype == getattr(mx, dtype)


@pytest.mark.parametrize("options", [{"q_bits": 8}, {"q_bits": 8, "q_group_size": 32}])
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised(converted, name, options):
    folder = converted(LAYOUTS[name], quantize=True, **options)
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 8
    assert quantization["group_size"] == options.get("q_group_size", 64)
    model, _ = load(folder)
    quantised = [path for path, _ in tree_flatten(model.parameters()) if path.endswith(".scales")]
    # The embedding and every linear part of both layers, and no temperature.
    per_layer = {"llama": 7, "neox, SSA": 4, "dolomite": 7}[name]
    assert len(quantised) == 2 * per_layer + 1 + (name == "neox, SSA")
    assert np.abs(logits(model) - expected_logits(LAYOUTS[name])).max() < 0.3


def test_stick_breaking_parameters_are_cast_but_not_quantised(converted):
    case = CASES["dolomite, all"]
    options = {"quantize": True, "q_bits": 8, "dtype": "bfloat16"}
    plain, small = (load(converted(case, target=str(len(o)), **o))[0] for o in ({}, options))
    exact, cast = (dict(tree_flatten(model.parameters())) for model in (plain, small))
    own = [path for path in exact if "self_attn.head_" in path]
    same = [mx.array_equal(cast[path], exact[path].astype(mx.bfloat16)) for path in own]
    assert len(same) == 2 * 3 and all(same)
    assert np.sqrt(((logits(small) - expected_logits(case)) ** 2).mean()) < 0.1


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_quantised_modes_load(converted, name, mode):
    model, _ = load(converted(LAYOUTS[name], quantize=True, q_mode=mode))
    error = logits(model) - expected_logits(LAYOUTS[name])
    assert np.sqrt((error**2).mean()) < (0.3 if mode == "mxfp8" else 1.0)


def test_budget_is_stored(converted):
    folder = converted(CASES["llama, selective"], budget=8)
    config = json.loads((folder / "config.json").read_text())
    assert config["attention"] == {"kind": "selective", "budget": 8}
    model, _ = load(folder)
    cache = make_prompt_cache(model)
    logits(model, cache)
    assert [layer.size() for layer in cache] == [8, 8]
