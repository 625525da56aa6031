// AVX-512 F, BW, VL and DQ on 256-bit vectors, with the flags that CMakeLists.txt gives this file.
#include "../layout.h"

namespace stquant::avx512 {
#define STQ_LANES 8
#define STQ_NAME "avx512"
#include "kernels.h"
}  // namespace stquant::avx512
