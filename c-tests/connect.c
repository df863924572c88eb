/* connect.c: every way in which libtirpc lets a program create a CLIENT or ask where a server is. */
#define _GNU_SOURCE
#include "harness.h"
#include "where.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <rpc/rpcb_prot.h>
#include <sys/socket.h>
#include <unistd.h>

#define host where()

/* A CLIENT is good if it works, knows its netid and can be destroyed. */
static void require_good(CLIENT *client)
{
    if (client == NULL)
        clnt_pcreateerror("no CLIENT");
    REQUIRE(client != NULL);
    REQUIRE(client->cl_netid != NULL);
    REQUIRE(leg.redirect || strcmp(client->cl_netid, leg.netid) == 0);
    require_echo(client, 1000, 1);
    require_echo(client, NOT_INLINE, 2);
    clnt_destroy(client);
}

static void clnt_create_finds_the_server(long unused)
{
    (void)unused;
    server_start("-c", "svc_create", NULL);
    require_good(clnt_create(host, SUITE_PROG, SUITE_V2, leg.netid));
}

static void clnt_create_by_host_name(long unused)
{
    (void)unused;
    server_start("-c", "svc_create", NULL);
    require_good(clnt_create(getenv("SUITE_ADDRESS") ? where() : "localhost", SUITE_PROG, SUITE_V2, leg.netid));
}

static void clnt_create_timed_finds_the_server(long unused)
{
    (void)unused;
    server_start("-c", "svc_create", NULL);
    require_good(clnt_create_timed(host, SUITE_PROG, SUITE_V2, leg.netid, &patient));
}

static void clnt_create_vers_takes_the_highest_common_version(long timed)
{
    rpcvers_t version = 0;
    struct timeval timeout = patient;
    server_start("-c", "svc_create", NULL);
    CLIENT *client = timed ? clnt_create_vers_timed(host, SUITE_PROG, &version, 1, 3, leg.netid, &timeout)
                           : clnt_create_vers(host, SUITE_PROG, &version, 1, 3, leg.netid);
    if (client == NULL)
        clnt_pcreateerror("no CLIENT");
    REQUIRE(client != NULL);
    REQUIRE(version == 2);
    require_good(client);
    client = clnt_create_vers(host, SUITE_PROG, &version, 1, 9, leg.netid);
    REQUIRE(client != NULL && version == 4);
    int argument = 21, result;
    REQUIRE_STATUS(suite_twice_4(&argument, &result, client), RPC_SUCCESS);
    REQUIRE(result == 42);
    clnt_destroy(client);
}

static void clnt_create_vers_without_a_common_version_says_so(long unused)
{
    (void)unused;
    rpcvers_t version = 0;
    server_start("-c", "svc_create", NULL);
    REQUIRE(clnt_create_vers(host, SUITE_PROG, &version, 7, 9, leg.netid) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_PROGVERSMISMATCH);
}

static void clnt_tp_create_finds_the_server(long unused)
{
    (void)unused;
    server_start("-c", "tp", NULL);
    require_good(clnt_tp_create(host, SUITE_PROG, SUITE_V2, the_netconfig()));
}

static void clnt_tp_create_timed_finds_the_server(long unused)
{
    (void)unused;
    server_start("-c", "tp", NULL);
    require_good(clnt_tp_create_timed(host, SUITE_PROG, SUITE_V2, the_netconfig(), &patient));
}

static void clnt_create_of_an_unregistered_program_says_so(long unused)
{
    (void)unused;
    REQUIRE(clnt_create(host, SUITE_PROG + 1, 1, leg.netid) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_PROGNOTREGISTERED);
    REQUIRE(clnt_tp_create(host, SUITE_PROG + 1, 1, the_netconfig()) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_PROGNOTREGISTERED);
    REQUIRE(strstr(clnt_spcreateerror("x"), "not registered") != NULL);
}

static void clnt_create_of_an_unknown_host_says_so(long unused)
{
    (void)unused;
    REQUIRE(clnt_create("no.such.host.invalid", SUITE_PROG, 1, leg.netid) == NULL);
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_UNKNOWNHOST);
}

