"""Perplexity of a model on whole documents, and as token by token with few keys a layer.

``python benchmarks/pruned_perplexity.py --model MODEL [--adapter-path DIR] --documents FILE.npz
[--tokens 512] [--budgets 256 128 64]``: FILE holds ``doc_0``, ``doc_1``, ... of token ids, as the
reference checkpoints' expected.npz. Documents of that length are the rows of one batch.
"""

import argparse
import itertools
import math

import mlx.core as mx
import numpy as np

from mlx_selective import load
from mlx_selective.budget import mean_loss


def main() -> None:
    """Prints one line for the whole documents and one for each budget."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter-path")
    parser.add_argument("--documents", required=True)
    parser.add_argument("--tokens", default=512, type=int)
    parser.add_argument("--budgets", default=[], type=int, nargs="*")
    options = parser.parse_args()
    model, _ = load(options.model, adapter_path=options.adapter_path)
    arrays = np.load(options.documents)
    documents = []
    for number in itertools.count():
        if f"doc_{number}" not in arrays:
            break
        documents.append(arrays[f"doc_{number}"])
    losses = [whole(model, mx.array(ids)[None]) for ids in documents]
    tokens = sum(len(ids) - 1 for ids in documents)
    print(f"whole: {len(losses)} documents, {tokens} tokens, {math.exp(sum(losses) / tokens):.2f}")
    rows = [ids[: options.tokens + 1] for ids in documents if len(ids) > options.tokens]
    ids = mx.array(np.stack(rows).astype(np.int32))
    for budget in (None, *options.budgets):
        loss = mean_loss(model, ids, budget) if budget else whole(model, ids) / ids[:, 1:].size
        found = math.exp(loss)
        print(f"{budget or 'all'} keys: {len(rows)} documents of {options.tokens}, {found:.2f}")


def whole(model, ids: mx.array) -> float:
    """The sum of the losses of ids (B, T), in one pass."""
    logits = model(ids[:, :-1]).astype(mx.float32)
    right = mx.take_along_axis(logits, ids[:, 1:, None].astype(mx.int32), axis=2)[..., 0]
    return (mx.logsumexp(logits, axis=-1) - right).sum().item()


if __name__ == "__main__":
    main()
