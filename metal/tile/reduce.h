// A value for each row of a tile: reductions over its columns.
#pragma once
#include "lanes.h"
#include "tile.h"

// r = Op over the lanes that hold a part of the row: all of them end with the same value.
template <typename Op, int R>
METAL_FUNC void combine_lanes(thread Rows<R>& r) {
#pragma unroll
  for (short i = 0; i < Rows<R>::SIZE; i++) {
    r[i] = Op::of(r[i], metal::simd_shuffle_xor(r[i], ushort(Fragment::PAIR_1)));
    r[i] = Op::of(r[i], metal::simd_shuffle_xor(r[i], ushort(Fragment::PAIR_2)));
  }
}

// r = Op(r, the lane's own elements of the row). The lanes hold parts until combine_lanes.
template <typename Op, int R, int C>
METAL_FUNC void reduce_lane_rows(thread Rows<R>& r, const thread Tile<R, C>& s) {
#pragma unroll
  for (short e = 0; e < s.SIZE; e++) {
    r[s.row_index(e)] = Op::of(r[s.row_index(e)], s[e]);
  }
}

// r = Op(r, every element of the row), for an r that is the same in all lanes of a row. The lanes each
// count it, so Op must not mind: the largest, not the sum.
template <typename Op, int R, int C>
METAL_FUNC void reduce_rows(thread Rows<R>& r, const thread Tile<R, C>& s) {
  static_assert(Op::IDEMPOTENT, "reduce_lane_rows from a neutral r, then combine_lanes, for sums");
  reduce_lane_rows<Op>(r, s);
  combine_lanes<Op>(r);
}
