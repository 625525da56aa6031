// The module stquant._cpu: records in, work done. The only file that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "dispatch.h"

namespace nb = nanobind;
using namespace stquant;

static void check_state(const State& state) {
  const int64_t bits = state.bits;
  bool known = false;
  switch (state.family) {
    case kAbsent: return;
    case kPlain: known = true; break;
    case kDynamic: known = bits == 0 || bits == 2 || bits == 3; break;
    case kMulaw: known = bits == 4 || bits == 5 || bits == 6 || bits == 8; break;
    case kLog:
      known = bits >= 0 && bits <= 8 && bits != 7 && state.log2_step >= -8 && state.log2_step <= 1 && state.lo >= -64 &&
              state.lo <= 64;
      break;
  }
  if (!known) throw std::invalid_argument("a state has an unknown format");
}

template <class T>
static std::vector<T> array_of(nb::bytes bytes) {
  if (bytes.size() % sizeof(T)) throw std::invalid_argument("records have another size than the module expects");
  std::vector<T> values(bytes.size() / sizeof(T));
  std::memcpy(values.data(), bytes.c_str(), bytes.size());
  return values;
}

static std::vector<Item> read(nb::bytes records) {
  std::vector<Item> items = array_of<Item>(records);
  for (Item& item : items) {
    const int64_t block = item.grid.block, bits = item.residual_bits;
    if (block < kMinBlock || block > kMaxBlock || block & (block - 1))
      throw std::invalid_argument("block is not a power of two between 32 and 1024");
    if (item.grid.rows < 0 || item.grid.row < 1) throw std::invalid_argument("a grid has no elements");
    if (item.grid.run < 0) throw std::invalid_argument("a grid has a run of less than no rows");
    if (bits < 0 || (bits > 8 && bits != 16)) throw std::invalid_argument("residual bits are 0 to 8, or 16");
    for (State& state : item.states) {
      check_state(state);
      state.key = step_key(state.key, item.step);
    }
    item.key = step_key(item.key, item.step);
  }
  return items;
}

// Writes int64 [items, energies, kEnergyBins] to an address that holds `size` numbers, all zero.
static void measure_all(int64_t rule, nb::bytes records, const std::vector<int>& counts, nb::bytes candidates,
                        nb::bytes samples, uintptr_t address, int64_t size, int threads) {
  const std::vector<Item> items = read(records);
  const std::vector<State> formats = array_of<State>(candidates);
  const std::vector<Sampled> sampled = array_of<Sampled>(samples);
  if (rule < kAdam || rule > kLion) throw std::invalid_argument("unknown rule");
  if (counts.empty() || counts.size() > kMaxMeasured) throw std::invalid_argument("one or two states are measured");
  Candidates wanted{int(counts.size()), {}, formats.data()};
  int64_t energies = 6, total = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    wanted.count[s] = counts[s];
    energies += 4 + 4 * counts[s], total += counts[s];
    if (counts[s] < 0) throw std::invalid_argument("fewer than no formats");
  }
  if (total != int64_t(formats.size())) throw std::invalid_argument("another number of formats than of their counts");
  if (size != int64_t(items.size()) * energies * kEnergyBins) throw std::invalid_argument("another number of energies");
  for (const State& format : formats) {
    check_state(format);
    if (!format.packed()) throw std::invalid_argument("only packed formats are measured");
  }
  for (const Sampled& s : sampled) {
    if (s.item < 0 || s.item >= int64_t(items.size())) throw std::invalid_argument("a sample is of no item");
    const Item& item = items[s.item];
    if (s.row < 0 || s.last_row > item.grid.rows || s.stride < 1 || s.block < 0 ||
        s.last_block > item.grid.blocks_per_row())
      throw std::invalid_argument("a sample is outside its item");
    for (size_t state = 0; state < counts.size(); ++state)
      if (!item.states[state].packed()) throw std::invalid_argument("only packed states are measured");
  }
  nb::gil_scoped_release release;
  measure(Rules(rule), items, wanted, sampled, reinterpret_cast<int64_t*>(address), energies * kEnergyBins, threads);
}

static void run_all(RangeKernel kernel, nb::bytes records, int threads) {
  const std::vector<Item> items = read(records);
  nb::gil_scoped_release release;
  run(kernel, items.data(), int64_t(items.size()), threads);
}

NB_MODULE(_cpu, m) {
  m.attr("RECORD_BYTES") = sizeof(Item);
  m.attr("MAX_BLOCK") = kMaxBlock;
  m.def("available", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available()) names.push_back(kernels->name);
    return names;
  });
  m.def("active", [] { return std::string(active().name); });
  m.def("use", &use);
  m.def("adam", [](nb::bytes records, int threads) { run_all(active().adam, records, threads); });
  m.def("sgd", [](nb::bytes records, int threads) { run_all(active().sgd, records, threads); });
  m.def("lion", [](nb::bytes records, int threads) { run_all(active().lion, records, threads); });
  m.def("decode", [](nb::bytes records, int threads) { run_all(active().decode, records, threads); });
  m.def("encode", [](nb::bytes records, int threads) { run_all(active().encode, records, threads); });
  m.def("recode", [](nb::bytes records, int threads) { run_all(active().recode, records, threads); });
  m.def("measure", &measure_all);
  m.def("stats", [](nb::bytes records, int threads) {
    const std::vector<Item> items = read(records);
    if (items.size() != 1) throw std::invalid_argument("stats takes one record");
    Stats sums;
    {
      nb::gil_scoped_release release;
      sums = stats(items[0], threads);
    }
    return std::vector<int64_t>(&sums.elements, &sums.elements + sizeof(Stats) / sizeof(int64_t));
  });
}
