// Two ways to break sticks, Form::take: a chunk's logits become its weights, and `left`, what is left of
// each row's stick, takes in the chunk's keys. Columns lie in Runs<C>, oldest first; what is nearer comes
// first. A logit of -infinity breaks nothing off.
//   Form::WHOLE, Form::NOTHING: values of `left`; Form::used_up(left); Form::remainder(left, used), what is
//   left of the stick, with `used` the sum of a row's weights.
#pragma once
#include "../tile/scan.h"
#include "softplus.h"

// NaN stays NaN.
METAL_FUNC float at_most(float x, float limit) { return x > limit ? limit : x; }

// With the odds e = 2^z = beta / (1 - beta) of each key and d = 1 + e, 1 - beta = 1 / d. Of four keys
// from the oldest on, key n gets  e_n d_0 .. d_(n-1) / (d_0 d_1 d_2 d_3)  of what is nearer left: one
// reciprocal for four logits, no logarithm. Odds are at most 2^30, so a key leaves at least 2^-30.
struct ProductForm {
  static constant constexpr const float WHOLE = 1, NOTHING = 0;
  static constant constexpr const float LIMIT = 30;
  // Denominators are in units of 2^-60, so that they and their reciprocals stay in range.
  static constant constexpr const float UNIT = 8.67361738e-19f;

  // At most 2^-29.
  METAL_FUNC static bool used_up(float left) { return left <= 1.86264515e-9f; }
  // A product of many numbers just below 1 is rounded each time: the sum is better while it is small.
  METAL_FUNC static float remainder(float left, float used) { return used < 0.5f ? 1 - used : left; }

  template <int R, int C>
  METAL_FUNC static void take(thread Tile<R, C>& s, thread Rows<R>& left, float scale, ushort index) {
    constexpr short FOURS = C / 16;
    Rows<R> inverse[FOURS], total(1), nearer(1);
#pragma unroll
    for (short i = 0; i < Rows<R>::SIZE; i++) {
#pragma unroll
      for (short four = 0; four < FOURS; four++) {
        float d = UNIT;
#pragma unroll
        for (short n = 0; n < 4; n++) {
          const short e = s.at(i, 4 * four + n);
          const float odds = metal::fast::exp2(at_most(s[e] * scale, LIMIT));
          s[e] = n == 0 ? odds : odds * d;
          d = metal::fma(odds, d, d);
        }
        inverse[four][i] = metal::fast::divide(1, d);
        total[i] *= inverse[four][i] * UNIT;
      }
    }
    scan_lanes<Product, true>(nearer, total, index);
#pragma unroll
    for (short i = 0; i < Rows<R>::SIZE; i++) {
      float rest = left[i] * nearer[i];
#pragma unroll
      for (short four = FOURS - 1; four >= 0; four--) {
        const float part = inverse[four][i] * rest;
        rest = part * UNIT;
        s[s.at(i, 4 * four)] *= rest;
#pragma unroll
        for (short n = 1; n < 4; n++) {
          s[s.at(i, 4 * four + n)] *= part;
        }
      }
      left[i] *= total[i];
    }
  }
};

// With softplus2(z) = log2(1 + 2^z), log2(1 - beta) = -softplus2(z) and log2(beta) = -softplus2(-z):
// `left` and the running sums are logarithms, as in the plain definition.
struct LogForm {
  static constant constexpr const float WHOLE = 0, NOTHING = -INFINITY;

  METAL_FUNC static bool used_up(float left) { return left <= -29; }
  METAL_FUNC static float remainder(float left, float) { return metal::fast::exp2(left); }

  template <int R, int C>
  METAL_FUNC static void take(thread Tile<R, C>& s, thread Rows<R>& left, float scale, ushort index) {
    Tile<R, C> broken; // -log2(1 - beta)
    Rows<R> total(0), nearer(0);
#pragma unroll
    for (short i = 0; i < Rows<R>::SIZE; i++) {
#pragma unroll
      for (short n = 0; n < C / 4; n++) {
        const short e = s.at(i, n);
        const float z = s[e] * scale;
        const float tail = log2_of_one_plus(metal::fast::exp2(-metal::abs(z)));
        broken[e] = (z < 0 ? 0 : z) + tail;
        s[e] = (z < 0 ? z : 0) - tail;
        total[i] += broken[e];
      }
    }
    scan_lanes<Sum, true>(nearer, total, index);
#pragma unroll
    for (short i = 0; i < Rows<R>::SIZE; i++) {
      float rest = left[i] - nearer[i];
#pragma unroll
      for (short n = C / 4 - 1; n >= 0; n--) {
        const short e = s.at(i, n);
        s[e] = metal::fast::exp2(s[e] + rest);
        rest -= broken[e];
      }
      left[i] -= total[i];
    }
  }
};

template <bool PRODUCT>
struct FormOf {
  using Type = ProductForm;
};
template <>
struct FormOf<false> {
  using Type = LogForm;
};
