// One query of selective attention over a cache (arXiv 2410.02703): softmax(scale q k^T - F) v, F with what
// head 0 of this query adds, and the key to evict.
#include "../tile/query.h"
#include "candidate.h"
#include "share.h"

// Weights of one query and head, in base 2; as in tile/softmax.h, but a lane has one logit of the 32.
struct Weights {
  static constant constexpr const float LEAST = -1e30f, SLACK = 8;
  float largest, total; // relative to `largest`, the total of the lane's own

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
//   out (B, H, D); evicted (B): the slot of the key to evict, or of an empty one in a row that does not
//   after (B, N): F after the query
// SPLIT: instead of out and evicted, for selective/combine.metal,
//   sums (B, H, splits, D), totals (B, H, splits, 2): of weights, and the logit they are relative to
//   ranks (B, splits), slots (B, splits, 2): the candidate's F, and its position and slot
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, int D, int HEADS, int SIMDGROUPS, bool SPLIT>
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
    device T* out [[buffer(10)]],
    device int* evicted [[buffer(11)]],
    device float* after [[buffer(12)]],
    device float* sums [[buffer(13)]],
    device float* totals [[buffer(14)]],
    device float* ranks [[buffer(15)]],
    device int* slots [[buffer(16)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  // Of a simdgroup and head D sums, then of all of them `largest` and total, then the candidates.
  constexpr int PARTS = SIMDGROUPS * HEADS;
  THREADGROUP_MEMORY(float, memory, PARTS * (D + 2) + 3 * SIMDGROUPS);
  threadgroup float* const part_totals = memory + PARTS * D;
  threadgroup float* const best_ranks = part_totals + 2 * PARTS;
  threadgroup int* const best_slots = reinterpret_cast<threadgroup int*>(best_ranks + SIMDGROUPS);

  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup, keys = sizes[0], splits = sizes[3];
  const int split = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y * HEADS;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  const int key_head = head / (sizes[1] / sizes[2]);
  const int begin = split * sizes[4], end = metal::min(keys, begin + sizes[4]);
  const int own = rows[2 * b], evicts = rows[2 * b + 1];
  const RowsOf<T> key(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]);
  const RowsOf<T> value(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]);

  Query<D, HEADS> query;
  query.load(q + row * D, lane);
  const float scale_log2 = scale[0] * M_LOG2E_F;
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
      const float now = forgotten + (visible && !stays ? metal::max(z[0] * scale[0], 0.0f) : 0.0f);
      after[at] = now;
      best.take_better({evicts == 0 ? 0.0f : stays ? -1.0f : now, position, mine});
    }
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
      float factor;
      z[h] = weights[h].of(visible ? z[h] * scale_log2 - forgotten * M_LOG2E_F : -INFINITY, factor);
      query.rescale(h, factor);
    }
    query.add(z, value, first, end, lane);
  }

#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    const int at = h * SIMDGROUPS + simdgroup;
    query.gather(memory + at * D, h, lane);
    const float total = simd_total(weights[h].total);
    if (lane == 0) {
      part_totals[2 * at] = weights[h].largest;
      part_totals[2 * at + 1] = total;
    }
  }
  best = best_of_simdgroup(best);
  if (lane == 0) {
    best_ranks[simdgroup] = best.rank;
    best_slots[2 * simdgroup] = best.position;
    best_slots[2 * simdgroup + 1] = best.slot;
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (int i = thread_index_in_threadgroup; i < HEADS * D; i += SIMDGROUPS * 32) {
    const int h = i / D, d = i % D;
    const Share share = share_of(part_totals + 2 * h * SIMDGROUPS, SIMDGROUPS);
    float sum = 0;
    for (int part = 0; part < SIMDGROUPS; part++) {
      const int at = h * SIMDGROUPS + part;
      sum = metal::fma(memory[at * D + d], metal::fast::exp2(part_totals[2 * at] - share.largest), sum);
    }
    if constexpr (SPLIT) {
      const long at = (row + h) * splits + split;
      sums[at * D + d] = sum;
      if (d == 0) {
        totals[2 * at] = share.largest;
        totals[2 * at + 1] = share.total;
      }
    } else {
      out[(row + h) * D + d] = T(share.total == 0 ? 0.0f : sum / share.total);
    }
  }
  if (head == 0 && thread_index_in_threadgroup == 0) {
    for (int part = 0; part < SIMDGROUPS; part++) {
      best.take_better({best_ranks[part], best_slots[2 * part], best_slots[2 * part + 1]});
    }
    if constexpr (SPLIT) {
      ranks[b * splits + split] = best.rank;
      slots[2 * (b * splits + split)] = best.position;
      slots[2 * (b * splits + split) + 1] = best.slot;
    } else {
      evicted[b] = best.slot;
    }
  }
}
