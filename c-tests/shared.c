/* Memory that two processes of one host share (RPCRDMA_PROVIDER=local): what only processes show.
 *
 *   shared random-client SECONDS SEED   a client rewrites what it shares with a server, at random
 *   shared random-server SECONDS SEED   a server does
 *   shared kill-clients COUNT SEED      clients are killed at random moments
 *   shared kill-servers COUNT SEED      servers are
 *   shared stopped                      either end is stopped
 *   shared handshake-client             other processes connect to the name at which a client waits
 *   shared handshake-server             a client answers a server's offer with anything but a segment
 *   shared silent-server                the same, and with nothing: ten seconds
 *   shared segment                      what a peer cannot do with the segment that it got
 *   shared outbox                       long calls that their client gives up before the server decodes them
 *   shared elsewhere                    a server whose loop is in another one, in a routine, or has been left
 *   shared idle COUNT                   figures: so many idle connections, and after a call of 64 MiB
 *   shared server                       prints "READY port", and serves
 *   shared client ADDRESS PORT          makes calls; prints "memory" or "no memory" for what they went through, and the error
 *
 * Linked with the library. The process that is started uses it only in its children, each of which has one part: so every end
 * is a process. PATIENCE: seconds that something may take longer than it would on an idle machine (2). NO_SEGMENTS: what peers
 * pass cannot be mapped. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netconfig.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpcrdma.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROG = 0x20004C59, LONGEST = 1 << 20, GUARD = 4096, CALL_TIME = 300 };
/* Procedures: of which SINK says how many bytes came, and LATE the same after a while, of bytes that are all alike. NEST has another loop in its routine, LEAVE leaves the loop, SLEEP keeps
 * it, and CALL_BACK has a thread call back meanwhile. */
enum { NOTHING, ECHO, SINK, LATE, NEST, LEAVE, SLEEP, CALL_BACK };
/* What the library shares: a page of words, a ring behind it, and the outbox. */
enum { HEAD = 4 << 10, RING = 4 << 20, OUTBOX = 4 << 20, SEGMENT = HEAD + RING + OUTBOX };
/* Of the words, by their places. */
enum { PRODUCED = 0, BASE = 1, WIDE = 2, CONSUMED = 16, WAITS = 32, WANTS_ROOM = 33, COMPANY = 34, WOKEN = 48, RUNG = 49, SHOWN = 64 };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s (errno %d)", __LINE__, #what, errno))

static int failed;

/* A line of the result. */
static void __attribute__((format(printf, 2, 3))) check(bool good, const char *format, ...)
{
    va_list values;
    failed += !good;
    printf("%s ", good ? "ok   " : "FAIL ");
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    putchar('\n');
}

/* Milliseconds. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

static double patience(void)
{
    const char *seconds = getenv("PATIENCE");
    return 1000.0 * (seconds != NULL ? atof(seconds) : 2);
}

static uint64_t seed = 1;
static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}
static uint64_t below(uint64_t limit) { return next_random(&seed) % limit; }
/* Each process has its own. */
static void sow(uint64_t from, uint64_t part)
{
    seed = from * 0x9E3779B97F4A7C15 + part * 0xD1342543DE82EF95 + 1;
    for (int i = 0; i < 8; i++)
        next_random(&seed);
}

/* ---- What the processes tell each other ---------------------------------------------------------------------------- */

static struct {
    atomic_bool stop;
    /* Of honest ends: calls that were answered rightly, in all, and connections over shared memory. */
    atomic_ulong right, shared;
    /* Of ends whose peer is not honest, or is killed. */
    atomic_ulong tried, answered, timed_out, connected;
    /* The longest time that a call has taken beyond its own time-out, in microseconds; that of making a CLIENT. */
    atomic_ulong late, connecting;
    /* Of the hostile end. */
    atomic_ulong rewritten, theirs;
    /* Of calls that were decoded late: those that came whole, those of which something else was decoded, and the others. */
    atomic_ulong whole, mixed, refused;
    atomic_int tcp_port;
} *told;

static void raise_to(atomic_ulong *most, double value)
{
    unsigned long was = atomic_load(most), is = value > 0 ? (unsigned long)value : 0;
    while (was < is && !atomic_compare_exchange_weak(most, &was, is))
        ;
}

/* ---- Processes ------------------------------------------------------------------------------------------------------ */

/* A part, which ends with us. */
static pid_t part(void (*run)(int), int argument)
{
    pid_t parent = getpid(), child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        run(argument);
        fflush(stdout);
        _exit(0);
    }
    return child;
}

/* Ends a part of which nothing is asked any more. */
static void end(pid_t pid)
{
    kill(pid, SIGKILL);
    kill(pid, SIGCONT);
    waitpid(pid, NULL, 0);
}

/* Whether a part has not ended. */
static bool lives(pid_t pid)
{
    siginfo_t ended = {0};
    return waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
}

/* Whether a part ends well, in time. */
static bool ends(pid_t pid, double milliseconds)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0), status = 0;
    REQUIRE(fd >= 0);
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    bool in_time = poll(&ended, 1, (int)milliseconds) == 1;
    close(fd);
    if (!in_time)
        kill(pid, SIGKILL);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    if (in_time && status != 0)
        warnx("a process has ended with status 0x%x", (unsigned)status);
    return in_time && status == 0;
}

static int entries(pid_t pid, const char *what)
{
    char path[64];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, what);
    DIR *folder = opendir(path);
    if (folder == NULL)
        err(1, "%s of a process that has ended?", path);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count - 2;
}
static int descriptors(pid_t pid) { return entries(pid, "fd"); }

/* Mappings of a process: all, or those that it shares with peers. */
static int mappings(pid_t pid, bool ours)
{
    char path[64], line[4352];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        count += !ours || strstr(line, "memfd:rpcrdma (") != NULL;
    fclose(file);
    return count;
}

struct held {
    int descriptors, segments, mappings;
};
static struct held holds(pid_t pid)
{
    return (struct held){descriptors(pid), mappings(pid, true), mappings(pid, false)};
}

/* Whether it comes to hold what it held: what its peers' ends leave to do takes a moment. The heap and its arenas may have
 * grown. */
static bool holds_again(pid_t pid, const char *who, struct held before)
{
    double until = now() + 5 * patience();
    struct held after;
    do {
        after = holds(pid);
        if (after.descriptors == before.descriptors && after.segments == before.segments &&
            after.mappings <= before.mappings + 8)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    } while (now() < until);
    bool same = after.descriptors == before.descriptors && after.segments == before.segments &&
                after.mappings <= before.mappings + 8;
    check(same, "%s holds what it held: %d descriptors and %d, %d segments and %d, %d mappings and %d", who,
          before.descriptors, after.descriptors, before.segments, after.segments, before.mappings, after.mappings);
    return same;
}

/* ---- The hostile end ------------------------------------------------------------------------------------------------ */

