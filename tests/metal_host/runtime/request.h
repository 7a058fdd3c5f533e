// What Python hands over for a launch and what it gets back; request.py mirrors these structs.
#pragma once

#include "position.h"

namespace metal_host {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

/// The address spaces' numbers; `own` is Metal's `thread`.
enum class Space : u32 { own, device, constant, threadgroup };

/// What is known of a byte of a buffer.
enum class ByteState : u8 { unwritten = 0, initialised = 1, outside = 2 };

struct Buffer {
  u8* data;
  u64 size;
  ByteState* state;  // of each byte; null: all are initialised
  Space space;
  u32 read_only;
  u64 start;  // byte that the kernel's pointer points to
  u64 read, written;  // bytes, counted by the launch
};

enum class FaultKind : u32 {
  none,
  race,
  out_of_bounds,
  uninitialised_read,
  divergent_barrier,
  divergent_simdgroup_operation,
  deadlock,
  address_space,  // a write to what may only be read
  misaligned_access,
  division_by_zero,
};

/// Bits that say what an access does; instrumentation.py passes them.
enum AccessKind : u32 { reads = 1, writes = 2, atomically = 4 };
/// Where the alignment stands in the same number, and what is left without it.
constexpr u32 alignment_bits = 8, kind_mask = (1u << alignment_bits) - 1;

struct Party {
  u32 threadgroup[3];
  u32 thread;  // index in its threadgroup
  u32 site;    // index into the table of source positions
  u32 access;  // AccessKind bits, or what a thread waits at (Wait)
};

constexpr u32 no_index = ~0u;

/// One fault. `region`: index of the buffer or of the threadgroup array, or none.
struct Fault {
  FaultKind kind;
  Space space;
  u32 region;
  u32 size;
  long long offset;  // in bytes from the region's start; in a thread's own array, the index
  Party party, other;
  u32 has_other;
  u32 aligned;  // what a misaligned address should be a multiple of
};

/// A threadgroup array or a constant of the program. variables.py emits the tables.
struct ProgramArray {
  void* data;
  u64 size;
};

using KernelFunction = void(void* const* buffers, const Position& position);

struct Request {
  KernelFunction* function;
  Buffer* buffers;
  const ProgramArray* array_table;
  const ProgramArray* constants;
  const u32* arrays;  // the threadgroup arrays that the kernel uses: indices into the table
  u32 buffer_count, array_count, constant_count;
  u32 grid[3];         // in threads
  u32 threadgroup[3];  // in threads
  u64 seed;
  // Results:
  u64 multiply_accumulates, special_functions, barriers, simd_operations;
  u64 threadgroup_read, threadgroup_written;
  Fault fault;
};

}  // namespace metal_host
