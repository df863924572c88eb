/* local_hostile.c: memory that one end rewrites at random. See local.h. */
#define _GNU_SOURCE
#include "local.h"
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* ---- The hostile end ---------------------------------------------------------------------------------------------- */

static bool hostile;
static pthread_mutex_t targets_lock = PTHREAD_MUTEX_INITIALIZER;
/* Our own mappings of the latest segments that the library has mapped: they stay when it unmaps its own. */
enum { TARGETS = 8 };
static struct target {
    unsigned char *at;
    unsigned temper;
} targets[TARGETS];
static unsigned next_target, made;

void *real_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
    return (void *)syscall(SYS_mmap, at, length, protection, flags, fd, offset);
}

static void add_target(int fd)
{
    void *at = real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        return;
    pthread_mutex_lock(&targets_lock);
    struct target *target = &targets[next_target++ % TARGETS];
    if (target->at != NULL)
        munmap(target->at, SEGMENT);
    *target = (struct target){at, (unsigned)(next_random(&seed) % 5)};
    pthread_mutex_unlock(&targets_lock);
}

/* Segments that this process has mapped. */
atomic_int mapped;

/* The library's calls of mmap(2) come here. A hostile process also writes its segment by itself. */
void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
    if (fd >= 0 && length == SEGMENT && (protection & PROT_WRITE) == 0 && getenv("NO_SEGMENTS") != NULL) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    int error = errno;
    if (hostile && fd >= 0 && length == SEGMENT && (protection & PROT_WRITE) != 0) {
        /* Before the library seals it. */
        add_target(fd);
        errno = error;
    }
    void *result = real_mmap(at, length, protection, flags, fd, offset);
    mapped += result != MAP_FAILED && fd >= 0 && length == SEGMENT && (flags & MAP_SHARED) != 0;
    return result;
}

/* And those of ftruncate(2), once for each segment that it makes: a hostile server writes its client's, too. */
int ftruncate64(int fd, off64_t length)
{
    int result = (int)syscall(SYS_ftruncate, fd, length), error = errno;
    if (hostile && result == 0 && length == SEGMENT && (++made % 4) == 0) {
        told->theirs++;
        add_target(fd);
    }
    errno = error;
    return result;
}

int munmap(void *at, size_t length)
{
    mapped -= length == SEGMENT;
    return (int)syscall(SYS_munmap, at, length);
}

static void rewrite_word(unsigned char *segment, uint64_t *state)
{
    static const int words[] = {PRODUCED, BASE, WIDE, CONSUMED, WAITS, WANTS_ROOM, COMPANY, WOKEN, RUNG, SHOWN};
    _Atomic uint64_t *word = (_Atomic uint64_t *)segment + words[next_random(state) % (sizeof words / sizeof *words)];
    uint64_t value = next_random(state);
    switch (next_random(state) % 4) {
    case 0: atomic_store(word, value); break;
    case 1: atomic_fetch_add(word, value % 64); break;
    case 2: atomic_fetch_sub(word, value % 4096); break;
    default: atomic_store(word, value % (2 * RING)); break;
    }
}

static void rewrite(struct target *target, uint64_t *state)
{
    unsigned char *segment = target->at;
    switch (target->temper) {
    case 0: /* data: most connections stay, and their messages are anything */
    case 1:
        for (int i = 0; i < 8; i++)
            ((_Atomic unsigned char *)segment)[HEAD + next_random(state) % (target->temper ? RING + OUTBOX : 512)] =
                (unsigned char)next_random(state);
        break;
    case 2: /* where the ring begins, how long it is, and who waits */
        ((_Atomic uint64_t *)segment)[(int[]){BASE, WIDE, WAITS, SHOWN}[next_random(state) % 4]] = next_random(state) >> next_random(state) % 64;
        break;
    case 3: /* numbers */
        rewrite_word(segment, state);
        break;
    default: /* every word, and half of the time one where short messages lie */
        for (int i = 0; i < 64; i++)
            ((_Atomic uint64_t *)segment)[next_random(state) % ((i % 2 ? SEGMENT : 16 << 10) / 8)] = next_random(state);
        if (next_random(state) % 4 == 0)
            rewrite_word(segment, state);
    }
}

