// The codec arithmetic, once: unpack and decode, encode and pack, on the blocks of a chunk.
//
// Every operation and its order are those of codecs/curves.py, packing.py, residual.py and
// rounding.py. Included inside the namespace of one instruction set, after simd.h.

constexpr float kTiny = 0x1p-100f;  // scales below count as zero
constexpr int kMantissa = 23;
constexpr int32_t kOne = 0x3F800000;
constexpr uint32_t kSign = 0x80000000u;
constexpr int32_t kInfinity = 0x7F800000;

// ---------------------------------------------------------------------------------- curves

// A curve is prepared for one block from its scale and then maps values to codes and back.

static STQ_INLINE float reciprocal(float scale) { return absolute(scale) >= kTiny ? 1.0f / scale : 0.0f; }

template <int kBits>
struct DynamicCurve {
  static constexpr int bits = kBits;
  static constexpr float levels2[8] = {0.0f, 0.55f, 1.0f, -0.55f};
  static constexpr float levels3[8] = {0.0f, 0.055f, 0.325f, 0.775f, 1.0f, -0.055f, -0.325f, -0.775f};
  float scale, inverse;

  static STQ_INLINE DynamicCurve of(float scale, const State&) { return {scale, reciprocal(scale)}; }
  static STQ_INLINE bool flat() { return false; }

  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    if constexpr (bits == 0) return F{} * scale;
    return look_up(bits == 2 ? levels2 : levels3, code) * scale;
  }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F>) const {
    const F ratio = value * inverse;
    if constexpr (bits == 0) return Int<F>{};
    if constexpr (bits == 2) {
      constexpr float t1 = float((0.0 + 0.55) / 2), t2 = float((0.55 + 1.0) / 2);
      return only(ratio <= -t1, 3) - minus(ratio >= t1) - minus(ratio >= t2);
    }
    constexpr float t1 = float((0.0 + 0.055) / 2), t2 = float((0.055 + 0.325) / 2);
    constexpr float t3 = float((0.325 + 0.775) / 2), t4 = float((0.775 + 1.0) / 2);
    const Int<F> below = only(ratio <= -t1, 5) - minus(ratio <= -t2) - minus(ratio <= -t3);
    return below - minus(ratio >= t1) - minus(ratio >= t2) - minus(ratio >= t3) - minus(ratio >= t4);
  }
};

template <int kBits>
struct MulawCurve {
  static constexpr int bits = kBits;
  static constexpr float span = 4.5f - 16.0f / (1 << bits);
  static constexpr int32_t bias = 0x3FC00000;  // 1.5
  static constexpr int shift = kMantissa - (bits - 2);
  static constexpr int32_t sign_bit = 1 << (bits - 1);
  float scale, unit, stretch;

  static STQ_INLINE MulawCurve of(float scale, const State&) {
    return {scale, scale / span, scale < kTiny ? 0.0f : span / scale};
  }
  static STQ_INLINE bool flat() { return false; }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    const F value = (as<F>(bias + ((code & (sign_bit - 1)) << shift)) - 1.5f) * unit;
    return as<F>(as<Int<F>>(value) ^ ((code & sign_bit) << (32 - bits)));
  }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F>) const {
    const F biased = absolute(value) * stretch + 1.5f;
    const Int<F> rounded = (as<Int<F>>(biased) - (bias - (1 << (shift - 1)))) >> shift;
    const Int<F> magnitude = smaller(rounded, sign_bit - 1);
    const Int<F> sign = as<Int<F>>(as<Word<F>>(value) >> (32 - bits));
    return magnitude | (sign & only(magnitude > 0, sign_bit));
  }
};

template <int kBits, bool kStochastic>
struct LogCurve {
  static constexpr int bits = kBits;
  float scale, inverse;
  int32_t lowest, shift;

  static STQ_INLINE LogCurve of(float scale, const State& state) {
    return {scale, reciprocal(scale), kOne + int32_t(state.lo) * (1 << kMantissa), kMantissa + int32_t(state.log2_step)};
  }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    return as<F>(uint32_t(lowest) + (as<Word<F>>(code) << shift)) * scale;
  }
  // A block whose mean counts as zero has the mean itself for all values.
  STQ_INLINE bool flat() const { return scale < kTiny; }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F> random) const {
    if constexpr (bits == 0) return Int<F>{};
    // Sums of unsigned words may wrap, as those of the reference do.
    const Int<F> above = larger(as<Int<F>>(as<Word<F>>(value * inverse) - uint32_t(lowest)), 0);
    Word<F> addend = Word<F>{} + (1u << (shift - 1));
    if constexpr (kStochastic) addend = random >> (32 - shift);
    return smaller(as<Int<F>>(as<Word<F>>(above) + addend) >> shift, (1 << bits) - 1);
  }
};

