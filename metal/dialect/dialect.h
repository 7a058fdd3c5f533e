// The words that a kernel's text may use, on each backend. Apple's compiler knows them; for CUDA
// cuda.h defines them.
#pragma once
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "cuda.h"
#else
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
// A kernel's threadgroup memory, once per kernel: the word of both dialects. It begins at a multiple
// of 16 bytes, since vectors of 16 are stored into it.
#define THREADGROUP_MEMORY(T, name, size)                                \
  threadgroup uint4 name##_vectors[((size) * sizeof(T) + 15) / 16];      \
  threadgroup T* const name = reinterpret_cast<threadgroup T*>(name##_vectors)
// Whether vectors of sixteen bytes may be read from here on.
template <typename T>
METAL_FUNC bool begins_vector(const device T* p) { return reinterpret_cast<size_t>(p) % 16 == 0; }
// W neighbouring elements, read at once from an address that is a multiple of their size or of 16.
template <typename T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Run {
  T x[W];
  METAL_FUNC float at(short e) const { return float(x[e]); }
  METAL_FUNC void set(short e, T value) { x[e] = value; }
};
// A number that is the same in all lanes of a simdgroup: CUDA's compiler has to be told.
METAL_FUNC int same_in_simdgroup(int x) { return x; }
#endif
