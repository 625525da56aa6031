// Random cases over packing, random numbers, transfers, steps and measurements, with a fixed seed.
//
// Buffers are heap blocks of exactly the size that a case needs, so that the address sanitizer sees
// every stray access; results are compared with the plainest code that can be written here. The
// digest at the end is over all results: it is the same for every instruction set and compiler.
// Usage: fuzz [cases]
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../layout.h"

namespace stquant::fuzz {
#if defined(__AVX2__)
#define STQ_LANES 8
#else
#define STQ_LANES 4
#endif
#define STQ_NAME "fuzz"
#include "../isa/kernels.h"
}  // namespace stquant::fuzz

using namespace stquant;
using namespace stquant::fuzz;

static uint64_t state = 0x9E3779B97F4A7C15u;

static uint64_t next() {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}
static int below(int n) { return int(next() % uint64_t(n)); }

static void require(bool holds, const char* what, long number) {
  if (holds) return;
  std::printf("case %ld: %s\n", number, what);
  std::exit(1);
}

// FNV-1a over everything that was computed, all NaN alike.
static uint64_t digest = 0xCBF29CE484222325u;

static void add(uint64_t value) { digest = (digest ^ value) * 0x100000001B3u; }

static void add_bytes(const uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) add(bytes[i]);
}
static void add_floats(const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) add(x[i] == x[i] ? as<uint32_t>(x[i]) : 0x7FC00000u);
}
static void add_tensor(const void* tensor, int64_t dtype, int64_t count) {
  if (dtype == kFloat32) return add_floats(static_cast<const float*>(tensor), count);
  const uint16_t* x = static_cast<const uint16_t*>(tensor);
  const uint16_t infinity = dtype == kBFloat16 ? 0x7F80 : 0x7C00;
  for (int64_t i = 0; i < count; ++i) add((x[i] & 0x7FFF) > infinity ? uint16_t(infinity + 1) : x[i]);
}

template <class T>
using Buffer = std::unique_ptr<T[]>;

// Any bit pattern, often zero or moderate.
static float any_float() {
  switch (below(4)) {
    case 0: return 0.0f;
    case 1: return as<float>(uint32_t(next()));
    default: return (float(below(20001)) - 10000.0f) * 1e-4f;
  }
}

static float any_finite() {
  const float x = any_float();
  return (as<int32_t>(x) & kInfinity) == kInfinity ? 1.0f : x;
}

static const int kWidths[] = {0, 1, 2, 3, 4, 5, 6, 8};

// A state of random bytes and scales on a grid.
struct Packed {
  Buffer<uint8_t> codes;
  Buffer<float> scales;
  int64_t bytes, blocks;
  State state{};

  Packed(const Grid& grid, Family family, int bits) {
    bytes = grid.rows * ((grid.row + 7) / 8) * bits, blocks = grid.blocks();
    codes.reset(new uint8_t[bytes ? bytes : 1]);
    scales.reset(new float[blocks]);
    for (int64_t i = 0; i < bytes; ++i) codes[i] = uint8_t(next());
    for (int64_t i = 0; i < blocks; ++i) scales[i] = family == kLog ? absolute(any_finite()) : any_finite();
    state = {codes.get(), scales.get(), family, bits, family == kLog && below(2), family != kLog && below(2), 0, 0, next()};
    if (family != kLog) return;
    // Levels of at most 2^5, as those of a state are: sums of their fourth powers have 64 bits.
    state.lo = below(3) - 5, state.log2_step = below(7) - 5;
    while (state.log2_step > -5 && (double(1 << bits) * (state.log2_step > 0 ? 2.0 : 1.0 / (1 << -state.log2_step))) > 8)
      --state.log2_step;
  }
  void add_all() const { add_bytes(codes.get(), bytes), add_floats(scales.get(), blocks); }
};

static Packed packed(const Grid& grid, bool is_signed) {
  static const int kDynamics[] = {0, 2, 3}, kMulaws[] = {4, 5, 6, 8};
  if (!is_signed) return Packed(grid, kLog, kWidths[below(8)]);
  return below(2) ? Packed(grid, kDynamic, kDynamics[below(3)]) : Packed(grid, kMulaw, kMulaws[below(4)]);
}

// Often a part of a larger parameter, sometimes where the upper bits of an index change.
static Grid grid() {
  Grid g{1 + below(3), 1 + below(below(8) ? 160 : 1500), int64_t(32) << below(6)};
  if (below(2)) g.block = 128;
  if (below(4) == 0) g.row = 128 * (1 + below(10));
  if (below(2)) return g;
  g.origin = below(2) ? below(5000) : (int64_t(1) << (below(2) ? 16 : 32)) - below(3000);
  if (below(2)) g.pitch = g.row + below(500), g.run = 1 + below(3), g.jump = g.pitch * (g.run + below(3));
  return g;
}

