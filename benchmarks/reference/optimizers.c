/* The optimizers of rust/core/src/kernel/optim as the obvious loops: the same operations in the same order, fmaf where a
 * multiply and an add are fused, so the same bits. a = parameters, b and c = state in the order of torch's names,
 * g = gradient. Not the first step of momentum, which only copies the gradient. */
#include "kernels.h"
#include <math.h>

#define ARRAYS                                                                                                       \
    float *restrict p = a, *restrict x = b, *restrict y = c;                                                         \
    const float *restrict g = gradient;                                                                              \
    (void)x, (void)y

/* s: -lr */
void sgd(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0];
    for (size_t i = 0; i < n; i++) p[i] = fmaf(neg_lr, g[i], p[i]);
}

/* s: -lr, momentum; b = velocity */
void momentum(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0], mu = s[1];
    for (size_t i = 0; i < n; i++) {
        x[i] = fmaf(1.0f, g[i], x[i] * mu);
        p[i] = fmaf(neg_lr, x[i], p[i]);
    }
}

/* s: -lr, momentum; b = velocity */
void nesterov(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0], mu = s[1];
    for (size_t i = 0; i < n; i++) {
        x[i] = fmaf(1.0f, g[i], x[i] * mu);
        p[i] = fmaf(neg_lr, fmaf(mu, x[i], g[i]), p[i]);
    }
}

/* s: -lr, eps; b = sum of squares */
void adagrad(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0], eps = s[1];
    for (size_t i = 0; i < n; i++) {
        x[i] = fmaf(g[i], g[i], x[i]);
        p[i] += neg_lr * g[i] / (sqrtf(x[i]) + eps);
    }
}

/* s: -lr, eps, alpha, 1 - alpha; b = mean square */
void rmsprop(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0], eps = s[1], alpha = s[2], rest = s[3];
    for (size_t i = 0; i < n; i++) {
        x[i] = fmaf(rest * g[i], g[i], x[i] * alpha);
        p[i] += neg_lr * g[i] / (sqrtf(x[i]) + eps);
    }
}

/* s: -lr, eps, rho, 1 - rho; b, c = mean squares of gradients and of updates */
void adadelta(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    ARRAYS;
    const float neg_lr = s[0], eps = s[1], rho = s[2], rest = s[3];
    for (size_t i = 0; i < n; i++) {
        x[i] = fmaf(rest * g[i], g[i], x[i] * rho);
        const float dx = sqrtf(y[i] + eps) / sqrtf(x[i] + eps) * g[i];
        y[i] = fmaf(rest * dx, dx, y[i] * rho);
        p[i] = fmaf(neg_lr, dx, p[i]);
    }
}

/* s: -size, eps, 1 - beta1, beta2, 1 - beta2, root of the second correction, factor on p; b, c = moments */
static inline void adam_step(size_t n, void *a, void *b, void *c, const void *gradient, const float *s, int decay) {
    ARRAYS;
    const float neg_size = s[0], eps = s[1], rest1 = s[2], beta2 = s[3], rest2 = s[4], root = s[5], shrink = s[6];
    for (size_t i = 0; i < n; i++) {
        const float old = decay ? p[i] * shrink : p[i];
        x[i] = fmaf(rest1, g[i] - x[i], x[i]);
        y[i] = fmaf(rest2 * g[i], g[i], y[i] * beta2);
        p[i] = old + neg_size * x[i] / (sqrtf(y[i]) / root + eps);
    }
}

void adam(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    adam_step(n, a, b, c, gradient, s, 0);
}

void adamw(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    adam_step(n, a, b, c, gradient, s, 1);
}