static bool hostile;
static pthread_mutex_t targets_lock = PTHREAD_MUTEX_INITIALIZER;
/* Mappings of our own of what the library has mapped: they stay when it unmaps its. The last ones. */
enum { TARGETS = 8 };
static struct target {
    unsigned char *at;
    unsigned temper;
} targets[TARGETS];
static unsigned next_target;

static void *real_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
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
static atomic_int mapped;

/* The library's calls of mmap(2) come here. A hostile process of the same user, or root's, makes the peer's segment writable for
 * itself too: it is its owner. */
void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
    if (fd >= 0 && length == SEGMENT && (protection & PROT_WRITE) == 0 && getenv("NO_SEGMENTS") != NULL) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *result = real_mmap(at, length, protection, flags, fd, offset);
    bool segment = result != MAP_FAILED && fd >= 0 && length == SEGMENT && (flags & MAP_SHARED) != 0;
    mapped += segment;
    if (hostile && segment) {
        int error = errno;
        if ((protection & PROT_WRITE) != 0) {
            add_target(fd);
        } else if ((next_target & 3) == 0 && fchmod(fd, 0600) == 0) {
            char path[64];
            snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
            int writable = open(path, O_RDWR | O_CLOEXEC);
            if (writable >= 0) {
                told->theirs++;
                add_target(writable);
                close(writable);
            }
        }
        errno = error;
    }
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
        /* Some connections get on for a while; and the peers have a processor. */
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

/* ---- Servers --------------------------------------------------------------------------------------------------------- */

struct data {
    u_int length;
    char *bytes;
};
static bool_t xdr_data(XDR *xdrs, struct data *data) { return xdr_bytes(xdrs, &data->bytes, &data->length, 65 << 20); }

/* Its client may have given it up by now, and something else may lie where it was. */
static void note_late(const struct data *data, bool decoded)
{
    bool alike = decoded && data->length == LONGEST && memcmp(data->bytes, data->bytes + 1, LONGEST - 1) == 0;
    (alike ? &told->whole : decoded ? &told->mixed : &told->refused)[0]++;
}

static void serve_elsewhere(rpcproc_t what, SVCXPRT *xprt);
static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    struct data data = {0};
    if (request->rq_proc == NOTHING || request->rq_proc >= NEST) {
        serve_elsewhere(request->rq_proc, xprt);
        svc_sendreply(xprt, (xdrproc_t)(void (*)(void))xdr_void, NULL);
        return;
    }
    if (request->rq_proc == LATE)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    bool decoded = svc_getargs(xprt, (xdrproc_t)xdr_data, (char *)&data);
    if (request->rq_proc == LATE)
        note_late(&data, decoded);
    if (!decoded)
        svcerr_decode(xprt);
    else if (request->rq_proc == ECHO)
        svc_sendreply(xprt, (xdrproc_t)xdr_data, (char *)&data);
    else
        svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&data.length);
    svc_freeargs(xprt, (xdrproc_t)xdr_data, (char *)&data);
}

/* The port goes to `to`; where that is standard output, with a word. */
static void be_server(int to)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    int port = ntohs(address.sin_port);
    if (to == 1) {
        printf("READY %d\n", port);
        fflush(stdout);
    } else {
        REQUIRE(write(to, &port, sizeof port) == sizeof port);
        close(to);
    }
    svc_run();
}
static void be_hostile_server(int to)
{
    become_hostile();
    be_server(to);
}

struct server {
    pid_t pid;
    int port;
};
static struct server start_server(void (*run)(int))
{
    int ends[2];
    struct server server;
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    server.pid = part(run, ends[1]);
    close(ends[1]);
    REQUIRE(read(ends[0], &server.port, sizeof server.port) == sizeof server.port);
    close(ends[0]);
    return server;
}

/* ---- Clients --------------------------------------------------------------------------------------------------------- */

static CLIENT *try_to_connect(const char *address, int port)
{
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct netbuf to = {sizeof server, sizeof server, &server};
    REQUIRE(inet_pton(AF_INET, address, &server.sin_addr) == 1);
    struct netconfig *netconfig = getnetconfigent("rdma");
    REQUIRE(netconfig != NULL);
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, 1, 0, 0);
    freenetconfigent(netconfig);
    return client;
}
static CLIENT *connected(int port)
{
    CLIENT *client = try_to_connect("127.0.0.1", port);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("an honest client cannot connect"));
    return client;
}

/* What a client sends and gets: in between of bytes that nobody may touch. */
struct buffers {
    char *sent;
    char *guarded;
};
static struct buffers make_buffers(void)
{
    struct buffers buffers = {malloc(LONGEST), malloc(GUARD + LONGEST + GUARD)};
    REQUIRE(buffers.sent != NULL && buffers.guarded != NULL);
    memset(buffers.guarded, 0x6b, GUARD + LONGEST + GUARD);
    return buffers;
}
static bool guarded(const struct buffers *buffers, u_int length)
{
    for (int i = 0; i < GUARD; i++)
        if (buffers->guarded[i] != 0x6b)
            return false;
    /* Behind the results there is nothing but the results of calls before. */
    for (u_int i = GUARD + LONGEST; i < GUARD + LONGEST + GUARD; i++)
        if (buffers->guarded[i] != 0x6b)
            return false;
    return length <= LONGEST;
}

static u_int length_of_call(uint64_t *state)
{
    /* Two that are long, one after the other, and the second one goes by the outbox. */
    static const u_int lengths[] = {0, 1, 100, 1000, 4096, 60000, 70000, 300000, 300001, 500000, LONGEST - 3, LONGEST};
    return lengths[next_random(state) % (sizeof lengths / sizeof *lengths)];
}

/* A call of `length` bytes; whether the answer is right, in *right. */
static enum clnt_stat echo(CLIENT *client, struct buffers *buffers, uint64_t *state, u_int length, long milliseconds,
                           bool *right)
{
    for (u_int i = 0; i < length; i += 64) {
        uint64_t number = next_random(state);
        memcpy(buffers->sent + i, &number, length - i < 8 ? length - i : 8);
    }
    struct data arguments = {length, buffers->sent}, results = {LONGEST, buffers->guarded + GUARD};
    struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};
    double began = now();
    enum clnt_stat status =
        clnt_call(client, ECHO, (xdrproc_t)xdr_data, (char *)&arguments, (xdrproc_t)xdr_data, (char *)&results, limit);
    raise_to(&told->late, (now() - began - (double)milliseconds) * 1000);
    if (!guarded(buffers, 0))
        errx(1, "bytes beside the results of a call were written");
    *right = status == RPC_SUCCESS && results.length == length && results.bytes == buffers->guarded + GUARD &&
             memcmp(results.bytes, arguments.bytes, length) == 0;
    return status;
}

