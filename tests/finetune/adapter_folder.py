"""What a training leaves, and one that is stopped."""

import json
import os
import signal

import mlx.core as mx

from mlx_selective import load
from mlx_selective.finetune.training import Run


def curve(folder="adapters"):
    with open(f"{folder}/losses.jsonl") as file:
        return [json.loads(line) for line in file]


def adapter(folder="adapters"):
    return mx.load(f"{folder}/adapters.safetensors")


def config(folder="adapters"):
    with open(f"{folder}/adapter_config.json") as file:
        return json.load(file)


def same(one, other):
    assert one.keys() == other.keys()
    return all(mx.array_equal(one[name], other[name]) for name in one)


def logits(folder, ids, **options):
    model, _ = load(folder, **options)
    return model(ids)


IDS = mx.array([[5, 9, 2, 7, 7, 3, 12, 4]])


def stop_after(monkeypatch, iteration):
    """Ctrl-C while that iteration is worked at."""
    before = Run._follow_schedules

    def follow(self, now):
        if now == iteration:
            os.kill(os.getpid(), signal.SIGINT)
        return before(self, now)

    monkeypatch.setattr(Run, "_follow_schedules", follow)
