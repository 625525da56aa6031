// What every format of a state would cost in one step, measured on blocks of a sample. The same
// arithmetic in the same order as kernels/reference/measurement.py, which says what each number is.
//
// Included inside the namespace of one instruction set, after transfers.h. Rare, so not fast: a
// block at a time, and every format in turn.

static STQ_INLINE bool finite(float x) { return (as<int32_t>(x) & kInfinity) != kInfinity; }

// One block as the step computes it. Elements that are padding or not finite are not valid.
struct Trial {
  alignas(64) float grad[kMaxBlock];
  alignas(64) float stored[kMaxMeasured][kMaxBlock];
  alignas(64) float value[kMaxMeasured][kMaxBlock];
  alignas(64) float move[kMaxBlock];
  float mean[kMaxMeasured];  // new means of the non-negative states
  bool valid[kMaxBlock];
  int block, count;
};

// How the values of the states come about, and how they move the weight.
struct AdamTrial {
  AdamConstants c;

  static AdamTrial of(const double* constants) { return {AdamConstants::of(constants)}; }
  float decay() const { return c.decay; }
  void fill(const Item& item, const Chunk& chunk, Trial& x) const {
    alignas(64) float squares[kMaxBlock];
    for (int i = 0; i < x.block; ++i) {
      x.value[0][i] = c.beta1 * x.stored[0][i] + c.beta1_rest * x.grad[i];
      const float q = x.grad[i] * x.grad[i];
      squares[i] = !finite(x.value[0][i]) ? 0.0f : kLargestSquare < q ? kLargestSquare : q;
      x.value[1][i] = c.beta2 * x.stored[1][i] + c.beta2_rest * squares[i];
    }
    for (int i = 0; i < x.block / 2; ++i) squares[i] += squares[i + x.block / 2];
    const float mean = tree_sum(squares, x.block / 2) / float(x.count);
    x.mean[1] = c.beta2 * item.states[1].scales[chunk.first] + c.beta2_rest * mean;
  }
  void move(const float* const* value, const Trial& x, float* out) const {
    for (int i = 0; i < x.block; ++i) {
      const float denominator = root(value[1][i]) + c.eps;
      out[i] = denominator > 0.0f ? c.momentum * value[0][i] / denominator : 0.0f;
    }
  }
};

struct SGDTrial {
  SGDConstants c;
  float lr;

  static SGDTrial of(const double* constants) {
    const SGDConstants c = SGDConstants::of(constants);
    return {c, c.nesterov ? float(double(c.lr) * double(c.momentum)) : c.lr};
  }
  float decay() const { return c.decay; }
  void fill(const Item&, const Chunk&, Trial& x) const {
    for (int i = 0; i < x.block; ++i)
      x.value[0][i] = c.starts ? x.grad[i] : c.momentum * x.stored[0][i] + c.rest * x.grad[i];
  }
  void move(const float* const* value, const Trial& x, float* out) const {
    for (int i = 0; i < x.block; ++i) out[i] = lr * value[0][i];
  }
};

struct LionTrial {
  LionConstants c;

  static LionTrial of(const double* constants) { return {LionConstants::of(constants)}; }
  float decay() const { return 0.0f; }
  void fill(const Item&, const Chunk&, Trial& x) const {
    for (int i = 0; i < x.block; ++i) x.value[0][i] = c.beta2 * x.stored[0][i] + c.beta2_rest * x.grad[i];
  }
  void move(const float* const* value, const Trial& x, float* out) const {
    for (int i = 0; i < x.block; ++i) {
      const float ahead = c.beta1 * value[0][i] + c.beta1_rest * x.grad[i];
      out[i] = c.lr * float((ahead > 0.0f) - (ahead < 0.0f));
    }
  }
};

// Writes energies one after the other, 32 bins each.
struct Energies {
  const Trial& x;
  int64_t* to;