/* Calls until it is told to stop, each of which has to be answered rightly. */
static void be_honest(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    CLIENT *client = connected(port);
    for (bool first = true; !told->stop; first = false) {
        bool right;
        u_int length = length_of_call(&state);
        enum clnt_stat status = echo(client, &buffers, &state, length, 60000, &right);
        if (!right)
            errx(1, "an honest call of %u bytes has status %d: %s", length, status, clnt_sperror(client, "call"));
        if (first) {
            told->shared += mappings(getpid(), true) >= 2;
        }
        told->right++;
    }
    clnt_destroy(client);
}
static void *honest_thread(void *port)
{
    be_honest((int)(intptr_t)port);
    return NULL;
}

/* Waits until `count` calls of the honest ones have been answered from here on. */
static bool sees_answers(unsigned long count)
{
    unsigned long from = told->right;
    double until = now() + 30000 + 10 * patience();
    while (told->right < from + count && now() < until)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return told->right >= from + count;
}

/* Calls of which nothing is expected but that they end: makes a CLIENT anew when one has failed. Until it is told to stop. */
static void call_anyhow(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    while (!told->stop) {
        double began = now();
        CLIENT *client = try_to_connect("127.0.0.1", port);
        raise_to(&told->connecting, (now() - began) * 1000);
        if (client == NULL)
            continue;
        told->connected++;
        for (int i = 0; i < 200 && !told->stop; i++) {
            bool right;
            told->tried++;
            enum clnt_stat status = echo(client, &buffers, &state, length_of_call(&state), CALL_TIME, &right);
            told->timed_out += status == RPC_TIMEDOUT;
            if (status != RPC_SUCCESS)
                break;
            told->answered += right;
        }
        clnt_destroy(client);
    }
}
static void be_hostile_client(int port)
{
    become_hostile();
    call_anyhow(port);
}

/* ---- Memory that is rewritten at random ------------------------------------------------------------------------------ */

static void say_what_was_rewritten(const char *who)
{
    printf("      %s: %lu connections, %lu calls tried, %lu answered rightly, %lu timed out; memory rewritten %lu times, of %lu "
           "connections the peer's too; %lu right calls beside\n",
           who, told->connected, told->tried, told->answered, told->timed_out, told->rewritten, told->theirs, told->right);
}

static void random_client(double seconds)
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

static void random_server(double seconds)
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

/* ---- Processes that are killed ---------------------------------------------------------------------------------------- */

/* At any moment: in the startup, in the first calls, in the middle of them. `tried`: how often it was waited before. */
static void wait_at_random(int tried)
{
    /* Where too few of the latest have got as far as a connection, it takes longer here. */
    static unsigned slowness = 1;
    static unsigned long before;
    if (tried % 16 == 15) {
        slowness *= told->connected - before < 6 && slowness < 64 ? 2 : 1;
        before = told->connected;
    }
    /* Microseconds; on a busy machine everything comes later. */
    uint64_t most = (uint64_t)((below(4) == 0 ? 1.5 : 7.5) * patience()) * slowness;
    long wait = (long)(most > 999999 ? below(999999) : below(most + 1)) * 1000;
    nanosleep(&(struct timespec){.tv_nsec = wait}, NULL);
}

static void kill_clients(int count)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20) && told->shared == 1, "an honest client calls over shared memory");
    struct held before = holds(server.pid);
    for (int i = 0; i < count; i++) {
        sow(seed, (uint64_t)i);
        pid_t victim = part(call_anyhow, server.port);
        wait_at_random(i);
        end(victim);
        if (!lives(server.pid) || !lives(honest))
            break;
    }
    printf("      %d clients were killed: %lu had connected, after %lu right answers\n", count, told->connected,
           told->answered);
    check(told->connected > (unsigned long)count / 4 && told->answered > (unsigned long)count / 4,
          "clients were killed in the midst of calls");
    check(lives(server.pid) && sees_answers(20), "the server lives, and serves");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + 10 * patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* Ports come from `from`, at the end a 0, and each is answered with a byte when the server there has gone. */
static int answers;
static void be_survivor(int from)
{
    pthread_t beside;
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    int port;
    REQUIRE(pthread_create(&beside, NULL, honest_thread, (void *)(intptr_t)honest_port) == 0);
    while (read(from, &port, sizeof port) == sizeof port && port != 0) {
        CLIENT *client = try_to_connect("127.0.0.1", port);
        if (client != NULL) {
            enum clnt_stat status = RPC_SUCCESS;
            told->connected++;
            while (status == RPC_SUCCESS) {
                bool right;
                status = echo(client, &buffers, &state, length_of_call(&state), 60000, &right);
                if (status == RPC_SUCCESS && !right)
                    errx(1, "a server that was killed has answered wrongly");
                told->answered += right;
            }
            clnt_destroy(client);
        }
        REQUIRE(write(answers, "", 1) == 1);
    }
    REQUIRE(pthread_join(beside, NULL) == 0);
}

