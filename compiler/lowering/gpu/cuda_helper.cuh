// A barrier of all blocks of a grid, which run at once (a cooperative launch). Each time 2^31 is added to `counter`: by the first
// block what the others leave of it, who add 1 each. All have come when the highest bit has changed, and the others are 0 again, as
// they were before the first barrier. So it needs no reset, and fences as CUDA's cooperative groups do.
__device__ __forceinline__ void prefuse_grid_barrier(int* counter, int blocks) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    unsigned before = atomicAdd((unsigned*)counter, blockIdx.x ? 1u : 0x80000000u - (blocks - 1));
    while (!((*(volatile unsigned*)counter ^ before) >> 31)) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
}

// Whether two arrays are one: TIR cannot compare pointers.
__device__ __forceinline__ int prefuse_same_address(const void* a, const void* b) { return a == b; }
