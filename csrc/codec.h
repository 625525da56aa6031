// The codec arithmetic, once: unpack and decode, encode and pack, on the blocks of a chunk.
//
// Written as plain loops that compilers vectorise; every operation and its order are those of
// codecs/curves.py, packing.py, residual.py and rounding.py. Included inside the namespace of one
// instruction set and compiled with its flags: nothing here may have external linkage, or call an
// inline function of the standard library, because the linker could hand the code of one
// instruction set to another.
#include "layout.h"

#define STQ_INLINE static inline __attribute__((always_inline))
#define STQ_SIMD _Pragma("GCC ivdep")

constexpr float kTiny = 0x1p-100f;  // scales below count as zero
constexpr int kMantissa = 23;
constexpr int32_t kOne = 0x3F800000;
constexpr uint32_t kSign = 0x80000000u;
constexpr int32_t kInfinity = 0x7F800000;

STQ_INLINE int32_t bits_of(float x) {
  int32_t i;
  __builtin_memcpy(&i, &x, 4);
  return i;
}
STQ_INLINE float float_of(int32_t i) {
  float x;
  __builtin_memcpy(&x, &i, 4);
  return x;
}

// ---------------------------------------------------------------------------------- curves

// A curve is prepared for one block from its scale and then maps values to codes and back.

template <int kBits>
struct DynamicCurve {
  static constexpr int bits = kBits;
  float scale, inverse;

  STQ_INLINE DynamicCurve of(float scale, const State&) {
    return {scale, __builtin_fabsf(scale) >= kTiny ? 1.0f / scale : 0.0f};
  }
  inline __attribute__((always_inline)) float decode(int32_t code) const {
    if constexpr (bits == 0) return 0.0f * scale;
    if constexpr (bits == 2) {
      float level = code == 1 ? 0.55f : 0.0f;
      level = code == 2 ? 1.0f : level;
      level = code == 3 ? -0.55f : level;
      return level * scale;
    }
    // Three bits: the low two choose a magnitude, the top one is its sign, "negative zero" is +1.
    const int32_t low = code & 3;
    float level = code == 4 ? 1.0f : 0.0f;
    level = low == 1 ? 0.055f : level;
    level = low == 2 ? 0.325f : level;
    level = low == 3 ? 0.775f : level;
    const int32_t sign = low != 0 ? (code & 4) << 29 : 0;
    return float_of(bits_of(level) | sign) * scale;
  }
  inline __attribute__((always_inline)) int32_t encode(float value, uint32_t) const {
    if constexpr (bits == 0) return 0;
    const float ratio = value * inverse;
    if constexpr (bits == 2) {
      constexpr float t1 = float((0.0 + 0.55) / 2), t2 = float((0.55 + 1.0) / 2);
      return (ratio >= t1) + (ratio >= t2) + (ratio <= -t1 ? 3 : 0);
    }
    constexpr float t1 = float((0.0 + 0.055) / 2), t2 = float((0.055 + 0.325) / 2);
    constexpr float t3 = float((0.325 + 0.775) / 2), t4 = float((0.775 + 1.0) / 2);
    return (ratio >= t1) + (ratio >= t2) + (ratio >= t3) + (ratio >= t4) + (ratio <= -t1 ? 5 : 0) + (ratio <= -t2) +
           (ratio <= -t3);
  }
};

template <int kBits>
struct MulawCurve {
  static constexpr int bits = kBits;
  static constexpr float span = 4.5f - 16.0f / (1 << bits);
  static constexpr int32_t bias = 0x3FC00000;  // 1.5
  static constexpr int shift = kMantissa - (bits - 2);
  static constexpr int32_t sign_bit = 1 << (bits - 1);
  float unit, stretch;

  STQ_INLINE MulawCurve of(float scale, const State&) { return {scale / span, scale < kTiny ? 0.0f : span / scale}; }
  inline __attribute__((always_inline)) float decode(int32_t code) const {
    const float value = (float_of(bias + ((code & (sign_bit - 1)) << shift)) - 1.5f) * unit;
    return float_of(bits_of(value) ^ ((code & sign_bit) << (32 - bits)));
  }
  inline __attribute__((always_inline)) int32_t encode(float value, uint32_t) const {
    const float biased = __builtin_fabsf(value) * stretch + 1.5f;
    int32_t magnitude = (bits_of(biased) - (bias - (1 << (shift - 1)))) >> shift;
    magnitude = magnitude < sign_bit - 1 ? magnitude : sign_bit - 1;
    const int32_t sign = (value < 0.0f) & (magnitude > 0) ? sign_bit : 0;
    return magnitude | sign;
  }
};

