"""mlx-selective: language models whose attention chooses what to read, on Apple silicon.

An extension of mlx-lm. ``load`` opens a converted model, ``generate`` and ``stream_generate``
run it while each layer keeps only its budget of keys, ``graft`` puts one of the three attention
methods into an mlx-lm model, and the methods themselves are plain functions.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what __getattr__ imports, for type checkers and editors
    from .attention import (
        AttentionMethod,
        selective_attention,
        ssa_attention,
        stick_breaking_attention,
    )
    from .cache import PrunedKVCache, account, make_prompt_cache
    from .errors import UserError
    from .generation import generate, stream_generate
    from .grafting import graft
    from .loading import load

__version__ = "0.1.0"

#: public name -> module; imported on first use, so that the command line starts fast
_PUBLIC = {
    "AttentionMethod": "attention",
    "PrunedKVCache": "cache",
    "UserError": "errors",
    "account": "cache",
    "generate": "generation",
    "graft": "grafting",
    "load": "loading",
    "make_prompt_cache": "cache",
    "selective_attention": "attention",
    "ssa_attention": "attention",
    "stick_breaking_attention": "attention",
    "stream_generate": "generation",
}

__all__ = [
    "AttentionMethod",
    "PrunedKVCache",
    "UserError",
    "account",
    "generate",
    "graft",
    "load",
    "make_prompt_cache",
    "selective_attention",
    "ssa_attention",
    "stick_breaking_attention",
    "stream_generate",
]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_PUBLIC])
