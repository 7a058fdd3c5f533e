// The threads of one threadgroup: who runs next, who waits for whom, who diverged.
#pragma once

#include "position.h"
#include "request.h"

/// The source position of the last call from a kernel's own text into a system header.
extern "C" unsigned metal_host_site;

namespace metal_host {

constexpr unsigned simd_width = 32;
constexpr unsigned most_threads = 1024;

/// What a thread waits at. Python names them in reports.
enum class Wait : u32 { nothing, operation, simdgroup_barrier, threadgroup_barrier, ended };

/// Counts the memory barriers passed: of the threadgroup (never reset within a launch: accesses
/// of different threadgroups have different epochs) and of one simdgroup.
struct Epochs {
  u32 device = 1, threadgroup = 1;
  void pass(unsigned flags);
};

struct Thread {
  void* stack_pointer;
  Position position;
  u32 index, lane, simdgroup;
  u32 site;     // of the call that it waits in
  u32 atomics, accesses;  // since it last met others
  Wait wait;
};

struct Simdgroup {
  u32 live, waiting;  // bit per lane
  Wait wait;          // what the waiting ones wait at
  u32 kind, size, site, first;
  u32 active;  // lanes of the last operation
  u32 turn;    // which half of `slots` is being filled
  Epochs epochs;
  alignas(64) u8 slots[2][simd_width][64];
};

struct Threads {
  Thread threads[most_threads];
  Simdgroup simdgroups[most_threads / simd_width];
  Thread* running;
  u32 count, ready_count;
  u32 ready[most_threads];
  u32 ended, last_ended, at_barrier, first_at_barrier;
  Epochs epochs, start;  // now, and when this threadgroup began
  u32 threadgroup[3];
  u64 barriers, operations;
  u64 random;
};

extern Threads group;
extern Fault raised;  // of the running launch

/// Runs `kernel` in every thread of a threadgroup. Returns early after a fault.
void run_threadgroup(void (*kernel)(), const u32 position[3], const u32 size[3]);

/// Lets another thread run, any one that can.
void step_aside();

/// Ends the launch with this fault; `fault` has the running thread for its party.
[[noreturn]] void raise(FaultKind kind, Fault fault);

/// The running thread, for a report.
Party running_party(u32 site, u32 access);

u64 next_random(u64& state);

}  // namespace metal_host
