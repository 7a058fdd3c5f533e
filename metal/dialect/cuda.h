// Metal's words in CUDA C++ for mx.fast.cuda_kernel, those that the kernels use: address spaces,
// positions, barriers, SIMD-group functions, mathematics. A simdgroup is a warp, a threadgroup a
// block, threadgroup memory the block's dynamic shared memory.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// `device` becomes a word of Metal below, which would empty the attribute in CUDA's own macro.
#undef __device__
#define METAL_FUNC __attribute__((__device__)) __forceinline__
using ushort = unsigned short;
using uint = unsigned int;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define M_LOG2E_F 1.44269504f

#define THREADGROUP_MEMORY(T, name, size)                              \
  extern __shared__ __align__(16) unsigned char name##_of_block[];     \
  T* const name = reinterpret_cast<T*>(name##_of_block)

// What instructions on shared memory take for an address.
METAL_FUNC uint shared_address(const void* p) { return uint(__cvta_generic_to_shared(p)); }
// Whether vectors of sixteen bytes may be read from here on.
METAL_FUNC bool begins_vector(const void* p) { return reinterpret_cast<size_t>(p) % 16 == 0; }

// The same bits as another type.
template <typename To, typename From>
METAL_FUNC To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  return *reinterpret_cast<const To*>(&x);
}
// W neighbouring elements, read at once from an address that is a multiple of their size or of 16. They stay in
// words: on the way round a loop the compiler would give each half of one a register.
template <typename T, int W>
struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Run {
  uint words[W * sizeof(T) / 4];
  METAL_FUNC float at(short e) const {
    if constexpr (sizeof(T) == 4) {
      return as_type<T>(words[e]);
    } else {
      return float(as_type<T>(ushort(words[e / 2] >> (e % 2 * 16))));
    }
  }
  METAL_FUNC void set(short e, T value) {
    if constexpr (sizeof(T) == 4) {
      words[e] = as_type<uint>(value);
    } else {
      const uint bits = as_type<ushort>(value);
      words[e / 2] = e % 2 == 0 ? bits : words[e / 2] | bits << 16;
    }
  }
};

namespace metal {
enum class mem_flags { mem_none, mem_threadgroup, mem_device };

METAL_FUNC float min(float a, float b) { return fminf(a, b); }
METAL_FUNC float max(float a, float b) { return fmaxf(a, b); }
METAL_FUNC int min(int a, int b) { return a < b ? a : b; }
METAL_FUNC int max(int a, int b) { return a < b ? b : a; }
METAL_FUNC float abs(float x) { return fabsf(x); }
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }

namespace fast {
// One special-function instruction, about two ulp; denormal results become zero.
METAL_FUNC float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The same for a quotient.
METAL_FUNC float divide(float x, float y) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
  return x * r;
}
} // namespace fast

template <typename T>
METAL_FUNC T simd_shuffle_xor(T x, ushort mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
template <typename T>
METAL_FUNC T simd_shuffle(T x, ushort lane) { return __shfl_sync(0xffffffffu, x, lane); }
METAL_FUNC bool simd_any(bool x) { return __any_sync(0xffffffffu, x); }

METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }
} // namespace metal

// A number that is the same in all lanes of a simdgroup, so that the compiler knows: it then needs no code for
// lanes that go apart.
METAL_FUNC int same_in_simdgroup(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// What follows are macros, so it comes after everything that is included.
#define device
#define constant
#define threadgroup
#define thread
#define threadgroup_position_in_grid make_uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threadgroups_per_grid make_uint3(gridDim.x, gridDim.y, gridDim.z)
// Threadgroups have one axis: Kernel refuses others.
#define thread_index_in_threadgroup (threadIdx.x)
#define thread_index_in_simdgroup (threadIdx.x % 32)
#define simdgroup_index_in_threadgroup (threadIdx.x / 32)
