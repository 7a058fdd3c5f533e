"""mlx-selective: language models whose attention chooses what to read, on Apple silicon.

An extension of mlx-lm. ``load`` opens a converted model, ``generate`` and ``stream_generate``
run it while each layer keeps only its budget of keys, ``graft`` puts one of the three attention
methods into an mlx-lm model, and the methods themselves are plain functions.
"""

import importlib

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

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_PUBLIC[name]}", __name__)
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_PUBLIC])
