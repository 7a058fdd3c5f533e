// The interface between the stand-in for Apple's system headers and the executor.
// The headers call these functions; the executor (runtime/) defines them.
#pragma once

namespace metal_host {

/// Barriers and simdgroup operations are counted where the threads meet, once for all of them.
enum class Counter { multiply_accumulate, special_function };

/// Adds `n` to the counter of the running launch.
void count(Counter what, unsigned long long n);

/// The index of the running thread in its simdgroup.
unsigned lane();

/// `slots`: 32 slots of 64 bytes each, valid until this lane's next operation.
/// `active`: one bit for each lane that takes part.
struct Exchange {
  const unsigned char* slots;
  unsigned active;
};

/// Every live lane of the simdgroup deposits `size` bytes (at most 64) for one
/// operation and waits for the others. Lanes that meet in different operations
/// (kind, size or position in the sequence) are reported as divergence.
Exchange exchange(unsigned kind, const void* value, unsigned size);

void threadgroup_barrier(unsigned flags);
void simdgroup_barrier(unsigned flags);

/// Comes before each atomic operation: another thread may run first.
void atomic_access();

}  // namespace metal_host