// --------------------------------------------------------------------------------- packing

// The codes of a lane (or of a vector of lanes) as one little-endian integer, in 32-bit words.
template <int bits, class F>
struct Lane {
  Word<F> word[bits == 0 ? 1 : (bits + 3) / 4] = {};

  static STQ_INLINE Lane load(const uint8_t* planes, int lanes) {
    Lane x;
#pragma GCC unroll 16
    for (int p = 0; p < bits; ++p) x.word[p / 4] |= load_bytes<Word<F>>(planes + p * lanes) << (8 * (p % 4));
    return x;
  }
  template <int j>
  STQ_INLINE Int<F> get() const {
    if constexpr (bits == 0) return Int<F>{};
    constexpr int at = bits * j / 32, shift = bits * j % 32;
    Word<F> code = word[at] >> shift;
    if constexpr (shift + bits > 32) code |= word[at + 1] << (32 - shift);
    if constexpr (shift + bits != 32) code &= (1u << bits) - 1;
    return as<Int<F>>(code);
  }
  template <int j>
  STQ_INLINE void put(Int<F> code) {
    if constexpr (bits == 0) return;
    constexpr int at = bits * j / 32, shift = bits * j % 32;
    word[at] |= as<Word<F>>(code) << shift;
    if constexpr (shift + bits > 32) word[at + 1] |= as<Word<F>>(code) >> (32 - shift);
  }
  STQ_INLINE void store(uint8_t* planes, int lanes) const {
    if constexpr (bits > 0) store_planes<(bits < 4 ? bits : 4)>(planes, lanes, word[0]);
    if constexpr (bits > 4) store_planes<(bits < 8 ? bits - 4 : 4)>(planes + 4 * lanes, lanes, word[1]);
    if constexpr (bits > 8) {
      store_planes<4>(planes + 8 * lanes, lanes, word[2]);
      store_planes<4>(planes + 12 * lanes, lanes, word[3]);
    }
  }
};

// Calls visit(block, lanes) for each block, with a constant number of lanes where blocks are full
// and of the usual size.
template <class Visit>
static STQ_INLINE void each_block(const Chunk& chunk, Visit visit) {
  for (int b = 0; b < chunk.blocks; ++b) {
    if (chunk.count[b] == 128) {
      visit(b, 16);
    } else {
      visit(b, (chunk.count[b] + kCodesPerLane - 1) / kCodesPerLane);
    }
  }
}

// out[i] = map(code of element i, i) for the elements of a block.
template <int bits, class Map>
static STQ_INLINE void unpack_block(const uint8_t* planes, int lanes, float* out, Map map) {
  each(lanes, [&](int l, auto like) __attribute__((always_inline)) {
    using F = decltype(like);
    const auto x = Lane<bits, F>::load(planes + l, lanes);
    float* to = out + l;
    store(to, map(x.template get<0>(), l, like)), to += lanes;
    store(to, map(x.template get<1>(), l + 1 * lanes, like)), to += lanes;
    store(to, map(x.template get<2>(), l + 2 * lanes, like)), to += lanes;
    store(to, map(x.template get<3>(), l + 3 * lanes, like)), to += lanes;
    store(to, map(x.template get<4>(), l + 4 * lanes, like)), to += lanes;
    store(to, map(x.template get<5>(), l + 5 * lanes, like)), to += lanes;
    store(to, map(x.template get<6>(), l + 6 * lanes, like)), to += lanes;
    store(to, map(x.template get<7>(), l + 7 * lanes, like));
  });
}

// Packs map(i), the code of element i, for the elements of a block.
template <int bits, class Map>
static STQ_INLINE void pack_block(uint8_t* planes, int lanes, Map map) {
  each(lanes, [&](int l, auto like) __attribute__((always_inline)) {
    Lane<bits, decltype(like)> x;
    x.template put<0>(map(l, like));
    x.template put<1>(map(l + 1 * lanes, like));
    x.template put<2>(map(l + 2 * lanes, like));
    x.template put<3>(map(l + 3 * lanes, like));
    x.template put<4>(map(l + 4 * lanes, like));
    x.template put<5>(map(l + 5 * lanes, like));
    x.template put<6>(map(l + 6 * lanes, like));
    x.template put<7>(map(l + 7 * lanes, like));
    x.store(planes + l, lanes);
  });
}

// --------------------------------------------------------------------------- random numbers

