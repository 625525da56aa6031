// The Adam step where training spends its time: full blocks of 128, both states packed.
//
// Three passes over a chunk: the momentum from its codes, and what the block's scales need; the
// squares from codes to codes, and their roots; the momentum's new codes, and the weights. So the
// roots and the divisions, which share one slow unit of the processor, are waited for in different
// passes, each with other work to do meanwhile. Each element meets the operations of adam.h, which serves all other cases.
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
  Wide keep, eps;

  static STQ_INLINE WeightMove of(const AdamConstants& c) { return {fixed<Wide>(c.keep), fixed<Wide>(c.eps)}; }
  STQ_INLINE Wide denominator(Wide second) const { return root(second) + eps; }
  // `move` includes the factor.
  STQ_INLINE void apply(float* weight, Wide move, Wide denominator) const {
    store(weight, keep * load<Wide>(weight) - move / denominator);
  }
};

// factor * decode(code) of a curve, from a table if that holds all of its levels, or magnitudes.
template <class Curve>
struct Share {
  static constexpr int most = kWide == 16 ? 5 : kWide == 8 ? 3 : -1;  // bits that a table is looked up by
  static constexpr bool halved = Curve::symmetric && Curve::bits == most + 1, tabled = Curve::bits <= most || halved;
  static constexpr int index = Curve::bits - halved, size = index == 5 ? 32 : kWide;
  Curve curve;
  float factor;
  Table<size> table;

  static STQ_INLINE Share of(const Curve& curve, float factor) {
    Share share{curve, factor, {}};
    if constexpr (tabled)
      share.table = Table<size>::of([&](WideInts i) __attribute__((always_inline)) { return factor * curve.template decode<Wide>(i); });
    return share;
  }
  STQ_INLINE Wide decode(WideInts code) const {
    if constexpr (halved)
      return as<Wide>(as<WideWords>(table.template at<index>(code)) ^ (as<WideWords>(code) << (32 - Curve::bits) & kSign));
    else if constexpr (tabled) return table.template at<index>(code);
    else return factor * curve.template decode<Wide>(code);
  }
};

constexpr int kPassBlock = 128, kPassLanes = kPassBlock / kCodesPerLane;

static STQ_INLINE float block_sum(const Wide (&sums)[kPassLanes / kWide]) {
  if constexpr (kWide == 16) return tree_sum(sums[0]);
  else if constexpr (kWide == 8) return tree_sum(sums[0] + sums[1]);
  else return tree_sum((sums[0] + sums[2]) + (sums[1] + sums[3]));
}

// Updates the momentum into `buffers.first` and finds the extremes and the sums of squares of each block.
template <class Curve>
static void pass_momentum(const State& first, const Chunk& chunk, const AdamConstants& c, const float* grad,
                          Buffers& buffers) {
  const uint8_t* codes = static_cast<const uint8_t*>(first.data);
  const Wide rest = fixed<Wide>(c.beta1_rest);
  for (int b = 0; b < chunk.blocks; ++b) {
    const auto share = Share<Curve>::of(Curve::of(first.scales[chunk.first + b], first), c.beta1);
    const uint8_t* planes = codes + Curve::bits * chunk.lane[b];
    const float* g = grad + b * kPassBlock;
    float* m = buffers.first + b * kPassBlock;
    Extremes<Wide> extremes;
    Wide sums[kPassLanes / kWide];
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      const auto x = Lane<Curve::bits, Wide>::load(planes + l, kPassLanes);
      const auto square = [&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        const Wide grad_i = load<Wide>(g + i);
        const Wide momentum = share.decode(x.template get<j>()) + rest * grad_i;
        store(m + i, momentum);
        extremes.add(momentum);
        return grad_i * grad_i;
      };
      // The order of the halving tree: i and i + 64, i and i + 32, i and i + 16.
      const auto pair = [&](auto low, auto high) __attribute__((always_inline)) {
        const Wide sum = square(low);
        return sum + square(high);
      };
      const Wide even = pair(Index<0>{}, Index<4>{}) + pair(Index<2>{}, Index<6>{});
      sums[l / kWide] = even + (pair(Index<1>{}, Index<5>{}) + pair(Index<3>{}, Index<7>{}));
    }
    buffers.extremes[b] = extremes.reduced();
    buffers.squares[b] = block_sum(sums);
  }
}

