// The rules: whole optimizer steps, chunk by chunk. Order of operations: kernels/reference.
//
// Included inside the namespace of one instruction set, after chunks.h.

// Buffers of one chunk; a short block is padded with zeros to a full one.
struct Buffers {
  alignas(64) float weight[kChunk];
  alignas(64) float grad[kChunk];
  alignas(64) float first[kChunk];
  alignas(64) float second[kChunk];
  alignas(64) uint32_t random[kChunk];
  uint8_t bad[kChunk];
};

constexpr float kLargestSquare = 0x1p120f;

struct AdamConstants {
  float beta1, beta1_rest, beta2, beta2_rest, keep, decay, momentum, error, eps;

  static STQ_INLINE AdamConstants of(const double* c) {
    return {float(c[0]), float(c[1]), float(c[2]), float(c[3]), float(c[4]),
            float(c[5]), float(c[6]), float(c[7]), float(c[8])};
  }
};

// Scales of a chunk's blocks before they are stored.
struct BlockSums {
  int32_t top, bottom;  // bit patterns of the largest and the largest negated momentum, or 0
  float square;         // sum of the squared gradients
};

constexpr int kAhead = kChunk * int(sizeof(float));  // bytes: the same place of the next chunk

// The gradients and weights of a later chunk, fetched while this one is worked on.
struct Ahead {
  const char *grad, *weight;

  // Fetches what holds the elements from `i` on; a line of 64 bytes holds 16 of them in fp32.
  STQ_INLINE void fetch(int i) const {
    __builtin_prefetch(grad + 4 * i);
    __builtin_prefetch(weight + 4 * i, 1);
  }
};

// Updates the averages of one block. A square above `limit` is cut; NaN passes.
static STQ_INLINE BlockSums adam_averages(const float* grad, float* first, float* second, int half,
                                          const AdamConstants& c, float limit, Ahead ahead) {
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
  return {largest_of(extremes.top), largest_of(extremes.bottom), tree_sum(sums, half)};
}

// Takes elements with a non-finite momentum out of a block and marks them; rare, so not fast.
static BlockSums adam_drop_bad(const float* grad, float* first, float* second, uint8_t* bad, int half) {
  float sums[kMaxBlock / 2];
  int32_t top = 0, bottom = 0;
  for (int i = 0; i < 2 * half; ++i) {
    bad[i] = (as<int32_t>(first[i]) & kInfinity) == kInfinity;
    if (bad[i]) first[i] = second[i] = 0.0f;
    const int32_t pattern = as<int32_t>(first[i]), negated = pattern ^ int32_t(kSign);
    top = top > pattern ? top : pattern;
    bottom = bottom > negated ? bottom : negated;
  }
  for (int i = 0; i < half; ++i) {
    float q0 = grad[i] * grad[i], q1 = grad[i + half] * grad[i + half];
    q0 = bad[i] ? 0.0f : kLargestSquare < q0 ? kLargestSquare : q0;
    q1 = bad[i + half] ? 0.0f : kLargestSquare < q1 ? kLargestSquare : q1;
    sums[i] = q0 + q1;
  }
  return {top, bottom, tree_sum(sums, half)};
}

static STQ_INLINE float* load_grad(const Item& item, const Chunk& chunk, const float* weight, float decay, float* buffer) {
  float* grad = view_tensor(item.grad, item.grad_dtype, chunk, buffer);
  const int n = chunk.blocks * chunk.block;
  if (item.maximize) {
    for (int i = 0; i < n; ++i) buffer[i] = -grad[i];
    grad = buffer;
  }
  if (decay != 0.0f) {
    for (int i = 0; i < n; ++i) buffer[i] = grad[i] + decay * weight[i];
    grad = buffer;
  }
  return grad;
}

