// NEON, which every 64-bit ARM has.
#include "../layout.h"

namespace stquant::neon {
#define STQ_LANES 4
#define STQ_NAME "neon"
#include "kernels.h"
}  // namespace stquant::neon
