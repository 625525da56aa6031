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
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, WideWords x) {
  if constexpr (count == 1) return _mm_storeu_si128((__m128i*)planes, _mm512_cvtepi32_epi8((__m512i)x));
  const __m512i sorted = words_turned(quarters_turned((__m512i)x));
  if (count == 4 && stride == kWide) return _mm512_storeu_si512(planes, sorted);
  _mm_storeu_si128((__m128i*)planes, _mm512_castsi512_si128(sorted));
  if (count > 1) _mm_storeu_si128((__m128i*)(planes + stride), _mm512_extracti32x4_epi32(sorted, 1));
  if (count > 2) _mm_storeu_si128((__m128i*)(planes + 2 * stride), _mm512_extracti32x4_epi32(sorted, 2));
  if (count > 3) _mm_storeu_si128((__m128i*)(planes + 3 * stride), _mm512_extracti32x4_epi32(sorted, 3));
}

static STQ_INLINE void store_codes(uint8_t* p, int stride, WideWords a, WideWords b, WideWords c, WideWords d) {
  const __m512i low = _mm512_packs_epi32((__m512i)a, (__m512i)b), high = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  const __m512i sorted = words_turned(_mm512_packus_epi16(low, high));
  if (stride == kWide) return _mm512_storeu_si512(p, sorted);
  _mm_storeu_si128((__m128i*)p, _mm512_castsi512_si128(sorted));
  _mm_storeu_si128((__m128i*)(p + stride), _mm512_extracti32x4_epi32(sorted, 1));
  _mm_storeu_si128((__m128i*)(p + 2 * stride), _mm512_extracti32x4_epi32(sorted, 2));
  _mm_storeu_si128((__m128i*)(p + 3 * stride), _mm512_extracti32x4_epi32(sorted, 3));
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
