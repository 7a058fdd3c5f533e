// Where a thread is: the values of Metal's kernel attributes, under their names.
#pragma once

namespace metal_host {

struct Position {
  unsigned thread_position_in_grid[3];
  unsigned thread_position_in_threadgroup[3];
  unsigned threadgroup_position_in_grid[3];
  unsigned threadgroups_per_grid[3];
  unsigned threads_per_grid[3];
  unsigned threads_per_threadgroup[3];           // of this group: those at the edge are smaller
  unsigned dispatch_threads_per_threadgroup[3];  // as asked for
  unsigned grid_size[3];
  unsigned grid_origin[3];
  unsigned thread_index_in_threadgroup[1];
  unsigned thread_index_in_simdgroup[1];
  unsigned thread_index_in_quadgroup[1];
  unsigned simdgroup_index_in_threadgroup[1];
  unsigned quadgroup_index_in_threadgroup[1];
  unsigned simdgroups_per_threadgroup[1];
  unsigned quadgroups_per_threadgroup[1];
  unsigned dispatch_simdgroups_per_threadgroup[1];
  unsigned dispatch_quadgroups_per_threadgroup[1];
  unsigned threads_per_simdgroup[1];
  unsigned thread_execution_width[1];
};

}  // namespace metal_host
