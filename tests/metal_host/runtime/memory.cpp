#include "memory.h"

#include <string.h>
#include <sys/mman.h>

namespace metal_host {

Memory memory;

namespace {

/// Whether nothing orders the running thread's access after this earlier one.
/// `start`: the epoch at which the running threadgroup began.
bool unordered(const Access& before, const Access& now, u32 start) {
  if (before.epoch == 0) return false;
  if (before.epoch < start) return true;  // of another threadgroup
  if (before.thread == now.thread || before.epoch < now.epoch) return false;
  bool same_simdgroup = before.thread / simd_width == now.thread / simd_width;
  return !same_simdgroup || before.simd_epoch == now.simd_epoch;
}

/// Replaces what is ordered before `now` anyway; else keeps two accesses that are as far apart
/// as can be: of different threadgroups, simdgroups, threads.
void note(History& history, const Access& now, u32 start) {
  Access& first = history.first;
  Access& second = history.second;
  // A plain access conflicts with more than an atomic one of the same thread after it.
  bool weaker = now.atomic() && !first.atomic() && first.epoch == now.epoch;
  if (!unordered(first, now, start) && !weaker) {
    first = now;
  } else if (!unordered(second, now, start)) {
    second = now;
  } else if (second.epoch >= start && first.epoch >= start) {
    if (first.thread / simd_width == second.thread / simd_width) second = now;
  } else if (first.epoch < start && second.epoch < start) {
    second = now;
  }
}

/// Threadgroup memory does not outlive its threadgroup.
void forget_earlier(History& history, u32 start) {
  if (history.first.epoch < start) history.first.epoch = 0;
  if (history.second.epoch < start) history.second.epoch = 0;
}

u32 epoch_of(const Epochs& epochs, Space space) {
  return space == Space::threadgroup ? epochs.threadgroup : epochs.device;
}

u64 bytes_of_cells(const Region& region) {
  return (region.size / region.cell_size + 1) * sizeof(Cell);
}

/// Pages of zeros that cost nothing until touched.
Cell* map_cells(const Region& region) {
  void* pages = mmap(nullptr, bytes_of_cells(region), PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) __builtin_trap();
  return static_cast<Cell*>(pages);
}

/// Makes cells small enough for an access; the smaller ones share their history.
void refine(Region& region, u64 offset, u64 size) {
  Region fine = region;
  fine.cell_size = (offset | size) & 1 ? 1 : 2;
  fine.cells = map_cells(fine);
  u64 parts = region.cell_size / fine.cell_size, count = region.size / fine.cell_size;
  for (u64 i = 0; i < count; ++i) fine.cells[i] = region.cells[i / parts];
  munmap(region.cells, bytes_of_cells(region));
  region = fine;
}

}  // namespace

void Memory::add(Space space, const Region& region) {
  if (counts_[u32(space)] == most_regions) __builtin_trap();
  Region& added = regions_[u32(space)][counts_[u32(space)]++] = region;
  added.cell_size = 4;
  if (space != Space::constant) added.cells = map_cells(added);  // nobody writes constants
}

void Memory::clear() {
  for (u32 space = 1; space <= 3; ++space) {
    for (u32 i = 0; i < counts_[space]; ++i) {
      Region& region = regions_[space][i];
      if (region.cells) munmap(region.cells, bytes_of_cells(region));
    }
    counts_[space] = latest_[space] = 0;
  }
  started_ = 0;
}

void Memory::begin_threadgroup() {
  if (started_ == sizeof starts_ / sizeof *starts_) return;
  starts_[started_] = group.start.device;
  memcpy(positions_[started_++], group.threadgroup, sizeof group.threadgroup);
}

Region* Memory::find(Space space, u8* pointer, u64 size) {
  Region* regions = regions_[u32(space)];
  u32& latest = latest_[u32(space)];
  auto holds = [&](const Region& region) {
    return pointer >= region.begin && u64(pointer - region.begin) + size <= region.size;
  };
  if (latest < counts_[u32(space)] && holds(regions[latest])) return &regions[latest];
  for (u32 i = 0; i < counts_[u32(space)]; ++i)
    if (holds(regions[i])) return &regions[latest = i];
  return nullptr;
}

bool Memory::is_near(Space space, const u8* pointer) const {
  constexpr u64 redzone = 4096;  // at least that much is free around each
  for (u32 i = 0; i < counts_[u32(space)]; ++i) {
    const Region& region = regions_[u32(space)][i];
    u64 free = region.index == no_index ? 0 : redzone;  // a constant of the program has none
    if (pointer + free >= region.begin && pointer < region.begin + region.size + free) return true;
  }
  return false;
}

Fault Attempt::fault() const {
  Fault fault{};
  fault.space = space;
  fault.size = u32(size);
  fault.party = running_party(site, kind);
  fault.aligned = aligned;
  return fault;
}

/// Names the region that lies nearest.
void Memory::out_of_bounds(const Attempt& attempt) {
  Fault fault = attempt.fault();
  u64 least = ~0ull;
  fault.region = no_index;
  for (u32 i = 0; i < counts_[u32(attempt.space)]; ++i) {
    const Region& region = regions_[u32(attempt.space)][i];
    long long offset = attempt.pointer - region.begin;
    u64 distance = offset < 0 ? -offset : u64(offset) > region.size ? offset - region.size : 0;
    if (distance >= least) continue;
    least = distance;
    fault.region = region.index;
    fault.offset = offset;
  }
  raise(FaultKind::out_of_bounds, fault);
}

void Memory::refuse(FaultKind kind, const Attempt& attempt, const Region& region, u64 byte) {
  Fault fault = attempt.fault();
  fault.region = region.index;
  fault.offset = static_cast<long long>(byte);
  raise(kind, fault);
}

/// Sets the threadgroup that ran at this epoch.
void Memory::name_threadgroup(Party& party, u32 epoch) const {
  u32 low = 0, high = started_;
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    (starts_[middle] <= epoch ? low : high) = middle;
  }
  memcpy(party.threadgroup, positions_[low], sizeof party.threadgroup);
}

