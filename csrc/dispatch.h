// Which instruction set serves, and how the work is spread over threads.
#pragma once

#include <string>
#include <vector>

#include "layout.h"

namespace stquant {

// Instruction sets that were compiled in and that this processor has, the best one first.
std::vector<const Kernels*> available();

// The instruction set in use. The first call chooses the best, or the one that the environment
// variable STQUANT_CPU_ISA names; throws std::invalid_argument if that is not available.
const Kernels& active();

// Uses the instruction set `name` from now on; the best one if `name` is empty.
void use(const std::string& name);

// Runs a kernel over all blocks of all items. The result does not depend on `threads`.
void run(RangeKernel kernel, const Item* items, int64_t count, int threads);

Stats stats(const Item& item, int threads);

// Adds the energies of what is sampled, in the order of the items, to those of each item: `width`
// numbers from `energies` on. The result does not depend on `threads`.
void measure(Rules rule, const std::vector<Item>& items, const Candidates& candidates,
             const std::vector<Sampled>& sampled, int64_t* energies, int64_t width, int threads);

}  // namespace stquant
