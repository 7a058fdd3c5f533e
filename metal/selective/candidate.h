// The key to evict: the largest F, the oldest of equals (arXiv 2410.02703, context pruning).
#pragma once
#include "../dialect/dialect.h"

struct Candidate {
  float rank;
  int position, slot;

  METAL_FUNC bool before(Candidate other) const {
    if (rank != other.rank) {
      return rank > other.rank;
    }
    return position < other.position || (position == other.position && slot < other.slot);
  }
  METAL_FUNC void take_better(Candidate other) {
    if (other.before(*this)) {
      *this = other;
    }
  }
};

METAL_FUNC Candidate no_candidate() { return {-INFINITY, 0x7fffffff, 0x7fffffff}; }

// The best of a simdgroup's, in all lanes.
METAL_FUNC Candidate best_of_simdgroup(Candidate best) {
#pragma unroll
  for (ushort step = 1; step < 32; step *= 2) {
    best.take_better({
        metal::simd_shuffle_xor(best.rank, step),
        metal::simd_shuffle_xor(best.position, step),
        metal::simd_shuffle_xor(best.slot, step)});
  }
  return best;
}

// Candidates as three floats each, of which two have the bits of integers.
template <typename P>
METAL_FUNC Candidate read_candidate(P from) {
  return {from[0], as_type<int>(from[1]), as_type<int>(from[2])};
}
template <typename P>
METAL_FUNC void write_candidate(P to, Candidate candidate) {
  to[0] = candidate.rank;
  to[1] = as_type<float>(candidate.position);
  to[2] = as_type<float>(candidate.slot);
}
