// In which order a block's rows lie in threadgroup memory, so in which order the columns of a product
// with it come: row(place) is the source's row that stands at a place.
#pragma once
#include "../dialect/dialect.h"

struct InOrder {
  METAL_FUNC static int row(int place) { return place; }
};

template <typename Order>
METAL_FUNC constexpr bool is_in_order() { return false; }
template <>
METAL_FUNC constexpr bool is_in_order<InOrder>() { return true; }

// Of each C rows, a lane's elements of a tile's row follow one another: the first of the four lanes has
// the first C / 4, and so on. A scan along a row is then one inside of each lane, and one of four totals.
template <int C>
struct Runs {
  static_assert(C >= 16 && (C & (C - 1)) == 0, "a power of two, in whole pairs of fragments");
  METAL_FUNC static int row(int place) {
    return place / C * C + place % 8 / 2 * (C / 4) + place % C / 8 * 2 + place % 2;
  }
};
