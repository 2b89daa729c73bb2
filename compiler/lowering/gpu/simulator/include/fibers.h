// Threads of a GPU on one thread of the CPU. The threads of a block are fibers where they meet: at barriers, and as lanes of a warp
// (of SIM_WARP lanes; a wavefront on AMD's GPUs) at its collective instructions; else they run one after the other.
//
// sim_order says in which order what may run at once does: 0 forwards, 1 backwards, from 2 on at random, the number being the seed,
// warps of a block interleaved at their collective instructions. A kernel that is right gives the same bits in all of them.
// Races on shared memory are found whatever the order is (shared_memory.h).
//
// The simulator is compiled once, into an object of its own. Kernels, with SIM_KERNELS defined, are linked with it, and take no
// more of its functions than what they inline: else it would be most of what g++ has to do for them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#ifndef SIM_WARP
#define SIM_WARP 32
#endif
#ifdef SIM_KERNELS
#define SIM_FUNCTION extern inline __attribute__((gnu_inline))
#define SIM_GLOBAL extern
#else
#define SIM_FUNCTION
#define SIM_GLOBAL
#endif
#define SIM_EXPORT extern "C" __attribute__((visibility("default")))
struct Index {
  unsigned x = 0, y = 0, z = 0;
};
SIM_GLOBAL Index threadIdx, blockIdx, blockDim, gridDim;

// What a C compiler keeps of a function when it calls another; the rest of a fiber is its stack.
extern "C" void sim_switch(void** save, void* to);
#ifndef SIM_KERNELS
asm(R"(.text
.globl sim_switch
.hidden sim_switch
sim_switch:
 push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
 mov %rsp, (%rdi)
 mov %rsi, %rsp
 pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
 ret
)");
#endif

namespace sim {
static const unsigned WARP = SIM_WARP, STACK = 256 << 10;
SIM_GLOBAL int order;
SIM_GLOBAL char fault[256];   // the first one of a launch; empty if there is none
SIM_GLOBAL unsigned current;  // number of the running thread in its block
SIM_GLOBAL bool is_left_over;  // whether the shadow of shared memory may have marks of the block before

SIM_FUNCTION void fail(const char* text, unsigned at) {
  is_left_over = true;
  if (!fault[0]) snprintf(fault, sizeof fault, "%s at shared byte %u, by thread %u of block %u", text, at, current, blockIdx.x);
}
SIM_FUNCTION void fail(const char* text) {
  is_left_over = true;
  if (!fault[0]) snprintf(fault, sizeof fault, "%s, thread %u of block %u", text, current, blockIdx.x);
}
}  // namespace sim

#include "shared_memory.h"

namespace sim {
// An operation of all lanes of a warp together, on an array of the lanes' operands.
typedef void (*Collective)(void** operands);
enum State { READY, AT_BARRIER, AT_COLLECTIVE, AT_MBARRIER, AT_NAMED_BARRIER, ASLEEP, DONE };
struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  State state = DONE;
  Collective operation = nullptr;
  void* operands = nullptr;
  unsigned mbarrier = 0, parity = 0;  // that it waits for
};
SIM_GLOBAL std::vector<Fiber> fibers;
SIM_GLOBAL void* scheduler;
SIM_GLOBAL unsigned long events;  // how often threads left off for anything but sleep
SIM_GLOBAL std::function<void()> body;
SIM_GLOBAL unsigned long long seed;
SIM_GLOBAL void (*begin_block)();           // what else is done before a block
SIM_GLOBAL bool (*is_released)(const Fiber&);  // whether the mbarrier that a thread waits for has let it pass
SIM_GLOBAL bool (*progress)(bool is_idle);     // what runs beside threads may end; whether it did

