"""--attention as settings: fresh parameters, a list with one object a layer, what is refused."""

import functools
import itertools
import json

import mlx.core as mx
import numpy as np
import pytest
import reference_models
from damage import refusal, tensors
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from tiny_checkpoints import VOCABULARY, dolomite, gpt_neox, llama

from mlx_selective import UserError, generate, load
from mlx_selective.cli import main
from mlx_selective.convert import convert

IDS = np.arange(40) * 7 % VOCABULARY
REFERENCE = {"llama": reference_models.llama, "gpt_neox": reference_models.gpt_neox}
MIXED = [{"kind": "selective", "budget": 8}, {"kind": "softmax"}]
HEAD_BIAS = {"kind": "stick_breaking", "remainder": "head_bias"}


def expected_logits(checkpoint, attention) -> np.ndarray:
    exact = {name: array.astype(np.float64) for name, array in checkpoint.tensors.items()}
    model = REFERENCE[checkpoint.config["model_type"]]
    return model(exact, checkpoint.config, IDS, attention)


def logits(folder, cached: bool = False) -> np.ndarray:
    """All at once, or in two parts with caches."""
    model, _ = load(folder)
    cache = make_prompt_cache(model) if cached else None
    parts = (IDS[:30], IDS[30:]) if cached else (IDS,)
    return np.concatenate([np.array(model(mx.array(part)[None], cache)[0]) for part in parts])


def written(folder):
    return json.loads((folder / "config.json").read_text())["attention"]


@pytest.fixture
def converted(tmp_path):
    """Converts a checkpoint by the command line, settings as JSON; gives the folder."""

    def run(checkpoint, attention, *flags, target="model"):
        source = checkpoint.save(tmp_path / "source")
        where = ["--hf-path", str(source), "--mlx-path", str(tmp_path / target)]
        assert main(["convert", *where, "--attention", json.dumps(attention), *flags]) == 0
        return tmp_path / target

    return run


# Fresh parameters ---------------------------------------------------------------------------------

SSA = {"kind": "ssa", "query": True, "key": False, "value": True}
SSA |= {"token_map": "linear", "position_map": "alpha"}
FRESH_SSA = {
    "defaults": {},
    "weight_sharing": {"token_map": "weight_sharing", "key": True},
    "feature_sharing, beta": {"token_map": "feature_sharing", "position_map": "beta"},
    "mlp, keys only": {"token_map": "mlp", "query": False, "key": True, "value": False},
}


@pytest.mark.parametrize("name", FRESH_SSA)
@pytest.mark.parametrize("make", [functools.partial(llama, kv_heads=2), gpt_neox])
def test_fresh_temperatures_change_nothing(converted, make, name):
    folder = converted(make(), {"kind": "ssa"} | FRESH_SSA[name])
    assert written(folder) == SSA | FRESH_SSA[name]
    names = mx.load(str(folder / "model.safetensors"))
    parts = {part for part in ("query", "key", "value") if written(folder)[part]}
    has = {part for part in ("query", "key", "value") if any(f"{part}_temp" in n for n in names)}
    assert has == parts
    expected = expected_logits(make(), reference_models.softmax_attention)
    for cached in (False, True):
        assert np.abs(logits(folder, cached) - expected).max() < 1e-4


@pytest.mark.parametrize("make", [functools.partial(llama, kv_heads=2), gpt_neox])
def test_a_fresh_head_bias_changes_nothing(converted, make):
    folder = converted(make(), HEAD_BIAS)
    assert written(folder)["remainder"] == "head_bias"
    # Stick-breaking takes the place of the position embedding.
    unrotated = make(rotary_pct=0.0)
    expected = expected_logits(unrotated, reference_models.stick_breaking_attention)
    assert np.abs(logits(folder) - expected).max() < 1e-4


def test_a_fresh_head_norm_scales_by_one(converted):
    folder = converted(llama(), HEAD_BIAS | {"remainder": "head_bias_norm"}, "--dtype", "bfloat16")
    own = {n: v for n, v in tree_flatten(load(folder)[0].parameters()) if ".head_" in n}
    assert len(own) == 2 * 3
    for name, value in own.items():
        assert value.dtype == mx.bfloat16
        assert mx.array_equal(value, mx.full(value.shape, name.endswith("head_norm.weight")))


def test_fresh_parameters_of_each_layer(converted):
    """One layer's temperatures, the other's head bias: each starts as it would alone."""
    folder = converted(llama(), [{"kind": "ssa"}, HEAD_BIAS])
    names = [n for n in mx.load(str(folder / "model.safetensors")) if "temp" in n or "head_b" in n]
    assert {name.split(".")[2] for name in names if "temperature" in name} == {"0"}
    assert [name for name in names if "head_b" in name] == ["model.layers.1.self_attn.head_bias"]
    plain = [{"kind": "softmax"}, {"kind": "stick_breaking"}]
    other = converted(llama(), plain, target="plain")
    assert np.abs(logits(folder) - logits(other)).max() < 1e-5


