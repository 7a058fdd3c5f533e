"""Kernels compute values; their gradients are those of the plain definition."""

from collections.abc import Callable

import mlx.core as mx


def with_gradient_of(plain: Callable, forward: Callable, outputs: int | None = None) -> Callable:
    """A function with the values of ``forward`` and the derivatives of ``plain``.

    MLX cannot look into a kernel. The backward pass computes the plain definition again, from
    the same arguments; so does ``mx.jvp``. ``mx.vmap`` raises ValueError where a kernel runs: MLX
    has no way to keep it out of one (MLX_SELECTIVE_KERNELS=off has).

    Args:
        plain: the definition in plain MLX, of arrays alone; returns an array or a list of some.
        forward: computes the same with a kernel, with the same arguments and form of result.
        outputs: how many results ``plain`` returns, if ``forward`` returns more behind them,
            which then have no derivatives.

    Returns:
        A function of the same arguments that ``mx.grad``, ``mx.compile`` and the like take.
    """
    # mx.jvp would ask a kernel for its derivatives although nothing needs them
    function = mx.custom_function(lambda *arrays: forward(*map(mx.stop_gradient, arrays)))

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

    return function


def _listed(one_or_more) -> list:
    """MLX passes a single array bare, several in a tuple."""
    return list(one_or_more) if isinstance(one_or_more, (list, tuple)) else [one_or_more]
