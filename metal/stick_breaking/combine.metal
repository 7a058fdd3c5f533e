// What the splits of stick_breaking/decode_split.metal took, made one.
#include "../tile/lanes.h"
#include "../tile/shares.h"

// parts (B, H, splits, D + 1) as decode_split.metal writes them; sizes {splits}, at most MOST;
// out (B, H, D), rounded to O, remainder (B, H). Grid: B H threadgroups of 128.
template <typename O, int D, int MOST>
[[kernel]] void stick_breaking_combine(
    const device float* parts [[buffer(0)]],
    const constant int* sizes [[buffer(1)]],
    device O* out [[buffer(2)]],
    device float* remainder [[buffer(3)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const int splits = sizes[0], index = thread_index_in_threadgroup;
  const ushort lane = thread_index_in_simdgroup;
  const long row = threadgroup_position_in_grid.x;
  const device float* own = parts + row * splits * (D + 1);

  // Each simdgroup finds out anew what newer splits leave of a split's stick, a lane for each.
  Shares<MOST> factors;
  float left = 0;
#pragma unroll
  for (short i = factors.SIZE - 1; i >= 0; i--) {
    const int split = factors.part(i, lane);
    float newer = 0, total = split < splits ? own[split * (D + 1) + D] : 0.0f;
#pragma unroll
    for (ushort bit = 1; bit < 32; bit *= 2) {
      scan_step<Sum>(newer, total, lane, bit, true);
    }
    factors.x[i] = metal::fast::exp2(left + newer);
    left += total;
  }
  const float sum = factors.sum_of(own + metal::min(index, D - 1), D + 1, splits);
  if (index < D) {
    out[row * D + index] = O(sum);
  }
  if (index == 0) {
    remainder[row] = metal::fast::exp2(left);
  }
}
