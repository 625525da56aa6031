// The step of Adam and AdamW, chunk by chunk. Order of operations: kernels/reference.
//
// Included inside the namespace of one instruction set, after adam_passes.h.

// Updates the averages of one block and returns the sum of the squared gradients. A square above
// `bound` is cut; NaN passes.
static STQ_INLINE float adam_averages(const float* grad, float* first, float* second, int half,
                                      const AdamConstants& c, float bound, Extreme& total) {
  const Floats limit = fixed<Floats>(bound);
  alignas(64) float sums[kMaxBlock / 2];
  Extremes<Floats> extremes;
  const auto update = [&](int i) __attribute__((always_inline)) {
    const Floats g = load<Floats>(grad + i);
    const Floats m = c.beta1 * load<Floats>(first + i) + c.beta1_rest * g;
    const Floats q = cut_above(g * g, limit);
    store(first + i, m);
    store(second + i, c.beta2 * load<Floats>(second + i) + c.beta2_rest * q);
    extremes.add(m);
    return q;
  };
  for (int i = 0; i < half; i += kLanes) {
    const Floats low = update(i);
    store(sums + i, low + update(i + half));
  }
  total = extremes.reduced();
  return tree_sum(sums, half);
}

// The sum again without the elements that `drop_bad` marked, whose averages become zero.
static float adam_drop_bad(const float* grad, float* second, const bool* bad, int half) {
  alignas(64) float sums[kMaxBlock / 2];
  const auto square = [&](int i) {
    if (bad[i]) return second[i] = 0.0f;
    const float q = grad[i] * grad[i];
    return kLargestSquare < q ? kLargestSquare : q;
  };
  for (int i = 0; i < half; ++i) {
    const float low = square(i);
    sums[i] = low + square(i + half);
  }
  return tree_sum(sums, half);
}

static STQ_INLINE void keep_maximum(const State& state, const Chunk& chunk, float* buffer, float* second) {
  load_tensor(state.data, kFloat32, chunk, buffer);
  for (int i = 0; i < chunk.blocks * chunk.block; ++i)
    second[i] = buffer[i] > second[i] || buffer[i] != buffer[i] ? buffer[i] : second[i];
  store_tensor(state.data, kFloat32, chunk, second);
}

// The general case: any states, blocks and values.
static void adam_chunk(const Item& item, const Chunk& chunk, const AdamConstants& c, Buffers& buffers, float* weight,
                       const float* grad) {
  const State &first = item.states[0], &second = item.states[1], &maximum = item.states[2];
  const float limit = second.packed() ? kLargestSquare : __builtin_inff();
  const int half = chunk.block / 2;
  load_state(first, chunk, buffers.first);
  load_state(second, chunk, buffers.second);
  for (int b = 0, o = 0; b < chunk.blocks; ++b, o += chunk.block)
    buffers.squares[b] = adam_averages(grad + o, buffers.first + o, buffers.second + o, half, c, limit, buffers.extremes[b]);
  if (!second.packed()) store_tensor(second.data, kFloat32, chunk, buffers.second);
  const bool bad = (first.packed() || second.packed()) && any_bad(chunk, buffers);
  if (bad) {
    if (!first.packed()) store_tensor(first.data, kFloat32, chunk, buffers.first);
    drop_bad(chunk, buffers);
    for (int b = 0, o = 0; b < chunk.blocks; ++b, o += chunk.block)
      buffers.squares[b] = adam_drop_bad(grad + o, buffers.second + o, buffers.bad + o, half);
  }

  bool prepaid = false;
  if (first.packed() || !bad) prepaid = store_momentum(first, chunk, buffers, {c.momentum, c.error, buffers.first});
  if (second.packed()) {
    for (int b = 0; b < chunk.blocks; ++b) {
      float& scale = second.scales[chunk.first + b];
      buffers.scales[b] = scale = c.beta2 * scale + c.beta2_rest * (buffers.squares[b] / float(chunk.count[b]));
    }
    if (second.stochastic) draw_chunk(second.key, chunk, buffers.random);
    clear_padding(chunk, buffers.second);
    const EncodeChunk encode = second.stochastic ? log_encoder<true>(second) : log_encoder<false>(second);
    encode(second, chunk, buffers.scales, buffers.second, buffers.random, {});
  }
  if (maximum.family != kAbsent) keep_maximum(maximum, chunk, buffers.grad, buffers.second);
  const WeightMove move = WeightMove::of(c);
  const float factor = prepaid ? 1.0f : c.momentum;
  for (int i = 0; i < chunk.blocks * chunk.block; i += kWide)
    move.apply(weight + i, factor * load<Wide>(buffers.first + i), move.denominator(load<Wide>(buffers.second + i)));
  if (bad) spoil_bad(chunk, buffers, weight);
}

static void adam_range(const Item& item, int64_t begin, int64_t end) {
  const AdamConstants c = AdamConstants::of(item.constants);
  const AdamPasses passes = AdamPasses::of(item);
  Buffers buffers;
  Chunk chunk;
  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    float* weight = load_weight(item, chunk, buffers.weight);
    const float* grad = load_grad(item, chunk, weight, c.decay, buffers.grad);
    if (!passes.run(item, chunk, c, buffers, weight, grad)) adam_chunk(item, chunk, c, buffers, weight, grad);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}
