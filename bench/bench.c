/* bench.c: the server and the client of the benchmark; libtirpc alone. bench.sh runs it over tcp and over rdma.
 *
 *   bench server NETID                                        prints "READY port"
 *   bench client NETID PORT OP SIZE THREADS shared|own|processes SECONDS
 *       prints calls per second; then, in microseconds, the median and the 99th percentile of a call's time, the processor
 *       time of both ends per call, and the 10th, 90th and 99.9th percentiles. THREADS share one CLIENT, or have one each,
 *       in this process or each in a process of its own.
 *   bench calls NETID PORT OP SIZE COUNT                      makes COUNT calls on one thread
 *   bench counters NETID PORT OP SIZE COUNT                   the same; prints the library's counters per call
 *   bench fair NETID PORT THREADS shared|own COUNT            COUNT null calls of one CLIENT, while THREADS keep the server
 *       busy with calls of 5 ms, as above; prints the mean of their times in microseconds
 *
 * OP is null, write (SIZE bytes to the server) or read; sleep or compute (SIZE microseconds at the server); or store, a write
 * whose routine waits a millisecond for a disk. The server takes a write's data as rpcgen's code would, in memory allocated
 * for the call, and answers a read from one buffer; the client reads into one buffer. With IN_PLACE in its environment the
 * server asks the library where a write's data lies, and with THREADS it serves with that many threads. ADDRESS in the
 * environment is the server's, by default 127.0.0.1. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <err.h>
#include <netconfig.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROGRAM = 0x20004245, VERSION = 1, LARGEST = 4 << 20 };
enum { WRITE = 1, READ = 2, COUNTERS = 3, SLEEP = 4, COMPUTE = 5, STORE = 6 };

struct data {
    char *bytes;
    u_int length;
};

static bool_t xdr_data(XDR *xdrs, struct data *data)
{
    return xdr_bytes(xdrs, &data->bytes, &data->length, LARGEST);
}

static struct netconfig *config_of(const char *netid)
{
    struct netconfig *config = getnetconfigent(netid);
    if (config == NULL)
        errx(1, "%s: no such netid", netid);
    return config;
}

static struct sockaddr_in address_of_server(unsigned port)
{
    const char *host = getenv("ADDRESS");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, host == NULL ? "127.0.0.1" : host, &address.sin_addr) != 1)
        errx(2, "ADDRESS: %s is not an address", host);
    return address;
}

/* Seconds. */
static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* The counters of struct rpcrdma_stats that the benchmark shows, if the library is preloaded; what copies.c counts, if
 * copies.c is preloaded; and the processor time of the process in nanoseconds. */
enum { COPIED, READ_AHEAD, REGISTRATIONS, SENDS, SYSCALLS, PULLED, PUSHED, MEMCPY, SHOWN, CPU = SHOWN, COUNTERS_END };

static bool_t xdr_counters(XDR *xdrs, u_quad_t *counters)
{
    return xdr_vector(xdrs, (char *)counters, COUNTERS_END, sizeof *counters, (xdrproc_t)xdr_u_quad_t);
}

static void read_counters(u_quad_t *counters)
{
    static const int place[MEMCPY] = {[COPIED] = 6,    [READ_AHEAD] = 7, [REGISTRATIONS] = 8, [SENDS] = 10,
                                      [SYSCALLS] = 12, [PULLED] = 4,     [PUSHED] = 5};
    uint64_t all[20] = {0};
    bool_t (*get)(void *, size_t) = (bool_t (*)(void *, size_t))dlsym(RTLD_DEFAULT, "rpcrdma_stats_get");
    if (get != NULL)
        get(all, sizeof all);
    for (int i = 0; i < MEMCPY; i++)
        counters[i] = all[place[i]];
    uint64_t (*copied)(void) = (uint64_t (*)(void))dlsym(RTLD_DEFAULT, "bench_copied");
    counters[MEMCPY] = copied == NULL ? 0 : copied();
    counters[CPU] = (u_quad_t)(now(CLOCK_PROCESS_CPUTIME_ID) * 1e9);
}

/* ---- Server ------------------------------------------------------------------------------------------------------ */

static char source[LARGEST];

typedef bool_t (*placed_function)(SVCXPRT *, void **, size_t *);
static placed_function placed;

