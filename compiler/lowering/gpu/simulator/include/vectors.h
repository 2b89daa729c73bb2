// CUDA's short vectors: those that TVM's code names.
#pragma once
#define SIM_VECTORS(T, name)                                                        \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                \
  struct name##3 { T x, y, z; };                                                    \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIM_VECTORS(signed char, char)
SIM_VECTORS(uchar, uchar)
SIM_VECTORS(short, short)
SIM_VECTORS(ushort, ushort)
SIM_VECTORS(int, int)
SIM_VECTORS(uint, uint)
SIM_VECTORS(float, float)
SIM_VECTORS(double, double)
SIM_VECTORS(long long, longlong)
SIM_VECTORS(unsigned long long, ulonglong)
#undef SIM_VECTORS
