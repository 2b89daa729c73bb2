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
template <class T> inline T max(T a, T b) { return a > b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b ? a : b; }

#include "vectors.h"
#include "warp_instructions.h"
