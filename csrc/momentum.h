// What the steps of all rules share: their buffers, gradients, and the momentum.
//
// Included inside the namespace of one instruction set, after chunks.h.

// Floats after a buffer, lest addresses in the next have the lower 12 bits of addresses in this one:
// the processor would take a load from there for one of what was stored here.
constexpr int kApart = 272;

// Buffers of one chunk; a short block is padded with zeros to a full one.
struct Buffers {
  alignas(64) float weight[kBuffer + kApart];
  alignas(64) float grad[kBuffer + kApart];
  alignas(64) float first[kBuffer + kApart];
  alignas(64) float second[kBuffer + kApart];
  alignas(64) float denominator[kBuffer + kApart];
  alignas(64) uint32_t random[kBuffer];
  alignas(16) float scales[kMaxBlocks];
  Extreme extremes[kMaxBlocks];  // of the momentum in `first`
  float squares[kMaxBlocks];  // sums over the gradients
  // Of four blocks at once: what scales are made of, lane by lane, and by what their values are encoded.
  Wide square_lanes[4][16 / kWide] = {};
  Extremes<Wide> extreme_lanes[4];
  alignas(16) float inverses[4];
  bool bad[kBuffer];  // elements that must not reach a packed state
};

// Fetches what holds the elements from `x` on; a line of 64 bytes holds 16 of them in fp32.
static STQ_INLINE void fetch(const float* x) { __builtin_prefetch(x); }
static STQ_INLINE void fetch_to_change(const float* x) { __builtin_prefetch(x, 1); }

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
    state.scales[chunk.first + b] = buffers.scales[b] = signed_scale(state, buffers.extremes[b].farthest());
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
