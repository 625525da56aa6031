// A few words in which the kernels are written once, for one element and for a vector of them.
//
// Vectors are the compilers' own (vector_size): operators act on each element, every result is
// rounded by itself, and a comparison gives a mask. Code that takes the type `F` works for `float`,
// which ends a run whose length is no multiple of a vector, for `Floats`, and for `Wide`: the widest
// vectors there are, which are longer than `Floats` with AVX-512 (wide.h) and the same without.
//
// Included inside the namespace of one instruction set, which defines STQ_LANES, and compiled with
// its flags: nothing here or in the headers after may have external linkage or call an inline
// function of the standard library, because the linker could hand the code of one instruction set
// to another.

#define STQ_INLINE inline __attribute__((always_inline))

constexpr int kLanes = STQ_LANES;
typedef float Floats __attribute__((vector_size(4 * STQ_LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * STQ_LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * STQ_LANES)));
typedef uint8_t Bytes __attribute__((vector_size(STQ_LANES)));

// Where a comparison holds: all bits of an element are set, or none.
struct FloatsMask {
  Ints set;
};

// Halves of a vector of 8.
#if defined(__AVX2__)
typedef float HalfFloats __attribute__((vector_size(16)));
typedef int32_t HalfInts __attribute__((vector_size(16)));
typedef uint32_t HalfWords __attribute__((vector_size(16)));
static STQ_INLINE HalfFloats lower(Floats x) { return (HalfFloats)_mm256_castps256_ps128((__m256)x); }
static STQ_INLINE HalfFloats upper(Floats x) { return (HalfFloats)_mm256_extractf128_ps((__m256)x, 1); }
static STQ_INLINE HalfInts lower(Ints x) { return (HalfInts)_mm256_castsi256_si128((__m256i)x); }
static STQ_INLINE HalfInts upper(Ints x) { return (HalfInts)_mm256_extracti128_si256((__m256i)x, 1); }
static STQ_INLINE HalfWords lower(Words x) { return (HalfWords)lower((Ints)x); }
static STQ_INLINE HalfWords upper(Words x) { return (HalfWords)upper((Ints)x); }
#endif

// Vectors of 4, one element for each block of a chunk.
#if STQ_LANES == 4
typedef Floats Four;
typedef Ints FourInts;
#else
typedef HalfFloats Four;
typedef HalfInts FourInts;
#endif

template <class F>
struct Types;
template <>
struct Types<float> {
  using Int = int32_t;
  using Word = uint32_t;
  using Mask = bool;
};
template <>
struct Types<Floats> {
  using Int = Ints;
  using Word = Words;
  using Mask = FloatsMask;
};
#if defined(__AVX2__)
template <>
struct Types<HalfFloats> {
  using Int = HalfInts;
  using Word = HalfWords;
};
#endif
template <class F>
using Int = typename Types<F>::Int;
template <class F>
using Word = typename Types<F>::Word;
template <class F>
using Mask = typename Types<F>::Mask;

// Reinterprets the bits.
template <class To, class From>
static STQ_INLINE To as(From x) {
  static_assert(sizeof(To) == sizeof(From), "another size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

template <class V, class T>
static STQ_INLINE V load(const T* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class T, class V>
static STQ_INLINE void store(T* p, V x) {
  __builtin_memcpy(p, &x, sizeof x);
}

#if defined(__AVX512F__)
#include "wide.h"
#else
typedef Floats Wide;
typedef Ints WideInts;
typedef Words WideWords;
constexpr int kWide = kLanes;
#endif

static STQ_INLINE void load_bytes(const uint8_t* p, uint32_t& x) { x = *p; }
static STQ_INLINE void load_bytes(const uint8_t* p, Words& x) {
#if defined(__AVX2__)
  x = (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  x = __builtin_convertvector(load<Bytes>(p), Words);
#endif
}
// Loads the low `count` bytes of each word, byte p from planes + p * stride; the others are zero.
template <int count, class W>
static STQ_INLINE void load_planes(const uint8_t* planes, int stride, W& x) {
  load_bytes(planes, x);
#pragma GCC unroll 4
  for (int p = 1; p < count; ++p) {
    W plane;
    load_bytes(planes + p * stride, plane);
    x |= plane << (8 * p);
  }
}
// Stores the low `count` bytes of each word, byte p at planes + p * stride.
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, uint32_t x) {
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) planes[p * stride] = uint8_t(x >> (8 * p));
}
#if !defined(__AVX2__)
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, Words x) {
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) store(planes + p * stride, __builtin_convertvector(x >> (8 * p), Bytes));
}
#endif

