// Selective attention's F for a chunk of queries (Leviathan, Kalman, Matias, arXiv 2410.02703): head 0's
// logits, summed over earlier queries, as the additive mask of all heads. Each block of queries begins where
// the blocks before it end (selective/sums.metal); a simdgroup takes 16 keys and goes down the
// block's queries, R at a time, with its running sums in registers.
#include "../tile/memory.h"
#include "../tile/multiply.h"
#include "../tile/reduce.h"
#include "../tile/scan.h"

// q (B, H, T, D) and k (B, Hkv, N, D), row-contiguous, of which head 0 is read; query_positions (B, TP) and
// key_positions (B, P), negative for padding and beyond the last, TP and P whole blocks of ALIGN and BK;
// before (B, P), F of earlier queries; sums (B, TP / ALIGN, P), what each block adds, or, if SUMMED, all up to it; sizes
// {T, N, H, Hkv, start, rows, width}: the chunk is the `rows` queries from `start` on, a multiple of
// ALIGN, which see nothing from key `width` on, a multiple of BK; numbers {scale, tau}.
//   mask (B, rows, width) or more  -F / scale as query i sees key j, -inf where it does not see it. Not written
//                           where it is not read.
//   remaining (B, rows, width / 16)  sum over 16 keys of 1 - min(F, tau) / tau where the query sees them
// AGAIN: the mask goes into `room`, an earlier chunk's mask, which is not needed once `read`, that chunk's
// output, is there. The caller makes sure that nobody else looks at it.
// Grid: ceil(width / KEYS), ceil(rows / ALIGN), B threadgroups of KEYS / 16 simdgroups. ALIGN, BK: the
// blocks of queries, a multiple of R, and of keys in which the mask is read.
template <typename T, typename M, int D, int KEYS, int R, int ALIGN, int BK, bool SUMMED, bool REMAINING, bool AGAIN>
[[kernel]] void selective_mask(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device int* query_positions [[buffer(2)]],
    const device int* key_positions [[buffer(3)]],
    const device float* before [[buffer(4)]],
    const device float* sums [[buffer(5)]],
    const device M* room [[buffer(6)]],
    const device T* read [[buffer(7)]],
    const constant int* sizes [[buffer(8)]],
    const constant float* numbers [[buffer(9)]],
    device M* mask [[buffer(10)]],
    device float* remaining [[buffer(11)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int PITCH = Block<T, D>::PITCH, THREADS = KEYS * 2, C = 16;
  THREADGROUP_MEMORY(T, memory, (KEYS + R) * PITCH);
  threadgroup T* const ks = memory + R * PITCH;

  const ushort index = thread_index_in_threadgroup, in_simdgroup = thread_index_in_simdgroup;
  const Lane lane(in_simdgroup);
  const int queries = sizes[0], keys = sizes[1], rows = sizes[5], width = sizes[6];
  const int blocks = (queries + ALIGN - 1) / ALIGN, pitch = (keys + BK - 1) / BK * BK;
  const float scale = numbers[0], inverse_scale = 1 / scale, inverse_tau = 1 / numbers[1];
  const long b = threadgroup_position_in_grid.z;
  const int from = threadgroup_position_in_grid.y * ALIGN, to = metal::min(rows, from + ALIGN);
  const int first = threadgroup_position_in_grid.x * KEYS; // the threadgroup's first key
  const int mine = first + simdgroup_index_in_threadgroup * C;
  const bool inside = mine < width;
  // Queries stand behind all keys but their own: no block of keys begins behind them and is read.
  if (first / BK * BK >= keys - queries + sizes[4] + to) {
    return;
  }
  const device T* query = q + (b * sizes[2] * queries + sizes[4]) * D;
  const device int* own = query_positions + b * blocks * ALIGN + sizes[4];
  const int earlier = (sizes[4] + from) / ALIGN; // blocks of queries
  device M* const out = AGAIN ? (device M*)(room) : mask;

  Cols<C> F;
  int key[Cols<C>::SIZE];
#pragma unroll
  for (short i = 0; i < F.SIZE; i++) {
    const int at = mine + F.col(i, lane);
    F[i] = inside ? before[b * pitch + at] : 0.0f;
    key[i] = inside ? key_positions[b * pitch + at] : -1;
  }
  for (int block = SUMMED ? metal::max(earlier - 1, 0) : 0; block < earlier; block++) {
#pragma unroll
    for (short i = 0; i < F.SIZE; i++) {
      F[i] += inside ? sums[(b * blocks + block) * pitch + mine + F.col(i, lane)] : 0.0f;
    }
  }
  copy_block<KEYS, D, THREADS>(ks, k + (b * sizes[3] * keys + first) * D, D, keys - first, index);

  for (int top = from; top < to; top += R) {
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy_block<R, D, THREADS>(memory, query + long(top) * D, D, rows - top, index);
    copy_wait();
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (!inside) {
      continue;
    }
    Tile<R, C> s;
    Staged<T, R, D> staged;
    staged.rows = memory;
    product_transposed(s, staged, ks + (mine - first) * PITCH, in_simdgroup);

    Rows<R> needed(0);
    int at[Rows<R>::SIZE]; // positions of the rows' queries
#pragma unroll
    for (short i = 0; i < needed.SIZE; i++) {
      at[i] = own[top + needed.row(i, lane)];
    }
#pragma unroll
    for (short e = 0; e < s.SIZE; e++) {
      const int position = key[s.col_index(e)];
      // The first token is never forgotten, and a token never makes anyone forget itself.
      const bool selects = (position > 0) & (position < at[s.row_index(e)]);
      s[e] = selects ? metal::max(s[e] * scale, 0.0f) : 0.0f;
    }
    scan_columns<false>(s, F, in_simdgroup);
#pragma unroll
    for (short e = 0; e < s.SIZE; e++) {
      const int position = key[s.col_index(e)];
      const bool visible = (position >= 0) & (position <= at[s.row_index(e)]);
      needed[s.row_index(e)] += visible ? 1 - metal::min(s[e] * inverse_tau, 1.0f) : 0.0f;
      s[e] = visible ? -s[e] * inverse_scale : -INFINITY;
    }
    store(s, out + (b * rows + top) * width + mine, width, rows - top, in_simdgroup);
    if constexpr (REMAINING) {
      combine_lanes<Sum>(needed);
#pragma unroll
      for (short i = 0; i < needed.SIZE; i++) {
        const int row = top + needed.row(i, lane);
        if (lane.col == 0 && row < rows) {
          remaining[(b * rows + row) * (width / C) + mine / C] = needed[i];
        }
      }
    }
  }
}
