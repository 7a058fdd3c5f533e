// How rows of COLS elements lie in threadgroup memory, so that eight rows of a column, which a product
// reads at once, are in different banks.
//   Rows are sixteen bytes longer than their elements; or, where CUDA has ldmatrix and a row fills its
//   banks evenly, their vectors change places by row (swizzled): a copy then writes whole lines, where
//   it would need 10.5 turns instead of 4 beside padding (counted by ncu on an H200).
#pragma once
#include "../dialect/dialect.h"

template <typename T, int COLS>
struct Block {
  static constant constexpr const short WIDTH = 16 / sizeof(T); // elements of a vector
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  static constant constexpr const bool SWIZZLED = sizeof(T) == 2 && COLS % 64 == 0;
#else
  static constant constexpr const bool SWIZZLED = false;
#endif
  static constant constexpr const short PITCH = SWIZZLED ? COLS : COLS + WIDTH; // from row to row

  // Where a vector of a row begins. A block may begin at any row that is a multiple of eight.
  METAL_FUNC static int at(int row, int vector) {
    if (SWIZZLED) {
      return row * PITCH + (vector / 8 * 8 + (vector % 8 ^ row % 8)) * WIDTH;
    }
    return row * PITCH + vector * WIDTH;
  }
};
