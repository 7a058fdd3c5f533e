// One query of stick-breaking attention over a cache whose keys several threadgroups share: what each breaks off, for
// combine.metal.
#include "decode.h"

// q (B, H, D); k and v (B, Hkv, N, D), any strides; begins (B or more): each row's first key that is visible;
// sizes {N, H, Hkv, end, keys of a split, splits}: keys from `end` on are not seen; scale {scale}.
//   parts (B, H, splits, D + 1): D sums, and log2 of what the split leaves
// AHEAD: values are asked for before keys are used, which takes registers.
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, int D, int HEADS, int SIMDGROUPS, bool AHEAD>
[[kernel]] void stick_breaking_decode_split(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const constant int64_t* k_strides [[buffer(2)]],
    const device T* v [[buffer(3)]],
    const constant int64_t* v_strides [[buffer(4)]],
    const device int* begins [[buffer(5)]],
    const constant int* sizes [[buffer(6)]],
    const constant float* scale [[buffer(7)]],
    device float* parts [[buffer(8)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  THREADGROUP_MEMORY(float, memory, SIMDGROUPS * HEADS * (D + 1));
  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = same_in_simdgroup(simdgroup_index_in_threadgroup);
  const int head = threadgroup_position_in_grid.y * HEADS, split = threadgroup_position_in_grid.x;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  const int visible = same_in_simdgroup(metal::max(begins[b], 0));
  read_cache<D, HEADS, SIMDGROUPS, AHEAD>(
      memory,
      q,
      k,
      k_strides,
      v,
      v_strides,
      visible,
      sizes,
      scale[0],
      b,
      head,
      split * sizes[4],
      simdgroup,
      lane);

  for (int i = thread_index_in_threadgroup; i < HEADS * D; i += SIMDGROUPS * 32) {
    const int h = i / D, d = i % D;
    device float* const part = parts + ((row + h) * sizes[5] + split) * (D + 1);
    float left;
    part[d] = join_sticks<D>(memory + h * SIMDGROUPS * (D + 1), SIMDGROUPS, d, left);
    if (d == 0) {
      part[D] = left;
    }
  }
}
