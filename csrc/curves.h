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

static STQ_INLINE float reciprocal(float scale) { return absolute(scale) >= kTiny ? 1.0f / scale : 0.0f; }

template <int kBits>
struct DynamicCurve {
  static constexpr int bits = kBits;
  static constexpr bool symmetric = false;
  static constexpr float levels2[8] = {0.0f, 0.55f, 1.0f, -0.55f, 0.0f, 0.55f, 1.0f, -0.55f};
  static constexpr float levels3[8] = {0.0f, 0.055f, 0.325f, 0.775f, 1.0f, -0.055f, -0.325f, -0.775f};
  float scale, inverse;
  Table<8> levels;

  static STQ_INLINE DynamicCurve of(float scale, const State&) {
    return {scale, reciprocal(scale), Table<8>::of(bits == 2 ? levels2 : levels3, scale)};
  }
  template <class F>
  STQ_INLINE F decode(Int<F> code) const {
    if constexpr (bits == 0) return F{} * scale;
    return levels.template at<bits>(code);
  }
  template <class F>
  STQ_INLINE Int<F> encode(F value, Word<F>) const {
    const F ratio = value * inverse;
    if constexpr (bits == 0) return Int<F>{};
    if constexpr (bits == 2) {
      constexpr float t1 = float((0.0 + 0.55) / 2), t2 = float((0.55 + 1.0) / 2);
      return raised(raised(only(at_least(F{} - t1, ratio), 3), at_least(ratio, F{} + t1)), at_least(ratio, F{} + t2));
    }
    constexpr float t1 = float((0.0 + 0.055) / 2), t2 = float((0.055 + 0.325) / 2);
    constexpr float t3 = float((0.325 + 0.775) / 2), t4 = float((0.775 + 1.0) / 2);
    const F size = absolute(ratio);
    const Int<F> passed = raised(only(at_least(F{} - t1, ratio), 4), at_least(size, F{} + t1));
    return raised(raised(raised(passed, at_least(size, F{} + t2)), at_least(size, F{} + t3)), at_least(ratio, F{} + t4));
  }
};

template <int kBits>
struct MulawCurve {
  static constexpr int bits = kBits;
  static constexpr bool symmetric = true;  // the upper bit of a code is the sign
  static constexpr float span = 4.5f - 16.0f / (1 << bits);
  static constexpr int32_t bias = 0x3FC00000;  // 1.5
  static constexpr int shift = kMantissa - (bits - 2);
  static constexpr int32_t sign_bit = 1 << (bits - 1);
  float scale, unit, stretch;

  static STQ_INLINE MulawCurve of(float scale, const State&) {
    return {scale, scale / span, scale < kTiny ? 0.0f : span / scale};
  }
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
    // A negative magnitude has ones in all upper bits, and zero has no sign.
    return magnitude | (signed_as(magnitude, as<Int<F>>(value)) & sign_bit);
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
  static STQ_INLINE LogCurve of(float scale, const State& state) {
    const uint32_t lowest = uint32_t(kOne + int32_t(state.lo) * (1 << kMantissa));
    const int32_t shift = kMantissa + int32_t(state.log2_step);
    const bool flat = scale < kTiny;
    return {scale, reciprocal(scale), count_of(shift),
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
  // A code, or for one bit the mask of those that are 1.
  template <class F>
  STQ_INLINE auto encode_bits(F value, Word<F> random) const {
    // Sums of unsigned words may wrap, as those of the reference do.
    const Word<F> pattern = as<Word<F>>(value * inverse);
    if constexpr (kStochastic) {
      const Word<F> drawn = shifted_down(random, 32 - shift);
      if constexpr (bits == 1) {
        return above(as<Int<F>>(drawn), as<Int<F>>(last - pattern));
      } else {
        const Word<F> past = as<Word<F>>(larger(as<Int<F>>(pattern - lowest), 0));
        return limited(shifted_down(as<Int<F>>(past + drawn), shift));
      }
    } else if constexpr (bits == 1) {
      return at_least(as<Int<F>>(pattern - lowest), Int<F>{} + int32_t(half));
    } else {
      const Int<F> rounded = larger(as<Int<F>>(pattern + (half - lowest)), int32_t(half));
      return limited(shifted_down(rounded, shift));
    }
  }
  // The last code at most; where codes are bytes, storing them sees to that.
  template <class I>
  static STQ_INLINE I limited(I code) {
    if constexpr (bits == 8) return code;
    else return smaller(code, (1 << bits) - 1);
  }
};