static void kill_servers(int count)
{
    int ports[2], done[2];
    struct server honest = start_server(be_server);
    honest_port = honest.port;
    REQUIRE(pipe2(ports, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0);
    answers = done[1];
    pid_t client = part(be_survivor, ports[0]);
    close(done[1]);
    check(sees_answers(20) && told->shared == 1, "a client calls an honest server over shared memory");
    struct held before = holds(client);
    double longest = 0;
    bool all = true;
    for (int i = 0; i < count && all; i++) {
        sow(seed, (uint64_t)i);
        struct server server = start_server(be_server);
        REQUIRE(write(ports[1], &server.port, sizeof server.port) == sizeof server.port);
        wait_at_random(i);
        end(server.pid);
        double killed = now();
        struct pollfd seen = {.fd = done[0], .events = POLLIN};
        char byte;
        all = poll(&seen, 1, (int)(20000 + patience())) == 1 && read(done[0], &byte, 1) == 1;
        longest = now() - killed > longest ? now() - killed : longest;
        all = all && lives(client);
    }
    printf("      %d servers were killed: %lu connections, %lu right answers; the client knew after %.1f ms at most\n", count,
           told->connected, told->answered, longest);
    check(all && longest < 1000 + patience(), "a client knows soon that its server was killed");
    check(told->connected > (unsigned long)count / 4 && told->answered > (unsigned long)count / 4,
          "servers were killed in the midst of calls");
    check(lives(client) && sees_answers(20), "the client lives, and is served by others");
    holds_again(client, "the client", before);
    told->stop = true;
    REQUIRE(write(ports[1], &(int){0}, sizeof(int)) == sizeof(int));
    check(ends(client, 60000 + 10 * patience()), "every call to the honest server had the right answer");
    end(honest.pid);
}

/* ---- Processes that are stopped --------------------------------------------------------------------------------------- */

/* Stopped for certain. */
static void stop(pid_t pid)
{
    int status;
    REQUIRE(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
}

static pid_t stopped_server;
static void be_patient(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    bool right;
    static const u_int lengths[] = {100, 300000};
    CLIENT *client = connected(port);
    for (int i = 0; i < 2; i++) {
        REQUIRE(echo(client, &buffers, &state, lengths[i], 60000, &right) == RPC_SUCCESS && right);
        REQUIRE(kill(stopped_server, SIGSTOP) == 0);
        double began = now();
        enum clnt_stat status = RPC_SUCCESS;
        /* An answer that was on its way already may still come. */
        while (status == RPC_SUCCESS && now() - began < 5000) {
            began = now();
            status = echo(client, &buffers, &state, lengths[i], 500, &right);
        }
        double took = now() - began;
        if (status != RPC_TIMEDOUT || took < 490 || took > 1500 + patience())
            errx(1, "a call of %u bytes to a stopped server took %.0f ms: %s", lengths[i], took, clnt_sperror(client, "call"));
        told->tried++;
        REQUIRE(kill(stopped_server, SIGCONT) == 0);
        /* What was asked for is answered late, to nobody; what is asked for now is answered. */
        if (echo(client, &buffers, &state, lengths[i], 60000, &right) != RPC_SUCCESS || !right)
            errx(1, "after a server was stopped: %s", clnt_sperror(client, "call"));
        told->answered++;
    }
    clnt_destroy(client);
}

static void stopped(void)
{
    struct server server = start_server(be_server);
    stopped_server = server.pid;
    pid_t client = part(be_patient, server.port);
    check(ends(client, 30000 + 10 * patience()) && told->tried == 2,
          "calls to a stopped server end when their time is over");
    check(told->answered == 2, "when it goes on so do they");

    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    /* Stopped in the midst of calls, of which every one is to be right nevertheless. */
    pid_t sleeper = part(be_honest, server.port);
    sow(seed, 3);
    bool others = true, again = true;
    for (int i = 0; i < 8; i++) {
        others = others && sees_answers(20);
        wait_at_random(0);
        stop(sleeper);
        others = others && sees_answers(100);
        kill(sleeper, SIGCONT);
    }
    told->stop = true;
    again = ends(sleeper, 60000 + 10 * patience());
    check(others, "a server whose client is stopped in the midst of calls serves others");
    check(again, "when it goes on its calls have the right answers");
    check(ends(honest, 60000 + 10 * patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* ---- Handshakes -------------------------------------------------------------------------------------------------------- */

enum { SECRET = 16, FRAME = 20, MOST = 1024 };
static const char mark[] = "RPCRloc\x06";

static int memory(size_t bytes, int seals)
{
    int fd = memfd_create("rpcrdma", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && (seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}
enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

static socklen_t abstract(struct sockaddr_un *address, const unsigned char *public)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, "rpcrdma-", 8);
    memcpy(address->sun_path + 9, public, SECRET);
    return offsetof(struct sockaddr_un, sun_path) + 9 + SECRET;
}

/* Shows a secret of `length` bytes with so many descriptors. */
static bool show(int to, const unsigned char *secret, size_t length, const int *fds, int count)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {0};
    struct iovec bytes = {(void *)(uintptr_t)secret, length};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    return sendmsg(to, &message, MSG_NOSIGNAL) == (ssize_t)length;
}

/* What may be shown instead of a segment. */
enum thing {
    SILENCE, NO_DESCRIPTOR, SURPLUS, MANY, A_PIPE, UNSEALED, TRUNCATED, SHORTER, LONG_SECRET, SHORT_SECRET, A_SEGMENT, THINGS
};
static const char *const things[] = {"nothing", "no descriptor", "two descriptors", "253 descriptors", "a pipe",
                                     "memory without seals", "memory that is truncated then", "memory of another length",
                                     "a longer secret", "a part of the secret", "a segment"};

static bool show_thing(int to, enum thing thing, const unsigned char *secret)
{
    int fds[253], count = 1, pipes[2];
    unsigned char longer[SECRET + 1];
    bool shown;
    memcpy(longer, secret, SECRET);
    longer[SECRET] = 0;
    switch (thing) {
    case SILENCE: return true;
    case NO_DESCRIPTOR: return show(to, secret, SECRET, NULL, 0);
    case SURPLUS: count = 2; break;
    case MANY: count = 253; break;
    case A_PIPE:
        REQUIRE(pipe2(pipes, O_CLOEXEC) == 0);
        shown = show(to, secret, SECRET, pipes, 1);
        close(pipes[0]), close(pipes[1]);
        return shown;
    default: break;
    }
    fds[0] = memory(thing == SHORTER ? SEGMENT - 4096 : SEGMENT, thing == UNSEALED || thing == TRUNCATED ? 0 : SEALS);
    for (int i = 1; i < count; i++)
        fds[i] = fds[0];
    shown = show(to, longer, thing == LONG_SECRET ? SECRET + 1 : thing == SHORT_SECRET ? SECRET - 1 : SECRET, fds, count);
    if (thing == TRUNCATED)
        REQUIRE(ftruncate(fds[0], 0) == 0);
    close(fds[0]);
    return shown;
}

/* Reads as much as there has to be of a frame of the startup; its length, or 0 if the connection ends before. */
static size_t read_frame(int fd, unsigned char *frame)
{
    size_t have = 0, want = FRAME;
    while (have < want) {
        ssize_t n = recv(fd, frame + have, want - have, 0);
        if (n <= 0)
            return 0;
        have += (size_t)n;
        if (have == FRAME)
            want = FRAME + ((size_t)frame[18] << 8 | frame[19]);
        REQUIRE(want <= MOST);
    }
    return have;
}
/* What follows the mark; NULL where there is none. */
static const unsigned char *find_mark(const unsigned char *frame, size_t length, size_t bytes)
{
    const unsigned char *at = memmem(frame, length, mark, 8);
    return at != NULL && at + 8 + bytes <= frame + length ? at + 8 : NULL;
}

static int listen_at_loopback(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct timeval limit = {60, 0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&address, length) == 0 && listen(fd, 16) == 0);
    REQUIRE(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&address, &length) == 0);
    *port = ntohs(address.sin_port);
    return fd;
}
static int connect_to(int port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* Passes bytes on, both ways, until both ends have ended. */
static void *pass_on(void *pair)
{
    int *fds = pair, on = 1;
    struct pollfd ends[2] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    static char bytes[65536];
    for (int i = 0; i < 2; i++)
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (ends[0].fd >= 0 || ends[1].fd >= 0) {
        REQUIRE(poll(ends, 2, -1) > 0);
        for (int i = 0; i < 2; i++) {
            if (ends[i].revents == 0 || ends[i].fd < 0)
                continue;
            ssize_t n = recv(fds[i], bytes, sizeof bytes, 0);
            if (n <= 0) {
                shutdown(fds[1 - i], SHUT_WR);
                ends[i].fd = -1;
                continue;
            }
            for (ssize_t sent = 0, more; sent < n; sent += more)
                if ((more = send(fds[1 - i], bytes + sent, (size_t)(n - sent), MSG_NOSIGNAL)) <= 0)
                    break;
        }
    }
    close(fds[0]), close(fds[1]);
    return NULL;
}

/* Whether everybody sees this name of a socket. */
static bool name_is_seen(const unsigned char *public)
{
    static char all[4 << 20];
    char name[10 + SECRET] = "@rpcrdma-";
    int fd = open("/proc/net/unix", O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0);
    size_t length = 0;
    for (ssize_t n; (n = read(fd, all + length, sizeof all - length)) > 0;)
        length += (size_t)n;
    close(fd);
    /* A byte of 0 is written as @. */
    for (int i = 0; i < SECRET; i++)
        name[9 + i] = public[i] != 0 ? (char)public[i] : '@';
    return memmem(all, length, name, 9 + SECRET) != NULL;
}

/* The client of these tests: connects when it is told to, calls, ends, and tells how it was. */
struct outcome {
    bool connected, shared, right;
    double took;
    int before, after;
    char error[512];
};
static int commands, outcomes, proxy_port;
static void be_waiter(int unused)
{
    (void)unused;
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    char byte;
    while (read(commands, &byte, 1) == 1 && byte == 'c') {
        struct outcome outcome = {.right = true, .before = descriptors(getpid())};
        double began = now();
        CLIENT *client = try_to_connect("127.0.0.1", proxy_port);
        outcome.took = now() - began;
        if (client != NULL) {
            outcome.connected = true;
            for (int i = 0; i < 10 && outcome.right; i++)
                echo(client, &buffers, &state, length_of_call(&state), 60000, &outcome.right);
            outcome.shared = mappings(getpid(), true) == 2;
            clnt_destroy(client);
        } else {
            snprintf(outcome.error, sizeof outcome.error, "%s", clnt_spcreateerror("clnt_tli_create"));
        }
        outcome.after = descriptors(getpid());
        REQUIRE(write(outcomes, &outcome, sizeof outcome) == sizeof outcome);
    }
}

/* Has the client connect to the server through us, who hold its Request back, know its secret, and connect to its name `count`
 * times with that thing. */
static struct outcome connect_past(const struct server *server, int listener, int to, int from, enum thing thing, bool right,
                                   int count)
{
    static unsigned char secrets[2][SECRET] = {"of another one."};
    unsigned char frame[MOST];
    struct outcome outcome;
    REQUIRE(write(to, "c", 1) == 1);
    int pair[2] = {accept4(listener, NULL, NULL, SOCK_CLOEXEC)}, squatters[64];
    REQUIRE(pair[0] >= 0);
    size_t length = read_frame(pair[0], frame);
    const unsigned char *asked = find_mark(frame, length, 2 * SECRET);
    REQUIRE(asked != NULL);
    REQUIRE(name_is_seen(asked));
    struct sockaddr_un name;
    socklen_t size = abstract(&name, asked);
    for (int i = 0; i < count; i++) {
        squatters[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        /* The last ones find no place. */
        if (connect(squatters[i], (struct sockaddr *)&name, size) == 0)
            show_thing(squatters[i], thing, right ? asked + SECRET : secrets[0]);
    }
    /* That of a connection before is what others are shown later. */
    memcpy(secrets[0], asked + SECRET, SECRET);
    pair[1] = connect_to(server->port);
    REQUIRE(send(pair[1], frame, length, MSG_NOSIGNAL) == (ssize_t)length);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, pass_on, pair) == 0);
    REQUIRE(read(from, &outcome, sizeof outcome) == sizeof outcome);
    REQUIRE(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < count; i++)
        close(squatters[i]);
    return outcome;
}

static void handshake_client(void)
{
    int to[2], from[2];
    struct server server = start_server(be_server);
    int listener = listen_at_loopback(&proxy_port);
    REQUIRE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    commands = to[0], outcomes = from[1];
    pid_t client = part(be_waiter, 0);
    /* Its end is the end of what it tells. */
    close(from[1]);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held server_before = holds(server.pid);
    struct outcome outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "a client that nobody disturbs shares memory");
    struct held client_before = holds(client);
    for (int right = 0; right <= 1; right++) {
        for (enum thing thing = right ? NO_DESCRIPTOR : SILENCE; thing < (right ? A_SEGMENT : THINGS); thing++) {
            outcome = connect_past(&server, listener, to[1], from[0], thing, right, 12);
            check(outcome.connected && outcome.shared && outcome.right && outcome.after == outcome.before &&
                      outcome.took < 1000 + patience(),
                  "others show a waiting client %s with %s secret: it shares memory with its server%s%s", things[thing],
                  right ? "its" : "another", outcome.error[0] ? ": " : "", outcome.error);
        }
    }
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 60);
    check(!outcome.connected && outcome.after == outcome.before && outcome.took < 1000 + patience() &&
              strstr(outcome.error, "shares no memory") != NULL,
          "others take every place of a waiting client: it knows in time (%.0f ms) that it shares no memory%s%s", outcome.took,
          strstr(outcome.error, "shares no memory") ? "" : ": ", strstr(outcome.error, "shares no memory") ? "" : outcome.error);
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "the next time it does");
    holds_again(client, "the client", client_before);
    holds_again(server.pid, "the server", server_before);
    told->stop = true;
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 10000 + patience()) && ends(honest, 60000), "both clients end well");
    end(server.pid);
    close(listener);
}

