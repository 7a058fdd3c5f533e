// What instrumented kernels call, and the counters.

#include "../include/runtime.h"
#include "memory.h"

namespace metal_host {

u64 multiply_accumulates, special_functions;

namespace {

// Of one thread without meeting others: more, and it spins.
constexpr u32 most_atomics = 1 << 20, most_accesses = 1 << 24;
constexpr u32 patience = 1 << 16;  // accesses until others may run

/// A thread that waits for plain memory to change must let others change it.
void let_others_run(u32 kind, u32 site) {
  u32 count = ++group.running->accesses;
  if (count > most_accesses) {
    Fault fault{};
    fault.party = running_party(site, kind);
    raise(FaultKind::deadlock, fault);
  }
  // Not inside of an atomic operation, which is one.
  if (count % patience == 0 && !(kind & atomically)) step_aside();
}

void access(Space space, void* pointer, u64 size, u32 packed, u32 site) {
  u32 kind = packed & kind_mask;
  let_others_run(kind, site);
  memory.access({space, static_cast<u8*>(pointer), size, kind, site, packed >> alignment_bits});
}

}  // namespace

void count(Counter what, unsigned long long n) {
  (what == Counter::multiply_accumulate ? multiply_accumulates : special_functions) += n;
}

void atomic_access() {
  if (++group.running->atomics > most_atomics) {
    Fault fault{};
    fault.party = running_party(metal_host_site, atomically);
    raise(FaultKind::deadlock, fault);
  }
  step_aside();  // others may come first
}

// For pointers without an address space, by what lies there or near; a thread's own memory is free.
extern "C" void metal_host_access_0(void* pointer, u64 size, u32 kind, u32 site) {
  const Space spaces[] = {Space::device, Space::constant, Space::threadgroup};
  for (Space space : spaces)
    if (memory.is_near(space, static_cast<u8*>(pointer))) access(space, pointer, size, kind, site);
}

// One hook for each address space, so that the compiler's intermediate code needs no casts.
extern "C" {

void metal_host_access_1(void* pointer, u64 size, u32 kind, u32 site) {
  access(Space::device, pointer, size, kind, site);
}

void metal_host_access_2(void* pointer, u64 size, u32 kind, u32 site) {
  access(Space::constant, pointer, size, kind, site);
}

void metal_host_access_3(void* pointer, u64 size, u32 kind, u32 site) {
  access(Space::threadgroup, pointer, size, kind, site);
}

void metal_host_index(u64 index, u64 size, u32 site) {
  if (index < size) return;
  Fault fault{};
  fault.space = Space::own;
  fault.offset = static_cast<long long>(index);
  fault.size = u32(size);
  fault.party = running_party(site, 0);
  raise(FaultKind::out_of_bounds, fault);
}

void metal_host_divisor(u64 divisor, u32 site) {
  if (divisor) return;
  Fault fault{};
  fault.party = running_party(site, 0);
  raise(FaultKind::division_by_zero, fault);
}

void metal_host_multiply_accumulate(u64 n) { multiply_accumulates += n; }
}

}  // namespace metal_host