static STQ_INLINE float select(bool mask, float a, float b) { return mask ? a : b; }
static STQ_INLINE int32_t select(bool mask, int32_t a, int32_t b) { return mask ? a : b; }
static STQ_INLINE uint32_t select(bool mask, uint32_t a, uint32_t b) { return mask ? a : b; }
static STQ_INLINE Floats select(Ints mask, Floats a, Floats b) { return mask ? a : b; }
static STQ_INLINE Ints select(Ints mask, Ints a, Ints b) { return mask ? a : b; }
static STQ_INLINE Words select(Ints mask, Words a, Words b) { return mask ? a : b; }

// `x` in every element, as a vector that is made once: compilers would rather load and spread a
// number again at each use than keep or spill the vector.
template <class V, class T>
static STQ_INLINE V fixed(T x) {
  V v = V{} + x;
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#endif
  return v;
}

static STQ_INLINE bool at_least(float a, float b) { return a >= b; }
static STQ_INLINE bool at_least(int32_t a, int32_t b) { return a >= b; }
static STQ_INLINE FloatsMask at_least(Floats a, Floats b) { return {a >= b}; }
static STQ_INLINE FloatsMask at_least(Ints a, Ints b) { return {a >= b}; }
static STQ_INLINE bool above(int32_t a, int32_t b) { return a > b; }
static STQ_INLINE FloatsMask above(Ints a, Ints b) { return {a > b}; }

// `x` where the mask holds, else 0.
static STQ_INLINE int32_t only(bool mask, int32_t x) { return mask ? x : 0; }
static STQ_INLINE Ints only(FloatsMask mask, int32_t x) { return mask.set & x; }

// One more where the mask holds.
static STQ_INLINE int32_t raised(int32_t x, bool mask) { return x + mask; }
static STQ_INLINE Ints raised(Ints x, FloatsMask mask) { return x - mask.set; }

// With `bits` where the mask holds.
static STQ_INLINE uint32_t with_bits(uint32_t x, bool mask, uint32_t bits) { return mask ? x | bits : x; }
static STQ_INLINE Words with_bits(Words x, FloatsMask mask, uint32_t bits) { return x | (as<Words>(mask.set) & bits); }

static STQ_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static STQ_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
#if defined(__AVX2__)
static STQ_INLINE HalfInts larger(HalfInts a, HalfInts b) { return (HalfInts)_mm_max_epi32((__m128i)a, (__m128i)b); }
static STQ_INLINE HalfWords larger(HalfWords a, HalfWords b) { return (HalfWords)_mm_max_epu32((__m128i)a, (__m128i)b); }
static STQ_INLINE Ints smaller(Ints a, Ints b) { return (Ints)_mm256_min_epi32((__m256i)a, (__m256i)b); }
static STQ_INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
static STQ_INLINE Words larger(Words a, Words b) { return (Words)_mm256_max_epu32((__m256i)a, (__m256i)b); }
#else
static STQ_INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
static STQ_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
static STQ_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
#endif

// `x` with the sign of `like`; only 0 may be given that of 0.
static STQ_INLINE int32_t signed_as(int32_t x, int32_t like) { return like < 0 ? -x : x; }
static STQ_INLINE Ints signed_as(Ints x, Ints like) {
#if defined(__AVX2__)
  return (Ints)_mm256_sign_epi32((__m256i)x, (__m256i)like);
#else
  const Ints sign = like >> 31;
  return (x ^ sign) - sign;
#endif
}

// Cuts what is above `bound`; NaN passes.
static STQ_INLINE Floats cut_above(Floats x, Floats bound) {
#if defined(__AVX2__)
  return (Floats)_mm256_min_ps((__m256)bound, (__m256)x);
#else
  return bound < x ? bound : x;
#endif
}

