// Chunks of a parameter: which elements they hold, and its tensors as fp32 buffers and back.
//
// Included inside the namespace of one instruction set, after codec.h.

// The next chunk of the blocks [first, last): consecutive full blocks or consecutive short ones.
static STQ_INLINE void chunk_at(const Grid& grid, int64_t first, int64_t last, Chunk& chunk) {
  const int block = int(grid.block), most = block < kChunk ? kChunk / block : 1;
  int blocks = last - first < most ? int(last - first) : most;
  chunk.first = first, chunk.block = block;
  if ((grid.row & (block - 1)) == 0 && !grid.run) {
    chunk.blocks = blocks, chunk.full = true;
    int64_t element = first * block, lane = element / kCodesPerLane;
    for (int b = 0; b < blocks; ++b, element += block, lane += block / kCodesPerLane) {
      chunk.element[b] = element, chunk.index[b] = grid.origin + element;
      chunk.lane[b] = lane, chunk.count[b] = block;
    }
    return;
  }
  const int64_t per_row = grid.blocks_per_row(), lanes = (grid.row + kCodesPerLane - 1) / kCodesPerLane;
  int64_t row = first / per_row, column = first % per_row * block;
  const int64_t full = (grid.row - column) / block;
  if (grid.row % block && per_row > 1 && blocks > full) blocks = full ? int(full) : 1;
  chunk.blocks = blocks, chunk.full = full > 0;
  for (int b = 0; b < blocks; ++b) {
    chunk.element[b] = row * grid.row + column;
    chunk.index[b] = grid.index(row, column);
    chunk.lane[b] = row * lanes + column / kCodesPerLane;
    chunk.count[b] = grid.row - column < block ? int(grid.row - column) : block;
    column += block;
    if (column >= grid.row) column = 0, ++row;
  }
}

static STQ_INLINE float half_to_float(uint16_t half) {
  // Multiplying by 2^112 moves the exponent and makes subnormal numbers normal, exactly.
  const int32_t magnitude = (half & 0x7FFF) << 13;
  const float moved = as<float>(magnitude) * 0x1p112f;
  const int32_t special = as<int32_t>(moved) | kInfinity;
  const int32_t value = magnitude >= (0x7C00 << 13) ? special : as<int32_t>(moved);
  return as<float>(value | int32_t(uint32_t(half & 0x8000) << 16));
}

