// What runs beside the threads of a block from sm_90 on: mbarriers, bulk copies to shared memory (with tensor maps or without), the
// proxies' fences, named barriers. By the PTX ISA, "Asynchronous operations", "mbarrier", "Tensors", and the driver's API,
// cuTensorMapEncodeTiled.
//
// A bulk copy poisons its destination when it is issued. It ends as late as it may (order 0), at once (order 1) or at a random time,
// and only then counts its bytes down. What the generic proxy wrote the async proxy sees behind a fence of the thread that wrote.
#pragma once

// What cuTensorMapEncodeTiled makes: ours, of the size of NVIDIA's. Extents and strides (bytes) from the innermost dimension on.
struct alignas(8) CUtensorMap {
  uint64_t address, extents[5], strides[5];
  uint32_t rank, item_bytes, swizzle_bytes, box[5];
  uint64_t unused;
};
#define __grid_constant__

namespace sim {
struct MBarrier {
  unsigned number, count, pending, phase = 0;
  long bytes = 0;         // that copies still owe to this phase
  bool is_fenced = false; // whether the async proxy sees that it is initialised
  Clock arrived, passed;  // of this phase, and of all before
};
SIM_GLOBAL std::map<unsigned, MBarrier> mbarriers;  // by address
struct Bulk {
  CUtensorMap map;  // of rank 0: `from` is contiguous
  int place[5];
  const char* from;
  unsigned to, size, mbarrier;
};
SIM_GLOBAL std::vector<Bulk> bulks;
struct NamedBarrier {
  std::vector<unsigned> waiting;
  unsigned count = 0;
  Clock clock;
};
SIM_GLOBAL NamedBarrier named_barriers[16];
SIM_GLOBAL std::vector<unsigned> registers;  // of each warp, as setmaxnreg says it; 0: as launched
static const unsigned FILE_REGISTERS = 64 << 10;  // of a multiprocessor

SIM_FUNCTION void begin_asynchronous() {
  mbarriers.clear();
  bulks.clear();
  for (auto& one : named_barriers) one = NamedBarrier();
  registers.assign((threads_of_block + WARP - 1) / WARP, 0);
}
// Swizzles exchange 16-byte chunks: the bits of the address from 4 on, one for each doubling of 16 bytes up to the row's, are
// combined with as many from 7 on.
SIM_FUNCTION unsigned swizzled(unsigned at, unsigned row_bytes) {
  unsigned mask = row_bytes / 16 - (row_bytes > 0);
  return at ^ (at >> 7 & mask) << 4;
}

SIM_FUNCTION MBarrier* mbarrier_at(unsigned at) {
  auto found = mbarriers.find(at);
  if (found == mbarriers.end()) return fail("no mbarrier was initialised", at), nullptr;
  if (!is_before(shadow[at].written)) fail("an mbarrier that another thread initialised, with no barrier between", at);
  return &found->second;
}
SIM_FUNCTION void initialise_mbarrier(unsigned at, unsigned count) {
  if (at % 8) return fail("an mbarrier at an address that 8 does not divide", at);
  if (!count || mbarriers.size() >= MBARRIERS) return fail("an mbarrier that counts nothing, or too many of them", at);
  writing(at, 8);
  if (fault[0]) return;
  for (unsigned i = at; i < at + 8; i++) shadow[i].is_mbarrier = true;
  is_left_over = true;
  MBarrier& one = mbarriers[at];
  one.number = mbarriers.size() - 1;
  one.count = one.pending = count;
  one.arrived = one.passed = Clock(2 * agents());
}
SIM_FUNCTION void complete_phase(MBarrier& one) {
  if (one.pending || one.bytes) return;
  join(one.passed, one.arrived);
  one.phase++;
  one.pending = one.count;
}
SIM_FUNCTION void arrive(unsigned at, unsigned bytes = 0) {
  MBarrier* one = mbarrier_at(at);
  if (fault[0]) return;
  if (!one->pending) return fail("more arrivals at an mbarrier than it counts", at);
  release(one->arrived);
  one->bytes += bytes;
  one->pending--;
  complete_phase(*one);
}
SIM_FUNCTION bool has_passed(unsigned at, unsigned parity) { return (mbarriers[at].phase & 1) != parity; }
// 1, or 0 as hardware may say after a while: callers ask again.
SIM_FUNCTION uint32_t try_wait(unsigned at, unsigned parity) {
  MBarrier* one = mbarrier_at(at);
  if (fault[0]) leave(DONE);
  if (!has_passed(at, parity)) {
    if (order >= 2 && random(2)) {
      leave(READY);
      return 0;
    }
    fibers[current].mbarrier = at;
    fibers[current].parity = parity;
    leave(AT_MBARRIER);
  }
  acquire(one->passed);
  return 1;
}
SIM_FUNCTION void fence_proxy() { fenced[current] = tick++; }
SIM_FUNCTION void fence_initialisation() {
  for (auto& one : mbarriers) one.second.is_fenced |= shadow[one.first].written.agent == current;
}

// A byte that the async proxy reads or writes in the order of the current thread: what the generic proxy wrote is fenced.
SIM_FUNCTION void enter_async_proxy(unsigned i) {
  const Write& one = shadow[i].written;
  if (one.tick <= first_tick || one.agent >= threads_of_block) return;
  bool is_fenced = one.agent == current ? fenced[current] >= one.tick : knows(agents() + one.agent) >= one.tick;
  if (!is_fenced) fail("the async proxy comes to what a thread wrote, with no fence.proxy.async between", i);
}
SIM_FUNCTION void begin_bulk(Bulk one) {
  if (!is_inside(one.to, one.size)) return;
  MBarrier* mbarrier = mbarrier_at(one.mbarrier);
  if (fault[0]) return;
  if (!mbarrier->is_fenced) return fail("a copy completes on an mbarrier whose initialisation is not fenced", one.mbarrier);
  for (unsigned i = one.to; i < one.to + one.size; i++) {
    overwriting(i);
    enter_async_proxy(i);
    shadow[i].pending = true;
  }
  if (fault[0]) return;
  memset(&shared[one.to], 0xFF, one.size);
  bulks.push_back(one);
  counts[BULK_COPY]++;
}
SIM_FUNCTION void bulk_copy(unsigned to, const void* from, unsigned size, unsigned mbarrier) {
  if (to % 16 || size % 16 || (uintptr_t)from % 16) return fail("a bulk copy that is not of chunks of 16 bytes", to);
  begin_bulk({{}, {}, (const char*)from, to, size, mbarrier});
}
template <unsigned RANK> inline void tensor_copy(unsigned to, const void* map, const int (&place)[RANK], unsigned mbarrier) {
  Bulk one{*(const CUtensorMap*)map, {}, nullptr, to, 0, mbarrier};
  if (one.map.rank != RANK) return fail("a tensor copy of another rank than its tensor map", to);
  if (to % 128) return fail("a tensor copy to an address that 128 does not divide", to);
  one.size = one.map.item_bytes;
  for (unsigned i = 0; i < RANK; i++) one.size *= one.map.box[i], one.place[i] = place[i];
  begin_bulk(one);
}
// The bytes of a copy, in the order of shared memory before the swizzle; elements outside of the tensor are zeros.
SIM_FUNCTION void bring(const Bulk& one) {
  const CUtensorMap& map = one.map;
  if (!map.rank) {
    memcpy(&shared[one.to], one.from, one.size);
    return;
  }
  unsigned number = 0, index[5] = {0};
  for (unsigned at = one.to; at < one.to + one.size; at += map.item_bytes) {
    const char* from = (const char*)map.address;
    bool is_inside = true;
    unsigned left = number++;
    for (unsigned d = 0; d < map.rank; d++) {
      long i = one.place[d] + (long)(left % map.box[d]);
      left /= map.box[d];
      is_inside &= i >= 0 && i < (long)map.extents[d];
      from += i * (d ? (long)map.strides[d - 1] : (long)map.item_bytes);
    }
    char* to = &shared[swizzled(at, map.swizzle_bytes)];
    if (is_inside) memcpy(to, from, map.item_bytes);
    else memset(to, 0, map.item_bytes);
  }
}
SIM_FUNCTION void finish_bulk(unsigned number) {
  Bulk one = bulks[number];
  bulks.erase(bulks.begin() + number);
  MBarrier& mbarrier = mbarriers[one.mbarrier];
  unsigned short agent = threads_of_block + mbarrier.number;
  bring(one);
  for (unsigned i = one.to; i < one.to + one.size; i++) {
    shadow[i].pending = false;
    shadow[i].written = {tick, agent};
  }
  mbarrier.arrived[agent] = tick++;
  mbarrier.bytes -= one.size;
  complete_phase(mbarrier);
}

// bar.sync of so many threads of the block.
SIM_FUNCTION void named_barrier(unsigned number, unsigned count) {
  if (number > 15 || count % WARP) return fail("a named barrier that there is not, or not of whole warps", number);
  NamedBarrier& one = named_barriers[number];
  if (one.waiting.empty()) one.count = count, one.clock = Clock(2 * agents());
  if (one.count != count) return fail("threads at a named barrier count differently", number);
  release(one.clock);
  one.waiting.push_back(current);
  if (one.waiting.size() < count) return leave(AT_NAMED_BARRIER);
  unsigned last = current;
  for (unsigned thread : one.waiting) {
    current = thread;
    acquire(one.clock);
    fibers[thread].state = READY;
  }
  current = last;
  one.waiting.clear();
}
// setmaxnreg of a warp; all warps of a block together have what a multiprocessor has.
struct Registers {
  unsigned count;
};
SIM_FUNCTION void set_registers(void** lanes) {
  unsigned count = ((Registers*)lanes[0])->count, total = 0;
  registers[current / WARP] = count;
  for (unsigned one : registers) total += one * WARP;
  if (total > FILE_REGISTERS) fail("the warps of a block ask for more registers than there are");
}
}  // namespace sim
