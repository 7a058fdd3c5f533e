// Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980): from the newest key backwards, key j takes
// the share beta = sigmoid(scale q k_j) of what nearer keys have left of the query's stick. One threadgroup
// takes BQ queries of one head, each of its simdgroups R of them, and goes through the keys in blocks of BK
// from the newest that they see to the oldest; PAIRS blocks of keys and values have room.
// It stops when of each of its sticks at most 2^-29 is left: what is not read would have changed an
// output by at most 2^-29 times the largest |v|, and the remainder by at most 2^-29.
#include "../tile/memory.h"
#include "../tile/multiply.h"
#include "../tile/reduce.h"
#include "forms.h"

// A head's queries, keys or values where they lie, with strides; copied in blocks.
template <typename T, int D>
struct Head {
  const device T* first;
  int ld, step, rows;
  bool vectors; // whether rows can be read sixteen bytes at a time

  METAL_FUNC Head(const device T* start, int from_row, int from_column, int count)
      : first(start), ld(from_row), step(from_column), rows(count) {
    vectors = step == 1 && ld % Block<T, D>::WIDTH == 0 && begins_vector(start);
  }
  template <int ROWS, int THREADS, typename Order>
  METAL_FUNC void copy(threadgroup T* destination, int from, ushort index) const {
    const device T* source = first + long(from) * ld;
    if (vectors) {
      copy_block<ROWS, D, THREADS, Order>(destination, source, ld, rows - from, index);
    } else {
      copy_elements<ROWS, D, THREADS, Order>(destination, source, ld, step, rows - from, index);
    }
  }
  template <int R, int K>
  METAL_FUNC void hold(thread Operand<T, R, K>& held, int from, ushort index) const {
    const device T* source = first + long(from) * ld;
    if (vectors) {
      held.load(source, ld, rows - from, index);
    } else {
      Tile<R, K> tile;
      load_elements(tile, source, ld, step, rows - from, index);
      held = operand<T>(tile);
    }
  }
};

// Keys from `ahead` + the query's row on, and keys before `begin`, take nothing.
template <typename Order, int R, int C>
METAL_FUNC void mask_keys(thread Tile<R, C>& s, int ahead, int begin, Lane lane) {
#pragma unroll
  for (short e = 0; e < s.SIZE; e++) {
    const int key = Order::row(s.col(e, lane));
    if (key >= ahead + s.row(e, lane) || key < begin) {
      s[e] = -INFINITY;
    }
  }
}

// A block's logits into `o`, `left` and the lane's part of `used`, newest chunk first: the weights of one
// are formed while the values of another are multiplied.
template <typename T, typename Form, int CHUNK, int R, int C, int D>
METAL_FUNC void break_off(
    const thread Tile<R, C>& s,
    thread Tile<R, D>& o,
    thread Rows<R>& left,
    thread Rows<R>& used,
    float scale,
    const threadgroup T* vs,
    ushort index) {
#pragma unroll
  for (short c = C - CHUNK; c >= 0; c -= CHUNK) {
    Tile<R, CHUNK> w = columns<CHUNK>(s, c);
    Form::take(w, left, scale, index);
    reduce_lane_rows<Sum>(used, w);
#pragma unroll
    for (short part = 0; part < CHUNK; part += 16) {
      multiply(o, operand<T>(columns<16>(w, part)), vs + (c + part) * Block<T, D>::PITCH, index);
    }
  }
}

// q (B, H, T, D), k and v (B, H / group, N, D), of any strides; begins (B or more): each row's first key
// that is visible; sizes {T, N, H, group}; scale {scale > 0}; out (B, H, T, D), rounded to O, and remainder
// (B, H, T), row-contiguous. The queries are the last T of N positions. OWN: a query's own key takes the first share.
// Grid: W, ceil(T / BQ), B H / W threadgroups of BQ / R simdgroups: W heads at a time, whose keys and
// values stay in the cache.
template <typename T, typename O, int D, int BQ, int BK, int R, int PAIRS, bool STAGED, bool OWN, bool PRODUCT>
[[kernel]] void stick_breaking_attention(
    const device T* q [[buffer(0)]],
    const constant int64_t* q_strides [[buffer(1)]],
    const device T* k [[buffer(2)]],
    const constant int64_t* k_strides [[buffer(3)]],
    const device T* v [[buffer(4)]],
    const constant int64_t* v_strides [[buffer(5)]],
    const device int* begins [[buffer(6)]],
    const constant int* sizes [[buffer(7)]],
    const constant float* scale [[buffer(8)]],
    device O* out [[buffer(9)]],
    device float* remainder [[buffer(10)]],
    uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]],
    uint3 threadgroups_per_grid [[threadgroups_per_grid]],
    uint thread_index_in_threadgroup [[thread_index_in_threadgroup]],
    uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  using Form = typename FormOf<PRODUCT>::Type;
  constexpr int CHUNK = BK % 32 == 0 ? 32 : 16;
  using Order = Runs<CHUNK>;
  constexpr int PITCH = Block<T, D>::PITCH, SIMDGROUPS = BQ / R, THREADS = SIMDGROUPS * 32;
  constexpr int BLOCK = BK * PITCH, STAGE = STAGED ? BQ * PITCH : 0, FLAGS = STAGE + PAIRS * 2 * BLOCK;
  static_assert(SIMDGROUPS <= 8, "two flags for each simdgroup");
  THREADGROUP_MEMORY(T, memory, FLAGS + 16);

  const ushort index = thread_index_in_threadgroup, in_simdgroup = thread_index_in_simdgroup;
  const Lane lane(in_simdgroup);
  const int queries = sizes[0], keys = sizes[1];
  const int head = threadgroup_position_in_grid.z * threadgroups_per_grid.x + threadgroup_position_in_grid.x;
  const int batch = head / sizes[2], own_head = head % sizes[2], key_head = own_head / sizes[3];
  // The longest rows first, so that the short ones fill the gaps at the end.
  const int start = (threadgroups_per_grid.y - 1 - threadgroup_position_in_grid.y) * BQ;
  const int mine = start + simdgroup_index_in_threadgroup * R; // the simdgroup's first query
  // The simdgroup's first query sees keys before `limit`, the next one more, and so on.
  const int limit = mine + keys - queries + OWN, begin = metal::max(begins[batch], 0);
  const int seen = metal::min(keys, start + BQ - 1 + keys - queries + OWN);

  const Head<T, D> query(
      q + batch * q_strides[0] + own_head * q_strides[1], q_strides[2], q_strides[3], queries);
  const Head<T, D> key(
      k + batch * k_strides[0] + key_head * k_strides[1], k_strides[2], k_strides[3], keys);
  const Head<T, D> value(
      v + batch * v_strides[0] + key_head * v_strides[1], v_strides[2], v_strides[3], keys);

  Operand<T, R, STAGED ? 16 : D> held;
  Staged<T, R, D> staged;
  if constexpr (STAGED) {
    query.template copy<BQ, THREADS, InOrder>(memory, start, index);
    staged.rows = memory + simdgroup_index_in_threadgroup * R * PITCH;
  } else {
    query.hold(held, mine, in_simdgroup);
  }

  Tile<R, D> o;
  o.fill(0);
  Rows<R> left, used(0);
