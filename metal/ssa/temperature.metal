// Selective self-attention's temperature: each row of x times its number, out = x tau, formed in
// float and rounded once. Elementwise, so the cost is one reading and one writing of x.
#include "../tile/row.h"

// x (B, H, T, D), any strides; tau (B H T), float; sizes {T}; out (B, H, T, D), row-contiguous. A
// simdgroup takes ROWS rows of one head. Grid: ceil(T / (4 ROWS)) threadgroups of four simdgroups,
// H, B.
template <typename T, int D, int ROWS>
[[kernel]] void ssa_temperature(
    const device T* x [[buffer(0)]],
    const constant int64_t* x_strides [[buffer(1)]],
    const device float* tau [[buffer(2)]],
    const constant int* sizes [[buffer(3)]],
    device T* out [[buffer(4)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  const int first = (threadgroup_position_in_grid.x * 4 + simdgroup_index_in_threadgroup) * ROWS;
  const int head = threadgroup_position_in_grid.z * threadgroups_per_grid.y + threadgroup_position_in_grid.y;
  const device T* source = x + threadgroup_position_in_grid.z * x_strides[0] +
      threadgroup_position_in_grid.y * x_strides[1] + first * x_strides[2];
  const long start = long(head) * sizes[0] + first; // the first row, of all
  const int rows = metal::min(sizes[0] - first, ROWS);

  // All rows are on their way before the first is used.
  Row<D> row[ROWS];
#pragma unroll
  for (short r = 0; r < ROWS; r++) {
    if (r < rows) {
      row[r].load(source + r * x_strides[2], x_strides[3], thread_index_in_simdgroup);
    }
  }
#pragma unroll
  for (short r = 0; r < ROWS; r++) {
    if (r < rows) {
      const float temperature = tau[start + r];
#pragma unroll
      for (short e = 0; e < row[r].SIZE; e++) {
        row[r][e] *= temperature;
      }
      row[r].store(out + (start + r) * D, thread_index_in_simdgroup);
    }
  }
}
