"""Derivatives around a kernel, into which MLX cannot look."""

import mlx.core as mx
import pytest

from mlx_selective.kernels.gradient import with_gradient_of


def opaque(x, y):
    """Through an operation of which MLX has neither derivatives nor batches, as of a kernel."""
    (zero,) = mx.linalg.qr(mx.ones((1, 1)) + 0 * x[:1, None] * y[:1, None], stream=mx.cpu)[1]
    return [x + 2 * y + 0 * zero, x - y + 0 * zero]


def definition(x, y):
    return [x * x + 2 * y, mx.sin(x) - y]


@pytest.fixture
def function():
    return with_gradient_of(definition, opaque)


X, Y = mx.array([0.5, 2.0, 3.0]), mx.array([1.0, -1.0, 4.0])


def test_opaque_is_opaque():
    for transformed in (
        lambda: mx.jvp(opaque, [X, Y], [X, Y]),
        lambda: mx.vmap(opaque)(X[None], Y[None]),
        lambda: mx.vjp(opaque, [X, Y], [X, Y]),
    ):
        with pytest.raises(ValueError, match="Not implemented for QRF"):
            transformed()


def test_along_a_direction(function):
    values, along = mx.jvp(function, [X, Y], [X, Y])
    assert mx.allclose(values[0], X + 2 * Y) and mx.allclose(values[1], X - Y)
    assert mx.allclose(along[0], 2 * X * X + 2 * Y)
    assert mx.allclose(along[1], mx.cos(X) * X - Y)


def test_along_a_direction_of_one_argument(function):
    along = mx.jvp(lambda x: function(x, Y), [X], [X])[1]
    assert mx.allclose(along[0], 2 * X * X) and mx.allclose(along[1], mx.cos(X) * X)
    along = mx.jvp(lambda y: function(X, y), [Y], [X])[1]
    assert mx.allclose(along[0], 2 * X) and mx.allclose(along[1], -X)


def test_back_through_both_results(function):
    gradients = mx.vjp(function, [X, Y], [X, Y])[1]
    assert mx.allclose(gradients[0], 2 * X * X + mx.cos(X) * Y)
    assert mx.allclose(gradients[1], 2 * X - Y)


def test_batches_are_refused_as_mlx_refuses_them(function):
    """It goes through what a function holds, whatever else the function says of batches."""
    with pytest.raises(ValueError, match="vmap.*Not implemented"):
        mx.vmap(function)(X[None], Y[None])