static void sleep_for(u_int us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

static void dispatch(struct svc_req *request, SVCXPRT *transport)
{
    struct data data = {0};
    u_int length = 0;
    switch (request->rq_proc) {
    case NULLPROC:
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    case WRITE:
    case STORE: {
        void *there = NULL;
        size_t size = 0;
        if (placed != NULL && placed(transport, &there, &size))
            data.bytes = there;
        if (!svc_getargs(transport, (xdrproc_t)xdr_data, (caddr_t)&data)) {
            svcerr_decode(transport);
            return;
        }
        if (request->rq_proc == STORE)
            sleep_for(1000);
        svc_sendreply(transport, (xdrproc_t)xdr_u_int, (caddr_t)&data.length);
        if (data.bytes == there)
            data.bytes = NULL;
        svc_freeargs(transport, (xdrproc_t)xdr_data, (caddr_t)&data);
        return;
    }
    case READ:
        if (!svc_getargs(transport, (xdrproc_t)xdr_u_int, (caddr_t)&length) || length > LARGEST) {
            svcerr_decode(transport);
            return;
        }
        data = (struct data){source, length};
        svc_sendreply(transport, (xdrproc_t)xdr_data, (caddr_t)&data);
        return;
    case SLEEP:
    case COMPUTE:
        if (!svc_getargs(transport, (xdrproc_t)xdr_u_int, (caddr_t)&length)) {
            svcerr_decode(transport);
            return;
        }
        for (double end = now(CLOCK_THREAD_CPUTIME_ID) + length / 1e6;
             request->rq_proc == COMPUTE && now(CLOCK_THREAD_CPUTIME_ID) < end;)
            ;
        if (request->rq_proc == SLEEP)
            sleep_for(length);
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    case COUNTERS: {
        u_quad_t counters[COUNTERS_END];
        read_counters(counters);
        svc_sendreply(transport, (xdrproc_t)xdr_counters, (caddr_t)counters);
        return;
    }
    default:
        svcerr_noproc(transport);
    }
}

static int serve(const char *netid)
{
    struct sockaddr_in address = address_of_server(0);
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 64};
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, config_of(netid), &bind_to, 0, 0);
    if (listener == NULL || !svc_reg(listener, PROGRAM, VERSION, dispatch, NULL))
        errx(1, "cannot serve on %s", netid);
    if (getenv("IN_PLACE") != NULL)
        placed = (placed_function)dlsym(RTLD_DEFAULT, "rpcrdma_svc_placed");
    for (size_t i = 0; i < sizeof source; i++)
        source[i] = (char)(i * 7);
    printf("READY %u\n", ntohs(((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port));
    fflush(stdout);
    const char *threads = getenv("THREADS");
    bool_t (*run)(unsigned) = (bool_t (*)(unsigned))dlsym(RTLD_DEFAULT, "rpcrdma_svc_run");
    if (threads == NULL)
        svc_run();
    else if (run == NULL || !run((unsigned)atoi(threads)))
        errx(1, "%s threads cannot serve", threads);
    return 1;
}

/* ---- Client ------------------------------------------------------------------------------------------------------ */

static const char *netid;
static unsigned port;
static rpcproc_t procedure;
static u_int size;

/* How many calls took how long: 32 steps from each power of two nanoseconds to the next. */
enum { STEPS = 32, TIMES = 40 * STEPS };

static unsigned step_of(double seconds)
{
    uint64_t ns = (uint64_t)(seconds * 1e9) + STEPS;
    unsigned power = 63 - (unsigned)__builtin_clzll(ns);
    unsigned step = (power - 5) * STEPS + (unsigned)(ns >> (power - 5)) - STEPS;
    return step < TIMES ? step : TIMES - 1;
}

static double microseconds_of(unsigned step)
{
    return ((double)((uint64_t)(STEPS + step % STEPS) << (step / STEPS)) - STEPS) / 1e3;
}

struct worker {
    CLIENT *client;
    pthread_t thread;
    double cpu;
    uint32_t times[TIMES];
};

/* What the processes of a measurement share. */
static struct shared {
    atomic_bool stop;
    pthread_barrier_t start;
    struct worker workers[];
} *all;

static CLIENT *connect_to_server(void)
{
    struct sockaddr_in address = address_of_server(port);
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, config_of(netid), &netbuf, PROGRAM, VERSION, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("connect"));
    return client;
}