#pragma unroll
  for (short i = 0; i < left.SIZE; i++) {
    left[i] = mine + left.row(i, lane) < queries ? Form::WHOLE : Form::NOTHING;
  }
  bool live = mine < queries; // whether the simdgroup has something left
  const float scale_log2 = scale[0] * M_LOG2E_F;
  const int newest = (seen + BK - 1) / BK * BK - BK, oldest = begin / BK * BK;
  if (PAIRS == 2 && newest >= oldest) {
    threadgroup T* ks = memory + STAGE + newest / BK % PAIRS * 2 * BLOCK;
    key.template copy<BK, THREADS, Order>(ks, newest, index);
    value.template copy<BK, THREADS, Order>(ks + BLOCK, newest, index);
  }
  for (int first = newest; first >= oldest; first -= BK) {
    const int coming = PAIRS == 2 ? first - BK : first; // what is copied in this round
    threadgroup T* ks = memory + STAGE + first / BK % PAIRS * 2 * BLOCK;
    threadgroup T* ks_coming = memory + STAGE + (first / BK + PAIRS - 1) % PAIRS * 2 * BLOCK;
    // Flags of this round and of the last: whoever is late still reads what the last one wrote.
    threadgroup T* flags = memory + FLAGS + first / BK % 2 * 8;
    const threadgroup T* flags_before = memory + FLAGS + (first / BK + 1) % 2 * 8;
    if constexpr (PAIRS == 2) {
      copy_wait();
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (first < newest) {
      bool any = false;
#pragma unroll
      for (short i = 0; i < SIMDGROUPS; i++) {
        any = any || float(flags_before[i]) != 0;
      }
      if (!any) {
        break;
      }
    }
    if (coming >= oldest) {
      key.template copy<BK, THREADS, Order>(ks_coming, coming, index);
    }
    if constexpr (PAIRS == 1) {
      value.template copy<BK, THREADS, Order>(ks_coming + BLOCK, coming, index);
      copy_wait();
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }

    const bool takes_part = live && first < limit + R - 1;
    Tile<R, BK> s;
    if (takes_part) {
      s.fill(0);
      if constexpr (STAGED) {
        multiply_transposed(s, staged, ks, in_simdgroup);
      } else {
        multiply_transposed(s, held, ks, in_simdgroup);
      }
      if (first + BK > limit || first < begin) {
        mask_keys<Order>(s, limit - first, begin - first, lane);
      }
    }
    // Apart from the keys' copy: many at once hold up the products behind them.
    if (PAIRS == 2 && coming >= oldest) {
      value.template copy<BK, THREADS, Order>(ks_coming + BLOCK, coming, index);
    }
    if (takes_part) {
      break_off<T, Form, CHUNK>(s, o, left, used, scale_log2, ks + BLOCK, in_simdgroup);
      bool any = false;
#pragma unroll
      for (short i = 0; i < left.SIZE; i++) {
        any = any || !Form::used_up(left[i]);
      }
      live = metal::simd_any(any);
    }
    if (in_simdgroup == 0) {
      flags[simdgroup_index_in_threadgroup] = T(live ? 1 : 0);
    }
  }

  store(o, out + (long(head) * queries + mine) * D, D, queries - mine, in_simdgroup);
  combine_lanes<Sum>(used);
#pragma unroll
  for (short i = 0; i < left.SIZE; i++) {
    const int row = mine + left.row(i, lane);
    if (lane.col == 0 && row < queries) {
      remainder[long(head) * queries + row] = Form::remainder(left[i], used[i]);
    }
  }
}
