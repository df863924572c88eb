/* misuse.c: NULL where there should be something, calls out of order, things already gone. Where stock libtirpc
 * returns an error, so must we; where it would crash there is no test here. */
#define _GNU_SOURCE
#include "harness.h"
#include "where.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

extern int _rpc_dtablesize(void);

static void nothing(struct svc_req *request, SVCXPRT *transport)
{
    (void)request;
    svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
}

static void unknown_nettype_is_an_error(long unused)
{
    (void)unused;
    static const char *const wrong[] = {"rdmaa", "rdm", "RDMA ", "no such thing", "rdma7"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        REQUIRE(getnetconfigent(wrong[i]) == NULL);
        REQUIRE(clnt_create("127.0.0.1", SUITE_PROG, SUITE_V2, wrong[i]) == NULL);
        REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_UNKNOWNPROTO);
        REQUIRE(svc_create(nothing, SUITE_PROG, SUITE_V2, wrong[i]) == 0);
    }
}

static void missing_netconfig_is_an_error(long unused)
{
    (void)unused;
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    REQUIRE(getnetconfigent(NULL) == NULL);
    freenetconfigent(NULL);
    REQUIRE(clnt_tli_create(RPC_ANYFD, NULL, &netbuf, SUITE_PROG, SUITE_V2, 0, 0) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_UNKNOWNPROTO);
    REQUIRE(clnt_tp_create("127.0.0.1", SUITE_PROG, SUITE_V2, NULL) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_UNKNOWNPROTO);
    REQUIRE(svc_tli_create(RPC_ANYFD, NULL, NULL, 0, 0) == NULL);
    REQUIRE(svc_tp_create(nothing, SUITE_PROG, SUITE_V2, NULL) == NULL);
}

static void missing_address_is_an_error(long unused)
{
    (void)unused;
    if (leg.redirect)
        return; /* as stock */
    REQUIRE(clnt_tli_create(RPC_ANYFD, the_netconfig(), NULL, SUITE_PROG, SUITE_V2, 0, 0) == NULL);
    REQUIRE(rpc_createerr.cf_stat != RPC_SUCCESS);
}

static void closed_descriptor_is_an_error(long unused)
{
    (void)unused;
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    int fd = dup(0);
    close(fd);
    REQUIRE(clnt_tli_create(fd, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V2, 0, 0) == NULL);
    REQUIRE(rpc_createerr.cf_stat != RPC_SUCCESS);
    REQUIRE(svc_tli_create(fd, the_netconfig(), NULL, 0, 0) == NULL);
    /* It is still closed: nobody has opened, or handed out, that number by mistake. */
    REQUIRE(fcntl(fd, F_GETFD) < 0);
}

static void descriptor_that_is_no_socket_is_an_error(long unused)
{
    (void)unused;
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    int fd = open("/dev/null", O_RDWR);
    REQUIRE(clnt_tli_create(fd, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V2, 0, 0) == NULL);
    REQUIRE(svc_tli_create(fd, the_netconfig(), NULL, 0, 0) == NULL);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
}

/* Stock libtirpc closes descriptor 0 for netids that it does not know. */
static void descriptor_zero_stays_open(long unused)
{
    (void)unused;
    clnt_create("127.0.0.1", SUITE_PROG, SUITE_V2, "no such thing");
    svc_create(nothing, SUITE_PROG, SUITE_V2, "no such thing");
    clnt_destroy(client_of(server_shared()));
    REQUIRE(fcntl(0, F_GETFD) >= 0);
}

static void taken_port_is_an_error(long unused)
{
    (void)unused;
    struct sockaddr_in address = address_of(server_shared());
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 8};
    REQUIRE(svc_tli_create(RPC_ANYFD, the_netconfig(), &bind_to, 0, 0) == NULL);
    CLIENT *client = client_of(server_shared());
    require_echo(client, 100, 1);
    clnt_destroy(client);
}

static void descriptor_closed_under_a_client(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    int fd;
    require_echo(client, 100, 1);
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    close(fd);
    /* A server that is just looking at shared memory may serve more calls before it sees the end of the connection. */
    double begun = now();
    while (suite_null_2(NULL, NULL, client) == RPC_SUCCESS)
        REQUIRE(leg.library && now() - begun < 5);
    REQUIRE(suite_null_2(NULL, NULL, client) != RPC_SUCCESS);
    clnt_destroy(client);
    client = client_of(server_shared());
    require_echo(client, 100, 1);
    clnt_destroy(client);
}

