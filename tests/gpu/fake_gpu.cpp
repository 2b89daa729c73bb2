// A libcuda (or, with -DHIP, a libamdhip64) for tests: the memory of the "device" is the host's, and a binary is an ELF header and
// the path of a shared library in which each kernel is a function
// sim_NAME(blocks, threads, bytes of shared memory, arguments).
//
// Nothing runs before somebody waits for it, and then no more than must; fake_order says which of the operations that streams, events
// and edges of graphs leave free goes first:
//   0 the one that was asked first   1 copies   2 kernels   3 the one that was asked last   from 4 on a random one, of this seed
//
// Besides, every operation knows the bytes it touches (those of a kernel by fake_declare) and all that happens before it. Two that
// touch the same bytes, one of them writing, where neither happens before the other, are a race whatever the order was: fake_races.
// So is a graph that is changed, or memory that is freed by name, while it is in use; what is freed is poisoned first.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

typedef int Result;
typedef uintptr_t Address;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NO_BINARY = 209, NOT_FOUND = 500 };

struct Range { Address at; size_t size; bool writes; };
struct Op {
  std::function<Result()> run;
  std::vector<Range> ranges;
  std::vector<long> after;
  std::string what;
  bool is_copy = false;
  bool cooperates = false, is_cooperative = false;  // blocks wait for each other; the launch says so
  std::set<long> before;  // all that happens before it
};
typedef int Simulated(unsigned blocks, unsigned threads, unsigned shared, void** arguments);
struct Kernel { Simulated* function; std::string name; int arguments, maps; unsigned shared; bool cooperates; };
typedef std::array<uint64_t, 16> Cell;  // an argument: the first 8 bytes, or a tensor map
struct Stream { long last = -1; };
struct Event { long op = -1; long long time = 0; };
struct Node { Op op; };
struct Graph { std::vector<Node*> nodes; std::map<Node*, std::vector<Node*>> after; };
struct Instance { Graph* graph; std::map<Node*, Op> ops; long last = -1; };
struct Argument { size_t size; bool writes; };

static std::map<long, Op> pending;          // asked for, and not yet run
static std::map<long, Op> recent;           // run or not, and not yet known to the host to be over
static long issued = 0, clock_ns = 0;
static int sticky = 0, order = 0;
static unsigned long long seed = 1;
static std::string races;
static std::map<Address, size_t> device, pinned;
static std::map<std::string, std::vector<Argument>> declared;
static std::map<std::string, std::pair<long, int>> failures;  // by function: how many calls go well before one fails, and how
static std::set<Stream*> streams;
static Stream legacy;
static std::set<Event*> events;
static std::set<Graph*> graphs;
static std::set<Instance*> instances;
static std::set<Kernel*> kernels;
static std::set<void*> modules;
static thread_local int contexts = 0, last_error = 0, current = 0;
static std::recursive_mutex one_at_a_time;

struct Call {
  std::lock_guard<std::recursive_mutex> lock{one_at_a_time};
  Result result = OK;
  Call(const char* name, bool needs_context = true) {
    auto found = failures.find(name);
    if (needs_context && !contexts) result = INVALID_CONTEXT;
    else if (found != failures.end() && found->second.first-- == 0) { result = found->second.second; failures.erase(found); }
    if (result) last_error = result;
  }
};
#ifdef HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define ENTER(name) Call call(TEXT(name)); if (call.result) return call.result

static unsigned long long random_number() { seed ^= seed << 13; seed ^= seed >> 7; return seed ^= seed << 17; }

static const std::pair<const Address, size_t>* block_of(const std::map<Address, size_t>& blocks, Address at, size_t size) {
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return nullptr;
  --after;
  return at + size <= after->first + after->second ? &*after : nullptr;
}

static bool can_run(const Op& op) {
  return std::none_of(op.after.begin(), op.after.end(), [](long one) { return pending.count(one); });
}

