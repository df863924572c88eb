/* api.c: the library's own C API, linked with -lrpcrdma. Needs no rpcbind and no root: the server is a child process, on
 * a port of the system's choice. Run by tests/api.sh, which also checks that nothing is printed to standard error. */
#include <rpcrdma.h>

#include <arpa/inet.h>
#include <netconfig.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PROG 0x20000066
#define REQUIRE(condition)                                                                                            \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                           \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

static const struct timeval patient = {.tv_sec = 25};

/* Both ends speak Version Two, because of RPCRDMA_VERSION=auto. */
static bool version_two;

struct blob {
    char *bytes;
    u_int length;
};

static bool_t xdr_blob(XDR *xdrs, struct blob *blob)
{
    return xdr_bytes(xdrs, &blob->bytes, &blob->length, 1 << 20);
}

/* Procedure 1 returns the netid that it was called on, procedure 2 as many bytes as were asked for, procedure 3 how many
 * bytes have come. */
static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    switch (request->rq_proc) {
    case 0:
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    case 1:
        svc_sendreply(xprt, (xdrproc_t)xdr_wrapstring, (char *)&xprt->xp_netid);
        return;
    case 2: {
        u_int length = 0;
        if (!svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&length)) {
            svcerr_decode(xprt);
            return;
        }
        struct blob blob = {.bytes = calloc(1, length), .length = length};
        svc_sendreply(xprt, (xdrproc_t)xdr_blob, (char *)&blob);
        free(blob.bytes);
        return;
    }
    case 3: {
        struct blob blob = {NULL, 0};
        if (!svc_getargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob)) {
            svcerr_decode(xprt);
            return;
        }
        svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&blob.length);
        svc_freeargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob);
        return;
    }
    default:
        svcerr_noproc(xprt);
    }
}

struct address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } u;
    struct netbuf netbuf;
};

static struct address loopback(int family)
{
    struct address address;
    memset(&address, 0, sizeof address);
    address.u.any.sa_family = (sa_family_t)family;
    if (family == AF_INET) {
        address.u.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        address.netbuf.len = sizeof address.u.v4;
    } else {
        address.u.v6.sin6_addr = in6addr_loopback;
        address.netbuf.len = sizeof address.u.v6;
    }
    address.netbuf.maxlen = address.netbuf.len;
    return address;
}

static struct netbuf *netbuf(struct address *address)
{
    address->netbuf.buf = &address->u;
    return &address->netbuf;
}

/* A socket that is bound to the loopback address; `address` gets its port. */
static int bound(int family, struct address *address)
{
    int fd = socket(family, SOCK_STREAM, 0);
    *address = loopback(family);
    if (fd < 0 || bind(fd, &address->u.any, address->netbuf.len) < 0)
        return -1;
    socklen_t length = sizeof address->u;
    REQUIRE(getsockname(fd, &address->u.any, &length) == 0);
    return fd;
}

/* Serves until it is killed. */
static pid_t serve(int fd)
{
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        SVCXPRT *xprt = svc_rdma_create(fd, 0, 0);
        if (xprt == NULL)
            fprintf(stderr, "%s", clnt_spcreateerror("svc_rdma_create"));
        REQUIRE(xprt != NULL);
        REQUIRE(xprt->xp_fd == fd && xprt->xp_port != 0);
        /* No netconfig: nothing is registered with rpcbind. */
        REQUIRE(svc_reg(xprt, PROG, 1, dispatch, NULL));
        svc_run();
        _exit(1);
    }
    close(fd);
    return child;
}

static void stop(pid_t child)
{
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void require_netid(CLIENT *client, const char *netid)
{
    char *answer = NULL;
    enum clnt_stat status = clnt_call(client, 1, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_wrapstring,
                                      (char *)&answer, patient);
    if (status != RPC_SUCCESS)
        clnt_perror(client, "procedure 1");
    REQUIRE(status == RPC_SUCCESS);
    REQUIRE(strcmp(answer, netid) == 0);
    REQUIRE(strcmp(client->cl_netid, netid) == 0);
    clnt_freeres(client, (xdrproc_t)xdr_wrapstring, (char *)&answer);
}

static void require_failure(const char *word)
{
    const char *text = clnt_spcreateerror("create");
    if (strstr(text, word) == NULL)
        fprintf(stderr, "\"%s\" does not say \"%s\"\n", text, word);
    REQUIRE(strstr(text, word) != NULL);
    REQUIRE(rpc_createerr.cf_stat != RPC_SUCCESS);
}

static void client_and_server(int family, const char *netid)
{
    struct address address;
    int fd = bound(family, &address);
    if (fd < 0) {
        printf("skip  %s (this machine has no such addresses)\n", netid);
        return;
    }
    /* Listens before the fork, so that no client comes too early; the other order is tested with RPC_ANYFD. */
    REQUIRE(listen(fd, 8) == 0);
    pid_t server = serve(fd);

    /* The library's own socket. */
    CLIENT *client = clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0);
    if (client == NULL)
        clnt_pcreateerror("clnt_rdma_create");
    REQUIRE(client != NULL);
    require_netid(client, netid);
    int own = -1;
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&own) && own > 2);

    /* A second CLIENT on the same connection. */
    CLIENT *second = clnt_rdma_create(own, NULL, PROG, 1, 0, 0);
    REQUIRE(second != NULL);
    require_netid(second, netid);
    clnt_destroy(second);
    require_netid(client, netid);
    clnt_destroy(client);
    REQUIRE(write(own, "", 1) < 0);

    /* An unconnected socket of the program: it stays the program's. */
    fd = socket(family, SOCK_STREAM, 0);
    client = clnt_rdma_create(fd, netbuf(&address), PROG, 1, 400, 400);
    REQUIRE(client != NULL);
    require_netid(client, netid);
    clnt_destroy(client);
    REQUIRE(close(fd) == 0);

    /* A connected socket, and no address. */
    fd = socket(family, SOCK_STREAM, 0);
    REQUIRE(connect(fd, &address.u.any, address.netbuf.len) == 0);
    client = clnt_rdma_create(fd, NULL, PROG, 1, 0, 0);
    REQUIRE(client != NULL);
    require_netid(client, netid);
    clnt_destroy(client);
    REQUIRE(close(fd) == 0);

    stop(server);
    REQUIRE(clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0) == NULL);
    require_failure("cannot connect to");
    printf("ok    clnt_rdma_create and svc_rdma_create, %s\n", netid);
}

/* A bound socket that does not listen yet, and the system's choice of a port. */
static void listeners(void)
{
    struct address address;
    int fd = bound(AF_INET, &address), on = 0;
    socklen_t length = sizeof on;
    SVCXPRT *xprt = svc_rdma_create(fd, 0, 0);
    REQUIRE(xprt != NULL && xprt->xp_fd == fd && strcmp(xprt->xp_netid, "rdma") == 0);
    REQUIRE(getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &length) == 0 && on == 1);
    svc_destroy(xprt);
    REQUIRE(write(fd, "", 1) < 0);

    xprt = svc_rdma_create(RPC_ANYFD, 0, 0);
    REQUIRE(xprt != NULL && strcmp(xprt->xp_netid, "rdma") == 0);
    length = sizeof address.u;
    REQUIRE(getsockname(xprt->xp_fd, &address.u.any, &length) == 0 && address.u.v4.sin_port != 0);
    svc_destroy(xprt);
    puts("ok    svc_rdma_create makes a socket listen, and makes one");
}

