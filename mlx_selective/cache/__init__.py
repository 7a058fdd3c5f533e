"""The pruned KV cache, and the account of what a model's caches hold."""

from .account import CacheAccount, account
from .prompt import make_prompt_cache, refuse_quantised_keys
from .pruned import PrunedKVCache

__all__ = [
    "CacheAccount",
    "PrunedKVCache",
    "account",
    "make_prompt_cache",
    "refuse_quantised_keys",
]
