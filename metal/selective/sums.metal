// What each block of queries selects, summed for every key (head 0's logits; Leviathan, Kalman, Matias, arXiv
// 2410.02703): F at the start of a block is the sum of the blocks before it, so that all blocks can then be
// worked at side by side. A simdgroup holds R keys in registers and goes along the block's queries.
#include "../tile/memory.h"
#include "../tile/multiply.h"
#include "../tile/scan.h"

// q (B, H, T, D) and k (B, Hkv, N, D), row-contiguous, of which head 0 is read; query_positions (B, TP) and
// key_positions (B, P), negative for padding and beyond the last, TP and P whole blocks of ALIGN and BK;
// sizes {T, N, H, Hkv}; scale {scale}; sums (B, TP / ALIGN, P).
// Grid: ceil(P / KEYS), TP / ALIGN, B threadgroups of KEYS / R simdgroups.
template <typename T, int D, int KEYS, int R, int ALIGN, int BK>
[[kernel]] void selective_sums(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const device int* query_positions [[buffer(2)]],
    const device int* key_positions [[buffer(3)]],
    const constant int* sizes [[buffer(4)]],
    const constant float* scale [[buffer(5)]],
    device float* sums [[buffer(6)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int PITCH = Block<T, D>::PITCH, THREADS = KEYS / R * 32, C = ALIGN < 32 ? ALIGN : 32;
  THREADGROUP_MEMORY(T, memory, ALIGN * PITCH);

  const ushort in_simdgroup = thread_index_in_simdgroup;
  const Lane lane(in_simdgroup);
  const int queries = sizes[0], keys = sizes[1], pitch = (keys + BK - 1) / BK * BK;
  const int tall = threadgroups_per_grid.y * ALIGN;
  const long b = threadgroup_position_in_grid.z;
  const int start = threadgroup_position_in_grid.y * ALIGN; // the block's first query
  const int first = threadgroup_position_in_grid.x * KEYS;
  const int mine = first + simdgroup_index_in_threadgroup * R;
  const device int* own = query_positions + b * tall + start;

  Rows<R> total(0);
  // Queries stand behind all keys but their own.
  if (first < keys - queries + start + ALIGN) {
    copy_block<ALIGN, D, THREADS>(
        memory, q + (b * sizes[2] * queries + start) * D, D, queries - start, thread_index_in_threadgroup);
    Operand<T, R, D> held;
    held.load(k + (b * sizes[3] * keys + mine) * D, D, keys - mine, in_simdgroup);
    int key[Rows<R>::SIZE];
#pragma unroll
    for (short i = 0; i < total.SIZE; i++) {
      const int row = mine + total.row(i, lane);
      key[i] = row < keys ? key_positions[b * pitch + row] : -1;
    }
    copy_wait();
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    for (int c = 0; c < ALIGN; c += C) {
      Tile<R, C> s;
      product_transposed(s, held, memory + c * PITCH, in_simdgroup);
      int at[Cols<C>::SIZE]; // positions of the columns' queries
#pragma unroll
      for (short i = 0; i < Cols<C>::SIZE; i++) {
        at[i] = own[c + Cols<C>::col(i, lane)];
      }
#pragma unroll
      for (short e = 0; e < s.SIZE; e++) {
        const int position = key[s.row_index(e)];
        // The first token is never forgotten, and a token never makes anyone forget itself.
        const bool selects = (position > 0) & (position < at[s.col_index(e)]);
        total[s.row_index(e)] += selects ? metal::max(s[e], 0.0f) : 0.0f;
      }
    }
    combine_lanes<Sum>(total);
  }
#pragma unroll
  for (short i = 0; i < total.SIZE; i++) {
    const int row = mine + total.row(i, lane);
    if (lane.col == 0 && row < pitch) {
      sums[(b * threadgroups_per_grid.y + threadgroup_position_in_grid.y) * pitch + row] = total[i] * scale[0];
    }
  }
}