// Rounds to nearest, ties to even, as the hardware does.
static STQ_INLINE uint16_t float_to_half(float x) {
  const uint32_t pattern = uint32_t(as<int32_t>(x)), magnitude = pattern & ~kSign;
  const uint32_t normal = (magnitude - (112u << kMantissa) + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 shifts the bits of a subnormal half to the bottom and rounds them.
  const uint32_t subnormal = uint32_t(as<int32_t>(as<float>(int32_t(magnitude)) + 0.5f)) - 0x3F000000u;
  uint32_t half = magnitude < (113u << kMantissa) ? subnormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;
  half = magnitude > uint32_t(kInfinity) ? 0x7E00u : half;
  return uint16_t(half | ((pattern & kSign) >> 16));
}

static STQ_INLINE uint16_t float_to_bfloat16(float x) {
  const uint32_t pattern = uint32_t(as<int32_t>(x));
  const uint32_t rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16;
  return (pattern & ~kSign) > uint32_t(kInfinity) ? 0x7FC0 : uint16_t(rounded);
}

// Rounds to a value that fp16 holds, up if the fraction exceeds 16 random bits.
static STQ_INLINE float round_to_half(float x, uint32_t random) {
  const int32_t magnitude = as<int32_t>(x) & 0x7FFFFFFF;
  int32_t exponent = magnitude >> kMantissa;
  exponent = exponent > 113 ? exponent : 113;
  const float step = as<float>((exponent - 10) << kMantissa), inverse = as<float>((264 - exponent) << kMantissa);
  const bool finite = magnitude < kInfinity;
  const float quotient = finite ? as<float>(magnitude) * inverse : 0.0f;
  const float below = float(int32_t(quotient));
  const float threshold = float(int32_t(random >> 16)) * 0x1p-16f;
  float rounded = (below + (quotient - below > threshold ? 1.0f : 0.0f)) * step;
  rounded = rounded < 65504.0f ? rounded : 65504.0f;
  return as<float>((finite ? as<int32_t>(rounded) : magnitude) | (as<int32_t>(x) & int32_t(kSign)));
}

// --------------------------------------------------------------------------- plain tensors

static STQ_INLINE void load_run(const void* tensor, int64_t dtype, int64_t first, int count, float* __restrict out) {
  if (dtype == kFloat32) {
    const float* __restrict x = static_cast<const float*>(tensor) + first;
    for (int i = 0; i < count; ++i) out[i] = x[i];
  } else if (dtype == kBFloat16) {
    const uint16_t* __restrict x = static_cast<const uint16_t*>(tensor) + first;
    for (int i = 0; i < count; ++i) out[i] = as<float>(int32_t(uint32_t(x[i]) << 16));
  } else {
    const uint16_t* __restrict x = static_cast<const uint16_t*>(tensor) + first;
    for (int i = 0; i < count; ++i) out[i] = half_to_float(x[i]);
  }
}

static STQ_INLINE void store_run(void* tensor, int64_t dtype, int64_t first, int count, const float* __restrict in) {
  if (dtype == kFloat32) {
    float* __restrict x = static_cast<float*>(tensor) + first;
    for (int i = 0; i < count; ++i) x[i] = in[i];
  } else if (dtype == kBFloat16) {
    uint16_t* __restrict x = static_cast<uint16_t*>(tensor) + first;
    for (int i = 0; i < count; ++i) x[i] = float_to_bfloat16(in[i]);
  } else {
    uint16_t* __restrict x = static_cast<uint16_t*>(tensor) + first;
    for (int i = 0; i < count; ++i) x[i] = float_to_half(in[i]);
  }
}

// The values of a chunk in `out`, short blocks padded with zeros.
static void load_tensor(const void* tensor, int64_t dtype, const Chunk& chunk, float* out) {
  if (chunk.full) return load_run(tensor, dtype, chunk.element[0], chunk.blocks * chunk.block, out);
  for (int b = 0; b < chunk.blocks; ++b, out += chunk.block) {
    load_run(tensor, dtype, chunk.element[b], chunk.count[b], out);
    for (int i = chunk.count[b]; i < chunk.block; ++i) out[i] = 0.0f;
  }
}

static void store_tensor(void* tensor, int64_t dtype, const Chunk& chunk, const float* in) {
  if (chunk.full) return store_run(tensor, dtype, chunk.element[0], chunk.blocks * chunk.block, in);
  for (int b = 0; b < chunk.blocks; ++b, in += chunk.block)
    store_run(tensor, dtype, chunk.element[b], chunk.count[b], in);
}

// Where the fp32 values of a chunk are: in place if possible, else copied to `buffer`.
static STQ_INLINE float* view_tensor(const void* tensor, int64_t dtype, const Chunk& chunk, float* buffer) {
  if (dtype == kFloat32 && chunk.full) return static_cast<float*>(const_cast<void*>(tensor)) + chunk.element[0];
  load_tensor(tensor, dtype, chunk, buffer);
  return buffer;
}

// Sets the padding of short blocks to zero.
static STQ_INLINE void clear_padding(const Chunk& chunk, float* values) {
  if (chunk.full) return;
  for (int b = 0; b < chunk.blocks; ++b)
    for (int i = chunk.count[b]; i < chunk.block; ++i) values[b * chunk.block + i] = 0.0f;
}

// ------------------------------------------------------------------------ 16-bit weights

using JoinChunk = void (*)(const uint8_t* residual, const Chunk& chunk, float* weight);
using SplitChunk = void (*)(uint8_t* residual, const Chunk& chunk, float* weight, const uint32_t* random);

template <int bits>
static void join_chunk(const uint8_t* residual, const Chunk& chunk, float* weight) {
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    float* w = weight + b * chunk.block;
    unpack_block<bits>(residual + bits * chunk.lane[b], lanes, w, [&](auto code, int i, auto like) __attribute__((always_inline)) {
      using F = decltype(like);
      // Shifts bring the sign of the code to the top and down again with what the weight lacks.
      const auto value = as<Word<F>>(as<Int<F>>(as<Word<F>>(code) << (32 - bits)) >> (32 - bits)) << (16 - bits);
      return as<F>(load<Word<F>>(w + i) + value);
    });
  });
}

