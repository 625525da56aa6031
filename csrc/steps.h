// The rules: whole optimizer steps, chunk by chunk. Order of operations: kernels/reference.
//
// Included inside the namespace of one instruction set, after momentum.h.

// ------------------------------------------------------------------------------ Adam, AdamW

constexpr float kLargestSquare = 0x1p120f;

struct AdamConstants {
  float beta1, beta1_rest, beta2, beta2_rest, keep, decay, momentum, error, eps;

  static STQ_INLINE AdamConstants of(const double* c) {
    return {float(c[0]), float(c[1]), float(c[2]), float(c[3]), float(c[4]),
            float(c[5]), float(c[6]), float(c[7]), float(c[8])};
  }
};

// Updates the averages of one block and returns the sum of the squared gradients. A square above
// `limit` is cut; NaN passes.
static STQ_INLINE float adam_averages(const float* grad, float* first, float* second, int half,
                                      const AdamConstants& c, float limit, Extremes& total, Ahead ahead) {
  alignas(64) float sums[kMaxBlock / 2];
  Extremes extremes;
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
    ahead.fetch(2 * i);
    const Floats low = update(i);
    store(sums + i, low + update(i + half));
  }
  total = extremes;
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

static void adam_range(const Item& item, int64_t begin, int64_t end) {
  const AdamConstants c = AdamConstants::of(item.constants);
  const State &first = item.states[0], &second = item.states[1], &maximum = item.states[2];
  const bool any_packed = first.packed() || second.packed(), noisy = second.stochastic;
  const float limit = second.packed() ? kLargestSquare : __builtin_inff();
  const int half = int(item.grid.block) / 2;
  Buffers buffers;
  Chunk chunk;
  float squares[kMaxBlocks];

  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    float* weight = load_weight(item, chunk, buffers.weight);
    const float* grad = load_grad(item, chunk, weight, c.decay, buffers.grad);
    load_state(first, chunk, buffers.first);
    load_state(second, chunk, buffers.second);
    for (int b = 0, o = 0; b < chunk.blocks; ++b, o += chunk.block) {
      const Ahead ahead = Ahead::of(grad + o, weight + o);
      Extremes& extremes = buffers.extremes[b];
      float *m = buffers.first + o, *v = buffers.second + o;
      squares[b] = half == 64 ? adam_averages(grad + o, m, v, 64, c, limit, extremes, ahead)
                              : adam_averages(grad + o, m, v, half, c, limit, extremes, ahead);
    }
    if (!second.packed()) store_tensor(second.data, kFloat32, chunk, buffers.second);
    const bool bad = any_packed && any_bad(chunk, buffers);
    if (bad) {
      if (!first.packed()) store_tensor(first.data, kFloat32, chunk, buffers.first);
      drop_bad(chunk, buffers);
      for (int b = 0, o = 0; b < chunk.blocks; ++b, o += chunk.block)
        squares[b] = adam_drop_bad(grad + o, buffers.second + o, buffers.bad + o, half);
    }

    bool prepaid = false;
    if (first.packed() || !bad)
      prepaid = store_momentum(first, chunk, buffers, Feedback::prepay(c.momentum, c.error, buffers.first));
    // Square roots and divisions take their time; packing the second state meanwhile is free.
    const bool fused = second.packed() && !(noisy && any_wraps(chunk));
    const Feedback update = Feedback::adam(prepaid ? 1.0f : c.momentum, c.keep, c.eps, buffers.first, weight);
    if (second.packed()) {
      for (int b = 0; b < chunk.blocks; ++b) {
        const float mean = squares[b] / float(chunk.count[b]);
        second.scales[at + b] = buffers.scales[b] = c.beta2 * second.scales[at + b] + c.beta2_rest * mean;
      }
      if (noisy && !fused) draw_chunk(second.key, chunk, buffers.random);
      clear_padding(chunk, buffers.second);
      log_encoder(second, noisy, fused)(second, chunk, buffers.scales, buffers.second, buffers.random, update);
    }
    if (maximum.family != kAbsent) keep_maximum(maximum, chunk, buffers.grad, buffers.second);
    if (!fused)
      for (int i = 0; i < chunk.blocks * chunk.block; i += kLanes)
        update.move_weight(i, load<Floats>(buffers.second + i));
    if (bad) spoil_bad(chunk, buffers, weight);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}

