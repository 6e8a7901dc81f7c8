/* The operations of rust/core/src/kernel/{sums,combine,grid}.rs as the obvious loops, for float32 and float64: the same
 * operations in the same order, fma where a multiply and an add are fused, so the same bits. */
#include "kernels.h"
#include <math.h>
#include <string.h>

#define LANES 16
/* Elements whose largest magnitudes are kept apart. */
#define APART 64
/* Bytes of a slice: a portion is checked slice by slice before it is added. */
#define SLICE_BYTES (63 * 4096 * 4)

static double joined(double *lanes) {
    for (size_t width = LANES / 2; width > 0; width /= 2)
        for (size_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

static int64_t nearest(double x, double *whole) {
    const double round = 6755399441055744.0, shifted = x + round;
    int64_t bits, zero;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&zero, &round, sizeof zero);
    *whole = shifted - round;
    return bits - zero;
}

/* The float equal to an integer below 2^51 in magnitude. */
static double exact(int64_t n) {
    const double round = 6755399441055744.0;
    uint64_t bits;
    double shifted;
    memcpy(&bits, &round, sizeof bits);
    bits += (uint64_t)n;
    memcpy(&shifted, &bits, sizeof shifted);
    return shifted - round;
}

#define REAL float
#define ABSOLUTE fabsf
#define NAME(operation) operation##32
#include "vectors.h"
#undef REAL
#undef ABSOLUTE
#undef NAME

#define REAL double
#define ABSOLUTE fabs
#define NAME(operation) operation##64
#include "vectors.h"
