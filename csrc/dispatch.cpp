#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

#include "threads.h"

namespace stquant {

// Which of them exist is a matter of the platform; see CMakeLists.txt.
namespace scalar {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace neon {
extern const Kernels kernels;
}

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
#if defined(STQ_X86)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found.push_back(&avx512::kernels);
  if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kernels);
#elif defined(STQ_ARM)
  found.push_back(&neon::kernels);
#endif
  found.push_back(&scalar::kernels);
  return found;
}

static const Kernels* find(const std::string& name) {
  std::string names;
  for (const Kernels* kernels : available()) {
    if (name.empty() || name == kernels->name) return kernels;
    names += std::string(names.empty() ? "" : ", ") + kernels->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available; this machine has " + names);
}

static std::atomic<const Kernels*> chosen{nullptr};

const Kernels& active() {
  const Kernels* kernels = chosen.load();
  if (!kernels) {
    const char* forced = std::getenv("STQUANT_CPU_ISA");
    kernels = find(forced ? forced : "");
    chosen.store(kernels);
  }
  return *kernels;
}

void use(const std::string& name) { chosen.store(find(name)); }

namespace {

// A share of an item that one thread works on: about kTask elements, on block borders.
constexpr int64_t kTask = 1 << 16;

struct Task {
  const Item* item;
  int64_t first, last;
};

std::vector<Task> cut(const Item* items, int64_t count) {
  std::vector<Task> tasks;
  for (const Item* item = items; item != items + count; ++item) {
    const int64_t blocks = item->grid.blocks(), step = kTask / item->grid.block;
    for (int64_t first = 0; first < blocks; first += step)
      tasks.push_back({item, first, first + step < blocks ? first + step : blocks});
  }
  return tasks;
}

}  // namespace

void run(RangeKernel kernel, const Item* items, int64_t count, int threads) {
  const std::vector<Task> tasks = cut(items, count);
  parallel(int64_t(tasks.size()), threads, [&](int64_t i) { kernel(*tasks[i].item, tasks[i].first, tasks[i].last); });
}

Stats stats(const Item& item, int threads) {
  Stats total{};
  std::mutex mutex;
  const std::vector<Task> tasks = cut(&item, 1);
  const auto measure = active().stats;
  parallel(int64_t(tasks.size()), threads, [&](int64_t i) {
    Stats sums{};
    measure(item, tasks[i].first, tasks[i].last, sums);
    std::lock_guard<std::mutex> lock(mutex);
    total.elements += sums.elements, total.zeros += sums.zeros, total.saturated += sums.saturated;
    total.ratio += sums.ratio, total.ratio2 += sums.ratio2, total.ratio4 += sums.ratio4;
    for (int bin = 0; bin < kEnergyBins; ++bin) total.energy[bin] += sums.energy[bin];
  });
  return total;
}

void measure(Rules rule, const std::vector<Item>& items, const Candidates& candidates,
             const std::vector<Sampled>& sampled, int64_t* energies, int64_t width, int threads) {
  std::vector<int64_t> first;  // of each item that has samples; one item is one thread's
  for (int64_t i = 0; i < int64_t(sampled.size()); ++i)
    if (i == 0 || sampled[i].item != sampled[i - 1].item) first.push_back(i);
  const int64_t parts = int64_t(first.size());
  first.push_back(int64_t(sampled.size()));
  const auto kernel = active().measure;
  parallel(parts, threads, [&](int64_t part) {
    for (int64_t i = first[part]; i < first[part + 1]; ++i)
      kernel(rule, items[sampled[i].item], candidates, sampled[i], energies + sampled[i].item * width);
  });
}

}  // namespace stquant
