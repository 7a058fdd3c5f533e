// Where a tile's elements live: a simdgroup of 32 lanes shares fragments, and each lane holds pairs
// of neighbours in a row. This says where; tile.h, scan.h and multiply_*.h compute with it.
//   Metal: 8 x 8 (simdgroup_matrix), a pair a lane. Apple does not document the order of lanes; it
//     is the one that MLX's kernels rely on, and `doctor --kernels` checks it on the machine.
//   CUDA: 16 x 8 (mma.sync accumulators), two pairs a lane, eight rows apart.
#pragma once
#include "../dialect/dialect.h"

struct Fragment {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  static constant constexpr const short ROWS = 16;
  // Bits of the lane index that tell the four pairs of a row apart, and the eight rows.
  static constant constexpr const short PAIR_1 = 1, PAIR_2 = 2;
  static constant constexpr const short ROW_1 = 4, ROW_2 = 8, ROW_4 = 16;
#else
  static constant constexpr const short ROWS = 8;
  static constant constexpr const short PAIR_1 = 1, PAIR_2 = 8;
  static constant constexpr const short ROW_1 = 2, ROW_2 = 4, ROW_4 = 16;
#endif
  static constant constexpr const short COLS = 8;
  static constant constexpr const short LANE_ROWS = ROWS / 8; // rows in which a lane has a pair
  static constant constexpr const short SIZE = 2 * LANE_ROWS; // elements of a lane
};

// The lane's first row and column in a fragment: element e is at
// (row + 8 * (e / 2), col + e % 2).
struct Lane {
  short row, col;
  METAL_FUNC Lane(ushort index) {
    row = number(index, Fragment::ROW_1, Fragment::ROW_2, Fragment::ROW_4);
    col = 2 * number(index, Fragment::PAIR_1, Fragment::PAIR_2, 0);
  }

 private:
  METAL_FUNC static short number(ushort index, short one, short two, short four) {
    return (index & one ? 1 : 0) + (index & two ? 2 : 0) + (index & four ? 4 : 0);
  }
};
