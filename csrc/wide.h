// The words of simd.h for vectors of 16, with AVX-512 F, BW, DQ and VL; a comparison of these gives
// a mask register.
//
// Included by simd.h.

constexpr int kWide = 16;
typedef float Wide __attribute__((vector_size(64)));
typedef int32_t WideInts __attribute__((vector_size(64)));
typedef uint32_t WideWords __attribute__((vector_size(64)));
struct WideMask {
  __mmask16 set;
};

template <>
struct Types<Wide> {
  using Int = WideInts;
  using Word = WideWords;
  using Mask = WideMask;
};

static STQ_INLINE Floats lower(Wide x) { return (Floats)_mm512_castps512_ps256((__m512)x); }
static STQ_INLINE Floats upper(Wide x) { return (Floats)_mm512_extractf32x8_ps((__m512)x, 1); }
static STQ_INLINE Ints lower(WideInts x) { return (Ints)_mm512_castsi512_si256((__m512i)x); }
static STQ_INLINE Ints upper(WideInts x) { return (Ints)_mm512_extracti32x8_epi32((__m512i)x, 1); }
static STQ_INLINE Words lower(WideWords x) { return (Words)lower((WideInts)x); }
static STQ_INLINE Words upper(WideWords x) { return (Words)upper((WideInts)x); }

static STQ_INLINE void load_bytes(const uint8_t* p, WideWords& x) {
  x = (WideWords)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}

// Exchanges bytes within the quarters of a vector, and words between them: one after the other
// turn words into four planes of 16 bytes, the other way round planes into words.
static STQ_INLINE __m512i quarters_turned(__m512i x) {
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}
static STQ_INLINE __m512i words_turned(__m512i x) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), x);
}

template <int count>
static STQ_INLINE void load_planes(const uint8_t* planes, int stride, WideWords& x) {
  if (count > 1 && stride == kWide) {
    const __m512i all = _mm512_maskz_loadu_epi32(__mmask16((1 << 4 * count) - 1), planes);
    x = (WideWords)quarters_turned(words_turned(all));
    return;
  }
  load_bytes(planes, x);
#pragma GCC unroll 4
  for (int p = 1; p < count; ++p) {
    WideWords plane;
    load_bytes(planes + p * stride, plane);
    x |= plane << (8 * p);
  }
}
static STQ_INLINE Wide select(WideInts mask, Wide a, Wide b) { return mask ? a : b; }
static STQ_INLINE WideInts select(WideInts mask, WideInts a, WideInts b) { return mask ? a : b; }
static STQ_INLINE WideWords select(WideInts mask, WideWords a, WideWords b) { return mask ? a : b; }

static STQ_INLINE WideMask at_least(Wide a, Wide b) { return {_mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ)}; }
static STQ_INLINE WideMask at_least(WideInts a, WideInts b) { return {_mm512_cmpge_epi32_mask((__m512i)a, (__m512i)b)}; }
static STQ_INLINE WideMask above(WideInts a, WideInts b) { return {_mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b)}; }

static STQ_INLINE WideInts only(WideMask mask, int32_t x) {
  return (WideInts)_mm512_maskz_mov_epi32(mask.set, _mm512_set1_epi32(x));
}
static STQ_INLINE WideInts raised(WideInts x, WideMask mask) {
  return (WideInts)_mm512_mask_add_epi32((__m512i)x, mask.set, (__m512i)x, _mm512_set1_epi32(1));
}
static STQ_INLINE WideWords with_bits(WideWords x, WideMask mask, uint32_t bits) {
  return (WideWords)_mm512_mask_or_epi32((__m512i)x, mask.set, (__m512i)x, _mm512_set1_epi32(int32_t(bits)));
}

static STQ_INLINE WideInts smaller(WideInts a, WideInts b) { return (WideInts)_mm512_min_epi32((__m512i)a, (__m512i)b); }
static STQ_INLINE WideInts larger(WideInts a, WideInts b) { return (WideInts)_mm512_max_epi32((__m512i)a, (__m512i)b); }
static STQ_INLINE WideWords larger(WideWords a, WideWords b) { return (WideWords)_mm512_max_epu32((__m512i)a, (__m512i)b); }

static STQ_INLINE WideInts signed_as(WideInts x, WideInts like) {
  return (WideInts)_mm512_mask_sub_epi32((__m512i)x, _mm512_movepi32_mask((__m512i)like), __m512i{}, (__m512i)x);
}

static STQ_INLINE Wide root(Wide x) { return (Wide)_mm512_sqrt_ps((__m512)x); }

template <int bits>
static STQ_INLINE Wide look_up(const float (&values)[8], WideInts index) {
  return (Wide)_mm512_permutexvar_ps((__m512i)index, _mm512_broadcast_f32x8(_mm256_load_ps(values)));
}
template <int bits>
static STQ_INLINE Wide look_up(const float (&values)[16], WideInts index) {
  return (Wide)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(values));
}
template <int bits>
static STQ_INLINE Wide look_up(const float (&values)[32], WideInts index) {
  return (Wide)_mm512_permutex2var_ps(_mm512_load_ps(values), (__m512i)index, _mm512_load_ps(values + 16));
}

// The one that is farther from zero, the positive one of two; NaN only if both are.
static STQ_INLINE Wide farther(Wide a, Wide b) { return (Wide)_mm512_range_ps((__m512)a, (__m512)b, 7); }

// The lower or upper halves of two vectors.
template <int upper>
static STQ_INLINE Wide halves(Wide a, Wide b) {
  return (Wide)_mm512_shuffle_f32x4((__m512)a, (__m512)b, upper ? 0xEE : 0x44);
}
// Every other quarter of two vectors, from the first or the second on.
template <int odd>
static STQ_INLINE Wide quarters(Wide a, Wide b) {
  return (Wide)_mm512_shuffle_f32x4((__m512)a, (__m512)b, odd ? 0xDD : 0x88);
}
// In every quarter, elements i0, i1, ... of it.
template <int i0, int i1, int i2, int i3>
static STQ_INLINE Wide within(Wide x) {
  return (Wide)_mm512_permute_ps((__m512)x, i0 | i1 << 2 | i2 << 4 | i3 << 6);
}
// The first element of every quarter.
static STQ_INLINE HalfFloats firsts(Wide x) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  return (HalfFloats)_mm512_castps512_ps128(_mm512_permutexvar_ps(order, (__m512)x));
}

// What `join` makes of the 16 elements of each vector, by the halving tree.
template <class Join>
static STQ_INLINE HalfFloats reduced(Wide a, Wide b, Wide c, Wide d, Join join) {
  const Wide ab = join(halves<0>(a, b), halves<1>(a, b)), cd = join(halves<0>(c, d), halves<1>(c, d));
  Wide all = join(quarters<0>(ab, cd), quarters<1>(ab, cd));
  all = join(all, within<2, 3, 0, 1>(all));
  all = join(all, within<1, 0, 3, 2>(all));
  return firsts(all);
}