// 32 random bits for the elements of a run; see codecs/rounding.py. The upper half of an element's
// index is a constant here, so a run must not pass a multiple of 2^32.
struct Noise {
  uint32_t low, flip, add;

  static STQ_INLINE Noise of(uint64_t key, int64_t first) {
    return {uint32_t(first), uint32_t(uint64_t(first) >> 32) * 0x9E3779B1u ^ uint32_t(key), uint32_t(key >> 32)};
  }
  template <class W>
  STQ_INLINE W draw(int i) const {
    W x = (numbers<W>() + (low + uint32_t(i))) ^ flip;
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = ((x ^ (x >> 15)) + add) * 0xD35A2D97u;
    return x ^ (x >> 15);
  }
};

// Whether the elements [first, first + count) pass a multiple of 2^32.
static STQ_INLINE bool wraps(int64_t first, int64_t count) { return (first ^ (first + count - 1)) >> 32; }

static void draw(uint64_t key, int64_t first, int count, uint32_t* out) {
  const int before = wraps(first, count) ? int((uint64_t(1) << 32) - (uint64_t(first) & 0xFFFFFFFFu)) : count;
  const Noise noise = Noise::of(key, first), rest = Noise::of(key, first + before);
  const auto fill = [](const Noise& from, uint32_t* to, int n) __attribute__((always_inline)) {
    each(n, [&](int i, auto like) __attribute__((always_inline)) { store(to + i, from.draw<Word<decltype(like)>>(i)); });
  };
  fill(noise, out, before);
  fill(rest, out + before, count - before);
}

static void draw_chunk(uint64_t key, const Chunk& chunk, uint32_t* out) {
  for (int b = 0; b < chunk.blocks; ++b) draw(key, chunk.index[b], chunk.block, out + b * chunk.block);
}

static bool any_wraps(const Chunk& chunk) {
  return wraps(chunk.index[0], chunk.index[chunk.blocks - 1] + chunk.block - chunk.index[0]);
}

// ------------------------------------------------------------------- states, chunk by chunk

// Where an encoder has random numbers from: it needs none, they were drawn into a buffer, or it
// draws them itself from the state's key.
enum Random { kNearest, kDrawn, kOwn };

// What else an encoder does with a value while it has it.
enum Also { kNone, kPrepay, kMoveWeight };

// The operands of that: kPrepay replaces the value by factor * move + error * e, e being what
// rounding dropped; kMoveWeight takes x for the denominator of an Adam step.
struct Feedback {
  float factor, error, keep, eps;
  const float* move;
  float* weight;

  static Feedback prepay(float factor, float error, const float* move) {
    return {factor, error, 0.0f, 0.0f, move, nullptr};
  }
  static Feedback adam(float factor, float keep, float eps, const float* move, float* weight) {
    return {factor, 0.0f, keep, eps, move, weight};
  }
  template <class F>
  STQ_INLINE void move_weight(int i, F second) const {
    const F quotient = factor * load<F>(move + i) / (root(second) + eps);
    store(weight + i, keep * load<F>(weight + i) - quotient);
  }
};

using DecodeChunk = void (*)(const State& state, const Chunk& chunk, float* out);
using EncodeChunk = void (*)(const State& state, const Chunk& chunk, const float* scales, float* values,
                             const uint32_t* random, const Feedback& feedback);

template <class Curve>
static void decode_chunk(const State& state, const Chunk& chunk, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(state.scales[chunk.first + b], state);
    if (curve.flat()) {
      for (int i = 0; i < chunk.block; ++i) out[b * chunk.block + i] = curve.scale;
      return;
    }
    unpack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, out + b * chunk.block,
                              [&](auto code, int, auto like) __attribute__((always_inline)) {
                                return curve.template decode<decltype(like)>(code);
                              });
  });
}

