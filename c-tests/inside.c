/* What XDR procedures do, while they run, with the very handle that they run for: they call, control and destroy it.
 *
 *   inside          the tests, one after the other, each in a process of its own
 *   inside NAME     one of them
 *
 * Linked with the library. The server is a thread of the same process, so that a sanitizer sees both ends. */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpcrdma.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROG = 0x20004C52 };
/* Procedures. In all but the first, something happens inside an XDR procedure of the server. */
enum { ADD_ONE = 1, ARGUMENTS, ARGUMENTS_DESTROY, RESULTS_DESTROY };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0};

/* ---- The server -------------------------------------------------------------------------------------------------- */

static SVCXPRT *serving;
static atomic_int inside;

/* Asks once more for the arguments, which have been taken already, and sends the answer already. */
static bool_t xdr_uses(XDR *xdrs, u_int *number)
{
    u_int again = 0, answer = 77;
    if (xdrs->x_op == XDR_DECODE && inside++ == 0) {
        REQUIRE(!svc_getargs(serving, (xdrproc_t)xdr_u_int, (char *)&again));
        REQUIRE(svc_sendreply(serving, (xdrproc_t)xdr_u_int, (char *)&answer));
        REQUIRE(!svc_sendreply(serving, (xdrproc_t)xdr_u_int, (char *)&answer));
    }
    return xdr_u_int(xdrs, number);
}

static bool_t xdr_destroys_transport(XDR *xdrs, u_int *number)
{
    if (inside++ == 0)
        svc_destroy(serving);
    return xdr_u_int(xdrs, number);
}

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    static const xdrproc_t arguments[] = {
        [ADD_ONE] = (xdrproc_t)xdr_u_int,
        [ARGUMENTS] = (xdrproc_t)xdr_uses,
        [ARGUMENTS_DESTROY] = (xdrproc_t)xdr_destroys_transport,
        [RESULTS_DESTROY] = (xdrproc_t)xdr_u_int,
    };
    u_int procedure = (u_int)request->rq_proc, number = 0;
    if (procedure == NULLPROC) {
        svc_sendreply(xprt, (xdrproc_t)(void (*)(void))xdr_void, NULL);
        return;
    }
    REQUIRE(procedure <= RESULTS_DESTROY);
    serving = xprt;
    REQUIRE(svc_getargs(xprt, arguments[procedure], (char *)&number) && number == 41);
    number++;
    xdrproc_t results = procedure == RESULTS_DESTROY ? (xdrproc_t)xdr_destroys_transport : (xdrproc_t)xdr_u_int;
    REQUIRE(svc_sendreply(xprt, results, (char *)&number) == (procedure != ARGUMENTS));
    REQUIRE(svc_freeargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
    /* The request lives until the routine returns, and so does its transport. */
    REQUIRE(!svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number) || number == 41);
}

static struct sockaddr_in address = {.sin_family = AF_INET};

static void *run(void *unused)
{
    (void)unused;
    svc_run();
    return NULL;
}

