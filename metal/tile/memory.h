// Tiles and blocks between device memory, threadgroup memory and registers.
#pragma once
#include "block.h"
#include "order.h"
#include "tile.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
// Starts a copy of sixteen bytes that copy_wait ends; nothing is read, and zeros come, where `full` is
// false.
template <typename T>
METAL_FUNC void copy_vector(T* destination, const T* source, bool full) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(destination)),
               "l"(source), "r"(full ? 16 : 0) : "memory");
}
METAL_FUNC void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

METAL_FUNC void load_pair(float& a, float& b, const float* p) {
  const float2 both = *reinterpret_cast<const float2*>(p);
  a = both.x, b = both.y;
}
METAL_FUNC void load_pair(float& a, float& b, const __half* p) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(p));
  a = both.x, b = both.y;
}
METAL_FUNC void load_pair(float& a, float& b, const __nv_bfloat16* p) {
  const float2 both = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(p));
  a = both.x, b = both.y;
}
METAL_FUNC void store_pair(float* p, float a, float b) { *reinterpret_cast<float2*>(p) = make_float2(a, b); }
METAL_FUNC void store_pair(__half* p, float a, float b) {
  *reinterpret_cast<__half2*>(p) = __floats2half2_rn(a, b);
}
METAL_FUNC void store_pair(__nv_bfloat16* p, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(a, b);
}
#else
// Metal has no asynchronous copy that a kernel may name: the copy is made at once.
template <typename T>
METAL_FUNC void copy_vector(threadgroup T* destination, const device T* source, bool full) {
  threadgroup uint4* to = reinterpret_cast<threadgroup uint4*>(destination);
  *to = full ? *reinterpret_cast<const device uint4*>(source) : uint4(0);
}
METAL_FUNC void copy_wait() {}

template <typename P>
METAL_FUNC void load_pair(thread float& a, thread float& b, P p) {
  a = float(p[0]);
  b = float(p[1]);
}
template <typename T>
METAL_FUNC void store_pair(device T* p, float a, float b) {
  p[0] = T(a);
  p[1] = T(b);
}
#endif

// All THREADS threads copy ROWS x COLS elements, rows `ld` apart, into a block in threadgroup memory, in
// the given order; rows from `rows` on become zero. It is there after copy_wait and a threadgroup_barrier.
template <int ROWS, int COLS, int THREADS, typename Order = InOrder, typename T>
METAL_FUNC void copy_block(
    threadgroup T* destination, const device T* source, int ld, int rows, ushort index) {
  using To = Block<T, COLS>;
  constexpr int VECTORS = COLS / To::WIDTH; // in a row
  static_assert(COLS % To::WIDTH == 0, "rows of whole vectors only");
  constexpr int STEP = THREADS / VECTORS;
  if constexpr (STEP % 8 == 0 && (STEP & STEP - 1) == 0 && THREADS % VECTORS == 0 && ROWS % STEP == 0) {
    // A thread stays in its column and goes down in equal steps: one address for all its copies. An order
    // moves bits of a place, so that it may be asked of both parts of a sum apart.
    const int vector = index % VECTORS, row = Order::row(index / VECTORS);
    destination += To::at(index / VECTORS, vector);
    source += row * ld + vector * To::WIDTH;
    if (rows >= ROWS) {
#pragma unroll
      for (int i = 0; i < ROWS / STEP; i++) {
        copy_vector(destination + i * STEP * To::PITCH, source + Order::row(i * STEP) * ld, true);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ROWS / STEP; i++) {
        const int down = Order::row(i * STEP);
        const bool full = row + down < rows;
        copy_vector(destination + i * STEP * To::PITCH, full ? source + down * ld : source, full);
      }
    }
  } else if constexpr (THREADS % 8 == 0 && THREADS / 8 <= VECTORS && ROWS % 8 == 0 &&
                       is_in_order<Order>()) {
    // Eight rows at a time, in parts: again a thread keeps its row of eight, by which rows are swizzled.
    const int row = index % 8;
#pragma unroll
    for (int first = 0; first < VECTORS; first += THREADS / 8) {
      const int vector = index / 8 + first;
      if (VECTORS % (THREADS / 8) != 0 && vector >= VECTORS) {
        break;
      }
      threadgroup T* to = destination + To::at(row, vector);
      const device T* from = source + row * ld + vector * To::WIDTH;
#pragma unroll
      for (int down = 0; down < ROWS; down += 8) {
        const bool full = rows >= ROWS || row + down < rows;
        copy_vector(to + down * To::PITCH, full ? from + down * ld : source, full);
      }
    }
  } else {
#pragma unroll
    for (int first = 0; first < ROWS * VECTORS; first += THREADS) {
      const int place = (first + index) / VECTORS, vector = (first + index) % VECTORS;
      const int row = Order::row(place);
      const bool full = row < rows;
      if (place < ROWS) {
        copy_vector(destination + To::at(place, vector),
                    source + (full ? row * ld + vector * To::WIDTH : 0), full);
      }
    }
  }
}

// The same, element by element: for rows of elements `step` apart, or that begin anywhere.
template <int ROWS, int COLS, int THREADS, typename Order = InOrder, typename T>
METAL_FUNC void copy_elements(
    threadgroup T* destination, const device T* source, int ld, int step, int rows, ushort index) {
  using To = Block<T, COLS>;
  for (int i = index; i < ROWS * COLS; i += THREADS) {
    const int place = i / COLS, col = i % COLS, row = Order::row(place);
    destination[To::at(place, col / To::WIDTH) + col % To::WIDTH] =
        row < rows ? source[long(row) * ld + long(col) * step] : T(0);
  }
}

// A tile from device memory, rows `ld` elements apart, an even number; rows from `rows` on become zero.
template <typename T, int R, int C>
METAL_FUNC void load(thread Tile<R, C>& s, const device T* source, int ld, int rows, ushort index) {
  const Lane lane(index);
#pragma unroll
  for (short e = 0; e < s.SIZE; e += 2) {
    s[e] = s[e + 1] = 0;
    if (s.row(e, lane) < rows) {
      load_pair(s[e], s[e + 1], source + s.row(e, lane) * ld + s.col(e, lane));
    }
  }
}

// The same as load, element by element: of rows any number apart, and elements `step` apart.
template <typename T, int R, int C>
METAL_FUNC void load_elements(
    thread Tile<R, C>& s, const device T* source, int ld, int step, int rows, ushort index) {
  const Lane lane(index);
#pragma unroll
  for (short e = 0; e < s.SIZE; e++) {
    s[e] = s.row(e, lane) < rows ? float(source[s.row(e, lane) * ld + s.col(e, lane) * step]) : 0.0f;
  }
}

// A tile to device memory, rounded to T; rows from `rows` on are not stored.
template <typename T, int R, int C>
METAL_FUNC void store(const thread Tile<R, C>& s, device T* destination, int ld, int rows, ushort index) {
  const Lane lane(index);
#pragma unroll
  for (short e = 0; e < s.SIZE; e += 2) {
    if (s.row(e, lane) < rows) {
      store_pair(destination + s.row(e, lane) * ld + s.col(e, lane), s[e], s[e + 1]);
    }
  }
}
