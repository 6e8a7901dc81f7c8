/* What the C references of kernels.py share: one signature, and a clock around repetitions. */
#ifndef FASTPS_KERNELS_H
#define FASTPS_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* One pass over n elements. `a`, `b`, `c` are changed or written, `g` is read, `s` holds float32 scalars; what they mean
 * is said at each kernel. */
typedef void kernel(size_t n, void *a, void *b, void *c, const void *g, const float *s);

#endif
