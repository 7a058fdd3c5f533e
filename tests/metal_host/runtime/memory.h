// What is known of every byte that threads share: its bounds, whether it was written, and who
// touched it last. Each traced access is checked here.
#pragma once

#include "request.h"
#include "threads.h"

namespace metal_host {

/// An access to a cell, which is up to four bytes. epoch 0: there was none.
struct Access {
  u32 epoch;
  u16 simd_epoch;
  u16 thread : 10, kind : 3;  // AccessKind bits
  u32 site;

  bool atomic() const { return kind & atomically; }
};

/// Two earlier accesses suffice: a later one that conflicts with any conflicts with one of these.
/// (Not always where some are atomic and others are not.)
struct History {
  Access first, second;
};

struct Cell {
  History writes, reads;
};

struct Region {
  u8* begin;
  u64 size;
  ByteState* state;  // device and constant memory only; null: all initialised
  Cell* cells;
  u32 cell_size;  // 4 bytes, until a smaller access comes
  u64* read;  // bytes, counted
  u64* written;
  u32 index;  // in the request, or in the table of threadgroup arrays
  bool read_only;
};

/// An access that the running thread is about to make.
struct Attempt {
  Space space;
  u8* pointer;
  u64 size;
  u32 kind, site;
  u32 aligned;  // in bytes

  Fault fault() const;
};

/// The memory of a launch.
class Memory {
 public:
  void add(Space space, const Region& region);
  void clear();  // and frees the histories
  void begin_threadgroup();

  /// Whether an address is in a region or in the free space around it.
  bool is_near(Space space, const u8* pointer) const;

  /// Checks and notes an access; does not return from a fault.
  void access(const Attempt& attempt);

 private:
  static constexpr u32 most_regions = 512;
  Region regions_[4][most_regions];
  u32 counts_[4] = {};
  u32 latest_[4] = {};         // the region found last
  u32 starts_[1 << 20];        // the device epoch at which each threadgroup began ...
  u32 positions_[1 << 20][3];  // ... and its position, to name it in a report
  u32 started_ = 0;

  Region* find(Space space, u8* pointer, u64 size);
  void check_state(const Attempt& attempt, Region& region, u64 offset);
  void note_access(const Attempt& attempt, Region& region, u64 offset);
  void check_race(const History& history, const Access& now, const Attempt& attempt, u64 byte);
  void name_threadgroup(Party& party, u32 epoch) const;
  [[noreturn]] void out_of_bounds(const Attempt& attempt);
  [[noreturn]] void refuse(FaultKind kind, const Attempt& attempt, const Region& region, u64 byte);
};

extern Memory memory;

}  // namespace metal_host
