"""convert on a folder that it wrote: another dtype, another budget, quantised."""

import json

import mlx.core as mx
import pytest
from damage import config, refusal
from tiny_checkpoints import byte_level, gpt_neox, llama, write_json

from mlx_selective import load
from mlx_selective.convert import convert
from mlx_selective.model import MODEL_TYPE, Model, ModelArgs

TOKENS = mx.arange(4, 30)[None]


@pytest.fixture(scope="module", params=["selective", "ssa", "stick_breaking", "softmax"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def own(kind, tmp_path_factory):
    """A folder of each kind of attention; SSA's has temperatures that matter."""
    folder = tmp_path_factory.mktemp("own")
    source = gpt_neox(ssa={}) if kind == "ssa" else llama(kv_heads=2, tied=kind == "softmax")
    budget = 8 if kind == "selective" else None
    return convert(source.save(folder / "source"), folder / "own", attention=kind, budget=budget)


def settings(folder):
    return json.loads((folder / "config.json").read_text())


def weights(folder):
    return mx.load(str(folder / "model.safetensors"))


def test_the_same_again(own, kind, tmp_path):
    again = convert(own, tmp_path / "again", attention=kind)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (own / name).read_bytes()


def test_another_dtype(own, kind, tmp_path):
    half = convert(own, tmp_path / "half", dtype="float16")
    dtypes = {name: value.dtype for name, value in weights(half).items()}
    kept = {name for name, dtype in dtypes.items() if dtype == mx.float32}
    assert set(dtypes.values()) <= {mx.float16, mx.float32}
    assert kept == {name for name in dtypes if "temperature" in name}
    assert bool(kept) == (kind == "ssa")
    assert settings(half) == settings(own) | {"torch_dtype": "float16"}


def test_quantised(own, tmp_path):
    small = convert(own, tmp_path / "small", quantize=True, q_group_size=32, q_bits=8)
    logits, expected = (load(folder)[0](TOKENS) for folder in (small, own))
    assert 0 < mx.abs(logits - expected).max() < 0.05 * mx.abs(expected).max()
    changed = {"quantization", "quantization_config"}
    assert {k: v for k, v in settings(small).items() if k not in changed} == settings(own)


def test_another_budget(tmp_path):
    own = convert(llama().save(tmp_path / "s"), tmp_path / "own", attention="selective")
    pruned = convert(own, tmp_path / "pruned", budget=5)
    assert settings(own)["attention"] == {"kind": "selective", "budget": None}
    assert settings(pruned)["attention"] == {"kind": "selective", "budget": 5}


def test_a_model_that_names_its_fields_in_its_own_way(tmp_path):
    """GPT-2 has n_head and the like; nothing of the conversion needs to know."""
    config = {"model_type": MODEL_TYPE, "base_model_type": "gpt2", "vocab_size": 300}
    config |= {"n_ctx": 64, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
    config |= {"layer_norm_epsilon": 1e-5, "eos_token_id": 4, "attention": {"kind": "selective"}}
    model = Model(ModelArgs(config))
    folder = tmp_path / "own"
    folder.mkdir()
    write_json(folder / "config.json", config)
    byte_level().save(str(folder / "tokenizer.json"))
    model.save_weights(str(folder / "model.safetensors"))
    small = convert(folder, tmp_path / "small", quantize=True, q_group_size=32)
    assert load(small)[0](TOKENS).shape == (1, 26, 300)


# What is refused ----------------------------------------------------------------------------------


@pytest.fixture
def refused(tmp_path, capfd):
    """Runs convert on a folder of ours, changed; gives the line that refuses it."""
    (tmp_path / "out").mkdir()
    source = llama().save(tmp_path / "source")

    def refused(*flags, change=lambda folder: None, **options):
        folder = convert(source, tmp_path / "own", attention="stick_breaking", **options)
        change(folder)
        capfd.readouterr()
        return refusal(tmp_path, capfd, folder, *flags)

    return refused


def test_a_quantised_folder(refused):
    line = refused("--dtype", "float32", quantize=True)
    assert "config.json: the checkpoint is quantised; convert the original weights" in line


def test_another_attention(refused):
    line = refused("--attention", "selective")
    assert "--attention selective: this checkpoint was trained with stick_breaking" in line


def test_a_budget_that_cannot_be(refused):
    assert "a budget needs a model with selective attention" in refused("--budget", "8")


@pytest.mark.parametrize(
    ("field", "value"),
    [("attention", None), ("attention", "selective"), ("attention", [])]
    + [("base_model_type", None), ("base_model_type", "nothing"), ("base_model_type", 5)],
)
def test_a_damaged_config(refused, field, value):
    assert field in refused(change=config(**{field: value}))
