// Softmax in parts, of which each has a total of weights relative to a logit of its own.
#pragma once
#include "../dialect/dialect.h"

// The largest of those logits, and the total relative to it.
struct Share {
  float largest, total;
};

// totals: (parts, 2), pairs of a logit in base 2 and a total.
template <typename P>
METAL_FUNC Share share_of(P totals, int parts) {
  Share share = {totals[0], 0};
  for (int part = 1; part < parts; part++) {
    share.largest = metal::max(share.largest, totals[2 * part]);
  }
  for (int part = 0; part < parts; part++) {
    const float factor = metal::fast::exp2(totals[2 * part] - share.largest);
    share.total = metal::fma(totals[2 * part + 1], factor, share.total);
  }
  return share;
}
