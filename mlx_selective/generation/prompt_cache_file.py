"""A prompt's cache that ``cache_prompt`` saved, and the prompt that goes on from it."""

import json
import os
from pathlib import Path

import mlx.nn as nn
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache.integrity import fits_model
from ..errors import UserError
from ..files import check_safetensors
from .chat_template import render_chat

#: Stands for the message when the template is asked what comes before it.
_MARK = "<query>"


class PromptCacheFile:
    """The caches of one prompt, and which model and tokenizer settings made them.

    Args:
        path: the file that ``--prompt-cache-file`` names.

    Attributes:
        model: the folder or Hub id given to ``cache_prompt``.
        tokenizer_config: what its tokenizer was opened with.
        caches: one a layer.

    Raises:
        UserError: if the file is missing, damaged, or something else.
    """

    def __init__(self, path: str):
        self.path = Path(os.path.expanduser(path))
        if not self.path.is_file():
            # mlx adds the ending when it saves.
            self.path = self.path.with_name(self.path.name + ".safetensors")
            if not self.path.is_file():
                raise UserError(f"--prompt-cache-file {path}: no such file.")
        check_safetensors(self.path)
        try:
            self.caches, metadata = load_prompt_cache(str(self.path), return_metadata=True)
            self.model = metadata["model"]
            self.tokenizer_config = json.loads(metadata["tokenizer_config"])
            self.tokenizer_config.pop("trust_remote_code", None)
        except Exception:  # another file's content may be anything
            raise UserError(
                f"{self.path} is no prompt cache that cache_prompt of this mlx-lm saved."
            ) from None

    def check_model(self, given: str) -> None:
        """Checks that ``--model`` is the model of this cache.

        Raises:
            UserError: naming both.
        """
        if given != self.model and os.path.realpath(given) != os.path.realpath(self.model):
            raise UserError(f"{self.path} was saved with --model {self.model}, not {given}.")

    def check_fits(self, model: nn.Module) -> None:
        """Checks that the loaded model has caches of these types and shapes.

        Raises:
            UserError: if it has changed since.
        """
        if not fits_model(self.caches, model):
            raise UserError(
                f"{self.path} does not fit the model {self.model}; save it again with cache_prompt."
            )


def continued_prompt(tokenizer: TokenizerWrapper, text: str, *, raw: bool = False) -> list[int]:
    """The tokens that go on from a saved prompt: a message, without what comes before it.

    Args:
        tokenizer: the model's.
        text: the message, or its rest: in the chat template, the saved prompt is its beginning.
        raw: leave out the chat template.

    Raises:
        UserError: if the template refuses the message, or does not show it.
    """
    if tokenizer.has_chat_template and not raw:
        shown, marked = (
            render_chat(tokenizer, [{"role": "user", "content": content}], tokenize=False)
            for content in (text, _MARK)
        )
        if _MARK not in marked:
            raise UserError("the model's chat template hides the message; --ignore-chat-template.")
        text = shown[marked.index(_MARK) :]
    return tokenizer.encode(text, add_special_tokens=False)