static void rpc_call_calls(long unused)
{
    (void)unused;
    server_start("-c", "svc_create", NULL);
    for (unsigned seed = 0; seed < 3; seed++) {
        suite_blob sent = blob_of(5000, seed), got = {0};
        REQUIRE_STATUS(rpc_call(host, SUITE_PROG, SUITE_V2, SUITE_ECHO, (xdrproc_t)xdr_suite_blob, (char *)&sent,
                                (xdrproc_t)xdr_suite_blob, (char *)&got, leg.netid),
                       RPC_SUCCESS);
        REQUIRE(got.suite_blob_len == 5000 && memcmp(got.suite_blob_val, sent.suite_blob_val, 5000) == 0);
    }
}

static void rpc_reg_serves(long unused)
{
    (void)unused;
    server_start("-c", "rpc_reg", NULL);
    CLIENT *client = clnt_create(host, SUITE_PROG, SUITE_V4, leg.netid);
    REQUIRE(client != NULL);
    for (int i = 0; i < 5; i++) {
        int result = 0;
        REQUIRE_STATUS(suite_twice_4(&i, &result, client), RPC_SUCCESS);
        REQUIRE(result == 2 * i);
    }
    clnt_destroy(client);
}

static void rpcb_getaddr_tells_where_the_server_listens(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-r", NULL);
    struct sockaddr_in found = {0};
    struct netbuf address = {.maxlen = sizeof found, .buf = &found};
    REQUIRE(rpcb_getaddr(SUITE_PROG, SUITE_V2, the_netconfig(), &address, host));
    REQUIRE(address.len >= sizeof found && found.sin_family == AF_INET);
    REQUIRE(found.sin_addr.s_addr == where_address().sin_addr.s_addr);
    REQUIRE(ntohs(found.sin_port) == server.port);
    REQUIRE(!rpcb_getaddr(SUITE_PROG + 1, SUITE_V2, the_netconfig(), &address, host));
    REQUIRE_STATUS(rpc_createerr.cf_stat, RPC_PROGNOTREGISTERED);
}

static bool listed(rpcvers_t version, const char *netid, unsigned port)
{
    /* rpcbind is asked over tcp whatever the netid: rdma has no rpcbind of its own. */
    struct netconfig *tcp = getnetconfigent("tcp");
    char ending[16];
    snprintf(ending, sizeof ending, ".%u.%u", port >> 8, port & 255);
    rpcblist *list = rpcb_getmaps(tcp, host);
    REQUIRE(list != NULL);
    for (rpcblist *row = list; row != NULL; row = row->rpcb_next) {
        RPCB *map = &row->rpcb_map;
        size_t length = strlen(map->r_addr);
        if (map->r_prog == SUITE_PROG && map->r_vers == version && strcmp(map->r_netid, netid) == 0 &&
            (port == 0 || (length > strlen(ending) && strcmp(map->r_addr + length - strlen(ending), ending) == 0)))
            return true;
    }
    return false;
}

static void server_appears_in_rpcbind_and_leaves_with_svc_unreg(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", "-r", NULL);
    REQUIRE(listed(SUITE_V2, leg.netid, server.port));
    REQUIRE(listed(SUITE_V4, leg.netid, server.port));
    CLIENT *client = client_of(&server);
    REQUIRE_STATUS(suite_unregister_2(NULL, NULL, client), RPC_SUCCESS);
    REQUIRE(listed(SUITE_V2, leg.netid, server.port));
    REQUIRE(!listed(SUITE_V4, leg.netid, 0));
    clnt_destroy(client);
}

static void moved_server_is_registered_for_both_netids(long legacy)
{
    struct server server = server_start("-c", legacy ? "svctcp" : "tli", "-r", NULL);
    REQUIRE(listed(SUITE_V2, "tcp", server.port));
    REQUIRE(listed(SUITE_V2, "rdma", server.port));
    CLIENT *client = client_of(&server);
    REQUIRE_STATUS(suite_unregister_2(NULL, NULL, client), RPC_SUCCESS);
    REQUIRE(!listed(SUITE_V4, "tcp", 0));
    REQUIRE(!listed(SUITE_V4, "rdma", 0));
    clnt_destroy(client);
}