/* A single connection that was accepted outside of the library, as for a child of inetd. */
static void accepted_connection(void)
{
    struct address address;
    int listener = bound(AF_INET, &address);
    REQUIRE(listen(listener, 8) == 0);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(connect(fd, &address.u.any, address.netbuf.len) == 0);
    int accepted = accept(listener, NULL, NULL);
    REQUIRE(accepted >= 0);
    close(listener);
    pid_t server = fork();
    REQUIRE(server >= 0);
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fd);
        SVCXPRT *xprt = svc_rdma_create(accepted, 0, 0);
        REQUIRE(xprt != NULL && svc_reg(xprt, PROG, 1, dispatch, NULL));
        svc_run();
        _exit(1);
    }
    close(accepted);
    CLIENT *client = clnt_rdma_create(fd, NULL, PROG, 1, 0, 0);
    if (client == NULL)
        clnt_pcreateerror("clnt_rdma_create");
    REQUIRE(client != NULL);
    require_netid(client, "rdma");
    clnt_destroy(client);
    close(fd);
    stop(server);
    puts("ok    svc_rdma_create on an accepted connection");
}

static void controls(void)
{
    struct address address;
    int fd = bound(AF_INET, &address);
    REQUIRE(listen(fd, 8) == 0);
    pid_t server = serve(fd);
    CLIENT *client = clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0);
    REQUIRE(client != NULL);
    struct rpcrdma_stats before, after;
    REQUIRE(rpcrdma_stats_get(&before, sizeof before));
    size_t most = 0;
    REQUIRE(clnt_control(client, CLGET_RDMA_MAXREPLY, (char *)&most) && most == 16 << 20);
    REQUIRE(!clnt_control(client, CLSET_RDMA_MAXREPLY, NULL));
    /* The same limit as for RPCRDMA_MAX_REPLY: a larger value is refused, and changes nothing. */
    most = SIZE_MAX;
    REQUIRE(!clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    most = (1 << 30) + 1;
    REQUIRE(!clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    REQUIRE(clnt_control(client, CLGET_RDMA_MAXREPLY, (char *)&most) && most == 16 << 20);
    most = 1 << 30;
    REQUIRE(clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    REQUIRE(clnt_control(client, CLGET_RDMA_MAXREPLY, (char *)&most) && most == 1 << 30);
    most = 64 << 10;
    REQUIRE(clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    u_int ask = 100000;
    struct blob blob = {NULL, 0};
    REQUIRE(clnt_call(client, 2, (xdrproc_t)xdr_u_int, (char *)&ask, (xdrproc_t)xdr_blob, (char *)&blob, patient) !=
            RPC_SUCCESS);
    /* The text names the control, and the connection lives on. */
    if (strstr(clnt_sperror(client, "call"), "CLSET_RDMA_MAXREPLY") == NULL)
        clnt_perror(client, "does not name the control");
    REQUIRE(strstr(clnt_sperror(client, "call"), "CLSET_RDMA_MAXREPLY") != NULL);
    most = 128 << 10;
    REQUIRE(clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    REQUIRE(clnt_call(client, 2, (xdrproc_t)xdr_u_int, (char *)&ask, (xdrproc_t)xdr_blob, (char *)&blob, patient) ==
            RPC_SUCCESS);
    REQUIRE(blob.length == ask);
    clnt_freeres(client, (xdrproc_t)xdr_blob, (char *)&blob);
    REQUIRE(rpcrdma_stats_get(&after, sizeof after));
    REQUIRE(after.calls - before.calls == 2 && after.replies - before.replies == 1);
    REQUIRE(after.errors_received - before.errors_received == 1);
    clnt_destroy(client);
    stop(server);
    puts("ok    CLSET_RDMA_MAXREPLY and CLGET_RDMA_MAXREPLY");
}

static void statistics(void)
{
    struct rpcrdma_stats before, after;
    struct address address;
    int fd = bound(AF_INET, &address);
    REQUIRE(listen(fd, 8) == 0);
    pid_t server = serve(fd);
    REQUIRE(rpcrdma_stats_get(&before, sizeof before));
    CLIENT *client = clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0);
    REQUIRE(client != NULL);
    for (int i = 0; i < 10; i++)
        require_netid(client, "rdma");
    REQUIRE(rpcrdma_stats_get(&after, sizeof after));
    REQUIRE(after.calls - before.calls == 10 && after.replies - before.replies == 10);
    REQUIRE(after.connections - before.connections == 1);
    REQUIRE(after.bytes_inline > before.bytes_inline && after.sends > before.sends);
    clnt_destroy(client);
    stop(server);
    /* A program that was compiled when there were only two counters. */
    struct rpcrdma_stats untouched = after;
    uint64_t two[3] = {0, 0, 77};
    REQUIRE(rpcrdma_stats_get((struct rpcrdma_stats *)two, 16));
    REQUIRE(two[0] == after.calls && two[1] == after.replies && two[2] == 77);
    REQUIRE(!rpcrdma_stats_get(NULL, sizeof after));
    REQUIRE(!rpcrdma_stats_get(&after, 0) && !rpcrdma_stats_get(&after, 13));
    REQUIRE(memcmp(&untouched, &after, sizeof after) == 0);
    puts("ok    rpcrdma_stats_get");
}

static void misuse(void)
{
    struct address address = loopback(AF_INET);
    int fds[2];
    REQUIRE(pipe(fds) == 0);
    int udp = socket(AF_INET, SOCK_DGRAM, 0);
    int wrong[] = {fds[0], udp, 9999, -2};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REQUIRE(clnt_rdma_create(wrong[i], netbuf(&address), PROG, 1, 0, 0) == NULL);
        require_failure("is not a TCP socket");
        REQUIRE(svc_rdma_create(wrong[i], 0, 0) == NULL);
        require_failure("is not a TCP socket");
    }
    REQUIRE(clnt_rdma_create(RPC_ANYFD, NULL, PROG, 1, 0, 0) == NULL);
    require_failure("no internet address");
    struct netbuf empty = {0, 0, NULL}, nonsense = {.maxlen = 16, .len = 16, .buf = NULL};
    REQUIRE(clnt_rdma_create(RPC_ANYFD, &empty, PROG, 1, 0, 0) == NULL);
    require_failure("no internet address");
    REQUIRE(clnt_rdma_create(RPC_ANYFD, &nonsense, PROG, 1, 0, 0) == NULL);
    require_failure("no internet address");
    REQUIRE(clnt_rdma_create(RPC_ANYFD, netbuf(&address), 100000, 4, 0, 0) == NULL);
    require_failure("rpcbind is served over tcp");
    /* A socket whose family is not that of the address. */
    int six = socket(AF_INET6, SOCK_STREAM, 0);
    if (six >= 0)
        REQUIRE(clnt_rdma_create(six, netbuf(&address), PROG, 1, 0, 0) == NULL);
    close(six);
    close(udp);
    close(fds[0]);
    close(fds[1]);
    puts("ok    NULL and wrong descriptors are errors");
}

/* ---- Calls back -------------------------------------------------------------------------------------------------- */

#define BACK 0x20000067

/* What the server is told to do with its reverse CLIENT: */
enum {
    ORDER_CALL = 10, /* makes one, calls back inside the dispatch routine, and says what came of it */
    ORDER_LAST,      /* says what came of the last one */
    ORDER_KEEP,      /* makes one that stays */
    ORDER_KEPT,      /* calls with that one */
    ORDER_REBIND,    /* has it go on over the connection of this request */
    ORDER_MISUSE,    /* tries what must fail, on either kind of handle */
    ORDER_FORK,      /* tries to call back in a forked child */
    ORDER_START,     /* has threads call with the one that stays */
    ORDER_JOIN,      /* waits for them; how many calls went well, and what came of the last that did not */
    ORDER_PEER,      /* says what the client is like */
    ORDER_RAISE,     /* makes its own Receives longer */
    ORDER_ASK,       /* asks the client for Receives of some length, and says what came of it */
    ORDER_NEST,      /* its xdrprocs call back: xdr_nest */
};
/* What the client's program does when it is called back. */
enum { BACK_UID = 1, BACK_LENGTH, BACK_FORWARD, BACK_SILENCE, BACK_EXIT, BACK_NEST };
enum { AS_SYS = 1, WITHOUT_CHUNKS = 2 };

struct order {
    u_int program, version, procedure, milliseconds, how, length, threads, calls;
};
struct outcome {
    u_int status, low, high, result, milliseconds;
};

static bool_t xdr_words(XDR *xdrs, u_int *words, size_t bytes)
{
    return xdr_vector(xdrs, (char *)words, (u_int)(bytes / sizeof *words), sizeof *words, (xdrproc_t)xdr_u_int);
}
static bool_t xdr_order(XDR *xdrs, struct order *order) { return xdr_words(xdrs, &order->program, sizeof *order); }
static bool_t xdr_outcome(XDR *xdrs, struct outcome *outcome)
{
    return xdr_words(xdrs, &outcome->status, sizeof *outcome);
}

static struct outcome call_back(CLIENT *back, const struct order *order)
{
    struct timeval limit = {order->milliseconds / 1000, order->milliseconds % 1000 * 1000};
    struct blob blob = {calloc(1, order->length + 1), order->length};
    AUTH *none = back->cl_auth;
    gid_t gids[] = {7, 8};
    char machine[] = "machine";
    if (order->how & AS_SYS)
        back->cl_auth = authunix_create(machine, 1234, 5678, 2, gids);
    bool_t chunks = !(order->how & WITHOUT_CHUNKS);
    REQUIRE(clnt_control(back, CLSET_RDMA_REVERSE_CHUNKS, (char *)&chunks));
    struct outcome outcome = {0};
    struct timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    outcome.status = clnt_call(back, order->procedure, (xdrproc_t)xdr_blob, (char *)&blob, (xdrproc_t)xdr_u_int,
                               (char *)&outcome.result, limit);
    clock_gettime(CLOCK_MONOTONIC, &after);
    outcome.milliseconds =
        (u_int)((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000);
    struct rpc_err error;
    clnt_geterr(back, &error);
    outcome.low = (u_int)error.re_vers.low;
    outcome.high = (u_int)error.re_vers.high;
    if (back->cl_auth != none)
        auth_destroy(back->cl_auth);
    back->cl_auth = none;
    free(blob.bytes);
    return outcome;
}

static void require_text(CLIENT *client, const char *word)
{
    const char *text = clnt_sperror(client, "call");
    if (strstr(text, word) == NULL)
        fprintf(stderr, "\"%s\" does not say \"%s\"\n", text, word);
    REQUIRE(strstr(text, word) != NULL);
}

/* A CLIENT and two SVCXPRTs of libtirpc itself. */
struct stock {
    CLIENT *client;
    SVCXPRT *listener, *connection;
    int fds[2];
};

static struct stock stock_handles(void)
{
    struct stock stock;
    struct address address;
    int fd = bound(AF_INET, &address);
    REQUIRE(listen(fd, 8) == 0);
    for (int i = 0; i < 2; i++) {
        stock.fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        REQUIRE(connect(stock.fds[i], &address.u.any, address.netbuf.len) == 0);
    }
    stock.client = clnt_vc_create(stock.fds[0], netbuf(&address), PROG, 1, 0, 0);
    stock.connection = svc_fd_create(stock.fds[1], 0, 0);
    stock.listener = svc_vc_create(fd, 0, 0);
    REQUIRE(stock.client != NULL && stock.connection != NULL && stock.listener != NULL);
    return stock;
}

static void stock_destroy(struct stock *stock)
{
    clnt_destroy(stock->client);
    svc_destroy(stock->listener);
    svc_destroy(stock->connection);
    close(stock->fds[0]);
}

static void require_credits(CLIENT *client, u_int set, u_int get, u_int first)
{
    static const u_int wrong[] = {0, 4097, UINT32_MAX};
    u_int credits = 0;
    REQUIRE(clnt_control(client, get, (char *)&credits) && credits == first);
    REQUIRE(!clnt_control(client, get, NULL) && !clnt_control(client, set, NULL));
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        credits = wrong[i];
        REQUIRE(!clnt_control(client, set, (char *)&credits));
    }
    REQUIRE(clnt_control(client, get, (char *)&credits) && credits == first);
    credits = 5;
    REQUIRE(clnt_control(client, set, (char *)&credits));
    credits = 0;
    REQUIRE(clnt_control(client, get, (char *)&credits) && credits == 5);
    REQUIRE(clnt_control(client, set, (char *)&first));
}

static void nothing(struct svc_req *request, SVCXPRT *xprt) { (void)request, (void)xprt; }

/* At the server, inside a dispatch routine; `forward` is a CLIENT that this process has created. */
static void server_misuse(CLIENT *forward, SVCXPRT *xprt, SVCXPRT *listener)
{
    struct stock stock = stock_handles();
    SVCXPRT *wrong[] = {NULL, stock.listener, stock.connection, listener};
    CLIENT *back = rpcrdma_clnt_reverse(xprt, BACK, 1);
    REQUIRE(back != NULL);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REQUIRE(rpcrdma_clnt_reverse(wrong[i], BACK, 1) == NULL);
        require_failure("SVCXPRT is not");
        REQUIRE(!rpcrdma_clnt_rebind(back, wrong[i]));
        require_text(back, "SVCXPRT is not");
        struct rpcrdma_peer peer;
        REQUIRE(!rpcrdma_svc_peer(wrong[i], &peer, sizeof peer));
    }
    REQUIRE(!rpcrdma_clnt_rebind(NULL, xprt) && !rpcrdma_clnt_rebind(stock.client, xprt));
    REQUIRE(!rpcrdma_clnt_rebind(forward, xprt));
    require_text(forward, "not made by rpcrdma_clnt_reverse");
    REQUIRE(!rpcrdma_clnt_serve(back, BACK, 1, nothing));
    require_text(back, "serves nothing itself");
    REQUIRE(rpcrdma_clnt_poll(back, patient) == -1);
    require_text(back, "serves nothing itself");

    require_credits(back, CLSET_RDMA_CREDITS, CLGET_RDMA_CREDITS, 16);
    u_int number = 5;
    REQUIRE(!clnt_control(back, CLSET_RDMA_REVERSE_CREDITS, (char *)&number));
    REQUIRE(!clnt_control(back, CLGET_RDMA_REVERSE_CREDITS, (char *)&number));
    REQUIRE(!clnt_control(back, CLGET_RDMA_CONNECTIONS, (char *)&number));
    size_t most = 0;
    REQUIRE(clnt_control(back, CLGET_RDMA_MAXREPLY, (char *)&most) && most > 2000 && most < 4096);

    u_int before = 0;
    REQUIRE(SVC_CONTROL(xprt, SVCGET_RDMA_CREDITS, &before) && before == 32);
    REQUIRE(!SVC_CONTROL(xprt, SVCGET_RDMA_CREDITS, NULL) && !SVC_CONTROL(xprt, SVCSET_RDMA_CREDITS, NULL));
    static u_int refused[] = {0, 4097};
    for (size_t i = 0; i < 2; i++)
        REQUIRE(!SVC_CONTROL(xprt, SVCSET_RDMA_CREDITS, &refused[i]));
    REQUIRE(SVC_CONTROL(xprt, SVCSET_RDMA_CREDITS, &(u_int){7}));
    REQUIRE(SVC_CONTROL(xprt, SVCGET_RDMA_CREDITS, &number) && number == 7);
    REQUIRE(SVC_CONTROL(xprt, SVCSET_RDMA_CREDITS, &before));
    REQUIRE(!SVC_CONTROL(stock.connection, SVCSET_RDMA_CREDITS, &before));
    clnt_destroy(back);
    stock_destroy(&stock);
}

static void call_back_from_a_child(CLIENT *kept, SVCXPRT *xprt, const struct order *order)
{
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        REQUIRE(rpcrdma_clnt_reverse(xprt, BACK, 1) == NULL);
        require_failure("belongs to the parent");
        REQUIRE(!rpcrdma_clnt_rebind(kept, xprt));
        REQUIRE(call_back(kept, order).status != RPC_SUCCESS);
        require_text(kept, "belongs to the parent");
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

static struct outcome client_is_like(CLIENT *back, SVCXPRT *xprt)
{
    struct rpcrdma_peer peer, same;
    REQUIRE(rpcrdma_svc_peer(xprt, &peer, sizeof peer) && rpcrdma_clnt_peer(back, &same, sizeof same));
    REQUIRE(memcmp(&peer, &same, sizeof peer) == 0);
    REQUIRE(!rpcrdma_svc_peer(xprt, NULL, sizeof peer) && !rpcrdma_svc_peer(xprt, &peer, 6));
    return (struct outcome){.low = peer.version, .high = peer.own_receive_size, .result = peer.receive_size};
}

static struct worker {
    pthread_t thread;
    CLIENT *back;
    struct order order;
    struct outcome outcome;
} workers[8];
static size_t running;

static void *work(void *argument)
{
    struct worker *worker = argument;
    for (u_int i = 0, good = 0; i < worker->order.calls; i++) {
        struct outcome outcome = call_back(worker->back, &worker->order);
        if (outcome.status == RPC_SUCCESS)
            good++;
        else
            worker->outcome.status = outcome.status;
        worker->outcome.result = good;
    }
    return NULL;
}

static void start_workers(CLIENT *back, const struct order *order)
{
    for (; running < order->threads; running++) {
        workers[running] = (struct worker){.back = back, .order = *order};
        REQUIRE(pthread_create(&workers[running].thread, NULL, work, &workers[running]) == 0);
    }
}

static struct outcome join_workers(void)
{
    struct outcome sum = {0};
    for (; running > 0; running--) {
        struct worker *worker = &workers[running - 1];
        REQUIRE(pthread_join(worker->thread, NULL) == 0);
        sum.result += worker->outcome.result;
        if (worker->outcome.status != RPC_SUCCESS)
            sum.status = worker->outcome.status;
    }
    return sum;
}

/* The arguments and the results of ORDER_NEST. Where `xprt` is set, which is at the server, the xdrproc calls back between the
 * words, nested `depth` deep: each call back makes a forward call before it is answered. The innermost one destroys the SVCXPRT
 * if that is asked for. */
struct nest {
    u_int depth, destroy, before, after;
    SVCXPRT *xprt;
};

static bool_t xdr_nest(XDR *xdrs, struct nest *nest)
{
    if (!xdr_u_int(xdrs, &nest->depth) || !xdr_u_int(xdrs, &nest->destroy) || !xdr_u_int(xdrs, &nest->before))
        return FALSE;
    if (nest->xprt != NULL && xdrs->x_op != XDR_FREE) {
        u_int credits = 0;
        REQUIRE(SVC_CONTROL(nest->xprt, SVCGET_RDMA_CREDITS, &credits) && credits == 32);
        REQUIRE(SVC_CONTROL(nest->xprt, SVCSET_RDMA_CREDITS, &credits));
        if (nest->depth > 0) {
            struct order order = {
                .procedure = BACK_NEST, .milliseconds = 20000, .length = (nest->depth - 1) * 2 + nest->destroy};
            CLIENT *back = rpcrdma_clnt_reverse(nest->xprt, BACK, 1);
            REQUIRE(back != NULL);
            struct outcome outcome = call_back(back, &order);
            REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == RPC_SUCCESS);
            clnt_destroy(back);
        } else if (nest->destroy) {
            svc_destroy(nest->xprt);
        }
    }
    return xdr_u_int(xdrs, &nest->after);
}

static void nest(SVCXPRT *xprt)
{
    struct nest nest = {.xprt = xprt};
    if (!svc_getargs(xprt, (xdrproc_t)xdr_nest, (char *)&nest)) {
        svcerr_decode(xprt);
        return;
    }
    nest.before++;
    nest.after++;
    /* Not again: a destroyed transport makes no call back. */
    if (nest.destroy)
        nest.xprt = NULL;
    svc_sendreply(xprt, (xdrproc_t)xdr_nest, (char *)&nest);
}

static bool nested(CLIENT *client, u_int depth, u_int destroy)
{
    struct nest sent = {depth, destroy, 1000 + depth, 2000 + depth, NULL}, got = {0};
    enum clnt_stat status = clnt_call(client, ORDER_NEST, (xdrproc_t)xdr_nest, (char *)&sent, (xdrproc_t)xdr_nest,
                                      (char *)&got, patient);
    if (status != RPC_SUCCESS)
        clnt_perror(client, "nested");
    return status == RPC_SUCCESS && got.depth == depth && got.before == 1001 + depth && got.after == 2001 + depth;
}

static CLIENT *server_forward;
static SVCXPRT *server_listener;

static void conduct(struct svc_req *request, SVCXPRT *xprt)
{
    static CLIENT *kept;
    static struct outcome last;
    if (request->rq_proc < ORDER_CALL) {
        dispatch(request, xprt);
        return;
    }
    if (request->rq_proc == ORDER_NEST) {
        nest(xprt);
        return;
    }
    struct order order;
    if (!svc_getargs(xprt, (xdrproc_t)xdr_order, (char *)&order)) {
        svcerr_decode(xprt);
        return;
    }
    CLIENT *back;
    switch (request->rq_proc) {
    case ORDER_CALL:
        back = rpcrdma_clnt_reverse(xprt, order.program, order.version);
        REQUIRE(back != NULL);
        last = call_back(back, &order);
        clnt_destroy(back);
        break;
    case ORDER_LAST: break;
    case ORDER_KEEP:
        if (kept != NULL)
            clnt_destroy(kept);
        kept = rpcrdma_clnt_reverse(xprt, order.program, order.version);
        REQUIRE(kept != NULL);
        break;
    case ORDER_KEPT: last = call_back(kept, &order); break;
    case ORDER_REBIND: REQUIRE(rpcrdma_clnt_rebind(kept, xprt)); break;
    case ORDER_MISUSE: server_misuse(server_forward, xprt, server_listener); break;
    case ORDER_START: start_workers(kept, &order); break;
    case ORDER_JOIN: last = join_workers(); break;
    case ORDER_FORK: call_back_from_a_child(kept, xprt, &order); break;
    case ORDER_PEER: last = client_is_like(kept, xprt); break;
    case ORDER_RAISE: last.result = clnt_control(kept, CLSET_RDMA_RECEIVE_SIZE, (char *)&order.length); break;
    case ORDER_ASK:
        last.result = (u_int)rpcrdma_clnt_request(kept, RPCRDMA_RECEIVE_SIZE, order.length, patient);
        break;
    default: svcerr_noproc(xprt); return;
    }
    svc_sendreply(xprt, (xdrproc_t)xdr_outcome, (char *)&last);
}

static pid_t serve_back(int fd, struct address *other)
{
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        server_forward = clnt_rdma_create(RPC_ANYFD, netbuf(other), PROG, 1, 0, 0);
        server_listener = svc_rdma_create(fd, 0, 0);
        REQUIRE(server_forward != NULL && server_listener != NULL);
        REQUIRE(svc_reg(server_listener, PROG, 1, conduct, NULL));
        svc_run();
        _exit(1);
    }
    return child;
}

