"""Conversations in files: what was said, and the caches that have read it."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from ..cache import make_prompt_cache
from ..cache.integrity import fits_model
from ..errors import UserError
from ..files import check_safetensors
from ..fingerprint import fingerprint
from ..writing import whole_file
from .session import ChatSession

#: of the file's layout; others are refused
VERSION = "mlx-selective chat 1"
ENDING = ".safetensors"


def last_session() -> Path:
    """Where a terminal's chat keeps its conversation: the file that /load takes without a name."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "mlx-selective" / f"last-chat{ENDING}"


def save_session(session: ChatSession, path: Path) -> Path:
    """Writes a conversation; what stood there stays until it is whole.

    Args:
        session: between two turns.
        path: of the file; the ending .safetensors is added where it is missing.

    Returns:
        The file.

    Raises:
        UserError: if it cannot be written, or nothing was said yet.
    """
    if not session.conversation.messages:
        raise UserError("nothing was said yet that could be saved.")
    path = path if path.suffix == ENDING else path.with_name(path.name + ENDING)
    metadata = {
        "version": VERSION,
        "model": fingerprint(session.model),
        "messages": json.dumps(session.conversation.messages),
        "answer_ended": json.dumps(session.conversation.answer_ended),
        "system_prompt": json.dumps(session.system_prompt),
    }
    with whole_file(path) as file:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # it is nobody else's business
        save_prompt_cache(str(file), session.prompt_cache, metadata)
    return path


def load_session(session: ChatSession, path: Path) -> None:
    """Takes up a conversation that :func:`save_session` wrote; a refused one changes nothing.

    Raises:
        UserError: naming the file, if it is missing, damaged, or of another model or version.
    """
    if not path.is_file() and path.suffix != ENDING:
        path = path.with_name(path.name + ENDING)
    if not path.is_file():
        raise UserError(f"{path}: no such file.")
    check_safetensors(path)
    try:
        _, metadata = mx.load(str(path), return_metadata=True)
        version, model = metadata["0.version"], metadata["0.model"]
        messages, ended, system_prompt = (
            json.loads(metadata[f"0.{name}"])
            for name in ("messages", "answer_ended", "system_prompt")
        )
    except Exception:  # another file's content may be anything
        raise UserError(f"{path} is no conversation that /save wrote.") from None
    if version != VERSION:
        raise UserError(f"{path} was written as {version!r}; this reads {VERSION!r}.")
    if model != fingerprint(session.model):
        raise UserError(f"{path} was saved with another model.")
    caches = _caches(path, metadata, session.model)
    if caches is None or not _are_messages(messages, ended, system_prompt):
        raise UserError(f"{path} is damaged: its parts do not fit together.")
    session.take_up(caches, messages, ended, system_prompt)


def _caches(path: Path, metadata: dict[str, str], model: nn.Module) -> list[Any] | None:
    """The caches, whose classes are none but the model's own; None if they are not whole."""
    known = {type(cache).__name__ for cache in make_prompt_cache(model)}
    if not {value for name, value in metadata.items() if name.startswith("1.")} <= known:
        return None
    try:
        caches = load_prompt_cache(str(path))
        return caches if fits_model(caches, model) else None
    except Exception:  # whatever mlx-lm makes of arrays that are no cache's
        return None


def _are_messages(messages: Any, ended: Any, system_prompt: Any) -> bool:
    """Whether they are what a conversation holds: questions and answers in turn."""
    said = isinstance(messages, list) and all(
        isinstance(one, dict)
        and one.keys() == {"role", "content"}
        and isinstance(one["content"], str)
        for one in messages
    )
    return (
        said
        and isinstance(ended, bool)
        and (system_prompt is None or isinstance(system_prompt, str))
        and len(messages) % 2 == 0
        and all(one["role"] == ("user", "assistant")[n % 2] for n, one in enumerate(messages))
    )
