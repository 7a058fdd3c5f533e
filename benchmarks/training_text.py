"""Text of ../shared/data as mlx-lm's trainer takes it, in pieces that fill a context.

``python benchmarks/training_text.py --model MODEL --data ../shared/data --to DATA`` writes
DATA/train.jsonl and valid.jsonl: lines ``{"text": ...}`` of at most ``--tokens`` tokens, so that
nothing is cut off. Those of train.jsonl are full, one document after the other, so that nearly all
batches have one length, for which buffers are there already. Conversations, instructions and tales
are taken ``--often`` times as often as novels and textbooks; ``--megabytes`` of text are drawn, by
``--seed``.
"""

import argparse
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from mlx_selective.loading import model_folder, open_tokenizer

SHORT = ("chat", "instruct", "children")


def main() -> None:
    """Writes the two files and says how much is in them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", default="../shared/data", type=Path)
    parser.add_argument("--to", required=True, type=Path)
    parser.add_argument("--tokens", default=1000, type=int)
    parser.add_argument("--megabytes", default=20.0, type=float)
    parser.add_argument("--often", default=2, type=int)
    parser.add_argument("--seed", default=0, type=int)
    options = parser.parse_args()
    tokenizer = open_tokenizer(model_folder(options.model))
    options.to.mkdir(parents=True, exist_ok=True)
    documents = list(read(options.data / "train.jsonl.xz", tokenizer, options.often))
    order = np.random.default_rng(options.seed).permutation(len(documents))
    pieces = cut(joined(documents[n] for n in order), tokenizer, options.tokens)
    write(options.to / "train.jsonl", pieces, options.megabytes)
    with lzma.open(options.data / "valid.jsonl.xz", "rt", encoding="utf-8") as file:
        held_out = [json.loads(line)[1] for line in file]
    pieces = cut(held_out, tokenizer, options.tokens)
    write(options.to / "valid.jsonl", pieces, options.megabytes)


def read(file: Path, tokenizer, often: int) -> Iterator[str]:
    """Documents as text, long ones in parts of about 40,000 characters."""
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            document = json.loads(line)
            if "messages" in document:
                template = {"tokenize": False, "add_generation_prompt": False}
                text = tokenizer.apply_chat_template(document["messages"], **template)
            else:
                text = document["text"]
            parts = [text[at : at + 40_000] for at in range(0, len(text), 40_000)]
            yield from parts * (often if document["kind"] in SHORT else 1)


def write(file: Path, pieces: Iterator[tuple[str, int]], megabytes: float) -> None:
    """Pieces, until there are as many megabytes."""
    written = tokens = count = 0
    with file.open("w", encoding="utf-8") as lines:
        for piece, length in pieces:
            lines.write(json.dumps({"text": piece}) + "\n")
            written, tokens, count = written + len(piece), tokens + length, count + 1
            if written > megabytes * 1e6:
                break
    print(f"{file}: {count} pieces, {tokens} tokens, {written / 1e6:.1f} MB")


def joined(documents: Iterable[str], least: int = 40_000) -> Iterator[str]:
    """Documents after one another, ``least`` characters or more together."""
    together = []
    for text in documents:
        together.append(text)
        if sum(map(len, together)) >= least:
            yield "\n\n".join(together)
            together = []
    yield "\n\n".join(together)


def cut(documents: Iterable[str], tokenizer, most: int) -> Iterator[tuple[str, int]]:
    """Pieces of at most ``most`` tokens, at spaces where there are some, and their lengths."""
    for text in documents:
        while text:
            piece = text[: 8 * most]
            length = len(tokenizer.encode(piece))
            while length > most:
                piece = piece[: max(1, int(len(piece) * 0.97 * most / length))]
                piece = piece[: piece.rfind(" ") + 1] or piece
                length = len(tokenizer.encode(piece))
            yield piece, length
            text = text[len(piece) :]


if __name__ == "__main__":
    main()