def test_fresh_parameters_are_the_same_in_every_run(converted):
    one, two = (converted(llama(), {"kind": "ssa", "token_map": "mlp"}, target=t) for t in "ab")
    for file in one.iterdir():
        assert (two / file.name).read_bytes() == file.read_bytes(), file.name


def untold_ssa():
    """An SSA checkpoint whose config does not tell."""
    checkpoint = gpt_neox(ssa={})
    del checkpoint.config["selective_self_attention"]
    return checkpoint


def test_parameters_that_the_checkpoint_has_are_taken(converted, tmp_path):
    folder = converted(untold_ssa(), {"kind": "ssa"})
    told = convert(str(gpt_neox(ssa={}).save(tmp_path / "told")), tmp_path / "other")
    assert written(folder) == written(told)
    weights = [(f / "model.safetensors").read_bytes() for f in (folder, told)]
    assert weights[0] == weights[1]


# A list with one object a layer -------------------------------------------------------------------


def alternating():
    """Selective attention in the first layer, softmax in the second."""
    each = itertools.cycle(
        (reference_models.selective_attention, reference_models.softmax_attention)
    )
    return lambda *arguments: next(each)(*arguments)


@pytest.mark.parametrize("make", [functools.partial(llama, kv_heads=2), gpt_neox])
def test_every_layer_has_its_own_attention(converted, make):
    folder = converted(make(), [{"kind": "selective"}, {"kind": "softmax"}])
    expected = expected_logits(make(), alternating())
    for cached in (False, True):
        assert np.abs(logits(folder, cached) - expected).max() < 1e-4


@pytest.fixture
def mixed(converted):
    """A folder of ours, selective attention with a budget of 8 and softmax."""
    return converted(llama(kv_heads=2, tied=False), MIXED)


def kept(model) -> list[int]:
    cache = make_prompt_cache(model)
    model(mx.array(IDS)[None], cache)
    return [layer.size() for layer in cache]


def test_a_mixed_folder_is_opened_and_generates(mixed):
    model, tokenizer = load(mixed)
    assert written(mixed) == MIXED and kept(model) == [8, len(IDS)]
    text = generate(model, tokenizer, "hello there, how are you?", max_tokens=6)
    assert isinstance(text, str)


def test_a_budget_goes_to_the_selective_layers(converted, mixed, tmp_path):
    folder = converted(
        llama(), [{"kind": "selective"}, {"kind": "ssa"}], "--budget", "5", target="b"
    )
    assert written(folder) == [{"kind": "selective", "budget": 5}, SSA]
    assert kept(load(folder)[0]) == [5, len(IDS)]
    again = convert(mixed, tmp_path / "again", budget=6)
    assert written(again) == [{"kind": "selective", "budget": 6}, {"kind": "softmax"}]
    assert kept(load(mixed, budget=4)[0]) == [4, len(IDS)]


def test_a_mixed_folder_again_quantised_and_cast(mixed, tmp_path):
    again = convert(mixed, tmp_path / "again", attention=MIXED)
    for name in ("config.json", "model.safetensors"):
        assert (again / name).read_bytes() == (mixed / name).read_bytes()
    small = convert(mixed, tmp_path / "small", quantize=True, q_group_size=32, q_bits=8)
    assert written(small) == MIXED
    expected = logits(mixed)
    assert 0 < np.abs(logits(small) - expected).max() < 0.05 * np.abs(expected).max()
    half = convert(mixed, tmp_path / "half", dtype="bfloat16")
    assert {v.dtype for v in mx.load(str(half / "model.safetensors")).values()} == {mx.bfloat16}


