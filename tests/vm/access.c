/* access.c: a server that prints who has called it, and a client for it; for access.sh. They use libtirpc alone.
 *
 *   access serve NETID ADDRESS PORT [INTERFACE]   serves until it is ended; READY PORT, then a line for each call
 *   access call NETID ADDRESS PORT [PROCEDURE]    calls it, with a CLIENT of its own; prints the outcome in one line
 *   access read NETID ADDRESS PORT BYTES          calls it three times for a result of BYTES bytes
 *   access again NETID ADDRESS PORT               calls it, waits for a line of input, calls it again with the same CLIENT, and
 *                                                 then with a second one too, whose outcome is the last line
 *   access fork NETID ADDRESS PORT                calls it, and has a child do so with the same CLIENT and with one of its
 *                                                 own; then calls it again
 *   access connected NETID ADDRESS PORT           the same on a socket that it has connected itself
 *
 * ADDRESS is that of the listening socket, which INTERFACE also binds to a device. Nothing is registered with rpcbind.
 * Procedure 3 has the server act as another user for a moment, as NFS servers do. Procedure 1 has it unregister and close its listener; it goes on with the connections that it has. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <net/if.h>
#include <netconfig.h>
#include <rpc/rpc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROGRAM = 0x20004141, VERSION = 1, CLOSE = 1, READ = 2, ACT = 3, SHUT = 4, BIND = 5, MOST = 32 << 20 };

typedef struct {
    u_int length;
    char *bytes;
} bytes_t;

static bool_t xdr_all(XDR *xdrs, bytes_t *all) { return xdr_bytes(xdrs, &all->bytes, &all->length, MOST); }

static SVCXPRT *listener;

/* A time limit, scaled by TEST_PATIENCE as in tests/lib.sh. */
static struct timeval patient(double seconds)
{
    const char *factor = getenv("TEST_PATIENCE");
    return (struct timeval){.tv_sec = (time_t)(seconds * (factor != NULL ? strtod(factor, NULL) : 1))};
}

static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    char text[INET6_ADDRSTRLEN] = "?";
    const struct sockaddr *caller = (const struct sockaddr *)svc_getcaller(xprt);
    const struct sockaddr_in *in = (const struct sockaddr_in *)caller;
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)caller;
    inet_ntop(caller->sa_family, caller->sa_family == AF_INET ? (const void *)&in->sin_addr : (const void *)&in6->sin6_addr,
              text, sizeof text);
    if (request->rq_proc == READ) {
        static char bytes[MOST];
        bytes_t all = {0, bytes};
        if (!svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&all.length) || all.length > MOST)
            return svcerr_decode(xprt);
        memset(bytes, 'r', all.length);
        svc_sendreply(xprt, (xdrproc_t)xdr_all, (caddr_t)&all);
        return;
    }
    printf("called by %s, port %s, netid %s\n", text, ntohs(in->sin_port) < 1024 ? "below 1024" : "above 1023", xprt->xp_netid);
    if (request->rq_proc == CLOSE && listener != NULL) {
        svc_unreg(PROGRAM, VERSION);
        svc_destroy(listener);
        listener = NULL;
    }
    fflush(stdout);
    if (request->rq_proc == SHUT && shutdown(listener->xp_fd, SHUT_RDWR) != 0)
        err(1, "shutdown");
    if (request->rq_proc == BIND && setsockopt(listener->xp_fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", sizeof "lo") != 0)
        err(1, "SO_BINDTODEVICE");
    if (request->rq_proc == ACT) {
        setfsuid(65534);
        setfsuid(0);
    }
    svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
}

static socklen_t parsed(struct sockaddr_storage *at, const char *address, const char *port)
{
    struct sockaddr_in *in = (struct sockaddr_in *)at;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)at;
    memset(at, 0, sizeof *at);
    if (inet_pton(AF_INET, address, &in->sin_addr) == 1) {
        in->sin_family = AF_INET;
        in->sin_port = htons((in_port_t)atoi(port));
        return sizeof *in;
    }
    if (inet_pton(AF_INET6, address, &in6->sin6_addr) != 1)
        errx(2, "%s is no address", address);
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons((in_port_t)atoi(port));
    return sizeof *in6;
}