  // Sum of the squares of the valid elements in double, by the halving tree.
  template <class Value>
  double sum(Value value) const {
    alignas(64) double sums[kMaxBlock];
    for (int i = 0; i < x.block; ++i) {
      const double v = x.valid[i] ? double(value(i)) : 0.0;
      sums[i] = v * v;
    }
    for (int half = x.block / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    return sums[0];
  }
  template <class Value>
  void add(Value value) {
    put(sum(value));
  }
  void add_one(float value) { put(x.valid[0] ? double(value) * double(value) : 0.0); }

  // Adds to the bin of the exponent, as a multiple of 2^-14 of the lower end of the bin.
  void put(double energy) {
    int64_t pattern;
    __builtin_memcpy(&pattern, &energy, 8);
    const int exponent = int(pattern >> 52) - 1023;
    if (exponent < 1024 && energy > 0.0) {  // an infinite one has no energy that an integer could hold
      int bin = exponent < kLowestOctave ? 0 : (exponent - kLowestOctave) / kOctaves;
      bin = bin < kEnergyBins ? bin : kEnergyBins - 1;
      const uint64_t power = uint64_t(1023 - kLowestOctave - kOctaves * bin) << 52;
      double unit;
      __builtin_memcpy(&unit, &power, 8);
      to[bin] += round_even(energy * unit * 0x1p14);
    }
    to += kEnergyBins;
  }

  static constexpr int kLowestOctave = -256, kOctaves = 16;
};

// What a format makes of the values of a state, and whether they lie on its outermost levels.
static void try_format(const State& format, const Trial& x, const float* value, float mean, const uint32_t* random,
                       float* kept, bool* edge) {
  alignas(64) uint8_t planes[kMaxBlock];
  alignas(64) float codes[kMaxBlock] = {};
  Chunk chunk{};
  chunk.blocks = 1, chunk.block = x.block, chunk.full = x.count == x.block, chunk.count[0] = x.count;
  float scale = mean;
  if (format.family != kLog) {
    Extremes<Floats> extremes;
    for (int i = 0; i < x.block; i += kLanes) extremes.add(load<Floats>(value + i));
    scale = signed_scale(format, extremes.reduced().farthest());
  }
  State state = format;
  state.data = planes, state.scales = &scale;
  for (int i = 0; i < x.block; ++i) kept[i] = value[i];
  if (format.family != kLog) signed_encoder<false>(state)(state, chunk, &scale, kept, nullptr, {});
  else if (format.stochastic) log_encoder<true>(state)(state, chunk, &scale, kept, random, {});
  else log_encoder<false>(state)(state, chunk, &scale, kept, nullptr, {});
  unpacker(state)(state, chunk, codes);
  decoder(state)(state, chunk, kept);
  for (int i = 0; i < x.block; ++i) edge[i] = outermost(state, int(codes[i]));
}

template <class Rule>
static void measure_block(const Item& item, const Candidates& candidates, const Rule& rule, int64_t at, Trial& x,
                          int64_t* to) {
  alignas(64) float buffer[kBuffer], other[kMaxBlock], kept[kMaxBlock];
  alignas(64) uint32_t random[kMaxBlock];
  bool edge[kMaxBlock];
  Chunk chunk{};
  chunk_at(item.grid, at, at + 1, chunk);
  x.block = chunk.block, x.count = chunk.count[0];
  const float decay = rule.decay();
  const float* weight = decay != 0.0f ? load_weight(item, chunk, buffer) : nullptr;
  const float* grad = load_grad(item, chunk, weight, decay, x.grad);
  if (grad != x.grad) __builtin_memcpy(x.grad, grad, sizeof(float) * x.block);
  const float* values[kMaxMeasured];
  for (int s = 0; s < candidates.states; ++s) {
    load_state(item.states[s], chunk, x.stored[s]);
    values[s] = x.value[s];
  }
  rule.fill(item, chunk, x);
  for (int i = 0; i < x.block; ++i) {
    x.valid[i] = i < x.count && finite(x.value[0][i]);
    if (!x.valid[i]) x.grad[i] = 0.0f;
    for (int s = 0; s < candidates.states; ++s)
      if (!x.valid[i]) x.value[s][i] = 0.0f;
  }
  rule.move(values, x, x.move);

  Energies energies{x, to};
  energies.add([](int) { return 1.0f; });
  energies.add_one(1.0f);
  energies.add([&](int i) { return x.grad[i]; });
  energies.add([&](int i) { return root(absolute(x.grad[i])); });
  energies.add([&](int i) { return float(x.grad[i] == 0.0f); });
  energies.add([&](int i) { return x.move[i]; });
  double valid = 0.0;
  for (int i = 0; i < x.block; ++i) valid += x.valid[i];
  const State* format = candidates.formats;
  for (int s = 0; s < candidates.states; ++s) {
    const float* value = x.value[s];
    const double mean_square = energies.sum([&](int i) { return value[i]; }) / valid;
    const double scale = __builtin_sqrt(mean_square < 0x1p-250 ? 0x1p-250 : mean_square);
    float peak = 0.0f;
    for (int i = 0; i < x.block; ++i) peak = absolute(value[i]) > peak ? absolute(value[i]) : peak;
    energies.add([&](int i) { return value[i]; });
    energies.add([&](int i) { return value[i] - x.stored[s][i]; });
    energies.add_one(peak);
    energies.add([&](int i) {
      const float ratio = float(double(value[i]) / scale);
      return ratio * ratio;
    });
    if (item.states[s].family == kLog) draw(item.states[s].key, chunk.index[0], x.block, random);
    for (int f = 0; f < candidates.count[s]; ++f, ++format) {
      try_format(*format, x, value, x.mean[s], random, kept, edge);
      values[s] = kept;
      rule.move(values, x, other);
      values[s] = value;
      energies.add([&](int i) { return value[i] - kept[i]; });
      energies.add([&](int i) { return kept[i]; });
      energies.add([&](int i) { return float(edge[i]); });
      energies.add([&](int i) { return other[i] - x.move[i]; });
    }
  }
}

template <class Rule>
static void measure_rule(const Item& item, const Candidates& candidates, const Sampled& sampled, int64_t* to) {
  const Rule rule = Rule::of(item.constants);
  const int64_t per_row = item.grid.blocks_per_row();
  Trial trial;
  for (int64_t row = sampled.row; row < sampled.last_row; row += sampled.stride)
    for (int64_t b = sampled.block; b < sampled.last_block; ++b)
      measure_block(item, candidates, rule, row * per_row + b, trial, to);
}

static void measure_sampled(Rules rule, const Item& item, const Candidates& candidates, const Sampled& sampled,
                            int64_t* to) {
  switch (rule) {
    case kAdam: return measure_rule<AdamTrial>(item, candidates, sampled, to);
    case kSGD: return measure_rule<SGDTrial>(item, candidates, sampled, to);
    case kLion: return measure_rule<LionTrial>(item, candidates, sampled, to);
  }
}
