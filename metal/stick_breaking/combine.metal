// What the splits of stick_breaking/decode.metal took, made one.
#include "sticks.h"

// parts (B, H, splits, D + 1) as decode.metal writes them; sizes {splits};
// out (B, H, D), rounded to O, remainder (B, H). Grid: B H threadgroups of 128.
template <typename O, int D>
[[kernel]] void stick_breaking_combine(
    const device float* parts [[buffer(0)]],
    const constant int* sizes [[buffer(1)]],
    device O* out [[buffer(2)]],
    device float* remainder [[buffer(3)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]]) {
  const int splits = sizes[0], index = thread_index_in_threadgroup;
  const long row = threadgroup_position_in_grid.x;
  if (index < D) {
    float rest;
    out[row * D + index] = O(join_sticks<D>(parts + row * splits * (D + 1), splits, index, rest));
    if (index == 0) {
      remainder[row] = metal::fast::exp2(rest);
    }
  }
}
