// What the splits of selective/decode.metal found, made one: the output, and the key to evict.
#include "../tile/query.h"
#include "candidate.h"
#include "share.h"

// sums (B, H, splits, D), totals (B, H, splits, 2), ranks (B, splits), slots (B, splits, 2) as decode.metal
// writes them, padded to eight elements; sizes {splits, H}; out (B, H, D); evicted (B).
// Grid: B H threadgroups of 128.
template <typename T, int D>
[[kernel]] void selective_combine(
    const device float* sums [[buffer(0)]],
    const device float* totals [[buffer(1)]],
    const device float* ranks [[buffer(2)]],
    const device int* slots [[buffer(3)]],
    const constant int* sizes [[buffer(4)]],
    device T* out [[buffer(5)]],
    device int* evicted [[buffer(6)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]) {
  const int splits = sizes[0], index = thread_index_in_threadgroup;
  const long row = threadgroup_position_in_grid.x, b = row / sizes[1];
  const device float* own = totals + 2 * row * splits;
  if (index < D) {
    const Share share = share_of(own, splits);
    float sum = 0;
    for (int split = 0; split < splits; split++) {
      const float factor = metal::fast::exp2(own[2 * split] - share.largest);
      sum = metal::fma(sums[(row * splits + split) * D + index], factor, sum);
    }
    out[row * D + index] = T(share.total == 0 ? 0.0f : sum / share.total);
  }
  if (row % sizes[1] == 0 && index < 32) {
    Candidate best = no_candidate();
    for (int split = index; split < splits; split += 32) {
      const long at = b * splits + split;
      best.take_better({ranks[at], slots[2 * at], slots[2 * at + 1]});
    }
    best = best_of_simdgroup(best);
    if (index == 0) {
      evicted[b] = best.slot;
    }
  }
}
