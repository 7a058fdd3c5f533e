// One query of stick-breaking attention over a cache (Tan et al. 2024, arXiv 2410.17980), newest keys first.
// Each simdgroup goes through keys that follow one another and breaks a stick of its own; what older keys
// take is then shortened by what is left of the newer sticks. It stops when at most 2^-29 is left of its
// own: what is not read would have changed an output by at most 2^-29 times the largest |v|.
#include "../tile/query.h"
#include "sticks.h"

// Breaks the keys [begin, end) off, of which those before `visible` are not seen: their weighted values are
// added to the query's sums, and `left`, log2 of what is left for each head, takes them in.
// VECTORS: as both rows' in_vectors() says. AHEAD: values are asked for before keys are used.
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
  bool live = end > begin;
  for (int first = begin + (end - 1 - begin) / 32 * 32; live && first >= begin && first + 32 > visible; first -= 32) {
    Rows32<T, D> ks, vs;
    ks.template read<VECTORS>(key, first, end, lane);
    if constexpr (AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    }
    float z[HEADS];
    query.logits(z, ks, lane);
    const int mine = first + query.own(lane);
    live = false;
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
      z[h] = take_share(mine < end && mine >= visible ? z[h] * scale : -INFINITY, left[h], lane);
      live = live || !LogForm::used_up(left[h]);
    }
    live = metal::simd_any(live);
    if constexpr (!AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    }
    query.add(z, vs, lane);
  }
}

// q (B, H, D); k and v (B, Hkv, N, D), any strides; begins (B or more): each row's first key that is visible;
// sizes {N, H, Hkv, splits, keys of a split, end}: keys from `end` on are not seen; scale {scale}.
//   out (B, H, D), rounded to O, remainder (B, H)
// SPLIT: instead, for stick_breaking/combine.metal, remainder (B, H, splits, D + 1): D sums, and log2 of what the
// split leaves
// AHEAD: values are asked for before keys are used, which takes registers.
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, typename O, int D, int HEADS, int SIMDGROUPS, bool SPLIT, bool AHEAD>
[[kernel]] void stick_breaking_decode(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const constant int64_t* k_strides [[buffer(2)]],
    const device T* v [[buffer(3)]],
    const constant int64_t* v_strides [[buffer(4)]],
    const device int* begins [[buffer(5)]],
    const constant int* sizes [[buffer(6)]],
    const constant float* scale [[buffer(7)]],
    device O* out [[buffer(8)]],
    device float* remainder [[buffer(9)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  // Of each head and simdgroup D sums, and log2 of what it leaves.
  THREADGROUP_MEMORY(float, memory, SIMDGROUPS * HEADS * (D + 1));

  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = same_in_simdgroup(simdgroup_index_in_threadgroup), splits = sizes[3];
  const int split = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y * HEADS;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  const int key_head = head / (sizes[1] / sizes[2]);
  const int visible = same_in_simdgroup(metal::max(begins[b], 0));
  // A split's keys are cut into equal shares, the last simdgroup's the newest.
  const int share = sizes[4] / SIMDGROUPS;
  const int begin = split * sizes[4] + simdgroup * share, end = metal::min(sizes[5], begin + share);
  const RowsOf<T> key(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]);
  const RowsOf<T> value(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]);

  Query<D, HEADS> query;
  query.load(q + row * D, lane);
  const float scale_log2 = scale[0] * M_LOG2E_F;
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
  for (int i = thread_index_in_threadgroup; i < HEADS * D; i += SIMDGROUPS * 32) {
    const int h = i / D, d = i % D;
    float rest;
    const float sum = join_sticks<D>(memory + h * SIMDGROUPS * (D + 1), SIMDGROUPS, d, rest);
    device float* const part = remainder + (SPLIT ? ((row + h) * splits + split) * (D + 1) : row + h);
    if constexpr (SPLIT) {
      part[d] = sum;
    } else {
      out[(row + h) * D + d] = O(sum);
    }
    if (d == 0) {
      part[SPLIT ? D : 0] = SPLIT ? rest : metal::fast::exp2(rest);
    }
  }
}
