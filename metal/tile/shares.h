// A number for each of several parts, spread over the lanes of a simdgroup, and sums of the parts with these as factors.
#pragma once
#include "../dialect/dialect.h"

// At most MOST parts, a multiple of 32.
template <int MOST>
struct Shares {
  static constant constexpr const short SIZE = MOST / 32;
  float x[SIZE];

  METAL_FUNC static int part(short i, ushort lane) { return i * 32 + lane; }

  // The sum of x times first[part * step] over `count` parts, for each lane with a `first` of its own. Eight numbers
  // are on their way at a time.
  METAL_FUNC float sum_of(const device float* first, int step, int count) const {
    constexpr short AHEAD = 8;
    float sum = 0;
#pragma unroll
    for (short i = 0; i < SIZE; i++) {
      for (int begin = 0; begin < 32 && i * 32 + begin < count; begin += AHEAD) {
        float numbers[AHEAD];
#pragma unroll
        for (short n = 0; n < AHEAD; n++) {
          numbers[n] = first[metal::min(i * 32 + begin + n, count - 1) * step];
        }
#pragma unroll
        for (short n = 0; n < AHEAD; n++) {
          const float factor = metal::simd_shuffle(x[i], ushort(begin + n));
          sum = metal::fma(i * 32 + begin + n < count ? factor : 0.0f, numbers[n], sum);
        }
      }
    }
    return sum;
  }
};