/* ---- A hostile client, by hand ----------------------------------------------------------------------------------------- */

struct offer {
    int tcp, listener, peer;
    unsigned char frame[MOST];
    const unsigned char *secret;
    /* The server's segment. */
    int segment;
};

static int unix_listener(const unsigned char *public, int type, int backlog)
{
    struct sockaddr_un name;
    socklen_t size = abstract(&name, public);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&name, size) == 0 && listen(fd, backlog) == 0);
    return fd;
}

static void random_bytes(unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)below(256);
}

/* Sends a Request that asks for memory at this name. */
static int ask(const struct server *server, const unsigned char *public, const unsigned char *secret)
{
    unsigned char request[FRAME + 8 + 2 * SECRET] = "MPA ID Req Frame";
    request[17] = 1;
    request[19] = 8 + 2 * SECRET;
    memcpy(request + FRAME, mark, 8);
    memcpy(request + FRAME + 8, public, SECRET);
    memcpy(request + FRAME + 8 + SECRET, secret, SECRET);
    int fd = connect_to(server->port);
    REQUIRE(send(fd, request, sizeof request, MSG_NOSIGNAL) == sizeof request);
    return fd;
}

/* What a server offers who is asked for memory. */
static struct offer get_offer(const struct server *server)
{
    unsigned char public[SECRET], own[SECRET], shown[SECRET + 1];
    struct offer offer;
    random_bytes(public, SECRET);
    random_bytes(own, SECRET);
    offer.listener = unix_listener(public, SOCK_SEQPACKET, 4);
    offer.tcp = ask(server, public, own);
    size_t length = read_frame(offer.tcp, offer.frame);
    offer.secret = find_mark(offer.frame, length, SECRET);
    REQUIRE(length > 0 && offer.secret != NULL);
    offer.peer = accept4(offer.listener, NULL, NULL, SOCK_CLOEXEC);
    REQUIRE(offer.peer >= 0);
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    struct iovec bytes = {shown, sizeof shown};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    REQUIRE(recvmsg(offer.peer, &message, MSG_CMSG_CLOEXEC) == SECRET && memcmp(shown, own, SECRET) == 0);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    REQUIRE(header != NULL && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)));
    memcpy(&offer.segment, CMSG_DATA(header), sizeof(int));
    return offer;
}
static void close_offer(const struct offer *offer)
{
    close(offer->tcp), close(offer->listener), close(offer->peer), close(offer->segment);
}

