// Matrix products on mma.sync: 16 x 8 x 16 for half and bfloat, 16 x 8 x 8 (TF32, three products for
// float's precision) for float. Right factors come as two neighbouring 8-column fragments at a time.
#pragma once
#include "block.h"
#include "memory.h"
#include "tile.h"

// How operands of type T are stored in registers and multiplied.
template <typename T>
struct MatrixUnit {
  using Word = uint; // two elements
  static constexpr short DEPTH = 16;

  METAL_FUNC static void multiply_accumulate(float* c, const Word* a, const Word* b);
  METAL_FUNC static Word pack(float a, float b);

  METAL_FUNC static Word pair(const T* p) { return *reinterpret_cast<const Word*>(p); }

  METAL_FUNC static void load4(Word* f, uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address) : "memory");
  }
  METAL_FUNC static void load4_transposed(Word* f, uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3]) : "r"(address) : "memory");
  }

  // The address of a vector, `first` rows below the lane's own row. What differs between lanes goes
  // through an instruction that hides it, or the compiler would mix it with what is a constant.
  template <int COLS>
  METAL_FUNC static uint place(const T* block, short first, short row, short vector, short in_pair) {
    using In = Block<T, COLS>;
    constexpr short DISTINCT = In::SWIZZLED ? 8 : 2;
    uint lane;
    const uint start = shared_address(block) + sizeof(T) * In::at(row, vector % DISTINCT + in_pair);
    asm("mov.b32 %0, %1;" : "=r"(lane) : "r"(start));
    return lane + sizeof(T) * (first * In::PITCH + vector / DISTINCT * DISTINCT * In::WIDTH);
  }

  // 16 x 16 of the left factor, from rows of K elements in threadgroup memory.
  template <int K>
  METAL_FUNC static void left(Word* f, const T* a, short row, short col, ushort index) {
    load4(f, place<K>(a, row, index % 16, col / 8, index / 16));
  }
  // 16 columns of the right factor from 16 rows of its transpose ...
  template <int K>
  METAL_FUNC static void right_transposed(Word* f, const T* b, short row, short col, ushort index) {
    load4(f, place<K>(b, row, index % 8 + index / 16 * 8, col / 8, index / 8 % 2));
  }
  // ... or from its own rows.
  template <int C>
  METAL_FUNC static void right(Word* f, const T* b, short row, short col, ushort index) {
    load4_transposed(f, place<C>(b, row, index % 16, col / 8, index / 16));
  }
  // The accumulators of two neighbouring fragments, rounded to T: the left factor of the next product.
  METAL_FUNC static void from_accumulators(Word* f, const float* c) {
    f[0] = pack(c[0], c[1]);
    f[1] = pack(c[2], c[3]);
    f[2] = pack(c[4], c[5]);
    f[3] = pack(c[6], c[7]);
  }
  METAL_FUNC static void to_accumulators(float* c, const Word* f) {
#pragma unroll
    for (short i = 0; i < 4; i++) {
      load_pair(c[2 * i], c[2 * i + 1], reinterpret_cast<const T*>(f + i));
    }
  }
  // A lane's pairs of a 16 x 16 block in device memory.
  METAL_FUNC static void left_device(Word* f, const T* a, int ld, Lane lane, bool first, bool second) {
    const T* p = a + lane.row * ld + lane.col;
    f[0] = first ? pair(p) : 0;
    f[1] = second ? pair(p + 8 * ld) : 0;
    f[2] = first ? pair(p + 8) : 0;
    f[3] = second ? pair(p + 8 * ld + 8) : 0;
  }
};

#define MATRIX_PRODUCT(T, TYPE)                                                                   \
  template <>                                                                                     \
  METAL_FUNC void MatrixUnit<T>::multiply_accumulate(float* c, const Word* a, const Word* b) {    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "                   \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));             \
  }
MATRIX_PRODUCT(__half, "f16")
MATRIX_PRODUCT(__nv_bfloat16, "bf16")
#undef MATRIX_PRODUCT

template <>
METAL_FUNC uint MatrixUnit<__half>::pack(float a, float b) {
  const __half2 both = __floats2half2_rn(a, b);
  return *reinterpret_cast<const uint*>(&both);
}
template <>
METAL_FUNC uint MatrixUnit<__nv_bfloat16>::pack(float a, float b) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
  return *reinterpret_cast<const uint*>(&both);
}

