// One row of D elements, spread over a simdgroup: what elementwise work and single queries use.
#pragma once
#include "layout.h"

template <int D>
struct Row {
  static constant constexpr const short SIZE = (D + 31) / 32;
  float x[SIZE];

  METAL_FUNC thread float& operator[](short e) { return x[e]; }
  METAL_FUNC float operator[](short e) const { return x[e]; }
  METAL_FUNC short col(short e, ushort index) const { return e * 32 + index; }
  METAL_FUNC bool inside(short e, ushort index) const { return D % 32 == 0 || col(e, index) < D; }

  // Elements `stride` apart in memory.
  template <typename T>
  METAL_FUNC void load(const device T* source, long stride, ushort index) {
#pragma unroll
    for (short e = 0; e < SIZE; e++) {
      x[e] = inside(e, index) ? float(source[col(e, index) * stride]) : 0.0f;
    }
  }
  template <typename T>
  METAL_FUNC void store(device T* destination, ushort index) const {
#pragma unroll
    for (short e = 0; e < SIZE; e++) {
      if (inside(e, index)) {
        destination[col(e, index)] = T(x[e]);
      }
    }
  }
};