SIM_FUNCTION unsigned random(unsigned below) {  // xorshift64
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (unsigned)(seed >> 33) % below;
}
SIM_FUNCTION void leave(State state) {
  events += state != ASLEEP;
  fibers[current].state = state;
  sim_switch(&fibers[current].stack_pointer, scheduler);
}
SIM_FUNCTION void enter() {
  body();
  leave(DONE);
}
// All lanes of the warp wait for each other, then `operation` is done for all of them.
template <class Operands>
inline void together(Collective operation, Operands& operands) {
  fibers[current].operation = operation;
  fibers[current].operands = &operands;
  leave(AT_COLLECTIVE);
}
SIM_FUNCTION void resume(unsigned thread) {
  current = thread;
  threadIdx = {thread, 0, 0};
  fibers[thread].state = READY;
  sim_switch(&scheduler, fibers[thread].stack_pointer);
}
SIM_FUNCTION void begin_fibers(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    if (!fiber.stack) fiber.stack = (char*)aligned_alloc(64, STACK);
    void** top = (void**)(fiber.stack + STACK);
    *--top = nullptr;
    *--top = (void*)enter;
    fiber.stack_pointer = top - 6;
    fiber.state = READY;
  }
}
// Run the lanes [begin, end) of a warp as far as they get, then its collective instruction if they are at one. False: nothing ran.
SIM_FUNCTION bool run_warp(unsigned begin, unsigned end) {
  bool has_run = false;
  for (unsigned k = begin; k < end; k++) {
    unsigned i = order == 1 ? end - 1 - (k - begin) : k;
    if (fibers[i].state == AT_MBARRIER && is_released(fibers[i])) fibers[i].state = READY;
    if (fibers[i].state != READY) continue;
    resume(i);
    has_run = true;
  }
  unsigned waiting = 0, coming = 0;  // lanes at the instruction, and those that something else holds up
  for (unsigned i = begin; i < end; i++) {
    State state = fibers[i].state;
    waiting += state == AT_COLLECTIVE;
    coming += state == READY || state == AT_MBARRIER || state == AT_NAMED_BARRIER || state == ASLEEP;
  }
  if (!waiting || coming) return has_run;
  void* operands[WARP];
  Collective operation = nullptr;
  for (unsigned i = begin; i < end; i++) {
    current = i;
    if (fibers[i].state != AT_COLLECTIVE) return fail("lanes of a warp miss a collective instruction"), false;
    if (operation && fibers[i].operation != operation) return fail("lanes of a warp execute different instructions"), false;
    operation = fibers[i].operation;
    operands[i - begin] = fibers[i].operands;
    fibers[i].state = READY;
  }
  current = begin;
  operation(operands);
  return true;
}
// Run a block to its end, or until nothing is left to do but to sleep (true). Threads that have ended while others wait for them at
// a barrier are a fault.
SIM_FUNCTION bool run_block(unsigned threads) {
  std::vector<unsigned> turn;
  for (unsigned begin = 0; begin < threads; begin += WARP) turn.push_back(begin);
  if (order == 1) std::reverse(turn.begin(), turn.end());
  for (;;) {
    bool has_run = false;
    if (order >= 2)
      for (unsigned i = turn.size(); i > 1; i--) std::swap(turn[i - 1], turn[random(i)]);
    for (unsigned begin : turn) {
      unsigned steps = order < 2 ? ~0u : 1 + random(40);
      while (steps-- && run_warp(begin, std::min(begin + WARP, threads))) {
        has_run = true;
        if (progress) progress(false);
      }
      if (fault[0]) return false;
    }
    if (has_run || (progress && progress(true))) continue;
    unsigned met = 0, done = 0, asleep = 0;
    for (unsigned i = 0; i < threads; i++) {
      met += fibers[i].state == AT_BARRIER;
      done += fibers[i].state == DONE;
      asleep += fibers[i].state == ASLEEP;
    }
    if (done == threads) return false;
    if (asleep) return true;
    for (unsigned i = 0; i < threads; i++)
      if (fibers[i].state == AT_MBARRIER) return current = i, fail("waits for ever at an mbarrier", fibers[i].mbarrier), false;
    if (met != threads) return fail("some threads of a block miss a barrier"), false;
    pass_barrier();
    for (unsigned i = 0; i < threads; i++) fibers[i].state = READY;
  }
}
// What a block has of its own while another one runs: what makes it is swapped with the variables of the one that does.
struct Block {
  Index index;
  std::vector<Fiber> fibers;
  std::vector<char> shared, more[3];
  std::vector<Byte> shadow;
  std::vector<Chunk> chunks;
  std::vector<std::vector<Reads>> readers;
  unsigned first_tick = 0, barrier_tick = 0;
  std::vector<Clock> known, known_alone;
  std::vector<unsigned> fenced;
  std::vector<Copies> copies;
  std::map<std::pair<unsigned, long>, std::vector<unsigned>> phase_of;
  std::vector<long> accesses[KINDS];
  bool is_over = false;
};
SIM_GLOBAL void (*exchange_more)(std::vector<char>*);  // what else a block has
SIM_FUNCTION void exchange(Block& one) {
  std::swap(blockIdx, one.index);
  std::swap(fibers, one.fibers);
  std::swap(shared, one.shared);
  std::swap(shadow, one.shadow);
  std::swap(chunks, one.chunks);
  std::swap(readers, one.readers);
  std::swap(first_tick, one.first_tick);
  std::swap(barrier_tick, one.barrier_tick);
  std::swap(known, one.known);
  std::swap(known_alone, one.known_alone);
  std::swap(fenced, one.fenced);
  std::swap(copies, one.copies);
  std::swap(phase_of, one.phase_of);
  for (int kind = 0; kind < KINDS; kind++) std::swap(accesses[kind], one.accesses[kind]);
  if (exchange_more) exchange_more(one.more);
}
SIM_FUNCTION void begin_block_of(unsigned number, unsigned threads, unsigned fixed) {
  blockIdx = {number, 0, 0};
  begin_shared(dynamic_bytes + fixed, threads);
  if (begin_block) begin_block();
}
// Blocks that wait for each other take turns: each runs until its threads sleep. mbarriers are not theirs to keep.
SIM_FUNCTION void run_together(unsigned blocks, unsigned threads, unsigned fixed) {
  static std::vector<Block> all;
  if (all.size() < blocks) all.resize(blocks);
  unsigned running = blocks, idle = 0;  // rounds in which no block did anything
  for (unsigned b = 0; b < blocks; b++) {
    exchange(all[b]);
    begin_block_of(b, threads, fixed);
    begin_fibers(threads);
    exchange(all[b]);
    all[b].is_over = false;
  }
  while (running && !fault[0]) {
    unsigned long before = events;
    for (unsigned k = 0; k < blocks && !fault[0]; k++) {
      Block& one = all[order == 1 ? blocks - 1 - k : order < 2 ? k : random(blocks)];
      if (one.is_over) continue;
      exchange(one);
      for (unsigned i = 0; i < threads; i++)
        if (fibers[i].state == ASLEEP) fibers[i].state = READY;
      bool sleeps = run_block(threads);
      exchange(one);
      if (!sleeps) one.is_over = true, running--;
    }
    idle = events == before ? idle + 1 : 0;
    if (running && idle > (order < 2 ? 0 : 100) && !fault[0]) fail("blocks of a grid wait for each other for ever");
  }
}
// 0, or 719 (CUDA_ERROR_LAUNCH_FAILED) and a text in `fault`. `meets`: the threads of a block wait for each other somewhere.
// `dynamic` bytes of shared memory are those that the launch asks for, `fixed` those of the arrays that the kernel declares.
// `cooperates`: so do its blocks.
SIM_FUNCTION int launch(unsigned blocks, unsigned threads, unsigned dynamic, unsigned fixed, bool meets, bool cooperates,
                        std::function<void()> kernel) {
  body = kernel;
  dynamic_bytes = (dynamic + 127) / 128 * 128;
  fault[0] = 0;
  seed = 88172645463325252ull + order;
  blockDim = {threads, 1, 1};
  gridDim = {blocks, 1, 1};
  if (cooperates) run_together(blocks, threads, fixed);
  for (unsigned b = 0; b < blocks && !fault[0] && !cooperates; b++) {
    begin_block_of(order == 1 ? blocks - 1 - b : b, threads, fixed);
    if (meets) {
      begin_fibers(threads);
      run_block(threads);
      continue;
    }
    for (unsigned i = 0; i < threads; i++) {
      current = order == 1 ? threads - 1 - i : i;
      threadIdx = {current, 0, 0};
      body();
    }
  }
  return fault[0] ? 719 : 0;
}
}  // namespace sim

#ifndef SIM_KERNELS
SIM_EXPORT void sim_order(int order) { sim::order = order; }
SIM_EXPORT const char* sim_fault() { return sim::fault; }
// How many instructions of each kind there were since the last call, and their shared-memory wavefronts a phase (1.0: no conflicts).
SIM_EXPORT void sim_statistics(double* counts, double* conflicts) {
  for (int kind = 0; kind < sim::KINDS; kind++) {
    counts[kind] = (double)sim::counts[kind];
    conflicts[kind] = sim::phases[kind] ? (double)sim::wavefronts[kind] / sim::phases[kind] : 0;
    sim::counts[kind] = sim::phases[kind] = sim::wavefronts[kind] = 0;
  }
}
#endif
