// Across the lanes of a simdgroup: operations, a step of a scan, totals.
#pragma once
#include "../dialect/dialect.h"

struct Sum {
  static constant constexpr const bool IDEMPOTENT = false;
  METAL_FUNC static float of(float a, float b) { return a + b; }
};
struct Product {
  static constant constexpr const bool IDEMPOTENT = false;
  METAL_FUNC static float of(float a, float b) { return a * b; }
};
struct Max {
  static constant constexpr const bool IDEMPOTENT = true;
  METAL_FUNC static float of(float a, float b) { return metal::max(a, b); }
};

// Op over the lanes that differ in one bit of their index; `before` gains what comes from the lane
// that stands earlier in the order of the scan.
template <typename Op = Sum>
METAL_FUNC void scan_step(thread float& before, thread float& total, ushort index, short bit, bool reverse) {
  const float other = metal::simd_shuffle_xor(total, ushort(bit));
  if (((index & bit) != 0) != reverse) {
    before = Op::of(before, other);
  }
  total = Op::of(total, other);
}

// Op over all lanes, in each of them.
template <typename Op>
METAL_FUNC float over_simdgroup(float x) {
#pragma unroll
  for (ushort step = 1; step < 32; step *= 2) {
    x = Op::of(x, metal::simd_shuffle_xor(x, step));
  }
  return x;
}