template <class Curve, Also also, Random source>
static void encode_chunk(const State& state, const Chunk& chunk, const float* scales, float* values,
                         const uint32_t* random, const Feedback& feedback) {
  uint8_t* codes = static_cast<uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(scales[b], state);
    const Noise noise = Noise::of(state.key, chunk.index[b]);
    float* x = values + b * chunk.block;
    pack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, [&](int i, auto like) __attribute__((always_inline)) {
      using F = decltype(like);
      const F value = load<F>(x + i);
      Word<F> bits{};
      if constexpr (source == kDrawn) bits = load<Word<F>>(random + b * chunk.block + i);
      if constexpr (source == kOwn) bits = noise.template draw<Word<F>>(i);
      const Int<F> code = curve.template encode<F>(value, bits);
      if constexpr (also == kPrepay) {
        const F error = value - curve.template decode<F>(code);
        const F move = load<F>(feedback.move + b * chunk.block + i);
        store(x + i, feedback.factor * move + feedback.error * error);
      }
      if constexpr (also == kMoveWeight) feedback.move_weight<F>(b * chunk.block + i, value);
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
                       [](auto code, int, auto like) __attribute__((always_inline)) {
                         if constexpr (sizeof like == 4) return float(code);
                         else return __builtin_convertvector(code, decltype(like));
                       });
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

template <Also also>
static EncodeChunk signed_encoder(const State& state) {
  const int bits = int(state.bits);
  if (state.family == kDynamic)
    return bits == 0   ? encode_chunk<DynamicCurve<0>, also, kNearest>
           : bits == 2 ? encode_chunk<DynamicCurve<2>, also, kNearest>
                       : encode_chunk<DynamicCurve<3>, also, kNearest>;
  return bits == 4   ? encode_chunk<MulawCurve<4>, also, kNearest>
         : bits == 5 ? encode_chunk<MulawCurve<5>, also, kNearest>
         : bits == 6 ? encode_chunk<MulawCurve<6>, also, kNearest>
                     : encode_chunk<MulawCurve<8>, also, kNearest>;
}

template <Also also, Random source>
static EncodeChunk log_encoder(const State& state) {
  constexpr bool noisy = source != kNearest;
  constexpr EncodeChunk table[] = {
      encode_chunk<LogCurve<0, noisy>, also, source>, encode_chunk<LogCurve<1, noisy>, also, source>,
      encode_chunk<LogCurve<2, noisy>, also, source>, encode_chunk<LogCurve<3, noisy>, also, source>,
      encode_chunk<LogCurve<4, noisy>, also, source>, encode_chunk<LogCurve<5, noisy>, also, source>,
      encode_chunk<LogCurve<6, noisy>, also, source>, nullptr,
      encode_chunk<LogCurve<8, noisy>, also, source>};
  return table[state.bits];
}

// The encoder of a signed state, which draws no random numbers.
static EncodeChunk signed_encoder(const State& state, bool prepay) {
  return prepay ? signed_encoder<kPrepay>(state) : signed_encoder<kNone>(state);
}

// The encoder of a LOG state; while it moves weights it draws its own random numbers.
static EncodeChunk log_encoder(const State& state, bool noisy, bool moves_weight) {
  if (moves_weight) return noisy ? log_encoder<kMoveWeight, kOwn>(state) : log_encoder<kMoveWeight, kNearest>(state);
  return noisy ? log_encoder<kNone, kDrawn>(state) : log_encoder<kNone, kNearest>(state);
}

static EncodeChunk nearest_encoder(const State& state) {
  return state.family == kLog ? log_encoder(state, false, false) : signed_encoder(state, false);
}

// ------------------------------------------------------------------------- block quantities

// Sum of a block by the halving tree; `sums` holds the first half already added to the second.
static STQ_INLINE float tree_sum(float* sums, int half) {
  for (half /= 2; half >= kLanes; half /= 2)
    for (int i = 0; i < half; i += kLanes) store(sums + i, load<Floats>(sums + i) + load<Floats>(sums + i + half));
  Floats x = load<Floats>(sums);
  if constexpr (kLanes == 8) x = x + shifted<4>(x);
  x = x + shifted<2>(x);
  x = x + shifted<1>(x);
  return x[0];
}

static STQ_INLINE int32_t largest_of(Ints x) {
  if constexpr (kLanes == 8) x = larger(x, shifted<4>(x));
  x = larger(x, shifted<2>(x));
  x = larger(x, shifted<1>(x));
  return x[0];
}

// Bit patterns of the largest and of the largest negated value in each lane, or 0; those of
// infinity and NaN are the largest of all.
struct Extremes {
  Ints top{}, bottom{};

  STQ_INLINE void add(Floats x) {
    const Ints pattern = as<Ints>(x);
    top = larger(top, pattern);
    bottom = larger(bottom, pattern ^ int32_t(kSign));
  }
  STQ_INLINE int32_t largest() const { return largest_of(larger(top, bottom)); }
};

// Scale of a signed block from its extremes.
static STQ_INLINE float signed_scale(const State& state, const Extremes& extremes) {
  const int32_t top = largest_of(extremes.top), bottom = largest_of(extremes.bottom);
  const float largest = as<float>(larger(top, bottom));
  if (largest < kTiny) return 0.0f;
  return state.family == kDynamic && top < bottom ? -largest : largest;
}
