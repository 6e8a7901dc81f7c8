/* The codecs of rust/core/src/kernel/codec (protos/README.md has the bytes) as one-pass loops. Encoders: a = body, b = residual
 * of error feedback, g = values. Decoders: a = values, g = body. Every n that comes here is a multiple of 1024.
 *
 * Compilers do not vectorise the packing of sign bits, so that part is written with AVX-512 where there is AVX-512: else
 * the one-bit reference would be a trivial opponent. */
#include "kernels.h"
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { INT8_BLOCK = 64, BIT_BLOCK = 1024, SMALLEST = 32 };

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t largest_exponent(const float *restrict v, size_t n) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t magnitude = bits_of(v[i]) & 0x7FFFFFFFu;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest >> 23;
}

static inline uint8_t int8_block(const float *restrict v, int8_t *restrict q) {
    uint32_t e = largest_exponent(v, INT8_BLOCK);
    if (e < SMALLEST) e = 0;
    const float factor = e == 0 ? 0.0f : float_of((133 + 127 - e) << 23), round = 12582912.0f;
    for (int i = 0; i < INT8_BLOCK; i++) {
        int32_t r = (int32_t)bits_of(v[i] * factor + round) - (int32_t)bits_of(round);
        r = r < -127 ? -127 : r;
        q[i] = (int8_t)(r > 127 ? 127 : r);
    }
    return (uint8_t)e;
}

static inline float int8_factor(uint8_t e) { return e == 0 ? 0.0f : float_of(((uint32_t)e - 6) << 23); }

void int8_encode(size_t n, void *a, void *b, void *c, const void *values, const float *s) {
    uint8_t *restrict scales = a;
    int8_t *restrict q = (int8_t *)a + n / INT8_BLOCK;
    const float *restrict v = values;
    (void)b, (void)c, (void)s;
    for (size_t k = 0; k < n / INT8_BLOCK; k++) scales[k] = int8_block(v + k * INT8_BLOCK, q + k * INT8_BLOCK);
}

void int8_feedback(size_t n, void *a, void *b, void *c, const void *values, const float *s) {
    uint8_t *restrict scales = a;
    int8_t *restrict q = (int8_t *)a + n / INT8_BLOCK;
    const float *restrict g = values;
    float *restrict e = b;
    (void)c, (void)s;
    for (size_t at = 0; at < n; at += INT8_BLOCK) {
        float v[INT8_BLOCK];
        for (int i = 0; i < INT8_BLOCK; i++) v[i] = g[at + i] + e[at + i];
        const float factor = int8_factor(scales[at / INT8_BLOCK] = int8_block(v, q + at));
        for (int i = 0; i < INT8_BLOCK; i++) e[at + i] = v[i] - (float)q[at + i] * factor;
    }
}

void int8_decode(size_t n, void *a, void *b, void *c, const void *body, const float *s) {
    float *restrict v = a;
    const uint8_t *restrict scales = body;
    const int8_t *restrict q = (const int8_t *)body + n / INT8_BLOCK;
    (void)b, (void)c, (void)s;
    for (size_t at = 0; at < n; at += INT8_BLOCK) {
        const float factor = int8_factor(scales[at / INT8_BLOCK]);
        for (int i = 0; i < INT8_BLOCK; i++) v[at + i] = (float)q[at + i] * factor;
    }
}

/* Packs the signs; returns how many are negative. */
static inline uint32_t pack_signs(const float *restrict v, uint8_t *restrict out) {
    uint32_t negative = 0;
    for (int i = 0; i < BIT_BLOCK; i += 16) {
#ifdef __AVX512DQ__
        const uint16_t word = _cvtmask16_u32(_mm512_movepi32_mask(_mm512_loadu_si512(v + i)));
#else
        uint16_t word = 0;
        for (int j = 0; j < 16; j++) word |= (uint16_t)((bits_of(v[i + j]) >> 31) << j);
#endif
        memcpy(out + i / 8, &word, sizeof word);
        negative += (uint32_t)__builtin_popcount(word);
    }
    return negative;
}