void Memory::check_race(const History& history, const Access& now, const Attempt& attempt,
                        u64 byte) {
  u32 start = epoch_of(group.start, attempt.space);
  const Access* both[] = {&history.first, &history.second};
  for (const Access* before : both) {
    if (!unordered(*before, now, start) || (before->atomic() && now.atomic())) continue;
    Fault race = attempt.fault();
    race.region = regions_[u32(attempt.space)][latest_[u32(attempt.space)]].index;
    race.offset = static_cast<long long>(byte);
    race.has_other = 1;
    race.other = race.party;
    race.other.thread = before->thread;
    race.other.site = before->site;
    race.other.access = before->kind;
    if (attempt.space == Space::device) name_threadgroup(race.other, before->epoch);
    raise(FaultKind::race, race);
  }
}

void Memory::check_state(const Attempt& attempt, Region& region, u64 offset) {
  for (u64 i = offset; i < offset + attempt.size; ++i) {
    ByteState& state = region.state[i];
    if (state == ByteState::outside) refuse(FaultKind::out_of_bounds, attempt, region, i);
    if (attempt.kind & reads && state == ByteState::unwritten)
      refuse(FaultKind::uninitialised_read, attempt, region, i);
    if (attempt.kind & writes) state = ByteState::initialised;
  }
}

void Memory::note_access(const Attempt& attempt, Region& region, u64 offset) {
  if ((offset | attempt.size) & (region.cell_size - 1)) refine(region, offset, attempt.size);
  const Thread& self = *group.running;
  const Epochs& simd_epochs = group.simdgroups[self.simdgroup].epochs;
  const Access now{epoch_of(group.epochs, attempt.space), u16(epoch_of(simd_epochs, attempt.space)),
                   u16(self.index), u16(attempt.kind), attempt.site};
  u32 start = epoch_of(group.start, attempt.space);
  u64 end = (offset + attempt.size) / region.cell_size;
  for (u64 i = offset / region.cell_size; i < end; ++i) {
    Cell& cell = region.cells[i];
    u64 byte = i * region.cell_size;
    if (attempt.space == Space::threadgroup) {
      forget_earlier(cell.writes, start);
      forget_earlier(cell.reads, start);
      if (attempt.kind & reads && cell.writes.first.epoch == 0)
        refuse(FaultKind::uninitialised_read, attempt, region, byte);
    }
    check_race(cell.writes, now, attempt, byte);
    if (attempt.kind & writes) {
      check_race(cell.reads, now, attempt, byte);
      note(cell.writes, now, start);
    }
    if (attempt.kind & reads) note(cell.reads, now, start);
  }
}

void Memory::access(const Attempt& attempt) {
  Region* region = find(attempt.space, attempt.pointer, attempt.size);
  if (!region) out_of_bounds(attempt);
  if (attempt.kind & reads) *region->read += attempt.size;
  if (attempt.kind & writes) *region->written += attempt.size;
  u64 offset = attempt.pointer - region->begin;
  if (u64(attempt.pointer) % attempt.aligned)
    refuse(FaultKind::misaligned_access, attempt, *region, offset);
  if (region->read_only && attempt.kind & writes)
    refuse(FaultKind::address_space, attempt, *region, offset);
  if (region->state) check_state(attempt, *region, offset);
  if (region->cells) note_access(attempt, *region, offset);
}

}  // namespace metal_host
