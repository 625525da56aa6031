// Whatever the platform guarantees; on x86-64 that is SSE2.
#include "../layout.h"

namespace stquant::scalar {
#define STQ_LANES 4
#define STQ_NAME "scalar"
#include "kernels.h"
}  // namespace stquant::scalar
