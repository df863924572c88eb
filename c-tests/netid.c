/*
 * What a program sees of the netids "rdma" and "rdma6" through libtirpc's own functions. Run by tests/netid.sh with the
 * library preloaded; linked with libtirpc alone.
 *
 *   netid entries                    getnetconfigent, addresses, fd 0 left open
 *   netid serve NETTYPE [reg|legacy] svc_create, rpc_reg, or svctcp_create + svc_register; prints READY
 *   netid beside PORT HOW [tcp]      udp on a socket of its own, and if asked tcp on the same port; HOW: plain, or
 *                                    served by a daemon, or by two workers
 *   netid listen PORT                a TCP listener that has nothing to do with RPC
 *   netid call HOST VERSION NETTYPE  clnt_create and the null procedure
 *   netid many HOST NUMBER NETTYPE   NUMBER CLIENTs at a time, each with a call
 *   netid getaddr HOST VERSION       rpcb_getaddr on netid "rdma"
 *   netid rpc_call HOST NETTYPE      rpc_call of procedure 1, which adds one
 *   netid rpcbind NETID              rpcbind itself: by name, by rpcb_getaddr and by its address
 *   netid serve_on NETID             svc_tp_create, so on this netid only; prints READY
 *   netid connected NETID            a CLIENT on a socket that the program has connected to where NETID is registered
 *   netid accepted                   svc_tli_create on a socket that the program has accepted, as from inetd
 */
#include <fcntl.h>
#include <netinet/in.h>
#include <rpc/rpc.h>
#include <rpc/pmap_clnt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROG 0x20000055
#define NEED(condition)                                                                                               \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                           \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

/* Not in the installed headers' C prototypes under strict warnings. */
extern int __rpc_nconf2fd(const struct netconfig *);

static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
}

static char *add_one(char *argument)
{
    static int result;
    memcpy(&result, argument, sizeof result);
    result++;
    return (char *)&result;
}

static void unregister(int signal)
{
    (void)signal;
    svc_unreg(PROG, 1);
    pmap_unset(PROG, 1);
    _exit(0);
}

static void entry(const char *netid, const char *family, const char *uaddr)
{
    struct netconfig *nconf = getnetconfigent(netid);
    struct netbuf *address;
    char *back;
    int fd;

    NEED(nconf != NULL);
    NEED(strcmp(nconf->nc_netid, netid) == 0 && strcmp(nconf->nc_protofmly, family) == 0);
    NEED(strcmp(nconf->nc_proto, "rdma") == 0 && nconf->nc_semantics == NC_TPI_COTS_ORD);
    NEED(nconf->nc_flag == NC_NOFLAG && nconf->nc_lookups == NULL);
    address = uaddr2taddr(nconf, uaddr);
    NEED(address != NULL);
    back = taddr2uaddr(nconf, address);
    NEED(back != NULL && strcmp(back, uaddr) == 0);
    NEED(uaddr2taddr(nconf, "nonsense") == NULL);
    /* Where the netid is unknown, this returns 0, and its callers then close descriptor 0. */
    fd = __rpc_nconf2fd(nconf);
    NEED(fd > 2);
    NEED(fcntl(0, F_GETFD) != -1);
    close(fd);
    free(back);
    free(address->buf);
    free(address);
    freenetconfigent(nconf);
}

/* There is no rpcbind over RDMA: by name nothing is found, and at its address there is a CLIENT that says what it is. */
static int rpcbind(const char *netid)
{
    struct timeval timeout = {5, 0};
    struct netconfig *nconf = getnetconfigent(netid);
    char room[sizeof(struct sockaddr_in6)];
    struct netbuf there = {sizeof room, 0, room}, *address;
    rpcblist *list;
    CLIENT *client;

    NEED(nconf != NULL);
    client = clnt_tp_create("localhost", 100000, 4, nconf);
    NEED(client == NULL);
    puts(clnt_spcreateerror("by name"));
    NEED(!rpcb_getaddr(100000, 4, nconf, &there, "127.0.0.1"));
    address = uaddr2taddr(nconf, "127.0.0.1.0.111");
    client = clnt_tli_create(RPC_ANYFD, nconf, address, 100000, 4, 0, 0);
    NEED(client != NULL);
    printf("at its address: %s, %s\n", client->cl_netid,
           clnt_sperrno(clnt_call(client, 0, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout)));
    clnt_destroy(client);
    list = rpcb_getmaps(nconf, "127.0.0.1");
    printf("its list: %s\n", list ? "there" : "none");
    return 0;
}

