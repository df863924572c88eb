/* api.c: the library's own C API, linked with -lrpcrdma. Needs no rpcbind and no root: a server in a child process, on
 * a port of the system's choice. Run by tests/api.sh, which checks what is printed to standard error, too: nothing. */
#include <rpcrdma.h>

#include <arpa/inet.h>
#include <netconfig.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
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

struct blob {
    char *bytes;
    u_int length;
};

static bool_t xdr_blob(XDR *xdrs, struct blob *blob)
{
    return xdr_bytes(xdrs, &blob->bytes, &blob->length, 1 << 20);
}

/* Procedure 1 says on which netid it was called, procedure 2 sends as many bytes as were asked for. */
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
        printf("skip  %s: this machine has no such addresses\n", netid);
        return;
    }
    /* Listening before the fork, so that no client comes too early; the other way is tested by RPC_ANYFD. */
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

    /* A socket of the program, not connected: it stays the program's. */
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

/* One connection that the program has accepted itself, as a child of inetd has. */
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
    most = SIZE_MAX;
    REQUIRE(!clnt_control(client, CLSET_RDMA_MAXREPLY, (char *)&most));
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
    /* A program that was compiled when there were two counters only. */
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
    struct netbuf empty = {0, 0, NULL}, senseless = {.maxlen = 16, .len = 16, .buf = NULL};
    REQUIRE(clnt_rdma_create(RPC_ANYFD, &empty, PROG, 1, 0, 0) == NULL);
    require_failure("no internet address");
    REQUIRE(clnt_rdma_create(RPC_ANYFD, &senseless, PROG, 1, 0, 0) == NULL);
    require_failure("no internet address");
    REQUIRE(clnt_rdma_create(RPC_ANYFD, netbuf(&address), 100000, 4, 0, 0) == NULL);
    require_failure("rpcbind is served over tcp");
    /* A socket of another family than the address. */
    int six = socket(AF_INET6, SOCK_STREAM, 0);
    if (six >= 0)
        REQUIRE(clnt_rdma_create(six, netbuf(&address), PROG, 1, 0, 0) == NULL);
    close(six);
    close(udp);
    close(fds[0]);
    close(fds[1]);
    puts("ok    NULL and wrong descriptors are errors");
}

int main(int argc, char **argv)
{
    /* A wrong setting: tests/api.sh set it. */
    if (argc > 1 && strcmp(argv[1], "misconfigured") == 0) {
        struct address address = loopback(AF_INET);
        REQUIRE(clnt_rdma_create(RPC_ANYFD, netbuf(&address), PROG, 1, 0, 0) == NULL);
        require_failure(argv[2]);
        REQUIRE(svc_rdma_create(RPC_ANYFD, 0, 0) == NULL);
        require_failure(argv[2]);
        puts("ok    a wrong setting fails both constructors, and the text names it");
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
    return 0;
}