template <int bits>
static void packing(long number) {
  const int lanes = 1 + below(20);
  Buffer<float> codes(new float[8 * lanes]), back(new float[8 * lanes]);
  Buffer<uint8_t> planes(new uint8_t[bits * lanes + 1]);
  for (int i = 0; i < 8 * lanes; ++i) codes[i] = as<float>(int32_t(next() & ((1u << bits) - 1)));
  pack_block<bits>(planes.get(), lanes, [&](int i, auto like) { return load<Int<decltype(like)>>(codes.get() + i); });
  unpack_block<bits>(planes.get(), lanes, back.get(), [](auto code, int, auto like) {
    return as<decltype(like)>(code & int32_t((1u << bits) - 1));
  });
  for (int i = 0; i < 8 * lanes; ++i) {
    require(as<int32_t>(codes[i]) == as<int32_t>(back[i]), "a code changed in packing", number);
    for (int k = 0; k < bits; ++k) {
      const int at = bits * (i / lanes) + k;  // bit of the lane's integer
      const int stored = planes[at / 8 * lanes + i % lanes] >> (at % 8) & 1;
      require(stored == (as<int32_t>(codes[i]) >> k & 1), "a bit is in another place", number);
    }
  }
}

static void random_numbers(long number) {
  const uint64_t key = next();
  const int count = 1 + below(300);
  const int64_t first = (int64_t(below(5)) << 32) + (below(2) ? -below(300) : below(1 << 30)) + (int64_t(1) << 33);
  Buffer<uint32_t> drawn(new uint32_t[count]);
  draw(key, first, count, drawn.get());
  for (int i = 0; i < count; ++i) {
    const uint64_t index = uint64_t(first + i);
    uint32_t x = uint32_t(index) ^ uint32_t(index >> 32) * 0x9E3779B1u ^ uint32_t(key);
    x = (x ^ (x >> 16)) * 0x21F0AAADu;
    x = ((x ^ (x >> 15)) + uint32_t(key >> 32)) * 0xD35A2D97u;
    require(drawn[i] == (x ^ (x >> 15)), "a random number differs", number);
  }
}

static void transfers(long number) {
  const Grid g = grid();
  const bool is_signed = below(2);
  Packed source = packed(g, is_signed), target = packed(g, below(2));
  const int64_t elements = g.rows * g.row;
  Buffer<float> plain(new float[elements]);
  Item item{};
  item.grid = g, item.weight = plain.get(), item.states[0] = source.state, item.states[1] = target.state;
  for (int64_t i = 0; i < elements; ++i) {
    plain[i] = any_float();
    // A mean of such values is infinite and decodes to NaN, whose sign is the processor's choice.
    if (absolute(plain[i]) > 0x1p100f) plain[i] = 0x1p100f;
  }
  encode_range(item, 0, g.blocks());
  decode_range(item, 0, g.blocks());
  for (int64_t i = 0; i < elements; ++i) require(plain[i] == plain[i], "NaN after encoding", number);
  recode_range(item, 0, g.blocks());
  Stats sums{};
  stats_range(item, 0, g.blocks(), sums);
  require(sums.elements == elements, "an element was not counted", number);
  source.add_all(), target.add_all(), add_floats(plain.get(), elements);
  for (const int64_t *sum = &sums.elements, *end = sum + sizeof sums / 8; sum != end; ++sum) add(uint64_t(*sum));
}

