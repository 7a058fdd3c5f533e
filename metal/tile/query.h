// Single queries over keys that lie in device memory: HEADS of them share a head of keys, a simdgroup takes 32
// keys at a time. While products are formed eight lanes share a key, so that rows are read in runs; then each
// lane has the logits of one key, so that each weight is formed once.
//
//   Query<D, HEADS> query;  query.load(q, lane);
//   Rows32<T, D> ks, vs;  ks.template read<true>(keys, first, end, lane);  and values
//   float z[HEADS];  query.logits(z, ks, lane);        // of key first + query.own(lane)
//   query.add(z, vs, lane);                            // z: weights by now
//   query.gather(memory, h, lane);                     // D sums to threadgroup memory
#pragma once
#include "row.h"

// Rows of elements: where they are, from row to row, and from element to element.
template <typename T>
struct RowsOf {
  const device T* start;
  int row, element;

  METAL_FUNC RowsOf(const device T* first, long from_row, long from_element)
      : start(first), row(from_row), element(from_element) {}

  // Whether runs of neighbours may be read at once.
  METAL_FUNC bool in_vectors() const {
    return element == 1 && row * int(sizeof(T)) % 16 == 0 && begins_vector(start);
  }
};

// A lane's parts of 32 rows, as they are in memory.
template <typename T, int D>
struct Rows32 {
  static constant constexpr const short W = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2; // read at once
  Run<T, W> x[8][D / 8 / W];

  METAL_FUNC float at(short c, short e) const { return x[c][e / W].at(e % W); }

  // From `first` on; beyond `end` the last one again. VECTORS: as rows.in_vectors() says.
  template <bool VECTORS>
  METAL_FUNC void read(RowsOf<T> rows, int first, int end, ushort lane) {
    const short part = lane % 8;
    const int mine = first + lane / 8, last = end - 1 - mine;
    const device T* start = rows.start + long(mine) * rows.row;
#pragma unroll
    for (short c = 0; c < 8; c++) {
      const device T* source = start + long(metal::min(4 * c, last)) * rows.row;
      if constexpr (VECTORS) {
#pragma unroll
        for (short r = 0; r < D / 8 / W; r++) {
          x[c][r] = *reinterpret_cast<const device Run<T, W>*>(source + (r * 8 + part) * W);
        }
      } else {
#pragma unroll
        for (short e = 0; e < D / 8; e++) {
          x[c][e / W].set(e % W, source[(e / W * 8 * W + part * W + e % W) * rows.element]);
        }
      }
    }
  }
};

template <int D, int HEADS>
struct Query {
  static constant constexpr const short W = Rows32<float, D>::W;
  static constant constexpr const short SIZE = D / 8; // elements of a lane
  float q[HEADS][SIZE], o[HEADS][SIZE];

  // Which of the 32 keys the lane has the logits of.
  METAL_FUNC static short own(ushort lane) { return lane % 8 * 4 + lane / 8; }
  METAL_FUNC static short element(short e, ushort lane) { return e / W * 8 * W + lane % 8 * W + e % W; }

  // q (HEADS, D), row-contiguous.
  template <typename T>
  METAL_FUNC void load(const device T* source, ushort lane) {
#pragma unroll
    for (short h = 0; h < HEADS; h++) {
#pragma unroll
      for (short e = 0; e < SIZE; e++) {
        q[h][e] = float(source[h * D + element(e, lane)]);
        o[h][e] = 0;
      }
    }
  }

  // The products with the lane's own key.
  template <typename T>
  METAL_FUNC void logits(thread float* z, const thread Rows32<T, D>& keys, ushort lane) const {
#pragma unroll
    for (short c = 0; c < 8; c++) {
      float x[SIZE];
#pragma unroll
      for (short e = 0; e < SIZE; e++) {
        x[e] = keys.at(c, e);
      }
#pragma unroll
      for (short h = 0; h < HEADS; h++) {
        float product = 0;
#pragma unroll
        for (short e = 0; e < SIZE; e++) {
          product = metal::fma(q[h][e], x[e], product);
        }
        product += metal::simd_shuffle_xor(product, ushort(1));
        product += metal::simd_shuffle_xor(product, ushort(2));
        product += metal::simd_shuffle_xor(product, ushort(4));
        z[h] = lane % 8 == c ? product : z[h];
      }
    }
  }

  METAL_FUNC void rescale(short h, float factor) {
#pragma unroll
    for (short e = 0; e < SIZE; e++) {
      o[h][e] *= factor;
    }
  }

  // o += weights values, the weights being those of the lanes' own keys, 0 beyond the last.
  template <typename T>
  METAL_FUNC void add(const thread float* weights, const thread Rows32<T, D>& values, ushort lane) {
#pragma unroll
    for (short c = 0; c < 8; c++) {
      float x[SIZE];
#pragma unroll
      for (short e = 0; e < SIZE; e++) {
        x[e] = values.at(c, e);
      }
#pragma unroll
      for (short h = 0; h < HEADS; h++) {
        const float weight = metal::simd_shuffle(weights[h], ushort(lane / 8 * 8 + c));
#pragma unroll
        for (short e = 0; e < SIZE; e++) {
          o[h][e] = metal::fma(weight, x[e], o[h][e]);
        }
      }
    }
  }

  // The simdgroup's D sums of head h.
  METAL_FUNC void gather(threadgroup float* sums, short h, ushort lane) {
#pragma unroll
    for (short e = 0; e < SIZE; e++) {
      o[h][e] += metal::simd_shuffle_xor(o[h][e], ushort(8));
      o[h][e] += metal::simd_shuffle_xor(o[h][e], ushort(16));
      if (lane < 8) {
        sums[element(e, lane)] = o[h][e];
      }
    }
  }
};
