/* copies.c: preloaded, counts the bytes that memcpy and memmove move in a process, whoever calls them across a library
 * boundary: libtirpc, librpcrdma, the program. What glibc does internally is not counted. A process that receives
 * SIGUSR1, or that ends, writes the number into the file that COPIES names, followed by librpcrdma's own count of the
 * payload bytes that it copied. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static _Atomic uint64_t copied;

uint64_t bench_copied(void)
{
    return atomic_load_explicit(&copied, memory_order_relaxed);
}

static void count(size_t bytes)
{
    atomic_fetch_add_explicit(&copied, bytes, memory_order_relaxed);
}

/* A string instruction, so that the compiler makes no call of memcpy of it. */
static void forwards(char *to, const char *from, size_t bytes)
{
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
}

void *memcpy(void *restrict to, const void *restrict from, size_t bytes)
{
    count(bytes);
    forwards(to, from, bytes);
    return to;
}

void *memmove(void *to, const void *from, size_t bytes)
{
    count(bytes);
    char *t = to;
    const char *f = from;
    if ((uintptr_t)t - (uintptr_t)f >= bytes) {
        forwards(t, f, bytes);
    } else {
        while (bytes-- > 0)
            ((volatile char *)t)[bytes] = f[bytes];
    }
    return to;
}

/* struct rpcrdma_stats: bytes_copied is its seventh counter. */
static int (*counters)(uint64_t *, size_t);

/* Async-signal-safe, and without a copy of its own. */
static void report(int signal)
{
    (void)signal;
    const char *path = getenv("COPIES");
    int fd = path == NULL ? -1 : open(path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd < 0)
        return;
    uint64_t stats[7] = {0};
    if (counters != NULL)
        counters(stats, sizeof stats);
    uint64_t numbers[] = {stats[6], bench_copied()};
    char digits[48];
    size_t at = sizeof digits;
    for (int i = 0; i < 2; i++) {
        digits[--at] = i == 0 ? '\n' : ' ';
        do
            digits[--at] = (char)('0' + numbers[i] % 10);
        while ((numbers[i] /= 10) > 0);
    }
    if (write(fd, digits + at, sizeof digits - at) < 0)
        abort();
    close(fd);
}

__attribute__((constructor)) static void begin(void)
{
    counters = (int (*)(uint64_t *, size_t))dlsym(RTLD_DEFAULT, "rpcrdma_stats_get");
    struct sigaction action = {.sa_handler = report, .sa_flags = SA_RESTART};
    if (getenv("COPIES") != NULL)
        sigaction(SIGUSR1, &action, NULL);
}

__attribute__((destructor)) static void end(void)
{
    report(0);
}
