// The codec: whole chunks decoded and encoded, and the scales of blocks.
//
// Every operation and its order are those of codecs/curves.py, blocks.py and rounding.py. Included
// inside the namespace of one instruction set, after random.h.

// ------------------------------------------------------------------- states, chunk by chunk

// An encoder that prepays replaces a value by factor * move + error * e, e being what rounding dropped.
struct Prepayment {
  float factor, error;
  const float* move;
};

using DecodeChunk = void (*)(const State& state, const Chunk& chunk, float* out);
using EncodeChunk = void (*)(const State& state, const Chunk& chunk, const float* scales, float* values,
                             const uint32_t* random, const Prepayment& prepayment);

template <class Curve>
static void decode_chunk(const State& state, const Chunk& chunk, float* out) {
  const uint8_t* codes = static_cast<const uint8_t*>(state.data);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(state.scales[chunk.first + b], state);
    unpack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, out + b * chunk.block,
                              [&](auto code, int, auto like) __attribute__((always_inline)) {
                                return curve.template decode<decltype(like)>(code);
                              });
  });
}

template <class Curve, bool prepays, bool noisy>
static void encode_chunk(const State& state, const Chunk& chunk, const float* scales, float* values,
                         const uint32_t* random, const Prepayment& prepayment) {
  uint8_t* codes = static_cast<uint8_t*>(state.data);
  const Wide factor = fixed<Wide>(prepayment.factor), share = fixed<Wide>(prepayment.error);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    const Curve curve = Curve::of(scales[b], state);
    float* x = values + b * chunk.block;
    const float* move = prepays ? prepayment.move + b * chunk.block : nullptr;
    pack_block<Curve::bits>(codes + Curve::bits * chunk.lane[b], lanes, [&](int i, auto like) __attribute__((always_inline)) {
      using F = decltype(like);
      const F value = load<F>(x + i);
      Word<F> bits{};
      if constexpr (noisy) bits = load<Word<F>>(random + b * chunk.block + i);
      const auto code = curve.template encode<F>(value, bits);
      if constexpr (prepays) {
        const F error = value - curve.template decode<F>(code);
        store(x + i, same<F>(factor) * load<F>(move + i) + same<F>(share) * error);
      }
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
                         const auto pure = code & ((1 << bits) - 1);
                         if constexpr (sizeof like == 4) return float(pure);
                         else return __builtin_convertvector(pure, decltype(like));
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

// The encoder of a signed state, which draws no random numbers.
template <bool prepays>
static EncodeChunk signed_encoder(const State& state) {
  const int bits = int(state.bits);
  if (state.family == kDynamic)
    return bits == 0   ? encode_chunk<DynamicCurve<0>, prepays, false>
           : bits == 2 ? encode_chunk<DynamicCurve<2>, prepays, false>
                       : encode_chunk<DynamicCurve<3>, prepays, false>;
  return bits == 4   ? encode_chunk<MulawCurve<4>, prepays, false>
         : bits == 5 ? encode_chunk<MulawCurve<5>, prepays, false>
         : bits == 6 ? encode_chunk<MulawCurve<6>, prepays, false>
                     : encode_chunk<MulawCurve<8>, prepays, false>;
}

// The encoder of a LOG state.
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

// The encoder of a signed state as its format wants it.
static EncodeChunk signed_encoder(const State& state) {
  return state.prepay ? signed_encoder<true>(state) : signed_encoder<false>(state);
}

static EncodeChunk nearest_encoder(const State& state) {
  return state.family == kLog ? log_encoder<false>(state) : signed_encoder<false>(state);
}

// ------------------------------------------------------------------------- block quantities

// Sums by the halving tree: lane i adds lane i + half, then half of that, down to one.
template <class V>
static STQ_INLINE float tree_sum(V x) {
  if constexpr (sizeof(V) > 16) {
    return tree_sum(lower(x) + upper(x));
  } else {
    x = x + shifted<2>(x);
    x = x + shifted<1>(x);
    return x[0];
  }
}

// That of a block; `sums` holds the first half already added to the second.
static STQ_INLINE float tree_sum(float* sums, int half) {
  for (half /= 2; half >= kLanes; half /= 2)
    for (int i = 0; i < half; i += kLanes) store(sums + i, load<Floats>(sums + i) + load<Floats>(sums + i + half));
  return tree_sum(load<Floats>(sums));
}

template <class V>
static STQ_INLINE auto largest_of(V x) {
  if constexpr (sizeof(V) > 16) {
    return largest_of(larger(lower(x), upper(x)));
  } else {
    x = larger(x, shifted<2>(x));
    x = larger(x, shifted<1>(x));
    return x[0];
  }
}

// Bit patterns of the largest value and of the largest negated one, or 0; those of infinity and NaN
// are the largest of all.
struct Extreme {
  int32_t top, bottom;

  STQ_INLINE int32_t largest() const { return larger(top, bottom); }
  // The value itself, the positive one of two.
  STQ_INLINE float farthest() const { return top < bottom ? -as<float>(bottom) : as<float>(top); }
};

// Finds them lane by lane. As unsigned words negative values are larger than positive ones.
template <class F>
struct Extremes {
  Int<F> top{};
  Word<F> bottom{};

  STQ_INLINE void add(F x) {
    top = larger(top, as<Int<F>>(x));
    bottom = larger(bottom, as<Word<F>>(x));
  }
  STQ_INLINE Extreme reduced() const {
    const uint32_t pattern = largest_of(bottom);
    return {largest_of(top), pattern < kSign ? 0 : int32_t(pattern ^ kSign)};
  }
};

#if defined(__AVX512F__)
// The value that is farthest from zero; of two the positive one. NaN are passed over.
template <>
struct Extremes<Wide> {
  Wide farthest{};

  STQ_INLINE void add(Wide x) { farthest = farther(farthest, x); }
};
#endif

// Sums of four blocks by the halving tree, which has come down to 16 lanes each.
static STQ_INLINE Four reduced_sums(const Wide (&x)[4][16 / kWide]) {
#if defined(__AVX512F__)
  const auto add = [](Wide a, Wide b) __attribute__((always_inline)) { return a + b; };
  return reduced(x[0][0], x[1][0], x[2][0], x[3][0], add);
#else
  Four sums;
  for (int b = 0; b < 4; ++b)
    if constexpr (kWide == 8) sums[b] = tree_sum(x[b][0] + x[b][1]);
    else sums[b] = tree_sum((x[b][0] + x[b][2]) + (x[b][1] + x[b][3]));
  return sums;
#endif
}

// The values of four blocks that are farthest from zero, the positive one of two.
static STQ_INLINE Four reduced_extremes(const Extremes<Wide> (&x)[4]) {
#if defined(__AVX512F__)
  return reduced(x[0].farthest, x[1].farthest, x[2].farthest, x[3].farthest, farther);
#else
  Four farthest;
  for (int b = 0; b < 4; ++b) farthest[b] = x[b].reduced().farthest();
  return farthest;
#endif
}

// Scale of a signed block, or of several, from the value that is farthest from zero.
template <class F>
static STQ_INLINE F signed_scale(const State& state, F farthest) {
  const F size = absolute(farthest), scale = state.family == kDynamic ? farthest : size;
  return size < kTiny ? F{} : scale;
}
