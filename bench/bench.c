/* bench.c: the server and the client of the benchmark; libtirpc alone. bench.sh runs it over tcp and over rdma.
 *
 *   bench server NETID                                        prints "READY port"
 *   bench client NETID PORT OP SIZE THREADS shared|own SECONDS    prints calls per second and microseconds per call
 *   bench calls NETID PORT OP SIZE COUNT                      makes COUNT calls on one thread
 *   bench counters NETID PORT OP SIZE COUNT                   the same; prints the library's counters per call
 *
 * OP is null, write (SIZE bytes to the server) or read. The server takes a write's data as rpcgen's code would, in
 * memory allocated for the call, and answers a read from one buffer; the client reads into one buffer. With IN_PLACE
 * in its environment the server asks the library where a write's data lies. */
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
#include <time.h>
#include <unistd.h>

enum { PROGRAM = 0x20004245, VERSION = 1, WRITE = 1, READ = 2, COUNTERS = 3, LARGEST = 4 << 20 };

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

/* The counters of struct rpcrdma_stats that the benchmark shows, if the library is preloaded; and what copies.c
 * counts, if that is. */
enum { COPIED, READ_AHEAD, REGISTRATIONS, SENDS, SYSCALLS, PULLED, PUSHED, MEMCPY, SHOWN };

static bool_t xdr_counters(XDR *xdrs, u_quad_t *counters)
{
    return xdr_vector(xdrs, (char *)counters, SHOWN, sizeof *counters, (xdrproc_t)xdr_u_quad_t);
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
}

/* ---- Server ------------------------------------------------------------------------------------------------------ */

static char source[LARGEST];

typedef bool_t (*placed_function)(SVCXPRT *, void **, size_t *);
static placed_function placed;

static void dispatch(struct svc_req *request, SVCXPRT *transport)
{
    struct data data = {0};
    u_int length = 0;
    switch (request->rq_proc) {
    case NULLPROC:
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    case WRITE: {
        void *there = NULL;
        size_t size = 0;
        if (placed != NULL && placed(transport, &there, &size))
            data.bytes = there;
        if (!svc_getargs(transport, (xdrproc_t)xdr_data, (caddr_t)&data)) {
            svcerr_decode(transport);
            return;
        }
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
    case COUNTERS: {
        u_quad_t counters[SHOWN];
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
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
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
    svc_run();
    return 1;
}

/* ---- Client ------------------------------------------------------------------------------------------------------ */

static const char *netid;
static unsigned port;
static rpcproc_t procedure;
static u_int size;
static atomic_bool stop;
static pthread_barrier_t start;

struct worker {
    CLIENT *client;
    pthread_t thread;
    unsigned long calls;
};

static CLIENT *connect_to_server(void)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
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
    } else if (procedure == WRITE) {
        status = clnt_call(client, WRITE, (xdrproc_t)xdr_data, (caddr_t)&data, (xdrproc_t)xdr_u_int, (caddr_t)&answer,
                           timeout);
    } else {
        /* How long the buffer is; libtirpc does not look at it, librpcrdma does where a binding names the data. */
        data.length = LARGEST;
        status = clnt_call(client, READ, (xdrproc_t)xdr_u_int, (caddr_t)&size, (xdrproc_t)xdr_data, (caddr_t)&data,
                           timeout);
        answer = data.length;
        /* The first and the last byte, so that nothing that did not arrive counts. */
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
    pthread_barrier_wait(&start);
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        call(worker->client, buffer);
        worker->calls++;
    }
    free(buffer);
    return NULL;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int measure(unsigned threads, bool share, double seconds)
{
    struct worker *workers = calloc(threads, sizeof *workers);
    CLIENT *shared = share ? connect_to_server() : NULL;
    pthread_barrier_init(&start, NULL, threads + 1);
    for (unsigned i = 0; i < threads; i++) {
        workers[i].client = share ? shared : connect_to_server();
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0)
            errx(1, "pthread_create");
    }
    pthread_barrier_wait(&start);
    double began = now();
    struct timespec pause = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&pause, NULL);
    atomic_store(&stop, true);
    unsigned long calls = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(workers[i].thread, NULL);
        calls += workers[i].calls;
    }
    double took = now() - began;
    printf("%.0f %.2f\n", (double)calls / took, took * 1e6 * threads / (double)(calls ? calls : 1));
    return 0;
}

static void server_counters(CLIENT *client, u_quad_t *counters)
{
    const struct timeval timeout = {.tv_sec = 30};
    if (clnt_call(client, COUNTERS, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_counters, (caddr_t)counters, timeout) !=
        RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "counters"));
}

static int count(CLIENT *client, char *buffer, unsigned long calls)
{
    u_quad_t client_before[SHOWN], client_after[SHOWN], server_before[SHOWN], server_after[SHOWN];
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

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "server") == 0)
        return serve(argv[2]);
    bool timed = argc == 9 && strcmp(argv[1], "client") == 0;
    bool counted = argc == 7 && strcmp(argv[1], "calls") == 0;
    bool counters = argc == 7 && strcmp(argv[1], "counters") == 0;
    if (!timed && !counted && !counters)
        errx(2, "usage: see the first lines of bench.c");
    netid = argv[2];
    port = (unsigned)atoi(argv[3]);
    procedure = strcmp(argv[4], "write") == 0 ? WRITE : strcmp(argv[4], "read") == 0 ? READ : NULLPROC;
    size = (u_int)strtoul(argv[5], NULL, 0);
    if (size > LARGEST || (procedure != NULLPROC && size == 0))
        errx(2, "%u: not a size", size);
    if (timed)
        return measure((unsigned)atoi(argv[6]), strcmp(argv[7], "shared") == 0, atof(argv[8]));
    char *buffer = calloc(1, LARGEST);
    CLIENT *client = connect_to_server();
    if (counters)
        return count(client, buffer, strtoul(argv[6], NULL, 0));
    for (int i = 0; i < atoi(argv[6]); i++)
        call(client, buffer);
    clnt_destroy(client);
    return 0;
}
