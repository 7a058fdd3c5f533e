"""Perplexity under budgets by other rules of which key leaves, in the same model and memory.

``python benchmarks/eviction_rules.py --model MODEL --data FILE [--tokens 512] [--documents 8]``:
MODEL has budgets.json, which ``mlx-selective budget`` left; measured on the documents that it
reported on. Each row is a state of its curve: its budgets; as many keys in every layer; the first
four and the newest (StreamingLLM, as mlx-lm's RotatingKVCache with keep=4); half the newest and
half those with the most attention so far, summed over heads (H2O, Zhang et al., arXiv 2306.14048).
F masks in all of them. ``--chunks`` adds columns in which tokens come so many at a time.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from mlx_selective import load
from mlx_selective.budget import mean_loss
from mlx_selective.budget.documents import read_documents

SINKS = 4


def main() -> None:
    """Prints one row for each of ``--points`` states, from every key to the fewest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--tokens", default=512, type=int)
    parser.add_argument("--documents", default=8, type=int)
    parser.add_argument("--points", default=8, type=int)
    parser.add_argument("--chunks", default=[], type=int, nargs="*")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    _, documents = read_documents(options.data, tokenizer, options.tokens, options.documents)
    curve = json.loads((options.model / "budgets.json").read_text())["curve"]

    def perplexity(budgets, **how):
        return math.exp(mean_loss(model, documents, budgets, **how))

    print(f"{len(documents)} documents of {options.tokens}; every key: {perplexity(None):.2f}")
    names = ["each layer", "one for all", "window", "H2O"]
    names += [f"each, {c} at a time" for c in options.chunks]
    print(f"{'keys':>7}{'memory':>9}" + "".join(f"{name:>{len(name) + 3}}" for name in names))
    for point in spread(curve, options.points):
        even = max(SINKS + 2, round(sum(point["budgets"]) / len(point["budgets"])))
        found = [perplexity(point["budgets"]), perplexity(even)]
        found += [perplexity(even, rule=rule) for rule in (window, heavy_hitters)]
        found += [perplexity(point["budgets"], chunk=chunk) for chunk in options.chunks]
        cells = (f"{x:>{len(name) + 3}.2f}" for x, name in zip(found, names, strict=True))
        print(f"{point['kept']:>7.1%}{1 / point['kept']:>8.1f}x" + "".join(cells), flush=True)


def spread(curve: list[dict], count: int) -> list[dict]:
    """States about evenly apart in the logarithm of their memory, the last one among them."""
    marks = np.geomspace(curve[0]["kept"], curve[-1]["kept"], count + 1)[1:]
    found = [min(curve, key=lambda p: abs(math.log(p["kept"] / mark))) for mark in marks]
    return [point for n, point in enumerate(found) if point not in found[:n]]


def window(S: np.ndarray, budget: int, logits) -> np.ndarray:
    """The first four keys and the newest stay."""
    B, N, _ = S.shape
    last = np.arange(N) + budget - SINKS
    last[:SINKS] = N - 1
    return np.broadcast_to(np.minimum(last, N - 1).astype(np.int32), (B, N))


def heavy_hitters(S: np.ndarray, budget: int, logits) -> np.ndarray:
    """Beyond the newest half, the key with the least attention so far leaves."""
    z = logits()
    B, H, N, _ = z.shape
    rows, recent = np.arange(B), budget // 2
    attention, gone = np.zeros((B, N)), np.zeros((B, N), bool)
    last = np.full((B, N), N - 1, np.int32)
    for token in range(N):
        seen = np.where(gone[:, None, : token + 1], -np.inf, z[:, :, token, : token + 1])
        weights = np.exp(seen - seen.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attention[:, : token + 1] += weights.sum(axis=1)
        if token >= budget:
            old = token + 1 - recent
            leaves = np.where(gone[:, :old], np.inf, attention[:, :old]).argmin(axis=1)
            gone[rows, leaves] = True
            last[rows, leaves] = token
    return last


if __name__ == "__main__":
    main()
