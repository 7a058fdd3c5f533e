#include "fiber.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// Only the registers that a callee has to preserve: the compiler saved the others.
#if defined(__APPLE__)
#define SYMBOL "_metal_host_switch"
#define HIDDEN ".private_extern " SYMBOL "\n"
#else
#define SYMBOL "metal_host_switch"
#define HIDDEN ".hidden " SYMBOL "\n"
#endif

#if defined(__x86_64__)
asm(".text\n.globl " SYMBOL "\n" HIDDEN SYMBOL R"(:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
asm(".text\n.balign 4\n.globl " SYMBOL "\n" HIDDEN SYMBOL R"(:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "metal_host knows how to switch stacks on x86-64 and aarch64 only"
#endif

namespace metal_host {
namespace {

constexpr unsigned long stack_bytes = 256 * 1024;  // touched pages only cost memory
constexpr unsigned long guard_bytes = 16 * 1024;   // a page of Apple silicon
constexpr unsigned long stride = stack_bytes + guard_bytes;

}  // namespace

void Stacks::reserve(unsigned count) {
  if (count <= count_) return;
  if (memory_) munmap(memory_, count_ * stride);
  void* memory = mmap(nullptr, count * stride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) abort();
  memory_ = static_cast<unsigned char*>(memory);
  count_ = count;
  for (unsigned i = 0; i < count; ++i) mprotect(memory_ + i * stride, guard_bytes, PROT_NONE);
}

void* Stacks::start(unsigned index, void (*entry)()) {
  auto top = reinterpret_cast<void**>(memory_ + (index + 1) * stride);
#if defined(__x86_64__)
  void** frame = top - 8;  // six registers, the entry, and a return address that keeps it aligned
  memset(frame, 0, 8 * sizeof(void*));
  frame[6] = reinterpret_cast<void*>(entry);
#else
  void** frame = top - 20;
  memset(frame, 0, 20 * sizeof(void*));
  frame[11] = reinterpret_cast<void*>(entry);  // x30
#endif
  return frame;
}

}  // namespace metal_host
