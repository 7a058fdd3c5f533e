// Stacks to run a threadgroup's threads on, and the switch between them.
#pragma once

namespace metal_host {

/// Suspends the running fiber, leaving its stack pointer in `*from`, and resumes `to`.
extern "C" void metal_host_switch(void** from, void* to);

/// Stacks with a guard page below each, kept between launches.
class Stacks {
 public:
  /// Makes room for `count` stacks; their contents do not survive growth.
  void reserve(unsigned count);

  /// A stack pointer that, when switched to, begins `entry` on the stack `index`.
  void* start(unsigned index, void (*entry)());

 private:
  unsigned char* memory_ = nullptr;
  unsigned count_ = 0;
};

}  // namespace metal_host