template <int kBits, bool kStochastic>
struct LogCurve {
  static constexpr int bits = kBits;
  float scale, inverse;
  int32_t lowest, shift;

  STQ_INLINE LogCurve of(float scale, const State& state) {
    return {scale, __builtin_fabsf(scale) >= kTiny ? 1.0f / scale : 0.0f,
            kOne + int32_t(state.lo) * (1 << kMantissa), kMantissa + int32_t(state.log2_step)};
  }
  inline __attribute__((always_inline)) float decode(int32_t code) const {
    const float value = float_of(int32_t(uint32_t(lowest) + (uint32_t(code) << shift))) * scale;
    return scale < kTiny ? scale : value;
  }
  inline __attribute__((always_inline)) int32_t encode(float value, uint32_t random) const {
    if constexpr (bits == 0) return 0;
    int32_t above = bits_of(value * inverse) - lowest;
    above = above > 0 ? above : 0;
    const int32_t addend = kStochastic ? int32_t(random >> (32 - shift)) : 1 << (shift - 1);
    const int32_t code = (above + addend) >> shift;
    constexpr int32_t top = (1 << bits) - 1;
    return code < top ? code : top;
  }
};

// --------------------------------------------------------------------------------- packing

template <int bits>
struct Lane {
  // The codes of a lane as one little-endian integer, in 32-bit words.
  static constexpr int words = bits == 0 ? 1 : (bits + 3) / 4;
  uint32_t word[words];

  STQ_INLINE Lane load(const uint8_t* planes, int lanes, int lane) {
    Lane x{};
#pragma GCC unroll 16
    for (int p = 0; p < bits; ++p) x.word[p / 4] |= uint32_t(planes[p * lanes + lane]) << (8 * (p % 4));
    return x;
  }
  template <int j>
  inline __attribute__((always_inline)) int32_t get() const {
    if constexpr (bits == 0) return 0;
    constexpr int at = bits * j / 32, shift = bits * j % 32;
    uint32_t code = word[at] >> shift;
    if constexpr (shift + bits > 32) code |= word[at + 1] << (32 - shift);
    if constexpr (shift + bits != 32) code &= (1u << bits) - 1;
    return int32_t(code);
  }
  template <int j>
  inline __attribute__((always_inline)) void put(int32_t code) {
    if constexpr (bits == 0) return;
    constexpr int at = bits * j / 32, shift = bits * j % 32;
    word[at] |= uint32_t(code) << shift;
    if constexpr (shift + bits > 32) word[at + 1] |= uint32_t(code) >> (32 - shift);
  }
  inline __attribute__((always_inline)) void store(uint8_t* planes, int lanes, int lane) const {
#pragma GCC unroll 16
    for (int p = 0; p < bits; ++p) planes[p * lanes + lane] = uint8_t(word[p / 4] >> (8 * (p % 4)));
  }
};

// Calls visit(block, lanes) for each block, with a constant number of lanes where blocks are full
// and of the usual size.
template <class Visit>
STQ_INLINE void each_block(const Chunk& chunk, Visit visit) {
  for (int b = 0; b < chunk.blocks; ++b) {
    if (chunk.count[b] == 128) {
      visit(b, 16);
    } else {
      visit(b, (chunk.count[b] + kCodesPerLane - 1) / kCodesPerLane);
    }
  }
}

template <int bits, class Map>
STQ_INLINE void unpack_block(const uint8_t* __restrict planes, int lanes, float* __restrict out, Map map) {
  STQ_SIMD
  for (int l = 0; l < lanes; ++l) {
    const auto x = Lane<bits>::load(planes, lanes, l);
    out[0 * lanes + l] = map(x.template get<0>(), 0 * lanes + l);
    out[1 * lanes + l] = map(x.template get<1>(), 1 * lanes + l);
    out[2 * lanes + l] = map(x.template get<2>(), 2 * lanes + l);
    out[3 * lanes + l] = map(x.template get<3>(), 3 * lanes + l);
    out[4 * lanes + l] = map(x.template get<4>(), 4 * lanes + l);
    out[5 * lanes + l] = map(x.template get<5>(), 5 * lanes + l);
    out[6 * lanes + l] = map(x.template get<6>(), 6 * lanes + l);
    out[7 * lanes + l] = map(x.template get<7>(), 7 * lanes + l);
  }
}

