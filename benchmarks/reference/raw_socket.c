/* The raw-socket reference of transport.py: what a push and a pull of N bytes of float32 cost with nothing in between.
 *
 *   raw_socket server LARGEST [unix] [spin]         listens on a free port of 127.0.0.1, or on a Unix socket without a file;
 *                                                   prints the port or name, serves one client
 *   raw_socket client PORT LARGEST [unix] [spin]    reads lines "BYTES REPETITIONS" from standard input, answers each with
 *                                                   one line: the nanoseconds of every repetition
 *
 * One repetition: the client sends N bytes in pieces of at most PIECE bytes; the server applies w -= lr * g to each
 * piece as it is complete; when all have come it answers the N bytes of w. One thread on each side, which sleeps in recv, or
 * with `spin` looks again, lets others run meanwhile, and sleeps only after some milliseconds, so that neither takes a core
 * between two lines. TCP_NODELAY, all buffers touched before the first repetition. LARGEST is the largest N.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 1 << 20, MOST_SPINS = 20000 };

static int over_unix, spins;

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static char *touched(size_t bytes) {
    char *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    check(memory != NULL, "aligned_alloc");
    memset(memory, 0, bytes);
    return memory;
}

/* Returns 0 where the peer has closed the connection. */
static int receive(int fd, char *to, size_t bytes) {
    int looks = 0;
    while (bytes > 0) {
        ssize_t got = recv(fd, to, bytes, spins && looks < MOST_SPINS ? MSG_DONTWAIT : 0);
        if (got < 0 && looks < MOST_SPINS && errno == EAGAIN) {
            looks++;
            sched_yield();
            continue;
        }
        looks = 0;
        check(got >= 0, "recv");
        if (got == 0) return 0;
        to += got;
        bytes -= (size_t)got;
    }
    return 1;
}

static void transmit(int fd, const char *from, size_t bytes) {
    while (bytes > 0) {
        ssize_t sent = send(fd, from, bytes, MSG_NOSIGNAL);
        check(sent > 0, "send");
        from += sent;
        bytes -= (size_t)sent;
    }
}

static size_t piece_at(size_t at, size_t bytes) { return bytes - at < PIECE ? bytes - at : PIECE; }

/* A socket of the asked kind, and the address that a number stands for. */
static int make(int number, struct sockaddr_storage *address, socklen_t *length) {
    memset(address, 0, sizeof *address);
    if (over_unix) {
        struct sockaddr_un *un = (struct sockaddr_un *)address;
        un->sun_family = AF_UNIX;
        *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                              (size_t)sprintf(un->sun_path + 1, "fastps raw %d", number));
    } else {
        struct sockaddr_in *in = (struct sockaddr_in *)address;
        in->sin_family = AF_INET;
        in->sin_port = htons((uint16_t)number);
        in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        *length = sizeof *in;
    }
    int fd = socket(over_unix ? AF_UNIX : AF_INET, SOCK_STREAM, 0);
    check(fd >= 0, "socket");
    return fd;
}

/* TCP sends at once, and makes its buffers larger by itself; a Unix socket gets room for a piece, as fastps asks for. */
static void set_up(int fd) {
    int one = 1, piece = PIECE;
    if (over_unix) {
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &piece, sizeof piece);
    } else {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
}

static void serve(size_t largest) {
    struct sockaddr_storage address;
    socklen_t length;
    int number = over_unix ? getpid() : 0, listener = make(number, &address, &length);
    check(bind(listener, (struct sockaddr *)&address, length) == 0, "bind");
    check(listen(listener, 1) == 0, "listen");
    check(getsockname(listener, (struct sockaddr *)&address, &length) == 0, "getsockname");
    printf("%d\n", over_unix ? number : ntohs(((struct sockaddr_in *)&address)->sin_port));
    fflush(stdout);

    char *values = touched(largest), *gradient = touched(PIECE);
    int fd = accept(listener, NULL, NULL);
    check(fd >= 0, "accept");
    set_up(fd);
    uint64_t bytes;
    while (receive(fd, (char *)&bytes, sizeof bytes)) {
        check(bytes <= largest, "message too large");
        for (size_t at = 0; at < bytes; at += PIECE) {
            size_t piece = piece_at(at, bytes);
            check(receive(fd, gradient, piece), "the client went away");
            float *restrict w = (float *)(values + at);
            const float *restrict g = (const float *)gradient;
            for (size_t i = 0; i < piece / sizeof *w; i++) w[i] -= 0.01f * g[i];
        }
        for (size_t at = 0; at < bytes; at += PIECE) transmit(fd, values + at, piece_at(at, bytes));
    }
}

static uint64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void drive(int number, size_t largest) {
    struct sockaddr_storage address;
    socklen_t length;
    int fd = make(number, &address, &length);
    check(connect(fd, (struct sockaddr *)&address, length) == 0, "connect");
    set_up(fd);
    /* The header lies before the gradient, so that a small push is one segment. */
    char *message = touched(64 + largest), *gradient = message + 64, *values = touched(largest);
    unsigned long bytes, repetitions;
    while (scanf("%lu %lu", &bytes, &repetitions) == 2) {
        check(bytes <= largest, "message too large");
        for (; repetitions > 0; repetitions--) {
            uint64_t start = now(), header = bytes;
            memcpy(gradient - sizeof header, &header, sizeof header);
            size_t first = piece_at(0, bytes);
            transmit(fd, gradient - sizeof header, sizeof header + first);
            for (size_t at = first; at < bytes; at += PIECE) transmit(fd, gradient + at, piece_at(at, bytes));
            check(receive(fd, values, bytes), "the server went away");
            printf("%lu ", (unsigned long)(now() - start));
        }
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    while (argc > 3) {
        if (strcmp(argv[argc - 1], "unix") == 0) over_unix = 1;
        else if (strcmp(argv[argc - 1], "spin") == 0) spins = 1;
        else break;
        argc--;
    }
    if (argc == 3 && strcmp(argv[1], "server") == 0) {
        serve(strtoul(argv[2], NULL, 10));
    } else if (argc == 4 && strcmp(argv[1], "client") == 0) {
        drive(atoi(argv[2]), strtoul(argv[3], NULL, 10));
    } else {
        fprintf(stderr, "usage: raw_socket server LARGEST [unix] [spin] | raw_socket client PORT LARGEST [unix] [spin]\n");
        return 2;
    }
    return 0;
}
