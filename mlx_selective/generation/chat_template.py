"""Messages through a model's chat template."""

from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import UserError
from ..files import one_line


def render_chat(
    tokenizer: TokenizerWrapper, messages: list[dict[str, str]], **options: Any
) -> str | list[int]:
    """Messages through the chat template, up to where the next answer begins.

    Raises:
        UserError: if the template refuses the messages; some refuse a system prompt.
    """
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except Exception as error:  # a template is a program, and may fail in any way
        raise UserError(
            f"the model's chat template refuses the messages: {one_line(error)}"
        ) from None


def chat_prompt(
    tokenizer: TokenizerWrapper, text: str, system_prompt: str | None
) -> str | list[int]:
    """The prompt for one user message: through the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return text
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": text})
    return render_chat(tokenizer, messages)