static inline float mean_of(uint64_t sum, uint64_t count, float unit) {
    return count == 0 ? 0.0f : (float)((256 * sum + count / 2) / count) * unit;
}

static inline void bit_block(const float *restrict v, float *restrict means, uint8_t *restrict out) {
    const uint32_t negative = pack_signs(v, out), e = largest_exponent(v, BIT_BLOCK);
    means[0] = means[1] = 0.0f;
    if (e < SMALLEST) return;
    uint64_t all = 0, below = 0;
    for (int k = 0; k < BIT_BLOCK; k += 128) {
        uint32_t part = 0, part_below = 0;
        for (int i = 0; i < 128; i++) {
            const uint32_t bits = bits_of(v[k + i]), f = (bits >> 23) & 0xFF, down = e - f < 31 ? e - f : 31;
            const uint32_t m = ((bits & 0x007FFFFFu) | 0x00800000u) >> down;
            part += m;
            part_below += m & (uint32_t)((int32_t)bits >> 31);
        }
        all += part;
        below += part_below;
    }
    const float unit = float_of((e + 127 - 158) << 23);
    means[0] = mean_of(all - below, BIT_BLOCK - negative, unit);
    means[1] = mean_of(below, negative, unit);
}

static inline void unpack(const float *restrict means, const uint8_t *restrict bits, float *restrict v) {
    const float positive = means[0], negative = -means[1];
    for (int i = 0; i < BIT_BLOCK; i += 16) {
#ifdef __AVX512F__
        uint16_t word;
        memcpy(&word, bits + i / 8, sizeof word);
        _mm512_storeu_ps(v + i, _mm512_mask_blend_ps(word, _mm512_set1_ps(positive), _mm512_set1_ps(negative)));
#else
        for (int j = 0; j < 16; j++) v[i + j] = bits[(i + j) / 8] >> (j % 8) & 1 ? negative : positive;
#endif
    }
}

void onebit_encode(size_t n, void *a, void *b, void *c, const void *values, const float *s) {
    float *restrict means = a;
    uint8_t *restrict bits = (uint8_t *)(means + 2 * (n / BIT_BLOCK));
    const float *restrict v = values;
    (void)b, (void)c, (void)s;
    for (size_t k = 0; k < n / BIT_BLOCK; k++) bit_block(v + k * BIT_BLOCK, means + 2 * k, bits + k * BIT_BLOCK / 8);
}

void onebit_feedback(size_t n, void *a, void *b, void *c, const void *values, const float *s) {
    float *restrict means = a, *restrict e = b;
    uint8_t *restrict bits = (uint8_t *)(means + 2 * (n / BIT_BLOCK));
    const float *restrict g = values;
    (void)c, (void)s;
    for (size_t k = 0; k < n / BIT_BLOCK; k++) {
        const size_t at = k * BIT_BLOCK;
        float v[BIT_BLOCK];
        for (int i = 0; i < BIT_BLOCK; i++) v[i] = g[at + i] + e[at + i];
        bit_block(v, means + 2 * k, bits + at / 8);
        const float positive = means[2 * k], negative = -means[2 * k + 1];
        for (int i = 0; i < BIT_BLOCK; i++) e[at + i] = v[i] - (bits_of(v[i]) >> 31 ? negative : positive);
    }
}

void onebit_decode(size_t n, void *a, void *b, void *c, const void *body, const float *s) {
    float *restrict v = a;
    const float *restrict means = body;
    const uint8_t *restrict bits = (const uint8_t *)(means + 2 * (n / BIT_BLOCK));
    (void)b, (void)c, (void)s;
    for (size_t k = 0; k < n / BIT_BLOCK; k++) unpack(means + 2 * k, bits + k * BIT_BLOCK / 8, v + k * BIT_BLOCK);
}