static struct outcome order(CLIENT *client, rpcproc_t what, struct order order)
{
    struct outcome outcome = {.status = RPC_FAILED};
    enum clnt_stat status = clnt_call(client, what, (xdrproc_t)xdr_order, (char *)&order, (xdrproc_t)xdr_outcome,
                                      (char *)&outcome, patient);
    if (status != RPC_SUCCESS)
        clnt_perror(client, "order");
    REQUIRE(status == RPC_SUCCESS);
    return outcome;
}

static u_int connections(CLIENT *client)
{
    u_int number = 0;
    REQUIRE(clnt_control(client, CLGET_RDMA_CONNECTIONS, (char *)&number));
    return number;
}

static CLIENT *called; /* whose server calls back */
static int callbacks;

static void called_back(struct svc_req *request, SVCXPRT *xprt)
{
    callbacks++;
    struct blob blob = {NULL, 0};
    if (!svc_getargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob)) {
        svcerr_decode(xprt);
        return;
    }
    u_int result = 0;
    switch (request->rq_proc) {
    case BACK_UID:
        REQUIRE(request->rq_prog == BACK);
        if (request->rq_cred.oa_flavor == AUTH_SYS) {
            struct authunix_parms *who = (struct authunix_parms *)request->rq_clntcred;
            REQUIRE(who->aup_gid == 5678 && who->aup_len == 2 && who->aup_gids[1] == 8);
            REQUIRE(strcmp(who->aup_machname, "machine") == 0);
            result = who->aup_uid;
        }
        /* The call back comes on a connection that was opened here, not accepted. */
        REQUIRE(rpcrdma_clnt_reverse(xprt, BACK, 1) == NULL);
        require_failure("not that of an accepted connection");
        break;
    case BACK_LENGTH: result = blob.length; break;
    case BACK_FORWARD: result = (u_int)order(called, ORDER_LAST, (struct order){0}).status + 100; break;
    case BACK_NEST: result = nested(called, blob.length / 2, blob.length % 2) ? RPC_SUCCESS : RPC_FAILED; break;
    case BACK_EXIT: _exit(0);
    case BACK_SILENCE: break;
    default: svcerr_noproc(xprt); return;
    }
    if (request->rq_proc != BACK_SILENCE)
        svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&result);
    svc_freeargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob);
}