// float: x = big + small, both TF32; big*big + big*small + small*big. The sum over the depth may go
// in any order, so a lane's neighbours 2t and 2t + 1 stand where the unit has t and t + 4.
template <>
struct MatrixUnit<float> {
  using Word = float;
  static constexpr short DEPTH = 8;

  METAL_FUNC static uint rounded(float x) {
    uint y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
  }
  METAL_FUNC static void product(float* c, const uint* a, const uint* b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  METAL_FUNC static void multiply_accumulate(float* c, const Word* a, const Word* b) {
    uint big_a[4], small_a[4], big_b[2], small_b[2];
#pragma unroll
    for (short i = 0; i < 4; i++) {
      big_a[i] = rounded(a[i]);
      small_a[i] = rounded(a[i] - __uint_as_float(big_a[i]));
    }
#pragma unroll
    for (short i = 0; i < 2; i++) {
      big_b[i] = rounded(b[i]);
      small_b[i] = rounded(b[i] - __uint_as_float(big_b[i]));
    }
    // A sum of their own: the unit truncates what it adds to, which a long sum would feel.
    float sum[4] = {0, 0, 0, 0};
    product(sum, small_a, big_b);
    product(sum, big_a, small_b);
    product(sum, big_a, big_b);
#pragma unroll
    for (short i = 0; i < 4; i++) {
      c[i] += sum[i];
    }
  }
  template <int K>
  METAL_FUNC static void left(Word* f, const float* a, short row, short col, ushort index) {
    constexpr short PITCH = Block<float, K>::PITCH;
    const Lane lane(index);
    left_device(f, a + row * PITCH + col, PITCH, lane, true, true);
  }
  template <int K>
  METAL_FUNC static void right_transposed(Word* f, const float* b, short row, short col, ushort index) {
    constexpr short PITCH = Block<float, K>::PITCH;
    const Lane lane(index);
    const float* p = b + (row + lane.row) * PITCH + col + lane.col;
    f[0] = p[0];
    f[1] = p[1];
    f[2] = p[8 * PITCH];
    f[3] = p[8 * PITCH + 1];
  }
  template <int C>
  METAL_FUNC static void right(Word* f, const float* b, short row, short col, ushort index) {
    constexpr short PITCH = Block<float, C>::PITCH;
    const Lane lane(index);
    const float* p = b + (row + lane.col) * PITCH + col + lane.row;
    f[0] = p[0];
    f[1] = p[PITCH];
    f[2] = p[8];
    f[3] = p[PITCH + 8];
  }
  METAL_FUNC static void from_accumulators(Word* f, const float* c) {
    f[0] = c[0];
    f[1] = c[2];
    f[2] = c[1];
    f[3] = c[3];
  }
  METAL_FUNC static void to_accumulators(float* c, const Word* f) {
    c[0] = f[0];
    c[2] = f[1];
    c[1] = f[2];
    c[3] = f[3];
  }
  METAL_FUNC static void left_device(Word* f, const float* a, int ld, Lane lane, bool first, bool second) {
    const float* p = a + lane.row * ld + lane.col;
    f[0] = first ? p[0] : 0;
    f[1] = second ? p[8 * ld] : 0;
    f[2] = first ? p[1] : 0;
    f[3] = second ? p[8 * ld + 1] : 0;
  }
};

// The left factor of a product, R x K, in registers.
template <typename T, int R, int K>
struct Operand {
  using Element = T;
  using Unit = MatrixUnit<T>;
  static constexpr int DEPTH = K;
  typename Unit::Word x[R / 16 * (K / Unit::DEPTH) * 4];

  METAL_FUNC void piece(typename Unit::Word* f, short i, short k, ushort) const {
#pragma unroll
    for (short e = 0; e < 4; e++) {
      f[e] = x[(i * (K / Unit::DEPTH) + k) * 4 + e];
    }
  }
  // Rows from `rows` on are zero.
  METAL_FUNC void load(const T* source, int ld, int rows, ushort index) {
    const Lane lane(index);
#pragma unroll
    for (short i = 0; i < R / 16; i++) {
      const short row = i * 16 + lane.row;
#pragma unroll
      for (short k = 0; k < K / Unit::DEPTH; k++) {
        Unit::left_device(x + (i * (K / Unit::DEPTH) + k) * 4, source + i * 16 * ld + k * Unit::DEPTH,
                          ld, lane, row < rows, row + 8 < rows);
      }
    }
  }
};

// The same, left in threadgroup memory.
template <typename T, int R, int K>
struct Staged {
  using Element = T;
  using Unit = MatrixUnit<T>;
  static constexpr int DEPTH = K;
  const T* rows;

