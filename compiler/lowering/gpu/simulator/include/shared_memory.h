// Shared memory of a block, poisoned when the block begins, with a shadow that knows of each byte which thread wrote it and which
// read it, in which interval between barriers. So races are found exactly, whatever order the threads run in:
//   * reading what nobody wrote, or what another thread wrote with no barrier between;
//   * overwriting what another thread read or wrote with no barrier between;
//   * reading or overwriting the destination of a copy (cp.async) that its thread has not waited for.
// What one warp does is ordered by its __syncwarp and by its collective instructions, too.
#pragma once

namespace sim {
struct Access {
  unsigned epoch = 0, meeting = 0;  // barriers of the block, meetings of the warp, when it was
  unsigned short thread = 0;
  bool by_many = false;  // by several threads, of which `thread` is the last, all of one warp; of_many_warps: of several
  bool of_many_warps = false;
};
struct Byte {
  Access written, read;
  bool pending = false;  // a copy to it is under way
};
enum Kind { LDMATRIX, ASYNC_COPY, SHARED_STORE, MMA, SHUFFLE, KINDS };
static unsigned dynamic_bytes;  // where the arrays of fixed size begin
static std::vector<char> shared;
static std::vector<Byte> shadow;
static unsigned epoch = 1, first_epoch = 1;
static std::vector<unsigned> meetings;  // of each warp
static long counts[KINDS], phases[KINDS], wavefronts[KINDS];
struct Copy {
  unsigned to;
  const char* from;
  unsigned size, valid;  // bytes; what is not valid becomes zero
};
struct Copies {
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};
static std::vector<Copies> copies;  // of each thread
static std::map<std::pair<unsigned, long>, std::vector<unsigned>> phase_of;
static std::vector<long> accesses[KINDS];  // of each thread, so far

inline void begin_shared(unsigned size, unsigned threads) {
  first_epoch = ++epoch;
  shared.assign(size, (char)0xFF);
  if (shadow.size() < size) shadow.resize(size);
  for (unsigned i = 0; i < size; i++) shadow[i].pending = false;
  meetings.assign((threads + WARP - 1) / WARP, 1);
  copies.assign(threads, Copies());
  phase_of.clear();
  for (auto& of_threads : accesses) of_threads.assign(threads, 0);
}
inline void pass_barrier() { epoch++; }
// Whether an access is over, and seen, before what the current thread does now.
inline bool is_before(const Access& one) {
  if (one.epoch < epoch || (one.thread == current && !one.by_many)) return true;
  return !one.of_many_warps && one.thread / WARP == current / WARP && one.meeting < meetings[current / WARP];
}
inline void note(Access& access) {
  if (access.epoch == epoch && access.thread != current) {
    access.by_many = true;
    access.of_many_warps |= access.thread / WARP != current / WARP;
  } else if (access.epoch != epoch) {
    access.by_many = access.of_many_warps = false;
  }
  access.epoch = epoch;
  access.thread = current;
  access.meeting = meetings[current / WARP];
}
inline bool is_inside(unsigned at, unsigned size) {
  if (at <= shared.size() && size <= shared.size() - at) return true;
  return fail("an access outside of shared memory", at), false;
}
inline void reading(unsigned at, unsigned size) {
  if (!is_inside(at, size)) return;
  for (unsigned i = at; i < at + size; i++) {
    Byte& byte = shadow[i];
    if (byte.pending) fail("reads what a copy under way writes", i);
    if (byte.written.epoch < first_epoch) fail("reads what nobody wrote", i);
    if (!is_before(byte.written)) fail("reads what another thread wrote, with no barrier between", i);
    note(byte.read);
  }
}
inline void writing(unsigned at, unsigned size, bool pending = false) {
  if (!is_inside(at, size)) return;
  for (unsigned i = at; i < at + size; i++) {
    Byte& byte = shadow[i];
    if (byte.pending) fail("overwrites what a copy under way writes", i);
    if (!is_before(byte.read)) fail("overwrites what another thread read, with no barrier between", i);
    if (!is_before(byte.written)) fail("overwrites what another thread wrote, with no barrier between", i);
    byte.written.by_many = false;
    byte.written = Access{epoch, meetings[current / WARP], (unsigned short)current};
    byte.pending = pending;
  }
}
// Wavefronts of what `lanes` lanes do at once: how many different words the busiest of the 32 banks gives.
inline void count_phase(Kind kind, const std::vector<unsigned>& words) {
  unsigned load[32] = {0}, most = 1;
  std::vector<unsigned> different(words);
  std::sort(different.begin(), different.end());
  different.erase(std::unique(different.begin(), different.end()), different.end());
  for (unsigned word : different) most = std::max(most, ++load[word % 32]);
  phases[kind]++;
  wavefronts[kind] += most;
}
// An access of a thread: 8 lanes of 16 bytes, 16 of 8, or 32 of 4 are a phase.
inline void count_access(Kind kind, unsigned at, unsigned size) {
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