// Updates the squares from codes to codes, and leaves the denominators in `buffers.second`.
template <int bits, bool noisy>
static void pass_squares(const State& second, const Chunk& chunk, const AdamConstants& c, const float* grad,
                         const float* weight, Buffers& buffers) {
  using Curve = LogCurve<bits, noisy>;
  const WeightMove move = WeightMove::of(c);
  const Wide rest = fixed<Wide>(c.beta2_rest);
  for (int b = 0; b < chunk.blocks; ++b) {
    float& scale = second.scales[chunk.first + b];
    const auto share = Share<Curve>::of(Curve::of(scale, second), c.beta2);
    scale = c.beta2 * scale + c.beta2_rest * (buffers.squares[b] / float(kPassBlock));
    const Curve curve = Curve::of(scale, second);
    const auto noise = BlockNoise<kPassBlock, noisy>::of(second.key, chunk.index[b]);
    uint8_t* planes = static_cast<uint8_t*>(second.data) + bits * chunk.lane[b];
    const float* g = grad + b * kPassBlock;
    float* denominator = buffers.second + b * kPassBlock;
    const Ahead ahead = Ahead::of(g, weight + b * kPassBlock);
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      const auto x = Lane<bits, Wide>::load(planes + l, kPassLanes);
      Lane<bits, Wide> y;
      each_code([&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        const Wide grad_i = load<Wide>(g + i);
        if (l == 0) ahead.fetch(i);
        const Wide value = share.decode(x.template get<j>()) + rest * (grad_i * grad_i);
        y.template put<j>(curve.template encode<Wide>(value, noise.draw(i)));
        store(denominator + i, move.denominator(value));
      });
      y.store(planes + l, kPassLanes);
    }
  }
}

// Encodes the momentum in `buffers.first`, and moves the weights.
template <class Curve, bool prepays>
static void pass_weights(const State& first, const Chunk& chunk, const AdamConstants& c, float* weight,
                         const Buffers& buffers) {
  const WeightMove move = WeightMove::of(c);
  const Wide factor = fixed<Wide>(c.momentum), error = fixed<Wide>(c.error);
  for (int b = 0; b < chunk.blocks; ++b) {
    const float scale = first.scales[chunk.first + b] = signed_scale(first, buffers.extremes[b]);
    const Curve curve = Curve::of(scale, first);
    uint8_t* planes = static_cast<uint8_t*>(first.data) + Curve::bits * chunk.lane[b];
    const float *m = buffers.first + b * kPassBlock, *denominator = buffers.second + b * kPassBlock;
    float* w = weight + b * kPassBlock;
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      Lane<Curve::bits, Wide> y;
      each_code([&](auto at) __attribute__((always_inline)) {
        constexpr int j = decltype(at)::j;
        const int i = l + j * kPassLanes;
        const Wide value = load<Wide>(m + i);
        const WideInts code = curve.template encode<Wide>(value, WideWords{});
        Wide moved = factor * value;
        if constexpr (prepays) moved = moved + error * (value - curve.template decode<Wide>(code));
        move.apply(w + i, moved, load<Wide>(denominator + i));
        y.template put<j>(code);
      });
      y.store(planes + l, kPassLanes);
    }
  }
}

using MomentumPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, Buffers&);
using SquaresPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, const float*, Buffers&);
using WeightsPass = void (*)(const State&, const Chunk&, const AdamConstants&, float*, const Buffers&);

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

template <bool prepays>
static WeightsPass weights_pass(const State& state) {
  const int bits = int(state.bits);
  if (state.family == kDynamic)
    return bits == 0   ? pass_weights<DynamicCurve<0>, prepays>
           : bits == 2 ? pass_weights<DynamicCurve<2>, prepays>
                       : pass_weights<DynamicCurve<3>, prepays>;
  return bits == 4   ? pass_weights<MulawCurve<4>, prepays>
         : bits == 5 ? pass_weights<MulawCurve<5>, prepays>
         : bits == 6 ? pass_weights<MulawCurve<6>, prepays>
                     : pass_weights<MulawCurve<8>, prepays>;
}

// The passes of one parameter; none if it is another case.
struct AdamPasses {
  MomentumPass momentum = nullptr;
  SquaresPass squares = nullptr;
  WeightsPass weights = nullptr;

  static AdamPasses of(const Item& item) {
    const State &first = item.states[0], &second = item.states[1];
    if (!first.packed() || !second.packed() || item.grid.block != kPassBlock || item.states[2].family != kAbsent) return {};
    return {momentum_pass(first), second.stochastic ? squares_pass<true>(second) : squares_pass<false>(second),
            first.prepay ? weights_pass<true>(first) : weights_pass<false>(first)};
  }

  // Takes the step on a chunk, or returns false and leaves the states and weights as they are.
  bool run(const Item& item, const Chunk& chunk, const AdamConstants& c, Buffers& buffers, float* weight,
           const float* grad) const {
    const State &first = item.states[0], &second = item.states[1];
    if (!momentum || !chunk.full || (second.stochastic && !draws_by_vector(chunk))) return false;
    momentum(first, chunk, c, grad, buffers);
    if (any_bad(chunk, buffers) || any_cut(chunk, buffers)) return false;
    squares(second, chunk, c, grad, weight, buffers);
    weights(first, chunk, c, weight, buffers);
    return true;
  }

  // Whether a square could be above the largest: none is above the sum of all.
  static STQ_INLINE bool any_cut(const Chunk& chunk, const Buffers& buffers) {
    for (int b = 0; b < chunk.blocks; ++b)
      if (!(buffers.squares[b] <= kLargestSquare)) return true;
    return false;
  }
};
