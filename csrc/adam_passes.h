// The Adam step where training spends its time: full blocks of 128, both states packed.
//
// Three passes over a chunk: the momentum from its codes, and what the block's scales need; the
// momentum's new codes; the squares from codes to codes, and the weights. Squares never leave the
// registers. Each element meets the operations of adam.h, which serves all other cases.
//
// Included inside the namespace of one instruction set, after momentum.h.

constexpr float kLargestSquare = 0x1p120f;

struct AdamConstants {
  float beta1, beta1_rest, beta2, beta2_rest, keep, decay, momentum, error, eps;

  static STQ_INLINE AdamConstants of(const double* c) {
    return {float(c[0]), float(c[1]), float(c[2]), float(c[3]), float(c[4]),
            float(c[5]), float(c[6]), float(c[7]), float(c[8])};
  }
};

struct WeightMove {
  Floats factor, keep, eps;

  static STQ_INLINE WeightMove of(const AdamConstants& c, bool prepaid) {
    return {fixed<Floats>(prepaid ? 1.0f : c.momentum), fixed<Floats>(c.keep), fixed<Floats>(c.eps)};
  }
  STQ_INLINE void apply(float* weight, const float* move, Floats second) const {
    store(weight, keep * load<Floats>(weight) - factor * load<Floats>(move) / (root(second) + eps));
  }
};

// factor * decode(code) of a curve, from a table if that holds all of its levels, or magnitudes.
template <class Curve>
struct Share {
  static constexpr bool halved = Curve::symmetric && Curve::bits == 4;
  static constexpr bool tabled = kLanes == 8 && (Curve::bits <= 3 || halved);
  Curve curve;
  float factor;
  Table table;

  static STQ_INLINE Share of(const Curve& curve, float factor) {
    Share share{curve, factor, {}};
    if constexpr (tabled)
      share.table = Table::of([&](Ints i) __attribute__((always_inline)) { return factor * curve.template decode<Floats>(i); });
    return share;
  }
  STQ_INLINE Floats decode(Ints code) const {
    if constexpr (tabled && halved)
      return as<Floats>(as<Words>(table.at<3>(code)) ^ (as<Words>(code) << (32 - Curve::bits) & kSign));
    if constexpr (tabled) return table.at<Curve::bits>(code);
    return factor * curve.template decode<Floats>(code);
  }
};

constexpr int kPassBlock = 128, kPassLanes = kPassBlock / kCodesPerLane;

// Updates the momentum into `buffers.first` and finds the extremes and the sums of squares of each block.
template <class Curve>
static void pass_momentum(const State& first, const Chunk& chunk, const AdamConstants& c, const float* grad,
                          Buffers& buffers) {
  const uint8_t* codes = static_cast<const uint8_t*>(first.data);
  const Floats rest = fixed<Floats>(c.beta1_rest);
  for (int b = 0; b < chunk.blocks; ++b) {
    const auto share = Share<Curve>::of(Curve::of(first.scales[chunk.first + b], first), c.beta1);
    const uint8_t* planes = codes + Curve::bits * chunk.lane[b];
    const float* g = grad + b * kPassBlock;
    float* m = buffers.first + b * kPassBlock;
    Extremes extremes;
    Floats sums[kPassLanes / kLanes];
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kLanes) {
      const auto x = Lane<Curve::bits, Floats>::load(planes + l, kPassLanes);
      const auto square = [&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        const Floats grad_i = load<Floats>(g + i);
        const Floats momentum = share.decode(x.template get<j>()) + rest * grad_i;
        store(m + i, momentum);
        extremes.add(momentum);
        return grad_i * grad_i;
      };
      // The order of the halving tree: i and i + 64, i and i + 32, i and i + 16.
      const auto pair = [&](auto low, auto high) __attribute__((always_inline)) {
        const Floats sum = square(low);
        return sum + square(high);
      };
      const Floats even = pair(Index<0>{}, Index<4>{}) + pair(Index<2>{}, Index<6>{});
      sums[l / kLanes] = even + (pair(Index<1>{}, Index<5>{}) + pair(Index<3>{}, Index<7>{}));
    }
    buffers.extremes[b] = extremes.reduced();
    if constexpr (kLanes == 4) sums[0] = sums[0] + sums[2], sums[1] = sums[1] + sums[3];
    buffers.squares[b] = tree_sum(sums[0] + sums[1]);
  }
}