static int connected(const char *netid)
{
    struct timeval timeout = {5, 0};
    struct netconfig *nconf = getnetconfigent("rdma"), *registered = getnetconfigent(netid);
    struct sockaddr_in there;
    struct netbuf address = {sizeof there, 0, &there};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CLIENT *client;

    NEED(rpcb_getaddr(PROG, 1, registered, &address, "127.0.0.1"));
    NEED(connect(fd, (struct sockaddr *)&there, sizeof there) == 0);
    client = clnt_tli_create(fd, nconf, &address, PROG, 1, 0, 0);
    if (client == NULL) {
        puts(clnt_spcreateerror("connected"));
        return 1;
    }
    puts(clnt_sperrno(clnt_call(client, 0, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout)));
    clnt_destroy(client);
    return 0;
}

static int accepted(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0), peer = socket(AF_INET, SOCK_STREAM, 0), one;
    SVCXPRT *xprt;

    NEED(bind(fd, (struct sockaddr *)&at, size) == 0 && listen(fd, 1) == 0);
    NEED(getsockname(fd, (struct sockaddr *)&at, &size) == 0);
    NEED(connect(peer, (struct sockaddr *)&at, size) == 0);
    one = accept(fd, NULL, NULL);
    xprt = svc_tli_create(one, getnetconfigent("rdma"), NULL, 0, 0);
    puts(xprt == NULL ? clnt_spcreateerror("accepted") : "made");
    NEED(fcntl(one, F_GETFD) != -1);
    return xprt == NULL;
}

static int serve_on(const char *netid)
{
    struct netconfig *nconf = getnetconfigent(netid);
    NEED(nconf != NULL);
    if (svc_tp_create(dispatch, PROG, 1, nconf) == NULL) {
        fprintf(stderr, "%s\n", clnt_spcreateerror("svc_tp_create"));
        return 1;
    }
    puts("READY 0");
    fflush(stdout);
    svc_run();
    return 1;
}

static int serve(const char *nettype, const char *how)
{
    signal(SIGTERM, unregister);
    if (strcmp(how, "reg") == 0) {
        NEED(rpc_reg(PROG, 1, 1, add_one, (xdrproc_t)xdr_int, (xdrproc_t)xdr_int, (char *)nettype) == 0);
    } else if (strcmp(how, "legacy") == 0) {
        SVCXPRT *xprt = svctcp_create(RPC_ANYSOCK, 0, 0);
        NEED(xprt != NULL);
        pmap_unset(PROG, 1);
        NEED(svc_register(xprt, PROG, 1, dispatch, IPPROTO_TCP));
    } else if (svc_create(dispatch, PROG, 1, nettype) == 0) {
        fprintf(stderr, "%s\n", clnt_spcreateerror("svc_create"));
        return 1;
    }
    puts("READY 0");
    fflush(stdout);
    svc_run();
    return 1;
}

/* A socket on the port, with no option set. */
static int bound(int type, const char *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    int fd = socket(AF_INET, type, 0);
    NEED(fd >= 0);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror("bind");
        exit(1);
    }
    NEED(type == SOCK_DGRAM || listen(fd, 10) == 0);
    return fd;
}

static void create_on(int fd, const char *netid)
{
    struct netconfig *nconf = getnetconfigent(netid);
    SVCXPRT *xprt = svc_tli_create(fd, nconf, NULL, 0, 0);
    NEED(xprt != NULL);
    NEED(svc_reg(xprt, PROG, 1, dispatch, nconf));
    freenetconfigent(nconf);
}

