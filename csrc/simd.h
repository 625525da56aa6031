// A few words in which the kernels are written once, for one element and for a vector of them.
//
// Vectors are the compilers' own (vector_size): operators act on each element, every result is
// rounded by itself, and a comparison gives a mask. Code that takes the type `F` works for `float`,
// which ends a run whose length is no multiple of a vector, and for `Floats`.
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

template <class F>
struct Types;
template <>
struct Types<float> {
  using Int = int32_t;
  using Word = uint32_t;
  static constexpr int lanes = 1;
};
template <>
struct Types<Floats> {
  using Int = Ints;
  using Word = Words;
  static constexpr int lanes = kLanes;
};
template <class F>
using Int = typename Types<F>::Int;
template <class F>
using Word = typename Types<F>::Word;

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

template <class V>
static STQ_INLINE V load_bytes(const uint8_t* p) {
  if constexpr (sizeof(V) == 4) {
    return V(*p);
  } else {
#if defined(__AVX2__)
    typedef long long Half __attribute__((vector_size(16)));
    typedef char Chars __attribute__((vector_size(16)));
    return as<V>(__builtin_ia32_pmovzxbd256(as<Chars>(Half{load<long long>(p), 0})));
#else
    return __builtin_convertvector(load<Bytes>(p), V);
#endif
  }
}
// Stores the low `count` bytes of each word, byte p at planes + p * stride.
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, uint32_t x) {
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) planes[p * stride] = uint8_t(x >> (8 * p));
}
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, Words x) {
#if defined(__AVX2__)
  typedef char Chars __attribute__((vector_size(32)));
  typedef int64_t Quads __attribute__((vector_size(32)));
  // Sort the bytes by plane within each half, then bring the halves of a plane together.
  const Chars order = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
                       0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  const Quads sorted = as<Quads>(__builtin_ia32_permvarsi256(as<Ints>(__builtin_ia32_pshufb256(as<Chars>(x), order)),
                                                             Ints{0, 4, 1, 5, 2, 6, 3, 7}));
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) store(planes + p * stride, int64_t(sorted[p]));
#else
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) store(planes + p * stride, __builtin_convertvector(x >> (8 * p), Bytes));
#endif
}

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
#if defined(__x86_64__)
  __asm__("" : "+x"(v));
#endif
  return v;
}

// A number that `fixed` spread, as an F.
template <class F>
static STQ_INLINE F same(Floats x) {
  if constexpr (sizeof(F) == 4) return x[0];
  else return x;
}

// How far to shift the elements of a vector; AVX2 has a vector of counts for that.
#if defined(__AVX2__)
typedef Ints Count;
static STQ_INLINE Count count_of(int32_t n) { return fixed<Ints>(n); }
static STQ_INLINE int32_t number_of(Count n) { return n[0]; }
#else
typedef int32_t Count;
static STQ_INLINE Count count_of(int32_t n) { return n; }
static STQ_INLINE int32_t number_of(Count n) { return n; }
#endif
static STQ_INLINE uint32_t shifted_up(uint32_t x, Count n) { return x << number_of(n); }
static STQ_INLINE Words shifted_up(Words x, Count n) { return x << n; }
static STQ_INLINE uint32_t shifted_down(uint32_t x, Count n) { return x >> number_of(n); }
static STQ_INLINE Words shifted_down(Words x, Count n) { return x >> n; }
static STQ_INLINE int32_t shifted_down(int32_t x, Count n) { return x >> number_of(n); }
static STQ_INLINE Ints shifted_down(Ints x, Count n) { return x >> n; }

// -1 where the mask holds, else 0.
static STQ_INLINE int32_t minus(bool mask) { return -int32_t(mask); }
static STQ_INLINE Ints minus(Ints mask) { return mask; }

// `x` where the mask holds, else 0.
static STQ_INLINE int32_t only(bool mask, int32_t x) { return mask ? x : 0; }
static STQ_INLINE Ints only(Ints mask, int32_t x) { return mask & x; }

static STQ_INLINE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
static STQ_INLINE int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
#if defined(__AVX2__)
static STQ_INLINE Ints smaller(Ints a, Ints b) { return __builtin_ia32_pminsd256(a, b); }
static STQ_INLINE Ints larger(Ints a, Ints b) { return __builtin_ia32_pmaxsd256(a, b); }
static STQ_INLINE Words larger(Words a, Words b) { return as<Words>(__builtin_ia32_pmaxud256(as<Ints>(a), as<Ints>(b))); }
#else
static STQ_INLINE Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
static STQ_INLINE Ints larger(Ints a, Ints b) { return a > b ? a : b; }
static STQ_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }
#endif
static STQ_INLINE Ints smaller(Ints a, int32_t b) { return smaller(a, Ints{} + b); }
static STQ_INLINE Ints larger(Ints a, int32_t b) { return larger(a, Ints{} + b); }

// `x` with the sign of `like`; only 0 may be given that of 0.
static STQ_INLINE int32_t signed_as(int32_t x, int32_t like) { return like < 0 ? -x : x; }
static STQ_INLINE Ints signed_as(Ints x, Ints like) {
#if defined(__AVX2__)
  return __builtin_ia32_psignd256(x, like);
#else
  const Ints sign = like >> 31;
  return (x ^ sign) - sign;
#endif
}

// Cuts what is above `bound`; NaN passes.
static STQ_INLINE Floats cut_above(Floats x, Floats bound) {
#if defined(__AVX2__)
  return __builtin_ia32_minps256(bound, x);
#else
  return bound < x ? bound : x;
#endif
}

// Correctly rounded square roots.
static STQ_INLINE float root(float x) { return __builtin_sqrtf(x); }
static STQ_INLINE Floats root(Floats x) {
#if defined(__AVX2__)
  return __builtin_ia32_sqrtps256(x);
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
    for (int i = 0; i < kLanes; ++i) x[i] = i;
  return x;
}

// A table of 8 values, looked up by the lower `bits` bits of an index; those above may be anything.
// With fewer than 3 bits the values must repeat.
struct Table {
  alignas(32) float values[8];

  static STQ_INLINE Table of(const float* values, float factor) {
    Table table;
    for (int i = 0; i < 8; i += kLanes) store(table.values + i, load<Floats>(values + i) * factor);
    return table;
  }
  // value(i), for vectors of indices i.
  template <class Value>
  static STQ_INLINE Table of(Value value) {
    Table table;
    for (int i = 0; i < 8; i += kLanes) store(table.values + i, value(numbers<Ints>() + i));
    return table;
  }
  template <int bits>
  STQ_INLINE float at(int32_t index) const {
    return values[index & 7];
  }
  template <int bits>
  STQ_INLINE Floats at(Ints index) const {
#if defined(__AVX2__)
    if constexpr (bits < 3) return __builtin_ia32_vpermilvarps256(load<Floats>(values), index);
    return __builtin_ia32_permvarsf256(load<Floats>(values), index);
#else
    Floats x;
    for (int i = 0; i < kLanes; ++i) x[i] = values[index[i] & 7];
    return x;
#endif
  }
};

// A vector whose element i is x[i + distance], for the lower elements that have one.
template <int distance, class V>
static STQ_INLINE V shifted(V x) {
#if defined(__clang__)
  V y{};
  for (int i = 0; i + distance < kLanes; ++i) y[i] = x[i + distance];
  return y;
#else
  Ints index;
  for (int i = 0; i < kLanes; ++i) index[i] = (i + distance) % kLanes;
  return __builtin_shuffle(x, index);
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
