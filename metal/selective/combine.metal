// What the splits of selective/decode.metal found, made one: the output, and the key to evict.
#include "../tile/query.h"
#include "candidate.h"
#include "share.h"

// parts and candidates as decode.metal writes them; sizes {splits, H, candidates' place}; out (B, H, D); evicted (B).
// Grid: B H threadgroups of 128.
template <typename T, int D>
[[kernel]] void selective_combine(
    const device float* parts [[buffer(0)]],
    const constant int* sizes [[buffer(1)]],
    device T* out [[buffer(2)]],
    device int* evicted [[buffer(3)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]) {
  const int splits = sizes[0], index = thread_index_in_threadgroup;
  const long row = threadgroup_position_in_grid.x, b = row / sizes[1];
  const device float* own = parts + row * splits * (D + 2);
  if (index < D) {
    const Share share = share_of<D>(own, splits);
    const float sum = sum_of<D>(own, splits, index, share);
    out[row * D + index] = T(share.total == 0 ? 0.0f : sum / share.total);
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
