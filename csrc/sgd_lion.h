// The steps of SGD and Lion, chunk by chunk. Order of operations: kernels/reference.
//
// Included inside the namespace of one instruction set, after momentum.h.

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
        Extremes<Floats> extremes;
        for (const int stop = o + chunk.block; o < stop; o += kLanes) {
          const Floats g = load<Floats>(grad + o);
          const Floats m = c.starts ? g : c.momentum * load<Floats>(buffers.first + o) + c.rest * g;
          store(buffers.first + o, m);
          store(buffers.second + o, c.nesterov ? g + c.momentum * m : m);
          extremes.add(m);
        }
        buffers.extremes[b] = extremes.reduced();
      }
      update = buffers.second;
      bad = state.packed() && any_bad(chunk, buffers);
      if (bad) drop_bad(chunk, buffers);
      if (store_momentum(state, chunk, buffers, {c.lr, c.error, buffers.second}))
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
      Extremes<Floats> extremes;
      for (const int stop = o + chunk.block; o < stop; o += kLanes) {
        const Floats g = load<Floats>(grad + o), m = load<Floats>(buffers.first + o), zero{};
        const Floats ahead = c.beta1 * m + c.beta1_rest * g;
        const Floats up = select(ahead > zero, zero + 1.0f, zero), down = select(ahead < zero, zero + 1.0f, zero);
        store(weight + o, c.keep * load<Floats>(weight + o) - c.lr * (up - down));
        const Floats next = c.beta2 * m + c.beta2_rest * g;
        store(buffers.first + o, next);
        extremes.add(next);
      }
      buffers.extremes[b] = extremes.reduced();
    }
    const bool bad = state.packed() && any_bad(chunk, buffers);
    if (bad) drop_bad(chunk, buffers);
    store_momentum(state, chunk, buffers, {}, false);
    if (bad) spoil_bad(chunk, buffers, weight);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}