/* The server, and a plain one that it is itself a client of. */
struct servers {
    struct address address, other;
    pid_t server, plain;
    int fd; /* listens, whoever serves it */
};

static struct servers servers_start(void)
{
    struct servers servers;
    int fd = bound(AF_INET, &servers.other);
    REQUIRE(listen(fd, 8) == 0);
    servers.plain = serve(fd);
    servers.fd = bound(AF_INET, &servers.address);
    REQUIRE(listen(servers.fd, 8) == 0);
    servers.server = serve_back(servers.fd, &servers.other);
    return servers;
}

static void servers_stop(struct servers *servers)
{
    stop(servers->server);
    stop(servers->plain);
    close(servers->fd);
}

static CLIENT *client_of(struct servers *servers)
{
    CLIENT *client = clnt_rdma_create(RPC_ANYFD, netbuf(&servers->address), PROG, 1, 0, 0);
    REQUIRE(client != NULL);
    return client;
}

static const struct order plain_order = {
    .program = BACK, .version = 1, .procedure = BACK_UID, .milliseconds = 20000};

static void callback_misuse(void)
{
    struct servers servers = servers_start();
    struct stock stock = stock_handles();
    CLIENT *client = client_of(&servers);
    const struct timeval nonsense = {.tv_sec = -1};
    REQUIRE(!rpcrdma_clnt_serve(NULL, BACK, 1, nothing) && rpcrdma_clnt_poll(NULL, patient) == -1);
    REQUIRE(!rpcrdma_clnt_serve(stock.client, BACK, 1, nothing) && rpcrdma_clnt_poll(stock.client, patient) == -1);
    REQUIRE(!rpcrdma_clnt_serve(client, BACK, 1, NULL));
    require_text(client, "no program is served");
    REQUIRE(rpcrdma_clnt_poll(client, patient) == -1);
    require_text(client, "call rpcrdma_clnt_serve first");
    u_int number = 1;
    REQUIRE(!clnt_control(stock.client, CLSET_RDMA_CREDITS, (char *)&number));
    REQUIRE(!clnt_control(stock.client, CLGET_RDMA_CONNECTIONS, (char *)&number));
    REQUIRE(!clnt_control(client, CLSET_RDMA_REVERSE_CHUNKS, NULL) && !clnt_control(client, CLGET_RDMA_CONNECTIONS, NULL));
    require_credits(client, CLSET_RDMA_CREDITS, CLGET_RDMA_CREDITS, 32);
    /* What is set before a program is served takes effect when it is served. */
    number = 3;
    REQUIRE(clnt_control(client, CLSET_RDMA_REVERSE_CREDITS, (char *)&number));
    REQUIRE(clnt_control(client, CLGET_RDMA_REVERSE_CREDITS, (char *)&number) && number == 1);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    require_credits(client, CLSET_RDMA_REVERSE_CREDITS, CLGET_RDMA_REVERSE_CREDITS, 3);
    REQUIRE(rpcrdma_clnt_poll(client, nonsense) == -1);
    require_text(client, "invalid timeout");
    REQUIRE(rpcrdma_clnt_poll(client, (struct timeval){0, 0}) == 0);
    REQUIRE(!rpcrdma_clnt_serve(client, BACK, 2, NULL));
    require_text(client, "version 2 is not served");
    order(client, ORDER_MISUSE, plain_order);
    order(client, ORDER_KEEP, plain_order);
    order(client, ORDER_FORK, plain_order);
    REQUIRE(order(client, ORDER_KEPT, plain_order).status == RPC_SUCCESS);
    REQUIRE(connections(client) == 1);
    clnt_destroy(client);
    stock_destroy(&stock);
    servers_stop(&servers);
    puts("ok    calls back: misuse is an error, and the controls get what was set");
}