static void *rewrite_all(void *unused)
{
    (void)unused;
    uint64_t state = seed | 1;
    for (;;) {
        pthread_mutex_lock(&targets_lock);
        for (int i = 0; i < TARGETS; i++) {
            if (targets[i].at != NULL) {
                rewrite(&targets[i], &state);
                told->rewritten++;
            }
        }
        pthread_mutex_unlock(&targets_lock);
        /* So that some connections work for a while, and the peers get a processor. */
        uint64_t pause = next_random(&state) % 64;
        if (pause < 8)
            nanosleep(&(struct timespec){.tv_nsec = (long)(pause * pause * 10000)}, NULL);
    }
    return NULL;
}

static void become_hostile(void)
{
    pthread_t thread;
    hostile = true;
    REQUIRE(pthread_create(&thread, NULL, rewrite_all, NULL) == 0);
}

static void be_hostile_server(int to)
{
    become_hostile();
    be_server(to);
}

static void be_hostile_client(int port)
{
    become_hostile();
    call_anyhow(port);
}

/* ---- The tests ---------------------------------------------------------------------------------------------------- */

static void say_what_was_rewritten(const char *who)
{
    printf("      %s: %lu connections, %lu calls tried, %lu answered rightly, %lu timed out; memory rewritten %lu times, of %lu "
           "connections the client's too; %lu right calls beside\n",
           who, told->connected, told->tried, told->answered, told->timed_out, told->rewritten, told->theirs, told->right);
}

void random_client(double seconds)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20) && told->shared == 1, "an honest client calls over shared memory");
    struct held before = holds(server.pid);
    sow(seed, 7);
    pid_t client = part(be_hostile_client, server.port);
    double until = now() + seconds * 1000;
    bool all = true;
    while (now() < until && all)
        all = lives(server.pid) && lives(honest) && lives(client) && sees_answers(5);
    check(all, "a client rewrites the memory for %.0f s: the server serves another one", seconds);
    told->stop = true;
    check(lives(server.pid), "the server lives");
    check(told->connected > 2 && told->rewritten > 1000, "there was something to rewrite");
    check(ends(client, 30000 + 10 * patience()), "the client itself ends as it is told to");
    check(ends(honest, 60000 + 10 * patience()), "every call of the honest client had the right answer");
    say_what_was_rewritten("a client that rewrites memory");
    told->stop = false;
    honest = part(be_honest, server.port);
    check(sees_answers(20), "another client is served afterwards");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000), "it has right answers");
    end(server.pid);
}

static int honest_port;
static void be_target(int port)
{
    pthread_t beside;
    REQUIRE(pthread_create(&beside, NULL, honest_thread, (void *)(intptr_t)honest_port) == 0);
    call_anyhow(port);
    REQUIRE(pthread_join(beside, NULL) == 0);
}

void random_server(double seconds)
{
    struct server honest = start_server(be_server), server = start_server(be_hostile_server);
    honest_port = honest.port;
    pid_t client = part(be_target, server.port);
    check(sees_answers(20) && told->shared == 1, "a client calls an honest server over shared memory");
    double until = now() + seconds * 1000;
    bool all = true;
    while (now() < until && all)
        all = lives(server.pid) && lives(honest.pid) && lives(client) && sees_answers(5);
    check(all, "a server rewrites the memory for %.0f s: its client is served by another one", seconds);
    check(lives(server.pid), "the server itself lives");
    told->stop = true;
    check(ends(client, 60000 + 10 * patience()), "the client lives, and nothing but its results was written");
    check(told->connected > 2 && told->rewritten > 1000, "there was something to rewrite");
    check((double)told->late / 1000 < 1000 + patience(), "no call ends later than its time-out says: by %.1f ms",
          (double)told->late / 1000);
    check((double)told->connecting / 1000 < 10000 + patience(), "no CLIENT takes longer than a startup may: %.1f ms",
          (double)told->connecting / 1000);
    say_what_was_rewritten("a server that rewrites memory");
    end(server.pid);
    end(honest.pid);
}