static void call(CLIENT *client, char *buffer)
{
    const struct timeval timeout = {.tv_sec = 30};
    enum clnt_stat status = RPC_FAILED;
    u_int answer = size;
    struct data data = {buffer, size};
    if (procedure == NULLPROC) {
        status = clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout);
    } else if (procedure == SLEEP || procedure == COMPUTE) {
        status = clnt_call(client, procedure, (xdrproc_t)xdr_u_int, (caddr_t)&size, (xdrproc_t)xdr_void, NULL, timeout);
    } else if (procedure == WRITE || procedure == STORE) {
        status = clnt_call(client, procedure, (xdrproc_t)xdr_data, (caddr_t)&data, (xdrproc_t)xdr_u_int, (caddr_t)&answer,
                           timeout);
    } else {
        /* The length of the buffer: libtirpc ignores it, librpcrdma uses it where a binding names the data. */
        data.length = LARGEST;
        status = clnt_call(client, READ, (xdrproc_t)xdr_u_int, (caddr_t)&size, (xdrproc_t)xdr_data, (caddr_t)&data,
                           timeout);
        answer = data.length;
        /* Checks the first and the last byte, so that data that did not arrive does not count. */
        if (status == RPC_SUCCESS && (buffer[0] != 0 || buffer[size - 1] != (char)((size - 1) * 7)))
            errx(1, "wrong data");
        buffer[0] = buffer[size - 1] = 'x';
    }
    if (status != RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "call"));
    if (answer != size)
        errx(1, "wrong length");
}

static void *work(void *argument)
{
    struct worker *worker = argument;
    char *buffer = calloc(1, LARGEST);
    if (buffer == NULL)
        err(1, "calloc");
    call(worker->client, buffer); /* warm */
    pthread_barrier_wait(&all->start);
    double cpu = now(CLOCK_THREAD_CPUTIME_ID), before = now(CLOCK_MONOTONIC);
    while (!atomic_load_explicit(&all->stop, memory_order_relaxed)) {
        call(worker->client, buffer);
        double after = now(CLOCK_MONOTONIC);
        worker->times[step_of(after - before)]++;
        before = after;
    }
    worker->cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    free(buffer);
    return NULL;
}

static void server_counters(CLIENT *client, u_quad_t *counters)
{
    const struct timeval timeout = {.tv_sec = 30};
    if (clnt_call(client, COUNTERS, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_counters, (caddr_t)counters, timeout) !=
        RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "counters"));
}

/* Starts a worker as a thread, or in a process of its own. */
static void begin(struct worker *worker, CLIENT *shared, bool processes)
{
    pid_t child = processes ? fork() : 0;
    if (child < 0)
        err(1, "fork");
    if (child > 0)
        return;
    worker->client = shared != NULL ? shared : connect_to_server();
    if (processes) {
        work(worker);
        _exit(0);
    }
    if (pthread_create(&worker->thread, NULL, work, worker) != 0)
        errx(1, "pthread_create");
}

static int measure(unsigned threads, const char *how, double seconds)
{
    bool processes = strcmp(how, "processes") == 0;
    all = mmap(NULL, sizeof *all + threads * sizeof *all->workers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED)
        err(1, "mmap");
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&all->start, &attributes, threads + 1);
    CLIENT *shared = strcmp(how, "shared") == 0 ? connect_to_server() : NULL;
    for (unsigned i = 0; i < threads; i++)
        begin(&all->workers[i], shared, processes);
    CLIENT *own = connect_to_server();
    u_quad_t server_before[COUNTERS_END], server_after[COUNTERS_END];
    server_counters(own, server_before);
    pthread_barrier_wait(&all->start);
    double began = now(CLOCK_MONOTONIC);
    struct timespec pause = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    atomic_store(&all->stop, true);
    double took = now(CLOCK_MONOTONIC) - began, cpu = 0;
    int status = 0;
    for (unsigned i = 0; i < threads; i++) {
        if (!processes)
            pthread_join(all->workers[i].thread, NULL);
        else if (wait(&status) < 0 || status != 0)
            errx(1, "a process failed");
    }
    server_counters(own, server_after);
    static uint64_t times[TIMES];
    uint64_t calls = 0;
    for (unsigned i = 0; i < threads; i++) {
        cpu += all->workers[i].cpu;
        for (unsigned k = 0; k < TIMES; k++) {
            times[k] += all->workers[i].times[k];
            calls += all->workers[i].times[k];
        }
    }
    if (calls == 0)
        errx(1, "no call ended");
    /* In thousandths of the calls, in the order in which they are printed. */
    static const unsigned parts[] = {500, 990, 100, 900, 999};
    enum { PARTS = sizeof parts / sizeof *parts };
    unsigned step[PARTS] = {0};
    for (unsigned i = 0; i < PARTS; i++) {
        uint64_t up_to = 0;
        for (unsigned k = 0; k < TIMES; k++) {
            up_to += times[k];
            step[i] = up_to * 1000 < calls * parts[i] ? k + 1 : step[i];
        }
    }
    cpu += (double)(server_after[CPU] - server_before[CPU]) / 1e9;
    printf("%.0f %.2f %.2f %.2f", (double)calls / took, microseconds_of(step[0]), microseconds_of(step[1]),
           cpu * 1e6 / (double)calls);
    for (unsigned i = 2; i < PARTS; i++)
        printf(" %.2f", microseconds_of(step[i]));
    printf("\n");
    return 0;
}