/* Has the server look at the answer that it was given beside this connection. */
static bool have_it_look(int tcp) { return send(tcp, "", 1, MSG_NOSIGNAL) == 1; }

/* Whether the server ends this connection in time. */
static bool is_closed(int tcp, double milliseconds)
{
    struct pollfd ended = {.fd = tcp, .events = POLLIN};
    char byte;
    /* What it has said before that is not asked for. */
    while (poll(&ended, 1, (int)milliseconds) == 1)
        if (recv(tcp, &byte, 1, 0) <= 0)
            return true;
    return false;
}

static void handshake_server(bool and_wait)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held before = holds(server.pid);
    struct offer silent = {0};
    double since = now();
    if (and_wait)
        silent = get_offer(&server);
    unsigned char public[SECRET], other[SECRET];
    random_bytes(public, SECRET);
    random_bytes(other, SECRET);
    for (int right = 0; right <= 1; right++) {
        for (enum thing thing = NO_DESCRIPTOR; thing < (right ? A_SEGMENT : THINGS); thing++) {
            bool all = true;
            for (int i = 0; i < 12 && all; i++) {
                struct offer offer = get_offer(&server);
                all = show_thing(offer.peer, thing, right ? offer.secret : other) && have_it_look(offer.tcp) &&
                      is_closed(offer.tcp, 1000 + patience());
                close_offer(&offer);
            }
            check(all, "a client shows a server %s with %s secret: that is its end", things[thing],
                  right ? "the right" : "another");
        }
    }
    /* The way back leads nowhere, to another kind of socket, and to one that is full. */
    int fd = ask(&server, public, other);
    size_t length = read_frame(fd, silent.frame);
    check(length > 0 && find_mark(silent.frame, length, 0) == NULL && is_closed(fd, 1000 + patience()),
          "a name that leads nowhere: the server offers nothing, and ends");
    close(fd);
    int listener = unix_listener(public, SOCK_STREAM, 1);
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "another kind of socket: the same");
    close(fd), close(listener);
    listener = unix_listener(public, SOCK_SEQPACKET, 0);
    struct sockaddr_un name;
    socklen_t size = abstract(&name, public);
    int first = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    REQUIRE(connect(first, (struct sockaddr *)&name, size) == 0);
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "a socket that takes nobody more: the same");
    close(fd), close(first), close(listener);
    check(sees_answers(50), "the server serves all the while");
    if (and_wait) {
        bool closed = is_closed(silent.tcp, 10000 + patience());
        check(closed && now() - since > 9000, "a client that does not answer is given up after %.1f s",
              (now() - since) / 1000);
        close_offer(&silent);
    }
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* ---- The segment that a peer has ----------------------------------------------------------------------------------------- */

/* Another user than its owner's. */
static bool other_user_writes(int fd)
{
    int status;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
            _exit(2);
        prctl(PR_SET_DUMPABLE, 1);
        _exit(fchmod(fd, 0666) == 0 || open(path, O_RDWR) >= 0 || errno == ENOENT);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    return status != 0;
}

static void segment(void)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held before = holds(server.pid);
    struct offer offer = get_offer(&server);
    int fd = offer.segment;
    struct stat is;
    REQUIRE(fstat(fd, &is) == 0);
    check(is.st_size == SEGMENT && (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS, "a segment has its length, and its seals");
    check(ftruncate(fd, 0) < 0 && ftruncate(fd, 2 * SEGMENT) < 0, "its length cannot be changed");
    check(write(fd, "x", 1) < 0 && errno == EBADF, "its descriptor cannot be written to");
    check(real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES,
          "it cannot be mapped for writing");
    check(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT) < 0, "no hole can be made in it");
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (geteuid() == 0)
        check(!other_user_writes(fd), "another user cannot open it for writing");
    else
        printf("skip  another user cannot open it for writing (needs root)\n");
    int writable = fchmod(fd, 0600) == 0 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (writable >= 0) {
        printf("      its owner, and root, can open it for writing\n");
        check(ftruncate(writable, 0) < 0 && errno == EPERM && ftruncate(writable, 2 * SEGMENT) < 0,
              "its owner, who opens it for writing, cannot change its length");
        check(fcntl(writable, F_ADD_SEALS, F_SEAL_WRITE) < 0 && errno == EPERM, "nor its seals");
        /* All of it is a hole: nobody dies of that. */
        fallocate(writable, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT);
        int own = memory(SEGMENT, SEALS);
        REQUIRE(show(offer.peer, offer.secret, SECRET, &own, 1));
        _Atomic uint64_t *words = real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
        REQUIRE(words != MAP_FAILED);
        /* A message that is none. */
        atomic_store(&words[PRODUCED], 4096);
        REQUIRE(have_it_look(offer.tcp));
        check(is_closed(offer.tcp, 1000 + patience()), "the server ends this connection when nonsense comes");
        munmap(words, SEGMENT), close(own), close(writable);
    }
    close_offer(&offer);
    check(sees_answers(50), "the server serves others");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* ---- Long calls that are decoded late --------------------------------------------------------------------------------- */