static void callback_outcomes(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers);
    /* A client that has never served anything; in Version Two it has told its peer so. */
    REQUIRE(order(client, ORDER_CALL, plain_order).status == (version_two ? RPC_FAILED : RPC_PROGUNAVAIL));
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    struct outcome outcome = order(client, ORDER_CALL, plain_order);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == 0);

    struct order other = plain_order;
    other.how = AS_SYS;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == 1234);

    REQUIRE(rpcrdma_clnt_serve(client, BACK, 4, called_back));
    other = plain_order;
    other.version = 2;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status == RPC_PROGVERSMISMATCH && outcome.low == 1 && outcome.high == 4);
    other.version = 4;
    REQUIRE(order(client, ORDER_CALL, other).status == RPC_SUCCESS);
    other.program++;
    REQUIRE(order(client, ORDER_CALL, other).status == RPC_PROGUNAVAIL);
    other = plain_order;
    other.procedure = 99;
    REQUIRE(order(client, ORDER_CALL, other).status == RPC_PROCUNAVAIL);

    /* A callback that calls forward, and one that is never answered. */
    other.procedure = BACK_FORWARD;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == RPC_PROCUNAVAIL + 100);
    other.procedure = BACK_SILENCE;
    other.milliseconds = 100;
    REQUIRE(order(client, ORDER_CALL, other).status == RPC_TIMEDOUT);

    /* A long callback, in chunks; then one end does not send it, then the other does not take it. */
    other = plain_order;
    other.procedure = BACK_LENGTH;
    other.length = 100000;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == other.length);
    other.how = WITHOUT_CHUNKS;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status != RPC_SUCCESS && outcome.status != RPC_TIMEDOUT);
    other.how = 0;
    REQUIRE(clnt_control(client, CLSET_RDMA_REVERSE_CHUNKS, (char *)&(bool_t){FALSE}));
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status != RPC_SUCCESS && outcome.status != RPC_TIMEDOUT);
    other.length = 500;
    outcome = order(client, ORDER_CALL, other);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == other.length);

    /* A connection has one credit before its first reply: the call that leads to the callback must not use it up. */
    CLIENT *fresh = called = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(fresh, BACK, 1, called_back));
    other = plain_order;
    other.procedure = BACK_FORWARD;
    REQUIRE(order(fresh, ORDER_CALL, other).status == RPC_SUCCESS);
    clnt_destroy(fresh);

    /* The versions are no longer served, one after the other. */
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, NULL));
    outcome = order(client, ORDER_CALL, plain_order);
    REQUIRE(outcome.status == RPC_PROGVERSMISMATCH && outcome.low == 4 && outcome.high == 4);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 4, NULL));
    REQUIRE(order(client, ORDER_CALL, plain_order).status == RPC_PROGUNAVAIL);
    REQUIRE(rpcrdma_clnt_poll(client, patient) == -1);
    REQUIRE(connections(client) == 1);
    clnt_destroy(client);
    servers_stop(&servers);
    puts("ok    calls back: every outcome reaches the server, and the connection lives on");
}