template <int bits, class Map>
STQ_INLINE void pack_block(uint8_t* __restrict planes, int lanes, Map map) {
  STQ_SIMD
  for (int l = 0; l < lanes; ++l) {
    Lane<bits> x{};
    x.template put<0>(map(0 * lanes + l));
    x.template put<1>(map(1 * lanes + l));
    x.template put<2>(map(2 * lanes + l));
    x.template put<3>(map(3 * lanes + l));
    x.template put<4>(map(4 * lanes + l));
    x.template put<5>(map(5 * lanes + l));
    x.template put<6>(map(6 * lanes + l));
    x.template put<7>(map(7 * lanes + l));
    x.store(planes, lanes, l);
  }
}

// ------------------------------------------------------------------- states, chunk by chunk

// What happens to a value once its code is known: nothing, or it becomes value * x + error * e,
// e being what rounding dropped.
struct Feedback {
  float value, error;
};

using DecodeChunk = void (*)(const State& state, const Chunk& chunk, float* out);
using EncodeChunk = void (*)(const State& state, const Chunk& chunk, const float* scales, float* values,
                             const uint32_t* random, Feedback feedback);

template <class Curve>
static void decode_chunk(const State& state, const Chunk& chunk, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(state.scales[chunk.first + b], state);
    unpack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, out + b * chunk.block,
                              [&](int32_t code, int) __attribute__((always_inline)) { return curve.decode(code); });
  });
}

template <class Curve, bool prepay, bool noisy>
static void encode_chunk(const State& state, const Chunk& chunk, const float* scales, float* values,
                         const uint32_t* random, Feedback feedback) {
  uint8_t* codes = static_cast<uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(scales[b], state);
    float* __restrict x = values + b * chunk.block;
    const uint32_t* __restrict noise = noisy ? random + b * chunk.block : nullptr;
    pack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, [&](int i) __attribute__((always_inline)) {
      const float value = x[i];
      const int32_t code = curve.encode(value, noisy ? noise[i] : 0);
      if constexpr (prepay) x[i] = feedback.value * value + feedback.error * (value - curve.decode(code));
      return code;
    });
  });
}

// The codes themselves, as numbers.
template <int bits>
static void unpack_chunk(const State& state, const Chunk& chunk, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    unpack_block<bits>(codes + bits * chunk.lane[b], lanes, out + b * chunk.block,
                       [](int32_t code, int) __attribute__((always_inline)) { return float(code); });
  });
}

static DecodeChunk unpacker(const State& state) {
  constexpr DecodeChunk table[] = {unpack_chunk<0>, unpack_chunk<1>, unpack_chunk<2>, unpack_chunk<3>, unpack_chunk<4>,
                                   unpack_chunk<5>, unpack_chunk<6>, nullptr,         unpack_chunk<8>};
  return table[state.bits];
}

static DecodeChunk decoder(const State& state) {
  const int bits = int(state.bits);
  switch (state.family) {
    case kDynamic:
      return bits == 0 ? decode_chunk<DynamicCurve<0>> : bits == 2 ? decode_chunk<DynamicCurve<2>>
                                                                   : decode_chunk<DynamicCurve<3>>;
    case kMulaw:
      return bits == 4   ? decode_chunk<MulawCurve<4>>
             : bits == 5 ? decode_chunk<MulawCurve<5>>
             : bits == 6 ? decode_chunk<MulawCurve<6>>
                         : decode_chunk<MulawCurve<8>>;
    default: {
      constexpr DecodeChunk table[] = {
          decode_chunk<LogCurve<0, false>>, decode_chunk<LogCurve<1, false>>, decode_chunk<LogCurve<2, false>>,
          decode_chunk<LogCurve<3, false>>, decode_chunk<LogCurve<4, false>>, decode_chunk<LogCurve<5, false>>,
          decode_chunk<LogCurve<6, false>>, nullptr,                          decode_chunk<LogCurve<8, false>>};
      return table[bits];
    }
  }
}

