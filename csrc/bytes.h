// Codes as vectors of bytes, and bytes sorted into planes: what AVX2 and AVX-512 pack codes with.
//
// Included inside the namespace of one instruction set, after curves.h.

template <class F>
constexpr bool kNarrows = false;  // whether codes beside `F` are packed as bytes

#if defined(__AVX2__)
template <>
constexpr bool kNarrows<Floats> = true;
typedef uint8_t Octets __attribute__((vector_size(32)));
typedef uint16_t Pairs __attribute__((vector_size(32)));

// Four vectors of words as bytes; what is negative becomes 0, what is too large 255. Each part of
// 128 bits takes four words of each vector, one vector after the other.
static STQ_INLINE Octets narrowed(Ints a, Ints b, Ints c, Ints d) {
  const __m256i low = _mm256_packs_epi32((__m256i)a, (__m256i)b), high = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  return (Octets)_mm256_packus_epi16(low, high);
}
// The same of signs: the upper bit of a byte is that of the word.
static STQ_INLINE Octets narrowed_signs(Ints a, Ints b, Ints c, Ints d) {
  const __m256i low = _mm256_packs_epi32((__m256i)a, (__m256i)b), high = _mm256_packs_epi32((__m256i)c, (__m256i)d);
  return (Octets)_mm256_packs_epi16(low, high);
}
static STQ_INLINE Octets smaller(Octets x, uint8_t most) {
  return (Octets)_mm256_min_epu8((__m256i)x, (__m256i)(Octets{} + most));
}
// Moves bits within pairs of bytes.
static STQ_INLINE Octets raised(Octets x, int places) { return (Octets)((Pairs)x << places); }
static STQ_INLINE Octets lowered(Octets x, int places) { return (Octets)((Pairs)x >> places); }
// The upper half of each part of 128 bits in the lower.
static STQ_INLINE Octets upper_halves(Octets x) { return (Octets)_mm256_srli_si256((__m256i)x, 8); }

// Exchanges bytes within the parts of 128 bits: four vectors' words to words of four bytes, or back.
static STQ_INLINE Octets parts_turned(Octets x) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return (Octets)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(order));
}
// The four bytes of each word, of `bits` bits each, one beside the other.
template <int bits>
static STQ_INLINE Words joined(Octets x) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)x, _mm256_set1_epi16(1 | 1 << (8 + bits)));
  return (Words)_mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 1 << (16 + 2 * bits)));
}
// Stores the first `count` planes, `stride` bytes apart, word p of each part being of plane p.
template <int count>
static STQ_INLINE void store_sorted(uint8_t* planes, int stride, Octets x) {
  typedef int64_t Quads __attribute__((vector_size(32)));
  const Quads sorted = (Quads)_mm256_permutevar8x32_epi32((__m256i)x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#pragma GCC unroll 4
  for (int p = 0; p < count; ++p) store(planes + p * stride, int64_t(sorted[p]));
}
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, Words x) {
  store_sorted<count>(planes, stride, parts_turned((Octets)x));
}
#endif

#if defined(__AVX512F__)
template <>
constexpr bool kNarrows<Wide> = true;
typedef uint8_t WideOctets __attribute__((vector_size(64)));
typedef uint16_t WidePairs __attribute__((vector_size(64)));

