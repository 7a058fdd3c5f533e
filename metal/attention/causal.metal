// Plain causal attention, softmax(scale q k^T) v, to prove the tile vocabulary and to be measured
// beside mx.fast.scaled_dot_product_attention. One threadgroup takes BQ queries of one head, each of
// its simdgroups R of them, and goes through the keys in blocks of BK with a running softmax.
// PAIRS blocks of keys and values have room in threadgroup memory: with 2 the next is on its way while
// one is multiplied.
#include "../tile/memory.h"
#include "../tile/softmax.h"

// Keys later than the query weigh nothing. `ahead` is the position of the tile's first query minus that of
// its first key.
template <int R, int C>
METAL_FUNC void mask_causal(thread Tile<R, C>& s, int ahead, Lane lane) {
#pragma unroll
  for (short e = 0; e < s.SIZE; e++) {
    if (s.col(e, lane) > s.row(e, lane) + ahead) {
      s[e] = -INFINITY;
    }
  }
}

// q (B, H, T, D), k and v (B, H / group, N, D), out (B, H, T, D), all row-contiguous; sizes {T, N, group};
// scale {scale}. The queries are the last T of N positions. STAGED: queries wait in threadgroup memory.
// Grid: W, ceil(T / BQ), B H / W threadgroups of BQ / R simdgroups: W heads at a time, so that their keys
// and values stay in the cache.
template <typename T, int D, int BQ, int BK, int R, int PAIRS, bool STAGED>
[[kernel]] void causal_attention(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const constant int* sizes [[buffer(3)]],
    const constant float* scale [[buffer(4)]],
    device T* out [[buffer(5)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  static_assert(BQ % R == 0 && (PAIRS == 1 || PAIRS == 2), "whole simdgroups, one or two pairs");
  constexpr int PITCH = Block<T, D>::PITCH, THREADS = BQ / R * 32;
  constexpr int BLOCK = BK * PITCH, STAGE = STAGED ? BQ * PITCH : 0;
  THREADGROUP_MEMORY(T, memory, STAGE + PAIRS * 2 * BLOCK);

  const ushort index = thread_index_in_threadgroup, in_simdgroup = thread_index_in_simdgroup;
  const Lane lane(in_simdgroup);
  const int queries = sizes[0], keys = sizes[1];
  const int head = threadgroup_position_in_grid.z * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  // The longest rows first, so that the short ones fill the gaps at the end.
  const int start = (threadgroups_per_grid.y - 1 - threadgroup_position_in_grid.y) * BQ;
  const int mine = start + simdgroup_index_in_threadgroup * R; // the simdgroup's first query
  const int offset = keys - queries;
  const device T* query = q + (long(head) * queries + start) * D;
  const device T* key = k + long(head / sizes[2]) * keys * D;
  const device T* value = v + long(head / sizes[2]) * keys * D;

  Operand<T, R, STAGED ? 16 : D> held;
  Staged<T, R, D> staged;
  if constexpr (STAGED) {
    copy_block<BQ, D, THREADS>(memory, query, D, queries - start, index);
    staged.rows = memory + simdgroup_index_in_threadgroup * R * PITCH;
  } else {
    held.load(query + (mine - start) * D, D, queries - mine, in_simdgroup);
  }

  Tile<R, D> o;
  o.fill(0);
  Rows<R> largest(LEAST), total(0);
  const float scale_log2 = scale[0] * M_LOG2E_F;
  const int seen = metal::min(keys, start + BQ + offset);
  if constexpr (PAIRS == 2) {
    copy_block<BK, D, THREADS>(memory + STAGE, key, D, keys, index);
    copy_block<BK, D, THREADS>(memory + STAGE + BLOCK, value, D, keys, index);
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
    s.fill(0);
    if constexpr (STAGED) {
      multiply_transposed(s, staged, ks, in_simdgroup);
    } else {
      multiply_transposed(s, held, ks, in_simdgroup);
    }
    if (first + BK > mine + offset + 1) {
      mask_causal(s, mine + offset - first, lane);
    }
    raise_largest(s, o, largest, total, scale_log2);
    // Apart from the keys' copy: many at once hold up the products behind them.
    if (PAIRS == 2 && coming < seen) {
      copy_block<BK, D, THREADS>(ks_coming + BLOCK, value + long(coming) * D, D, keys - coming, index);
    }
    add_weighted(s, o, largest, total, scale_log2, ks + BLOCK, in_simdgroup);
  }

  divide(o, total);
  store(o, out + (long(head) * queries + mine) * D, D, queries - mine, in_simdgroup);
}
