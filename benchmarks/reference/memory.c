/* What memory allows, and how every reference is timed: whole calls by a monotonic clock, on one thread or on several
 * that share the elements. */
#include "kernels.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Reads g; the maximum keeps the loop alive. a = one word */
void read_only(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    const uint32_t *restrict words = g;
    uint32_t largest = 0;
    (void)b, (void)c, (void)s;
    for (size_t i = 0; i < n; i++) largest = words[i] > largest ? words[i] : largest;
    *(volatile uint32_t *)a = largest;
}

/* a = target, g = source */
void copy(size_t n, void *a, void *b, void *c, const void *g, const float *s) {
    (void)b, (void)c, (void)s;
    memcpy(a, g, n * sizeof(float));
}

/* Ordinary memory of a C program, already touched. */
void *take(size_t bytes) {
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory != NULL) memset(memory, 0, bytes);
    return memory;
}

void give_back(void *memory) { free(memory); }

struct part {
    kernel *run;
    size_t n;
    char *a, *b, *c;
    const char *g;
    const float *s;
};

static void *run_part(void *argument) {
    const struct part *part = argument;
    part->run(part->n, part->a, part->b, part->c, part->g, part->s);
    return NULL;
}

/* Element-wise kernels of float32 only: each thread gets a run of whole cache lines. */
static void run_parts(kernel *run, size_t n, size_t threads, void *a, void *b, void *c, const void *g, const float *s) {
    struct part parts[threads];
    pthread_t others[threads];
    const size_t share = (n / threads + 1023) / 1024 * 1024;
    for (size_t k = 0; k < threads; k++) {
        const size_t from = k * share < n ? k * share : n, left = n - from, bytes = from * sizeof(float);
        parts[k] = (struct part){run, left < share ? left : share, (char *)a + bytes, b ? (char *)b + bytes : NULL,
                                 c ? (char *)c + bytes : NULL, (const char *)g + bytes, s};
        if (k > 0 && pthread_create(&others[k], NULL, run_part, &parts[k]) != 0) abort();
    }
    run_part(&parts[0]);
    for (size_t k = 1; k < threads; k++) pthread_join(others[k], NULL);
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Runs the kernel `repetitions` times and writes the nanoseconds of each. */
void repeat(kernel *run, size_t n, size_t threads, void *a, void *b, void *c, const void *g, const float *s,
            size_t repetitions, uint64_t *nanoseconds) {
    for (size_t r = 0; r < repetitions; r++) {
        const uint64_t start = now();
        if (threads == 1) {
            run(n, a, b, c, g, s);
        } else {
            run_parts(run, n, threads, a, b, c, g, s);
        }
        nanoseconds[r] = now() - start;
    }
}

/* As `repeat` on one thread, over `count` sets of small arrays, one after the other. */
void repeat_list(kernel *run, size_t n, size_t count, void **a, void **b, void **c, void **g, const float *s,
                 size_t repetitions, uint64_t *nanoseconds) {
    for (size_t r = 0; r < repetitions; r++) {
        const uint64_t start = now();
        for (size_t k = 0; k < count; k++) run(n, a[k], b[k], c[k], g[k], s);
        nanoseconds[r] = now() - start;
    }
}
