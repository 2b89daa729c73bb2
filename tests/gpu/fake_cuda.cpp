// A libcuda for tests: the memory of the "device" is the host's, and a "cubin" is an ELF header and the path of a shared library
// in which each kernel is a function sim_NAME(blocks, threads, arguments). Copies must name one address of each side.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

typedef int Result;
static std::map<uintptr_t, size_t> allocated;
static int contexts = 0;
static bool fail_next_launch = false;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500 };

static bool on_device(uintptr_t address, size_t size) {
  auto after = allocated.upper_bound(address);
  if (after == allocated.begin()) return false;
  --after;
  return address + size <= after->first + after->second;
}

extern "C" {
long fake_bytes() {
  long total = 0;
  for (auto& one : allocated) total += one.second;
  return total;
}
void fake_fail_next_launch() { fail_next_launch = true; }
Result cuInit(unsigned) { return OK; }
Result cuDeviceGet(int* device, int) { return *device = 0, OK; }
Result cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, OK; }
Result cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)64, OK; }
Result cuCtxPushCurrent_v2(void*) { return contexts++, OK; }
Result cuCtxPopCurrent_v2(void**) { return contexts-- > 0 ? OK : INVALID_CONTEXT; }
Result cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_OF_TEST", OK; }
Result cuMemAlloc_v2(uintptr_t* address, size_t size) {
  if (!contexts) return INVALID_CONTEXT;
  if (size > (1ull << 40)) return OUT_OF_MEMORY;
  *address = (uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256);
  memset((void*)*address, 0xAB, size);
  allocated[*address] = size;
  return OK;
}
Result cuMemFree_v2(uintptr_t address) {
  if (!contexts || !allocated.erase(address)) return INVALID_VALUE;
  free((void*)address);
  return OK;
}
Result cuPointerGetAttribute(unsigned* value, int, uintptr_t address) {
  return on_device(address, 0) ? (*value = 2, OK) : INVALID_VALUE;
}
Result cuModuleLoadData(void** module, const char* image) {
  *module = dlopen(image + 64, RTLD_NOW | RTLD_LOCAL);
  return *module ? OK : NO_BINARY;
}
Result cuModuleUnload(void* module) { return dlclose(module) ? INVALID_VALUE : OK; }
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  char symbol[512] = "sim_";
  strncat(symbol, name, sizeof symbol - 5);
  return (*function = dlsym(module, symbol)) ? OK : NOT_FOUND;
}
Result cuStreamCreate(void** stream, unsigned) { return *stream = (void*)128, OK; }
Result cuStreamSynchronize(void*) { return contexts ? OK : INVALID_CONTEXT; }
Result cuMemcpyHtoDAsync_v2(uintptr_t device, const void* host, size_t size, void*) {
  if (!on_device(device, size) || on_device((uintptr_t)host, 1)) return INVALID_VALUE;
  return memcpy((void*)device, host, size), OK;
}
Result cuMemcpyDtoHAsync_v2(void* host, uintptr_t device, size_t size, void*) {
  if (!on_device(device, size) || on_device((uintptr_t)host, 1)) return INVALID_VALUE;
  return memcpy(host, (void*)device, size), OK;
}
Result cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void*) {
  if (!on_device(to, size) || !on_device(from, size)) return INVALID_VALUE;
  return memcpy((void*)to, (void*)from, size), OK;
}
Result cuLaunchKernel(int (*function)(unsigned, unsigned, void**), unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned ty, unsigned tz, unsigned shared, void* stream, void** arguments, void** extra) {
  if (!contexts || y != 1 || z != 1 || ty != 1 || tz != 1 || shared || extra || !x || !threads || threads > 1024 || stream != (void*)128)
    return INVALID_VALUE;
  if (fail_next_launch) return fail_next_launch = false, 719;
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  return function(x, threads, arguments);
}
}