/* While an xdrproc of the server runs, the program is called on the same SVCXPRT, and destroys it. */
static void callback_in_an_xdrproc(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    REQUIRE(order(client, ORDER_CALL, plain_order).status == RPC_SUCCESS);
    for (u_int depth = 0; depth < 6; depth++)
        REQUIRE(nested(client, depth, FALSE));
    REQUIRE(connections(client) == 1);
    clnt_destroy(client);
    for (u_int depth = 0; depth < 6; depth++) {
        client = called = client_of(&servers);
        REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
        /* Before its first reply a connection has one credit for calls back. */
        REQUIRE(order(client, ORDER_CALL, plain_order).status == RPC_SUCCESS);
        REQUIRE(nested(client, depth, TRUE));
        clnt_destroy(client);
    }
    client = called = client_of(&servers);
    require_netid(client, "rdma");
    clnt_destroy(client);
    servers_stop(&servers);
    puts("ok    calls back: from an xdrproc of the server, which is entered again meanwhile, and loses its SVCXPRT");
}

/* A client that ends before or while it is called back. */
static void callback_to_the_dead(void)
{
    struct servers servers = servers_start();
    struct order fatal = plain_order;
    fatal.procedure = BACK_EXIT;
    for (int during = 0; during < 2; during++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            CLIENT *client = client_of(&servers);
            REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
            order(client, during ? ORDER_CALL : ORDER_KEEP, fatal);
            _exit(during);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && status == 0);
        CLIENT *client = client_of(&servers);
        struct outcome outcome = order(client, during ? ORDER_LAST : ORDER_KEPT, plain_order);
        REQUIRE(outcome.status == RPC_CANTRECV || (outcome.status == RPC_CANTSEND && !during));
        REQUIRE(outcome.milliseconds < 10000);
        if (!during)
            REQUIRE(order(client, ORDER_KEPT, plain_order).status == RPC_CANTSEND);
        clnt_destroy(client);
    }
    servers_stop(&servers);
    puts("ok    calls back: to a client that has ended they fail at once");
}

/* A turn of the loop of svc_run(). */
static void loop_turn(void)
{
    struct pollfd polled[64];
    int count = svc_max_pollfd;
    REQUIRE(count <= 64);
    memcpy(polled, svc_pollfd, (size_t)count * sizeof *polled);
    int ready = poll(polled, (nfds_t)count, (int)patient.tv_sec * 1000);
    REQUIRE(ready > 0);
    svc_getreq_poll(polled, ready);
}

/* The service loop serves callbacks; the loop of a forked child leaves them to the parent. */
static void callback_loops(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers), *second = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    order(client, ORDER_KEEP, plain_order);
    callbacks = 0;
    struct order kept = plain_order;
    const struct timeval at_once = {0, 0};
    clnt_call(second, ORDER_KEPT, (xdrproc_t)xdr_order, (char *)&kept, (xdrproc_t)NULL, NULL, at_once);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        loop_turn();
        _exit(callbacks);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    while (callbacks == 0)
        loop_turn();
    REQUIRE(order(second, ORDER_LAST, plain_order).status == RPC_SUCCESS && callbacks == 1);
    clnt_destroy(client);
    clnt_destroy(second);
    servers_stop(&servers);
    puts("ok    calls back: the service loop serves them, and not that of a forked child");
}

static void callback_threads(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers), *second = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    order(client, ORDER_KEEP, plain_order);
    struct order many = plain_order;
    many.threads = 4;
    many.calls = 100;
    /* While the server's loop has nothing to do; then while it waits for the threads, inside a dispatch routine. */
    callbacks = 0;
    order(second, ORDER_START, many);
    while (callbacks < 400)
        REQUIRE(rpcrdma_clnt_poll(client, patient) > 0);
    struct outcome outcome = order(second, ORDER_JOIN, many);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == 400);
    order(second, ORDER_START, many);
    outcome = order(client, ORDER_JOIN, many);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == 400);
    /* Calls in other threads wait for the client to come back. */
    clnt_destroy(client);
    while (order(second, ORDER_KEPT, plain_order).status != RPC_CANTSEND)
        ;
    many.calls = 1;
    order(second, ORDER_START, many);
    client = called = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    order(client, ORDER_REBIND, plain_order);
    outcome = order(client, ORDER_JOIN, many);
    REQUIRE(outcome.status == RPC_SUCCESS && outcome.result == 4);
    clnt_destroy(client);
    clnt_destroy(second);
    servers_stop(&servers);
    puts("ok    calls back: in threads, which wait for a client to come back");
}

/* rule 140: the connection is kept open for calls back, and re-established when it is lost. */
static void callback_polls(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers), *second = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    order(client, ORDER_KEEP, plain_order);
    /* The second connection's request makes the server call back on the first. It must not be waited for: nobody would poll. */
    struct order kept = plain_order;
    const struct timeval at_once = {0, 0};
    clnt_call(second, ORDER_KEPT, (xdrproc_t)xdr_order, (char *)&kept, (xdrproc_t)NULL, NULL, at_once);
    REQUIRE(rpcrdma_clnt_poll(client, patient) == 1);
    REQUIRE(order(second, ORDER_LAST, plain_order).status == RPC_SUCCESS);
    REQUIRE(rpcrdma_clnt_poll(client, (struct timeval){0, 1000}) == 0);

    /* The calls back move from one connection to the other. */
    CLIENT *again = client_of(&servers);
    REQUIRE(rpcrdma_clnt_serve(again, BACK, 1, called_back));
    order(again, ORDER_REBIND, plain_order);
    clnt_destroy(client);
    REQUIRE(order(again, ORDER_KEPT, plain_order).status == RPC_SUCCESS);

    /* A server that dies, and its successor. */
    stop(servers.server);
    servers.server = serve_back(servers.fd, &servers.other);
    u_int credits = 9, calls = 8;
    REQUIRE(clnt_control(again, CLSET_RDMA_REVERSE_CREDITS, (char *)&credits));
    REQUIRE(clnt_control(again, CLSET_RDMA_CREDITS, (char *)&calls));
    REQUIRE(clnt_control(again, CLSET_RDMA_REVERSE_CHUNKS, (char *)&(bool_t){FALSE}));
    time_t before = time(NULL);
    REQUIRE(rpcrdma_clnt_poll(again, patient) == 0);
    REQUIRE(connections(again) == 2 && time(NULL) - before < patient.tv_sec / 2);
    /* The settings hold on the new connection too. */
    REQUIRE(clnt_control(again, CLGET_RDMA_REVERSE_CREDITS, (char *)&credits) && credits == 9);
    REQUIRE(clnt_control(again, CLGET_RDMA_CREDITS, (char *)&calls) && calls == 8);
    struct order longer = plain_order;
    longer.procedure = BACK_LENGTH;
    longer.length = 100000;
    REQUIRE(order(again, ORDER_CALL, longer).status != RPC_SUCCESS);
    REQUIRE(order(again, ORDER_CALL, plain_order).status == RPC_SUCCESS);

    /* Nobody succeeds that server. */
    stop(servers.server);
    close(servers.fd);
    REQUIRE(rpcrdma_clnt_poll(again, (struct timeval){0, 100000}) == -1);
    require_text(again, "connect");
    clnt_destroy(again);
    clnt_destroy(second);
    stop(servers.plain);
    puts("ok    calls back: rpcrdma_clnt_poll serves them, and brings the connection back");
}