static void start_server(void)
{
    pthread_t loop;
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    socklen_t length = sizeof address;
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(pthread_create(&loop, NULL, run, NULL) == 0);
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

static CLIENT *client;
static int fd;

static void connect_client(void)
{
    struct netconfig *netconfig = getnetconfigent("rdma");
    REQUIRE(netconfig != NULL);
    struct netbuf to = {sizeof address, sizeof address, &address};
    client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    freenetconfigent(netconfig);
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
}

/* Calls `procedure` with 41. */
static enum clnt_stat ask(u_int procedure, xdrproc_t arguments, xdrproc_t results, u_int *result)
{
    u_int number = 41;
    return clnt_call(client, procedure, arguments, (char *)&number, results, (char *)result, patient);
}
static enum clnt_stat ask_plainly(u_int procedure, u_int *result)
{
    return ask(procedure, (xdrproc_t)xdr_u_int, (xdrproc_t)xdr_u_int, result);
}

/* Makes a call of its own, gets and sets all that can be got and set, and sets another AUTH. */
static bool_t xdr_calls(XDR *xdrs, u_int *number)
{
    if (inside++ == 0) {
        u_int result = 0, xid = 0, version = 0;
        struct timeval limit = {30, 0}, now;
        struct rpc_err error;
        AUTH *before = client->cl_auth;
        client->cl_auth = authunix_create_default();
        REQUIRE(ask_plainly(ADD_ONE, &result) == RPC_SUCCESS && result == 42);
        clnt_geterr(client, &error);
        REQUIRE(error.re_status == RPC_SUCCESS);
        REQUIRE(clnt_control(client, CLGET_XID, (char *)&xid) && clnt_control(client, CLGET_VERS, (char *)&version));
        REQUIRE(version == 1 && clnt_control(client, CLSET_TIMEOUT, (char *)&limit));
        REQUIRE(clnt_control(client, CLGET_TIMEOUT, (char *)&now) && now.tv_sec == 30);
        auth_destroy(client->cl_auth);
        client->cl_auth = before;
    }
    return xdr_u_int(xdrs, number);
}

static bool_t xdr_destroys(XDR *xdrs, u_int *number)
{
    if (inside++ == 0)
        clnt_destroy(client);
    return xdr_u_int(xdrs, number);
}

/* ---- The tests --------------------------------------------------------------------------------------------------- */

static void call_inside(xdrproc_t arguments, xdrproc_t results)
{
    u_int result = 0;
    connect_client();
    for (int i = 0; i < 3; i++) {
        inside = 0;
        REQUIRE(ask(ADD_ONE, arguments, results, &result) == RPC_SUCCESS && result == 42 && inside > 0);
    }
    clnt_destroy(client);
}
static void a_call_inside_arguments(void) { call_inside((xdrproc_t)xdr_calls, (xdrproc_t)xdr_u_int); }
static void a_call_inside_results(void) { call_inside((xdrproc_t)xdr_u_int, (xdrproc_t)xdr_calls); }

/* The call ends as it would otherwise, then the CLIENT does. */
static void destroyed_inside(xdrproc_t arguments, xdrproc_t results)
{
    u_int result = 0;
    for (int i = 0; i < 3; i++) {
        connect_client();
        inside = 0;
        REQUIRE(ask(ADD_ONE, arguments, results, &result) == RPC_SUCCESS && result == 42 && inside > 0);
        REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    }
}
static void destroyed_inside_arguments(void) { destroyed_inside((xdrproc_t)xdr_destroys, (xdrproc_t)xdr_u_int); }
static void destroyed_inside_results(void) { destroyed_inside((xdrproc_t)xdr_u_int, (xdrproc_t)xdr_destroys); }
static void destroyed_inside_freed_results(void)
{
    u_int result = 0;
    connect_client();
    inside = 0;
    REQUIRE(ask_plainly(ADD_ONE, &result) == RPC_SUCCESS && result == 42);
    REQUIRE(clnt_freeres(client, (xdrproc_t)xdr_destroys, (char *)&result) && inside > 0);
    REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}

/* Another thread's call is under way with the CLIENT, which ends with the last call. */
static void *call_too(void *unused)
{
    (void)unused;
    u_int result = 0;
    REQUIRE(ask_plainly(ADD_ONE, &result) == RPC_SUCCESS && result == 42);
    return NULL;
}
static pthread_barrier_t both;
static bool_t xdr_meets(XDR *xdrs, u_int *number)
{
    if (inside++ == 0) {
        pthread_barrier_wait(&both);
        pthread_barrier_wait(&both);
    }
    return xdr_u_int(xdrs, number);
}
static void *call_and_meet(void *unused)
{
    (void)unused;
    u_int result = 0;
    REQUIRE(ask(ADD_ONE, (xdrproc_t)xdr_meets, (xdrproc_t)xdr_u_int, &result) == RPC_SUCCESS && result == 42);
    return NULL;
}
static bool_t xdr_destroys_beside(XDR *xdrs, u_int *number)
{
    clnt_destroy(client);
    return xdr_u_int(xdrs, number);
}
static void destroyed_beside_another_call(void)
{
    u_int result = 0;
    pthread_t thread;
    connect_client();
    REQUIRE(pthread_barrier_init(&both, NULL, 2) == 0);
    REQUIRE(pthread_create(&thread, NULL, call_and_meet, NULL) == 0);
    pthread_barrier_wait(&both);
    REQUIRE(ask(ADD_ONE, (xdrproc_t)xdr_destroys_beside, (xdrproc_t)xdr_u_int, &result) == RPC_SUCCESS && result == 42);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
    pthread_barrier_wait(&both);
    REQUIRE(pthread_join(thread, NULL) == 0);
    REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}

static void at_the_server(u_int procedure, u_int expected)
{
    u_int result = 0;
    for (int i = 0; i < 3; i++) {
        connect_client();
        inside = 0;
        REQUIRE(ask_plainly(procedure, &result) == RPC_SUCCESS && result == expected && inside > 0);
        clnt_destroy(client);
    }
    /* A new connection is served. */
    connect_client();
    call_too(NULL);
    clnt_destroy(client);
}
static void answered_inside_arguments(void) { at_the_server(ARGUMENTS, 77); }
static void transport_destroyed_inside_arguments(void) { at_the_server(ARGUMENTS_DESTROY, 42); }
static void transport_destroyed_inside_results(void) { at_the_server(RESULTS_DESTROY, 42); }

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#define TEST(name) {#name, name}
    TEST(a_call_inside_arguments),
    TEST(a_call_inside_results),
    TEST(destroyed_inside_arguments),
    TEST(destroyed_inside_results),
    TEST(destroyed_inside_freed_results),
    TEST(destroyed_beside_another_call),
    TEST(answered_inside_arguments),
    TEST(transport_destroyed_inside_arguments),
    TEST(transport_destroyed_inside_results),
};
enum { TESTS = sizeof tests / sizeof *tests };

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *name = count > 1 ? arguments[1] : NULL;
    int failed = 0;
    for (int i = 0; i < TESTS; i++) {
        if (name != NULL && strcmp(name, tests[i].name) != 0)
            continue;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            alarm(120);
            start_server();
            tests[i].run();
            _exit(0);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        failed += status != 0;
        printf("%s %s\n", status == 0 ? "ok   " : "FAIL ", tests[i].name);
    }
    return failed != 0;
}
