// Tiles: an R x C block of float accumulators in the registers of a simdgroup, and per-row values.
//
//   Tile<R, C> s;  s.fill(0);
//   for (short e = 0; e < s.SIZE; e++)        // the lane's elements, with coordinates
//     if (s.col(e, lane) > s.row(e, lane)) s[e] = 0;
//   Rows<R> m;                                // one value for each of the lane's rows
//   m[s.row_index(e)]                         // the one that belongs to element e
#pragma once
#include "layout.h"

// One value for each row of a tile, held by all lanes that hold a part of the row.
template <int R>
struct Rows {
  static constant constexpr const short SIZE = R / Fragment::ROWS * Fragment::LANE_ROWS;
  float x[SIZE];

  METAL_FUNC Rows() {}
  METAL_FUNC Rows(float value) {
#pragma unroll
    for (short i = 0; i < SIZE; i++) {
      x[i] = value;
    }
  }
  METAL_FUNC thread float& operator[](short i) { return x[i]; }
  METAL_FUNC float operator[](short i) const { return x[i]; }
  // The row, in the tile, of the lane's value i.
  METAL_FUNC static short row(short i, Lane lane) {
    return i / Fragment::LANE_ROWS * Fragment::ROWS + i % Fragment::LANE_ROWS * 8 + lane.row;
  }
};

template <int R, int C>
struct Tile {
  static_assert(R % Fragment::ROWS == 0 && C % 16 == 0, "whole fragments, in pairs, on each backend");
  static constant constexpr const short ROWS = R / Fragment::ROWS; // in fragments
  static constant constexpr const short COLS = C / Fragment::COLS;
  static constant constexpr const short SIZE = ROWS * COLS * Fragment::SIZE;
  float x[SIZE];

  METAL_FUNC void fill(float value) {
#pragma unroll
    for (short e = 0; e < SIZE; e++) {
      x[e] = value;
    }
  }
  METAL_FUNC thread float& operator[](short e) { return x[e]; }
  METAL_FUNC float operator[](short e) const { return x[e]; }
  METAL_FUNC thread float* piece(short i, short j) { return x + index(i, j); }
  METAL_FUNC const thread float* piece(short i, short j) const { return x + index(i, j); }

  METAL_FUNC short row(short e, Lane lane) const {
    return e / (COLS * Fragment::SIZE) * Fragment::ROWS + e % Fragment::SIZE / 2 * 8 + lane.row;
  }
  METAL_FUNC short col(short e, Lane lane) const {
    return e / Fragment::SIZE % COLS * Fragment::COLS + e % 2 + lane.col;
  }
  // The lane's element n, in the order of columns, of its row i.
  METAL_FUNC short at(short i, short n) const {
    return (i / Fragment::LANE_ROWS * COLS + n / 2) * Fragment::SIZE + i % Fragment::LANE_ROWS * 2 + n % 2;
  }
  // Which of a Rows<R>'s values belongs to element e.
  METAL_FUNC short row_index(short e) const {
    return e / (COLS * Fragment::SIZE) * Fragment::LANE_ROWS + e % Fragment::SIZE / 2;
  }
  // Which of a Cols<C>'s values.
  METAL_FUNC short col_index(short e) const { return e / Fragment::SIZE % COLS * 2 + e % 2; }

 private:
  METAL_FUNC static short index(short i, short j) { return (i * COLS + j) * Fragment::SIZE; }
};

// Columns [first, first + C) of a wider tile; whole fragments.
template <int C, int R, int WIDE>
METAL_FUNC Tile<R, C> columns(const thread Tile<R, WIDE>& s, short first) {
  Tile<R, C> part;
#pragma unroll
  for (short e = 0; e < part.SIZE; e++) {
    const short row = e / (part.COLS * Fragment::SIZE), within = e % (part.COLS * Fragment::SIZE);
    part[e] = s[(row * s.COLS + first / Fragment::COLS) * Fragment::SIZE + within];
  }
  return part;
}