// Correctly rounded square roots.
static STQ_INLINE float root(float x) { return __builtin_sqrtf(x); }
static STQ_INLINE Floats root(Floats x) {
#if defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return __builtin_ia32_sqrtps(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// 0, 1, 2, ...
template <class V>
static STQ_INLINE V numbers() {
  V x{};
  if constexpr (sizeof(V) > 4)
    for (int i = 0; i < int(sizeof(V) / 4); ++i) x[i] = i;
  return x;
}

// Looks up values by the lower `bits` bits of an index; those above may be anything. With fewer
// bits than the 8 values need, these must repeat.
template <int bits>
static STQ_INLINE float look_up(const float (&values)[8], int32_t index) {
  return values[index & 7];
}
template <int bits>
static STQ_INLINE Floats look_up(const float (&values)[8], Ints index) {
#if defined(__AVX2__)
  if constexpr (bits < 3) return (Floats)_mm256_permutevar_ps((__m256)load<Floats>(values), (__m256i)index);
  return (Floats)_mm256_permutevar8x32_ps((__m256)load<Floats>(values), (__m256i)index);
#else
  Floats x;
  for (int i = 0; i < kLanes; ++i) x[i] = values[index[i] & 7];
  return x;
#endif
}

// A number that `fixed` spread, as an F.
template <class F, class V>
static STQ_INLINE F same(V x) {
  if constexpr (sizeof(F) == 4) return x[0];
  else if constexpr (sizeof(F) == sizeof(V)) return x;
  else return lower(x);
}

// How far to shift the elements of a vector; AVX2 has a vector of counts for that.
#if defined(__AVX2__)
typedef WideInts Count;
static STQ_INLINE Count count_of(int32_t n) { return fixed<WideInts>(n); }
#else
typedef int32_t Count;
static STQ_INLINE Count count_of(int32_t n) { return n; }
#endif
template <class I, class N>
static STQ_INLINE auto count_for(N n) {
  if constexpr (sizeof(N) == 4 || sizeof(N) == sizeof(I)) return n;
  else if constexpr (sizeof(I) == 4) return n[0];
  else return lower(n);
}
template <class I>
static STQ_INLINE I shifted_up(I x, Count n) {
  return x << count_for<I>(n);
}
template <class I>
static STQ_INLINE I shifted_down(I x, Count n) {
  return x >> count_for<I>(n);
}

template <class I>
static STQ_INLINE I smaller(I a, int32_t b) {
  return smaller(a, I{} + b);
}
template <class I>
static STQ_INLINE I larger(I a, int32_t b) {
  return larger(a, I{} + b);
}

// A table of values, looked up by the lower `bits` bits of an index; those above may be anything.
// Values that fewer bits reach repeat.
template <int size>
struct Table {
  alignas(4 * size) float values[size];

  static STQ_INLINE Table of(const float* values, float factor) {
    Table table;
    for (int i = 0; i < size; i += kLanes) store(table.values + i, load<Floats>(values + i) * factor);
    return table;
  }
  // value(i), for vectors of indices i.
  template <class Value>
  static STQ_INLINE Table of(Value value) {
    Table table;
    for (int i = 0; i < size; i += kWide) store(table.values + i, value(numbers<WideInts>() + i));
    return table;
  }
  template <int bits, class I>
  STQ_INLINE auto at(I index) const {
    return look_up<bits>(values, index);
  }
};

// A vector of 4 whose element i is x[i + distance], for the lower elements that have one.
template <int distance, class V>
static STQ_INLINE V shifted(V x) {
#if defined(__clang__)
  V y{};
  for (int i = 0; i + distance < 4; ++i) y[i] = x[i + distance];
  return y;
#else
  typedef int32_t Four __attribute__((vector_size(16)));
  return __builtin_shuffle(x, Four{distance, (1 + distance) % 4, (2 + distance) % 4, (3 + distance) % 4});
#endif
}

template <class F>
static STQ_INLINE F absolute(F x) {
  return as<F>(as<Word<F>>(x) & 0x7FFFFFFFu);
}

// Calls visit(position, F{}) for a run of elements: vectors first, then one by one.
template <class Visit>
static STQ_INLINE void each(int count, Visit visit) {
  int i = 0;
  if constexpr (kWide > kLanes)
    for (; i + kWide <= count; i += kWide) visit(i, Wide{});
  for (; i + kLanes <= count; i += kLanes) visit(i, Floats{});
  for (; i < count; ++i) visit(i, float{});
}

// Calls visit(Index<0>{}), ..., visit(Index<7>{}): a loop over the codes of a lane, unrolled.
template <int value>
struct Index {
  static constexpr int j = value;
};
template <class Visit>
static STQ_INLINE void each_code(Visit visit) {
  visit(Index<0>{}), visit(Index<1>{}), visit(Index<2>{}), visit(Index<3>{});
  visit(Index<4>{}), visit(Index<5>{}), visit(Index<6>{}), visit(Index<7>{});
}