// Updates the squares from codes to codes, and moves the weights by `buffers.first`. The slowest of
// the passes, so the one with time to fetch what comes next.
template <int bits, bool noisy>
static void pass_squares(const State& second, const Chunk& chunk, const AdamConstants& c, bool prepaid, float* weight,
                         const float* grad, const Buffers& buffers) {
  using Curve = LogCurve<bits, noisy>;
  const WeightMove move = WeightMove::of(c, prepaid);
  const Floats rest = fixed<Floats>(c.beta2_rest);
  const float beta2 = c.beta2;
  for (int b = 0; b < chunk.blocks; ++b) {
    const auto share = Share<Curve>::of(Curve::of(second.scales[chunk.first + b], second), beta2);
    const Curve curve = Curve::of(buffers.scales[b], second);
    const Noise noise = Noise::of(second.key, chunk.index[b]);
    const Words indices = noise.indices<Words>();
    uint8_t* planes = static_cast<uint8_t*>(second.data) + bits * chunk.lane[b];
    const float *g = grad + b * kPassBlock, *m = buffers.first + b * kPassBlock;
    float* w = weight + b * kPassBlock;
    const Ahead ahead = Ahead::of(g, w);
    second.scales[chunk.first + b] = buffers.scales[b];
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kLanes) {
      const auto x = Lane<bits, Floats>::load(planes + l, kPassLanes);
      Lane<bits, Floats> y;
      each_code([&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        const Floats grad_i = load<Floats>(g + i);
        if (l == 0) ahead.fetch(i);
        const Floats value = share.decode(x.template get<j>()) + rest * (grad_i * grad_i);
        Words random{};
        if constexpr (noisy) random = noise.draw(indices + uint32_t(i));
        y.template put<j>(curve.template encode<Floats>(value, random));
        move.apply(w + i, m + i, value);
      });
      y.store(planes + l, kPassLanes);
    }
  }
}

using MomentumPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, Buffers&);
using SquaresPass = void (*)(const State&, const Chunk&, const AdamConstants&, bool, float*, const float*, const Buffers&);

static MomentumPass momentum_pass(const State& state) {
  const int bits = int(state.bits);
  if (state.family == kDynamic)
    return bits == 0 ? pass_momentum<DynamicCurve<0>> : bits == 2 ? pass_momentum<DynamicCurve<2>>
                                                                  : pass_momentum<DynamicCurve<3>>;
  return bits == 4   ? pass_momentum<MulawCurve<4>>
         : bits == 5 ? pass_momentum<MulawCurve<5>>
         : bits == 6 ? pass_momentum<MulawCurve<6>>
                     : pass_momentum<MulawCurve<8>>;
}

template <bool noisy>
static SquaresPass squares_pass(const State& state) {
  constexpr SquaresPass table[] = {pass_squares<0, noisy>, pass_squares<1, noisy>, pass_squares<2, noisy>,
                                   pass_squares<3, noisy>, pass_squares<4, noisy>, pass_squares<5, noisy>,
                                   pass_squares<6, noisy>, nullptr,                pass_squares<8, noisy>};
  return table[state.bits];
}

// The passes of one parameter; none if it is another case.
struct AdamPasses {
  MomentumPass momentum = nullptr;
  EncodeChunk encode = nullptr;
  SquaresPass squares = nullptr;

  static AdamPasses of(const Item& item) {
    const State &first = item.states[0], &second = item.states[1];
    if (!first.packed() || !second.packed() || item.grid.block != kPassBlock || item.states[2].family != kAbsent) return {};
    return {momentum_pass(first), signed_encoder(first), second.stochastic ? squares_pass<true>(second) : squares_pass<false>(second)};
  }

  // Takes the step on a chunk, or returns false and leaves the states and weights as they are.
  bool run(const Item& item, const Chunk& chunk, const AdamConstants& c, Buffers& buffers, float* weight,
           const float* grad) const {
    const State &first = item.states[0], &second = item.states[1];
    if (!momentum || !chunk.full || (second.stochastic && any_wraps(chunk))) return false;
    momentum(first, chunk, c, grad, buffers);
    if (any_bad(chunk, buffers) || any_cut(chunk, buffers)) return false;
    for (int b = 0; b < chunk.blocks; ++b)
      first.scales[chunk.first + b] = buffers.scales[b] = signed_scale(first, buffers.extremes[b]);
    encode(first, chunk, buffers.scales, buffers.first, nullptr, {c.momentum, c.error, buffers.first});
    for (int b = 0; b < chunk.blocks; ++b)
      buffers.scales[b] = c.beta2 * second.scales[chunk.first + b] + c.beta2_rest * (buffers.squares[b] / float(kPassBlock));
    squares(second, chunk, c, first.prepay, weight, grad, buffers);
    return true;
  }

  // Whether a square could be above the largest: none is above the sum of all.
  static STQ_INLINE bool any_cut(const Chunk& chunk, const Buffers& buffers) {
    for (int b = 0; b < chunk.blocks; ++b)
      if (!(buffers.squares[b] <= kLargestSquare)) return true;
    return false;
  }
};