static void be_hasty(int port)
{
    CLIENT *client = connected(port);
    char *bytes = malloc(LONGEST);
    REQUIRE(bytes != NULL);
    for (int i = 0; i < 120; i++) {
        struct data arguments = {LONGEST, bytes};
        u_int length = 0;
        /* Some are waited for, and others given up: before the server has seen them, or when it is about to decode them. */
        long milliseconds = i % 4 == 0 ? 60000 : (long)below(14) + 1;
        struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};
        memset(bytes, i + 1, LONGEST);
        enum clnt_stat status =
            clnt_call(client, LATE, (xdrproc_t)xdr_data, (char *)&arguments, (xdrproc_t)xdr_u_int, (char *)&length, limit);
        if (status == RPC_SUCCESS ? length != LONGEST : status != RPC_TIMEDOUT)
            errx(1, "call %d has status %d and length %u: %s", i, status, length, clnt_sperror(client, "call"));
        told->answered += status == RPC_SUCCESS;
        told->timed_out += status == RPC_TIMEDOUT;
        if (i % 10 == 9) {
            clnt_destroy(client);
            client = connected(port);
        }
    }
    clnt_destroy(client);
}
static void outbox(void)
{
    struct server server = start_server(be_server);
    pid_t clients[] = {part(be_hasty, server.port), part(be_hasty, server.port)};
    check(ends(clients[0], 60000 + patience()) && ends(clients[1], 60000 + patience()),
          "clients whose long calls are answered, or given up, end well");
    check(told->answered >= 60 && told->timed_out >= 20, "there are many of both: %lu and %lu", told->answered,
          told->timed_out);
    check(told->mixed == 0 && told->whole >= told->answered,
          "the server has decoded %lu of them as they were sent, %lu not at all, and %lu as something else", told->whole,
          told->refused, told->mixed);
    end(server.pid);
}

/* ---- A loop that is elsewhere -------------------------------------------------------------------------------------------- */

static const xdrproc_t nil = (xdrproc_t)(void (*)(void))xdr_void;
static jmp_buf left;
static CLIENT *back;
static atomic_bool sleeps;

/* A loop of the program's own. */
static void serve_for(double milliseconds)
{
    struct pollfd fds[64];
    for (double until = now() + milliseconds; now() < until;) {
        REQUIRE(svc_max_pollfd <= 64);
        memcpy(fds, svc_pollfd, (size_t)svc_max_pollfd * sizeof *fds);
        int ready = poll(fds, (nfds_t)svc_max_pollfd, 20);
        if (ready > 0)
            svc_getreq_poll(fds, ready);
    }
}
static void *call_back(void *unused)
{
    struct timeval limit = {2, 0};
    while (!sleeps)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (int i = 0; i < 5; i++)
        told->answered += clnt_call(back, NOTHING, nil, NULL, nil, NULL, limit) == RPC_SUCCESS;
    told->tried = 5;
    return unused;
}
static void serve_elsewhere(rpcproc_t what, SVCXPRT *xprt)
{
    pthread_t thread;
    switch (what) {
    case NEST: serve_for(3000); break;
    case LEAVE: svc_sendreply(xprt, nil, NULL); longjmp(left, 1);
    case SLEEP:
        sleeps = true;
        for (double until = now() + 15000; told->tried == 0 && now() < until;)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        break;
    case CALL_BACK:
        REQUIRE((back = rpcrdma_clnt_reverse(xprt, PROG, 1)) != NULL);
        REQUIRE(pthread_create(&thread, NULL, call_back, NULL) == 0);
        break;
    default: break;
    }
}

/* Serves the same over TCP, and goes on when its loop is left. */
static void be_elsewhere(int to)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    SVCXPRT *listener = svctcp_create(RPC_ANYSOCK, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    told->tcp_port = ntohs(address.sin_port);
    if (setjmp(left) == 0)
        be_server(to);
    for (;;)
        serve_for(1000);
}

static void answer_back(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    svc_sendreply(xprt, nil, NULL);
}
/* Calls without a pause, and serves calls back meanwhile. How long the longest call took, in told->late. */
static void be_busy(int port)
{
    struct timeval limit = {60, 0};
    CLIENT *client = connected(port);
    REQUIRE(rpcrdma_clnt_serve(client, PROG, 1, answer_back));
    for (bool first = true; !told->stop; first = false) {
        double began = now();
        if (clnt_call(client, first ? CALL_BACK : NOTHING, nil, NULL, nil, NULL, limit) != RPC_SUCCESS)
            errx(1, "%s", clnt_sperror(client, "call"));
        raise_to(&told->late, (now() - began) * 1000);
        told->right++;
    }
    clnt_destroy(client);
}
static int what_else;
static void be_other(int port)
{
    struct sockaddr_in server = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval limit = {60, 0};
    int fd = RPC_ANYSOCK;
    CLIENT *client = port == told->tcp_port ? clnttcp_create(&server, PROG, 1, &fd, 0, 0) : connected(port);
    REQUIRE(client != NULL);
    REQUIRE(clnt_call(client, (rpcproc_t)what_else, nil, NULL, nil, NULL, limit) == RPC_SUCCESS);
    clnt_destroy(client);
}

static void elsewhere(void)
{
    static const struct {
        int what;
        bool tcp;
        const char *text;
    } cases[] = {{NEST, false, "another loop in a routine"}, {NEST, true, "another loop in a routine of a TCP transport"},
                 {LEAVE, false, "another loop when a routine has left the first"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct server server = start_server(be_elsewhere);
        told->stop = false;
        pid_t busy = part(be_busy, server.port);
        check(sees_answers(500), "a client calls without a pause");
        told->late = 0;
        what_else = cases[i].what;
        pid_t other = part(be_other, cases[i].tcp ? told->tcp_port : server.port);
        bool ended = ends(other, 30000 + patience());
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        unsigned long since = told->right;
        check(ended && sees_answers(100) && told->late < 1500000, "it is heard by %s: after %.1f ms at most, %lu calls",
              cases[i].text, (double)told->late / 1000, since);
        told->stop = true;
        check(ends(busy, 70000), "its calls are answered");
        end(server.pid);
    }
    /* Whether the loop was about to look is chance. */
    for (int i = 0; i < 8; i++) {
        struct server server = start_server(be_elsewhere);
        told->stop = false;
        told->tried = told->answered = 0;
        pid_t busy = part(be_busy, server.port);
        bool good = sees_answers(500);
        what_else = SLEEP;
        pid_t other = part(be_other, told->tcp_port);
        good = ends(other, 30000 + patience()) && good;
        told->stop = true;
        good = ends(busy, 70000) && good && told->answered == told->tried;
        end(server.pid);
        if (!good || i == 7)
            check(good, "calls back of a thread are answered while a TCP transport keeps the loop: %lu of %lu", told->answered,
                  told->tried);
        if (!good)
            break;
    }
}

/* ---- Figures --------------------------------------------------------------------------------------------------------------- */

static void resident(pid_t pid, long *rss, long *pss, long *shared)
{
    char path[64], line[256];
    *rss = *pss = *shared = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)pid);
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "Rss: %ld", rss);
        sscanf(line, "Pss: %ld", pss);
        sscanf(line, "Pss_Shmem: %ld", shared);
    }
    fclose(file);
}
struct figures {
    long rss, pss, shared, descriptors, mappings;
};
static struct figures figures(pid_t pid)
{
    struct figures figures;
    resident(pid, &figures.rss, &figures.pss, &figures.shared);
    figures.descriptors = descriptors(pid), figures.mappings = mappings(pid, false);
    return figures;
}