# A checkpoint that tells --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (functools.partial(gpt_neox, ssa={"key": True}), {"kind": "ssa", "key": True}),
        (dolomite, {"kind": "stick_breaking"}),
        # told by the tensors alone
        (functools.partial(dolomite, remainder="value"), {**HEAD_BIAS, "remainder": "value"}),
        (functools.partial(dolomite, remainder="head_bias"), HEAD_BIAS),
    ],
)
def test_settings_that_agree_with_what_is_told(converted, tmp_path, make, attention):
    folder = converted(make(), attention)
    plain = convert(str(make().save(tmp_path / "again")), tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (plain / name).read_bytes()


def test_a_budget_beside_settings_of_a_folder_of_ours(mixed, tmp_path):
    folder = convert(mixed, tmp_path / "new", attention=MIXED, budget=5)
    assert written(folder)[0]["budget"] == 5


# What is refused ----------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path, capfd):
    """Runs convert on a source; gives the line that refuses it."""
    (tmp_path / "out").mkdir()

    def run(source, attention, *flags):
        capfd.readouterr()
        return refusal(tmp_path, capfd, source, "--attention", json.dumps(attention), *flags)

    return run


WRONG = {
    "no kind": ({"budget": 8}, "--attention: attention must be an object"),
    "unknown kind": ({"kind": "linear"}, "--attention: attention.kind 'linear' is unknown"),
    "unknown field": ({"kind": "ssa", "window": 3}, "attention.window is not a field of ssa"),
    "wrong value": ({"kind": "ssa", "token_map": 5}, "attention.token_map must be one of", "5"),
    "wrong budget": ({"kind": "selective", "budget": 1}, "budget must be at least 2", "1"),
    "no layers": ([], "--attention: attention must be an object", "[]"),
    "list of kinds": (["selective", "softmax"], "attention must be an object", "'selective'"),
    "budgets in a layer": (
        [{"kind": "selective", "budget": [8, 8]}, {"kind": "softmax"}], "attention[0].budget",
    ),
    "too few layers": (MIXED[:1], "attention lists 1 layers, the model has 2"),
    "too many layers": (MIXED * 2, "attention lists 4 layers, the model has 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings(refused, tmp_path, name):
    attention, *words = WRONG[name]
    line = refused(llama().save(tmp_path / "source"), attention)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "text", ['{"kind": "ssa"', "[", "{'kind': 'ssa'}", '{"kind": "ssa"} x', "[" * 100_000]
)
def test_what_is_no_json(tmp_path, capsys, text):
    target = tmp_path / "model"
    with pytest.raises(SystemExit) as ended:
        main(
            ["convert", "--hf-path", str(tmp_path), "--mlx-path", str(target), "--attention", text]
        )
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mlx-selective convert: error: argument --attention: not readable as")
    assert len(line) < 500 and not target.exists()


@pytest.mark.parametrize("attention", [5, "", "mixed", ("ssa",), {}, {"kind": ["ssa"]}])
def test_wrong_settings_from_python(tmp_path, attention):
    source = llama().save(tmp_path / "source")
    with pytest.raises(UserError, match="--attention: attention"):
        convert(str(source), tmp_path / "model", attention=attention)
    assert not (tmp_path / "model").exists()


TOLD = {
    "another kind": (gpt_neox(ssa={}), {"kind": "selective"}, "trained with ssa attention"),
    "a list": (gpt_neox(ssa={}), [SSA, SSA], "--attention mixed", "trained with ssa attention"),
    "other temperatures": (gpt_neox(ssa={}), SSA | {"key": True}, '"key": true', '"key": false'),
    "another grouping": (dolomite(), {"kind": "stick_breaking", "grouping": "tiled"}, "tiled"),
    "a remainder": (dolomite(), HEAD_BIAS, '"remainder": "none"'),
    "not what the tensors tell": (dolomite(remainder="value"), HEAD_BIAS, '"remainder": "value"'),
}


@pytest.mark.parametrize("name", TOLD)
def test_settings_against_what_is_told(refused, tmp_path, name):
    checkpoint, attention, *words = TOLD[name]
    line = refused(checkpoint.save(tmp_path / "source"), attention)
    assert line.count("--attention") and all(word in line for word in words), line


def test_settings_against_a_folder_of_ours(refused, mixed):
    line = refused(mixed, {"kind": "selective"})
    assert "--attention selective: this checkpoint was trained with mixed attention" in line
    line = refused(mixed, [{"kind": "softmax"}, MIXED[0]])
    assert "this checkpoint tells its attention" in line and json.dumps(MIXED) in line


@pytest.mark.parametrize("attention", [{"kind": "ssa"}, HEAD_BIAS, [{"kind": "ssa"}, HEAD_BIAS]])
def test_a_folder_of_ours_gets_no_fresh_parameters(refused, converted, attention):
    folder = converted(llama(), attention)
    parts = ("temperature", "head_bias")
    name = next(n for n in mx.load(str(folder / "model.safetensors")) if any(p in n for p in parts))
    tensors({name: None})(folder)
    assert f"tensor {name} is missing" in refused(folder, attention)


@pytest.mark.parametrize("gone", ["ssa_value_alpha", "ssa_query.weight"])
def test_some_temperatures_without_the_others(refused, tmp_path, gone):
    checkpoint = untold_ssa()
    name = f"gpt_neox.layers.1.attention.{gone}"
    del checkpoint.tensors[name]
    line = refused(checkpoint.save(tmp_path / "source"), {"kind": "ssa"})
    assert f"tensor {name} is missing" in line


def test_a_parameter_that_the_layout_has_no_tensor_for(refused, tmp_path):
    line = refused(untold_ssa().save(tmp_path / "source"), SSA | {"position_map": "beta"})
    assert "_alpha has no place in the model" in line
    checkpoint = untold_ssa()
    checkpoint.tensors = {n: t for n, t in checkpoint.tensors.items() if "alpha" not in n}
    line = refused(checkpoint.save(tmp_path / "source"), SSA | {"position_map": "beta"})
    assert "the Hugging Face GPT-NeoX layout has no tensor for the model's model.h.0." in line


def test_a_budget_without_a_selective_layer(refused, tmp_path):
    source = llama().save(tmp_path / "source")
    line = refused(source, [{"kind": "ssa"}, {"kind": "softmax"}], "--budget", "8")
    assert "a budget needs a model with selective attention" in line