static bool run_one() {
  long chosen = -1;
  std::vector<long> free;
  for (auto& [number, op] : pending) if (can_run(op)) free.push_back(number);
  if (free.empty()) return false;
  chosen = free.front();
  if (order == 3) chosen = free.back();
  if (order >= 4) chosen = free[random_number() % free.size()];
  if (order == 1 || order == 2)
    for (long one : free) if (pending[one].is_copy == (order == 1)) { chosen = one; break; }
  Op op = pending[chosen];
  pending.erase(chosen);
  clock_ns += 1000;
  if (!sticky && op.cooperates && !op.is_cooperative) sticky = 719;  // its blocks may wait for such as never begin
  if (!sticky && op.run) if (Result result = op.run()) sticky = result;
  return true;
}

static Result until(long number) {
  while (number >= 0 && pending.count(number)) if (!run_one()) return 999;
  auto found = recent.find(number);
  if (found != recent.end()) {
    std::set<long> over = found->second.before;
    over.insert(number);
    for (long one : over) recent.erase(one);
  }
  return sticky;
}

static void everything() {
  while (run_one()) {}
  recent.clear();
}

static long ask(Op op) {
  long number = issued++;
  for (long one : op.after) {
    op.before.insert(one);
    auto found = recent.find(one);
    if (found != recent.end()) op.before.insert(found->second.before.begin(), found->second.before.end());
  }
  for (auto& [other, earlier] : recent) {
    if (op.before.count(other)) continue;
    for (auto& a : earlier.ranges)
      for (auto& b : op.ranges)
        if ((a.writes || b.writes) && a.at < b.at + b.size && b.at < a.at + a.size)
          races += earlier.what + " (" + std::to_string(other) + ") and " + op.what + " (" + std::to_string(number) + ") touch the same bytes, and none waits for the other; ";
  }
  pending[number] = recent[number] = op;
  return number;
}

static Stream* stream_of(void* handle) {
  if (!handle) return &legacy;
  return streams.count((Stream*)handle) ? (Stream*)handle : nullptr;
}

static Result push(void* handle, Op op) {
  Stream* stream = stream_of(handle);
  if (!stream) return INVALID_VALUE;
  if (sticky) return sticky;
  if (stream->last >= 0) op.after.push_back(stream->last);
  stream->last = ask(op);
  return OK;
}

static Op copy_op(Address to, Address from, size_t size) {
  Op op;
  op.what = "a copy";
  op.is_copy = true;
  op.ranges = {{to, size, true}, {from, size, false}};
  op.run = [=] { return memmove((void*)to, (void*)from, size), OK; };
  return op;
}

static Op kernel_op(Kernel* kernel, unsigned blocks, unsigned threads, unsigned shared, void** arguments, bool is_cooperative = false) {
  Op op;
  op.cooperates = kernel->cooperates;
  op.is_cooperative = is_cooperative;
  op.what = kernel->name;
  std::vector<Cell> values;
  auto known = declared.find(kernel->name);
  size_t pointers = known == declared.end() ? 0 : known->second.size();
  for (size_t i = 0; i < (size_t)kernel->arguments; i++) {
    Cell value{};
    memcpy(&value, arguments[i], (int)i < kernel->arguments - kernel->maps ? sizeof(uint64_t) : sizeof(Cell));
    values.push_back(value);
    if (i < pointers && known->second[i].size) op.ranges.push_back({value[0], known->second[i].size, known->second[i].writes});
  }
  op.run = [=]() mutable {
    std::vector<void*> places;
    for (auto& value : values) places.push_back(&value);
    return kernel->function(blocks, threads, shared, places.data());
  };
  return op;
}

static Result check_grid(Kernel* kernel, unsigned blocks, unsigned threads, unsigned shared) {
  return kernels.count(kernel) && blocks && threads && threads <= 1024 && shared <= kernel->shared ? OK : INVALID_VALUE;
}

