// AVX-512 F, BW, VL and DQ, with the flags that CMakeLists.txt gives this file: vectors of 8, and of
// 16 where the hot code asks for the widest.
#include "../layout.h"

#include <immintrin.h>

namespace stquant::avx512 {
#define STQ_LANES 8
#define STQ_NAME "avx512"
#include "kernels.h"
}  // namespace stquant::avx512
