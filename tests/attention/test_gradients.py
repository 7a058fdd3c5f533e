"""Gradients of every argument against finite differences of the float64 oracle."""

import shutil

import mlx.core as mx
import numpy as np
import oracle
import pytest
from methods import CASES, error, float64, random_qkv, temperatures

from mlx_selective import selective_attention, ssa_attention, stick_breaking_attention

SCALE = 0.7


def finite_differences(function, arrays, step=1e-5):
    """Central differences of a scalar function of float64 arrays, one array a result."""
    gradients = []
    for array in arrays:
        gradient = np.zeros_like(array)
        for index in np.ndindex(*array.shape):
            value = array[index]
            array[index] = value + step
            up = function(*arrays)
            array[index] = value - step
            down = function(*arrays)
            array[index] = value
            gradient[index] = (up - down) / (2 * step)
        gradients.append(gradient)
    return gradients


def gradients(run, truth, arrays, truths):
    """Of each argument, by MLX and by finite differences; each output has its own cotangent."""
    rng = np.random.default_rng(9)
    weights = [rng.standard_normal(output.shape) for output in truth(*truths)]

    def loss(*arguments):
        outputs = run(*arguments)
        return sum(
            (o * mx.array(w.astype(np.float32))).sum()
            for o, w in zip(outputs, weights, strict=True)
        )

    def truth_loss(*arguments):
        return sum((o * w).sum() for o, w in zip(truth(*arguments), weights, strict=True))

    found = mx.grad(loss, argnums=list(range(len(arrays))))(*arrays)
    found = [found] if len(arrays) == 1 else found  # mx.grad gives one array bare
    return zip(map(float64, found), finite_differences(truth_loss, truths), strict=True)


def check(run, truth, arrays, truths):
    """``run`` and ``truth`` return tuples; every argument's gradient is right."""
    check_all([(run, truth, arrays, truths)])


def check_all(problems):
    """The same over several draws of a problem, whose gradients are taken together.

    For parameters of a few numbers: theirs are sums of what cancels, so that the error of a single
    draw is a matter of luck.
    """
    for argument in zip(*(gradients(*problem) for problem in problems), strict=True):
        found, expected = (
            np.concatenate([np.ravel(pair[side]) for pair in argument]) for side in range(2)
        )
        assert error(found, expected) < 1e-6


@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
@pytest.mark.parametrize("H, Hkv, T", [(2, 2, 7), (2, 1, 9)])
def test_selective(H, Hkv, T, block_size):
    """Through F too: no gradient is stopped, and F itself has a cotangent."""
    arrays, truths = random_qkv(1, B=1, H=H, Hkv=Hkv, T=T, D=4)

    def truth(q, k, v):
        return oracle.selective_results(q, k, v, SCALE)[:2]

    def run(q, k, v):
        return selective_attention(q, k, v, scale=SCALE, return_F=True, block_size=block_size)

    check(run, truth, arrays, truths)


def test_selective_reaches_the_F_of_earlier_chunks():
    arrays, truths = random_qkv(2, B=1, T=8, D=4)
    (q, k, v), (q64, k64, v64) = arrays, truths

    def run(k):
        """Two chunks: the first chunk's gradient goes through F into the second."""
        out1, F = selective_attention(
            q[:, :, :5], k[:, :, :5], v[:, :, :5], scale=SCALE, return_F=True
        )
        F = mx.pad(F, ((0, 0), (0, 3)))
        out2 = selective_attention(q[:, :, 5:], k, v, scale=SCALE, F=F)
        return (mx.concatenate([out1, out2], axis=2),)

    check(run, lambda k: oracle.selective(q64, k, v64, SCALE)[:1], [k], [k64])


@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
def test_selective_reaches_the_F_it_is_given(block_size):
    """F is an argument, and its own gradient goes through all three results."""
    arrays, truths = random_qkv(8, B=1, H=2, Hkv=1, T=7, D=4)
    before = np.array([[0, 0.3, 1.2, 0.05, 0.7, 0, 0]])

    def run(q, k, v, F):
        options = {"return_F": True, "return_remaining": True, "block_size": block_size}
        return selective_attention(q, k, v, scale=SCALE, F=F, **options)

    def truth(q, k, v, F):
        return oracle.selective_results(q, k, v, SCALE, before=F)

    check(run, truth, [*arrays, mx.array(before.astype(np.float32))], [*truths, before])


