// One query over keys of a cache, as selective/decode.metal and decode_split.metal read them: softmax(scale q k^T - F) v,
// F with what head 0 of this query adds, and the key to evict (arXiv 2410.02703).
#pragma once
#include "../tile/lanes.h"
#include "../tile/query.h"
#include "candidate.h"
#include "share.h"

// Weights of one query and head, in base 2; as in tile/softmax.h, but a lane has one logit of the 32.
struct Weights {
  static constant constexpr const float LEAST = -1e30f, SLACK = 8;
  float largest, total; // relative to `largest`, the total of the lane's own

  // From the lane's logit to its weight; `factor` brings what was summed before to the new scale.
  METAL_FUNC float of(float z, thread float& factor) {
    factor = 1;
    if (metal::simd_any(z > largest + SLACK)) {
      const float most = metal::max(over_simdgroup<Max>(z), largest);
      factor = metal::fast::exp2(largest - most);
      largest = most;
    }
    const float weight = metal::fast::exp2(z - largest);
    total = total * factor + weight;
    return weight;
  }
};

// What the cache says of one row's keys, and where F after the query goes; `selects`: for the heads with head 0.
struct Kept {
  const device float* F;
  const device int* positions;
  device float* after;
  int F_step, positions_step, own;
  bool evicts, selects;
};

// Takes the keys [begin, end) in steps: their weighted values are added to the query's sums, their weights to
// `weights`; head 0 writes their new F and offers them for eviction.
// VECTORS: as both rows' in_vectors() says. AHEAD: values are asked for before keys are used, the next keys before values are.
template <bool VECTORS, bool AHEAD, typename T, int D, int HEADS>
METAL_FUNC void attend(
    thread Query<D, HEADS>& query,
    thread Weights* weights,
    thread Candidate& best,
    RowsOf<T> key,
    RowsOf<T> value,
    Kept kept,
    int begin,
    int end,
    int step,
    float scale,
    ushort lane) {
  Rows32<T, D> ks, vs;
  if (AHEAD && begin < end) {
    ks.template read<VECTORS>(key, begin, end, lane);
  }
#pragma unroll 1
  for (int first = begin; first < end; first += step) {
    if constexpr (AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    } else {
      ks.template read<VECTORS>(key, first, end, lane);
    }
    const int mine = first + query.own(lane), slot = metal::min(mine, end - 1);
    const int position = kept.positions[slot * kept.positions_step];
    const float forgotten = kept.F[slot * kept.F_step];
    const bool visible = mine < end && position >= 0 && position <= kept.own;
    float z[HEADS];
    query.logits(z, ks, lane);
    if (AHEAD && first + step < end) {
      ks.template read<VECTORS>(key, first + step, end, lane);
    }
    if (kept.selects && mine < end) {
      // The first token is never forgotten, and a token never makes anyone forget itself.
      const bool stays = position <= 0 || position == kept.own;
      const float now = forgotten + (visible && !stays ? metal::max(z[0] * scale, 0.0f) : 0.0f);
      kept.after[mine] = now;
      best.take_better({!kept.evicts ? 0.0f : stays ? -1.0f : now, position, mine});
    }
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
      float factor;
      z[h] = weights[h].of(visible ? (z[h] * scale - forgotten) * M_LOG2E_F : -INFINITY, factor);
      query.rescale(h, factor);
    }
    if constexpr (!AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    }
    query.add(z, vs, lane);
  }
}

// What the simdgroups of a threadgroup find, in its memory: of each head and simdgroup D sums, the logit in base 2
// that they are relative to, and the weights' total; then the simdgroups' candidates.
template <int D, int HEADS, int SIMDGROUPS>
struct Found {
  static constant constexpr const int PART = D + 2;
  static constant constexpr const int CANDIDATES = SIMDGROUPS * HEADS * PART, SIZE = CANDIDATES + 3 * SIMDGROUPS;

  METAL_FUNC static const threadgroup float* parts(const threadgroup float* memory, int h) {
    return memory + h * SIMDGROUPS * PART;
  }
  // The best of all candidates, for the first simdgroup.
  METAL_FUNC static Candidate best(const threadgroup float* memory, ushort lane) {
    const threadgroup float* own = memory + CANDIDATES + 3 * lane;
    return best_of_simdgroup(lane < SIMDGROUPS ? read_candidate(own) : no_candidate());
  }
};

// Reads the keys [begin, end) of row b of the batch for the heads from `head` on, which share a head of keys; what
// it finds lies in `memory` for all threads. HEADS, SIMDGROUPS, AHEAD, arrays and their strides as the kernels have.
template <int D, int HEADS, int SIMDGROUPS, bool AHEAD, typename T, typename S>
METAL_FUNC void read_cache(
    threadgroup float* memory,
    const device T* q,
    const device T* k,
    const S k_strides,
    const device T* v,
    const S v_strides,
    const device float* F,
    const S F_strides,
    const device int* key_positions,
    const S key_positions_strides,
    int own,
    bool evicts,
    const constant int* sizes,
    float scale,
    device float* after,
    long b,
    int head,
    int begin,
    int simdgroup,
    ushort lane) {
  using Memory = Found<D, HEADS, SIMDGROUPS>;
  const int keys = sizes[0], key_head = head / (sizes[1] / sizes[2]), end = metal::min(keys, begin + sizes[3]);
  const Kept kept = {
      F + b * F_strides[0],
      key_positions + b * key_positions_strides[0],
      after + b * keys,
      int(F_strides[1]),
      int(key_positions_strides[1]),
      own,
      evicts,
      head == 0};
  const RowsOf<T> key(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]);
  const RowsOf<T> value(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]);

  Query<D, HEADS> query;
  query.load(q + (b * sizes[1] + head) * D, lane);
  Weights weights[HEADS];
#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    weights[h] = {Weights::LEAST, 0};
  }
  Candidate best = no_candidate();
  const int from = begin + simdgroup * 32, step = SIMDGROUPS * 32;
  if (same_in_simdgroup(key.in_vectors() && value.in_vectors())) {
    attend<true, AHEAD>(query, weights, best, key, value, kept, from, end, step, scale, lane);
  } else {
    attend<false, false>(query, weights, best, key, value, kept, from, end, step, scale, lane);
  }

#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    threadgroup float* const part = memory + (h * SIMDGROUPS + simdgroup) * Memory::PART;
    query.gather(part, h, lane);
    const float total = over_simdgroup<Sum>(weights[h].total);
    if (lane == 0) {
      part[D] = weights[h].largest;
      part[D + 1] = total;
    }
  }
  best = best_of_simdgroup(best);
  if (lane == 0) {
    write_candidate(memory + Memory::CANDIDATES + 3 * simdgroup, best);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
}
