/* The operations of rust/core/src/kernel/{sums,combine,grid}.rs as the obvious loops: the same operations in the same
 * order, fma where a multiply and an add are fused, so the same bits. */
#include "kernels.h"
#include <math.h>
#include <string.h>

#define LANES 16
/* Elements of a slice: a portion is checked slice by slice before it is added. */
#define SLICE (63 * 4096)

static double joined(double *lanes) {
    for (size_t width = LANES / 2; width > 0; width /= 2)
        for (size_t lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

/* a = the inner product in float64, b and g = the vectors */
void dot(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    const float *restrict x = b, *restrict y = gradient;
    double lanes[LANES] = {0};
    size_t i = 0;
    (void)c, (void)s;
    for (; i + LANES <= n; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) lanes[lane] = fma((double)x[i + lane], (double)y[i + lane], lanes[lane]);
    for (size_t lane = 0; i + lane < n; lane++) lanes[lane] = fma((double)x[i + lane], (double)y[i + lane], lanes[lane]);
    *(double *)a = joined(lanes);
}

/* a = to, g = x, s: the factor */
void axpy(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    float *restrict to = a;
    const float *restrict x = gradient;
    const double by = s[0];
    (void)b, (void)c;
    for (size_t i = 0; i < n; i++) to[i] = (float)fma(by, (double)x[i], (double)to[i]);
}

static int64_t nearest(double x, double *whole) {
    const double round = 6755399441055744.0, shifted = x + round;
    int64_t bits, zero;
    memcpy(&bits, &shifted, sizeof bits);
    memcpy(&zero, &round, sizeof zero);
    *whole = shifted - round;
    return bits - zero;
}

/* a and b = the lanes of a sum, c = one word for the largest magnitude, g = a portion, s: the inverse of the high
 * lane's unit */
void add_portion(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    for (size_t from = 0; from < n; from += SLICE) {
        const size_t len = n - from < SLICE ? n - from : SLICE;
        int64_t *restrict high = (int64_t *)a + from, *restrict low = (int64_t *)b + from;
        const float *restrict x = (const float *)gradient + from;
        const double scale = s[0], unit = 1099511627776.0;
        float largest = 0;
        for (size_t i = 0; i < len; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        *(volatile float *)c = largest;
        for (size_t i = 0; i < len; i++) {
            double whole, rest;
            const double units = (double)x[i] * scale;
            high[i] += nearest(units, &whole);
            low[i] += nearest((units - whole) * unit, &rest);
        }
    }
}
