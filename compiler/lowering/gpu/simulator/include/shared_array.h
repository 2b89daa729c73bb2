// Arrays that CUDA C declares __shared__: their elements tell the shadow what is done to them. Vectors of them are seen by the poison
// alone (not so those of PTX instructions).
#pragma once

namespace sim {
template <class T> struct Element {
  unsigned at;
  operator T() const {
    reading(at, sizeof(T));
    T value;
    memset((void*)&value, 0xFF, sizeof value);
    if (!fault[0]) memcpy((void*)&value, &shared[at], sizeof value);
    return value;
  }
  template <class U> explicit operator U() const { return (U)(T) * this; }
  const Element& operator=(const T& value) const {
    writing(at, sizeof(T));
    if (!fault[0]) memcpy(&shared[at], (const void*)&value, sizeof value);
    return *this;
  }
  const Element& operator=(const Element& other) const { return *this = (T)other; }
  T* operator&() const { return (T*)&shared[at]; }
};
template <class T> struct Array {
  unsigned begin;
  Element<T> operator[](unsigned i) const { return {begin + i * (unsigned)sizeof(T)}; }
  T* operator+(unsigned i) const { return (T*)&shared[begin] + i; }
};
}  // namespace sim
template <class T> inline T max(sim::Element<T> a, T b) { return (T)a > b ? (T)a : b; }
template <class T> inline T max(T a, sim::Element<T> b) { return a > (T)b ? a : (T)b; }
template <class T> inline T min(sim::Element<T> a, T b) { return (T)a < b ? (T)a : b; }
template <class T> inline T min(T a, sim::Element<T> b) { return a < (T)b ? a : (T)b; }
template <class T> inline T max(sim::Element<T> a, sim::Element<T> b) { return max((T)a, b); }
template <class T> inline T min(sim::Element<T> a, sim::Element<T> b) { return min((T)a, b); }