/* Makes its connections, says so, and makes a long call each time that it is asked to. */
static int idle_count;
static void be_idle(int port)
{
    struct timeval limit = {120, 0};
    char byte;
    CLIENT **all = calloc((size_t)idle_count, sizeof *all), *last = connected(port);
    REQUIRE(all != NULL);
    for (int stage = 0; read(commands, &byte, 1) == 1 && byte == 'c'; stage++) {
        for (int i = 0; stage == 0 && i < idle_count; i++) {
            all[i] = connected(port);
            REQUIRE(clnt_call(all[i], NOTHING, (xdrproc_t)(void (*)(void))xdr_void, NULL, (xdrproc_t)(void (*)(void))xdr_void,
                              NULL, limit) == RPC_SUCCESS);
        }
        for (int calls = stage == 1 ? 1 : stage == 2 ? 3 : 0; calls > 0; calls--) {
            struct data data = {64 << 20, malloc(64 << 20)};
            u_int length = 0;
            REQUIRE(data.bytes != NULL);
            memset(data.bytes, 0x77, data.length);
            if (clnt_call(last, SINK, (xdrproc_t)xdr_data, (char *)&data, (xdrproc_t)xdr_u_int, (char *)&length, limit) !=
                    RPC_SUCCESS ||
                length != data.length)
                errx(1, "64 MiB: %s", clnt_sperror(last, "call"));
            free(data.bytes);
        }
        if (stage == 3) {
            for (int i = 0; i < idle_count; i++)
                clnt_destroy(all[i]);
        }
        REQUIRE(write(outcomes, "", 1) == 1);
    }
}

static void idle(int count)
{
    int to[2], from[2];
    char byte;
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if ((rlim_t)count + 100 > limit.rlim_cur)
        count = (int)limit.rlim_cur - 100;
    setenv("RPCRDMA_MAX_CALL", "128M", 1);
    struct server server = start_server(be_server);
    idle_count = count;
    REQUIRE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    commands = to[0], outcomes = from[1];
    pid_t client = part(be_idle, server.port);
    close(from[1]);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(50), "an honest client calls");
    told->stop = true;
    REQUIRE(ends(honest, 60000));
    /* The server sees that end, and the client's one connection is there. */
    for (double until = now() + 10000 + patience(); now() < until;) {
        if (mappings(server.pid, true) == 2 && mappings(client, true) == 2)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    const struct {
        const char *who;
        pid_t pid;
    } both[] = {{"server", server.pid}, {"client", client}};
    struct figures before[2] = {figures(server.pid), figures(client)};
    static const char *const stages[] = {"idle connections", "idle connections, after a call of 64 MiB on one more",
                                         "idle connections, after three more in a row, and a while",
                                         "connections that have ended"};
    struct figures quiet[2] = {0};
    const long given_back = 16 << 10;
    for (int stage = 0; stage < 4; stage++) {
        REQUIRE(write(to[1], "c", 1) == 1 && read(from[0], &byte, 1) == 1);
        /* It takes the server a moment to see so many ends, to be done with its last call, or to see that no other one comes. */
        for (double until = now() + 10000 + patience(); now() < until;) {
            bool ended = stage < 3 || descriptors(server.pid) <= before[0].descriptors;
            if (ended && (stage == 0 || figures(server.pid).rss - quiet[0].rss < given_back))
                break;
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        for (int i = 0; i < 2; i++) {
            struct figures is = figures(both[i].pid);
            printf("      %d %s, %s: Rss %ld KiB (%+ld), Pss %ld (%+ld, %.1f each), of it shared %ld; %ld mappings (%+ld), %ld "
                   "descriptors (%+ld)\n",
                   count, stages[stage], both[i].who, is.rss, is.rss - before[i].rss, is.pss, is.pss - before[i].pss,
                   (double)(is.pss - before[i].pss) / count, is.shared, is.mappings, is.mappings - before[i].mappings,
                   is.descriptors, is.descriptors - before[i].descriptors);
            if (stage == 0)
                quiet[i] = is;
            else if (stage == 1 || (stage == 2 && i == 0))
                check(is.rss - quiet[i].rss < given_back, "%s: what %s of 64 MiB took is given back", both[i].who,
                      stage == 1 ? "a call" : "several calls");
        }
    }
    /* One that served the startup of the first connection may not have been closed then. */
    bool same = figures(server.pid).descriptors <= before[0].descriptors &&
                figures(client).descriptors <= before[1].descriptors && mappings(server.pid, true) + mappings(client, true) == 4;
    check(same, "what they hold afterwards is what they held");
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 60000 + patience()) && lives(server.pid), "%d connections are made, used and ended", count);
    end(server.pid);
}

/* ---- Plain ends, for other users and namespaces ---------------------------------------------------------------------------- */

static int be_client(const char *address, int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = 1;
    CLIENT *client = try_to_connect(address, port);
    if (client == NULL) {
        printf("none %s\n", clnt_spcreateerror("clnt_tli_create"));
        return 1;
    }
    for (int i = 0; i < 50; i++) {
        bool right;
        enum clnt_stat status = echo(client, &buffers, &state, length_of_call(&state), 60000, &right);
        if (!right) {
            printf("wrong %d %s\n", status, clnt_sperror(client, "call"));
            return 1;
        }
    }
    /* There may be no /proc. */
    printf("%s\n", mapped >= 2 ? "memory" : "no memory");
    clnt_destroy(client);
    return 0;
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    told = real_mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(told != MAP_FAILED);
    if (count < 2)
        errx(2, "usage: see the first lines of shared.c");
    const char *what = arguments[1];
    int number = count > 2 ? atoi(arguments[2]) : 0;
    sow(count > 3 ? strtoull(arguments[3], NULL, 10) : 1, 0);
    if (strcmp(what, "server") == 0)
        be_server(1);
    else if (strcmp(what, "client") == 0 && count == 4)
        return be_client(arguments[2], atoi(arguments[3]));
    else if (strcmp(what, "random-client") == 0)
        random_client(number);
    else if (strcmp(what, "random-server") == 0)
        random_server(number);
    else if (strcmp(what, "kill-clients") == 0)
        kill_clients(number);
    else if (strcmp(what, "kill-servers") == 0)
        kill_servers(number);
    else if (strcmp(what, "stopped") == 0)
        stopped();
    else if (strcmp(what, "handshake-client") == 0)
        handshake_client();
    else if (strcmp(what, "handshake-server") == 0)
        handshake_server(false);
    else if (strcmp(what, "silent-server") == 0)
        handshake_server(true);
    else if (strcmp(what, "segment") == 0)
        segment();
    else if (strcmp(what, "outbox") == 0)
        outbox();
    else if (strcmp(what, "elsewhere") == 0)
        elsewhere();
    else if (strcmp(what, "idle") == 0)
        idle(number);
    else
        errx(2, "usage: see the first lines of shared.c");
    return failed != 0;
}
