// What Python calls through ctypes: a pointer to each kernel for each dtype, named KERNEL_DTYPE.
#include "attention.h"
#include "layers.h"
#include "linear.h"

#define SHOW extern "C" __attribute__((visibility("default")))
#define KERNEL(name, T, dtype) SHOW void* const name##_##dtype = (void*)&tpserve::name<T>;
#define KERNELS(T, dtype)            \
  KERNEL(linear, T, dtype)           \
  KERNEL(rms_norm, T, dtype)         \
  KERNEL(add_rms_norm, T, dtype)     \
  KERNEL(rotate_and_store, T, dtype) \
  KERNEL(silu_and_mul, T, dtype)     \
  KERNEL(decode, T, dtype)

KERNELS(float, float32)
KERNELS(tpserve::bf16, bfloat16)

SHOW const int panel_width = tpserve::kWidth;
