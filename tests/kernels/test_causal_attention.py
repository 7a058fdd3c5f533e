"""The causal kernel as Metal text on the processor, against the definition in float64."""

import re
import shutil

import metal_host
import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering, every
from methods import error, float64

from mlx_selective.kernels import blocks, launched_by, outputs_start_as
from mlx_selective.kernels import causal_attention as module
from mlx_selective.kernels.blocks import Blocks
from mlx_selective.kernels.causal_attention import causal_attention
from mlx_selective.kernels.kernel import Kernel
from mlx_selective.kernels.source import KERNEL_FOLDER

pytest.importorskip("ziglang")

DTYPES = {mx.float32: 2e-7, mx.float16: 1e-4, mx.bfloat16: 1e-3}  # and what is no error yet
BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
SHAPES = {
    "dtype": list(DTYPES),
    "D": [64, 80, 96, 128],
    "T": [1, 7, 31, 33, 127],
    "earlier": [0, 1, 30, 77],  # keys before the first query
    "heads": [(1, 1), (4, 1), (6, 2)],  # H, Hkv
    "B": [1, 2],
}


def definition(q, k, v, scale):
    """The queries are the last T of N positions, one after the other."""
    T, N = q.shape[2], k.shape[2]
    if T == N:
        return oracle.causal_softmax(q, k, v, scale)
    k, v = (oracle.repeat_heads(kv, q.shape[1]) for kv in (k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        seen = N - T + i + 1
        weights = oracle.softmax(scale * k[b, h, :seen] @ q[b, h, i])
        out[b, h, i] = weights @ v[b, h, :seen]
    return out


def normal(dtype=mx.float32, D=64, T=7, earlier=0, heads=(2, 1), B=1, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    lengths = (heads[0], T), (heads[1], T + earlier), (heads[1], T + earlier)
    return [
        mx.random.normal((B, *length, D), key=key).astype(dtype)
        for length, key in zip(lengths, keys, strict=True)
    ]


def rising(rise, from_here, dtype):
    """q, k, v of 41 queries and 100 keys whose logits rise from key to key, and vary a little."""
    q, k, v = normal(dtype, T=41, earlier=59)
    steps = (mx.arange(100) * rise).astype(dtype)[None, None, :, None]
    ones = mx.ones((1, 2, 41, 1), dtype)
    q = mx.concatenate([ones, ones * from_here, q[..., 2:]], 3)
    return q, mx.concatenate([steps, mx.ones_like(steps), k[..., 2:] / 8], 3), v


def on_host(q, k, v, scale, **options):
    """Outputs begin as NaN, so that what is not written shows."""
    with launched_by(metal_host.execute), outputs_start_as(float("nan")):
        return causal_attention(q, k, v, scale=scale, **options)


def check(*problems, **options):
    """Over all (q, k, v, scale), at most twice the error of plain MLX in that dtype, and a floor.

    Returns the share of that.
    """
    truths, ours, plain = [], [], []
    for q, k, v, scale in problems:
        out = on_host(q, k, v, scale, **options)
        assert out.dtype == q.dtype
        ours.append(float64(out))
        truths.append(definition(float64(q), float64(k), float64(v), scale))
        theirs = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        plain.append(float64(theirs))
    truth = np.concatenate(truths)
    found = error(np.concatenate(ours), truth)
    most = 2 * error(np.concatenate(plain), truth) + DTYPES[problems[0][0].dtype]
    assert found <= most
    return found / most


def check_shape(seed, D, B, heads, T, **case):
    """Few rows are drawn several times: the error of one row alone is a matter of luck."""
    draws = -(-16 // (B * heads[0] * T))
    case |= {"D": D, "B": B, "heads": heads, "T": T}
    return check(*((*normal(**case, seed=100 * seed + i), D**-0.5) for i in range(draws)))


def names(case):
    return "-".join(str(value).replace("mlx.core.", "") for value in case.values())


CASES = covering(SHAPES)


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_shapes(seed, case):
    check_shape(seed, **case)


@pytest.mark.slow
def test_every_shape():
    print(max(check_shape(seed, **case) for seed, case in enumerate(every(SHAPES))))


@pytest.mark.parametrize(
    "dtype, blocks",
    [
        (mx.float16, Blocks(32, 16, 8, 2)),  # two pairs of blocks of keys and values
        (mx.bfloat16, Blocks(32, 32, 8, 2, True)),  # and the queries in threadgroup memory
        (mx.float32, Blocks(64, 16, 16, 1, True)),  # two fragments of rows
        (mx.float32, Blocks(16, 48, 8, 1)),
    ],
    ids=str,
)
def test_other_blocks(dtype, blocks):
    for T, earlier in ((33, 0), (70, 31)):
        check((*normal(dtype, 64, T, earlier), 0.125), blocks=blocks)


def test_arrays_that_are_not_contiguous():
    lengths = (20, 4), (60, 2), (60, 2)
    q, k, v = (mx.random.normal((2, n, h, 64)).swapaxes(1, 2)[:, :, ::2] for n, h in lengths)
    check((q, k, v, 0.125))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_equal_logits_give_the_mean_of_what_is_seen(dtype, sign):
    _, k, v = normal(dtype, T=41, earlier=29)
    q, k = mx.full((1, 2, 41, 64), 16, dtype), mx.full(k.shape, 16 * sign, dtype)
    out = float64(on_host(q, k, v, 1e4 / 16**2 / 64))
    values, counts = float64(v).repeat(2, 1), np.arange(1, 71)
    mean = (values.cumsum(2) / counts[:, None])[:, :, 29:]
    assert np.abs(out - mean).max() <= {2: 1e-2, 4: 1e-5}[dtype.size] * np.abs(mean).max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_huge_logit_takes_all(dtype):
    q, k, v = normal(dtype, T=41, earlier=29)
    # the keys' first number counts up and down, the queries' is large: logits up to 1e4
    steps = mx.array(np.r_[np.arange(0, 60), np.arange(60, 50, -1)]).astype(dtype)
    q = mx.concatenate([mx.full((1, 2, 41, 1), 1e4 / 60, dtype), 0 * q[..., 1:]], 3)
    k = mx.concatenate([steps[None, None, :, None], 0 * k[..., 1:]], 3)
    out = on_host(q, k, v, 1.0)
    best = np.minimum(np.arange(29, 70), 60)  # of each query
    assert error(out[0, 1], float64(v)[0, 0][best]) <= DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("from_here", [0, -100, 1000, 3e4])
@pytest.mark.parametrize("rise", [-0.5, 0.02, 0.15, 0.35, 8])
def test_logits_that_rise_from_key_to_key(rise, from_here, dtype):
    """By less than the slack of a block, about it, and by more; and they fall."""
    q, k, v = rising(rise, from_here, dtype)
    check((q, k, v, 1.0), blocks=Blocks(32, 16, 8, 1))


def test_weights_stay_below_the_slack():
    """A block may weigh 2^SLACK, which float16 holds, and no more."""
    source = KERNEL_FOLDER.joinpath("tile", "softmax.h").read_text()
    slack = int(re.search(r"SLACK = (\d+);", source)[1])
    sums = []
    for step in (0.95, 1.05):
        # one key a block of 16 rises by a step of slack, in base 2
        k = mx.zeros((1, 1, 48, 64))
        k[:, :, 16::16, 0] = mx.arange(1, 3) * (step * slack * np.log(2))
        q = mx.zeros((1, 1, 48, 64))
        q[..., 0] = 1
        with metal_host.recording() as reports:
            on_host(q, k, mx.ones(k.shape), 1.0, blocks=Blocks(16, 16, 8, 1))
        sums.append(reports[0].special_functions)
    logits = 16 * 16 * (1 + 2 + 3)
    # the first block sets the scale of two simdgroups, and the third is two steps beyond it
    assert (np.array(sums) - logits).tolist() == [64 * (3 + 1), 64 * (1 + 2 + 3)]


@pytest.mark.parametrize("heads, B, wide", [((6, 2), 3, 3), ((5, 5), 7, 7), ((4, 1), 1, 1)])
def test_heads_that_are_worked_apart(heads, B, wide, monkeypatch):
    q, k, v = normal(T=20, earlier=13, heads=heads, B=B)
    each = 2 * 33 * 64 * 4 * heads[1] // heads[0]
    monkeypatch.setattr(blocks, "CACHE", wide * each)
    grids = []

    def noting(kernel, **call):
        grids.append(call["grid"])
        return metal_host.execute(kernel, **call)

    check((q, k, v, 0.125))
    with launched_by(noting):
        mx.eval(causal_attention(q, k, v, scale=0.125))
    assert [(x // 128, z) for x, _, z in grids] == [(wide, B * heads[0] // wide)]


def test_more_heads_than_groups_are_counted():
    assert blocks.heads_together(2**17, 2**30) == 4
    assert blocks.heads_together(65537, 2**30) == 65537


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_keys_that_end_about_a_block(D, dtype):
    """Whole rows are copied without asking; the last key of a block may be missing."""
    block = module.BLOCKS["metal", dtype.size][D].keys
    for N in (block - 1, block, block + 1, 2 * block - 1):
        check((*normal(dtype, D, T=N, heads=(2, 1)), 0.125))


def test_random_huge_logits():
    q, k, v = normal(T=64, earlier=20)
    check((1e4 * q, k, v, 0.125))


@pytest.mark.parametrize(
    "number, pairs",
    [
        (1, 1),  # the values of a block are read, the next block is written
        (1, 2),  # the same, and a block is written, read
        (2, 1),  # a block is written, read
    ],
)
def test_each_barrier_is_needed(number, pairs, tmp_path, monkeypatch):
    shutil.copytree(KERNEL_FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "attention" / "causal.metal"
    pieces = file.read_text().split(BARRIER)
    assert len(pieces) == 3
    before, after = BARRIER.join(pieces[:number]), BARRIER.join(pieces[number:])
    file.write_text(f"{before};{after}")
    monkeypatch.setattr(module, "_KERNEL", Kernel("attention/causal.metal", tmp_path))
    for seed in range(5):
        with pytest.raises(metal_host.Fault) as caught, metal_host.recording(seed=seed):
            on_host(*normal(T=33, earlier=40), 0.125, blocks=Blocks(32, 16, 8, pairs))
        # whoever reads first reads what nobody wrote yet
        assert caught.value.kind in ("race", "uninitialised read")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q.astype(mx.int32), k, v), "q, k, v must be one of .*got mlx.core.int32"),
        (lambda q, k, v: (q, k.astype(mx.float16), v), "got mlx.core.float32, mlx.core.float16"),
        (lambda q, k, v: (q, k, v.astype(mx.bfloat16)), "float32, mlx.core.bfloat16"),
        (
            lambda q, k, v: (q[..., :48], k[..., :48], v[..., :48]),
            r"the head size must be one of \(64, 80, 96, 128\), got 48",
        ),
        (lambda q, k, v: (q, k, v[:, :, 1:]), r"belong together: \(2, 4, 5, 64\), \(2, 2, 9, 64\)"),
        (lambda q, k, v: (q[:, :3], k, v), "shapes do not belong together"),  # 3 heads for 2
        (lambda q, k, v: (q, k[:, :, :4], v[:, :, :4]), "shapes do not belong together"),
        (lambda q, k, v: (q[:, :, :0], k, v), "shapes do not belong together"),
        (lambda q, k, v: (q[:1], k, v), "shapes do not belong together"),
        (lambda q, k, v: (q, k[..., :32], v[..., :32]), "shapes do not belong together"),
    ],
)
def test_what_it_refuses(change, message):
    arrays = normal(T=5, earlier=4, heads=(4, 2), B=2)
    with pytest.raises(ValueError, match=message):
        causal_attention(*change(*arrays), scale=0.125)


@pytest.mark.parametrize("scale", [0, -0.125, float("inf"), float("nan"), 1e-46, 1e39])
def test_scales_that_the_mask_does_not_survive(scale):
    with pytest.raises(ValueError, match="scale must be a positive number"):
        causal_attention(*normal(T=5, earlier=4, heads=(4, 2), B=2), scale=scale)


def test_a_prompt_longer_than_sixteen_bits_count():
    """40,000 queries, of which a short grid computes the first two blocks."""
    q, k, v = normal(T=40_000, heads=(1, 1))

    def begun(kernel, **call):
        return metal_host.execute(kernel, **call | {"grid": (call["grid"][0], 2, 1)})

    with launched_by(begun):
        out = causal_attention(q, k, v, scale=0.125)[:, :, :64]
    first = [array[:, :, :64] for array in (q, k, v)]
    plain = mx.fast.scaled_dot_product_attention(*first, scale=0.125, mask="causal")
    assert mx.abs(out - plain).max().item() < 1e-5


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("D", module.HEAD_SIZES)
def test_shared_memory_is_what_the_text_declares(D, dtype, staged, monkeypatch):
    """On CUDA the number is an argument, and nothing else would find one that is too small."""
    asked = []
    build = Kernel.build

    def noting(kernel, backend, shared_memory):
        asked.append(shared_memory)
        return build(kernel, backend, shared_memory)

    monkeypatch.setattr(Kernel, "build", noting)
    with metal_host.recording() as reports:
        on_host(*normal(dtype, D), scale=0.1, blocks=Blocks(16, 16, 8, 1, staged))
    assert [report.threadgroup_memory for report in reports] == asked
