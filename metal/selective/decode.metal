// One query of selective attention over a cache (arXiv 2410.02703): softmax(scale q k^T - F) v, F with what
// head 0 of this query adds, and the key to evict.
#include "../tile/query.h"
#include "candidate.h"

// Weights of one query and head, in base 2; as in tile/softmax.h, but a lane has one logit of the 32.
struct Weights {
  static constant constexpr const float LEAST = -1e30f, SLACK = 8;
  float largest, total; // the total of the lane's own

  // From the lane's logit to its weight; `factor` brings what was summed before to the new scale.
  METAL_FUNC float of(float z, thread float& factor) {
    const float most = simd_largest(z);
    factor = 1;
    if (most > largest + SLACK) {
      factor = metal::fast::exp2(largest - most);
      largest = most;
    }
    const float weight = metal::fast::exp2(z - largest);
    total = total * factor + weight;
    return weight;
  }
};

// q (B, H, D); k and v (B, Hkv, N, D), any strides; F and key_positions (B, N); rows (B or more, 2): the
// query's position, and whether this row evicts; sizes {N, H, Hkv, splits, keys of a split}; scale {scale}.
//   sums (B, H, splits, D), totals (B, H, splits, 2): of each split, relative to its largest logit, and that
//   ranks (B, splits), slots (B, splits, 2): the candidate's F, position and slot
//   after (B, N): F after the query
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, int D, int HEADS, int SIMDGROUPS>
[[kernel]] void selective_decode(
    const device T* q [[buffer(0)]],
    const device T* k [[buffer(1)]],
    const constant int64_t* k_strides [[buffer(2)]],
    const device T* v [[buffer(3)]],
    const constant int64_t* v_strides [[buffer(4)]],
    const device float* F [[buffer(5)]],
    const device int* key_positions [[buffer(6)]],
    const device int* rows [[buffer(7)]],
    const constant int* sizes [[buffer(8)]],
    const constant float* scale [[buffer(9)]],
    device float* sums [[buffer(10)]],
    device float* totals [[buffer(11)]],
    device float* ranks [[buffer(12)]],
    device int* slots [[buffer(13)]],
    device float* after [[buffer(14)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int PARTIAL = D + 2; // of a simdgroup and head: sums, largest, total
  THREADGROUP_MEMORY(float, memory, SIMDGROUPS * (HEADS * PARTIAL + 3));
  threadgroup float* const best_ranks = memory + SIMDGROUPS * HEADS * PARTIAL;
  threadgroup int* const best_slots = reinterpret_cast<threadgroup int*>(best_ranks + SIMDGROUPS);

  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup, keys = sizes[0], splits = sizes[3];
  const int split = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y * HEADS;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  const int key_head = head / (sizes[1] / sizes[2]);
  const int begin = split * sizes[4], end = metal::min(keys, begin + sizes[4]);
  const int own = rows[2 * b], evicts = rows[2 * b + 1];
  const RowsOf<T> key = {k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]};
  const RowsOf<T> value = {v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]};

  Query<D, HEADS> query;
  query.load(q + row * D, scale[0] * M_LOG2E_F, lane);
  Weights weights[HEADS];
#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    weights[h] = {Weights::LEAST, 0};
  }
  Candidate best = no_candidate();
  for (int first = begin + simdgroup * 32; first < end; first += SIMDGROUPS * 32) {
    float z[HEADS];
    query.logits(z, key, first, end, lane);
    const int mine = first + query.own(lane);
    const long at = b * keys + metal::min(mine, end - 1);
    const int position = key_positions[at];
    const float forgotten = F[at];
    const bool visible = mine < end && position >= 0 && position <= own;
    if (head == 0 && mine < end) {
      // The first token is never forgotten, and a token never makes anyone forget itself.
      const bool stays = position <= 0 || position == own;
      const float now = forgotten + (visible && !stays ? metal::max(z[0] * M_LN2_F, 0.0f) : 0.0f);
      after[at] = now;
      best.take_better({evicts == 0 ? 0.0f : stays ? -1.0f : now, position, mine});
    }
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
      float factor;
      z[h] = weights[h].of(visible ? z[h] - forgotten * M_LOG2E_F : -INFINITY, factor);
      query.rescale(h, factor);
    }
    query.add(z, value, first, end, lane);
  }

#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    threadgroup float* const partial = memory + (simdgroup * HEADS + h) * PARTIAL;
    query.gather(partial, h, lane);
    partial[D] = weights[h].largest;
    partial[D + 1] = simd_total(weights[h].total);
  }
  best = best_of_simdgroup(best);
  best_ranks[simdgroup] = best.rank;
  best_slots[2 * simdgroup] = best.position;
  best_slots[2 * simdgroup + 1] = best.slot;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
