// Everything that is compiled once per instruction set; included inside its namespace.
// clang-format off: the order matters, each header builds on those before
#include "../simd.h"
#include "../curves.h"
#include "../bytes.h"
#include "../packing.h"
#include "../random.h"
#include "../codec.h"
#include "../chunks.h"
#include "../momentum.h"
#include "../adam_passes.h"
#include "../adam.h"
#include "../sgd_lion.h"
#include "../transfers.h"
#include "../measure.h"
// clang-format on

extern const Kernels kernels;
const Kernels kernels{STQ_NAME,     adam_range,   sgd_range,   lion_range,     decode_range,
                      encode_range, recode_range, stats_range, measure_sampled};