/* ---- Transport characteristics --------------------------------------------------------------------------------- */

static struct rpcrdma_peer peer_of(CLIENT *client)
{
    struct rpcrdma_peer peer;
    if (!rpcrdma_clnt_peer(client, &peer, sizeof peer))
        clnt_perror(client, "rpcrdma_clnt_peer");
    REQUIRE(rpcrdma_clnt_peer(client, &peer, sizeof peer));
    return peer;
}

static u_int own_receives(CLIENT *client)
{
    u_int bytes = 0;
    REQUIRE(clnt_control(client, CLGET_RDMA_RECEIVE_SIZE, (char *)&bytes));
    return bytes;
}

static struct outcome order_of_length(CLIENT *client, rpcproc_t what, u_int length)
{
    struct order sized = plain_order;
    sized.length = length;
    return order(client, what, sized);
}

struct news {
    int count;
    struct rpcrdma_peer peer;
};

static void told(CLIENT *client, const struct rpcrdma_peer *peer, void *closure)
{
    struct news *news = closure;
    news->count++;
    news->peer = *peer;
    /* No lock is held. */
    REQUIRE(peer_of(client).version == peer->version);
    require_netid(client, "rdma");
}

/* How often a call with `length` bytes, whose reply is short, exposes our memory. */
static uint64_t registrations(CLIENT *client, u_int length)
{
    struct blob blob = {calloc(1, length), length};
    struct rpcrdma_stats before, after;
    u_int came = 0;
    REQUIRE(rpcrdma_stats_get(&before, sizeof before));
    enum clnt_stat status =
        clnt_call(client, 3, (xdrproc_t)xdr_blob, (char *)&blob, (xdrproc_t)xdr_u_int, (char *)&came, patient);
    REQUIRE(status == RPC_SUCCESS && came == length);
    REQUIRE(rpcrdma_stats_get(&after, sizeof after));
    free(blob.bytes);
    return after.registrations - before.registrations;
}

static void characteristics_misuse(CLIENT *client)
{
    struct stock stock = stock_handles();
    struct rpcrdma_peer peer, untouched;
    memset(&peer, 7, sizeof peer);
    untouched = peer;
    REQUIRE(!rpcrdma_clnt_peer(NULL, &peer, sizeof peer) && !rpcrdma_clnt_peer(stock.client, &peer, sizeof peer));
    static const size_t wrong[] = {0, 1, 6, 29};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        REQUIRE(!rpcrdma_clnt_peer(client, &peer, wrong[i]));
    REQUIRE(!rpcrdma_clnt_peer(client, NULL, sizeof peer));
    require_text(client, "invalid size");
    REQUIRE(memcmp(&peer, &untouched, sizeof peer) == 0);
    /* Programs older and newer than the library. */
    uint32_t two[3] = {77, 77, 77}, ten[10];
    memset(ten, 7, sizeof ten);
    REQUIRE(rpcrdma_clnt_peer(client, (struct rpcrdma_peer *)two, 8));
    REQUIRE(two[0] != 77 && two[1] != 77 && two[2] == 77);
    REQUIRE(rpcrdma_clnt_peer(client, (struct rpcrdma_peer *)ten, sizeof ten) && ten[0] == two[0]);
    REQUIRE(ten[7] == 0 && ten[8] == 0 && ten[9] == 0);

    REQUIRE(rpcrdma_clnt_request(NULL, RPCRDMA_RECEIVE_SIZE, 8192, patient) == -1);
    REQUIRE(rpcrdma_clnt_request(stock.client, RPCRDMA_RECEIVE_SIZE, 8192, patient) == -1);
    static const uint32_t values[][2] = {{0, 1}, {4, 1}, {RPCRDMA_REMOTE_INVALIDATION, 2}, {RPCRDMA_BACKWARD, 4}};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        char text[64];
        snprintf(text, sizeof text, "no characteristic %u with the value %u", values[i][0], values[i][1]);
        REQUIRE(rpcrdma_clnt_request(client, values[i][0], values[i][1], patient) == -1);
        require_text(client, text);
    }
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 8192, (struct timeval){.tv_sec = -1}) == -1);
    require_text(client, "invalid timeout");
    REQUIRE(!rpcrdma_clnt_on_update(NULL, told, NULL) && !rpcrdma_clnt_on_update(stock.client, told, NULL));
    u_int bytes = 8192;
    REQUIRE(!clnt_control(stock.client, CLSET_RDMA_RECEIVE_SIZE, (char *)&bytes));
    REQUIRE(!clnt_control(client, CLSET_RDMA_RECEIVE_SIZE, NULL));
    REQUIRE(!clnt_control(client, CLGET_RDMA_RECEIVE_SIZE, NULL));
    stock_destroy(&stock);
}

static void characteristics_of_version_one(void)
{
    struct servers servers = servers_start();
    CLIENT *client = client_of(&servers);
    struct news news = {0};
    characteristics_misuse(client);
    REQUIRE(rpcrdma_clnt_on_update(client, told, &news));
    order(client, ORDER_KEEP, plain_order);
    struct rpcrdma_peer peer = peer_of(client);
    REQUIRE(peer.version == 1 && peer.extension == 1);
    REQUIRE(peer.receive_size == 4096 && peer.own_receive_size == 4096);
    REQUIRE(peer.remote_invalidation == 1 && peer.backward == RPCRDMA_BACKWARD_UNKNOWN && peer.updates == 0);
    struct outcome outcome = order(client, ORDER_PEER, plain_order);
    REQUIRE(outcome.low == 1 && outcome.high == 4096 && outcome.result == 4096);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 8192, patient) == -1);
    require_text(client, "RPCRDMA_VERSION=auto");
    REQUIRE(order_of_length(client, ORDER_ASK, 8192).result == (u_int)-1);
    u_int bytes = 8192;
    REQUIRE(!clnt_control(client, CLSET_RDMA_RECEIVE_SIZE, (char *)&bytes) && own_receives(client) == 4096);
    require_text(client, "RPCRDMA_VERSION=auto");
    REQUIRE(order_of_length(client, ORDER_RAISE, 8192).result == FALSE);
    REQUIRE(news.count == 0);
    clnt_destroy(client);
    servers_stop(&servers);
    puts("ok    characteristics: Version One has none to ask for, and says what it knows");
}

