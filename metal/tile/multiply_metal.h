// Matrix products on simdgroup_matrix 8 x 8. Operands are widened to float when they are loaded, as
// MLX's kernels do: a probability is never rounded to T.
#pragma once
#include "block.h"
#include "tile.h"

METAL_FUNC void multiply_accumulate(thread float* c, const thread float* a, const thread float* b) {
  metal::simdgroup_matrix<float, 8, 8> A, B, C;
  A.thread_elements()[0] = a[0];
  A.thread_elements()[1] = a[1];
  B.thread_elements()[0] = b[0];
  B.thread_elements()[1] = b[1];
  C.thread_elements()[0] = c[0];
  C.thread_elements()[1] = c[1];
  metal::simdgroup_multiply_accumulate(C, A, B, C);
  c[0] = C.thread_elements()[0];
  c[1] = C.thread_elements()[1];
}

// The left factor of a product, R x K, in registers.
template <typename T, int R, int K>
struct Operand {
  using Element = T;
  static constant constexpr const int DEPTH = K;
  float x[R / 8 * (K / 8) * 2];

  METAL_FUNC void piece(thread float* f, short i, short k, ushort) const {
    f[0] = x[(i * (K / 8) + k) * 2];
    f[1] = x[(i * (K / 8) + k) * 2 + 1];
  }

  // Rows from `rows` on are zero.
  METAL_FUNC void load(const device T* source, int ld, int rows, ushort index) {
    const Lane lane(index);
#pragma unroll
    for (short i = 0; i < R / 8; i++) {
      const short row = i * 8 + lane.row;
#pragma unroll
      for (short k = 0; k < K / 8; k++) {
        const device T* pair = source + row * ld + k * 8 + lane.col;
        x[(i * (K / 8) + k) * 2] = row < rows ? float(pair[0]) : 0.0f;
        x[(i * (K / 8) + k) * 2 + 1] = row < rows ? float(pair[1]) : 0.0f;
      }
    }
  }
};

// The same, left in threadgroup memory.
template <typename T, int R, int K>
struct Staged {
  using Element = T;
  static constant constexpr const int DEPTH = K;
  const threadgroup T* rows;

  METAL_FUNC void piece(thread float* f, short i, short k, ushort index) const {
    const Lane lane(index);
    const threadgroup T* pair = rows + (i * 8 + lane.row) * Block<T, K>::PITCH + k * 8 + lane.col;
    f[0] = float(pair[0]);
    f[1] = float(pair[1]);
  }
};

template <typename T, int R, int K>
METAL_FUNC Operand<T, R, K> operand(const thread Tile<R, K>& tile) {
  Operand<T, R, K> result;
#pragma unroll
  for (short e = 0; e < tile.SIZE; e++) {
    result.x[e] = tile[e];
  }
  return result;
}

// PARTS, PART: of the depth, the part that is summed.
template <short PARTS = 1, short PART = 0, typename A, int R, int C>
METAL_FUNC void multiply_transposed(
    thread Tile<R, C>& s,
    const thread A& a,
    const threadgroup typename A::Element* b,
    ushort index) {
  static_assert(A::DEPTH % (16 * PARTS) == 0, "depths in steps of 16, as on CUDA");
  constexpr short PITCH = Block<typename A::Element, A::DEPTH>::PITCH, STEPS = A::DEPTH / 8 / PARTS;
  const Lane lane(index);
#pragma unroll
  for (short k = PART * STEPS; k < (PART + 1) * STEPS; k++) {
#pragma unroll
    for (short j = 0; j < C / 8; j++) {
      const threadgroup typename A::Element* first = b + (j * 8 + lane.col) * PITCH + k * 8 + lane.row;
      const float right[2] = {float(first[0]), float(first[PITCH])};
#pragma unroll
      for (short i = 0; i < R / 8; i++) {
        float left[2];
        a.piece(left, i, k, index);
        multiply_accumulate(s.piece(i, j), left, right);
      }
    }
  }
}

// In two sums, if it is a long one, which rounds less away.
template <typename A, int R, int C>
METAL_FUNC void product_transposed(
    thread Tile<R, C>& s,
    const thread A& a,
    const threadgroup typename A::Element* b,
    ushort index) {
  s.fill(0);
  if constexpr (A::DEPTH < 128) {
    multiply_transposed(s, a, b, index);
  } else {
    Tile<R, C> second;
    second.fill(0);
    multiply_transposed<2, 0>(s, a, b, index);
    multiply_transposed<2, 1>(second, a, b, index);
#pragma unroll
    for (short e = 0; e < s.SIZE; e++) {
      s[e] += second[e];
    }
  }
}

template <typename A, int R, int C>
METAL_FUNC void multiply(
    thread Tile<R, C>& o,
    const thread A& a,
    const threadgroup typename A::Element* b,
    ushort index) {
  static_assert(A::DEPTH % 16 == 0, "depths in steps of 16, as on CUDA");
  constexpr short PITCH = Block<typename A::Element, C>::PITCH;
  const Lane lane(index);
#pragma unroll
  for (short j = 0; j < C / 8; j++) {
#pragma unroll
    for (short k = 0; k < A::DEPTH / 8; k++) {
      const threadgroup typename A::Element* first = b + (k * 8 + lane.row) * PITCH + j * 8 + lane.col;
      const float right[2] = {float(first[0]), float(first[1])};
#pragma unroll
      for (short i = 0; i < R / 8; i++) {
        float left[2];
        a.piece(left, i, k, index);
        multiply_accumulate(o.piece(i, j), left, right);
      }
    }
  }
}

// A tile from a Block of its rows in threadgroup memory.
template <typename T, int R, int C>
METAL_FUNC void load_block(thread Tile<R, C>& s, const threadgroup T* block, ushort index) {
  using From = Block<T, C>;
  const Lane lane(index);
#pragma unroll
  for (short e = 0; e < s.SIZE; e += 2) {
    const short col = s.col(e, lane);
    load_pair(s[e], s[e + 1], block + From::at(s.row(e, lane), col / From::WIDTH) + col % From::WIDTH);
  }
}
