/* Steps of optimizers.c on bfloat16 values, rounded stochastically as rust/core/src/kernel/rounding.rs describes. a = the
 * values, b and c = state, float32. The seed is 7; the last scalar is the number of steps taken before this one. */
#include "kernels.h"
#include <string.h>

enum { LANES = 32, BLOCK = 8 * LANES };

void sgd(size_t n, void *a, void *b, void *c, const void *gradient, const float *s);
void adamw(size_t n, void *a, void *b, void *c, const void *gradient, const float *s);

/* The 16 bits that each of BLOCK elements adds: Philox4x32-10 of LANES counters. */
static void noise(uint64_t counter, uint32_t step, uint16_t *restrict to) {
    uint32_t x0[LANES], x1[LANES], x2[LANES], x3[LANES], k0 = 7, k1 = 0;
    for (int i = 0; i < LANES; i++) {
        x0[i] = (uint32_t)(counter + i), x1[i] = (uint32_t)((counter + i) >> 32);
        x2[i] = step, x3[i] = 0x80000000u;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < LANES; i++) {
            const uint64_t p = 0xD2511F53ull * x0[i], q = 0xCD9E8D57ull * x2[i];
            x0[i] = (uint32_t)(q >> 32) ^ x1[i] ^ k0, x2[i] = (uint32_t)(p >> 32) ^ x3[i] ^ k1;
            x1[i] = (uint32_t)q, x3[i] = (uint32_t)p;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    for (int i = 0; i < LANES; i++) {
        const uint32_t words[4] = {x0[i], x1[i], x2[i], x3[i]};
        for (int j = 0; j < 4; j++) to[8 * i + 2 * j] = (uint16_t)words[j], to[8 * i + 2 * j + 1] = words[j] >> 16;
    }
}

static inline uint16_t rounded(uint32_t bits, uint32_t added) {
    const uint32_t magnitude = bits & 0x7FFFFFFFu, up = (magnitude + added) >> 16;
    return (uint16_t)((bits >> 16 & 0x8000u) | (up > 0x7F7Fu ? 0x7F7Fu : up));
}

/* Blocks that fit into the first cache: widen, step, round. Finite values only. */
static inline void steps(kernel *step, size_t n, void *a, float *b, float *c, const float *g, const float *s, float taken) {
    uint16_t *restrict p = a, u[BLOCK];
    float wide[BLOCK];
    uint32_t bits[BLOCK];
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t m = n - at < BLOCK ? n - at : BLOCK;
        for (size_t i = 0; i < m; i++) bits[i] = (uint32_t)p[at + i] << 16;
        memcpy(wide, bits, sizeof wide);
        step(m, wide, b ? b + at : 0, c ? c + at : 0, g + at, s);
        memcpy(bits, wide, sizeof bits);
        noise(at / 8, (uint32_t)taken, u);
        for (size_t i = 0; i < m; i++) p[at + i] = rounded(bits[i], u[i]);
    }
}

/* s: -lr, steps */
void sgd_bfloat16(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    steps(sgd, n, a, b, c, gradient, s, s[1]);
}

/* s: those of adamw, steps */
void adamw_bfloat16(size_t n, void *a, void *b, void *c, const void *gradient, const float *s) {
    steps(adamw, n, a, b, c, gradient, s, s[7]);
}
