"""Generation with a budget of keys, and the ``generate`` command."""

from .stream import PREFILL_STEP_SIZE, generate, stream_generate

__all__ = ["PREFILL_STEP_SIZE", "generate", "stream_generate"]