static void clnt_tli_create_any_fd(long unused)
{
    (void)unused;
    require_good(client_of(server_shared()));
}

static int connected_socket(const struct server *server, bool connected)
{
    struct sockaddr_in address = address_of(server);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(fd >= 0);
    if (connected)
        REQUIRE(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* Our own socket is used, and stays ours to close. */
static void clnt_tli_create_own_fd(long connected)
{
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    int fd = connected_socket(server_shared(), connected), used = -1;
    CLIENT *client = clnt_tli_create(fd, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V2, 0, 0);
    REQUIRE(client != NULL);
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&used));
    REQUIRE(used == fd);
    require_good(client);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
    REQUIRE(close(fd) == 0);
}

static void clnt_tli_create_on_a_connected_fd_needs_no_address(long unused)
{
    (void)unused;
    if (leg.redirect)
        return; /* as stock */
    int fd = connected_socket(server_shared(), true);
    CLIENT *client = clnt_tli_create(fd, the_netconfig(), NULL, SUITE_PROG, SUITE_V2, 0, 0);
    if (client == NULL)
        clnt_pcreateerror("no CLIENT");
    require_good(client);
    close(fd);
}

static void clnt_vc_create_on_a_socket(long connected)
{
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    int fd = connected_socket(server_shared(), connected);
    CLIENT *client = clnt_vc_create(fd, &netbuf, SUITE_PROG, SUITE_V2, 0, 0);
    REQUIRE(client != NULL);
    require_echo(client, NOT_INLINE, 3);
    clnt_destroy(client);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
}

static void clnttcp_create_with_a_port(long own_socket)
{
    struct sockaddr_in address = address_of(server_shared());
    int fd = own_socket ? connected_socket(server_shared(), false) : RPC_ANYSOCK;
    CLIENT *client = clnttcp_create(&address, SUITE_PROG, SUITE_V2, &fd, 0, 0);
    REQUIRE(client != NULL);
    REQUIRE(fd >= 0);
    require_echo(client, NOT_INLINE, 4);
    clnt_destroy(client);
}

static void clnttcp_create_asks_rpcbind_for_the_port(long unused)
{
    (void)unused;
    server_start("-c", "svctcp", "-r", NULL);
    struct sockaddr_in address = where_address();
    int fd = RPC_ANYSOCK;
    CLIENT *client = clnttcp_create(&address, SUITE_PROG, SUITE_V2, &fd, 0, 0);
    REQUIRE(client != NULL);
    require_echo(client, NOT_INLINE, 5);
    clnt_destroy(client);
}

/* NETPATH is the standard way to move a program that asks for "netpath", or for no nettype at all. */
static void netpath_names_the_netid(long unused)
{
    (void)unused;
    setenv("NETPATH", leg.netid, 1);
    struct server server = server_start("-c", "svc_create", NULL);
    (void)server;
    CLIENT *client = clnt_create(host, SUITE_PROG, SUITE_V2, "netpath");
    require_good(client);
    client = clnt_create(host, SUITE_PROG, SUITE_V2, NULL);
    require_good(client);
}

static void refused_connection_is_an_error(long unused)
{
    (void)unused;
    /* Bound but not listening: nobody else can take the port, and nobody answers. */
    struct sockaddr_in address = where_address();
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(bind(fd, (struct sockaddr *)&address, length) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&address, &length) == 0);
    struct netbuf netbuf = {.maxlen = length, .len = length, .buf = &address};
    REQUIRE(clnt_tli_create(RPC_ANYFD, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V2, 0, 0) == NULL);
    REQUIRE(rpc_createerr.cf_stat != RPC_SUCCESS);
    TRACE("%s\n", clnt_spcreateerror("refused"));
}

