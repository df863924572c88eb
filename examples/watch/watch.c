/* watch.c: prints "NAME = VALUE" whenever the value of a name changes at a watchd; or sets one.
 *
 *   watch [-h host] [-p port] [-f] NAME...
 *   watch [-h host] [-p port] -s NAME VALUE
 *
 * The server calls back over the connection that this program has opened to it. With -f the value is not taken from that
 * call, but fetched with a call of our own before the server's call is answered. */
#include "watch.h"
#include <err.h>
#include <netdb.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static CLIENT *client;
static bool fetch;
static volatile sig_atomic_t ended;

static void end(int signal)
{
    (void)signal;
    ended = 1;
}

/* What the server calls: a dispatch routine as in any server. It runs inside rpcrdma_clnt_poll(), and inside each of our
 * calls that waits for its reply. */
static void watcher_program_1(struct svc_req *request, SVCXPRT *xprt)
{
    if (request->rq_proc == WATCHER_NULL) {
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (request->rq_proc != WATCHER_CHANGED) {
        svcerr_noproc(xprt);
        return;
    }
    watch_entry entry = {NULL, NULL};
    if (!svc_getargs(xprt, (xdrproc_t)xdr_watch_entry, (char *)&entry)) {
        svcerr_decode(xprt);
        return;
    }
    watch_value fetched = NULL;
    if (fetch && watch_get_1(&entry.name, &fetched, client) != RPC_SUCCESS) {
        clnt_perror(client, "cannot fetch the value");
        svcerr_systemerr(xprt);
    } else {
        printf("%s = %s\n", entry.name, fetch ? fetched : entry.value);
        fflush(stdout);
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
    }
    clnt_freeres(client, (xdrproc_t)xdr_watch_value, (char *)&fetched);
    svc_freeargs(xprt, (xdrproc_t)xdr_watch_entry, (char *)&entry);
}

/* Connects to the first address of the host that answers over RDMA, without asking rpcbind. */
static CLIENT *open_client(const char *host, const char *port)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list;
    int failed = getaddrinfo(host, port, &hints, &list);
    if (failed != 0)
        errx(1, "%s port %s: %s", host, port, gai_strerror(failed));
    CLIENT *made = NULL;
    for (struct addrinfo *at = list; at != NULL && made == NULL; at = at->ai_next) {
        struct netbuf address = {.maxlen = at->ai_addrlen, .len = at->ai_addrlen, .buf = at->ai_addr};
        made = clnt_rdma_create(RPC_ANYFD, &address, WATCH_PROGRAM, WATCH_VERSION, 0, 0);
    }
    freeaddrinfo(list);
    if (made == NULL) {
        clnt_pcreateerror(host);
        exit(1);
    }
    return made;
}

/* Prints what changes until a signal comes. */
static void watch(char **names)
{
    u_quad_t number;
    if (getrandom(&number, sizeof number, 0) != sizeof number)
        err(1, "getrandom");
    /* First of all: a server may only call programs that are served, and it may do so as soon as we have registered. */
    if (!rpcrdma_clnt_serve(client, WATCHER_PROGRAM, WATCHER_VERSION, watcher_program_1)) {
        clnt_perror(client, "cannot serve calls back");
        exit(1);
    }
    unsigned connections, registered_on = 0;
    time_t due = 0;
    bool said = false; /* one message is enough for as long as a server is away */
    while (!ended) {
        bool well = true;
        /* On every new connection the server must be told who we are; and now and then, or it forgets us. */
        clnt_control(client, CLGET_RDMA_CONNECTIONS, (char *)&connections);
        if (connections != registered_on || time(NULL) >= due) {
            for (char **name = names; *name != NULL && well && !ended; name++) {
                watch_interest interest = {.client = number, .name = *name};
                well = watch_register_1(&interest, NULL, client) == RPC_SUCCESS;
            }
            if (well) {
                registered_on = connections;
                due = time(NULL) + WATCH_LEASE / 3;
            }
        }
        /* A lost connection is made anew in here. This does not wait for long at a time, so that we notice. */
        if (rpcrdma_clnt_poll(client, (struct timeval){.tv_sec = 1}) < 0)
            well = false;
        if (!well && !said)
            clnt_perror(client, "watch");
        said = !well;
    }
    watch_unregister_1(&number, NULL, client);
}

int main(int argc, char **argv)
{
    char *host = "localhost", port[16], *wanted = port;
    bool set = false;
    snprintf(port, sizeof port, "%d", WATCH_PORT);
    for (int option; (option = getopt(argc, argv, "h:p:fs")) != -1;) {
        switch (option) {
        case 'h': host = optarg; break;
        case 'p': wanted = optarg; break;
        case 'f': fetch = true; break;
        case 's': set = true; break;
        default: argc = 0;
        }
    }
    if (set ? argc - optind != 2 : argc <= optind)
        errx(2, "usage: watch [-h host] [-p port] [-f] NAME... | -s NAME VALUE");
    struct sigaction action = {.sa_handler = end};
    client = open_client(host, wanted);
    bool well = true;
    if (set) {
        watch_entry entry = {.name = argv[optind], .value = argv[optind + 1]};
        well = watch_set_1(&entry, NULL, client) == RPC_SUCCESS;
        if (!well)
            clnt_perror(client, host);
    } else {
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        watch(argv + optind);
    }
    clnt_destroy(client);
    return !well;
}
