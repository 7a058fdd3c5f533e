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
    factor = 1;
    if (metal::simd_any(z > largest + SLACK)) {
      const float most = metal::max(simd_largest(z), largest);
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
// VECTORS: as both rows' in_vectors() says. AHEAD: values are asked for before keys are used.
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
  for (int first = begin; first < end; first += step) {
    Rows32<T, D> ks, vs;
    ks.template read<VECTORS>(key, first, end, lane);
    if constexpr (AHEAD) {
      vs.template read<VECTORS>(value, first, end, lane);
    }
    const int mine = first + query.own(lane), slot = metal::min(mine, end - 1);
    const int position = kept.positions[slot * kept.positions_step];
    const float forgotten = kept.F[slot * kept.F_step];
    const bool visible = mine < end && position >= 0 && position <= kept.own;
    float z[HEADS];
    query.logits(z, ks, lane);
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

// q (B, H, D); k and v (B, Hkv, N, D), F and key_positions (B, N), any strides; query_positions (B, any), of each
// row the query's position; evicts (B or more), whether a row evicts; sizes {N, H, Hkv, splits, keys of a
// split, candidates' place}; scale {scale}.
//   out (B, H, D); evicted (B): the slot of the key to evict, or of an empty one in a row that does not
//   after (B, N): F after the query
// SPLIT: instead of out and evicted, for selective/combine.metal, parts (B, H, splits, D + 2): D sums, the logit that
// they are relative to, and the weights' total; and from the candidates' place on (B, splits, 3): the
// candidate's F, position and slot
// AHEAD: values are asked for before keys are used, which takes registers.
// Grid: splits, H / HEADS, B threadgroups of SIMDGROUPS simdgroups; HEADS share a head of keys.
template <typename T, int D, int HEADS, int SIMDGROUPS, bool SPLIT, bool AHEAD>
[[kernel]] void selective_decode(
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
    device T* out [[buffer(14)]],
    device int* evicted [[buffer(15)]],
    device float* after [[buffer(16)]],
    device float* parts [[buffer(17)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  // Of each head and simdgroup a part as above; then the simdgroups' candidates.
  constexpr int PART = D + 2, CANDIDATES = SIMDGROUPS * HEADS * PART;
  THREADGROUP_MEMORY(float, memory, CANDIDATES + 3 * SIMDGROUPS);

  const ushort lane = thread_index_in_simdgroup;
  const int simdgroup = same_in_simdgroup(simdgroup_index_in_threadgroup), keys = sizes[0], splits = sizes[3];
  const int split = threadgroup_position_in_grid.x, head = threadgroup_position_in_grid.y * HEADS;
  const long b = threadgroup_position_in_grid.z, row = b * sizes[1] + head;
  const int key_head = head / (sizes[1] / sizes[2]);
  const int begin = split * sizes[4], end = metal::min(keys, begin + sizes[4]);
  const Kept kept = {
      F + b * F_strides[0],
      key_positions + b * key_positions_strides[0],
      after + b * keys,
      int(F_strides[1]),
      int(key_positions_strides[1]),
      query_positions[b * query_positions_strides[0]],
      evicts[b] != 0,
      head == 0};
  const RowsOf<T> key(k + b * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3]);
  const RowsOf<T> value(v + b * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3]);

  Query<D, HEADS> query;
  query.load(q + row * D, lane);
  Weights weights[HEADS];
#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    weights[h] = {Weights::LEAST, 0};
  }
  Candidate best = no_candidate();
  const int from = begin + simdgroup * 32, step = SIMDGROUPS * 32;
  if (same_in_simdgroup(key.in_vectors() && value.in_vectors())) {
    attend<true, AHEAD>(query, weights, best, key, value, kept, from, end, step, scale[0], lane);
  } else {
    attend<false, false>(query, weights, best, key, value, kept, from, end, step, scale[0], lane);
  }

#pragma unroll
  for (short h = 0; h < HEADS; h++) {
    threadgroup float* const part = memory + (h * SIMDGROUPS + simdgroup) * PART;
    query.gather(part, h, lane);
    const float total = simd_total(weights[h].total);
    if (lane == 0) {
      part[D] = weights[h].largest;
      part[D + 1] = total;
    }
  }
  best = best_of_simdgroup(best);
  if (lane == 0) {
    write_candidate(memory + CANDIDATES + 3 * simdgroup, best);
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  for (int i = thread_index_in_threadgroup; i < HEADS * D; i += SIMDGROUPS * 32) {
    const int h = i / D, d = i % D;
    const threadgroup float* const own_parts = memory + h * SIMDGROUPS * PART;
    const Share share = share_of<D>(own_parts, SIMDGROUPS);
    const float sum = sum_of<D>(own_parts, SIMDGROUPS, d, share);
    if constexpr (SPLIT) {
      device float* const part = parts + ((row + h) * splits + split) * PART;
      part[d] = sum;
      if (d == 0) {
        part[D] = share.largest;
        part[D + 1] = share.total;
      }
    } else {
      out[(row + h) * D + d] = T(share.total == 0 ? 0.0f : sum / share.total);
    }
  }
  if (head == 0 && simdgroup == 0) {
    best = lane < SIMDGROUPS ? read_candidate(memory + CANDIDATES + 3 * lane) : no_candidate();
    best = best_of_simdgroup(best);
    if (lane == 0) {
      if constexpr (SPLIT) {
        write_candidate(parts + sizes[5] + 3 * (b * splits + split), best);
      } else {
        evicted[b] = best.slot;
      }
    }
  }
}
