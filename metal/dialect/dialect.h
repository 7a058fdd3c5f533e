// The words that a kernel's text may use, on each backend. Apple's compiler knows them; for CUDA
// they are defined here. README.md lists them.
#pragma once
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#include "cuda.h"
#else
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
// A kernel's threadgroup memory, once per kernel: the word of both dialects.
#define THREADGROUP_MEMORY(T, name, size) threadgroup T name[size]
#endif
