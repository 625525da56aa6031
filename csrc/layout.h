// What a call is given: plain records that Python fills field by field (kernels/cpu.py, _RECORD),
// and the walk over the blocks of a parameter. Knows nothing of Python, torch or instruction sets.
#pragma once

#include <cstdint>

namespace stquant {

// Elements worked on at a time: some blocks, or a larger one. Enough that the blocks of a chunk hide
// each other's latencies, few enough that the nearest cache holds what is worked on.
constexpr int kChunk = 512;
constexpr int kMinBlock = 32;
constexpr int kMaxBlock = 1024;
constexpr int kBuffer = kMaxBlock > kChunk ? kMaxBlock : kChunk;
constexpr int kMaxBlocks = kChunk / kMinBlock;
constexpr int kCodesPerLane = 8;

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Family : int64_t { kAbsent = 0, kPlain = 1, kDynamic = 2, kMulaw = 3, kLog = 4 };

// Every field of a record is 8 bytes wide, so that there is no padding to agree on.
// A grid may be a box of that of the whole parameter: `origin` is the index there of the first
// element, and `run` rows, `pitch` apart, repeat every `jump`; a run of 0 leaves no gaps.
struct Grid {
  int64_t rows, row, block;
  int64_t origin, run, jump, pitch;

  int64_t index(int64_t r, int64_t column) const {
    return origin + (run ? r / run * jump + r % run * pitch : r * row) + column;
  }
  int64_t blocks_per_row() const { return (row + block - 1) / block; }
  int64_t blocks() const { return rows * blocks_per_row(); }
};

struct State {
  void* data;     // codes of a packed state, fp32 values of a plain one
  float* scales;  // one per block
  int64_t family, bits, stochastic, prepay;
  int64_t lo, log2_step;  // octaves of LOG
  uint64_t key;           // of the random numbers: all steps' in a record, one step's in a kernel

  bool packed() const { return family > kPlain; }
};

struct Item {
  Grid grid;
  void* weight;  // or the plain tensor that is encoded or decoded
  int64_t weight_dtype;
  const void* grad;
  int64_t grad_dtype;
  uint8_t* residual;
  int64_t residual_bits;
  int64_t stochastic;  // rounding of a 16-bit weight
  uint64_t key;        // of its random numbers, as that of a state
  int64_t maximize;
  State states[3];
  int64_t step;
  double constants[9];  // fp32 values and flags, in the order of the rule
};

// The key of one step; see codecs/rounding.py.
inline uint64_t step_key(uint64_t key, int64_t step) {
  uint64_t x = (key ^ uint64_t(step)) + 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Sums over a state; see kernels/reference/stats.py.
constexpr int kEnergyBins = 32;
struct Stats {
  int64_t elements, zeros, saturated, ratio, ratio2, ratio4;
  int64_t energy[kEnergyBins];
};

// A run of consecutive blocks. `lane` counts the lanes before a block: times the bits of a code
// that is the offset of its bytes, at every width. `full` says that all blocks are, so that the
// elements are contiguous.
struct Chunk {
  int64_t first;
  int blocks, block;
  bool full;
  int64_t element[kMaxBlocks];  // where a block starts here
  int64_t index[kMaxBlocks];    // and in the whole parameter
  int64_t lane[kMaxBlocks];
  int count[kMaxBlocks];
};

// What is measured: the rows [row, last_row), `stride` apart, of an item, and of each the blocks
// [block, last_block).
struct Sampled {
  int64_t item, row, last_row, stride, block, last_block;
};

// The formats that states could have: `count[s]` for state s, one state after the other.
constexpr int kMaxMeasured = 2;
struct Candidates {
  int states;
  int count[kMaxMeasured];
  const State* formats;
};

enum Rules : int64_t { kAdam = 0, kSGD = 1, kLion = 2 };

using RangeKernel = void (*)(const Item& item, int64_t first, int64_t last);

// The entry points of one instruction set: each works on the blocks [first, last) of an item.
struct Kernels {
  const char* name;
  RangeKernel adam, sgd, lion, decode, encode, recode;
  void (*stats)(const Item& item, int64_t first, int64_t last, Stats& sums);
  void (*measure)(Rules rule, const Item& item, const Candidates& candidates, const Sampled& sampled, int64_t* energies);
};

}  // namespace stquant