static int count(CLIENT *client, char *buffer, unsigned long calls)
{
    u_quad_t client_before[COUNTERS_END], client_after[COUNTERS_END], server_before[COUNTERS_END],
        server_after[COUNTERS_END];
    call(client, buffer);
    server_counters(client, server_before);
    read_counters(client_before);
    for (unsigned long i = 0; i < calls; i++)
        call(client, buffer);
    read_counters(client_after);
    server_counters(client, server_after);
    for (int i = 0; i < SHOWN; i++)
        printf("%.1f %.1f ", (double)(client_after[i] - client_before[i]) / (double)calls,
               (double)(server_after[i] - server_before[i]) / (double)calls);
    printf("\n");
    return 0;
}

static void *keep_busy(void *argument)
{
    CLIENT *client = argument;
    u_int time = 5000;
    for (bool first = true; !atomic_load_explicit(&all->stop, memory_order_relaxed); first = false) {
        if (clnt_call(client, SLEEP, (xdrproc_t)xdr_u_int, (caddr_t)&time, (xdrproc_t)xdr_void, NULL,
                      (struct timeval){.tv_sec = 30}) != RPC_SUCCESS)
            errx(1, "%s", clnt_sperror(client, "sleep"));
        if (first)
            pthread_barrier_wait(&all->start);
    }
    return NULL;
}

static int fairness(unsigned threads, bool shared, unsigned long calls)
{
    all = calloc(1, sizeof *all);
    pthread_t *busy = calloc(threads, sizeof *busy);
    CLIENT *client = connect_to_server(), *one = shared ? connect_to_server() : NULL;
    if (all == NULL || busy == NULL)
        err(1, "calloc");
    if (pthread_barrier_init(&all->start, NULL, threads + 1) != 0)
        errx(1, "pthread_barrier_init");
    for (unsigned i = 0; i < threads; i++)
        if (pthread_create(&busy[i], NULL, keep_busy, shared ? one : connect_to_server()) != 0)
            errx(1, "pthread_create");
    /* From here on each of the threads nearly always has a call under way. */
    pthread_barrier_wait(&all->start);
    double began = now(CLOCK_MONOTONIC);
    for (unsigned long i = 0; i < calls; i++)
        call(client, NULL);
    printf("%.0f\n", (now(CLOCK_MONOTONIC) - began) / (double)calls * 1e6);
    atomic_store(&all->stop, true);
    for (unsigned i = 0; i < threads; i++)
        pthread_join(busy[i], NULL);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "server") == 0)
        return serve(argv[2]);
    bool timed = argc == 9 && strcmp(argv[1], "client") == 0;
    bool counted = argc == 7 && strcmp(argv[1], "calls") == 0;
    bool counters = argc == 7 && strcmp(argv[1], "counters") == 0;
    bool fair = argc == 7 && strcmp(argv[1], "fair") == 0;
    if (!timed && !counted && !counters && !fair)
        errx(2, "usage: see the first lines of bench.c");
    netid = argv[2];
    port = (unsigned)atoi(argv[3]);
    if (fair)
        return fairness((unsigned)atoi(argv[4]), strcmp(argv[5], "shared") == 0, strtoul(argv[6], NULL, 0));
    static const char *const operations[] = {"null", "write", "read", "", "sleep", "compute", "store"};
    while (procedure <= STORE && strcmp(argv[4], operations[procedure]) != 0)
        procedure++;
    if (procedure > STORE)
        errx(2, "%s: not an operation", argv[4]);
    size = (u_int)strtoul(argv[5], NULL, 0);
    if (size > LARGEST || (procedure != NULLPROC && size == 0))
        errx(2, "%u: not a size", size);
    if (timed)
        return measure((unsigned)atoi(argv[6]), argv[7], atof(argv[8]));
    char *buffer = calloc(1, LARGEST);
    CLIENT *client = connect_to_server();
    if (counters)
        return count(client, buffer, strtoul(argv[6], NULL, 0));
    for (unsigned long calls = strtoul(argv[6], NULL, 0); calls > 0; calls--)
        call(client, buffer);
    clnt_destroy(client);
    return 0;
}
