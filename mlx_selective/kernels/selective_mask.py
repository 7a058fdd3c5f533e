"""F of selective attention over many queries, as the additive mask of all heads."""

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .blocks import whole
from .kernel import Kernel, Launch
from .signature import constants
from .threadgroup_memory import block_bytes

SUMS = Kernel("selective/sums.metal")
MASK = Kernel("selective/mask.metal", overwrites=("room",))
#: tau of the memory loss: F from which on a key counts as forgotten
TAU = 1.0
#: blocks of queries up to which the mask's kernel adds up those before each one by itself
FEW_BLOCKS = 32


class MaskBlocks(NamedTuple):
    """Sizes of the kernels that form the mask.

    A threadgroup of the mask's takes ``keys`` keys and ``rows`` queries at a time; one of the
    sums' ``sum_keys`` keys, ``sum_rows`` for each simdgroup.
    """

    keys: int
    rows: int
    sum_keys: int
    sum_rows: int


#: by backend and bytes of an element
BLOCKS = {
    ("metal", 2): MaskBlocks(64, 16, 32, 8),
    ("metal", 4): MaskBlocks(32, 16, 32, 8),
    ("cuda", 2): MaskBlocks(64, 32, 128, 32),
    ("cuda", 4): MaskBlocks(64, 32, 64, 16),
}


class Masks:
    """The masks of a prompt's chunks, formed one after the other.

    First every block of queries sums up what it selects; F at the start of each block follows,
    and blocks are then independent. Two chunks' masks are held at a time: MLX frees nothing
    before the GPU has done all that is queued, so the third chunk's goes where the first one's
    was, which the kernel overwrites. No one else ever holds these arrays.

    Args:
        q: (B, H, T, D), row-contiguous, as k; head 0 selects.
        k: (B, Hkv, N, D).
        F: (B, P) float32, what earlier queries left on the keys; P is N in whole blocks.
        query_positions: (B, TP) int32; TP is T in whole blocks of ``align`` queries.
        key_positions: (B, P) int32.
        scale: multiplies the logits.
        backend: that the kernels run on.
        dtype: of the masks, of as many bytes as q's.
        align: queries of a block in which the mask is read.
        keys: of a block in which the mask is read.
        remaining: whether to sum up 1 - min(F, 1) over the keys that a query sees.
        room: elements of the largest mask.
    """

    def __init__(
        self,
        q: mx.array,
        k: mx.array,
        F: mx.array,
        query_positions: mx.array,
        key_positions: mx.array,
        *,
        scale: float,
        backend: str,
        dtype: mx.Dtype,
        align: int,
        keys: int,
        remaining: bool,
        room: int,
    ):
        self._inputs = [q, k, query_positions, key_positions, F]
        self._shape = (q.dtype, q.shape, k.shape[1:3], backend, align, keys, scale)
        self._settings = (dtype, remaining, room)
        (sums,) = _prepare_sums(SUMS, *self._shape)(*self._inputs[:4])
        self._summed = sums.shape[1] > FEW_BLOCKS
        self._sums = mx.cumsum(sums, axis=1) if self._summed else sums
        self._rooms: list[mx.array] = []
        self._outputs: list[mx.array] = []

    def after(self) -> mx.array:
        """F after all queries, (B, P) float32."""
        added = self._sums[:, -1] if self._summed else self._sums.sum(axis=1)
        return self._inputs[4] + added

    def form(self, start: int, rows: int, width: int) -> tuple[mx.array, mx.array, mx.array]:
        """The next chunk's mask, of the ``rows`` queries from ``start`` on.

        Args:
            start: a multiple of ``align``.
            rows: of the chunk.
            width: keys that they see, in whole blocks.

        Returns:
            The mask (B, rows, width), -F / scale, and -inf where a query does not see a key, as the
            first elements of an array; an array that is there once the mask is; and, with
            ``remaining``, sums (B, rows, width / 16) over 16 keys.
        """
        number = len(self._rooms)
        again = number >= 2
        room, read = (
            (self._rooms[number - 2], self._outputs[number - 2])
            if again
            else (_nothing(self._settings[0]), self._inputs[0])
        )
        part = start, rows, width, self._summed, again
        launch = _prepare_mask(MASK, part, *self._settings, *self._shape)
        mask, remaining = launch(*self._inputs, self._sums, room, read)
        self._rooms.append(room if again else mask)
        return self._rooms[-1], mask, remaining

    def used_for(self, output: mx.array) -> None:
        """Says which array is there once the last chunk's mask is not needed any more.

        Args:
            output: the chunk's (B, H, rows, D).
        """
        self._outputs.append(output)


@lru_cache(maxsize=64)
def _prepare_sums(kernel, q_dtype, shape, keys_shape, backend, align, block, scale) -> Launch:
    (B, H, T, D), (Hkv, N) = shape, keys_shape
    P, blocks, sizes = whole(N, block), -(-T // align), BLOCKS[backend, q_dtype.size]
    threads = sizes.sum_keys // sizes.sum_rows * 32
    return kernel.prepare(
        template={
            "T": q_dtype,
            "D": D,
            "KEYS": sizes.sum_keys,
            "R": sizes.sum_rows,
            "ALIGN": align,
            "BK": block,
        },
        grid=(-(-P // sizes.sum_keys) * threads, blocks, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, blocks, P)],
        output_dtypes=[mx.float32],
        shared_memory=block_bytes(align, D, q_dtype),
        numbers=[constants([T, N, H, Hkv], mx.int32), constants([scale], mx.float32)],
    )


@lru_cache(maxsize=512)
def _prepare_mask(
    kernel, part, dtype, remaining, room, q_dtype, shape, keys_shape, backend, align, block, scale
) -> Launch:
    (B, H, T, D), (Hkv, N), (start, rows, width, summed, again) = shape, keys_shape, part
    sizes = BLOCKS[backend, q_dtype.size]
    numbers = T, N, H, Hkv, start, rows, width
    return kernel.prepare(
        template={
            "T": q_dtype,
            "M": dtype,
            "D": D,
            "KEYS": sizes.keys,
            "R": sizes.rows,
            "ALIGN": align,
            "BK": block,
            "SUMMED": summed,
            "REMAINING": remaining,
            "AGAIN": again,
        },
        grid=(-(-width // sizes.keys) * 2 * sizes.keys, -(-rows // align), B),
        threadgroup=(2 * sizes.keys, 1, 1),
        output_shapes=[(8,) if again else (room,), (B, rows, width // 16) if remaining else (1,)],
        output_dtypes=[dtype, mx.float32],
        shared_memory=block_bytes(sizes.keys + sizes.rows, D, q_dtype),
        numbers=[constants(numbers, mx.int32), constants([scale, TAU], mx.float32)],
    )


@lru_cache(maxsize=4)
def _nothing(dtype: mx.Dtype) -> mx.array:
    """Stands for a room that is not used."""
    # no lazy array: it would belong to the thread that asked first
    return mx.array([0] * 8, dtype)
