// A running softmax: logits come tile by tile, weighted values are summed in o (Milakov and Gimelshein 2018,
// arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135).
//
//   Rows<R> largest(LEAST), total(0);  o.fill(0);
//   for each tile s of logits:
//     raise_largest(s, o, largest, total, scale_log2);
//     add_weighted(s, o, largest, total, scale_log2, values, index);
//   divide(o, total);
#pragma once
#include "multiply.h"
#include "reduce.h"

// Weights are relative to `largest`, which no logit of the row exceeds by more than a factor of 2^SLACK in
// weight. It follows only what goes beyond that: most blocks then need no exchange between lanes and leave
// what was summed as it is. It is kept scaled and rounded, in base 2, and all weights use that number: what
// rounding makes of it is then a factor of weights and total alike. Below all logits at first, and finite, so
// that a row in which all are -inf gives weights of 0.
constant constexpr const float LEAST = -1e30f, SLACK = 8;
static_assert(SLACK < 15, "weights must count in half, to 65504");

// The first half of a block of the running softmax: `largest` takes in the logits in s.
template <int R, int C, int D>
METAL_FUNC void raise_largest(
    const thread Tile<R, C>& s,
    thread Tile<R, D>& o,
    thread Rows<R>& largest,
    thread Rows<R>& total,
    float scale) {
  Rows<R> found(-INFINITY);
  reduce_lane_rows<Max>(found, s);
  bool beyond = false;
#pragma unroll
  for (short i = 0; i < Rows<R>::SIZE; i++) {
    found[i] *= scale;
    beyond = beyond || found[i] > largest[i] + SLACK;
  }
  if (metal::simd_any(beyond)) {
    combine_lanes<Max>(found);
#pragma unroll
    for (short i = 0; i < Rows<R>::SIZE; i++) {
      const float before = largest[i];
      largest[i] = metal::max(before, found[i]);
      found[i] = metal::fast::exp2(before - largest[i]);
      total[i] *= found[i];
    }
#pragma unroll
    for (short e = 0; e < o.SIZE; e++) {
      o[e] *= found[o.row_index(e)];
    }
  }
}

// The second half: weights relative to `largest`, their sums, and their product with the values. A few
// keys at a time, so that the exponentials of some are formed while others are multiplied.
template <typename T, int R, int C, int D>
METAL_FUNC void add_weighted(
    const thread Tile<R, C>& s,
    thread Tile<R, D>& o,
    const thread Rows<R>& largest,
    thread Rows<R>& total,
    float scale,
    const threadgroup T* vs,
    ushort index) {
#pragma unroll
  for (short c = 0; c < C; c += 16) {
    Tile<R, 16> w = columns<16>(s, c);
#pragma unroll
    for (short e = 0; e < w.SIZE; e++) {
      w[e] = metal::fast::exp2(metal::fma(w[e], scale, -largest[w.row_index(e)]));
    }
    reduce_lane_rows<Sum>(total, w);
    multiply(o, operand<T>(w), vs + c * Block<T, D>::PITCH, index);
  }
}

// The sums divided by the weights' total; 0 where nothing had a weight.
template <int R, int D>
METAL_FUNC void divide(thread Tile<R, D>& o, thread Rows<R>& total) {
  combine_lanes<Sum>(total);
#pragma unroll
  for (short i = 0; i < Rows<R>::SIZE; i++) {
    total[i] = total[i] == 0 ? 0.0f : 1 / total[i];
  }
#pragma unroll
  for (short e = 0; e < o.SIZE; e++) {
    o[e] *= total[o.row_index(e)];
  }
}
