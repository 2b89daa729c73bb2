// The matrix unit of warpgroups, wgmma, by the PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
//
// Operands in shared memory are described by 64 bits: address, two distances and the swizzle ("Matrix Descriptor"; as CUTLASS writes
// them, cute/arch/mma_sm90_desc.hpp). Each warp of the four adds to 16 rows; what it reads is in flight until it waits for the group
// itself. Sums are poison until then, and exact (double), rounded once an instruction.
#pragma once

namespace sim {
struct Operand {
  unsigned address, leading, stride, swizzle;  // bytes
  bool is_k_major;
};
SIM_FUNCTION Operand described(uint64_t bits, bool is_k_major) {
  static const unsigned ROWS[4] = {0, 128, 64, 32};
  return {(unsigned)(bits & 0x3FFF) * 16, (unsigned)(bits >> 16 & 0x3FFF) * 16, (unsigned)(bits >> 32 & 0x3FFF) * 16, ROWS[bits >> 62], is_k_major};
}
// Shared address of 16-bit element (line, k). Units are of 8 elements; along k: rows of the swizzle's bytes (16 without one), `stride`
// between groups of 8 lines, without a swizzle `leading` between halves of k. Along lines: rows of as many lines, one for each k;
// `leading` between rows' lines and the next, `stride` between groups of 8 k (without a swizzle the other way around).
SIM_FUNCTION unsigned address_of(const Operand& one, unsigned line, unsigned k) {
  unsigned at = one.address;
  if (one.is_k_major) {
    unsigned row = one.swizzle ? one.swizzle : 16;
    at += line / 8 * one.stride + line % 8 * row;
    at += one.swizzle ? k * 2 : k / 8 * one.leading + k % 8 * 2;
  } else if (one.swizzle) {
    unsigned lines = one.swizzle / 2;
    at += line / lines * one.leading + line % lines * 2 + k / 8 * one.stride + k % 8 * one.swizzle;
  } else {
    at += line / 8 * one.stride + line % 8 * 2 + k / 8 * one.leading + k % 8 * 16;
  }
  return swizzled(at, one.swizzle);
}

struct Wgmma {
  float** sums;  // of the lane, n / 2
  unsigned n;
  uint64_t a, b;
  uint32_t registers[4];  // of A, if they are
  bool has_registers, keeps, a_is_k_major, b_is_k_major;
  float (*number)(uint16_t);
};
// Sums of a warp that are under way, by the first of its first lane; `uses` counts the instructions that wait to end.
struct Flight {
  std::vector<float*> sums;
  std::vector<float> values;
  unsigned uses = 0;
};
struct Issued {
  std::vector<unsigned> chunks;  // that it reads
  float* flight;
};
struct Queue {
  std::vector<Issued> open;
  std::deque<std::vector<Issued>> groups;
  std::map<float*, Flight> flights;
  std::vector<std::pair<uint64_t, uint64_t>> issued;  // what its descriptors were, so far
  bool is_fenced = false;
};
SIM_GLOBAL std::vector<Queue> queues;  // of each warp

SIM_FUNCTION void begin_warpgroups() {
  queues.assign((threads_of_block + WARP - 1) / WARP, Queue());
}
SIM_FUNCTION void read_chunk(unsigned at, std::vector<unsigned>& read) {
  if (!is_inside(at / 16 * 16, 16)) return;
  for (unsigned i = at / 16 * 16; i < at / 16 * 16 + 16; i++) {
    const Byte& byte = shadow[i];
    if (byte.pending) fail("wgmma reads what a copy under way writes", i);
    if (byte.written.tick <= first_tick) fail("wgmma reads what nobody wrote", i);
    if (!is_before(byte.written)) fail("wgmma reads what is not known to be written", i);
    enter_async_proxy(i);
  }
  chunks[at / 16].flying++;
  read.push_back(at / 16);
}
// `lines` of 16 of k, as numbers; their chunks are in flight from now on.
SIM_FUNCTION void read_operand(const Operand& one, unsigned first, unsigned lines, float (*number)(uint16_t), std::vector<float>& to, std::vector<unsigned>& read) {
  if (one.swizzle && one.address % (8 * one.swizzle) >= one.swizzle) return fail("a descriptor that does not begin in the first row of its swizzle", one.address);
  to.resize(lines * 16);
  for (unsigned line = 0; line < lines; line++)
    for (unsigned k = 0; k < 16; k++) {
      unsigned at = address_of(one, first + line, k);
      if (at % 16 == 0) read_chunk(at, read);
      if (fault[0]) return;
      uint16_t bits;
      memcpy(&bits, &shared[at], 2);
      to[line * 16 + k] = number(bits);
    }
}
// A in registers: as of mma.m16n8k16.
SIM_FUNCTION void read_registers(void** lanes, float (*number)(uint16_t), std::vector<float>& to) {
  to.resize(16 * 16);
  for (unsigned l = 0; l < WARP; l++)
    for (unsigned i = 0; i < 8; i++) {
      unsigned row = l / 4 + (i & 2 ? 8 : 0), k = l % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0);
      to[row * 16 + k] = number((uint16_t)(((Wgmma*)lanes[l])->registers[i / 2] >> i % 2 * 16));
    }
}
SIM_FUNCTION Flight& flight_of(Queue& queue, void** lanes) {
  const Wgmma& one = *(Wgmma*)lanes[0];
  Flight& flight = queue.flights[one.sums[0]];
  if (!flight.sums.empty()) return flight;
  const uint32_t POISON = ~0u;
  for (unsigned l = 0; l < WARP; l++)
    for (unsigned i = 0; i < one.n / 2; i++) {
      float* sum = ((Wgmma*)lanes[l])->sums[i];
      flight.sums.push_back(sum);
      flight.values.push_back(*sum);
      memcpy(sum, &POISON, 4);
    }
  return flight;
}
// Sum i of lane l is of row l / 4 + 8 (i / 2 % 2) and column 8 (i / 4) + 2 (l % 4) + i % 2.
SIM_FUNCTION void issue_wgmma(void** lanes) {
  unsigned warp = current / WARP;
  const Wgmma& one = *(Wgmma*)lanes[0];
  Queue& queue = queues[warp];
  if (warp / 4 * 4 + 4 > queues.size()) return fail("wgmma of fewer than four warps");
  if (!queue.is_fenced) return fail("wgmma behind accesses of its registers, with no wgmma.fence between");
  for (unsigned l = 1; l < WARP; l++)
    if (((Wgmma*)lanes[l])->a != one.a || ((Wgmma*)lanes[l])->b != one.b || ((Wgmma*)lanes[l])->keeps != one.keeps) return fail("lanes give wgmma different operands");
  unsigned number = queue.issued.size();
  queue.issued.push_back({one.a, one.b});
  for (unsigned other = warp / 4 * 4; other < warp / 4 * 4 + 4; other++)
    if (queues[other].issued.size() > number && queues[other].issued[number] != queue.issued[number]) return fail("warps of a warpgroup give wgmma different operands");
  meet_warp();
  is_left_over = true;
  std::vector<float> a, b;
  Issued issued{{}, one.sums[0]};
  if (one.has_registers) read_registers(lanes, one.number, a);
  else read_operand(described(one.a, one.a_is_k_major), warp % 4 * 16, 16, one.number, a, issued.chunks);
  read_operand(described(one.b, one.b_is_k_major), 0, one.n, one.number, b, issued.chunks);
  if (fault[0]) return;
  Flight& flight = flight_of(queue, lanes);
  flight.uses++;
  for (unsigned l = 0; l < WARP; l++)
    for (unsigned i = 0; i < one.n / 2; i++) {
      const float *row = &a[(l / 4 + i / 2 % 2 * 8) * 16], *column = &b[(i / 4 * 8 + l % 4 * 2 + i % 2) * 16];
      float& value = flight.values[l * (one.n / 2) + i];
      double sum = one.keeps ? value : 0;
      for (int k = 0; k < 16; k++) sum += (double)row[k] * column[k];
      value = (float)sum;
    }
  queue.open.push_back(issued);
  counts[WGMMA]++;
}
SIM_FUNCTION void fence_wgmma(void**) { queues[current / WARP].is_fenced = true; }
SIM_FUNCTION void commit_wgmma(void**) {
  Queue& queue = queues[current / WARP];
  queue.groups.push_back(queue.open);
  queue.open.clear();
}
struct WgmmaWait {
  unsigned left;
};
SIM_FUNCTION void wait_wgmma(void** lanes) {
  Queue& queue = queues[current / WARP];
  for (; queue.groups.size() > ((WgmmaWait*)lanes[0])->left; queue.groups.pop_front())
    for (const Issued& one : queue.groups.front()) {
      for (unsigned chunk : one.chunks) {
        chunks[chunk].flying--;
        note(chunks[chunk].read, WARP == 64 ? ~0ull : (1ull << WARP % 64) - 1);
      }
      Flight& flight = queue.flights[one.flight];
      if (--flight.uses) continue;
      for (unsigned i = 0; i < flight.sums.size(); i++) *flight.sums[i] = flight.values[i];
      queue.flights.erase(one.flight);
    }
  queue.is_fenced = false;
  meet_warp();
}
}  // namespace sim