static void created_and_destroyed_handles_leave_no_descriptor(long unused)
{
    (void)unused;
    clnt_destroy(client_of(server_shared()));
    int before = dup(0);
    close(before);
    for (int i = 0; i < rounds(100); i++) {
        CLIENT *client = client_of(server_shared());
        require_echo(client, 10, (unsigned)i);
        clnt_destroy(client);
    }
    int after = dup(0);
    REQUIRE(after == before);
}

static void the_connection_is_rdma(long unused)
{
    (void)unused;
    setenv("RPCRDMA_LOG", "info", 1);
    CLIENT *client = client_of(server_shared());
    require_echo(client, 10, 1);
    clnt_destroy(client);
    /* Standard error is a file that the harness reads later. */
    static char text[10000];
    REQUIRE(pread(2, text, sizeof text - 1, 0) > 0);
    REQUIRE(strcasestr(text, "rdma") != NULL);
}

const struct test connect_tests[] = {
    TEST(clnt_tli_create_any_fd),
    {.name = "clnt_tli_create_own_fd", .run = clnt_tli_create_own_fd, .argument = 0},
    {.name = "clnt_tli_create_own_connected_fd", .run = clnt_tli_create_own_fd, .argument = 1},
    TEST(clnt_tli_create_on_a_connected_fd_needs_no_address, .not_stock = "stock crashes"),
    {.name = "clnt_vc_create_on_a_new_socket", .run = clnt_vc_create_on_a_socket, .needs = TCP_ONLY},
    {.name = "clnt_vc_create_on_a_connected_socket", .run = clnt_vc_create_on_a_socket, .argument = 1, .needs = TCP_ONLY},
    {.name = "clnttcp_create_with_a_port", .run = clnttcp_create_with_a_port, .needs = TCP_ONLY},
    {.name = "clnttcp_create_with_a_port_and_a_socket", .run = clnttcp_create_with_a_port, .argument = 1, .needs = TCP_ONLY},
    TEST(refused_connection_is_an_error),
    TEST(created_and_destroyed_handles_leave_no_descriptor),
    TEST(the_connection_is_rdma, .needs = RDMA_ONLY | NOISY),
    TEST(clnt_create_finds_the_server, .needs = RPCBIND),
    TEST(clnt_create_by_host_name, .needs = RPCBIND),
    TEST(clnt_create_timed_finds_the_server, .needs = RPCBIND),
    {.name = "clnt_create_vers_takes_the_highest_common_version", .run = clnt_create_vers_takes_the_highest_common_version, .needs = RPCBIND},
    {.name = "clnt_create_vers_timed_takes_the_highest_common_version", .run = clnt_create_vers_takes_the_highest_common_version, .argument = 1, .needs = RPCBIND},
    TEST(clnt_create_vers_without_a_common_version_says_so, .needs = RPCBIND),
    TEST(clnt_tp_create_finds_the_server, .needs = RPCBIND),
    TEST(clnt_tp_create_timed_finds_the_server, .needs = RPCBIND),
    TEST(clnt_create_of_an_unregistered_program_says_so, .needs = RPCBIND),
    TEST(clnt_create_of_an_unknown_host_says_so, .needs = RPCBIND),
    TEST(rpc_call_calls, .needs = RPCBIND),
    TEST(rpc_reg_serves, .needs = RPCBIND),
    TEST(rpcb_getaddr_tells_where_the_server_listens, .needs = RPCBIND),
    TEST(server_appears_in_rpcbind_and_leaves_with_svc_unreg, .needs = RPCBIND),
    {.name = "moved_server_is_registered_for_both_netids", .run = moved_server_is_registered_for_both_netids, .needs = RPCBIND | RDMA_ONLY | TCP_ONLY},
    {.name = "moved_legacy_server_is_registered_for_both_netids", .run = moved_server_is_registered_for_both_netids, .argument = 1, .needs = RPCBIND | RDMA_ONLY | TCP_ONLY},
    TEST(clnttcp_create_asks_rpcbind_for_the_port, .needs = RPCBIND | TCP_ONLY),
    TEST(netpath_names_the_netid, .needs = RPCBIND),
    END_OF_TESTS,
};
