/* The loops of hogwild.py: stochastic gradient descent of threads that share plain memory, with nothing around it. The rules
 * are those of rust/core/src/hogwild/linear/mod.rs and rust/core/src/hogwild/factorize/mod.rs, the order is shuffled by the same generator, and
 * threads take blocks in turn. The race is one in C's eyes, too; compilers and CPUs make plain loads and stores of it. */
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { BLOCK = 128, RATINGS = 256 };

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t split_mix(uint64_t *state) {
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static void shuffle(uint32_t *order, size_t n, uint64_t seed) {
    for (size_t i = n - 1; i > 0; i--) {
        const size_t j = (size_t)(((unsigned __int128)split_mix(&seed) * (i + 1)) >> 64);
        const uint32_t other = order[i];
        order[i] = order[j];
        order[j] = other;
    }
}

struct linear {
    size_t n, features, threads, thread;
    const int32_t *starts, *columns;
    const float *values, *y;
    const uint32_t *order;
    float *w;
    double *intercept, alpha, first;
    uint64_t t;
};

/* Logistic loss, L2, the schedule "optimal", an intercept that each thread keeps for a block. */
static void *linear_part(void *argument) {
    const struct linear a = *(struct linear *)argument;
    for (size_t from = a.thread * BLOCK; from < a.n; from += a.threads * BLOCK) {
        const size_t to = from + BLOCK < a.n ? from + BLOCK : a.n;
        const double before = *a.intercept;
        double intercept = before, t = (double)(a.t + from);
        double scale = (a.first + (double)a.t - 2) / (a.first + t - 2);
        for (size_t place = from; place < to; place++, t++) {
            const size_t i = a.order[place];
            const int32_t *columns = a.columns + a.starts[i];
            const float *values = a.values + a.starts[i];
            const size_t nnz = (size_t)(a.starts[i + 1] - a.starts[i]);
            float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
            size_t k = 0;
            for (; k + 4 <= nnz; k += 4) {
                s0 += a.w[columns[k]] * values[k];
                s1 += a.w[columns[k + 1]] * values[k + 1];
                s2 += a.w[columns[k + 2]] * values[k + 2];
                s3 += a.w[columns[k + 3]] * values[k + 3];
            }
            for (; k < nnz; k++) s0 += a.w[columns[k]] * values[k];
            const double p = scale * ((double)s0 + s1 + s2 + s3) + intercept, y = a.y[i];
            const double eta = 1 / (a.alpha * (a.first + t - 1));
            const double update = eta * y / (1 + exp(y * p));
            scale *= 1 - a.alpha * eta;
            const float step = (float)(update / scale);
            for (k = 0; k < nnz; k++) a.w[columns[k]] += step * values[k];
            intercept += .01 * update;
        }
        *a.intercept += intercept - before;
    }
    return NULL;
}

static void together(void *(*part)(void *), void *parts, size_t size, size_t threads) {
    pthread_t others[threads];
    for (size_t k = 1; k < threads; k++) {
        if (pthread_create(&others[k], NULL, part, (char *)parts + k * size) != 0) abort();
    }
    part(parts);
    for (size_t k = 1; k < threads; k++) pthread_join(others[k], NULL);
}

/* Trains from nothing; gives the nanoseconds. */
uint64_t logistic(size_t n, size_t features, const int32_t *starts, const int32_t *columns, const float *values, const float *y,
                  uint32_t *order, size_t threads, size_t epochs, float *w, double *intercept, double alpha) {
    const uint64_t start = now();
    for (size_t j = 0; j < features; j++) w[j] = 0;
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    *intercept = 0;
    const double first = 1 / (sqrt(1 / sqrt(alpha)) * alpha);
    for (size_t epoch = 0; epoch < epochs; epoch++) {
        shuffle(order, n, epoch + 1);
        struct linear parts[threads];
        for (size_t k = 0; k < threads; k++) {
            parts[k] = (struct linear){n, features, threads, k, starts, columns, values, y, order, w, intercept, alpha, first, 1 + epoch * n};
        }
        together(linear_part, parts, sizeof *parts, threads);
        const double t = (double)(epoch * n), scale = (first + t - 1) / (first + t + (double)n - 1);
        for (size_t j = 0; j < features; j++) w[j] = (float)(scale * w[j]);
    }
    return now() - start;
}

struct factors {
    size_t n, rank, threads, thread;
    const int32_t *users, *items;
    const float *values;
    const uint32_t *order;
    float *p, *q, lr, reg;
    int locks; /* 0: none, 1: one per row, 2: one for all */
    pthread_spinlock_t *of_users, *of_items;
};

/* Biases are the two last factors, of which the partner is held at 1. */
static void *factors_part(void *argument) {
    const struct factors a = *(struct factors *)argument;
    const size_t stride = (a.rank + 2 + 15) / 16 * 16;
    for (size_t from = a.thread * RATINGS; from < a.n; from += a.threads * RATINGS) {
        const size_t to = from + RATINGS < a.n ? from + RATINGS : a.n;
        for (size_t place = from; place < to; place++) {
            const size_t i = a.order[place];
            float *p = a.p + stride * (size_t)a.users[i], *q = a.q + stride * (size_t)a.items[i];
            if (a.locks == 1) {
                pthread_spin_lock(&a.of_users[a.users[i]]);
                pthread_spin_lock(&a.of_items[a.items[i]]);
            } else if (a.locks == 2) {
                pthread_spin_lock(a.of_users);
            }
            float sums[16] = {0}, dot = 0;
            for (size_t k = 0; k < stride; k += 16) {
                for (size_t j = 0; j < 16; j++) sums[j] += p[k + j] * q[k + j];
            }
            for (size_t j = 0; j < 16; j++) dot += sums[j];
            const float step = a.lr * (a.values[i] - dot), kept = 1 - a.lr * a.reg;
            for (size_t k = 0; k < stride; k++) {
                const float x = p[k], y = q[k];
                p[k] = kept * x + step * y;
                q[k] = kept * y + step * x;
            }
            p[a.rank + 1] = 1;
            q[a.rank] = 1;
            if (a.locks == 1) {
                pthread_spin_unlock(&a.of_items[a.items[i]]);
                pthread_spin_unlock(&a.of_users[a.users[i]]);
            } else if (a.locks == 2) {
                pthread_spin_unlock(a.of_users);
            }
        }
    }
    return NULL;
}

/* Epochs over ratings, from small factors; gives the nanoseconds. */
uint64_t factorize(size_t n, size_t users, size_t items, size_t rank, const int32_t *of_user, const int32_t *of_item,
                   const float *values, uint32_t *order, size_t threads, size_t epochs, int locks, float lr, float reg) {
    const size_t stride = (rank + 2 + 15) / 16 * 16;
    float *p = aligned_alloc(64, 4 * stride * users), *q = aligned_alloc(64, 4 * stride * items);
    pthread_spinlock_t *lu = malloc(sizeof *lu * users), *li = malloc(sizeof *li * items);
    if (!p || !q || !lu || !li) abort();
    uint64_t seed = 1;
    for (size_t k = 0; k < stride * (users + items); k++) {
        const size_t at = k < stride * users ? k : k - stride * users, j = at % stride;
        const float random = (float)((double)(split_mix(&seed) >> 11) / 9007199254740992.0 - .5) * .3f;
        *(k < stride * users ? p + at : q + at) = j < rank ? random : 0;
    }
    for (size_t u = 0; u < users; u++) pthread_spin_init(&lu[u], 0), p[stride * u + rank + 1] = 1;
    for (size_t i = 0; i < items; i++) pthread_spin_init(&li[i], 0), q[stride * i + rank] = 1;
    for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
    const uint64_t start = now();
    for (size_t epoch = 0; epoch < epochs; epoch++) {
        shuffle(order, n, epoch + 1);
        struct factors parts[threads];
        for (size_t k = 0; k < threads; k++) {
            parts[k] = (struct factors){n, rank, threads, k, of_user, of_item, values, order, p, q, lr, reg, locks, lu, li};
        }
        together(factors_part, parts, sizeof *parts, threads);
    }
    const uint64_t took = now() - start;
    free(p), free(q), free((void *)lu), free((void *)li);
    return took;
}
