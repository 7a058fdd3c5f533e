// Every word of the tile vocabulary once, on one simdgroup, for a machine to be checked word by word:
// where a fragment's elements live is MLX's knowledge on Metal, not Apple's documentation.
#include "../tile/memory.h"
#include "../tile/multiply.h"
#include "../tile/reduce.h"
#include "../tile/scan.h"

// a (R, K), b (C, K), v (C, K); sizes {rows of a that count}: the others are taken as zero.
//   coordinates[r, c] = 100 r + c, from the elements' own coordinates
//   product = a b^T with a in registers, staged with a in threadgroup memory
//   largest[r], row_sum[r, c] over c' <= c, reverse_sum over c' >= c, column_sum over r' <= r, all of
//   product; the running sums start at 1
//   reverse_product[r, c] = product over c' >= c of 1 + product / 256, by b in Runs
//   weighted = a + product v, product rounded to T where the matrix unit wants that
template <typename T, int R, int C, int K>
[[kernel]] void tile_words(
    const device T* a [[buffer(0)]],
    const device T* b [[buffer(1)]],
    const device T* v [[buffer(2)]],
    const constant int* sizes [[buffer(3)]],
    device float* coordinates [[buffer(4)]],
    device float* product [[buffer(5)]],
    device float* staged_product [[buffer(6)]],
    device float* largest [[buffer(7)]],
    device float* row_sum [[buffer(8)]],
    device float* reverse_sum [[buffer(9)]],
    device float* column_sum [[buffer(10)]],
    device float* reverse_product [[buffer(11)]],
    device T* weighted [[buffer(12)]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  constexpr int PITCH = Block<T, K>::PITCH;
  THREADGROUP_MEMORY(T, memory, (R + C) * PITCH);
  threadgroup T* as = memory;
  threadgroup T* bs = memory + R * PITCH;
  const ushort index = thread_index_in_simdgroup;
  const Lane lane(index);

  copy_block<R, K, 32>(as, a, K, sizes[0], index);
  copy_block<C, K, 32>(bs, b, K, C, index);
  copy_wait();
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  Operand<T, R, K> held;
  held.load(a, K, sizes[0], index);
  Tile<R, C> s, t;
  s.fill(0);
  multiply_transposed(s, held, bs, index);
  store(s, product, C, R, index);
  Staged<T, R, K> staged;
  staged.rows = as;
  product_transposed(t, staged, bs, index);
  store(t, staged_product, C, R, index);

#pragma unroll
  for (short e = 0; e < t.SIZE; e++) {
    t[e] = 100 * t.row(e, lane) + t.col(e, lane);
  }
  store(t, coordinates, C, R, index);

  Rows<R> m(-INFINITY);
  reduce_rows<Max>(m, s);
#pragma unroll
  for (short i = 0; i < m.SIZE; i++) {
    if (lane.col == 0) {
      largest[m.row(i, lane)] = m[i];
    }
  }
  t = s;
  Rows<R> ones(1);
  scan_rows<false>(t, ones, index);
  store(t, row_sum, C, R, index);
  t = s;
  Rows<R> again(1);
  scan_rows<true>(t, again, index);
  store(t, reverse_sum, C, R, index);
  t = s;
  Cols<C> carry(1);
  scan_columns<true>(t, carry, index);
  store(t, column_sum, C, R, index);

  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  copy_block<C, K, 32, Runs<C>>(bs, b, K, C, index);
  copy_wait();
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  t.fill(0);
  multiply_transposed(t, held, bs, index);
  Rows<R> total(1), later(1);
#pragma unroll
  for (short i = 0; i < total.SIZE; i++) {
#pragma unroll
    for (short n = C / 4 - 1; n >= 0; n--) {
      total[i] *= 1 + t[t.at(i, n)] / 256;
      t[t.at(i, n)] = total[i];
    }
  }
  scan_lanes<Product, true>(later, total, index);
#pragma unroll
  for (short e = 0; e < t.SIZE; e++) {
    reverse_product[t.row(e, lane) * C + Runs<C>::row(t.col(e, lane))] = t[e] * later[t.row_index(e)];
  }

  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  copy_elements<C, K, 32>(bs, v, K, 1, C, index);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  Tile<R, K> o;
  load(o, a, K, sizes[0], index);
  multiply(o, operand<T>(s), bs, index);
  store(o, weighted, K, R, index);
}