int main(int argc, char **argv)
{
    if (argc < 5)
        errx(2, "usage: %s serve|call NETID ADDRESS PORT [INTERFACE|PROCEDURE]", argv[0]);
    struct netconfig *netid = getnetconfigent(argv[2]);
    struct sockaddr_storage at;
    socklen_t length = parsed(&at, argv[3], argv[4]);
    if (netid == NULL)
        errx(1, "no netid %s", argv[2]);
    if (strcmp(argv[1], "serve") != 0) {
        struct netbuf address = {sizeof at, length, &at};
        struct timeval limit = patient(5);
        int own = RPC_ANYFD;
        if (strcmp(argv[1], "connected") == 0) {
            own = socket(at.ss_family, SOCK_STREAM, 0);
            if (connect(own, (struct sockaddr *)&at, length) != 0)
                err(1, "connect");
        }
        CLIENT *client = clnt_tli_create(own, netid, &address, PROGRAM, VERSION, 0, 0);
        if (client == NULL) {
            printf("refused: %s\n", clnt_spcreateerror("no CLIENT"));
            return 1;
        }
        for (int times = strcmp(argv[1], "read") == 0 ? 3 : 0; times > 0; times--) {
            u_int wanted = (u_int)atoi(argv[5]);
            bytes_t all = {0, NULL};
            enum clnt_stat status = clnt_call(client, READ, (xdrproc_t)xdr_u_int, (caddr_t)&wanted, (xdrproc_t)xdr_all,
                                              (caddr_t)&all, patient(25));
            if (status != RPC_SUCCESS || all.length != wanted || (wanted > 0 && all.bytes[wanted - 1] != 'r')) {
                printf("refused: %s, %u bytes\n", clnt_sperror(client, "read"), all.length);
                return 1;
            }
            clnt_freeres(client, (xdrproc_t)xdr_all, (caddr_t)&all);
        }
        rpcproc_t procedure = argc > 5 && strcmp(argv[1], "call") == 0 ? (rpcproc_t)atoi(argv[5]) : NULLPROC;
        enum clnt_stat status = clnt_call(client, procedure, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
        printf(status == RPC_SUCCESS ? "served\n" : "refused: %s\n", clnt_sperror(client, "call"));
        int forks = strcmp(argv[1], "fork") == 0;
        fflush(stdout);
        pid_t child = forks ? fork() : 0;
        if (child != 0) {
            waitpid(child, NULL, 0);
            status = clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
            printf("the parent: %s\n", clnt_sperrno(status));
        } else if (forks || strcmp(argv[1], "again") == 0) {
            if (!forks)
                getchar();
            status = clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
            printf("the same CLIENT: %s\n", status == RPC_SUCCESS || !forks ? clnt_sperrno(status) : clnt_sperror(client, "call"));
            CLIENT *other = clnt_tli_create(RPC_ANYFD, netid, &address, PROGRAM, VERSION, 0, 0);
            if (other == NULL) {
                printf("refused: %s\n", clnt_spcreateerror("no CLIENT"));
                return 1;
            }
            status = clnt_call(other, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
            printf(status == RPC_SUCCESS ? "served\n" : "refused: %s\n", clnt_sperror(other, "call"));
            clnt_destroy(other);
        }
        clnt_destroy(client);
        return status != RPC_SUCCESS;
    }
    int fd = socket(at.ss_family, SOCK_STREAM, 0), on = 1, off = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (at.ss_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (argc > 5 && setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, argv[5], (socklen_t)strlen(argv[5])) != 0)
        err(1, "%s", argv[5]);
    if (bind(fd, (struct sockaddr *)&at, length) != 0 || listen(fd, 16) != 0)
        err(1, "%s", argv[3]);
    listener = svc_tli_create(fd, netid, NULL, 0, 0);
    if (listener == NULL || !svc_reg(listener, PROGRAM, VERSION, dispatch, NULL))
        errx(1, "no transport");
    printf("READY %s\n", argv[4]);
    fflush(stdout);
    svc_run();
    return 0;
}