  METAL_FUNC void piece(typename Unit::Word* f, short i, short k, ushort index) const {
    Unit::template left<K>(f, rows, i * 16, k * Unit::DEPTH, index);
  }
};

template <typename T, int R, int K>
METAL_FUNC Operand<T, R, K> operand(const Tile<R, K>& tile) {
  using Unit = MatrixUnit<T>;
  Operand<T, R, K> result;
#pragma unroll
  for (short f = 0; f < R / 16 * (K / Unit::DEPTH); f++) {
    Unit::from_accumulators(result.x + f * 4, tile.x + f * (Unit::DEPTH / 8) * 4);
  }
  return result;
}

template <typename A, int R, int C>
METAL_FUNC void multiply_transposed(
    Tile<R, C>& s, const A& a, const typename A::Element* b, ushort index) {
  using Unit = MatrixUnit<typename A::Element>;
  static_assert(C % 16 == 0 && A::DEPTH % 16 == 0, "right factors come 16 x 16 at a time");
#pragma unroll
  for (short k = 0; k < A::DEPTH / Unit::DEPTH; k++) {
    typename Unit::Word left[R / 16][4];
#pragma unroll
    for (short i = 0; i < R / 16; i++) {
      a.piece(left[i], i, k, index);
    }
#pragma unroll
    for (short j = 0; j < C / 16; j++) {
      typename Unit::Word right[4];
      Unit::template right_transposed<A::DEPTH>(right, b, j * 16, k * Unit::DEPTH, index);
#pragma unroll
      for (short i = 0; i < R / 16; i++) {
        Unit::multiply_accumulate(s.piece(i, 2 * j), left[i], right);
        Unit::multiply_accumulate(s.piece(i, 2 * j + 1), left[i], right + 2);
      }
    }
  }
}

// No sum is long here: the unit adds 8 or 16 products before they are added to it.
template <typename A, int R, int C>
METAL_FUNC void product_transposed(
    Tile<R, C>& s, const A& a, const typename A::Element* b, ushort index) {
  s.fill(0);
  multiply_transposed(s, a, b, index);
}

template <typename A, int R, int C>
METAL_FUNC void multiply(Tile<R, C>& o, const A& a, const typename A::Element* b, ushort index) {
  using Unit = MatrixUnit<typename A::Element>;
  static_assert(C % 16 == 0 && A::DEPTH % 16 == 0, "right factors come 16 x 16 at a time");
#pragma unroll
  for (short k = 0; k < A::DEPTH / Unit::DEPTH; k++) {
    typename Unit::Word left[R / 16][4];
#pragma unroll
    for (short i = 0; i < R / 16; i++) {
      a.piece(left[i], i, k, index);
    }
#pragma unroll
    for (short j = 0; j < C / 16; j++) {
      typename Unit::Word right[4];
      Unit::template right<C>(right, b, k * Unit::DEPTH, j * 16, index);
#pragma unroll
      for (short i = 0; i < R / 16; i++) {
        Unit::multiply_accumulate(o.piece(i, 2 * j), left[i], right);
        Unit::multiply_accumulate(o.piece(i, 2 * j + 1), left[i], right + 2);
      }
    }
  }
}

// A tile from a Block of its rows in threadgroup memory.
template <typename T, int R, int C>
METAL_FUNC void load_block(Tile<R, C>& s, const T* block, ushort index) {
  using Unit = MatrixUnit<T>;
#pragma unroll
  for (short i = 0; i < R / 16; i++) {
#pragma unroll
    for (short j = 0; j < C / Unit::DEPTH; j++) {
      typename Unit::Word f[4];
      Unit::template left<C>(f, block, i * 16, j * Unit::DEPTH, index);
      Unit::to_accumulators(s.piece(i, j * (Unit::DEPTH / 8)), f);
    }
  }
}
