// Selective attention of a chunk of queries over all keys, softmax(scale q k^T - F) v: a running softmax
// whose logits begin at -F. What selective/mask.metal wrote says both what is forgotten and what is not
// seen, so nothing else is asked of positions here, and all heads share it.
#include "../tile/memory.h"
#include "../tile/softmax.h"

// q (B, H, T, D), k and v (B, H / group, N, D), mask (B, rows, width) or more, out (B, H, rows, D), all row-contiguous;
// formed: what the kernel that wrote the mask gave, so that MLX runs that first; sizes {T, N, group, H,
// width, start, rows}: the chunk is the `rows` queries from `start` on, a multiple of BQ; scale {scale}.
// STAGED: queries wait in threadgroup memory. width: a multiple of BK. With PAIRS == 2 there is also room for each
// simdgroup's part of the mask, which it copies for itself as soon as it has read the part before.
// Grid: W, ceil(rows / BQ), B H / W threadgroups of BQ / R simdgroups: W heads at a time, so that their keys
// and values stay in the cache.
template <typename T, typename M, int D, int BQ, int BK, int R, int PAIRS, bool STAGED>
[[kernel]] void selective_attention(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const device M* mask [[buffer(3)]],
    const device M* formed [[buffer(4)]],
    const constant int* sizes [[buffer(5)]],
    const constant float* scale [[buffer(6)]],
    device T* out [[buffer(7)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int PITCH = Block<T, D>::PITCH, THREADS = BQ / R * 32;
  constexpr int BLOCK = BK * PITCH, STAGE = STAGED ? BQ * PITCH : 0;
  constexpr int MASK_PITCH = Block<M, BK>::PITCH, MASK = PAIRS == 2 ? BQ * MASK_PITCH : 0;
  static_assert(sizeof(M) == sizeof(T), "they share threadgroup memory");
  THREADGROUP_MEMORY(T, memory, STAGE + PAIRS * 2 * BLOCK + MASK);

  const ushort index = thread_index_in_threadgroup, in_simdgroup = thread_index_in_simdgroup;
  const int queries = sizes[0], keys = sizes[1], pitch = sizes[4], rows = sizes[6];
  const int head = threadgroup_position_in_grid.z * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  // The longest rows first, so that the short ones fill the gaps at the end.
  const int start = (threadgroups_per_grid.y - 1 - threadgroup_position_in_grid.y) * BQ;
  const int mine = start + simdgroup_index_in_threadgroup * R; // the simdgroup's first query
  const device T* query = q + (long(head) * queries + sizes[5] + start) * D;
  threadgroup M* const here = reinterpret_cast<threadgroup M*>(memory + STAGE + PAIRS * 2 * BLOCK) +
                              simdgroup_index_in_threadgroup * R * MASK_PITCH;
  const device M* forgotten = mask + (long(head / sizes[3]) * rows + mine) * pitch;
  const device T* key = k + long(head / sizes[2]) * keys * D;
  const device T* value = v + long(head / sizes[2]) * keys * D;

  Operand<T, R, STAGED ? 16 : D> held;
  Staged<T, R, D> staged;
  if constexpr (STAGED) {
    copy_block<BQ, D, THREADS>(memory, query, D, rows - start, index);
    staged.rows = memory + simdgroup_index_in_threadgroup * R * PITCH;
  } else {
    held.load(query + (mine - start) * D, D, rows - mine, in_simdgroup);
  }

  Tile<R, D> o;
  o.fill(0);
  Rows<R> largest(LEAST), total(0);
  const float scale_log2 = scale[0] * M_LOG2E_F;
  const int seen = metal::min(keys, keys - queries + sizes[5] + start + BQ);
  if constexpr (PAIRS == 2) {
    copy_block<BK, D, THREADS>(memory + STAGE, key, D, keys, index);
    copy_block<BK, D, THREADS>(memory + STAGE + BLOCK, value, D, keys, index);
    copy_block<R, BK, 32>(here, forgotten, pitch, rows - mine, in_simdgroup);
  }
  for (int first = 0; first < seen; first += BK) {
    const int coming = PAIRS == 2 ? first + BK : first; // what is copied in this round
    threadgroup T* ks = memory + STAGE + first / BK % PAIRS * 2 * BLOCK;
    threadgroup T* ks_coming = memory + STAGE + coming / BK % PAIRS * 2 * BLOCK;
    if constexpr (PAIRS == 2) {
      copy_wait();
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (coming < seen) {
      copy_block<BK, D, THREADS>(ks_coming, key + long(coming) * D, D, keys - coming, index);
    }
    if constexpr (PAIRS == 1) {
      copy_block<BK, D, THREADS>(ks_coming + BLOCK, value + long(coming) * D, D, keys - coming, index);
      copy_wait();
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }

    Tile<R, BK> s;
    if constexpr (PAIRS == 2) {
      load_block(s, here, in_simdgroup);
      metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);
    } else {
      load(s, forgotten + first, pitch, rows - mine, in_simdgroup);
    }
    if constexpr (STAGED) {
      multiply_transposed(s, staged, ks, in_simdgroup);
    } else {
      multiply_transposed(s, held, ks, in_simdgroup);
    }
    raise_largest(s, o, largest, total, scale_log2);
    // Apart from the keys' copy: many at once hold up the products behind them.
    if (PAIRS == 2 && coming < seen) {
      copy_block<BK, D, THREADS>(ks_coming + BLOCK, value + long(coming) * D, D, keys - coming, index);
      copy_block<R, BK, 32>(here, forgotten + coming, pitch, rows - mine, in_simdgroup);
    }
    add_weighted(s, o, largest, total, scale_log2, ks + BLOCK, in_simdgroup);
  }

  divide(o, total);
  store(o, out + (long(head) * rows + mine) * D, D, rows - mine, in_simdgroup);
}
