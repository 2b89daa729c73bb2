// Shared memory of a block, poisoned when the block begins, with a shadow that knows of each byte who wrote it and who read it, and
// when. So races are found exactly, whatever order the threads run in:
//   * reading what nobody wrote, or what another thread wrote with nothing that orders the two;
//   * overwriting what another thread read or wrote with nothing that orders the two;
//   * reading or overwriting the destination of a copy under way, or overwriting what a copy or the matrix unit still reads.
//
// Order is that of vector clocks (Flanagan, Freund: FastTrack: Efficient and Precise Dynamic Race Detection, PLDI 2009). Time is one
// tick, which every release moves on. An agent is a thread, or an mbarrier as the writer of what copies that complete on it bring.
// Barriers of the block order all; meetings of a warp (__syncwarp, its collective instructions) its lanes; mbarriers and named
// barriers, by clocks (asynchronous.h), who arrives before who waits.
#pragma once

namespace sim {
typedef unsigned long long Lanes;
struct Write {
  unsigned tick = 0;
  unsigned short agent = 0;
};
// Lanes of a warp that read at one tick; `others` is a list of those of other warps and ticks, 0 if there are none.
struct Reads {
  Lanes lanes = 0;
  unsigned tick = 0, others = 0;
  unsigned short warp = 0;
};
struct Byte {
  Reads read;
  Write written;
  bool pending = false;    // a copy to it is under way
  bool is_mbarrier = false;
};
// What the async proxy (copies, the matrix unit) reads, 16 bytes at a time.
struct Chunk {
  Reads read;
  unsigned flying = 0;  // operations under way that read it
};
typedef std::vector<unsigned> Clock;  // by agent: the tick up to which its accesses are known; and behind those, its fenced writes
enum Kind { LDMATRIX, ASYNC_COPY, SHARED_STORE, MMA, SHUFFLE, BULK_COPY, WGMMA, KINDS };
static const unsigned MBARRIERS = 64;  // of a block
SIM_GLOBAL unsigned dynamic_bytes;         // where the arrays of fixed size begin
SIM_GLOBAL std::vector<char> shared;
SIM_GLOBAL std::vector<Byte> shadow;
SIM_GLOBAL std::vector<Chunk> chunks;
SIM_GLOBAL std::vector<std::vector<Reads>> readers;
SIM_GLOBAL unsigned tick, first_tick, barrier_tick;  // when the block began, and of its last barrier
SIM_GLOBAL unsigned threads_of_block;
SIM_GLOBAL std::vector<Clock> known;          // of each warp
SIM_GLOBAL std::vector<Clock> known_alone;    // of each thread: what it knows beyond its warp; empty if nothing
SIM_GLOBAL std::vector<unsigned> fenced;      // of each thread: the tick of its last fence.proxy.async
SIM_GLOBAL long counts[KINDS], phases[KINDS], wavefronts[KINDS];
struct Copy {
  unsigned to;
  const char* from;
  unsigned size, valid;  // bytes; what is not valid becomes zero
};
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
SIM_GLOBAL std::vector<Copies> copies;  // of each thread
SIM_GLOBAL std::map<std::pair<unsigned, long>, std::vector<unsigned>> phase_of;
SIM_GLOBAL std::vector<long> accesses[KINDS];  // of each thread, so far

SIM_FUNCTION unsigned agents() { return threads_of_block + MBARRIERS; }
SIM_FUNCTION void begin_shared(unsigned size, unsigned threads) {
  threads_of_block = threads;
  first_tick = barrier_tick = tick++;
  shared.assign(size, (char)0xFF);
  for (const Copies& one : copies) is_left_over |= !one.open.empty() || !one.groups.empty();
  if (is_left_over || shadow.size() < size) {
    shadow.assign(size, Byte());
    chunks.assign((size + 15) / 16, Chunk());
    is_left_over = false;
  }
  readers.assign(1, {});
  known.assign((threads + WARP - 1) / WARP, Clock(2 * agents()));
  known_alone.assign(threads, Clock());
  fenced.assign(threads, 0);
  copies.assign(threads, Copies());
  phase_of.clear();
  for (auto& of_threads : accesses) of_threads.assign(threads, 0);
}
SIM_FUNCTION void join(Clock& clock, const Clock& other) {
  for (unsigned i = 0; i < other.size(); i++)
    if (other[i] > clock[i]) clock[i] = other[i];
}
// A barrier of the block: all know what each knows and did. What copies bring is known to who waited for it, and so to all.
SIM_FUNCTION void pass_barrier() {
  Clock total(2 * agents());
  for (const Clock& one : known) join(total, one);
  for (unsigned i = 0; i < threads_of_block; i++) {
    join(total, known_alone[i]);
    known_alone[i].clear();
    total[i] = tick;
    total[agents() + i] = fenced[i];
  }
  known.assign(known.size(), total);
  barrier_tick = tick++;
}
// What the current thread knows of an entry of clocks.
SIM_FUNCTION unsigned knows(unsigned entry) {
  unsigned of_warp = known[current / WARP][entry];
  const Clock& alone = known_alone[current];
  return alone.empty() ? of_warp : std::max(of_warp, alone[entry]);
}
// Give what the current thread knows and did to a clock.
SIM_FUNCTION void release(Clock& clock) {
  join(clock, known[current / WARP]);
  join(clock, known_alone[current]);
  clock[current] = tick++;
  clock[agents() + current] = fenced[current];
}
SIM_FUNCTION void acquire(const Clock& clock) {
  Clock& alone = known_alone[current];
  if (alone.empty()) alone.assign(2 * agents(), 0);
  join(alone, clock);
}
// All lanes of the current warp know what each of them knows and did.
SIM_FUNCTION void meet_warp() {
  unsigned warp = current / WARP, end = std::min((warp + 1) * WARP, threads_of_block);
  for (unsigned i = warp * WARP; i < end; i++) {
    join(known[warp], known_alone[i]);
    known_alone[i].clear();
    known[warp][i] = tick;
    known[warp][agents() + i] = fenced[i];
  }
  tick++;
}
// Whether an access is over, and seen, before what the current thread does now.
SIM_FUNCTION bool is_before(const Write& one) {
  bool is_passed = one.tick <= (one.agent < threads_of_block ? barrier_tick : first_tick);
  return is_passed || one.agent == current || knows(one.agent) >= one.tick;
}
SIM_FUNCTION bool is_before(const Reads& one) {
  if (one.tick <= barrier_tick) return true;
  for (Lanes left = one.lanes; left; left &= left - 1) {
    unsigned thread = one.warp * WARP + __builtin_ctzll(left);
    if (thread != current && knows(thread) < one.tick) return false;
  }
  return true;
}
SIM_FUNCTION bool all_before(const Reads& first) {
  if (first.tick <= first_tick) return true;
  if (!is_before(first)) return false;
  if (first.others)
    for (const Reads& one : readers[first.others])
      if (!is_before(one)) return false;
  return true;
}
SIM_FUNCTION void note(Reads& first, Lanes lanes) {
  unsigned short warp = current / WARP;
  if (first.tick <= first_tick) first.others = 0;
  auto add = [&](Reads& one) {
    bool is_same = one.warp == warp && one.tick == tick;
    if (!is_same && !is_before(one)) return false;
    one.lanes = is_same ? one.lanes | lanes : lanes;
    one.tick = tick;
    one.warp = warp;
    return true;
  };
  if (add(first)) return;
  if (!first.others) {
    first.others = readers.size();
    readers.emplace_back();
  }
  for (Reads& one : readers[first.others])
    if (add(one)) return;
  Reads one;
  one.lanes = lanes;
  one.tick = tick;
  one.warp = warp;
  readers[first.others].push_back(one);
}
SIM_FUNCTION bool is_inside(unsigned at, unsigned size) {
  if (at <= shared.size() && size <= shared.size() - at) return true;
  return fail("an access outside of shared memory", at), false;
}
SIM_FUNCTION void reading(unsigned at, unsigned size) {
  if (!is_inside(at, size)) return;
  for (unsigned i = at; i < at + size; i++) {
    Byte& byte = shadow[i];
    if (byte.pending) fail("reads what a copy under way writes", i);
    if (byte.written.tick <= first_tick) fail("reads what nobody wrote", i);
    if (!is_before(byte.written)) fail("reads what another thread wrote, with no barrier between", i);
    if (byte.is_mbarrier) fail("reads an mbarrier", i);
    note(byte.read, 1ull << current % WARP);
  }
}
// What a write of the current thread, or of a copy that it begins, must not meet.
SIM_FUNCTION void overwriting(unsigned i) {
  const Byte& byte = shadow[i];
  if (byte.pending) fail("overwrites what a copy under way writes", i);
  if (chunks[i / 16].flying) fail("overwrites what the matrix unit still reads", i);
  if (byte.is_mbarrier) fail("overwrites an mbarrier", i);
  if (!all_before(byte.read) || !all_before(chunks[i / 16].read)) fail("overwrites what another thread read, with no barrier between", i);
  if (!is_before(byte.written)) fail("overwrites what another thread wrote, with no barrier between", i);
}
SIM_FUNCTION void writing(unsigned at, unsigned size, bool pending = false) {
  if (!is_inside(at, size)) return;
  for (unsigned i = at; i < at + size; i++) {
    overwriting(i);
    shadow[i].written = {tick, (unsigned short)current};
    shadow[i].pending = pending;
  }
}
// Wavefronts of what `lanes` lanes do at once: how many different words the busiest of the 32 banks gives.
SIM_FUNCTION void count_phase(Kind kind, const std::vector<unsigned>& words) {
  unsigned load[32] = {0}, most = 1;
  std::vector<unsigned> different(words);
  std::sort(different.begin(), different.end());
  different.erase(std::unique(different.begin(), different.end()), different.end());
  for (unsigned word : different) most = std::max(most, ++load[word % 32]);
  phases[kind]++;
  wavefronts[kind] += most;
}
// An access of a thread: 8 lanes of 16 bytes, 16 of 8, or 32 of 4 are a phase.
SIM_FUNCTION void count_access(Kind kind, unsigned at, unsigned size) {
  counts[kind]++;
  unsigned lanes = 128 / std::max(size, 4u);
  auto phase = std::make_pair(kind * 65536 + current / lanes, accesses[kind][current]++);
  auto& words = phase_of[phase];
  for (unsigned i = 0; i < std::max(size, 4u); i += 4) words.push_back((at + i) / 4);
  if (words.size() < 32) return;
  count_phase(kind, words);
  phase_of.erase(phase);
}
}  // namespace sim
