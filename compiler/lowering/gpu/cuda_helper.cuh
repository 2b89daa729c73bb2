// A barrier of all blocks of a grid, which run at once (a cooperative launch). `counter` is 0 when the grid begins, and each barrier
// adds the number of blocks to it: `goal` is what it is when all have come. Fences as in CUDA's cooperative groups.
__device__ __forceinline__ void prefuse_grid_barrier(int* counter, int goal) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(counter, 1);
    while (*(volatile int*)counter < goal) __nanosleep(20);
    __threadfence();
  }
  __syncthreads();
}

