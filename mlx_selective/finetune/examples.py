"""Examples as tokens, made when they are asked for; one that cannot be is told by its place."""

from pathlib import Path
from typing import Any

from mlx_lm.tuner.datasets import CacheDataset

from ..errors import UserError
from ..files import one_line


class Examples(CacheDataset):
    """mlx-lm's dataset of examples.

    Args:
        data: mlx-lm's dataset, whose ``process`` makes tokens.
        told_as: the file that the examples came from.
    """

    def __init__(self, data: Any, told_as: Path | str = "the data"):
        super().__init__(data)
        self.told_as = told_as

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        try:
            return super().__getitem__(index)
        except Exception as error:  # a chat template is a program, and may fail in any way
            raise UserError(
                f"{self.told_as}, line {index + 1}: the tokenizer or its chat template does not "
                f"take it: {one_line(error)}"
            ) from error
