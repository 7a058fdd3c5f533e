#include "threads.h"

#include <string.h>

#include "../include/runtime.h"
#include "fiber.h"

unsigned metal_host_site;

namespace metal_host {

Threads group;
Fault raised;

namespace {

constexpr unsigned mem_device = 1, mem_threadgroup = 2;  // metal::mem_flags

Stacks stacks;
void* outside;           // stack pointer of the launch
void (*kernel_entry)();  // of the running launch

Simdgroup& simdgroup_of(const Thread& thread) { return group.simdgroups[thread.simdgroup]; }

void make_ready(Thread& thread) {
  thread.wait = Wait::nothing;
  group.ready[group.ready_count++] = thread.index;
}

void resume(Thread& next, void** from) {
  group.running = &next;
  metal_host_site = next.site;
  metal_host_switch(from, next.stack_pointer);
}

/// Leaves the running thread for any that can run.
void run_another(Thread& self) {
  if (group.ready_count == 0) {
    Fault fault{};
    fault.party = running_party(self.site, u32(self.wait));
    raise(FaultKind::deadlock, fault);
  }
  u32 choice = u32(next_random(group.random) % group.ready_count);
  Thread& next = group.threads[group.ready[choice]];
  group.ready[choice] = group.ready[--group.ready_count];
  if (&next == &self) return;
  resume(next, &self.stack_pointer);
}

void release_simdgroup(Simdgroup& simdgroup) {
  if (simdgroup.wait == Wait::operation) {
    ++group.operations;
    simdgroup.active = simdgroup.waiting;
    for (unsigned lane = 0; lane < simd_width; ++lane)  // nothing to be had from absent lanes
      if (!(simdgroup.active >> lane & 1)) memset(simdgroup.slots[simdgroup.turn][lane], 0xff, 64);
    simdgroup.turn ^= 1;
  } else {
    simdgroup.epochs.pass(simdgroup.kind);  // the barrier's flags
  }
  u32 base = u32(&simdgroup - group.simdgroups) * simd_width;
  for (unsigned lane = 0; lane < simd_width; ++lane)
    if (simdgroup.waiting >> lane & 1) make_ready(group.threads[base + lane]);
  simdgroup.waiting = 0;
  simdgroup.wait = Wait::nothing;
}

void release_threadgroup(unsigned flags) {
  ++group.barriers;
  group.epochs.pass(flags);
  for (u32 i = 0; i < group.count; ++i) make_ready(group.threads[i]);
  for (u32 i = 0; i * simd_width < group.count; ++i) {
    group.simdgroups[i].waiting = 0;
    group.simdgroups[i].wait = Wait::nothing;
  }
  group.at_barrier = 0;
}

[[noreturn]] void report_divergence(const Thread& other, Wait mine) {
  bool barriers = mine != Wait::operation && other.wait != Wait::operation;
  Fault fault{};
  fault.has_other = 1;
  fault.other = running_party(other.site, u32(other.wait));
  fault.other.thread = other.index;
  fault.party = running_party(metal_host_site, u32(mine));
  raise(barriers ? FaultKind::divergent_barrier : FaultKind::divergent_simdgroup_operation, fault);
}

/// The running thread joins the others of its simdgroup, which must all be at the same place.
Simdgroup& meet(Wait wait, u32 kind, u32 size) {
  Thread& self = *group.running;
  Simdgroup& simdgroup = simdgroup_of(self);
  if (simdgroup.waiting == 0) {
    simdgroup.wait = wait;
    simdgroup.kind = kind;
    simdgroup.size = size;
    simdgroup.site = metal_host_site;
    simdgroup.first = self.index;
  } else if (simdgroup.wait != wait || simdgroup.kind != kind || simdgroup.size != size ||
             simdgroup.site != metal_host_site) {
    report_divergence(group.threads[simdgroup.first], wait);
  }
  simdgroup.waiting |= 1u << self.lane;
  self.wait = wait;
  self.site = metal_host_site;
  self.atomics = self.accesses = 0;
  return simdgroup;
}

/// A thread that has ended takes no part in its simdgroup's operations, but a barrier needs it.
void end_thread() {
  Thread& self = *group.running;
  Simdgroup& simdgroup = simdgroup_of(self);
  self.wait = Wait::ended;
  ++group.ended;
  group.last_ended = self.index;
  self.site = metal_host_site;
  if (group.at_barrier) report_divergence(group.threads[group.first_at_barrier], Wait::ended);
  if (simdgroup.wait == Wait::simdgroup_barrier)
    report_divergence(group.threads[simdgroup.first], Wait::ended);
  simdgroup.live &= ~(1u << self.lane);
  if (simdgroup.waiting && simdgroup.waiting == simdgroup.live) release_simdgroup(simdgroup);
  void* abandoned;
  if (group.ended == group.count) metal_host_switch(&abandoned, outside);
  run_another(self);
}

void run_thread() {
  kernel_entry();
  end_thread();
}

void place(Thread& thread, u32 index, const u32 corner[3], const u32 size[3]) {
  const u32 inside[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  Position& at = thread.position;
  for (int axis = 0; axis < 3; ++axis) {
    at.thread_position_in_threadgroup[axis] = inside[axis];
    at.thread_position_in_grid[axis] = corner[axis] + inside[axis];
    at.threads_per_threadgroup[axis] = size[axis];
    at.threadgroup_position_in_grid[axis] = group.threadgroup[axis];
  }
  at.thread_index_in_threadgroup[0] = index;
  at.thread_index_in_simdgroup[0] = index % simd_width;
  at.simdgroup_index_in_threadgroup[0] = index / simd_width;
  at.thread_index_in_quadgroup[0] = index % 4;
  at.quadgroup_index_in_threadgroup[0] = index / 4;
  at.simdgroups_per_threadgroup[0] = (group.count + simd_width - 1) / simd_width;
  at.quadgroups_per_threadgroup[0] = (group.count + 3) / 4;
  thread.index = index;
  thread.lane = index % simd_width;
  thread.simdgroup = index / simd_width;
  thread.site = thread.atomics = thread.accesses = 0;
}

}  // namespace

void Epochs::pass(unsigned flags) {
  device += (flags & mem_device) != 0;
  threadgroup += (flags & mem_threadgroup) != 0;
}

u64 next_random(u64& state) {  // splitmix64
  u64 z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

Party running_party(u32 site, u32 access) {
  Party party{};
  memcpy(party.threadgroup, group.threadgroup, sizeof party.threadgroup);
  party.thread = group.running->index;
  party.site = site;
  party.access = access;
  return party;
}

void raise(FaultKind kind, Fault fault) {
  raised = fault;
  raised.kind = kind;
  void* abandoned;
  metal_host_switch(&abandoned, outside);
  __builtin_unreachable();
}

void step_aside() {
  Thread& self = *group.running;
  self.site = metal_host_site;
  make_ready(self);
  run_another(self);
}

void run_threadgroup(void (*kernel)(), const u32 corner[3], const u32 size[3]) {
  kernel_entry = kernel;
  group.count = size[0] * size[1] * size[2];
  group.ready_count = group.ended = group.at_barrier = 0;
  stacks.reserve(group.count);
  for (u32 i = 0; i * simd_width < group.count; ++i) {
    Simdgroup& simdgroup = group.simdgroups[i];
    u32 lanes = group.count - i * simd_width;
    simdgroup.live = lanes >= simd_width ? ~0u : (1u << lanes) - 1;
    simdgroup.waiting = simdgroup.turn = 0;
    simdgroup.wait = Wait::nothing;
  }
  for (u32 i = 0; i < group.count; ++i) {
    place(group.threads[i], i, corner, size);
    group.threads[i].stack_pointer = stacks.start(i, run_thread);
    make_ready(group.threads[i]);
  }
  u32 choice = u32(next_random(group.random) % group.count);
  Thread& first = group.threads[group.ready[choice]];
  group.ready[choice] = group.ready[--group.ready_count];
  resume(first, &outside);
}

// The interface that the headers see.

unsigned lane() { return group.running->lane; }

Exchange exchange(unsigned kind, const void* value, unsigned size) {
  Thread& self = *group.running;
  Simdgroup& simdgroup = meet(Wait::operation, kind, size);
  u32 turn = simdgroup.turn;
  memcpy(simdgroup.slots[turn][self.lane], value, size);
  if (simdgroup.waiting == simdgroup.live) release_simdgroup(simdgroup);
  run_another(self);
  return {simdgroup.slots[turn][0], simdgroup.active};
}

void simdgroup_barrier(unsigned flags) {
  const Thread& self = *group.running;
  u32 begin = self.index - self.lane, end = begin + simd_width;
  for (u32 i = begin; i < end && i < group.count; ++i)
    if (group.threads[i].wait == Wait::ended)
      report_divergence(group.threads[i], Wait::simdgroup_barrier);
  Simdgroup& simdgroup = meet(Wait::simdgroup_barrier, flags, 0);
  if (simdgroup.waiting == simdgroup.live) release_simdgroup(simdgroup);
  run_another(*group.running);
}

void threadgroup_barrier(unsigned flags) {
  Thread& self = *group.running;
  if (group.ended) report_divergence(group.threads[group.last_ended], Wait::threadgroup_barrier);
  meet(Wait::threadgroup_barrier, flags, 0);
  if (group.at_barrier++ == 0) group.first_at_barrier = self.index;
  const Thread& first = group.threads[group.first_at_barrier];
  if (first.site != self.site) report_divergence(first, Wait::threadgroup_barrier);
  if (group.at_barrier == group.count) release_threadgroup(flags);
  run_another(self);
}

}  // namespace metal_host
