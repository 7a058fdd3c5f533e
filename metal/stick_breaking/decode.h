// One query over keys of a cache, as stick_breaking/decode.metal and decode_split.metal read them, newest keys first (Tan
// et al. 2024, arXiv 2410.17980). Each simdgroup goes through keys that follow one another and breaks a stick of
// its own; what older keys take is then shortened by what is left of the newer sticks. It stops when at most
// 2^-29 is left of its own: what is not read would have changed an output by at most 2^-29 times the largest |v|.
#pragma once
#include "../tile/query.h"
#include "sticks.h"

// Breaks the keys [begin, end) off, of which those before `visible` are not seen: their weighted values are
// added to the query's sums, and `left`, log2 of what is left for each head, takes them in.
// VECTORS: as both rows' in_vectors() says. AHEAD: values are asked for before keys are used, the next keys before values are.
template <bool VECTORS, bool AHEAD, typename T, int D, int HEADS>
METAL_FUNC void break_off(
    thread Query<D, HEADS>& query,
    thread float* left,
    RowsOf<T> key,
    RowsOf<T> value,
    int begin,
    int end,
    int visible,
    float scale,
    ushort lane) {
  Rows32<T, D> ks, vs;
  int first = begin + (end - 1 - begin) / 32 * 32;
  const int oldest = metal::max(begin, visible - 31);
  bool live = end > begin;
  if (AHEAD && live && first >= oldest) {
    ks.template read<VECTORS>(key, first, end, lane);
  }
#pragma unroll 1
  for (; live && first >= oldest; first -= 32) {
    if constexpr (AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    } else {
      ks.template read<VECTORS>(key, first, end, lane);
    }
    float z[HEADS];
    query.logits(z, ks, lane);
    if (AHEAD && first - 32 >= oldest) {
      ks.template read<VECTORS>(key, first - 32, end, lane);
    }
    const int mine = first + query.own(lane);
    live = false;
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
      z[h] = take_share(mine < end && mine >= visible ? z[h] * scale : -INFINITY, left[h], lane);
      live = live || !used_up(left[h]);
    }
    live = metal::simd_any(live);
    if constexpr (!AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    }
    query.add(z, vs, lane);
  }
}

// Reads the keys [begin, begin + a split's) of row b of the batch for the heads from `head` on, which share a head of
// keys. In `memory`, for all threads, of each head and simdgroup, the last one's keys the newest: D sums, and log2
// of what it leaves. HEADS, SIMDGROUPS, AHEAD, arrays and their strides as the kernels have.
template <int D, int HEADS, int SIMDGROUPS, bool AHEAD, typename T, typename S>
METAL_FUNC void read_cache(
    threadgroup float* memory,
    const device T* q,
    const device T* k,
    const S k_strides,
    const device T* v,
    const S v_strides,
    int visible,
    const constant int* sizes,
    float scale,
    long b,
    int head,
    int begin,
    int simdgroup,
    ushort lane) {
  const int key_head = head / (sizes[1] / sizes[2]), share = sizes[4] / SIMDGROUPS;
  const RowsOf<T> key(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]);
  const RowsOf<T> value(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]);
  begin += simdgroup * share;
  const int end = metal::min(sizes[3], begin + share);

  Query<D, HEADS> query;
  query.load(q + (b * sizes[1] + head) * D, lane);
  const float scale_log2 = scale * M_LOG2E_F;
  float left[HEADS]; // log2 of it
#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    left[h] = 0;
  }
  if (same_in_simdgroup(key.in_vectors() && value.in_vectors())) {
    break_off<true, AHEAD>(query, left, key, value, begin, end, visible, scale_log2, lane);
  } else {
    break_off<false, false>(query, left, key, value, begin, end, visible, scale_log2, lane);
  }

#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    threadgroup float* const part = memory + (h * SIMDGROUPS + simdgroup) * (D + 1);
    query.gather(part, h, lane);
    if (lane == 0) {
      part[D] = left[h];
    }
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
