"""Kernels compute values; their gradients are those of the plain definition."""

from collections.abc import Callable

import mlx.core as mx


def with_gradient_of(plain: Callable, forward: Callable, outputs: int | None = None) -> Callable:
    """A function with the values of ``forward`` and the derivatives of ``plain``.

    MLX cannot look into a kernel. The backward pass computes the plain definition again, from
    the same arguments; so do ``mx.jvp`` and ``mx.vmap``.

    Args:
        plain: the definition in plain MLX, of arrays alone; returns an array or a list of some.
        forward: computes the same with a kernel, with the same arguments and form of result.
        outputs: how many results ``plain`` returns, if ``forward`` returns more behind them,
            which then have no derivatives.

    Returns:
        A function of the same arguments that ``mx.grad``, ``mx.compile`` and the like take.
    """
    # a function of its own: custom_function needs one with a name
    function = mx.custom_function(lambda *arrays: forward(*arrays))

    @function.vjp
    def backward(primals, cotangents, _):
        return mx.vjp(plain, _listed(primals), _listed(cotangents)[:outputs])[1]

    @function.jvp
    def along(primals, tangents):
        # MLX has None for an argument that does not move
        tangents = [
            mx.zeros_like(one) if tangent is None else tangent
            for one, tangent in zip(_listed(primals), _listed(tangents), strict=True)
        ]
        out = mx.jvp(plain, _listed(primals), tangents)[1]
        return out if len(out) > 1 else out[0]

    @function.vmap
    def batched(inputs, axes):
        axes = tuple(None if axis == -1 else axis for axis in _listed(axes))
        out = mx.vmap(plain, in_axes=axes)(*_listed(inputs))
        return out, 0 if isinstance(out, mx.array) else [0] * len(out)

    return function


def _listed(one_or_more) -> list:
    """MLX passes a single array bare, several in a tuple."""
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]