static STQ_INLINE void load_state(const State& state, const Chunk& chunk, float* out) {
  if (state.packed()) {
    decoder(state)(state, chunk, out);
    clear_padding(chunk, out);
  } else {
    load_tensor(state.data, kFloat32, chunk, out);
  }
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
  const bool any_packed = first.packed() || second.packed();
  const float limit = second.packed() ? kLargestSquare : __builtin_inff();
  const EncodeChunk encode_first = first.packed() ? signed_encoder(first, first.prepay) : nullptr;
  const int half = int(item.grid.block) / 2;
  Buffers buffers;
  Chunk chunk;
  BlockSums sums[kMaxBlocks];
  float scales[kMaxBlocks];

  for (int64_t at = begin; at < end; at += chunk.blocks) {
    chunk_at(item.grid, at, end, chunk);
    const int n = chunk.blocks * chunk.block;
    float* weight = load_weight(item, chunk, buffers.weight);
    const float* grad = load_grad(item, chunk, weight, c.decay, buffers.grad);
    load_state(first, chunk, buffers.first);
    load_state(second, chunk, buffers.second);

    int32_t largest = 0;
    for (int b = 0; b < chunk.blocks; ++b) {
      const int o = b * chunk.block;
      const Ahead ahead = {reinterpret_cast<const char*>(grad + o) + kAhead,
                           reinterpret_cast<const char*>(weight + o) + kAhead};
      sums[b] = half == 64 ? adam_averages(grad + o, buffers.first + o, buffers.second + o, 64, c, limit, ahead)
                           : adam_averages(grad + o, buffers.first + o, buffers.second + o, half, c, limit, ahead);
      largest = largest > sums[b].top ? largest : sums[b].top;
      largest = largest > sums[b].bottom ? largest : sums[b].bottom;
    }
    if (!first.packed()) store_tensor(first.data, kFloat32, chunk, buffers.first);
    if (!second.packed()) store_tensor(second.data, kFloat32, chunk, buffers.second);
    const bool any_bad = any_packed && largest >= kInfinity;
    if (any_bad)
      for (int b = 0, o = 0; b < chunk.blocks; ++b, o += chunk.block)
        sums[b] = adam_drop_bad(grad + o, buffers.first + o, buffers.second + o, buffers.bad + o, half);

    float momentum = c.momentum;
    if (first.packed()) {
      for (int b = 0; b < chunk.blocks; ++b)
        first.scales[at + b] = scales[b] = signed_scale(first, sums[b].top, sums[b].bottom);
      encode_first(first, chunk, scales, buffers.first, nullptr, Feedback::prepay(c.momentum, c.error));
      if (first.prepay) momentum = 1.0f;  // the encoder has left momentum * m + error * e
    }
    // Square roots and divisions take their time; packing the second state meanwhile is free.
    const bool noisy = second.stochastic;
    const bool fused = second.packed() && maximum.family == kAbsent && !(noisy && any_wraps(chunk));
    const Feedback update = Feedback::adam(momentum, c.keep, c.eps, buffers.first, weight);
    if (second.packed()) {
      for (int b = 0; b < chunk.blocks; ++b)
        second.scales[at + b] = scales[b] =
            c.beta2 * second.scales[at + b] + c.beta2_rest * (sums[b].square / float(chunk.count[b]));
      if (noisy && !fused) draw_chunk(second.key, chunk, buffers.random);
      clear_padding(chunk, buffers.second);
      log_encoder(second, noisy, fused)(second, chunk, scales, buffers.second, buffers.random, update);
    }
    if (maximum.family != kAbsent) keep_maximum(maximum, chunk, buffers.grad, buffers.second);
    if (!fused)
      for (int i = 0; i < n; i += kLanes) update.move_weight(i, load<Floats>(buffers.second + i));
    if (any_bad)
      for (int i = 0; i < n; ++i)
        if (buffers.bad[i]) weight[i] = as<float>(0x7FC00000);
    store_weight(item, chunk, weight, buffers.weight, buffers.random);
  }
}