static Result add_node(void** node, Graph* graph, void** after, size_t count, Op op) {
  if (!graphs.count(graph)) return INVALID_VALUE;
  Node* made = new Node{op};
  for (size_t i = 0; i < count; i++) graph->after[made].push_back((Node*)after[i]);
  graph->nodes.push_back(made);
  return *node = made, OK;
}

static Result change(Instance* instance, Node* node, Op op) {
  if (!instances.count(instance) || !instance->ops.count(node)) return INVALID_VALUE;
  if (recent.count(instance->last)) races += "a graph is changed while it may run; ";
  op.is_cooperative = instance->ops[node].is_cooperative;  // an attribute of the node stays
  instance->ops[node] = op;
  return OK;
}

static Result allocate(std::map<Address, size_t>& blocks, void** address, size_t size) {
  if (size > (1ull << 40)) return OUT_OF_MEMORY;
  *address = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  memset(*address, 0xFF, size);  // NaN of all floating types
  blocks[(Address)*address] = size;
  return OK;
}

static Result give_back(std::map<Address, size_t>& blocks, void* address) {
  if (!blocks.count((Address)address)) return INVALID_VALUE;
  everything();  // as both drivers do, who wait for the device
  memset(address, 0xDD, blocks[(Address)address]);
  blocks.erase((Address)address);
  return free(address), OK;
}

extern "C" {
// What tests say and ask.
long fake_bytes() { long total = 0; for (auto& one : device) total += one.second; return total; }
long fake_pinned_bytes() { long total = 0; for (auto& one : pinned) total += one.second; return total; }
long fake_objects() { return streams.size() + events.size() + graphs.size() + instances.size() + modules.size(); }
void fake_order(int wanted) { order = wanted; seed = wanted * 2654435761ull + 88172645463325252ull; }
void fake_fail(const char* function, long after, int code) { failures[function] = {after, code}; }
void fake_mend() { failures.clear(); sticky = 0; }
void fake_break_kernel(int code) { sticky = 0; Op op; op.what = "a broken kernel"; op.run = [=] { return code; }; ask(op); }
void fake_declare(const char* kernel, int count, const size_t* sizes, const int* writes) {
  auto& arguments = declared[kernel];
  arguments.clear();
  for (int i = 0; i < count; i++) arguments.push_back({sizes[i], (bool)writes[i]});
}
const char* fake_races() { static std::string said; said = races; races.clear(); return said.c_str(); }

Result NAME(cuInit, hipInit)(unsigned) { return OK; }
#ifdef HIP
Result hipDriverGetVersion(int* version) { return *version = 60200000, OK; }
Result hipGetDeviceCount(int* count) { return *count = 1, OK; }
Result hipSetDevice(int device) { contexts = !device; return current = device, OK; }
Result hipGetDevice(int* device) { return *device = current, OK; }
Result hipGetLastError() { Result last = last_error; return last_error = OK, last; }
Result hipPeekAtLastError() { return last_error; }
Result hipGetDevicePropertiesR0600(char* properties, int) { return strcpy(properties, "gfx of test"), strcpy(properties + 1160, "gfx942:sramecc+:xnack-"), OK; }
const char* hipGetErrorName(int) { return "hipErrorOfTest"; }
#else
Result cuDriverGetVersion(int* version) { return *version = 12040, OK; }
Result cuDeviceGet(int* found, int) { return *found = 0, OK; }
Result cuDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 75 ? 9 : 0, OK; }
Result cuDevicePrimaryCtxRetain(void** context, int) { return *context = (void*)64, OK; }
Result cuCtxPushCurrent_v2(void*) { return contexts++, OK; }
Result cuCtxPopCurrent_v2(void**) { return contexts-- > 0 ? OK : INVALID_CONTEXT; }
Result cuFuncSetAttribute(Kernel* kernel, int attribute, int value) {
  return attribute == 8 && value <= 227 << 10 ? (kernel->shared = value, OK) : INVALID_VALUE;
}
// What the simulator takes for a tensor map (asynchronous.h), for arguments that the driver would accept.
struct TensorMap { uint64_t address, extents[5], strides[5]; uint32_t rank, item_bytes, swizzle_bytes, box[5]; uint64_t unused; };
Result cuTensorMapEncodeTiled(TensorMap* to, int type, uint32_t rank, Address address, const uint64_t* extents, const uint64_t* strides,
                              const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  static_assert(sizeof(TensorMap) == sizeof(Cell), "a tensor map has 128 bytes");
  ENTER(cuTensorMapEncodeTiled);
  static const uint32_t ITEMS[] = {1, 2, 4, 4, 8}, SWIZZLES[] = {0, 32, 64, 128};
  if ((Address)to % 64 || type < 0 || type > 4 || !rank || rank > 5 || address % 16 || interleave || swizzle < 0 || swizzle > 3 || fill) return INVALID_VALUE;
  TensorMap map{address, {}, {}, rank, ITEMS[type], SWIZZLES[swizzle], {}, 0};
  uint64_t size = map.item_bytes * extents[0];
  for (uint32_t i = 0; i < rank; i++) {
    if (!extents[i] || !box[i] || box[i] > 256 || steps[i] != 1) return INVALID_VALUE;
    map.extents[i] = extents[i], map.box[i] = box[i];
    if (i + 1 == rank) break;
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return INVALID_VALUE;
    map.strides[i] = strides[i];
    size += (extents[i + 1] - 1) * strides[i];
  }
  uint64_t row = (uint64_t)box[0] * map.item_bytes;
  if (row % 16 || (map.swizzle_bytes && row > map.swizzle_bytes) || !block_of(device, address, size)) return INVALID_VALUE;
  return *to = map, OK;
}
Result cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_OF_TEST", OK; }
#endif

