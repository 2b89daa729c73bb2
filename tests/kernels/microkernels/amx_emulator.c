/* Runs AMX instructions on a CPU without them: they are illegal there, and the handler of that signal computes them.

   Tile state is the thread's own. Instructions and arithmetic: Intel's manual, volume 2, LDTILECFG to TILEZERO, TDPBF16PS and TDPBSSD to TDPBUUD. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

struct Tile { uint16_t row_bytes; uint8_t rows; uint8_t data[16][64]; };
static __thread struct { int configured; struct Tile tiles[8]; } state;
static struct sigaction previous;
static unsigned counts[9]; /* configurations, releases, zeros, loads, stores, products: bfloat16, u8*s8, s8*s8, s8*u8 */

static uint64_t reg(ucontext_t *u, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (uint64_t)u->uc_mcontext.gregs[order[number]];
}

static float flushed(float x) { return fabsf(x) < 0x1p-126f ? 0.0f : x; }

static float half(const uint8_t *p) {
  uint32_t bits = (uint32_t)(p[0] | p[1] << 8) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return flushed(x);
}

static void dot(struct Tile *c, const struct Tile *a, const struct Tile *b) {
  for (int m = 0; m < c->rows; m++) {
    float part[16][2] = {{0}};
    for (int k = 0; k < a->row_bytes / 4; k++)
      for (int n = 0; n < c->row_bytes / 4; n++)
        for (int i = 0; i < 2; i++)
          part[n][i] = flushed(part[n][i] + flushed(half(&a->data[m][4 * k + 2 * i]) * half(&b->data[k][4 * n + 2 * i])));
    for (int n = 0; n < c->row_bytes / 4; n++) {
      float sum;
      memcpy(&sum, &c->data[m][4 * n], 4);
      sum = flushed(sum + flushed(part[n][0] + part[n][1]));
      memcpy(&c->data[m][4 * n], &sum, 4);
    }
  }
}

static void dot_bytes(struct Tile *c, const struct Tile *a, const struct Tile *b, int a_signed, int b_signed) {
  for (int m = 0; m < c->rows; m++)
    for (int k = 0; k < a->row_bytes / 4; k++)
      for (int n = 0; n < c->row_bytes / 4; n++) {
        uint32_t sum;
        memcpy(&sum, &c->data[m][4 * n], 4);
        for (int i = 0; i < 4; i++) {
          uint8_t x = a->data[m][4 * k + i], y = b->data[k][4 * n + i];
          sum += (uint32_t)((a_signed ? (int8_t)x : x) * (b_signed ? (int8_t)y : y));
        }
        memcpy(&c->data[m][4 * n], &sum, 4);
      }
}

static int configure(const uint8_t *memory) {
  memset(&state, 0, sizeof state);
  if (memory[0] != 1 || memory[1] != 0) return 0;
  for (int i = 2; i < 16; i++) if (memory[i]) return 0;
  for (int i = 32; i < 48; i++) if (memory[i]) return 0; /* tiles 8 to 15 do not exist */
  for (int i = 56; i < 64; i++) if (memory[i]) return 0;
  for (int i = 0; i < 8; i++) {
    memcpy(&state.tiles[i].row_bytes, memory + 16 + 2 * i, 2);
    state.tiles[i].rows = memory[48 + i];
    if (state.tiles[i].row_bytes > 64 || state.tiles[i].rows > 16) return 0;
  }
  return state.configured = 1;
}

