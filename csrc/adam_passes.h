// The Adam step where training spends its time: full blocks of 128, both states packed.
//
// Passes over a chunk: sums of the squared gradients, which say what the means will be; the squares
// from codes to codes; the momentum from its codes; its new codes, and the weights. Roots and
// divisions share one slow unit of the processor, so the roots are taken half beside the squares and
// half beside the momentum, and the divisions beside the weights: each pass has other work for the
// time that the unit needs. Each element meets the operations of adam.h, which serves all other cases.
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
static_assert(kChunk == 4 * kPassBlock, "scales are found for four blocks at once");
constexpr int kEarlyRoots = 4;  // of the eight elements of a lane

// Sums the squared gradients of each block down to 16 lanes.
static void sum_squares(const Chunk& chunk, const float* grad, Buffers& buffers) {
  for (int b = 0; b < chunk.blocks; ++b) {
    const float* g = grad + b * kPassBlock;
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      const auto square = [&](int j) __attribute__((always_inline)) {
        const Wide x = load<Wide>(g + l + j * kPassLanes);
        return x * x;
      };
      // The order of the halving tree: i and i + 64, i and i + 32, i and i + 16.
      const auto pair = [&](int j) __attribute__((always_inline)) { return square(j) + square(j + 4); };
      buffers.square_lanes[b][l / kWide] = (pair(0) + pair(2)) + (pair(1) + pair(3));
    }
  }
}

// Updates the squares from codes to codes and takes the early roots; the other squares stay in `buffers.second`.
template <int bits, bool noisy>
static void pass_squares(const State& second, const Chunk& chunk, const AdamConstants& c, const float* grad,
                         const float* weight, Buffers& buffers) {
  const WeightMove move = WeightMove::of(c);
  const Wide rest = fixed<Wide>(c.beta2_rest);
  for (int b = 0; b < chunk.blocks; ++b) {
    using Curve = LogCurve<bits, noisy>;
    float& scale = second.scales[chunk.first + b];
    const auto share = Share<Curve>::of(Curve::of(scale, second), c.beta2);
    scale = buffers.scales[b];
    const Curve curve = Curve::of(scale, buffers.inverses[b], second);
    const auto noise = BlockNoise<kPassBlock, noisy>::of(second.key, chunk.index[b]);
    uint8_t* planes = static_cast<uint8_t*>(second.data) + bits * chunk.lane[b];
    const float *g = grad + b * kPassBlock, *w = weight + b * kPassBlock;
    float *v = buffers.second + b * kPassBlock, *denominator = buffers.denominator + b * kPassBlock;
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      const auto x = Lane<bits, Wide>::load(planes + l, kPassLanes);
      Codes<bits, Wide> y;
      each_code([&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        if (l == 0) fetch_to_change(w + i);
        const Wide grad_i = load<Wide>(g + i);
        const Wide value = share.decode(x.template get<j>()) + rest * (grad_i * grad_i);
        y.template put<j>(curve.template encode<Wide>(value, noise.draw(i)));
        if constexpr (j < kEarlyRoots) store(denominator + i, move.denominator(value));
        else store(v + i, value);
      });
      y.store(planes + l, kPassLanes);
    }
  }
}

// Updates the momentum into `buffers.first`, finds the extremes of each block, and takes the other roots.
template <class Curve>
static void pass_momentum(const State& first, const Chunk& chunk, const AdamConstants& c, const float* grad,
                          Buffers& buffers) {
  const WeightMove move = WeightMove::of(c);
  const Wide rest = fixed<Wide>(c.beta1_rest);
  for (int b = 0; b < chunk.blocks; ++b) {
    const auto share = Share<Curve>::of(Curve::of(first.scales[chunk.first + b], first), c.beta1);
    const uint8_t* planes = static_cast<const uint8_t*>(first.data) + Curve::bits * chunk.lane[b];
    const float *g = grad + b * kPassBlock, *v = buffers.second + b * kPassBlock;
    float *m = buffers.first + b * kPassBlock, *denominator = buffers.denominator + b * kPassBlock;
    Extremes<Wide> extremes;
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      const auto x = Lane<Curve::bits, Wide>::load(planes + l, kPassLanes);
      each_code([&](auto code) __attribute__((always_inline)) {
        constexpr int j = decltype(code)::j;
        const int i = l + j * kPassLanes;
        const Wide momentum = share.decode(x.template get<j>()) + rest * load<Wide>(g + i);
        store(m + i, momentum);
        extremes.add(momentum);
        if constexpr (j >= kEarlyRoots) store(denominator + i, move.denominator(load<Wide>(v + i)));
      });
    }
    buffers.extreme_lanes[b] = extremes;
  }
}

