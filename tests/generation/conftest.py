"""The built-in model under a small budget, loaded once."""

import pytest

from mlx_selective import load
from mlx_selective.builtin import BUILTIN_MODEL

BUDGET = 16


@pytest.fixture(scope="session")
def loaded():
    return load(BUILTIN_MODEL, BUDGET)


@pytest.fixture(scope="session")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def tokenizer(loaded):
    return loaded[1]
