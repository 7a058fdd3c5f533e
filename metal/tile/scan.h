// Running sums of a tile. Each scan is inclusive and adds the carry that it is given, then leaves
// the total in the carry, so that a long row or column can come tile by tile. And scan_lanes, for sums or
// products of what lies in Runs.
#pragma once
#include "reduce.h"
#include "tile.h"

// Across the lanes of each row: `before` gains Op over the totals of the lanes that stand earlier
// (REVERSE: later), `total` becomes that of the row. For columns that lie in Runs.
template <typename Op, bool REVERSE, int R>
METAL_FUNC void scan_lanes(thread Rows<R>& before, thread Rows<R>& total, ushort index) {
#pragma unroll
  for (short i = 0; i < Rows<R>::SIZE; i++) {
    scan_step<Op>(before[i], total[i], index, Fragment::PAIR_1, REVERSE);
    scan_step<Op>(before[i], total[i], index, Fragment::PAIR_2, REVERSE);
  }
}

// Along each row: s[r, c] = carry[r] + sum of s[r, c'] over c' <= c (REVERSE: c' >= c).
template <bool REVERSE, int R, int C>
METAL_FUNC void scan_rows(thread Tile<R, C>& s, thread Rows<R>& carry, ushort index) {
  constexpr short LANE_ROWS = Fragment::LANE_ROWS;
#pragma unroll
  for (short i = 0; i < Rows<R>::SIZE; i++) {
#pragma unroll
    for (short step = 0; step < Tile<R, C>::COLS; step++) {
      const short j = REVERSE ? Tile<R, C>::COLS - 1 - step : step;
      const short e = (i / LANE_ROWS * Tile<R, C>::COLS + j) * Fragment::SIZE + i % LANE_ROWS * 2;
      const short first = REVERSE ? e + 1 : e, second = REVERSE ? e : e + 1;
      float before = carry[i], total = s[e] + s[e + 1];
      scan_step(before, total, index, Fragment::PAIR_1, REVERSE);
      scan_step(before, total, index, Fragment::PAIR_2, REVERSE);
      s[first] += before;
      s[second] += s[first];
      carry[i] += total;
    }
  }
}

// One value for each column of a tile, held by all lanes that hold a part of the column.
template <int C>
struct Cols {
  static constant constexpr const short SIZE = C / Fragment::COLS * 2;
  float x[SIZE];
  METAL_FUNC Cols() {}
  METAL_FUNC Cols(float value) {
#pragma unroll
    for (short i = 0; i < SIZE; i++) {
      x[i] = value;
    }
  }
  METAL_FUNC thread float& operator[](short i) { return x[i]; }
  METAL_FUNC float operator[](short i) const { return x[i]; }
  METAL_FUNC static short col(short i, Lane lane) { return i / 2 * Fragment::COLS + i % 2 + lane.col; }
};

// Down each column: s[r, c] = carry[c] + sum of s[r', c] over r' <= r (OWN: also the row's own, or r' < r).
template <bool OWN, int R, int C>
METAL_FUNC void scan_columns(thread Tile<R, C>& s, thread Cols<C>& carry, ushort index) {
#pragma unroll
  for (short c = 0; c < Cols<C>::SIZE; c++) {
#pragma unroll
    for (short r = 0; r < Rows<R>::SIZE; r++) {
      const short i = r / Fragment::LANE_ROWS, half_rows = r % Fragment::LANE_ROWS;
      const short e = (i * Tile<R, C>::COLS + c / 2) * Fragment::SIZE + half_rows * 2 + c % 2;
      float before = carry[c], total = s[e];
      scan_step(before, total, index, Fragment::ROW_1, false);
      scan_step(before, total, index, Fragment::ROW_2, false);
      scan_step(before, total, index, Fragment::ROW_4, false);
      s[e] = OWN ? before + s[e] : before;
      carry[c] += total;
    }
  }
}