// Encodes the momentum in `buffers.first`, and moves the weights.
template <class Curve, bool prepays>
static void pass_weights(const State& first, const Chunk& chunk, const AdamConstants& c, const float* grad,
                         float* weight, const Buffers& buffers) {
  constexpr bool apart = Curve::symmetric && !prepays;
  const WeightMove move = WeightMove::of(c);
  const Wide factor = fixed<Wide>(c.momentum), error = fixed<Wide>(c.error);
  for (int b = 0; b < chunk.blocks; ++b) {
    const Curve curve = Curve::of(first.scales[chunk.first + b] = buffers.scales[b], buffers.inverses[b]);
    uint8_t* planes = static_cast<uint8_t*>(first.data) + Curve::bits * chunk.lane[b];
    const float *m = buffers.first + b * kPassBlock, *denominator = buffers.denominator + b * kPassBlock;
    float* w = weight + b * kPassBlock;
#pragma GCC unroll 4
    for (int l = 0; l < kPassLanes; l += kWide) {
      Codes<Curve::bits, Wide, apart, !Curve::symmetric> y;
      each_code([&](auto at) __attribute__((always_inline)) {
        constexpr int j = decltype(at)::j;
        const int i = l + j * kPassLanes;
        const Wide value = load<Wide>(m + i);
        Wide moved = factor * value;
        if constexpr (apart) {
          y.template put<j>(curve.magnitude(value), value);
        } else {
          const WideInts code = curve.template encode<Wide>(value, WideWords{});
          if constexpr (prepays) moved = moved + error * (value - curve.template decode<Wide>(code));
          y.template put<j>(code);
        }
        if (l == 0) fetch(grad + kChunk + b * kPassBlock + i);
        move.apply(w + i, moved, load<Wide>(denominator + i));
      });
      y.store(planes + l, kPassLanes);
    }
  }
}

using SquaresPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, const float*, Buffers&);
using MomentumPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, Buffers&);
using WeightsPass = void (*)(const State&, const Chunk&, const AdamConstants&, const float*, float*, const Buffers&);

template <bool noisy>
static SquaresPass squares_pass(const State& state) {
  constexpr SquaresPass table[] = {pass_squares<0, noisy>, pass_squares<1, noisy>, pass_squares<2, noisy>,
                                   pass_squares<3, noisy>, pass_squares<4, noisy>, pass_squares<5, noisy>,
                                   pass_squares<6, noisy>, nullptr,                pass_squares<8, noisy>};
  return table[state.bits];
}

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
  SquaresPass squares = nullptr;
  MomentumPass momentum = nullptr;
  WeightsPass weights = nullptr;

  static AdamPasses of(const Item& item) {
    const State &first = item.states[0], &second = item.states[1];
    if (!first.packed() || !second.packed() || item.grid.block != kPassBlock) return {};
    if (item.states[2].family != kAbsent) return {};
    return {second.stochastic ? squares_pass<true>(second) : squares_pass<false>(second), momentum_pass(first),
            first.prepay ? weights_pass<true>(first) : weights_pass<false>(first)};
  }

  // Takes the step on a chunk, or returns false and leaves the states and weights as they are.
  bool run(const Item& item, const Chunk& chunk, const AdamConstants& c, Buffers& buffers, float* weight,
           const float* grad) const {
    const State &first = item.states[0], &second = item.states[1];
    if (!momentum || !chunk.full || (second.stochastic && !draws_by_vector(chunk))) return false;
    sum_squares(chunk, grad, buffers);
    if (!find_means(first, second, chunk, c, buffers)) return false;
    squares(second, chunk, c, grad, weight, buffers);
    momentum(first, chunk, c, grad, buffers);
    find_scales(first, buffers);
    weights(first, chunk, c, grad, weight, buffers);
    return true;
  }

  // Finds the means that the squares will have. Returns false if a square could be above the largest,
  // or a gradient or a scale is not finite; all other momentum is.
  static STQ_INLINE bool find_means(const State& first, const State& second, const Chunk& chunk, const AdamConstants& c,
                                    Buffers& buffers) {
    alignas(16) float scales[4] = {}, means[4] = {};
    for (int b = 0; b < chunk.blocks; ++b)
      scales[b] = first.scales[chunk.first + b], means[b] = second.scales[chunk.first + b];
    const Four sum = reduced_sums(buffers.square_lanes);
    const FourInts good = (sum <= kLargestSquare) & (absolute(load<Four>(scales)) <= kLargestSquare);
    const Four mean = c.beta2 * load<Four>(means) + c.beta2_rest * (sum / float(kPassBlock));
    store(buffers.scales, mean), store(buffers.inverses, inverse_of(mean));
    return good[0] & good[1] & good[2] & good[3];
  }

  // Finds the scales that the momentum will have.
  static STQ_INLINE void find_scales(const State& first, Buffers& buffers) {
    const Four scale = signed_scale(first, reduced_extremes(buffers.extreme_lanes));
    const float span = first.family == kMulaw ? mulaw_span(int(first.bits)) : 1.0f;
    store(buffers.scales, scale), store(buffers.inverses, inverse_of(scale, span));
  }
};
