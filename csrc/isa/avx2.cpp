// AVX2, with the flags that CMakeLists.txt gives this file.
#include "../layout.h"

#include <immintrin.h>

namespace stquant::avx2 {
#define STQ_LANES 8
#define STQ_NAME "avx2"
#include "kernels.h"
}  // namespace stquant::avx2
