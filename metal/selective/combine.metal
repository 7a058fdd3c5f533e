// What the splits of selective/decode_split.metal found, made one: the output, and the key to evict.
#include "../tile/lanes.h"
#include "../tile/shares.h"
#include "candidate.h"

// parts and candidates as decode_split.metal writes them; sizes {splits, H, candidates' place}, splits at most MOST;
// out (B, H, D); evicted (B). Grid: B H threadgroups of 128.
template <typename T, int D, int MOST>
[[kernel]] void selective_combine(
    const device float* parts [[buffer(0)]],
    const constant int* sizes [[buffer(1)]],
    device T* out [[buffer(2)]],
    device int* evicted [[buffer(3)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const int splits = sizes[0], index = thread_index_in_threadgroup;
  const ushort lane = thread_index_in_simdgroup;
  const long row = threadgroup_position_in_grid.x, b = row / sizes[1];
  const device float* own = parts + row * splits * (D + 2);

  // Each simdgroup weighs the splits anew, a lane for each: they need not wait for one another.
  Shares<MOST> factors;
  float largest = -INFINITY, total = 0;
#pragma unroll
  for (short i = 0; i < factors.SIZE; i++) {
    const int split = factors.part(i, lane);
    factors.x[i] = split < splits ? own[split * (D + 2) + D] : -INFINITY;
    largest = metal::max(largest, factors.x[i]);
  }
  largest = over_simdgroup<Max>(largest);
#pragma unroll
  for (short i = 0; i < factors.SIZE; i++) {
    const int split = factors.part(i, lane);
    factors.x[i] = metal::fast::exp2(factors.x[i] - largest);
    total += split < splits ? factors.x[i] * own[split * (D + 2) + D + 1] : 0.0f;
  }
  total = over_simdgroup<Sum>(total);
  const float sum = factors.sum_of(own + metal::min(index, D - 1), D + 2, splits);
  if (index < D) {
    out[row * D + index] = T(total == 0 ? 0.0f : sum / total);
  }
  if (row % sizes[1] == 0 && index < 32) {
    Candidate best = no_candidate();
    for (int split = index; split < splits; split += 32) {
      best.take_better(read_candidate(parts + sizes[2] + 3 * (b * splits + split)));
    }
    best = best_of_simdgroup(best);
    if (index == 0) {
      evicted[b] = best.slot;
    }
  }
}