Result NAME(cuMemGetInfo_v2, hipMemGetInfo)(size_t* free, size_t* total) { return *free = (1ull << 40) - fake_bytes(), *total = 1ull << 40, OK; }
Result NAME(cuMemAlloc_v2, hipMalloc)(void** address, size_t size) {
  ENTER(NAME(cuMemAlloc_v2, hipMalloc));
  return allocate(device, address, size);
}
Result NAME(cuMemFree_v2, hipFree)(void* address) {
  ENTER(NAME(cuMemFree_v2, hipFree));
  return give_back(device, address);
}
Result NAME(cuMemHostAlloc, hipHostMalloc)(void** address, size_t size, unsigned) {
  ENTER(NAME(cuMemHostAlloc, hipHostMalloc));
  return allocate(pinned, address, size);
}
Result NAME(cuMemFreeHost, hipHostFree)(void* address) {
  ENTER(NAME(cuMemFreeHost, hipHostFree));
  return give_back(pinned, address);
}
Result NAME(cuPointerGetAttribute, hipPointerGetAttribute)(unsigned* value, int, Address address) {
  Call call("", false);
  return block_of(device, address, 0) ? (*value = 2, OK) : (last_error = INVALID_VALUE);
}
Result NAME(cuModuleLoadData, hipModuleLoadData)(void** module, const char* image) {
  ENTER(NAME(cuModuleLoadData, hipModuleLoadData));
  *module = dlopen(image + 64, RTLD_NOW | RTLD_LOCAL);
  return *module ? (modules.insert(*module), OK) : NO_BINARY;
}
Result NAME(cuModuleUnload, hipModuleUnload)(void* module) {
  ENTER(NAME(cuModuleUnload, hipModuleUnload));
  everything();
  modules.erase(module);
  return dlclose(module) ? INVALID_VALUE : OK;
}
Result NAME(cuModuleGetFunction, hipModuleGetFunction)(Kernel** kernel, void* module, const char* name) {
  ENTER(NAME(cuModuleGetFunction, hipModuleGetFunction));
  void* found = dlsym(module, ("sim_" + std::string(name)).c_str());
  int* count = (int*)dlsym(module, ("count_" + std::string(name)).c_str());
  if (!found || !count) return NOT_FOUND;
  int* maps = (int*)dlsym(module, ("maps_" + std::string(name)).c_str());
  int* cooperates = (int*)dlsym(module, ("cooperates_" + std::string(name)).c_str());
  *kernel = new Kernel{(Simulated*)found, name, *count, maps ? *maps : 0, NAME(48 << 10, 64 << 10), cooperates && *cooperates};
  return kernels.insert(*kernel), OK;
}
Result NAME(cuStreamCreate, hipStreamCreateWithFlags)(Stream** stream, unsigned flags) {
  ENTER(NAME(cuStreamCreate, hipStreamCreateWithFlags));
  if (flags != 1) return INVALID_VALUE;  // others are tied to the default stream, which hides missing waits
  return streams.insert(*stream = new Stream()), OK;
}
Result NAME(cuStreamDestroy_v2, hipStreamDestroy)(Stream* stream) {
  ENTER(NAME(cuStreamDestroy_v2, hipStreamDestroy));
  return streams.erase(stream) ? OK : INVALID_VALUE;
}
Result NAME(cuStreamSynchronize, hipStreamSynchronize)(void* stream) {
  ENTER(NAME(cuStreamSynchronize, hipStreamSynchronize));
  return stream_of(stream) ? until(stream_of(stream)->last) : INVALID_VALUE;
}
Result NAME(cuEventCreate, hipEventCreateWithFlags)(Event** event, unsigned) {
  ENTER(NAME(cuEventCreate, hipEventCreateWithFlags));
  return events.insert(*event = new Event()), OK;
}
Result NAME(cuEventDestroy_v2, hipEventDestroy)(Event* event) {
  ENTER(NAME(cuEventDestroy_v2, hipEventDestroy));
  everything();
  if (!events.erase(event)) return INVALID_VALUE;
  return delete event, OK;
}
Result NAME(cuEventRecord, hipEventRecord)(Event* event, void* stream) {
  ENTER(NAME(cuEventRecord, hipEventRecord));
  Op op;
  op.what = "an event";
  op.run = [=] { return event->time = clock_ns, OK; };
  Result result = push(stream, op);
  event->op = stream_of(stream)->last;
  return result;
}
Result NAME(cuStreamWaitEvent, hipStreamWaitEvent)(void* stream, Event* event, unsigned) {
  ENTER(NAME(cuStreamWaitEvent, hipStreamWaitEvent));
  Op op;
  op.what = "a wait";
  if (event->op >= 0) op.after = {event->op};
  return push(stream, op);
}
Result NAME(cuEventSynchronize, hipEventSynchronize)(Event* event) {
  ENTER(NAME(cuEventSynchronize, hipEventSynchronize));
  return until(event->op);
}
Result NAME(cuEventElapsedTime, hipEventElapsedTime)(float* milliseconds, Event* begin, Event* end) {
  ENTER(NAME(cuEventElapsedTime, hipEventElapsedTime));
  if (pending.count(begin->op) || pending.count(end->op)) return 600;
  return *milliseconds = (end->time - begin->time) / 1e6f, OK;
}
Result NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(Address to, Address from, size_t size, void* stream) {
  ENTER(NAME(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync));
  if (!block_of(device, to, size) || block_of(device, from, 1)) return INVALID_VALUE;
  if (block_of(pinned, from, size)) return push(stream, copy_op(to, from, size));
  Op op = copy_op(to, to, 0);  // pageable: its bytes are taken now
  std::string taken((const char*)from, size);
  op.ranges = {{to, size, true}};
  op.run = [=] { return memcpy((void*)to, taken.data(), size), OK; };
  return push(stream, op);
}
Result NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(Address to, Address from, size_t size, void* stream) {
  ENTER(NAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync));
  if (!block_of(device, from, size) || block_of(device, to, 1)) return INVALID_VALUE;
  if (block_of(pinned, to, size)) return memset((void*)to, 0xEE, size), push(stream, copy_op(to, from, size));
  Result result = push(stream, copy_op(to, from, size));
  return result ? result : until(stream_of(stream)->last);
}
Result NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(Address to, Address from, size_t size, void* stream) {
  ENTER(NAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync));
  if (!block_of(device, to, size) || !block_of(device, from, size)) return INVALID_VALUE;
  return push(stream, copy_op(to, from, size));
}
Result NAME(cuLaunchKernel, hipModuleLaunchKernel)(Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty,
                                                   unsigned tz, unsigned shared, void* stream, void** arguments, void** extra) {
  ENTER(NAME(cuLaunchKernel, hipModuleLaunchKernel));
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || extra || check_grid(kernel, x, threads, shared)) return INVALID_VALUE;
  return push(stream, kernel_op(kernel, x, threads, shared, arguments));
}