/* As rquotad, mountd and statd do it: udp is registered before tcp is bound. */
static int beside(const char *port, const char *how, int tcp)
{
    int workers = strcmp(how, "workers") == 0 ? 2 : strcmp(how, "daemon") == 0 ? 1 : 0;
    svc_unreg(PROG, 1);
    create_on(bound(SOCK_DGRAM, port), "udp");
    if (tcp)
        create_on(bound(SOCK_STREAM, port), "tcp");
    for (int i = 0; i < workers; i++) {
        pid_t worker = fork();
        NEED(worker >= 0);
        if (worker == 0) {
            printf("READY %d\n", (int)getpid());
            fflush(stdout);
            svc_run();
            return 1;
        }
    }
    if (workers == 1)
        _exit(0);
    if (workers == 2) {
        wait(NULL);
        return 1;
    }
    puts("READY 1");
    fflush(stdout);
    svc_run();
    return 1;
}

int main(int argc, char **argv)
{
    struct timeval timeout = {5, 0};
    const char *what = argc > 1 ? argv[1] : "";

    if (strcmp(what, "entries") == 0) {
        entry("rdma", "inet", "127.0.0.1.78.81");
        entry("rdma6", "inet6", "::1.78.81");
        NEED(getnetconfigent("rdma7") == NULL);
        return 0;
    }
    if (strcmp(what, "serve") == 0 && argc > 2)
        return serve(argv[2], argc > 3 ? argv[3] : "create");
    if (strcmp(what, "beside") == 0 && argc > 3)
        return beside(argv[2], argv[3], argc > 4);
    if (strcmp(what, "listen") == 0 && argc > 2) {
        bound(SOCK_STREAM, argv[2]);
        puts("READY 1");
        fflush(stdout);
        pause();
    }
    if (strcmp(what, "serve_on") == 0 && argc > 2)
        return serve_on(argv[2]);
    if (strcmp(what, "connected") == 0 && argc > 2)
        return connected(argv[2]);
    if (strcmp(what, "accepted") == 0)
        return accepted();
    if (strcmp(what, "rpcbind") == 0 && argc > 2)
        return rpcbind(argv[2]);
    if (strcmp(what, "call") == 0 && argc > 4) {
        CLIENT *client = clnt_create(argv[2], PROG, (rpcvers_t)atoi(argv[3]), argv[4]);
        enum clnt_stat status;
        if (client == NULL) {
            clnt_pcreateerror("create");
            return 1;
        }
        status = clnt_call(client, 0, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout);
        printf("%s: %s\n", client->cl_netid, clnt_sperrno(status));
        clnt_destroy(client);
        return status != RPC_SUCCESS;
    }
    if (strcmp(what, "many") == 0 && argc > 4) {
        for (int number = atoi(argv[3]); number > 0; number--) {
            CLIENT *client = clnt_create(argv[2], PROG, 1, argv[4]);
            if (client == NULL) {
                clnt_pcreateerror("create");
                return 1;
            }
            NEED(clnt_call(client, 0, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout) == RPC_SUCCESS);
        }
        return 0;
    }
    if (strcmp(what, "getaddr") == 0 && argc > 3) {
        struct netconfig *nconf = getnetconfigent("rdma");
        struct sockaddr_in room;
        struct netbuf address = {sizeof room, 0, &room}, tight = {4, 0, &room};
        NEED(!rpcb_getaddr(PROG, (rpcvers_t)atoi(argv[3]), nconf, &tight, argv[2]));
        NEED(rpcb_getaddr(PROG, (rpcvers_t)atoi(argv[3]), nconf, &address, argv[2]));
        NEED(address.len == sizeof room);
        puts(taddr2uaddr(nconf, &address));
        return 0;
    }
    if (strcmp(what, "rpc_call") == 0 && argc > 3) {
        int number = 41;
        enum clnt_stat status = rpc_call(argv[2], PROG, 1, 1, (xdrproc_t)xdr_int, (char *)&number,
                                         (xdrproc_t)xdr_int, (char *)&number, argv[3]);
        printf("%s %d\n", clnt_sperrno(status), number);
        return status != RPC_SUCCESS;
    }
    fprintf(stderr, "usage: see the head of %s\n", __FILE__);
    return 2;
}
