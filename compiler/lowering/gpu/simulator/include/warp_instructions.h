// Instructions of warps by the PTX ISA's definitions: shuffles, ldmatrix, mma.sync, cp.async, stores of vectors to shared memory.
//
// The matrix unit's sums are exact here (double) and rounded once an instruction; hardware truncates addends to some bits.
#pragma once

namespace sim {
SIM_FUNCTION float of_bf16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
SIM_FUNCTION uint16_t to_bf16(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  return value != value ? 0x7FFF : (word + 0x7FFF + (word >> 16 & 1)) >> 16;
}
SIM_FUNCTION float of_f16(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}
SIM_FUNCTION uint16_t to_f16(float value) {
  _Float16 half = (_Float16)value;
  uint16_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
// A meeting of the warp orders what its lanes did before and after it.
SIM_FUNCTION void meet(void**) { meet_warp(); }

struct Shuffle {
  uint32_t* result;
  uint32_t value;
  int from;
};
SIM_FUNCTION void shuffle(void** lanes) {
  uint32_t values[WARP];
  for (unsigned i = 0; i < WARP; i++) values[i] = ((Shuffle*)lanes[i])->value;
  for (unsigned i = 0; i < WARP; i++) {
    Shuffle& one = *(Shuffle*)lanes[i];
    *one.result = values[one.from >= 0 && one.from < (int)WARP ? one.from : (int)i];
  }
  counts[SHUFFLE]++;
}
template <class T> inline T shuffled(T value, int from) {
  static_assert(sizeof(T) == 4, "lanes exchange words");
  uint32_t word, result = 0;
  memcpy(&word, &value, 4);
  Shuffle operands{&result, word, from};
  together(shuffle, operands);
  memcpy((void*)&value, &result, 4);
  return value;
}

// ldmatrix: lane 8m + r gives the address of row r of matrix m. Lane l gets of each matrix the elements 2 (l % 4) and the next of
// row l / 4; transposed, those of column l / 4.
struct LoadMatrix {
  uint32_t* registers[4];
  unsigned at;
};
template <int MATRICES, bool TRANSPOSED> void load_matrix(void** lanes) {
  unsigned first = current;
  uint16_t rows[MATRICES][8][8];
  for (int m = 0; m < MATRICES; m++) {
    std::vector<unsigned> words;
    for (int r = 0; r < 8; r++) {
      unsigned at = ((LoadMatrix*)lanes[m * 8 + r])->at;
      current = first + m * 8 + r;
      if (at % 16) return fail("ldmatrix of a row that does not begin at a multiple of 16 bytes", at);
      reading(at, 16);
      if (fault[0]) return;
      memcpy(rows[m][r], &shared[at], 16);
      for (unsigned i = 0; i < 4; i++) words.push_back(at / 4 + i);
    }
    count_phase(LDMATRIX, words);
  }
  current = first;
  for (int l = 0; l < 32; l++)
    for (int m = 0; m < MATRICES; m++) {
      int i = l / 4, j = l % 4 * 2;
      uint16_t low = TRANSPOSED ? rows[m][j][i] : rows[m][i][j], high = TRANSPOSED ? rows[m][j + 1][i] : rows[m][i][j + 1];
      *((LoadMatrix*)lanes[l])->registers[m] = low | (uint32_t)high << 16;
    }
  counts[LDMATRIX]++;
  meet(lanes);
}

// mma.sync.m16n8k16 of 16-bit floats. With g = lane / 4, t = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"):
// a_i is in row g (+ 8 for i in 2, 3, 6, 7) and column 2t + i % 2 (+ 8 for i >= 4); b_i in row 2t + i % 2 (+ 8 for i >= 2) and
// column g; c_i in row g (+ 8 for i >= 2) and column 2t + i % 2.
struct Mma {
  float* d[4];
  uint32_t a[4], b[2];
  float c[4];
};
template <float (*NUMBER)(uint16_t)> void mma_m16n8k16(void** lanes) {
  double a[16][16], b[16][8];
  for (int l = 0; l < 32; l++) {
    Mma& one = *(Mma*)lanes[l];
    for (int i = 0; i < 8; i++)
      a[l / 4 + (i & 2 ? 8 : 0)][l % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0)] = NUMBER((uint16_t)(one.a[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; i++) b[l % 4 * 2 + i % 2 + (i >= 2 ? 8 : 0)][l / 4] = NUMBER((uint16_t)(one.b[i / 2] >> i % 2 * 16));
  }
  for (int l = 0; l < 32; l++) {
    Mma& one = *(Mma*)lanes[l];
    for (int i = 0; i < 4; i++) {
      double sum = one.c[i];
      for (int k = 0; k < 16; k++) sum += a[l / 4 + (i >= 2 ? 8 : 0)][k] * b[k][l % 4 * 2 + i % 2];
      *one.d[i] = (float)sum;
    }
  }
  counts[MMA]++;
}

// mma.sync.m16n8k32 of bytes, those of A signed or not (PTX ISA, "Matrix fragments for mma.m16n8k32"): a_i is in row g (+ 8 for i in
// 4..7 and 12..15) and column 4t + i % 4 (+ 16 for i >= 8); b_i in row 4t + i % 4 (+ 16 for i >= 4) and column g; c_i as above.
struct ByteMma {
  uint32_t* d[4];
  uint32_t a[4], b[2];
  uint32_t c[4];
};
template <bool UNSIGNED> void mma_m16n8k32(void** lanes) {
  int a[16][32], b[32][8];
  for (int l = 0; l < 32; l++) {
    ByteMma& one = *(ByteMma*)lanes[l];
    for (int i = 0; i < 16; i++) {
      uint8_t bits = one.a[i / 4] >> i % 4 * 8;
      a[l / 4 + (i & 4 ? 8 : 0)][l % 4 * 4 + i % 4 + (i >= 8 ? 16 : 0)] = UNSIGNED ? (int)bits : (int)(int8_t)bits;
    }
    for (int i = 0; i < 8; i++) b[l % 4 * 4 + i % 4 + (i >= 4 ? 16 : 0)][l / 4] = (int8_t)(one.b[i / 4] >> i % 4 * 8);
  }
  for (int l = 0; l < 32; l++) {
    ByteMma& one = *(ByteMma*)lanes[l];
    for (int i = 0; i < 4; i++) {
      uint32_t sum = one.c[i];  // which wraps around
      for (int k = 0; k < 32; k++) sum += (uint32_t)(a[l / 4 + (i >= 2 ? 8 : 0)][k] * b[k][l % 4 * 2 + i % 2]);
      *one.d[i] = sum;
    }
  }
  counts[MMA]++;
}

// cp.async: the destination is poisoned at once and written when its thread waits for the group, by what memory holds then.
SIM_FUNCTION void async_copy(unsigned to, const void* from, unsigned size, unsigned valid) {
  if (to % size || (uintptr_t)from % size) return fail("cp.async at an address that its size does not divide", to);
  if (valid > size) return fail("cp.async of more bytes than its size", to);
  writing(to, size, true);
  if (fault[0]) return;
  memset(&shared[to], 0xFF, size);
  copies[current].open.push_back({to, (const char*)from, size, valid});
  count_access(ASYNC_COPY, to, size);
}
SIM_FUNCTION void commit_copies() {
  copies[current].groups.push_back(copies[current].open);
  copies[current].open.clear();
}
SIM_FUNCTION void finish_copies(unsigned left) {
  auto& groups = copies[current].groups;
  for (; groups.size() > left; groups.pop_front())
    for (const Copy& one : groups.front()) {
      memset(&shared[one.to], 0, one.size);
      memcpy(&shared[one.to], one.from, one.valid);
      for (unsigned i = one.to; i < one.to + one.size; i++) {
        shadow[i].pending = false;
        shadow[i].written = {tick, (unsigned short)current};
      }
    }
}
template <unsigned WORDS> inline void store_shared(unsigned at, const uint32_t (&words)[WORDS]) {
  if (at % (4 * WORDS)) return fail("a store of a vector at an address that its size does not divide", at);
  writing(at, 4 * WORDS);
  if (!fault[0]) memcpy(&shared[at], words, 4 * WORDS);
  count_access(SHARED_STORE, at, 4 * WORDS);
}
}  // namespace sim

inline unsigned __cvta_generic_to_shared(const void* pointer) { return (unsigned)((const char*)pointer - sim::shared.data()); }
inline void __syncwarp(unsigned = ~0u) {
  int none;
  sim::together(sim::meet, none);
}
inline unsigned __activemask() { return ~0u; }
template <class T> inline T __shfl_sync(unsigned, T value, int from, int width = 32) {
  int lane = sim::current % 32;
  return sim::shuffled(value, lane / width * width + from % width);
}
template <class T> inline T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return sim::shuffled(value, (int)(sim::current % 32) ^ mask);
}
template <class T> inline T __shfl_down_sync(unsigned, T value, int by, int width = 32) {
  int lane = sim::current % 32;
  return sim::shuffled(value, lane % width + by < width ? lane + by : lane);
}
template <class T> inline T __shfl_up_sync(unsigned, T value, int by, int width = 32) {
  int lane = sim::current % 32;
  return sim::shuffled(value, lane % width >= by ? lane - by : lane);
}
