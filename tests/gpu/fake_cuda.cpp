// A libcuda for tests: the memory of the "device" is the host's, and a "cubin" is an ELF header and the path of a shared library
// in which each kernel is a function sim_NAME(blocks, threads, bytes of shared memory, arguments). Copies must name one address of each side.
//
// Streams are queues: nothing runs before somebody waits for it. fake_order says which stream goes on where several can: 0 the one
// that was asked first, 1 never the one that is waited for if another can, 2 always that one. So whatever order a program's events
// leave open is tried.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

typedef int Result;
static std::map<uintptr_t, size_t> allocated;
static int contexts = 0;
static bool fail_next_launch = false;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500 };

struct Event { long asked = 0, done = 0; };
struct Op { long number; Event* waits; long version; std::function<Result()> run; };
struct Stream { std::deque<Op> ops; };
static std::vector<Stream*> streams;
static std::map<void*, size_t> pinned;
static std::map<void*, unsigned> large_shared;  // functions that may ask for more than 48 KiB, and for how much
static long issued = 0;
static int order = 0;
static std::recursive_mutex one_at_a_time;
typedef std::lock_guard<std::recursive_mutex> Lock;

static bool can_run(Stream* stream) {
  return !stream->ops.empty() && (!stream->ops.front().waits || stream->ops.front().waits->done >= stream->ops.front().version);
}

// Run what there is until a stream has nothing left.
static Result finish(Stream* wanted) {
  Result worst = 0;
  while (!wanted->ops.empty()) {
    Stream* chosen = nullptr;
    for (Stream* one : streams) {
      if (!can_run(one)) continue;
      bool is_better = !chosen || one->ops.front().number < chosen->ops.front().number;
      if (chosen && order) is_better = (one == wanted) == (order == 2);
      if (is_better) chosen = one;
    }
    if (!chosen) return 700;  // all wait for each other
    Op op = chosen->ops.front();
    chosen->ops.pop_front();
    if (Result result = op.run()) worst = result;
  }
  return worst;
}

static Result finish_all() {
  Result worst = 0;
  for (Stream* one : streams)
    if (Result result = finish(one)) worst = result;
  return worst;
}

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
  Lock lock(one_at_a_time);
  finish_all();
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
Result cuModuleUnload(void* module) {
  finish_all();
  return dlclose(module) ? INVALID_VALUE : OK;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
  char symbol[512] = "sim_";
  strncat(symbol, name, sizeof symbol - 5);
  return (*function = dlsym(module, symbol)) ? OK : NOT_FOUND;
}
Result push(void* stream, std::function<Result()> run, Event* waits = nullptr, long version = 0) {
  Lock lock(one_at_a_time);
  if (!contexts) return INVALID_CONTEXT;
  if (!stream) return finish_all(), run();
  for (Stream* one : streams)
    if (one == stream) return one->ops.push_back({issued++, waits, version, run}), OK;
  return INVALID_VALUE;
}
void fake_order(int wanted) { order = wanted; }
Result cuStreamCreate(void** stream, unsigned) {
  Lock lock(one_at_a_time);
  streams.push_back(new Stream());
  return *stream = streams.back(), OK;
}
Result cuStreamSynchronize(void* stream) {
  Lock lock(one_at_a_time);
  if (!contexts) return INVALID_CONTEXT;
  return stream ? finish((Stream*)stream) : finish_all();
}
Result cuEventCreate(void** event, unsigned) { return *event = new Event(), OK; }
Result cuEventDestroy_v2(void* event) {
  Lock lock(one_at_a_time);
  finish_all();
  return delete (Event*)event, OK;
}
Result cuEventRecord(void* event, void* stream) {
  Event* one = (Event*)event;
  long version = ++one->asked;
  return push(stream, [=] { return one->done = version, OK; });
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned) {
  Event* one = (Event*)event;
  return push(stream, [] { return OK; }, one, one->asked);
}
Result cuMemAllocHost_v2(void** address, size_t size) {
  if (!contexts) return INVALID_CONTEXT;
  *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  pinned[*address] = size;
  return OK;
}
Result cuMemFreeHost(void* address) {
  Lock lock(one_at_a_time);
  finish_all();
  if (!contexts || !pinned.erase(address)) return INVALID_VALUE;
  return free(address), OK;
}
long fake_pinned_bytes() {
  long total = 0;
  for (auto& one : pinned) total += one.second;
  return total;
}
Result cuMemcpyHtoDAsync_v2(uintptr_t device, const void* host, size_t size, void* stream) {
  if (!on_device(device, size) || on_device((uintptr_t)host, 1)) return INVALID_VALUE;
  return push(stream, [=] { return memcpy((void*)device, host, size), OK; });
}
Result cuMemcpyDtoHAsync_v2(void* host, uintptr_t device, size_t size, void* stream) {
  if (!on_device(device, size) || on_device((uintptr_t)host, 1)) return INVALID_VALUE;
  return push(stream, [=] { return memcpy(host, (void*)device, size), OK; });
}
Result cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void* stream) {
  if (!on_device(to, size) || !on_device(from, size)) return INVALID_VALUE;
  return push(stream, [=] { return memcpy((void*)to, (void*)from, size), OK; });
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return INVALID_VALUE;
  return large_shared[function] = value, OK;
}
Result cuLaunchKernel(int (*function)(unsigned, unsigned, unsigned, void**), unsigned x, unsigned y, unsigned z, unsigned threads,
                      unsigned ty, unsigned tz, unsigned shared, void* stream, void** arguments, void** extra) {
  if (!contexts || y != 1 || z != 1 || ty != 1 || tz != 1 || extra || !x || !threads || threads > 1024 || !stream)
    return INVALID_VALUE;
  if (shared > 48 * 1024 && shared > (large_shared.count((void*)function) ? large_shared[(void*)function] : 0)) return INVALID_VALUE;
  if (fail_next_launch) return fail_next_launch = false, 719;
  return push(stream, [=] { return function(x, threads, shared, arguments); });
}
}
