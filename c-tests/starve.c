/* starve.c: a client and a server in one process whose library gets no memory at the n-th request for it (starve_shim.c).
 *
 *   starve round [STEP [START]]   after rounds that warm everything up: fails every STEP-th request of a round, from START on,
 *                                 one in each round. The round ends with errors or without, leaves nothing behind, and the
 *                                 next one is right.
 *   starve dry [STEP [START]]     the same, but all later requests until the end of the round fail too
 *   starve cold N                 fails the N-th request since the beginning of the process
 *   starve accept                 fails each request of libtirpc's for a connection that it accepts, for connections that block
 *                                 and for those that do not
 *
 * A round creates a CLIENT, calls with nothing, 4 KiB and 1 MiB either way, and destroys it. Prints one line at the end:
 * requests of a round, rounds, rounds with an error; "cold" prints how many requests there were. STARVE_VERBOSE: a line for each
 * round. STARVE_NETID: netid of the server and the CLIENTs, instead of rdma. STARVE_THREADS: how many threads serve
 * (rpcrdma_svc_run). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <err.h>
#include <netconfig.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpc/svc_mt.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PROG = 0x20004C51, SINK = 1, SOURCE = 2, LARGE = 1 << 20, SMALL = 4096 };
static const struct timeval patient = {60, 0}, hungry = {3, 0};

static void (*arm)(long, long);
static long (*disarm)(void), (*live)(void);
static const char *(*where)(void);
static void (*lack)(long);
static bool (*lacked)(void);

struct blob {
    u_int length;
    char *bytes;
};

static bool_t xdr_blob(XDR *xdrs, struct blob *blob)
{
    return xdr_bytes(xdrs, &blob->bytes, &blob->length, ~0u);
}

/* ---- The server -------------------------------------------------------------------------------------------------- */

static char bytes[LARGE];

static bool right(const struct blob *blob, u_int length)
{
    return blob->length == length && memcmp(blob->bytes, bytes, length) == 0;
}

static void serve(struct svc_req *request, SVCXPRT *transport)
{
    struct blob blob = {0, NULL};
    u_int length = 0;
    switch (request->rq_proc) {
    case NULLPROC:
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        break;
    case SINK:
        if (!svc_getargs(transport, (xdrproc_t)xdr_blob, (caddr_t)&blob)) {
            svcerr_systemerr(transport);
            break;
        }
        length = right(&blob, blob.length) ? blob.length : 0;
        svc_sendreply(transport, (xdrproc_t)xdr_u_int, (caddr_t)&length);
        svc_freeargs(transport, (xdrproc_t)xdr_blob, (caddr_t)&blob);
        break;
    case SOURCE:
        if (!svc_getargs(transport, (xdrproc_t)xdr_u_int, (caddr_t)&length)) {
            svcerr_systemerr(transport);
            break;
        }
        blob = (struct blob){length, bytes};
        if (!svc_sendreply(transport, (xdrproc_t)xdr_blob, (caddr_t)&blob))
            svcerr_systemerr(transport);
        break;
    }
}

static struct netconfig *netid;
static SVCXPRT *listener;
static struct sockaddr_in address = {.sin_family = AF_INET};

static void *run(void *unused)
{
    (void)unused;
    const char *threads = getenv("STARVE_THREADS");
    bool_t (*serve_with)(unsigned) = NULL;
    if (threads != NULL) {
        *(void **)&serve_with = dlsym(RTLD_DEFAULT, "rpcrdma_svc_run");
        if (serve_with == NULL || !serve_with((unsigned)atoi(threads)))
            errx(1, "%s threads do not serve", threads);
    }
    for (;;)
        svc_run();
    return NULL;
}

static void start(void)
{
    struct t_bind bound = {.addr = {sizeof address, sizeof address, &address}, .qlen = 16};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const char *name = getenv("STARVE_NETID");
    netid = getnetconfigent(name != NULL ? name : "rdma");
    if (netid == NULL)
        errx(1, "no such netid: is the library loaded?");
    listener = svc_tli_create(RPC_ANYFD, netid, &bound, 0, 0);
    if (listener == NULL || !svc_reg(listener, PROG, 1, serve, NULL))
        errx(1, "no listener");
    address.sin_port = ((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port;
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, NULL) != 0)
        errx(1, "no thread");
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

static char problem[256];

/* A call whose result is not what it should be ends the test: a lack of memory is no excuse. */
static bool sinks(CLIENT *client, u_int length, struct timeval limit)
{
    struct blob blob = {length, bytes};
    u_int taken = 0;
    enum clnt_stat status = clnt_call(client, SINK, (xdrproc_t)xdr_blob, (caddr_t)&blob, (xdrproc_t)xdr_u_int, (caddr_t)&taken, limit);
    if (status == RPC_SUCCESS && taken != length)
        errx(1, "%s: the server got other bytes", where());
    if (status != RPC_SUCCESS)
        snprintf(problem, sizeof problem, "%s", clnt_sperror(client, "sink"));
    return status == RPC_SUCCESS;
}

static bool sources(CLIENT *client, u_int length, struct timeval limit)
{
    struct blob blob = {0, NULL};
    enum clnt_stat status = clnt_call(client, SOURCE, (xdrproc_t)xdr_u_int, (caddr_t)&length, (xdrproc_t)xdr_blob, (caddr_t)&blob, limit);
    if (status == RPC_SUCCESS && !right(&blob, length))
        errx(1, "%s: the client got other bytes", where());
    if (status != RPC_SUCCESS)
        snprintf(problem, sizeof problem, "%s", clnt_sperror(client, "source"));
    clnt_freeres(client, (xdrproc_t)xdr_blob, (caddr_t)&blob);
    return status == RPC_SUCCESS;
}

/* Returns how many of a round's steps succeeded; ALL if all did. */
enum { ALL = 6 };
static int round_of(struct timeval limit)
{
    struct netbuf to = {sizeof address, sizeof address, &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netid, &to, PROG, 1, 0, 0);
    if (client == NULL) {
        snprintf(problem, sizeof problem, "%s", clnt_spcreateerror("create"));
        return 0;
    }
    int well = 1;
    if (clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit) == RPC_SUCCESS)
        well++;
    else
        snprintf(problem, sizeof problem, "%s", clnt_sperror(client, "null"));
    well += sinks(client, SMALL, limit);
    well += sources(client, SMALL, limit);
    well += sinks(client, LARGE, limit);
    well += sources(client, LARGE, limit);
    clnt_destroy(client);
    return well;
}