template <bool prepay>
static EncodeChunk signed_encoder(const State& state) {
  const int bits = int(state.bits);
  if (state.family == kDynamic)
    return bits == 0   ? encode_chunk<DynamicCurve<0>, prepay, false>
           : bits == 2 ? encode_chunk<DynamicCurve<2>, prepay, false>
                       : encode_chunk<DynamicCurve<3>, prepay, false>;
  return bits == 4   ? encode_chunk<MulawCurve<4>, prepay, false>
         : bits == 5 ? encode_chunk<MulawCurve<5>, prepay, false>
         : bits == 6 ? encode_chunk<MulawCurve<6>, prepay, false>
                     : encode_chunk<MulawCurve<8>, prepay, false>;
}

template <bool noisy>
static EncodeChunk log_encoder(const State& state) {
  constexpr EncodeChunk table[] = {
      encode_chunk<LogCurve<0, noisy>, false, noisy>, encode_chunk<LogCurve<1, noisy>, false, noisy>,
      encode_chunk<LogCurve<2, noisy>, false, noisy>, encode_chunk<LogCurve<3, noisy>, false, noisy>,
      encode_chunk<LogCurve<4, noisy>, false, noisy>, encode_chunk<LogCurve<5, noisy>, false, noisy>,
      encode_chunk<LogCurve<6, noisy>, false, noisy>, nullptr,
      encode_chunk<LogCurve<8, noisy>, false, noisy>};
  return table[state.bits];
}

// The encoder of a state. Only LOG draws random numbers; only signed families prepay.
static EncodeChunk encoder(const State& state, bool prepay, bool noisy) {
  if (state.family == kLog) return noisy ? log_encoder<true>(state) : log_encoder<false>(state);
  return prepay ? signed_encoder<true>(state) : signed_encoder<false>(state);
}

// ----------------------------------------------------------------------- random numbers

// 32 random bits for the elements [first, first + count) of a parameter; see codecs/rounding.py.
static void draw(uint64_t key, int64_t first, int count, uint32_t* __restrict out) {
  while (count > 0) {
    // The upper half of the index is constant up to the next multiple of 2^32.
    const uint64_t left = (uint64_t(1) << 32) - (uint64_t(first) & 0xFFFFFFFFu);
    const int n = uint64_t(count) < left ? count : int(left);
    const uint32_t low = uint32_t(first), add = uint32_t(key >> 32);
    const uint32_t flip = uint32_t(uint64_t(first) >> 32) * 0x9E3779B1u ^ uint32_t(key);
    STQ_SIMD
    for (int i = 0; i < n; ++i) {
      uint32_t x = (low + uint32_t(i)) ^ flip;
      x = (x ^ (x >> 16)) * 0x21F0AAADu;
      x = ((x ^ (x >> 15)) + add) * 0xD35A2D97u;
      out[i] = x ^ (x >> 15);
    }
    first += n, out += n, count -= n;
  }
}

static void draw_chunk(uint64_t key, const Chunk& chunk, uint32_t* out) {
  if (chunk.full) return draw(key, chunk.element[0], chunk.blocks * chunk.block, out);
  for (int b = 0; b < chunk.blocks; ++b) draw(key, chunk.element[b], chunk.block, out + b * chunk.block);
}

// ------------------------------------------------------------------------- block quantities

// Sum of a block by the halving tree; `sums` holds the first half already added to the second.
STQ_INLINE float tree_sum(float* __restrict sums, int half) {
  for (half /= 2; half >= 8; half /= 2) {
    STQ_SIMD
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  const float a = sums[0] + sums[4], b = sums[1] + sums[5], c = sums[2] + sums[6], d = sums[3] + sums[7];
  return (a + c) + (b + d);
}

// Scale of a signed block from the bit patterns of its largest and its largest negated value.
STQ_INLINE float signed_scale(const State& state, int32_t top, int32_t bottom) {
  const float largest = float_of(top > bottom ? top : bottom);
  if (largest < kTiny) return 0.0f;
  return state.family == kDynamic && top < bottom ? -largest : largest;
}