static void characteristics_asked(void)
{
    struct servers servers = servers_start();
    CLIENT *client = client_of(&servers);
    /* The answer to the offer may be there already. */
    struct rpcrdma_peer peer = peer_of(client);
    REQUIRE(peer.version == 2 || (peer.version == 0 && peer.extension == 0 && peer.receive_size == 1024));
    /* Replies so short that they need no Reply chunk, whatever RPCSEC_GSS would add to them. */
    size_t most = 100;
    u_int bytes = 8192;
    REQUIRE(clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
    REQUIRE(registrations(client, 12000) > 0);
    peer = peer_of(client);
    REQUIRE(peer.version == 2 && peer.extension == 2);
    REQUIRE(peer.receive_size == 4096 && peer.own_receive_size == 4096);
    REQUIRE(peer.remote_invalidation == 1 && peer.backward == RPCRDMA_BACKWARD_GENERAL && peer.updates == 1);
    characteristics_misuse(client);
    REQUIRE(clnt_control(client, CLSET_RDMA_RECEIVE_SIZE, (char *)&bytes));
    while (own_receives(client) != 8192)
        require_netid(client, "rdma");

    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 16384, patient) == RPCRDMA_DONE);
    peer = peer_of(client);
    REQUIRE(peer.receive_size == 16384 && peer.updates == 2);
    REQUIRE(registrations(client, 12000) == 0 && registrations(client, 20000) > 0);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 1 << 20, patient) == RPCRDMA_REJECTED);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 1000, patient) == -1);
    require_text(client, "1024");
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_REMOTE_INVALIDATION, 1, patient) == RPCRDMA_DONE);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_REMOTE_INVALIDATION, 0, patient) == RPCRDMA_REJECTED);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_BACKWARD, RPCRDMA_BACKWARD_NONE, patient) == RPCRDMA_REJECTED);
    /* A request is still pending when its time is over, and another one has to wait for it: the server is stopped meanwhile. */
    REQUIRE(kill(servers.server, SIGSTOP) == 0 && waitpid(servers.server, NULL, WUNTRACED) == servers.server);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 8192, (struct timeval){0}) == RPCRDMA_PENDING);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 4096, patient) == -1);
    require_text(client, "not settled");
    REQUIRE(kill(servers.server, SIGCONT) == 0);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 8192, patient) == RPCRDMA_DONE);
    REQUIRE(peer_of(client).receive_size == 8192);

    /* A request before the first call waits for the version; one without a connection fails. */
    CLIENT *fresh = client_of(&servers);
    REQUIRE(rpcrdma_clnt_request(fresh, RPCRDMA_RECEIVE_SIZE, 32768, patient) == RPCRDMA_DONE);
    stop(servers.server);
    REQUIRE(rpcrdma_clnt_request(fresh, RPCRDMA_RECEIVE_SIZE, 16384, patient) == -1);
    REQUIRE(!rpcrdma_clnt_peer(fresh, &peer, sizeof peer));
    require_text(fresh, "closed");
    clnt_destroy(fresh);
    clnt_destroy(client);
    servers_stop(&servers);
    puts("ok    characteristics: what a server is asked for is done, refused, or an error that says why");
}

static void characteristics_told(void)
{
    struct servers servers = servers_start();
    CLIENT *client = called = client_of(&servers);
    struct news news = {0};
    REQUIRE(rpcrdma_clnt_on_update(client, told, &news));
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    order(client, ORDER_KEEP, plain_order);
    REQUIRE(news.count == 0);
    REQUIRE(rpcrdma_clnt_request(client, RPCRDMA_RECEIVE_SIZE, 8192, patient) == RPCRDMA_DONE);
    REQUIRE(news.count == 1 && news.peer.version == 2 && news.peer.receive_size == 8192);
    REQUIRE(order(client, ORDER_KEPT, plain_order).status == RPC_SUCCESS && news.count == 1);

    /* The server changes it of its own accord. The calls that told() makes when that is reported do not hide the outcome of the
     * call before. */
    REQUIRE(order_of_length(client, ORDER_RAISE, 1 << 20).result == FALSE);
    REQUIRE(order_of_length(client, ORDER_RAISE, 32768).result == TRUE);
    struct rpc_err error = {.re_status = RPC_PROCUNAVAIL};
    while (news.count == 1) {
        clnt_call(client, 9, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, patient);
        clnt_geterr(client, &error);
        REQUIRE(error.re_status == RPC_PROCUNAVAIL);
    }
    for (int i = 0; i < 5; i++)
        order(client, ORDER_LAST, plain_order);
    REQUIRE(news.count == 2 && news.peer.receive_size == 32768);

    /* The client changes it, of its own accord and when asked. */
    u_int bytes = 2048;
    REQUIRE(!clnt_control(client, CLSET_RDMA_RECEIVE_SIZE, (char *)&bytes));
    require_text(client, "at least 4096");
    bytes = 8192;
    REQUIRE(clnt_control(client, CLSET_RDMA_RECEIVE_SIZE, (char *)&bytes));
    while (own_receives(client) != 8192)
        order(client, ORDER_LAST, plain_order);
    REQUIRE(order(client, ORDER_PEER, plain_order).result == 8192);
    struct outcome outcome = order_of_length(client, ORDER_ASK, 16384);
    REQUIRE(outcome.result == RPCRDMA_DONE);
    outcome = order(client, ORDER_PEER, plain_order);
    REQUIRE(outcome.low == 2 && outcome.high == 32768 && outcome.result == 16384 && own_receives(client) == 16384);
    REQUIRE(order_of_length(client, ORDER_ASK, 1 << 20).result == RPCRDMA_REJECTED);

    /* On the next connection the peer is told the settings again; the program is no longer told of updates. */
    REQUIRE(rpcrdma_clnt_on_update(client, NULL, NULL));
    stop(servers.server);
    servers.server = serve_back(servers.fd, &servers.other);
    REQUIRE(rpcrdma_clnt_poll(client, patient) == 0 && connections(client) == 2);
    while (own_receives(client) != 8192)
        order(client, ORDER_LAST, plain_order);
    REQUIRE(news.count == 2 && peer_of(client).receive_size == 4096);
    clnt_destroy(client);
    servers_stop(&servers);
    puts("ok    characteristics: the program is told of what the peer says, once");
}

int main(int argc, char **argv)
{
    const char *version = getenv("RPCRDMA_VERSION");
    version_two = version != NULL && strcmp(version, "auto") == 0;
    /* A child that ends under valgrind would write the parent's lines a second time. */
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* A wrong setting, made by tests/api.sh. */
    if (argc > 1 && strcmp(argv[1], "misconfigured") == 0) {
        struct address address = loopback(AF_INET);
        REQUIRE(clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0) == NULL);
        require_failure(argv[2]);
        REQUIRE(svc_rdma_create(RPC_ANYFD, 0, 0) == NULL);
        require_failure(argv[2]);
        puts("ok    a wrong setting fails both constructors, and the text names it");
        return 0;
    }
    /* Also run with settings that tests/api.sh makes. */
    if (argc > 1 && strcmp(argv[1], "accepted") == 0) {
        accepted_connection();
        return 0;
    }
    REQUIRE(argc > 1 && strcmp(rpcrdma_version(), argv[1]) == 0);
    puts("ok    rpcrdma_version");
    misuse();
    listeners();
    client_and_server(AF_INET, "rdma");
    client_and_server(AF_INET6, "rdma6");
    accepted_connection();
    controls();
    statistics();
    callback_misuse();
    callback_outcomes();
    callback_in_an_xdrproc();
    callback_to_the_dead();
    callback_loops();
    callback_threads();
    callback_polls();
    if (version_two) {
        characteristics_asked();
        characteristics_told();
    } else {
        characteristics_of_version_one();
    }
    return 0;
}
