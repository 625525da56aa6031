// A pool of threads that live as long as the process.
#pragma once

#include <functional>

namespace stquant {

// Calls task(0), ..., task(count - 1), each once, on at most `threads` threads, the caller's among
// them. The tasks see the default floating-point environment whatever the caller has set.
void parallel(int64_t count, int threads, const std::function<void(int64_t)>& task);

}  // namespace stquant