Result NAME(cuLaunchCooperativeKernel, hipModuleLaunchCooperativeKernel)(Kernel* kernel, unsigned x, unsigned y, unsigned z, unsigned threads,
                                                                         unsigned ty, unsigned tz, unsigned shared, void* stream, void** arguments) {
  ENTER(NAME(cuLaunchCooperativeKernel, hipModuleLaunchCooperativeKernel));
  if (y != 1 || z != 1 || ty != 1 || tz != 1 || check_grid(kernel, x, threads, shared)) return INVALID_VALUE;
  return push(stream, kernel_op(kernel, x, threads, shared, arguments, true));
}

Result NAME(cuGraphCreate, hipGraphCreate)(Graph** graph, unsigned) {
  ENTER(NAME(cuGraphCreate, hipGraphCreate));
  return graphs.insert(*graph = new Graph()), OK;
}
#ifdef HIP
struct KernelParameters { unsigned block[3]; void** extra; Kernel* function; unsigned grid[3]; void** arguments; unsigned shared; };
#else
struct KernelParameters { Kernel* function; unsigned grid[3], block[3], shared; void** arguments; void** extra; void *kernel, *context; };
#endif
static Result kernel_node(Op* op, const KernelParameters* wanted) {
  if (wanted->extra || check_grid(wanted->function, wanted->grid[0], wanted->block[0], wanted->shared)) return INVALID_VALUE;
  return *op = kernel_op(wanted->function, wanted->grid[0], wanted->block[0], wanted->shared, wanted->arguments), OK;
}
static Result copy_node(Op* op, Address to, Address from, size_t size, bool from_host) {
  if (!block_of(device, to, size) || !block_of(from_host ? pinned : device, from, size)) return INVALID_VALUE;
  return *op = copy_op(to, from, size), OK;
}
Result NAME(cuGraphAddKernelNode_v2, hipGraphAddKernelNode)(void** node, Graph* graph, void** after, size_t count, const KernelParameters* wanted) {
  ENTER(NAME(cuGraphAddKernelNode_v2, hipGraphAddKernelNode));
  Op op;
  Result result = kernel_node(&op, wanted);
  return result ? result : add_node(node, graph, after, count, op);
}
Result NAME(cuGraphExecKernelNodeSetParams_v2, hipGraphExecKernelNodeSetParams)(Instance* instance, Node* node, const KernelParameters* wanted) {
  ENTER(NAME(cuGraphExecKernelNodeSetParams_v2, hipGraphExecKernelNodeSetParams));
  Op op;
  Result result = kernel_node(&op, wanted);
  return result ? result : change(instance, node, op);
}
Result NAME(cuGraphKernelNodeSetAttribute, hipGraphKernelNodeSetAttribute)(Node* node, int attribute, const int* value) {
  ENTER(NAME(cuGraphKernelNodeSetAttribute, hipGraphKernelNodeSetAttribute));
  if (attribute != 2 || (*value != 0 && *value != 1)) return INVALID_VALUE;
  return node->op.is_cooperative = NAME(*value, false), OK;  // HIP keeps it, and launches the node as any other
}
#ifdef HIP
Result hipGraphAddMemcpyNode1D(void** node, Graph* graph, void** after, size_t count, Address to, Address from, size_t size, int kind) {
  ENTER(hipGraphAddMemcpyNode1D);
  Op op;
  Result result = copy_node(&op, to, from, size, kind == 1);
  return result ? result : add_node(node, graph, after, count, op);
}
Result hipGraphExecMemcpyNodeSetParams1D(Instance* instance, Node* node, Address to, Address from, size_t size, int kind) {
  ENTER(hipGraphExecMemcpyNodeSetParams1D);
  Op op;
  Result result = copy_node(&op, to, from, size, kind == 1);
  return result ? result : change(instance, node, op);
}
#else
struct Side { size_t place[4]; unsigned type; Address host, device; void *array, *reserved; size_t pitch, height; };
struct Copy3D { Side source, destination; size_t width, height, depth; };
static Result copy_node_3d(Op* op, const Copy3D* wanted) {
  const Side &from = wanted->source, &to = wanted->destination;
  if (to.type != 2 || wanted->height != 1 || wanted->depth != 1 || from.array || to.array || from.pitch || to.pitch) return INVALID_VALUE;
  return copy_node(op, to.device, from.type == 1 ? from.host : from.device, wanted->width, from.type == 1);
}
Result cuGraphAddMemcpyNode(void** node, Graph* graph, void** after, size_t count, const Copy3D* wanted, void* context) {
  ENTER(cuGraphAddMemcpyNode);
  Op op;
  Result result = context ? copy_node_3d(&op, wanted) : INVALID_CONTEXT;
  return result ? result : add_node(node, graph, after, count, op);
}
Result cuGraphExecMemcpyNodeSetParams(Instance* instance, Node* node, const Copy3D* wanted, void* context) {
  ENTER(cuGraphExecMemcpyNodeSetParams);
  Op op;
  Result result = context ? copy_node_3d(&op, wanted) : INVALID_CONTEXT;
  return result ? result : change(instance, node, op);
}
#endif
Result NAME(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags)(Instance** instance, Graph* graph, unsigned long long) {
  ENTER(NAME(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags));
  if (!graphs.count(graph)) return INVALID_VALUE;
  *instance = new Instance{graph};
  for (Node* node : graph->nodes) (*instance)->ops[node] = node->op;
  return instances.insert(*instance), OK;
}
Result NAME(cuGraphLaunch, hipGraphLaunch)(Instance* instance, void* handle) {
  ENTER(NAME(cuGraphLaunch, hipGraphLaunch));
  Stream* stream = stream_of(handle);
  if (!instances.count(instance) || !stream) return INVALID_VALUE;
  if (sticky) return sticky;
  std::map<Node*, long> numbers;
  Op end;
  end.what = "the end of a graph";
  for (Node* node : instance->graph->nodes) {
    Op op = instance->ops[node];
    if (stream->last >= 0) op.after.push_back(stream->last);
    if (instance->last >= 0) op.after.push_back(instance->last);  // a graph never runs beside itself
    for (Node* one : instance->graph->after[node]) op.after.push_back(numbers[one]);
    end.after.push_back(numbers[node] = ask(op));
  }
  if (stream->last >= 0) end.after.push_back(stream->last);
  return stream->last = instance->last = ask(end), OK;
}
Result NAME(cuGraphDestroy, hipGraphDestroy)(Graph* graph) {
  ENTER(NAME(cuGraphDestroy, hipGraphDestroy));
  return graphs.erase(graph) ? OK : INVALID_VALUE;
}
Result NAME(cuGraphExecDestroy, hipGraphExecDestroy)(Instance* instance) {
  ENTER(NAME(cuGraphExecDestroy, hipGraphExecDestroy));
  return instances.erase(instance) ? OK : INVALID_VALUE;
}
}
