// Softmax in parts, of which each has a total of weights relative to a logit of its own.
#pragma once
#include "../dialect/dialect.h"

// The largest of those logits, and the total relative to it.
struct Share {
  float largest, total;
};

// parts: (count, D + 2), D sums, the logit in base 2 and the total.
template <int D, typename P>
METAL_FUNC Share share_of(P parts, int count) {
  Share share = {parts[D], 0};
  for (int part = 1; part < count; part++) {
    share.largest = metal::max(share.largest, parts[part * (D + 2) + D]);
  }
  for (int part = 0; part < count; part++) {
    const float factor = metal::fast::exp2(parts[part * (D + 2) + D] - share.largest);
    share.total = metal::fma(parts[part * (D + 2) + D + 1], factor, share.total);
  }
  return share;
}

// The sum of element d, relative to the share's logit.
template <int D, typename P>
METAL_FUNC float sum_of(P parts, int count, int d, Share share) {
  float sum = 0;
  for (int part = 0; part < count; part++) {
    const float factor = metal::fast::exp2(parts[part * (D + 2) + D] - share.largest);
    sum = metal::fma(parts[part * (D + 2) + d], factor, sum);
  }
  return sum;
}