@pytest.mark.parametrize("attend_current", [False, True])
@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
def test_stick_breaking(attend_current, block_size):
    arrays, truths = random_qkv(3, B=1, H=2, Hkv=1, T=8, D=4)
    options = {"scale": SCALE, "attend_current": attend_current}
    check(
        lambda q, k, v: stick_breaking_attention(q, k, v, block_size=block_size, **options),
        lambda q, k, v: oracle.stick_breaking(q, k, v, **options),
        arrays,
        truths,
    )


def test_stick_breaking_where_all_logits_are_zero():
    """A projection that starts at zero must be able to leave it."""
    (_, k, v), (_, k64, v64) = random_qkv(5, B=1, H=2, Hkv=1, T=7, D=4)
    q64 = np.zeros((1, 2, 7, 4))
    check(
        lambda q: stick_breaking_attention(q, k, v, scale=SCALE),
        lambda q: oracle.stick_breaking(q, k64, v64, SCALE),
        [mx.zeros(q64.shape)],
        [q64],
    )


@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
def test_ssa(block_size):
    (q, k, v), truths = random_qkv(4, B=1, H=2, Hkv=1, T=7, D=4)
    tau_q, tau_v = temperatures((1, 2, 7)), temperatures((1, 1, 7), 6)
    check(
        lambda *args: (ssa_attention(*args, scale=SCALE, block_size=block_size),),
        lambda *args: (oracle.ssa(*args, SCALE),),
        [q, k, v, mx.array(tau_q), mx.array(tau_v)],
        [*truths, tau_q.astype(np.float64), tau_v.astype(np.float64)],
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("block_size", [64, 4], ids=["one block", "recomputed blocks"])
def test_gradients_stop_at_the_borders_of_documents(case, block_size):
    """Packed documents have the gradients of separate ones, in every argument."""
    arrays, truths = random_qkv(7, B=1, H=2, Hkv=1, T=8, D=4)
    ids = mx.array([4, 4, 4, 1, 1, 1, 1, 1])

    def run(*qkv):
        return (case.run(*qkv, SCALE, segment_ids=ids, block_size=block_size),)

    def truth(*qkv):
        parts = [[a[:, :, part] for a in qkv] for part in (slice(0, 3), slice(3, 8))]
        return (np.concatenate([case.truth(*part, SCALE) for part in parts], axis=2),)

    check(run, truth, arrays, truths)


@pytest.mark.parametrize("name", ["selective", "stick_breaking", "ssa"])
def test_compiled_steps_have_the_same_gradients(name):
    """mlx-lm's trainer compiles its step; several blocks at once."""
    if mx.default_device() == mx.cpu and shutil.which("g++") is None:
        pytest.skip("MLX compiles with g++ on the CPU")
    functions = {
        "selective": lambda q, k, v: selective_attention(q, k, v, scale=SCALE, block_size=8),
        "stick_breaking": lambda q, k, v: stick_breaking_attention(
            q, k, v, scale=SCALE, block_size=8
        )[0],
        "ssa": lambda q, k, v: ssa_attention(q, k, v, None, None, scale=SCALE, block_size=8),
    }
    arrays, _ = random_qkv(6, B=1, T=30)
    step = mx.value_and_grad(lambda *qkv: (functions[name](*qkv) ** 2).sum(), argnums=(0, 1, 2))
    loss, gradients = step(*arrays)
    mx.enable_compile()
    try:
        compiled_loss, compiled = mx.compile(step)(*arrays)
        mx.eval(compiled_loss, compiled)
    finally:
        mx.disable_compile()
    assert abs(loss.item() - compiled_loss.item()) < 1e-5 * abs(loss.item())
    for one, other in zip(gradients, compiled, strict=True):
        assert error(other, float64(one)) < 1e-5