static bool settles(long most)
{
    /* The server notices the end of a connection when it gets to it. */
    for (int i = 0; i < 2000; i++) {
        if (live() <= most)
            return true;
        usleep(1000);
    }
    return false;
}

static void died(int signal)
{
    const char *text = where();
    (void)!write(STDERR_FILENO, "aborted: ", 9);
    (void)!write(STDERR_FILENO, text, strlen(text));
    (void)!write(STDERR_FILENO, "\n", 1);
    _exit(128 + signal);
}

/* Connections that libtirpc accepts without memory for all of them are refused, and the next ones are served. */
static void refuse_connections(void)
{
    enum { REQUESTS = 4, TIMES = 8 };
    int most[] = {0, 2 * LARGE}, refused = 0;
    for (size_t blocking = 0; blocking < sizeof most / sizeof *most; blocking++) {
        /* Once a length is set, connections never block. */
        if (!SVC_CONTROL(listener, SVCSET_CONNMAXREC, &most[blocking]))
            errx(1, "no length can be set");
        for (int n = 1; n <= REQUESTS * TIMES; n++) {
            lack(1 + n % REQUESTS);
            if (round_of(hungry) == ALL)
                errx(1, "request %d: a connection is served", 1 + n % REQUESTS);
            if (!lacked())
                errx(1, "request %d: no connection lacks memory", 1 + n % REQUESTS);
            refused++;
            if (round_of(patient) != ALL)
                errx(1, "request %d: afterwards: %s", 1 + n % REQUESTS, problem);
        }
    }
    printf("%d connections refused\n", refused);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    long step = argc > 2 ? atol(argv[2]) : 1, from = argc > 3 ? atol(argv[3]) : 1;
    *(void **)&arm = dlsym(RTLD_DEFAULT, "starve_arm");
    *(void **)&disarm = dlsym(RTLD_DEFAULT, "starve_disarm");
    *(void **)&live = dlsym(RTLD_DEFAULT, "starve_live");
    *(void **)&where = dlsym(RTLD_DEFAULT, "starve_where");
    *(void **)&lack = dlsym(RTLD_DEFAULT, "starve_accept");
    *(void **)&lacked = dlsym(RTLD_DEFAULT, "starve_accepted");
    if (arm == NULL || disarm == NULL || live == NULL || where == NULL || lack == NULL || lacked == NULL)
        errx(2, "starve_shim.so is not preloaded");
    bool cold = strcmp(mode, "cold") == 0, dry = strcmp(mode, "dry") == 0, accepts = strcmp(mode, "accept") == 0;
    if (!cold && !dry && !accepts && strcmp(mode, "round") != 0)
        errx(2, "usage: starve round|dry [STEP [START]] | cold N | accept");
    signal(SIGABRT, died);
    signal(SIGSEGV, died);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (char)(i * 2654435761u >> 13);
    if (cold)
        arm(step, 0);
    start();
    if (cold) {
        round_of(hungry);
        long requests = disarm();
        if (round_of(patient) != ALL)
            errx(1, "%s: afterwards: %s", where(), problem);
        printf("%ld\n", requests);
        return 0;
    }
    for (int i = 0; i < 8; i++)
        if (round_of(patient) != ALL)
            errx(1, "with all the memory there is: %s", problem);
    /* What is kept for the next connection varies by a few blocks. */
    enum { SLACK = 32 };
    usleep(100000);
    long before = live();
    if (accepts) {
        refuse_connections();
        if (!settles(before + SLACK))
            errx(1, "%ld blocks stay", live() - before);
        return 0;
    }
    long rounds = 0, failed = 0, requests = 0;
    for (long n = from;; n += step) {
        arm(n, dry ? 1000000000 : 0);
        int well = round_of(hungry);
        requests = disarm();
        if (requests < n)
            break;
        rounds++;
        failed += well != ALL;
        if (getenv("STARVE_VERBOSE"))
            fprintf(stderr, "%ld: %s: %d of %d steps%s%s\n", n, where(), well, ALL, well == ALL ? "" : ": ", well == ALL ? "" : problem);
        if (round_of(patient) != ALL)
            errx(1, "after %s (%ld): %s", where(), n, problem);
        if (!settles(before + SLACK))
            errx(1, "after %s (%ld): %ld blocks stay", where(), n, live() - before);
    }
    printf("%ld requests a round, %ld rounds, %ld with an error\n", requests, rounds, failed);
    return 0;
}
