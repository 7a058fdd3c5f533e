// Sticks of single queries: 32 keys at a time, one a lane as tile/query.h has them, and parts made one. What is
// left is a logarithm, as in LogForm of forms.h: many keys that take little are added up exactly enough.
#pragma once
#include "../tile/lanes.h"
#include "softplus.h"

// Whether at most 2^-29 is left, by its log2.
METAL_FUNC bool used_up(float left) { return left <= -29; }

// From the logit, in base 2, of the lane's own key to its weight. `left`, log2 of what is left of the stick and
// the same in all lanes, takes in the 32 keys.
METAL_FUNC float take_share(float z, thread float& left, ushort lane) {
  const float tail = log2_of_one_plus(metal::fast::exp2(-metal::abs(z)));
  const float broken = (z < 0 ? 0 : z) + tail; // -log2(1 - beta)
  // The lanes' keys are not in the lanes' order: lane l gets the key that is l-th of the 32.
  float nearer = 0, total = metal::simd_shuffle(broken, ushort(lane % 4 * 8 + lane / 4));
#pragma unroll
  for (ushort bit = 1; bit < 32; bit *= 2) {
    scan_step<Sum>(nearer, total, lane, bit, true);
  }
  nearer = metal::simd_shuffle(nearer, ushort(lane % 8 * 4 + lane / 8));
  const float weight = metal::fast::exp2((z < 0 ? z : 0) - tail + (left - nearer));
  left -= total;
  return weight;
}

// One stick of parts of which the last has the newest keys: parts (count, D + 1), D sums and log2 of what the part
// leaves. Gives the sum of element d; `left` becomes log2 of what all leave.
template <int D, typename P>
METAL_FUNC float join_sticks(P parts, int count, int d, thread float& left) {
  float sum = 0;
  left = 0;
  for (int part = count - 1; part >= 0; part--) {
    sum = metal::fma(metal::fast::exp2(left), parts[part * (D + 1) + d], sum);
    left += parts[part * (D + 1) + D];
  }
  return sum;
}
