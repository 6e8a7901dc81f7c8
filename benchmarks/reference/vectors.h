/* The loops of vectors.c, for one type of REAL. */

/* a = the inner product in float64, b and g = the vectors */
void NAME(dot)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    const REAL *restrict x = b, *restrict y = g;
    double lanes[LANES] = {0};
    size_t i = 0;
    (void)c, (void)s;
    for (; i + LANES <= n; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) lanes[lane] = fma((double)x[i + lane], (double)y[i + lane], lanes[lane]);
    for (size_t lane = 0; i + lane < n; lane++) lanes[lane] = fma((double)x[i + lane], (double)y[i + lane], lanes[lane]);
    *(double *)a = joined(lanes);
}

static REAL NAME(largest)(size_t n, const REAL *restrict x) {
    REAL lanes[APART] = {0}, largest = 0;
    size_t i = 0;
    for (; i + APART <= n; i += APART)
        for (size_t lane = 0; lane < APART; lane++) {
            const REAL magnitude = ABSOLUTE(x[i + lane]);
            lanes[lane] = magnitude > lanes[lane] ? magnitude : lanes[lane];
        }
    for (; i < n; i++) largest = ABSOLUTE(x[i]) > largest ? ABSOLUTE(x[i]) : largest;
    for (size_t lane = 0; lane < APART; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    return largest;
}

/* a = the largest magnitude in float64, g = the vector */
void NAME(max_abs)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    (void)b, (void)c, (void)s;
    *(double *)a = (double)NAME(largest)(n, g);
}

/* a = to, g = x, s: the factor */
void NAME(axpy)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    REAL *restrict to = a;
    const REAL *restrict x = g;
    const double by = s[0];
    (void)b, (void)c;
    for (size_t i = 0; i < n; i++) to[i] = (REAL)fma(by, (double)x[i], (double)to[i]);
}

/* a = to, which is the first source as well; b and g = the other sources, s: three factors */
void NAME(combine)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    REAL *restrict to = a;
    const REAL *restrict x = b, *restrict y = g;
    const double own = s[0], by_x = s[1], by_y = s[2];
    (void)c;
    for (size_t i = 0; i < n; i++)
        to[i] = (REAL)fma(by_y, (double)y[i], fma(by_x, (double)x[i], own * (double)to[i]));
}

/* a = to, b and g = the factors */
void NAME(multiply)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    REAL *restrict to = a;
    const REAL *restrict x = b, *restrict y = g;
    (void)c, (void)s;
    for (size_t i = 0; i < n; i++) to[i] = (REAL)((double)x[i] * (double)y[i]);
}

/* a and b = the lanes of a sum, c = one word for the largest magnitude, g = a portion, s: the inverse of the high
 * lane's unit */
void NAME(add_portion)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    const size_t slice = SLICE_BYTES / sizeof(REAL);
    for (size_t from = 0; from < n; from += slice) {
        const size_t len = n - from < slice ? n - from : slice;
        int64_t *restrict high = (int64_t *)a + from, *restrict low = (int64_t *)b + from;
        const REAL *restrict x = (const REAL *)g + from;
        const double scale = s[0], unit = 1099511627776.0;
        *(volatile REAL *)c = NAME(largest)(len, x);
        for (size_t i = 0; i < len; i++) {
            double whole, rest;
            const double units = (double)x[i] * scale;
            high[i] += nearest(units, &whole);
            low[i] += nearest((units - whole) * unit, &rest);
        }
    }
}

/* a = to, b = the high lanes of a sum, g = its low lanes, s: the high lane's unit */
void NAME(end_sum)(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    REAL *restrict to = a;
    const int64_t *restrict high = b, *restrict low = g;
    const double unit = s[0], below = 1.0 / 1099511627776.0, above = 4294967296.0;
    (void)c;
    for (size_t i = 0; i < n; i++) {
        const int64_t carry = (low[i] + ((int64_t)1 << 39)) >> 40, units = high[i] + carry;
        const double fraction = exact(low[i] - (carry << 40)) * below;
        const int64_t top = (units + ((int64_t)1 << 31)) >> 32;
        const double far = exact(top) * above, near = exact(units - (top << 32));
        const double sum = far + near, left = near - (sum - far);
        to[i] = (REAL)((sum + (left + fraction)) * unit);
    }
}