/* The program has closed the socket; the number is a file of its own now. */
static void destroying_a_client_leaves_a_stranger_alone(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    int fd, null = open("/dev/null", O_RDWR);
    require_echo(client, 100, 1);
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    REQUIRE(clnt_control(client, CLSET_FD_CLOSE, NULL));
    REQUIRE(dup2(null, fd) == fd);
    clnt_destroy(client);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
}

static void connection_shut_down_under_a_client(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    int fd;
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    signal(SIGPIPE, SIG_IGN);
    shutdown(fd, SHUT_RDWR);
    /* A client that shares memory with its peer may have an answer before either of them looks at the socket. */
    while (suite_null_2(NULL, NULL, client) == RPC_SUCCESS)
        ;
    clnt_destroy(client);
}

static SVCXPRT *listener(void)
{
    struct sockaddr_in address = where_address();
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 8};
    SVCXPRT *transport = svc_tli_create(RPC_ANYFD, the_netconfig(), &bind_to, 0, 0);
    REQUIRE(transport != NULL);
    return transport;
}

static void listener_destroyed_before_its_first_call(long unused)
{
    (void)unused;
    for (int i = 0; i < 5; i++) {
        SVCXPRT *transport = listener();
        int fd = transport->xp_fd;
        REQUIRE(svc_reg(transport, SUITE_PROG, SUITE_V2, nothing, NULL));
        svc_destroy(transport);
        REQUIRE(fcntl(fd, F_GETFD) < 0);
        svc_unreg(SUITE_PROG, SUITE_V2);
    }
}

static void loops_with_nothing_to_do(long unused)
{
    (void)unused;
    SVCXPRT *transport = listener();
    fd_set none, spurious;
    FD_ZERO(&none);
    FD_ZERO(&spurious);
    FD_SET(transport->xp_fd, &spurious);
    fcntl(transport->xp_fd, F_SETFL, fcntl(transport->xp_fd, F_GETFL) | O_NONBLOCK);
    svc_getreqset(&none);
    svc_getreqset(&spurious); /* ready, said somebody, but nobody has called */
    svc_getreq_common(transport->xp_fd);
    svc_getreq_common(_rpc_dtablesize() - 1);
    struct pollfd quiet = {.fd = transport->xp_fd};
    svc_getreq_poll(&quiet, 0);
    svc_destroy(transport);
}

static void svc_reg_twice_is_harmless(long unused)
{
    (void)unused;
    SVCXPRT *transport = listener();
    REQUIRE(svc_reg(transport, SUITE_PROG, SUITE_V2, nothing, NULL));
    REQUIRE(svc_reg(transport, SUITE_PROG, SUITE_V2, nothing, NULL));
    svc_unreg(SUITE_PROG, SUITE_V2);
    svc_unreg(SUITE_PROG, SUITE_V2);
    svc_destroy(transport);
}

static void addresses_that_are_none(long unused)
{
    (void)unused;
    struct netconfig *config = the_netconfig();
    static const char *const wrong[] = {"", "1.2", "127.0.0.1", "a.b.c.d.e.f", "127.0.0.1.300"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct netbuf *address = uaddr2taddr(config, wrong[i]);
        TRACE("%s -> %p\n", wrong[i], (void *)address);
        /* Stock libtirpc takes some of these for addresses; none may crash. */
        if (address != NULL) {
            free(address->buf);
            free(address);
        }
    }
    struct netbuf *address = uaddr2taddr(config, "127.0.0.1.8.1");
    REQUIRE(address != NULL && ntohs(((struct sockaddr_in *)address->buf)->sin_port) == 2049);
    char *text = taddr2uaddr(config, address);
    REQUIRE(text != NULL && strcmp(text, "127.0.0.1.8.1") == 0);
    free(text);
    free(address->buf);
    free(address);
    freenetconfigent(config);
}

const struct test misuse_tests[] = {
    TEST(unknown_nettype_is_an_error, .needs = NOISY),
    TEST(missing_netconfig_is_an_error, .needs = NOISY),
    TEST(missing_address_is_an_error, .needs = NOISY, .not_stock = "stock crashes"),
    TEST(closed_descriptor_is_an_error, .needs = NOISY),
    TEST(descriptor_that_is_no_socket_is_an_error, .needs = NOISY),
    TEST(descriptor_zero_stays_open, .needs = NOISY),
    TEST(taken_port_is_an_error, .needs = NOISY),
    TEST(descriptor_closed_under_a_client),
    TEST(destroying_a_client_leaves_a_stranger_alone, .not_stock = "stock closes the number"),
    TEST(connection_shut_down_under_a_client, .needs = SOCKET),
    TEST(listener_destroyed_before_its_first_call),
    TEST(loops_with_nothing_to_do),
    TEST(svc_reg_twice_is_harmless),
    TEST(addresses_that_are_none),
    END_OF_TESTS,
};