/* One instruction at p, its length, or 0 where it is none of the unit's. All have the prefix C4, map 0F38, W0, L0. */
static int execute(ucontext_t *u, const uint8_t *p) {
  if (p[0] != 0xC4 || (p[1] & 31) != 2 || (p[2] & 0x84) != 0) return 0;
  int r = !(p[1] & 0x80), x = !(p[1] & 0x40), b = !(p[1] & 0x20), prefix = p[2] & 3, source = ~p[2] >> 3 & 15;
  uint8_t opcode = p[3], modrm = p[4], mod = modrm >> 6, field = modrm >> 3 & 7, rm = modrm & 7;
  if (r) return 0; /* there are eight tiles */
  int is_bytes = opcode == 0x5E && prefix != 0, is_dot = is_bytes || (opcode == 0x5C && prefix == 2);
  if (is_dot && mod == 3 && !b && state.configured) {
    struct Tile *c = &state.tiles[field], *a = &state.tiles[rm], *d = &state.tiles[source & 7];
    if (source > 7 || c == a || c == d || a == d || a->row_bytes / 4 != d->rows || a->rows != c->rows) return 0;
    if (is_bytes)
      dot_bytes(c, a, d, prefix != 1, prefix != 2);
    else
      dot(c, a, d);
    __atomic_fetch_add(&counts[!is_bytes ? 5 : prefix == 1 ? 6 : prefix == 3 ? 7 : 8], 1, __ATOMIC_RELAXED);
    return 5;
  }
  if (opcode == 0x49 && mod == 3) {
    if (prefix == 3 && state.configured) {
      memset(state.tiles[field].data, 0, sizeof state.tiles[field].data);
      __atomic_fetch_add(&counts[2], 1, __ATOMIC_RELAXED);
      return 5;
    }
    if (prefix == 0 && modrm == 0xC0) {
      memset(&state, 0, sizeof state);
      __atomic_fetch_add(&counts[1], 1, __ATOMIC_RELAXED);
      return 5;
    }
    return 0;
  }
  if (mod == 3 || (opcode != 0x49 && opcode != 0x4B)) return 0;
  int length = 5, has_index = 0;
  uint64_t address = 0, stride = 0;
  if (rm == 4) {
    uint8_t sib = p[5];
    int index = (sib >> 3 & 7) | x << 3, base = sib & 7;
    length = 6;
    has_index = index != 4;
    if (has_index) stride = reg(u, index) << (sib >> 6);
    if (base == 5 && mod == 0) return 0;
    address = reg(u, base | b << 3);
  } else if (rm == 5 && mod == 0) {
    return 0; /* relative to the next instruction: not for what lies in the stack or comes by pointers */
  } else {
    address = reg(u, rm | b << 3);
  }
  if (mod == 1) address += (int8_t)p[length], length += 1;
  if (mod == 2) {
    int32_t far;
    memcpy(&far, p + length, 4);
    address += far, length += 4;
  }
  if (opcode == 0x49 && prefix == 0 && field == 0) {
    __atomic_fetch_add(&counts[0], 1, __ATOMIC_RELAXED);
    return configure((const uint8_t *)(address + stride)) ? length : 0;
  }
  if (opcode != 0x4B || rm != 4 || !state.configured) return 0;
  struct Tile *t = &state.tiles[field];
  if (prefix == 3 || prefix == 1) { /* TILELOADD, TILELOADDT1 */
    memset(t->data, 0, sizeof t->data);
    for (int i = 0; i < t->rows; i++) memcpy(t->data[i], (const void *)(address + i * stride), t->row_bytes);
    __atomic_fetch_add(&counts[3], 1, __ATOMIC_RELAXED);
  } else if (prefix == 2) {
    for (int i = 0; i < t->rows; i++) memcpy((void *)(address + i * stride), t->data[i], t->row_bytes);
    __atomic_fetch_add(&counts[4], 1, __ATOMIC_RELAXED);
  } else {
    return 0;
  }
  return length;
}

static void handler(int number, siginfo_t *info, void *context) {
  ucontext_t *u = context;
  int length = execute(u, (const uint8_t *)u->uc_mcontext.gregs[REG_RIP]);
  if (length) {
    u->uc_mcontext.gregs[REG_RIP] += length;
  } else {
    sigaction(number, &previous, 0); /* runs into the instruction again */
  }
}

void install(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  memset(counts, 0, sizeof counts);
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &previous);
}

void uninstall(unsigned *result) {
  memcpy(result, counts, sizeof counts);
  sigaction(SIGILL, &previous, 0);
}