// -------------------------------------------------------------------------------------- SGD

struct SGDConstants {
  float lr, momentum, rest, decay, error;
  bool nesterov, starts;  // at its first step a momentum takes the gradient itself

  static STQ_INLINE SGDConstants of(const double* c) {
    return {float(c[0]), float(c[1]), float(c[2]), float(c[3]), float(c[4]), c[5] != 0.0, c[6] != 0.0};
  }
};

static void sgd_range(const Item& item, int64_t begin, int64_t end) {
  const SGDConstants c = SGDConstants::of(item.constants);
  const State& state = item.states[0];
  const bool has_momentum = state.family != kAbsent;
  Buffers buffers;
  Chunk chunk;

  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    const int n = chunk.blocks * chunk.block;
    float* weight = load_weight(item, chunk, buffers.weight);
    const float* grad = load_grad(item, chunk, weight, c.decay, buffers.grad);
    const float* update = grad;
    float factor = c.lr;
    bool bad = false;
    if (has_momentum) {
      if (!c.starts) load_state(state, chunk, buffers.first);
      for (int b = 0, o = 0; b < chunk.blocks; ++b) {
        Extremes extremes;
        for (const int stop = o + chunk.block; o < stop; o += kLanes) {
          const Floats g = load<Floats>(grad + o);
          const Floats m = c.starts ? g : c.momentum * load<Floats>(buffers.first + o) + c.rest * g;
          store(buffers.first + o, m);
          store(buffers.second + o, c.nesterov ? g + c.momentum * m : m);
          extremes.add(m);
        }
        buffers.extremes[b] = extremes;
      }
      update = buffers.second;
      bad = state.packed() && any_bad(chunk, buffers);
      if (bad) drop_bad(chunk, buffers);
      if (store_momentum(state, chunk, buffers, Feedback::prepay(c.lr, c.error, buffers.second)))
        update = buffers.first, factor = 1.0f;
    }
    for (int i = 0; i < n; i += kLanes)
      store(weight + i, load<Floats>(weight + i) - factor * load<Floats>(update + i));
    if (bad) spoil_bad(chunk, buffers, weight);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}

// ------------------------------------------------------------------------------------- Lion

struct LionConstants {
  float lr, beta1, beta1_rest, beta2, beta2_rest, keep;

  static STQ_INLINE LionConstants of(const double* c) {
    return {float(c[0]), float(c[1]), float(c[2]), float(c[3]), float(c[4]), float(c[5])};
  }
};

static void lion_range(const Item& item, int64_t begin, int64_t end) {
  const LionConstants c = LionConstants::of(item.constants);
  const State& state = item.states[0];
  Buffers buffers;
  Chunk chunk;

  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    float* weight = load_weight(item, chunk, buffers.weight);
    const float* grad = load_grad(item, chunk, weight, 0.0f, buffers.grad);
    load_state(state, chunk, buffers.first);
    for (int b = 0, o = 0; b < chunk.blocks; ++b) {
      Extremes extremes;
      for (const int stop = o + chunk.block; o < stop; o += kLanes) {
        const Floats g = load<Floats>(grad + o), m = load<Floats>(buffers.first + o), zero{};
        const Floats ahead = c.beta1 * m + c.beta1_rest * g;
        const Floats up = select(ahead > zero, zero + 1.0f, zero), down = select(ahead < zero, zero + 1.0f, zero);
        store(weight + o, c.keep * load<Floats>(weight + o) - c.lr * (up - down));
        const Floats next = c.beta2 * m + c.beta2_rest * g;
        store(buffers.first + o, next);
        extremes.add(next);
      }
      buffers.extremes[b] = extremes;
    }
    const bool bad = state.packed() && any_bad(chunk, buffers);
    if (bad) drop_bad(chunk, buffers);
    store_momentum(state, chunk, buffers, {}, false);
    if (bad) spoil_bad(chunk, buffers, weight);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}