static void steps(long number) {
  const Grid g = grid();
  const int64_t elements = g.rows * g.row;
  const int dtype = below(3), bits = dtype == kBFloat16 && below(2) ? (below(4) ? 1 + below(8) : 16) : 0;
  const int64_t bytes = g.rows * ((g.row + 7) / 8) * bits;
  Packed first = packed(g, true), second = packed(g, false);
  Buffer<float> plain_first(new float[elements]), plain_second(new float[elements]), maximum(new float[elements]);
  Buffer<uint8_t> weight(new uint8_t[elements * 4]), grad(new uint8_t[elements * 4]), residual(new uint8_t[bytes + 1]);
  for (int64_t i = 0; i < elements * 4; ++i) weight[i] = uint8_t(next()), grad[i] = uint8_t(next());
  for (int64_t i = 0; i < elements; ++i) plain_first[i] = any_float(), plain_second[i] = maximum[i] = 1.0f;
  for (int64_t i = 0; i < bytes; ++i) residual[i] = uint8_t(next());
  Item item{};
  item.grid = g;
  item.weight = weight.get(), item.weight_dtype = dtype;
  item.grad = grad.get(), item.grad_dtype = below(3);
  item.residual = residual.get(), item.residual_bits = bits, item.stochastic = below(2), item.key = next();
  item.maximize = below(2);
  if (item.grad_dtype == kFloat32 && below(2)) {
    // Any bits are seldom all finite, which a block of 128 must be on its usual way.
    const float size = below(8) ? 1.0f : 0x1p59f;
    for (int64_t i = 0; i < elements; ++i) {
      const float x = size * 1e-4f * (float(below(20001)) - 10000.0f);
      __builtin_memcpy(grad.get() + 4 * i, &x, 4);
    }
  }
  item.states[0] = below(4) ? first.state : State{plain_first.get(), nullptr, kPlain, 0, 0, 0, 0, 0, 0};
  item.states[1] = below(4) ? second.state : State{plain_second.get(), nullptr, kPlain, 0, 0, 0, 0, 0, 0};
  if (below(4) == 0) item.states[2] = {maximum.get(), nullptr, kPlain, 0, 0, 0, 0, 0, 0};
  const double constants[9] = {0.9f, 0.1f, 0.999f, 0.001f, 0.9999f, below(2) ? 0.01f : 0.0f, 1e-3f, 9e-3f, 1e-8f};
  for (int i = 0; i < 9; ++i) item.constants[i] = constants[i];
  // In two ranges, as two threads would.
  const int64_t cut = below(int(g.blocks()) + 1);
  const RangeKernel rules[] = {adam_range, sgd_range, lion_range};
  const RangeKernel step = rules[below(2) ? 0 : below(3)];
  step(item, cut, g.blocks());
  step(item, 0, cut);
  for (int64_t i = 0; i < g.blocks(); ++i)
    require(!item.states[1].packed() || second.scales[i] == second.scales[i], "a mean is NaN", number);
  first.add_all(), second.add_all(), add_bytes(residual.get(), bytes), add_tensor(weight.get(), dtype, elements);
  for (const auto& plain : {&plain_first, &plain_second, &maximum}) add_floats(plain->get(), elements);
}

// The energies of some formats, over some blocks of some rows, for one of the rules.
static void measurements(long number) {
  const Grid g = grid();
  const Rules rule = Rules(below(3));
  const int64_t elements = g.rows * g.row;
  const int dtype = below(3);
  Packed first = packed(g, true), second = packed(g, false);
  Buffer<uint8_t> weight(new uint8_t[elements * 4]), grad(new uint8_t[elements * 4]);
  for (int64_t i = 0; i < elements * 4; ++i) weight[i] = uint8_t(next()), grad[i] = uint8_t(next());
  Item item{};
  item.grid = g, item.maximize = below(2);
  item.weight = weight.get(), item.weight_dtype = dtype, item.grad = grad.get(), item.grad_dtype = below(3);
  item.states[0] = first.state, item.states[1] = second.state;
  const double constants[9] = {0.9f, 0.1f, 0.999f, 0.001f, 0.9999f, below(2) ? 0.01f : 0.0f, 1e-3f, 9e-3f, 1e-8f};
  for (int i = 0; i < 9; ++i) item.constants[i] = constants[i];

  Candidates candidates{rule == kAdam ? 2 : 1, {}, nullptr};
  std::vector<State> formats;
  int64_t energies = 6;
  for (int s = 0; s < candidates.states; ++s) {
    candidates.count[s] = below(4), energies += 4 + 4 * candidates.count[s];
    for (int f = 0; f < candidates.count[s]; ++f) {
      formats.push_back(packed(g, s == 0).state);
      formats.back().data = formats.back().scales = nullptr;  // a measurement brings its own
    }
  }
  candidates.formats = formats.data();
  const int64_t row = below(int(g.rows)), block = below(int(g.blocks_per_row()));
  const Sampled sampled{0, row, row + 1 + below(int(g.rows - row)), 1 + below(2),
                        block, block + 1 + below(int(g.blocks_per_row() - block))};
  Buffer<int64_t> found(new int64_t[energies * kEnergyBins]());
  measure_sampled(rule, item, candidates, sampled, found.get());
  for (int64_t i = 0; i < energies * kEnergyBins; ++i) {
    require(found[i] >= 0, "an energy is negative", number);
    add(uint64_t(found[i]));
  }
}

int main(int count, char** arguments) {
  const long cases = count > 1 ? std::atol(arguments[1]) : 1000000;
  for (long number = 0; number < cases; ++number) {
    switch (below(5)) {
      case 0:
        packing<1>(number), packing<2>(number), packing<3>(number), packing<4>(number), packing<5>(number);
        packing<6>(number), packing<7>(number), packing<8>(number), packing<16>(number);
        break;
      case 1: random_numbers(number); break;
      case 2: transfers(number); break;
      case 3: measurements(number); break;
      default: steps(number);
    }
  }
  std::printf("%ld cases, digest %016llx\n", cases, static_cast<unsigned long long>(digest));
}
