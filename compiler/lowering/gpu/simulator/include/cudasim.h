// CUDA C on one thread of the CPU (fibers.h).
#pragma once
#include "fibers.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __shared__ static
#define alignas(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))

#include "shared_array.h"

inline void __syncthreads() { sim::leave(sim::AT_BARRIER); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { sim::leave(sim::ASLEEP); }
inline unsigned atomicAdd(unsigned* to, unsigned value) {
  int old = *to;
  *to = old + value;
  return old;
}
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }

#include "vectors.h"
#include "warp_instructions.h"
#include "asynchronous.h"
#include "warpgroup.h"

#ifndef SIM_KERNELS
namespace sim {
// Lets bulk copies end: with the others idle, or at times that the order tells. CUDA C asks for it once a library.
static bool end_bulk(bool is_idle) {
  if (bulks.empty() || (!is_idle && order != 1 && (order < 2 || random(4)))) return false;
  finish_bulk(order < 2 ? 0 : random(bulks.size()));
  return true;
}
static const bool has_async_proxy = [] {
  begin_block = [] {
    begin_asynchronous();
    begin_warpgroups();
  };
  is_released = [](const Fiber& fiber) { return has_passed(fiber.mbarrier, fiber.parity); };
  progress = end_bulk;
  return true;
}();
}  // namespace sim
#endif
