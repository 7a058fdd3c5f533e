"""The pruned KV cache, and the account of what a model's caches hold."""

from .account import CacheAccount, account
from .pruned import PrunedKVCache
from .prompt import make_prompt_cache

__all__ = ["CacheAccount", "PrunedKVCache", "account", "make_prompt_cache"]
