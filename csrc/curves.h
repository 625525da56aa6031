// Curves: how a value becomes a code and a code a value, given the scale of a block.
//
// Every operation and its order are those of codecs/curves.py. Included inside the namespace of one
// instruction set, after simd.h.

constexpr float kTiny = 0x1p-100f;  // scales below count as zero
constexpr int kMantissa = 23;
constexpr int32_t kOne = 0x3F800000;
constexpr uint32_t kSign = 0x80000000u;
constexpr int32_t kInfinity = 0x7F800000;

// A curve is prepared for one block from its scale and then maps values to codes and back. What it
// decodes may have any bits above those of the code.

// What values are multiplied by to encode them; `span` is the largest that becomes of them, 1 but for MULAW.
template <class F>
static STQ_INLINE F inverse_of(F scale, float span = 1.0f) {
  return absolute(scale) >= kTiny ? span / scale : F{};
}

constexpr float mulaw_span(int bits) { return 4.5f - 16.0f / float(1 << bits); }

template <int kBits>
struct DynamicCurve {
  static constexpr int bits = kBits;
  static constexpr bool symmetric = false;
  static constexpr float levels2[8] = {0.0f, 0.55f, 1.0f, -0.55f, 0.0f, 0.55f, 1.0f, -0.55f};
  static constexpr float levels3[8] = {0.0f, 0.055f, 0.325f, 0.775f, 1.0f, -0.055f, -0.325f, -0.775f};
  float scale, inverse;
  Table<8> levels;

  static STQ_INLINE DynamicCurve of(float scale, float inverse) {
    return {scale, inverse, Table<8>::of(bits == 2 ? levels2 : levels3, scale)};
  }
  static STQ_INLINE DynamicCurve of(float scale, const State&) { return of(scale, inverse_of(scale)); }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    if constexpr (bits == 0) return F{} * scale;
    return levels.template at<bits>(code);
  }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F>) const {
    const F ratio = value * inverse;
    if constexpr (bits == 0) return Int<F>{};
    else return bits == 2 ? compared2(ratio) : compared3(ratio);
  }

  template <class F>
  static STQ_INLINE Int<F> compared2(F ratio) {
    return raised(raised(only(at_least(F{} - t1, ratio), 3), at_least(ratio, F{} + t1)), at_least(ratio, F{} + t2));
  }
  template <class F>
  static STQ_INLINE Int<F> compared3(F ratio) {
    const F size = absolute(ratio);
    const Int<F> passed = raised(only(at_least(F{} - t1, ratio), 4), at_least(size, F{} + t1));
    return raised(raised(raised(passed, at_least(size, F{} + t2)), at_least(size, F{} + t3)), at_least(ratio, F{} + t4));
  }

  static constexpr float between(double low, double high) { return float((low + high) / 2); }
  static constexpr float t1 = bits == 2 ? between(0.0, 0.55) : between(0.0, 0.055);
  static constexpr float t2 = bits == 2 ? between(0.55, 1.0) : between(0.055, 0.325);
  static constexpr float t3 = between(0.325, 0.775), t4 = between(0.775, 1.0);
};

template <int kBits>
struct MulawCurve {
  static constexpr int bits = kBits;
  static constexpr bool symmetric = true;  // the upper bit of a code is the sign
  static constexpr float span = mulaw_span(bits);
  static constexpr int32_t bias = 0x3FC00000;  // 1.5
  static constexpr int shift = kMantissa - (bits - 2);
  static constexpr int32_t sign_bit = 1 << (bits - 1);
  float scale, unit, stretch;

  static STQ_INLINE MulawCurve of(float scale, float stretch) { return {scale, scale / span, stretch}; }
  static STQ_INLINE MulawCurve of(float scale, const State&) { return of(scale, inverse_of(scale, span)); }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    const F value = (as<F>(bias + ((code & (sign_bit - 1)) << shift)) - 1.5f) * unit;
    return as<F>(as<Int<F>>(value) ^ ((code & sign_bit) << (32 - bits)));
  }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F>) const {
    const Int<F> x = smaller(magnitude(value), sign_bit - 1);
    // A negative magnitude has ones in all upper bits, and zero has no sign.
    return x | (signed_as(x, as<Int<F>>(value)) & sign_bit);
  }
  // What may be above the last.
  template <class F>
  STQ_INLINE Int<F> magnitude(F value) const {
    const F biased = absolute(value) * stretch + 1.5f;
    return (as<Int<F>>(biased) - (bias - (1 << (shift - 1)))) >> shift;
  }
};

template <int kBits, bool kStochastic>
struct LogCurve {
  static constexpr int bits = kBits;
  static constexpr bool symmetric = false;
  float scale, inverse;
  Count shift;
  uint32_t lowest, half, last;  // pattern of the lowest level, of half a step, and of the last before a step
  uint32_t base, field;  // what is added to a code in its place, and that place

  // A block whose mean counts as zero has the mean itself for all values.
  static STQ_INLINE LogCurve of(float scale, const State& state) { return of(scale, inverse_of(scale), state); }
  static STQ_INLINE LogCurve of(float scale, float inverse, const State& state) {
    const uint32_t lowest = uint32_t(kOne + int32_t(state.lo) * (1 << kMantissa));
    const int32_t shift = kMantissa + int32_t(state.log2_step);
    const bool flat = scale < kTiny;
    return {scale, inverse, count_of(shift),
            lowest, 1u << (shift - 1), lowest + (1u << shift) - 1,
            flat ? uint32_t(kOne) : lowest, flat ? 0u : ((1u << bits) - 1) << shift};
  }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    return as<F>((shifted_up(as<Word<F>>(code), shift) & field) + base) * scale;
  }
  template <class F>
  STQ_INLINE auto encode(F value, Word<F> random) const {
    if constexpr (bits == 0) return Int<F>{};
    else return encode_bits<F>(value, random);
  }
  // A code, which may be below 0 or above the last, or for one bit the mask of those that are 1.
  template <class F>
  STQ_INLINE auto encode_bits(F value, Word<F> random) const {
    // Sums of unsigned words may wrap, as those of the reference do.
    const Word<F> pattern = as<Word<F>>(value * inverse);
    if constexpr (kStochastic) {
      const Word<F> drawn = shifted_down(random, 32 - shift);
      if constexpr (bits == 1) {
        return above(as<Int<F>>(drawn), as<Int<F>>(last - pattern));
      } else {
        return shifted_down(as<Int<F>>((pattern - lowest) + drawn), shift);
      }
    } else if constexpr (bits == 1) {
      return at_least(as<Int<F>>(pattern - lowest), Int<F>{} + int32_t(half));
    } else {
      return shifted_down(as<Int<F>>(pattern + (half - lowest)), shift);
    }
  }
};
