/* The shared-memory reference of transport.py: what a push and a pull of N bytes of float32 cost between two processes
 * with nothing but memory in between.
 *
 *   shared_memory LARGEST [sleep]    forks a server; then reads lines "BYTES REPETITIONS" from standard input and answers each
 *                            with one line: the nanoseconds of every repetition
 *
 * One repetition: the client copies N bytes of gradient into memory that both map, in pieces of at most PIECE bytes, and
 * counts them; the server applies w -= lr * g to each piece as it is counted, where it lies, writes the new values beside
 * it, and counts them; the client copies each piece of values out as it is counted. Both ends spin on the counts and let
 * others run meanwhile; after some milliseconds, or with `sleep` as soon as there is nothing to do, they wait in the kernel
 * (futex), so that neither takes a core between two lines. All memory is touched before the first repetition.
 * LARGEST is the largest N.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 18, SPINS = 2000, MOST_SPINS = 5000 * SPINS };

/* Pieces since the beginning, going round after 2^32, and whether somebody sleeps for more. */
struct count {
    _Atomic uint32_t value, asleep;
};

/* Each on a cache line of its own. */
struct counts {
    _Alignas(128) struct count pushed;
    _Alignas(128) struct count applied;
    _Alignas(128) _Atomic uint64_t bytes;
};

static int sleeps;

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void *shared(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    memset(memory, 0, bytes);
    return memory;
}

static void await(struct count *count, uint32_t wanted) {
    const unsigned long most = sleeps ? 0 : MOST_SPINS;
    for (unsigned long k = 1;; k++) {
        const uint32_t now = atomic_load_explicit(&count->value, memory_order_acquire);
        if ((int32_t)(now - wanted) >= 0) return;
        if (k > most) {
            atomic_store(&count->asleep, 1);
            if (atomic_load(&count->value) == now) syscall(SYS_futex, &count->value, FUTEX_WAIT, now, NULL, NULL, 0);
            atomic_store(&count->asleep, 0);
        } else if (k % SPINS == 0) {
            sched_yield();
        }
    }
}

static void tell(struct count *count, uint32_t value) {
    atomic_store(&count->value, value);
    if (atomic_load(&count->asleep)) syscall(SYS_futex, &count->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static size_t piece_at(size_t at, size_t bytes) { return bytes - at < PIECE ? bytes - at : PIECE; }

static void serve(struct counts *counts, const char *gradient, char *answer, size_t largest) {
    float *values = aligned_alloc(64, largest + 64);
    check(values != NULL, "aligned_alloc");
    memset(values, 0, largest);
    for (uint32_t done = 0;;) {
        await(&counts->pushed, done + 1);
        const size_t bytes = atomic_load(&counts->bytes);
        for (size_t at = 0; at < bytes; at += PIECE) {
            await(&counts->pushed, done + 1);
            float *restrict w = values + at / sizeof *w, *restrict out = (float *)(answer + at);
            const float *restrict g = (const float *)(gradient + at);
            for (size_t i = 0; i < piece_at(at, bytes) / sizeof *w; i++) out[i] = w[i] -= 0.01f * g[i];
            tell(&counts->applied, ++done);
        }
    }
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void drive(struct counts *counts, char *gradient, const char *answer, size_t largest) {
    char *from = aligned_alloc(64, largest + 64), *values = aligned_alloc(64, largest + 64);
    check(from != NULL && values != NULL, "aligned_alloc");
    memset(from, 0, largest);
    memset(values, 0, largest);
    unsigned long bytes, repetitions;
    uint32_t pushed = 0, pulled = 0;
    while (scanf("%lu %lu", &bytes, &repetitions) == 2) {
        check(bytes <= largest, "message too large");
        for (; repetitions > 0; repetitions--) {
            const uint64_t start = now();
            atomic_store(&counts->bytes, bytes);
            for (size_t at = 0; at < bytes; at += PIECE) {
                memcpy(gradient + at, from + at, piece_at(at, bytes));
                tell(&counts->pushed, ++pushed);
            }
            for (size_t at = 0; at < bytes; at += PIECE) {
                await(&counts->applied, ++pulled);
                memcpy(values + at, answer + at, piece_at(at, bytes));
            }
            printf("%lu ", (unsigned long)(now() - start));
        }
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    sleeps = argc == 3 && strcmp(argv[2], "sleep") == 0;
    if (argc != 2 + sleeps) {
        fprintf(stderr, "usage: shared_memory LARGEST [sleep]\n");
        return 2;
    }
    const size_t largest = strtoul(argv[1], NULL, 10);
    struct counts *counts = shared(sizeof *counts);
    char *gradient = shared(largest), *answer = shared(largest);
    const pid_t server = fork();
    check(server >= 0, "fork");
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(counts, gradient, answer, largest);
    }
    drive(counts, gradient, answer, largest);
    kill(server, SIGKILL);
    return 0;
}
