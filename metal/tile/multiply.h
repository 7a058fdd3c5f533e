// Matrix products of tiles on the matrix units: operands of type T, sums in float.
//
//   multiply_transposed(s, q, k, index)   s (R x C) += q (R x K)  k (C x K)^T
//   product_transposed(s, q, k, index)    s (R x C) = q (R x K)  k (C x K)^T, for what has to be exact
//   multiply(o, p, v, index)              o (R x C) += p (R x K)  v (K x C)
//   load_block(s, block, index)           s = a Block of R rows
// The right factor is a Block in threadgroup memory, of whole rows. The left factor is
//   Operand<T, R, K> q;  q.load(device rows)   or  operand<T>(tile)      held in registers
//   Staged<T, R, K> q{rows of a Block}                                   read again for each product
// `index` is the lane's.
#pragma once
#include "tile.h"
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "multiply_cuda.h"
#else
#include "multiply_metal.h"
#endif
