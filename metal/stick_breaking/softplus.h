// Softplus in base 2: softplus2(z) = log2(1 + 2^z) = max(z, 0) + log2_of_one_plus(2^-|z|).
#pragma once
#include "../dialect/dialect.h"

// log2(1 + x) of x in [0, 1], off by 2e-7 of it at most: log2 of a GPU is off by 2^-22 near 1, whatever x is.
// 2 log2(e) artanh(s) / s with s = x / (2 + x) is a polynomial of s^2, here fitted by least squares.
METAL_FUNC float log2_of_one_plus(float x) {
  const float s = metal::fast::divide(x, 2 + x), square = s * s;
  float sum = 0.40614976f;
  sum = metal::fma(sum, square, 0.40331964f);
  sum = metal::fma(sum, square, 0.57745648f);
  sum = metal::fma(sum, square, 0.96179062f);
  return s * metal::fma(sum, square, 2.8853901f);
}
