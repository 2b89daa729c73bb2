// What rewritten LLVM IR for AMD's GPUs calls (amd_ir.py), on the fibers of one wavefront of SIM_WARP lanes.
//
// Accesses of LDS are told one by one. A barrier orders them only where a release fence, which waits for them, lies before it, and
// an acquire fence behind it: a bare s_barrier is a fault, as on the hardware that does not wait by itself (gfx90a and later).
// The matrix unit's sums are exact here (double) and rounded once an instruction.
#pragma once
#include "fibers.h"

extern "C" {
char sim_lds[64 << 10] __attribute__((aligned(128), visibility("hidden")));
}

namespace sim {
static std::vector<char> touched, waits_for_fence;  // by thread: accesses since the last release; a barrier without an acquire
static const std::vector<unsigned> READ_PHASES = {0, 1, 2, 3, 1, 0, 3, 2};  // of four lanes each that read 16 bytes

// A fault ends its thread: what it would touch may not exist.
inline void end_on_fault() {
  if (fault[0]) leave(DONE);
}
// Lanes that access 16 bytes at once share a phase: eight neighbours that write; of those that read, as AMD measured on CDNA3
// ("Avoiding LDS bank conflicts on AMD GPUs using CK-Tile", rocm.blogs.amd.com), lanes 0-3 with 20-23, 4-7 with 16-19, and so on.
inline void count_lds(Kind kind, unsigned at, unsigned size) {
  counts[kind]++;
  if (size != 16) return;
  unsigned lane = current % WARP;
  unsigned phase = kind == LDMATRIX ? lane / 32 * 4 + READ_PHASES[lane % 32 / 4] : lane / 8;
  auto& words = phase_of[{kind * 65536 + current / WARP * WARP + phase, accesses[kind][current]++}];
  for (unsigned i = 0; i < 4; i++) words.push_back(at / 4 + i);
  if (words.size() < 32) return;
  count_phase(kind, words);
  phase_of.erase({kind * 65536 + current / WARP * WARP + phase, accesses[kind][current] - 1});
}
inline unsigned lds_address(const char* pointer, unsigned size, unsigned alignment) {
  unsigned at = (unsigned)(pointer - sim_lds);
  if (at % alignment) fail("an access of LDS whose alignment does not divide its address", at);
  if (waits_for_fence[current]) fail("accesses LDS behind a barrier without an acquire fence", at);
  if (is_inside(at, size)) touched[current] = 1;
  end_on_fault();
  return at;
}
struct Permute {
  int from, value, result;
};
inline void permute(void** lanes) {
  for (unsigned i = 0; i < WARP; i++) {
    Permute& one = *(Permute*)lanes[i];
    one.result = ((Permute*)lanes[(unsigned)one.from / 4 % WARP])->value;
  }
  counts[SHUFFLE]++;
}

// v_mfma of SIZE x SIZE sums (CDNA3 ISA, "Matrix Arithmetic Instructions"): of A, lane l has NUMBERS neighbours along k, from
// NUMBERS * (l / SIZE) on, of row l % SIZE; of B, of column l % SIZE. Of the sums, register r is column l % SIZE and row
// 4 GROUPS (r / 4) + 4 (l / SIZE) + r % 4, where GROUPS = 64 / SIZE.
// Sums of bytes are int32.
struct Mfma {
  const void *a, *b, *c;
  void* d;
};
template <int SIZE, int NUMBERS, class T, auto NUMBER> void mfma(void** lanes) {
  using Sum = decltype(NUMBER(T()));
  using Exact = std::conditional_t<std::is_same_v<Sum, float>, double, int64_t>;
  const int GROUPS = 64 / SIZE, K = NUMBERS * GROUPS, SUMS = SIZE * SIZE / 64;
  static Exact a[SIZE][K], b[K][SIZE], d[SIZE][SIZE];
  for (int l = 0; l < 64; l++)
    for (int e = 0; e < NUMBERS; e++) {
      const Mfma& one = *(Mfma*)lanes[l];
      a[l % SIZE][NUMBERS * (l / SIZE) + e] = NUMBER(((const T*)one.a)[e]);
      b[NUMBERS * (l / SIZE) + e][l % SIZE] = NUMBER(((const T*)one.b)[e]);
    }
  for (int l = 0; l < 64; l++)
    for (int r = 0; r < SUMS; r++) d[4 * GROUPS * (r / 4) + 4 * (l / SIZE) + r % 4][l % SIZE] = ((const Sum*)((Mfma*)lanes[l])->c)[r];
  for (int i = 0; i < SIZE; i++)
    for (int k = 0; k < K; k++)
      for (int j = 0; j < SIZE; j++) d[i][j] += a[i][k] * b[k][j];
  for (int l = 0; l < 64; l++)
    for (int r = 0; r < SUMS; r++)
      ((Sum*)((Mfma*)lanes[l])->d)[r] = (Sum)d[4 * GROUPS * (r / 4) + 4 * (l / SIZE) + r % 4][l % SIZE];
  counts[MMA]++;
}
template <int SIZE, int NUMBERS, class T, auto NUMBER> void multiply(const void* a, const void* b, const void* c, void* d) {
  Mfma operands{a, b, c, d};
  if (WARP != 64) fail("v_mfma on a GPU whose wavefronts have 32 lanes");
  if (blockDim.x % WARP) fail("v_mfma of a wavefront that has lanes without threads");
  end_on_fault();
  together(mfma<SIZE, NUMBERS, T, NUMBER>, operands);
}
// v_wmma of 16 x 16 sums by 16 of k (RDNA3 ISA, "Wave Matrix Multiply Accumulate"): lanes l and l + 16 both have row l of A and
// column l of B, all of k; of the sums, register r is column l % 16 and row 2 r + l / 16. Bytes have signs, or none.
struct Wmma {
  const void *a, *b;
  void* sums;
  int is_signed[2];
};
template <class T, auto NUMBER> void wmma(void** lanes) {
  using Sum = decltype(NUMBER(T(), 1));
  using Exact = std::conditional_t<std::is_same_v<Sum, float>, double, int64_t>;
  static Exact d[16][16];
  for (int l = 0; l < 16; l++) {
    const Wmma &low = *(Wmma*)lanes[l], &high = *(Wmma*)lanes[l + 16];
    if (memcmp(low.a, high.a, 16 * sizeof(T)) || memcmp(low.b, high.b, 16 * sizeof(T)))
      fail("v_wmma of operands that differ between the halves of a wavefront");
  }
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 8; r++) d[2 * r + l / 16][l % 16] = ((const Sum*)((Wmma*)lanes[l])->sums)[r];
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      const Wmma &row = *(Wmma*)lanes[i], &column = *(Wmma*)lanes[j];
      for (int k = 0; k < 16; k++)
        d[i][j] += (Exact)NUMBER(((const T*)row.a)[k], row.is_signed[0]) * (Exact)NUMBER(((const T*)column.b)[k], row.is_signed[1]);
    }
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 8; r++) ((Sum*)((Wmma*)lanes[l])->sums)[r] = (Sum)d[2 * r + l / 16][l % 16];
  counts[MMA]++;
}
template <class T, auto NUMBER> void multiply_waves(const void* a, const void* b, void* sums, int x, int y) {
  Wmma operands{a, b, sums, {x, y}};
  if (WARP != 32) fail("v_wmma on a GPU whose wavefronts have 64 lanes");
  if (blockDim.x % WARP) fail("v_wmma of a wavefront that has lanes without threads");
  end_on_fault();
  together(wmma<T, NUMBER>, operands);
}
inline float of_f16(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}
inline float of_bf16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}
inline float of_f32(float value) { return value; }
inline int32_t of_i8(int8_t value) { return value; }
inline float half_of(uint16_t bits, int) { return of_f16(bits); }
inline float brain_of(uint16_t bits, int) { return of_bf16(bits); }
inline int32_t byte_of(uint8_t bits, int is_signed) { return is_signed ? (int8_t)bits : bits; }
}  // namespace sim