// Leaves the bf16 values in `weight` and packs what they cannot hold.
template <int bits, bool noisy>
static void split_chunk(uint8_t* residual, const Chunk& chunk, float* weight, const uint32_t* random) {
  constexpr uint32_t unit = 1u << (16 - bits), largest = 0x7F7F0000u + (bits ? 0x8000u - unit : 0u);
  each_block(chunk, [&](int b, int lanes) __attribute__((always_inline)) {
    float* w = weight + b * chunk.block;
    uint8_t* planes = bits ? residual + bits * chunk.lane[b] : nullptr;
    pack_block<bits>(planes, lanes, [&](int i, auto like) __attribute__((always_inline)) {
      using F = decltype(like);
      const Word<F> pattern = load<Word<F>>(w + i), sign = pattern & kSign;
      const Int<F> magnitude = as<Int<F>>(pattern & ~kSign);
      Word<F> addend = Word<F>{} + (unit >> 1);
      if constexpr (noisy) addend = load<Word<F>>(random + b * chunk.block + i) >> ((16 + bits) & 31);
      Int<F> rounded = as<Int<F>>((as<Word<F>>(magnitude) + addend) & ~(unit - 1));
      // A finite weight cannot pass 2^31 here, so signed comparisons serve.
      rounded = smaller(rounded, int32_t(largest));
      Word<F> result = as<Word<F>>(select(magnitude >= kInfinity, magnitude, rounded)) | sign;
      result = select(magnitude > kInfinity, Word<F>{} + 0x7FC00000u, result);
      const Word<F> upper = (result + 0x8000u) & 0xFFFF0000u;
      store(w + i, as<F>(upper));
      return (as<Int<F>>(result - upper) >> (16 - bits)) & int32_t((1u << bits) - 1);
    });
  });
}

static JoinChunk joiner(int64_t bits) {
  constexpr JoinChunk table[] = {nullptr,       join_chunk<1>, join_chunk<2>, join_chunk<3>, join_chunk<4>,
                                 join_chunk<5>, join_chunk<6>, join_chunk<7>, join_chunk<8>};
  return bits == 16 ? join_chunk<16> : table[bits];
}

template <bool noisy>
static SplitChunk splitter(int64_t bits) {
  constexpr SplitChunk table[] = {split_chunk<0, noisy>, split_chunk<1, noisy>, split_chunk<2, noisy>,
                                  split_chunk<3, noisy>, split_chunk<4, noisy>, split_chunk<5, noisy>,
                                  split_chunk<6, noisy>, split_chunk<7, noisy>, split_chunk<8, noisy>};
  return bits == 16 ? split_chunk<16, false> : table[bits];
}

static STQ_INLINE float* load_weight(const Item& item, const Chunk& chunk, float* buffer) {
  float* weight = view_tensor(item.weight, item.weight_dtype, chunk, buffer);
  if (item.residual_bits) joiner(item.residual_bits)(item.residual, chunk, weight);
  return weight;
}

static STQ_INLINE void store_weight(const Item& item, const Chunk& chunk, float* weight, float* buffer, uint32_t* random) {
  if (weight != buffer) return;  // updated in place
  const bool noisy = item.stochastic && item.residual_bits < 16;
  if (noisy) draw_chunk(item.key, chunk, random);
  if (item.residual_bits || (noisy && item.weight_dtype == kBFloat16)) {
    clear_padding(chunk, weight);
    (noisy ? splitter<true> : splitter<false>)(item.residual_bits)(item.residual, chunk, weight, random);
  } else if (noisy && item.weight_dtype == kFloat16) {
    for (int i = 0; i < chunk.blocks * chunk.block; ++i) weight[i] = round_to_half(weight[i], random[i]);
  }
  store_tensor(item.weight, item.weight_dtype, chunk, weight);
}
