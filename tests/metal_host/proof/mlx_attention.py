"""Launches MLX's attention kernels from the headers in its wheel, as MLX does on a Mac."""

import struct
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..library import Library, Output
from ..report import Report
from ..translation.building import MLX_INCLUDE
from .numbers import error, float64

STEEL = "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention.h"
VECTOR = "mlx/backend/metal/kernels/sdpa_vector.h"
_TYPES = {mx.float32: "float", mx.float16: "half", mx.bfloat16: "bfloat16_t", mx.bool_: "bool"}
#: of params.h: struct AttnParams, then AttnMaskParams
PARAMS = "6i f 7i 12q".replace(" ", "")
MASK_PARAMS = "3q"
#: simdgroups along the queries
WM = 4


@dataclass(frozen=True)
class Problem:
    """softmax(scale q k^T + mask) v. q (B, H, T, D), k and v (B, H / group, N, D)."""

    q: mx.array
    k: mx.array
    v: mx.array
    scale: float
    causal: bool = False
    mask: mx.array | None = None  # (B, H, T, N) of q's dtype, or bool
    sinks: mx.array | None = None  # (H,)

    @classmethod
    def random(
        cls,
        dtype,
        B=1,
        H=1,
        group=1,
        T=32,
        N=32,
        D=64,
        *,
        Dv=None,
        mask="none",
        sinks=False,
        seed=0,
    ):
        """`mask`: none, causal, additive or boolean. The last key is visible to every query."""
        keys = iter(mx.random.split(mx.random.key(seed), 5))
        q, k, v = (
            mx.random.normal((B, heads, length, size), key=next(keys)).astype(dtype)
            for heads, length, size in ((H, T, D), (H // group, N, D), (H // group, N, Dv or D))
        )
        array = None
        if mask in ("additive", "boolean"):
            visible = mx.random.bernoulli(0.5, (B, H, T, N), next(keys))
            visible[..., : N // 2] &= mx.arange(T)[:, None] % 3 > 0  # whole blocks without a key
            visible[..., -1] = True
            bias = mx.where(visible, mx.random.normal((B, H, T, N), key=next(keys)), -mx.inf)
            array = visible if mask == "boolean" else bias.astype(dtype)
        sink = mx.linspace(-1, 3, H).astype(dtype) if sinks else None
        return cls(q, k, v, D**-0.5, mask == "causal", array, sink)

    def shape(self) -> tuple[int, int, int, int, int, int]:
        """B, H, Hkv, T, N, D."""
        B, H, T, D = self.q.shape
        return B, H, self.k.shape[1], T, self.k.shape[2], D

    def empty(self) -> mx.array:
        """Of the output's shape."""
        return mx.zeros((*self.q.shape[:3], self.v.shape[3]), self.q.dtype)

    def mlx(self) -> mx.array:
        """By mx.fast.scaled_dot_product_attention on the processor."""
        mask = "causal" if self.causal else self.mask
        return mx.fast.scaled_dot_product_attention(
            self.q, self.k, self.v, scale=self.scale, mask=mask, sinks=self.sinks
        )

    def raised(self) -> "Problem":
        """The same numbers in float32."""
        arrays = {name: getattr(self, name) for name in ("q", "k", "v", "mask", "sinks")}
        return replace(self, **{n: _float32(a) for n, a in arrays.items()})

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """The output, and the logarithm of each row's sum of exponentials, in float64."""
        B, H, Hkv, T, N, _ = self.shape()
        q, k, v = float64(self.q), *(float64(x).repeat(H // Hkv, 1) for x in (self.k, self.v))
        z = self.scale * q @ k.swapaxes(2, 3)
        if self.causal:
            z = np.where(np.tri(T, N, N - T, dtype=bool), z, -np.inf)
        elif self.mask is not None:
            mask = np.array(_float32(self.mask))
            z = np.where(mask, z, -np.inf) if mask.dtype == bool else z + mask
        if self.sinks is not None:
            sinks = np.broadcast_to(float64(self.sinks)[:, None, None], (B, H, T, 1))
            z = np.concatenate([z, sinks], 3)
            v = np.concatenate([v, np.zeros_like(v[:, :, :1])], 2)
        lse = np.logaddexp.reduce(z, 3)
        return np.exp(z - lse[..., None]) @ v, lse


@dataclass(frozen=True)
class Result:
    """What attention's kernels left, and the report of each."""

    out: mx.array
    reports: list[Report]
    lse: np.ndarray | None = None

    @property
    def report(self) -> Report:
        """Of the only or the first kernel."""
        return self.reports[0]


#: what tolerance() allows besides: the order of operations alone makes such relative errors
FLOOR = {mx.float32: 2e-7, mx.float16: 1e-4, mx.bfloat16: 1e-3}


def tolerance(problem: Problem) -> float:
    """Twice MLX's own error on the processor and a floor, but not above twice that of rounding."""
    truth, _ = problem.truth()
    dtype = problem.q.dtype
    rounding = error(mx.array(truth.astype(np.float32)).astype(dtype), truth)
    return min(2 * error(problem.mlx(), truth) + FLOOR[dtype], 2 * rounding + 1e-6)


def text_of(header: str) -> str:
    """The text of a header of MLX, read in place."""
    return (MLX_INCLUDE / header).read_text()


def steel_blocks(D: int) -> tuple[int, int]:
    """Queries and keys of a block: BQ, BK."""
    return 32, 32 if D < 128 else 16


def steel(
    problem: Problem,
    *,
    wn: int = 1,
    lse: bool = False,
    by_position: bool = False,
    seed: int = 0,
    source: str = STEEL,
    **claims: bool,
) -> Result:
    """steel_attention. `by_position`: all arrays lie in memory as (B, T, H, D), not (B, H, T, D).

    `source`: another text than the header's. `claims`: align_Q or align_K against the truth.
    """
    B, H, _, T, N, D = problem.shape()
    bq, bk = steel_blocks(D)
    q, mask, sinks = problem.q, problem.mask, problem.sinks
    out = Output(_stored(problem.empty(), by_position))
    sums = Output(np.empty((B, H, T), np.float32)) if lse else None
    constants = {
        200: claims.get("align_Q", T % bq == 0),
        201: claims.get("align_K", N % bk == 0),
        300: mask is not None,
        301: problem.causal,
        302: sinks is not None,
        303: lse,
    }
    type_, mask_type = (_TYPES[array.dtype] for array in (q, q if mask is None else mask))
    expression = f"attention<{type_}, {bq}, {bk}, {D}, {D}, {WM}, {wn}, {mask_type}>"
    library = Library(source, {"attention": expression}, constants)
    buffers = [
        *(_stored(array, by_position) for array in (q, problem.k, problem.v)),
        out,
        _steel_params(problem, by_position),
        None if mask is None else struct.pack(MASK_PARAMS, H * T * N, T * N, N),
        None if mask is None else _stored(mask),
        None if sinks is None else _stored(sinks),
        sums,
    ]
    report = library.launch("attention", buffers, (-(-T // bq), H, B), (32, WM, wn), seed)
    return Result(_loaded(out, q, by_position), [report], sums and sums.array)


def _steel_params(problem: Problem, by_position: bool) -> bytes:
    B, H, Hkv, T, N, D = problem.shape()
    bq, bk = steel_blocks(D)
    blocks = [-(-T // bq), -(-N // bk), T // bq, N // bk, T % bq, N % bk, N - T]
    arrays = problem.q, problem.k, problem.v, problem.empty()
    strides = [stride for array in arrays for stride in _strides(array, by_position)]
    return struct.pack(PARAMS, B, H, D, T, N, H // Hkv, problem.scale, *blocks, *strides)


def vector(
    problem: Problem, *, by_position: bool = False, seed: int = 0, source: str = VECTOR
) -> Result:
    """sdpa_vector: one threadgroup for each query, its simdgroups sharing the keys."""
    B, H, Hkv, T, N, D = problem.shape()
    out = Output(_stored(problem.empty()))
    mask, sinks = _vector_mask(problem)
    buffers = [
        *_vector_inputs(problem, by_position),
        out,
        _int(H // Hkv),
        _int(N),
        *_vector_strides(problem, by_position),
        struct.pack("f", problem.scale),
        *mask,
        sinks,
        None if sinks is None else _int(H),
    ]
    expression = f"sdpa_vector<{_TYPES[problem.q.dtype]}, {D}, {problem.v.shape[3]}>"
    library = Library(source, {"vector": expression}, _vector_constants(problem, by_position))
    report = library.launch("vector", buffers, (B * H, T, 1), (1024, 1, 1), seed)
    return Result(_loaded(out, problem.empty()), [report])


def vector_two_pass(
    problem: Problem,
    *,
    blocks: int = 32,
    tokens: int = 4,
    heads_together: int = 0,
    by_position: bool = False,
    seed: int = 0,
    source: str = VECTOR,
) -> Result:
    """sdpa_vector_2pass_1 and _2: `blocks` threadgroups share the keys.

    `tokens`: keys fetched at once (TK). `heads_together`: the first pass is that for single queries
    of eight heads to a key head, which takes so many of the heads at once (HPT).
    """
    B, H, Hkv, T, N, D = problem.shape()
    Dv = problem.v.shape[3]
    partial = Output(np.empty((B, H, T, blocks, Dv), _stored(problem.q).dtype))
    sums, maxs = (Output(np.empty((B, H, T, blocks), np.float32)) for _ in range(2))
    mask, sinks = _vector_mask(problem)
    scale = struct.pack("f", problem.scale)
    buffers = [*_vector_inputs(problem, by_position), partial, sums, maxs, None, _int(N)]
    buffers += [*_vector_strides(problem, by_position), scale]
    type_ = _TYPES[problem.q.dtype]
    first = f"sdpa_vector_2pass_1<{type_}, {D}, {Dv}, {tokens}>"
    if heads_together:
        first = f"sdpa_vector_2pass_1_gqa<{type_}, {D}, {Dv}, {H // Hkv}, {heads_together}>"
    else:
        buffers += [*mask, sinks]
    names = {"first": first, "second": f"sdpa_vector_2pass_2<{type_}, {Dv}>"}
    library = Library(source, names, _vector_constants(problem, by_position, blocks))
    reports = [library.launch("first", buffers, (Hkv, B, blocks), (32, H // Hkv, T), seed)]
    out = Output(_stored(problem.empty()))
    buffers = [partial.array, sums.array, maxs.array, out, _int(blocks)]
    reports.append(library.launch("second", buffers, (B * H, T, 1), (1024, 1, 1), seed))
    return Result(_loaded(out, problem.empty()), reports)


def _vector_constants(problem: Problem, by_position: bool, blocks: int = 0) -> dict[int, object]:
    mask = problem.mask
    boolean = mask is not None and mask.dtype == mx.bool_
    return {
        20: mask is not None,
        21: by_position,
        22: problem.causal,
        23: boolean,
        24: mask is not None and not boolean,
        25: problem.sinks is not None,
        26: blocks,
    }


def _vector_inputs(problem: Problem, by_position: bool) -> list[np.ndarray]:
    return [_stored(a, by_position) for a in (problem.q, problem.k, problem.v)]


def _vector_strides(problem: Problem, by_position: bool) -> list[bytes]:
    """Those of heads and of positions; one stride of heads serves all batches."""
    assert not by_position or problem.q.shape[0] == 1
    strides = [_strides(a, by_position)[1:] for a in (problem.k, problem.v)]
    return [struct.pack("Q", stride) for pair in strides for stride in pair]


def _vector_mask(problem: Problem) -> tuple[list, np.ndarray | None]:
    """The buffers of the mask and its strides, and that of the sinks."""
    sinks = None if problem.sinks is None else _stored(problem.sinks)
    if problem.mask is None:
        return [None] * 5, sinks
    _, _, T, N = problem.mask.shape
    both = [_stored(problem.mask), None]
    if problem.mask.dtype != mx.bool_:
        both.reverse()
    return [*both, _int(1), _int(N), _int(T * N)], sinks


def _int(value: int) -> bytes:
    return struct.pack("i", value)


def _float32(array: mx.array | None) -> mx.array | None:
    return array if array is None or array.dtype == mx.bool_ else array.astype(mx.float32)


def _stored(array: mx.array, by_position: bool = False) -> np.ndarray:
    """In memory; bfloat16 as its bits."""
    if by_position:
        array = mx.contiguous(array.swapaxes(1, 2))
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _loaded(output: Output, like: mx.array, by_position: bool = False) -> mx.array:
    array = mx.array(output.array)
    array = array.view(mx.bfloat16) if like.dtype == mx.bfloat16 else array
    shape = (like.shape[0], like.shape[2], like.shape[1], like.shape[3])
    return array.reshape(shape).swapaxes(1, 2) if by_position else array


def _strides(array: mx.array, by_position: bool) -> list[int]:
    """Of batch, head and position, in elements."""
    _, heads, length, D = array.shape
    whole = heads * length * D
    return [whole, D, heads * D] if by_position else [whole, length * D, D]
