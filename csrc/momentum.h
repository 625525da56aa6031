// What the steps of all rules share: their buffers, gradients, and the momentum.
//
// Included inside the namespace of one instruction set, after chunks.h.

// Buffers of one chunk; a short block is padded with zeros to a full one.
struct Buffers {
  alignas(64) float weight[kBuffer];
  alignas(64) float grad[kBuffer];
  alignas(64) float first[kBuffer];
  alignas(64) float second[kBuffer];
  alignas(64) uint32_t random[kBuffer];
  Extreme extremes[kMaxBlocks];  // of the momentum in `first`
  float scales[kMaxBlocks];
  float squares[kMaxBlocks];  // sums over the gradients
  bool bad[kBuffer];  // elements that must not reach a packed state
};

constexpr int kAhead = 4 * kChunk;  // bytes: the next chunk; farther takes longer by measurements

// The gradients and weights of later blocks, fetched while one is worked on.
struct Ahead {
  const char *grad, *weight;

  static STQ_INLINE Ahead of(const float* grad, const float* weight) {
    return {reinterpret_cast<const char*>(grad) + kAhead, reinterpret_cast<const char*>(weight) + kAhead};
  }

  // Fetches what holds the elements from `i` on; a line of 64 bytes holds 16 of them in fp32.
  STQ_INLINE void fetch(int i) const {
    __builtin_prefetch(grad + 4 * i);
    __builtin_prefetch(weight + 4 * i, 1);
  }
};

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

// Stores the momentum in `buffers.first`; a packed one leaves there what `prepayment` says if it
// prepays. Returns whether it does.
static STQ_INLINE bool store_momentum(const State& state, const Chunk& chunk, Buffers& buffers,
                                      const Prepayment& prepayment, bool may_prepay = true) {
  if (!state.packed()) return store_tensor(state.data, kFloat32, chunk, buffers.first), false;
  for (int b = 0; b < chunk.blocks; ++b)
    state.scales[chunk.first + b] = buffers.scales[b] = signed_scale(state, buffers.extremes[b]);
  const bool prepays = may_prepay && state.prepay;
  const EncodeChunk encode = prepays ? signed_encoder<true>(state) : signed_encoder<false>(state);
  encode(state, chunk, buffers.scales, buffers.first, nullptr, prepayment);
  return prepays;
}

// Whether a momentum of the chunk is not finite.
static STQ_INLINE bool any_bad(const Chunk& chunk, const Buffers& buffers) {
  int32_t largest = 0;
  for (int b = 0; b < chunk.blocks; ++b) largest = larger(largest, buffers.extremes[b].largest());
  return largest >= kInfinity;
}

// Marks the elements with a non-finite momentum and takes them out; rare, so not fast.
static void drop_bad(const Chunk& chunk, Buffers& buffers) {
  for (int b = 0; b < chunk.blocks; ++b) {
    Extremes<Floats> extremes;
    for (int i = b * chunk.block; i < (b + 1) * chunk.block; ++i) {
      buffers.bad[i] = (as<int32_t>(buffers.first[i]) & kInfinity) == kInfinity;
      if (buffers.bad[i]) buffers.first[i] = 0.0f;
      extremes.add(Floats{} + buffers.first[i]);
    }
    buffers.extremes[b] = extremes.reduced();
  }
}

// Their weights become NaN, as they would with fp32 states.
static void spoil_bad(const Chunk& chunk, const Buffers& buffers, float* weight) {
  for (int i = 0; i < chunk.blocks * chunk.block; ++i)
    if (buffers.bad[i]) weight[i] = as<float>(0x7FC00000);
}
