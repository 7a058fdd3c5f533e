"""mlx-lm's fuse, which tells what fusing into a quantised model loses."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .exchange import exchanged


def fuse(tool: Any, opened: dict[str, Any]) -> None:
    """Fuses, and prints how much of what was trained is rounded away.

    Args:
        tool: the module ``mlx_lm.fuse``.
        opened: ``"model"`` becomes the model with its adapter, once it is opened.
    """
    unflatten = tool.tree_unflatten

    def measured(fused):
        lost = share_lost(dict(opened["model"].named_modules()), dict(fused))
        if lost is not None:
            much = (
                f"{lost:.0%} of the change that was trained is lost"
                if lost < 1
                else (f"rounding takes {lost:.0f} times what was trained")
            )
            print(
                f"Fused into quantised weights, {much} "
                "(root mean square of the rounding over that of the change)"
                + ("; --dequantize keeps it." if lost > 0.05 else ".")
            )
        return unflatten(fused)

    with exchanged(tool, tree_unflatten=measured):
        tool.main()


def share_lost(before: dict[str, nn.Module], fused: dict[str, nn.Module]) -> float | None:
    """What quantising again makes of the change, over all layers: error over change.

    Args:
        before: LoRA and DoRA layers by name, among others.
        fused: the layers that take their place.

    Returns:
        The root mean square of the error over that of the change; None where nothing is quantised.
    """
    lost, changed = 0.0, 0.0
    for name, layer in fused.items():
        if not isinstance(layer, nn.QuantizedLinear):
            continue
        exact = before[name].fuse(dequantize=True).weight.astype(mx.float32)
        lost += ((_weight(layer) - exact) ** 2).sum().item()
        changed += ((_weight(before[name].linear) - exact) ** 2).sum().item()
    return (lost / changed) ** 0.5 if changed else None


def _weight(layer: nn.QuantizedLinear) -> mx.array:
    """The numbers that a quantised layer stands for, (rows, columns) float32."""
    return mx.dequantize(
        layer.weight,
        layer.scales,
        layer.get("biases"),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    ).astype(mx.float32)
