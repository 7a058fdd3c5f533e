"""Text to measure budgets on: documents of one length, in two sets."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import create_dataset

from ..errors import UserError
from ..files import one_line
from ..stock_tools.training import read_examples


def read_documents(
    data: Path, tokenizer: TokenizerWrapper, tokens: int, most: int
) -> tuple[mx.array, mx.array]:
    """The first documents that are long enough, every second one for each of two sets.

    Args:
        data: a file of lines in one of mlx-lm's forms, or a folder with valid.jsonl or, if there
            is none, test.jsonl.
        tokenizer: of the model.
        tokens: predictions of each document; what is longer is cut off.
        most: documents of each set.

    Returns:
        Those to choose by and those to report on, (B, N) int32 each, with N = tokens + 1.

    Raises:
        UserError: if the file is not there or damaged, or has fewer than two such documents.
    """
    file = _file(data)
    examples = read_examples(file)
    try:
        dataset = create_dataset(examples, tokenizer, SimpleNamespace())
        found: list[Any] = []
        for example in examples:
            ids = dataset.process(example)[0]
            if len(ids) > tokens:
                found.append(ids[: tokens + 1])
            if len(found) == 2 * most:
                break
    except (ValueError, TemplateError) as error:  # no form that is known, or no chat template
        raise UserError(f"{file}: {one_line(error)}") from None
    if len(found) < 2:
        raise UserError(
            f"{file}: {len(found)} of {len(examples)} documents have more than {tokens} tokens, "
            "and two are needed; give longer ones, or fewer --tokens."
        )
    return tuple(mx.array(np.array(found[first::2], np.int32)) for first in (0, 1))


def _file(data: Path) -> Path:
    if data.is_dir():
        for name in ("valid.jsonl", "test.jsonl"):
            if (data / name).is_file():
                return data / name
        raise UserError(f"--data {data} holds neither valid.jsonl nor test.jsonl.")
    if not data.is_file():
        raise UserError(f"--data {data}: no such file or folder.")
    return data