static STQ_INLINE WideOctets narrowed(WideInts a, WideInts b, WideInts c, WideInts d) {
  const __m512i low = _mm512_packs_epi32((__m512i)a, (__m512i)b), high = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  return (WideOctets)_mm512_packus_epi16(low, high);
}
static STQ_INLINE WideOctets narrowed_signs(WideInts a, WideInts b, WideInts c, WideInts d) {
  const __m512i low = _mm512_packs_epi32((__m512i)a, (__m512i)b), high = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  return (WideOctets)_mm512_packs_epi16(low, high);
}
static STQ_INLINE WideOctets smaller(WideOctets x, uint8_t most) {
  return (WideOctets)_mm512_min_epu8((__m512i)x, (__m512i)(WideOctets{} + most));
}
static STQ_INLINE WideOctets raised(WideOctets x, int places) { return (WideOctets)((WidePairs)x << places); }
static STQ_INLINE WideOctets lowered(WideOctets x, int places) { return (WideOctets)((WidePairs)x >> places); }
static STQ_INLINE WideOctets upper_halves(WideOctets x) { return (WideOctets)_mm512_bsrli_epi128((__m512i)x, 8); }
static STQ_INLINE WideOctets parts_turned(WideOctets x) { return (WideOctets)quarters_turned((__m512i)x); }
template <int bits>
static STQ_INLINE WideWords joined(WideOctets x) {
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)x, _mm512_set1_epi16(1 | 1 << (8 + bits)));
  return (WideWords)_mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 1 << (16 + 2 * bits)));
}
template <int count>
static STQ_INLINE void store_sorted(uint8_t* planes, int stride, WideOctets x) {
  const __m512i sorted = words_turned((__m512i)x);
  if (count == 4 && stride == kWide) return _mm512_storeu_si512(planes, sorted);
  _mm_storeu_si128((__m128i*)planes, _mm512_castsi512_si128(sorted));
  if (count > 1) _mm_storeu_si128((__m128i*)(planes + stride), _mm512_extracti32x4_epi32(sorted, 1));
  if (count > 2) _mm_storeu_si128((__m128i*)(planes + 2 * stride), _mm512_extracti32x4_epi32(sorted, 2));
  if (count > 3) _mm_storeu_si128((__m128i*)(planes + 3 * stride), _mm512_extracti32x4_epi32(sorted, 3));
}
template <int count>
static STQ_INLINE void store_planes(uint8_t* planes, int stride, WideWords x) {
  if constexpr (count == 1) return _mm_storeu_si128((__m128i*)planes, _mm512_cvtepi32_epi8((__m512i)x));
  store_sorted<count>(planes, stride, parts_turned((WideOctets)x));
}
#endif

// Packs the codes of 8 vectors of lanes, see `Codes`.
template <int bits, bool apart, class I>
static STQ_INLINE void store_narrowed(uint8_t* planes, int lanes, const I (&code)[8], const I (&value)[8])
#if defined(__AVX2__)
{
  const auto narrow = [&](int a, int b, int c, int d) __attribute__((always_inline)) {
    const auto x = smaller(narrowed(code[a], code[b], code[c], code[d]), uint8_t((1 << (bits - apart)) - 1));
    if constexpr (apart) {
      // Adding 127 sets the upper bit of all but 0.
      const auto signs = narrowed_signs(value[a], value[b], value[c], value[d]) & (x + uint8_t(127)) & uint8_t(128);
      return x | lowered(signs, 8 - bits);
    } else {
      return x;
    }
  };
  if constexpr (bits == 8) {
    store_sorted<4>(planes, lanes, narrow(0, 1, 2, 3));
    store_sorted<4>(planes + 4 * lanes, lanes, narrow(4, 5, 6, 7));
  } else if constexpr (bits == 4) {
    store_sorted<4>(planes, lanes, narrow(0, 2, 4, 6) | raised(narrow(1, 3, 5, 7), 4));
  } else if constexpr (bits == 2) {
    const auto x = narrow(0, 4, 1, 5) | raised(narrow(2, 6, 3, 7), 4);
    store_sorted<2>(planes, lanes, x | raised(upper_halves(x), 2));
  } else {
    const auto x = joined<bits>(parts_turned(narrow(0, 1, 2, 3))), y = joined<bits>(parts_turned(narrow(4, 5, 6, 7)));
    store_planes<(bits < 4 ? bits : 4)>(planes, lanes, x | y << (4 * bits));
    if constexpr (bits > 4) store_planes<bits - 4>(planes + 4 * lanes, lanes, y >> (32 - 4 * bits));
  }
}
#else
    ;
#endif
