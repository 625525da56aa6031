// Decode, encode, recode and measure a state: everything but a step.
//
// Included inside the namespace of one instruction set, after chunks.h. `states[0]` is the state,
// `states[1]` the target of a recode, `weight` the plain tensor.

static void decode_range(const Item& item, int64_t begin, int64_t end) {
  alignas(64) float values[kBuffer];
  Chunk chunk;
  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    decoder(item.states[0])(item.states[0], chunk, values);
    store_tensor(item.weight, item.weight_dtype, chunk, values);
  }
}

// Encodes the values of a chunk to nearest, with scales of their own.
static void encode_values(const State& state, const Chunk& chunk, float* values) {
  float scales[kMaxBlocks];
  clear_padding(chunk, values);
  for (int b = 0; b < chunk.blocks; ++b) {
    float* x = values + b * chunk.block;
    if (state.family == kLog) {
      alignas(64) float sums[kMaxBlock / 2];
      const int half = chunk.block / 2;
      for (int i = 0; i < chunk.block; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
      for (int i = 0; i < half; ++i) sums[i] = x[i] + x[i + half];
      scales[b] = tree_sum(sums, half) / float(chunk.count[b]);
    } else {
      Extremes<Floats> extremes;
      for (int i = 0; i < chunk.block; i += kLanes) extremes.add(load<Floats>(x + i));
      scales[b] = signed_scale(state, extremes.reduced().farthest());
    }
    state.scales[chunk.first + b] = scales[b];
  }
  nearest_encoder(state)(state, chunk, scales, values, nullptr, {});
}

static void encode_range(const Item& item, int64_t begin, int64_t end) {
  alignas(64) float values[kBuffer];
  Chunk chunk;
  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    load_tensor(item.weight, item.weight_dtype, chunk, values);
    for (int i = 0; i < chunk.blocks * chunk.block; ++i)
      values[i] = (as<int32_t>(values[i]) & kInfinity) == kInfinity ? 0.0f : values[i];
    encode_values(item.states[0], chunk, values);
  }
}

static void recode_range(const Item& item, int64_t begin, int64_t end) {
  alignas(64) float values[kBuffer];
  Chunk chunk;
  const State &source = item.states[0], &target = item.states[1];
  const bool keeps_means = source.family == kLog && target.family == kLog;
  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    decoder(source)(source, chunk, values);
    if (!keeps_means) {
      encode_values(target, chunk, values);
      continue;
    }
    clear_padding(chunk, values);
    nearest_encoder(target)(target, chunk, source.scales + at, values, nullptr, {});
    for (int b = 0; b < chunk.blocks; ++b) target.scales[at + b] = source.scales[at + b];
  }
}

// Rounds to the nearest integer, ties to even, as torch.round does.
static STQ_INLINE int64_t round_even(double x) {
  const double magic = 0x1.8p52;
  return x < 0x1p51 ? int64_t((x + magic) - magic) : int64_t(x);
}

static void add_energy(float value, Stats& sums) {
  const uint32_t magnitude = uint32_t(as<int32_t>(value)) & ~kSign;
  if (magnitude >= uint32_t(kInfinity)) return;  // has no energy that an integer could hold
  int bin = (int(magnitude >> kMantissa) + 1) / 8;  // the exponent, counted from 2^-128
  bin = bin < kEnergyBins ? bin : kEnergyBins - 1;
  const uint64_t power = uint64_t(1023 + 128 - 8 * bin) << 52;
  double unit;
  __builtin_memcpy(&unit, &power, 8);
  const double mantissa = double(as<float>(int32_t(magnitude))) * unit;
  sums.energy[bin] += round_even(mantissa * mantissa * 0x1p14);
}

// Whether a code is on the top level: the magnitude's for signed families, the level's for LOG.
static STQ_INLINE bool outermost(const State& state, int code) {
  if (state.bits == 0) return false;
  const int last = (1 << state.bits) - 1, top = 1 << (state.bits - 1);
  if (state.family == kLog) return code == last;
  if (state.family == kMulaw) return (code & (top - 1)) == top - 1;
  return code == top || code == last;  // "negative zero" is +1, and -1 does not exist
}

static void stats_range(const Item& item, int64_t begin, int64_t end, Stats& sums) {
  alignas(64) float values[kBuffer], codes[kBuffer], ratios[kBuffer];
  float ones[kMaxBlocks];
  for (float& one : ones) one = 1.0f;
  const State& state = item.states[0];
  State unscaled = state;
  unscaled.scales = ones;
  Chunk chunk;
  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    decoder(state)(state, chunk, values);
    unpacker(state)(state, chunk, codes);
    chunk.first = 0;
    decoder(state)(unscaled, chunk, ratios);
    for (int b = 0; b < chunk.blocks; ++b) {
      for (int i = b * chunk.block; i < b * chunk.block + chunk.count[b]; ++i) {
        const float ratio = absolute(ratios[i]), ratio2 = ratio * ratio;
        sums.zeros += values[i] == 0.0f;
        sums.saturated += outermost(state, int(codes[i]));
        sums.ratio += round_even(double(ratio) * 0x1p30);
        sums.ratio2 += round_even(double(ratio2) * 0x1p30);
        sums.ratio4 += round_even(double(ratio2 * ratio2) * 0x1p30);
        add_energy(values[i], sums);
      }
      sums.elements += chunk.count[b];
    }
  }
}
