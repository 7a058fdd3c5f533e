"""Opening folders: dtypes, budgets and adapters."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny_checkpoints import llama

from mlx_selective import UserError, load, make_prompt_cache
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.convert import convert


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama().save(tmp_path_factory.mktemp("source") / "llama")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_quantised_folders_compute_in_float32_on_the_cpu(source, dtype, tmp_path):
    """MLX's CPU is 8 (bfloat16) to 36 (float16) times slower at quantised products."""
    folder = convert(source, tmp_path / "model", attention="selective", quantize=True, dtype=dtype)
    stored = mx.load(str(folder / "model.safetensors"))
    assert stored["model.embed_tokens.scales"].dtype == getattr(mx, dtype)
    model, _ = load(folder)
    floats = {v.dtype for _, v in tree_flatten(model.parameters()) if v.dtype != mx.uint32}
    expected = mx.float32 if mx.default_device() == mx.cpu else getattr(mx, dtype)
    assert floats == {expected}
    scales = model.model.embed_tokens.scales
    assert mx.array_equal(scales, stored["model.embed_tokens.scales"].astype(expected))


def test_unquantised_folders_keep_their_dtype(source, tmp_path):
    model, _ = load(convert(source, tmp_path / "model", dtype="bfloat16"))
    assert {v.dtype for _, v in tree_flatten(model.parameters())} == {mx.bfloat16}


def test_budget_of_the_call_goes_before_that_of_the_folder(source, tmp_path):
    folder = convert(source, tmp_path / "model", attention="selective", budget=7)
    for budget, expected in ((None, [7, 7]), (5, [5, 5]), ([4, None], [4, None])):
        model, _ = load(folder, budget)
        assert [cache.budget for cache in make_prompt_cache(model)] == expected


@pytest.mark.parametrize("path", ["nowhere", "./no/where", "a/b/c", "~unknown_user/x", ""])
def test_what_is_no_folder_is_told(path):
    with pytest.raises(UserError, match="no such folder"):
        load(path)


def test_the_weights_may_be_left_unread():
    model, _ = load(BUILTIN_MODEL, lazy=True)
    assert model(mx.array([[1, 2]])).shape == (1, 2, 8192)
