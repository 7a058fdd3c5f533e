// One query of selective attention over a cache whose keys several threadgroups share: what each finds, for
// combine.metal.
#include "decode.h"

// q (B, H, D); k and v (B, Hkv, N, D), F and key_positions (B, N), any strides; query_positions (B, any), of each
// row the query's position; evicts (B or more), whether a row evicts; sizes {N, H, Hkv, keys of a split, splits,
// candidates' place}; scale {scale}.
//   after (B, N): F after the query
//   parts (B, H, splits, D + 2): D sums, the logit in base 2 that they are relative to, and the weights' total; and
//   from the candidates' place on (B, splits, 3): the candidate's F, position and slot
// AHEAD: values are asked for before keys are used, which takes registers.
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, int D, int HEADS, int SIMDGROUPS, bool AHEAD>
[[kernel]] void selective_decode_split(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const constant int64_t* k_strides [[buffer(2)]],
    const device T* v [[buffer(3)]],
    const constant int64_t* v_strides [[buffer(4)]],
    const device float* F [[buffer(5)]],
    const constant int64_t* F_strides [[buffer(6)]],
    const device int* key_positions [[buffer(7)]],
    const constant int64_t* key_positions_strides [[buffer(8)]],
    const device int* query_positions [[buffer(9)]],
    const constant int64_t* query_positions_strides [[buffer(10)]],
    const device int* evicts [[buffer(11)]],
    const constant int* sizes [[buffer(12)]],
    const constant float* scale [[buffer(13)]],
    device float* after [[buffer(14)]],
    device float* parts [[buffer(15)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  using Memory = Found<D, HEADS, SIMDGROUPS>;
  THREADGROUP_MEMORY(float, memory, Memory::SIZE);
  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = same_in_simdgroup(simdgroup_index_in_threadgroup);
  const int head = threadgroup_position_in_grid.y * HEADS, split = threadgroup_position_in_grid.x;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  read_cache<D, HEADS, SIMDGROUPS, AHEAD>(
      memory,
      q,
      k,
      k_strides,
      v,
      v_strides,
      F,
      F_strides,
      key_positions,
      key_positions_strides,
      query_positions[b * query_positions_strides[0]],
      evicts[b] != 0,
      sizes,
      scale[0],
      after,
      b,
      head,
      split * sizes[3],
      simdgroup,
      lane);

  for (int i = thread_index_in_threadgroup; i < HEADS * D; i += SIMDGROUPS * 32) {
    const int h = i / D, d = i % D;
    const Share share = share_of<D>(Memory::parts(memory, h), SIMDGROUPS);
    device float* const part = parts + ((row + h) * sizes[4] + split) * Memory::PART;
    part[d] = sum_of<D>(Memory::parts(memory, h), SIMDGROUPS, d, share);
    if (d == 0) {
      part[D] = share.largest;
      part[D + 1] = share.total;
    }
  }
  if (head == 0 && simdgroup == 0) {
    const Candidate best = Memory::best(memory, lane);
    if (lane == 0) {
      write_candidate(parts + sizes[5] + 3 * (b * sizes[4] + split), best);
    }
  }
}