#define SIM_HIDDEN __attribute__((used, visibility("hidden")))
#define SIM_MFMA(name, ...)                                                               \
  SIM_HIDDEN void sim_mfma_##name(const void* a, const void* b, const void* c, void* d) { \
    sim::multiply<__VA_ARGS__>(a, b, c, d);                                               \
  }
extern "C" {
SIM_HIDDEN int sim_thread() { return threadIdx.x; }
SIM_HIDDEN int sim_block() { return blockIdx.x; }
SIM_HIDDEN int sim_lanes_low(int mask, int add) {
  unsigned lane = sim::current % sim::WARP;
  return __builtin_popcount(mask & (lane >= 32 ? ~0u : (1u << lane) - 1)) + add;
}
SIM_HIDDEN int sim_lanes_high(int mask, int add) {
  unsigned lane = sim::current % sim::WARP;
  return __builtin_popcount(mask & (lane < 32 ? 0u : (1u << (lane - 32)) - 1)) + add;
}
SIM_HIDDEN int sim_permute(int from, int value) {
  sim::Permute operands{from, value, 0};
  sim::together(sim::permute, operands);
  return operands.result;
}
SIM_HIDDEN void sim_pin(int) {}
SIM_HIDDEN void sim_sleep(int) { sim::leave(sim::ASLEEP); }
SIM_HIDDEN float sim_exp2(float value) {
  float result = std::exp2(value);
  return result < std::numeric_limits<float>::min() ? 0.0f : result;  // v_exp_f32 has no other numbers; NaN stays
}
SIM_HIDDEN void sim_release() { sim::touched[sim::current] = 0; }
SIM_HIDDEN void sim_acquire() { sim::waits_for_fence[sim::current] = 0; }
SIM_HIDDEN void sim_barrier() {
  if (sim::touched[sim::current]) sim::fail("a barrier that does not wait for accesses of LDS");
  sim::end_on_fault();
  sim::waits_for_fence[sim::current] = 1;
  sim::leave(sim::AT_BARRIER);
}
SIM_HIDDEN void sim_reads(const char* pointer, unsigned size, unsigned alignment) {
  unsigned at = sim::lds_address(pointer, size, alignment);
  sim::reading(at, size);
  sim::end_on_fault();
  sim::count_lds(sim::LDMATRIX, at, size);
}
SIM_HIDDEN void sim_writes(const char* pointer, unsigned size, unsigned alignment) {
  unsigned at = sim::lds_address(pointer, size, alignment);
  sim::writing(at, size);
  sim::end_on_fault();
  sim::count_lds(sim::SHARED_STORE, at, size);
}
SIM_HIDDEN void sim_aligned(uintptr_t address, unsigned alignment) {
  if (address % alignment) sim::fail("an access of memory whose alignment does not divide its address");
}
SIM_MFMA(32x32x8f16, 32, 4, uint16_t, sim::of_f16)
SIM_MFMA(32x32x8bf16, 32, 4, uint16_t, sim::of_bf16)
SIM_MFMA(16x16x16f16, 16, 4, uint16_t, sim::of_f16)
SIM_MFMA(16x16x16bf16, 16, 4, uint16_t, sim::of_bf16)
SIM_MFMA(32x32x2f32, 32, 1, float, sim::of_f32)
SIM_MFMA(16x16x4f32, 16, 1, float, sim::of_f32)
SIM_MFMA(32x32x16i8, 32, 8, int8_t, sim::of_i8)
SIM_MFMA(16x16x32i8, 16, 8, int8_t, sim::of_i8)
SIM_HIDDEN void sim_wmma_f16(const void* a, const void* b, void* sums, int x, int y) {
  sim::multiply_waves<uint16_t, sim::half_of>(a, b, sums, x, y);
}
SIM_HIDDEN void sim_wmma_bf16(const void* a, const void* b, void* sums, int x, int y) {
  sim::multiply_waves<uint16_t, sim::brain_of>(a, b, sums, x, y);
}
SIM_HIDDEN void sim_wmma_iu8(const void* a, const void* b, void* sums, int x, int y) {
  sim::multiply_waves<uint8_t, sim::byte_of>(a, b, sums, x, y);
}
// 0, or 719 and a text in sim_fault.
SIM_HIDDEN int sim_launch(void (*kernel)(void**), unsigned blocks, unsigned threads, unsigned lds_bytes, bool meets, bool cooperates,
                          void** arguments) {
  sim::begin_block = [] {
    sim::touched.assign(blockDim.x, 0);
    sim::waits_for_fence.assign(blockDim.x, 0);
    memset(sim_lds, 0xFF, sim::shared.size());
  };
  sim::exchange_more = [](std::vector<char>* more) {
    std::swap(sim::touched, more[0]);
    std::swap(sim::waits_for_fence, more[1]);
    more[2].resize(sizeof sim_lds);
    std::swap_ranges(sim_lds, sim_lds + sizeof sim_lds, more[2].begin());
  };
  return sim::launch(blocks, threads, 0, lds_bytes, meets, cooperates, [=] { kernel(arguments); });
}
}
