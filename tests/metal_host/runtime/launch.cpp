// Runs a grid of threadgroups: the one function that Python calls.

#include <stdlib.h>
#include <string.h>

#include "memory.h"

namespace metal_host {

extern u64 multiply_accumulates, special_functions;

namespace {

constexpr u32 most_buffers = 128;
void* pointers[most_buffers];  // of the running launch's buffers
KernelFunction* function;      // of the running launch
u64 ignored;                   // counts that nobody asks for

void kernel() { function(pointers, group.running->position); }

void add_regions(Request& request) {
  memory.clear();
  if (request.buffer_count > most_buffers) __builtin_trap();  // Python has refused it
  for (u32 i = 0; i < request.buffer_count; ++i) {
    Buffer& buffer = request.buffers[i];
    pointers[i] = buffer.data + buffer.start;
    if (!buffer.data) continue;
    buffer.read = buffer.written = 0;
    bool read_only = buffer.read_only || buffer.space == Space::constant;
    memory.add(buffer.space, {buffer.data, buffer.size, buffer.state, nullptr, 0, &buffer.read,
                              &buffer.written, i, read_only});
  }
  for (u32 i = 0; i < request.array_count; ++i) {
    const ProgramArray& array = request.array_table[request.arrays[i]];
    memory.add(Space::threadgroup,
               {static_cast<u8*>(array.data), array.size, nullptr, nullptr, 0,
                &request.threadgroup_read, &request.threadgroup_written, request.arrays[i], false});
  }
  for (u32 i = 0; i < request.constant_count; ++i) {
    const ProgramArray& array = request.constants[i];
    memory.add(Space::constant, {static_cast<u8*>(array.data), array.size, nullptr, nullptr, 0,
                                 &ignored, &ignored, no_index, true});
  }
}

/// Sets what is the same for all threads.
void place_threads(const Request& request, const u32 groups[3]) {
  u32 threads = request.threadgroup[0] * request.threadgroup[1] * request.threadgroup[2];
  for (u32 i = 0; i < threads; ++i) {
    Position& at = group.threads[i].position;
    at = Position{};
    for (int axis = 0; axis < 3; ++axis) {
      at.threadgroups_per_grid[axis] = groups[axis];
      at.threads_per_grid[axis] = at.grid_size[axis] = request.grid[axis];
      at.dispatch_threads_per_threadgroup[axis] = request.threadgroup[axis];
    }
    at.dispatch_simdgroups_per_threadgroup[0] = (threads + simd_width - 1) / simd_width;
    at.dispatch_quadgroups_per_threadgroup[0] = (threads + 3) / 4;
    at.threads_per_simdgroup[0] = at.thread_execution_width[0] = simd_width;
  }
}

void run_one(const Request& request, const u32 groups[3], u32 number) {
  group.threadgroup[0] = number % groups[0];
  group.threadgroup[1] = number / groups[0] % groups[1];
  group.threadgroup[2] = number / groups[0] / groups[1];
  u32 corner[3], size[3];
  for (int axis = 0; axis < 3; ++axis) {
    corner[axis] = group.threadgroup[axis] * request.threadgroup[axis];
    u32 rest = request.grid[axis] - corner[axis];
    size[axis] = rest < request.threadgroup[axis] ? rest : request.threadgroup[axis];
  }
  for (u32 i = 0; i < request.array_count; ++i) {  // NaN in every type
    const ProgramArray& array = request.array_table[request.arrays[i]];
    memset(array.data, 0xff, array.size);
  }
  group.epochs.pass(~0u);
  group.start = group.epochs;
  memory.begin_threadgroup();
  run_threadgroup(kernel, corner, size);
}

}  // namespace

extern "C" void metal_host_launch(Request& request) {
  u32 groups[3], total = 1;
  for (int axis = 0; axis < 3; ++axis) {
    groups[axis] = (request.grid[axis] + request.threadgroup[axis] - 1) / request.threadgroup[axis];
    total *= groups[axis];
  }
  function = request.function;
  add_regions(request);
  place_threads(request, groups);
  multiply_accumulates = special_functions = 0;
  group.barriers = group.operations = 0;
  group.random = request.seed;
  group.epochs = Epochs{};
  raised = Fault{};

  u32* order = static_cast<u32*>(malloc(total * sizeof(u32)));
  for (u32 i = 0; i < total; ++i) {  // Fisher-Yates, from the inside out
    u32 j = u32(next_random(group.random) % (i + 1));
    order[i] = order[j];
    order[j] = i;
  }
  for (u32 i = 0; i < total && raised.kind == FaultKind::none; ++i)
    run_one(request, groups, order[i]);
  free(order);

  memory.clear();
  request.multiply_accumulates = multiply_accumulates;
  request.special_functions = special_functions;
  request.barriers = group.barriers;
  request.simd_operations = group.operations;
  request.fault = raised;
}

}  // namespace metal_host
