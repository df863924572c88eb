/* servers.c: every way to create a server's transports, with every kind of loop, before and after a fork; and what
 * a server may do to its clients. */
#define _GNU_SOURCE
#include "harness.h"
#include "where.h"
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* The argument of the tests in the table below packs these. */
static const char *const hows[] = {"tli", "tlifd", "vcfd", "svctcp", "svctcpfd", "svc_create", "tp"};
static const char *const loops[] = {"run", "poll", "select", "common"};
#define PACK(how, loop, forks) ((how) * 100 + (loop) * 10 + (forks))

static CLIENT *find(struct server *server)
{
    if (server->port != 0)
        return client_of(server);
    CLIENT *client = clnt_create(where(), SUITE_PROG, SUITE_V2, leg.netid);
    if (client == NULL)
        clnt_pcreateerror("no CLIENT");
    REQUIRE(client != NULL);
    return client;
}

/* Two clients at a time, small and large both ways; one goes, one stays, one comes. */
static void serves(long packed)
{
    const char *how = hows[packed / 100], *loop = loops[packed / 10 % 10];
    struct server server = packed % 10 ? server_start("-c", how, "-l", loop, "-f", NULL)
                                       : server_start("-c", how, "-l", loop, NULL);
    CLIENT *first = find(&server), *second = find(&server);
    REQUIRE_STATUS(suite_null_2(NULL, NULL, first), RPC_SUCCESS);
    for (unsigned i = 0; i < 5; i++) {
        require_echo(first, 10 + i, i);
        require_echo(second, NOT_INLINE + i, i);
    }
    clnt_destroy(first);
    require_echo(second, 1000000, 7);
    first = find(&server);
    require_echo(first, 100, 8);
    clnt_destroy(second);
    require_echo(first, NOT_INLINE, 9);
    clnt_destroy(first);
}

static void server_sees_the_caller(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    suite_identity who = {0};
    REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
    REQUIRE(strcmp(who.address, where()) == 0);
    struct sockaddr_in mine;
    socklen_t length = sizeof mine;
    int fd;
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    if (!leg.adapter && getsockname(fd, (struct sockaddr *)&mine, &length) == 0 && mine.sin_family == AF_INET)
        REQUIRE(who.port == ntohs(mine.sin_port));
    clnt_destroy(client);
}

static void server_that_exits_right_after_its_reply_has_replied(long unused)
{
    (void)unused;
    for (int i = 0; i < rounds(10); i++) {
        struct server server = server_start("-c", "tli", NULL);
        CLIENT *client = client_of(&server);
        u_int argument = 4711, result = 0;
        REQUIRE_STATUS(suite_reply_and_exit_2(&argument, &result, client), RPC_SUCCESS);
        REQUIRE(result == 4711);
        int status = server_wait(&server);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        close(server.events);
        close(server.control);
        clnt_destroy(client);
    }
}

/* The client takes nothing of the last reply for longer than any reply waits, and more of it is left than a socket holds. */
static void what_a_server_has_answered_arrives_whatever_it_does_then(long end)
{
    suite_last last = {.length = 12 << 20, .end = (suite_end)end};
    struct server server = server_start("-c", "tli", NULL);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
        CLIENT *client = client_of(&server);
        clnt_control(client, CLSET_TIMEOUT, (char *)&patient);
        suite_blob got = {0}, expected = blob_of(last.length, last.length);
        REQUIRE_STATUS(suite_last_source_2(&last, &got, client), RPC_SUCCESS);
        REQUIRE(got.suite_blob_len == last.length);
        REQUIRE(memcmp(got.suite_blob_val, expected.suite_blob_val, last.length) == 0);
        _exit(0);
    }
    int status;
    server_await_block(&server);
    REQUIRE(kill(pid, SIGSTOP) == 0);
    REQUIRE(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    server_release(&server);
    usleep(end == END_DESTROY ? 150000 : 400000);
    REQUIRE(kill(pid, SIGCONT) == 0);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (end == END_DESTROY) {
        CLIENT *client = client_of(&server);
        require_echo(client, 100, 1);
        clnt_destroy(client);
        return;
    }
    status = server_wait(&server);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void *serve_for_ever(void *unused)
{
    (void)unused;
    svc_run();
    return NULL;
}

/* Whatever stands in front of svc_run lets a cancellation through. */
static void a_thread_in_svc_run_can_be_cancelled(long unused)
{
    (void)unused;
    struct sockaddr_in address = where_address();
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 64};
    REQUIRE(svc_tli_create(RPC_ANYFD, the_netconfig(), &bind_to, 0, 0) != NULL);
    pthread_t thread;
    void *end;
    REQUIRE(pthread_create(&thread, NULL, serve_for_ever, NULL) == 0);
    REQUIRE(pthread_cancel(thread) == 0);
    REQUIRE(pthread_join(thread, &end) == 0);
    REQUIRE(end == PTHREAD_CANCELED);
}

static void child_of_the_server_may_reply(long length)
{
    CLIENT *client = client_of(server_shared());
    for (unsigned i = 0; i < 5; i++) {
        suite_blob sent = blob_of((size_t)length, i), got = {0};
        REQUIRE_STATUS(suite_child_replies_2(&sent, &got, client), RPC_SUCCESS);
        REQUIRE(got.suite_blob_len == sent.suite_blob_len);
        REQUIRE(memcmp(got.suite_blob_val, sent.suite_blob_val, (size_t)length) == 0);
        /* The parent has to be able to go on after the child. */
        require_echo(client, 500, i);
    }
    clnt_destroy(client);
}

struct deferred_call {
    CLIENT *client;
    u_int length;
    suite_blob got;
    enum clnt_stat status;
};

static void *call_deferred(void *argument)
{
    struct deferred_call *call = argument;
    call->status = suite_defer_2(&call->length, &call->got, call->client);
    return NULL;
}

/* The dispatch routine has returned long ago: as libtirpc does it, the latest request of a connection is answered. */
static void reply_after_the_dispatch_routine(long length)
{
    struct server *server = server_shared();
    CLIENT *client = client_of(server), *other = client_of(server);
    for (unsigned i = 0; i < 3; i++) {
        struct deferred_call call = {.client = client, .length = (u_int)length + i};
        pthread_t thread;
        u_int released = 0;
        REQUIRE(pthread_create(&thread, NULL, call_deferred, &call) == 0);
        while (released == 0)
            REQUIRE_STATUS(suite_release_2(NULL, &released, other), RPC_SUCCESS);
        REQUIRE(pthread_join(thread, NULL) == 0);
        REQUIRE_STATUS(call.status, RPC_SUCCESS);
        /* The arguments are gone. */
        REQUIRE(released == SUITE_REPLIED);
        suite_blob wanted = blob_of(call.length, call.length);
        REQUIRE(call.got.suite_blob_len == call.length);
        REQUIRE(memcmp(call.got.suite_blob_val, wanted.suite_blob_val, call.length) == 0);
        require_echo(client, 500, i);
    }
    clnt_destroy(client);
    clnt_destroy(other);
}

/* More connections than the server has descriptors: the one that was idle longest is closed for a new one. */
static void idle_connections_make_room(long unused)
{
    (void)unused;
    enum { CLIENTS = 80 };
    struct server server = server_start("-c", "tli", "-d", "64", NULL);
    struct sockaddr_in address = address_of(&server);
    CLIENT *clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = client_of(&server);
        REQUIRE_STATUS(suite_null_2(NULL, NULL, clients[i]), RPC_SUCCESS);
    }
    REQUIRE(suite_null_2(NULL, NULL, clients[0]) != RPC_SUCCESS);
    for (int i = CLIENTS - 10; i < CLIENTS; i++)
        REQUIRE_STATUS(suite_null_2(NULL, NULL, clients[i]), RPC_SUCCESS);
    /* Connections that never send anything, too: as many as there is room for, and then more. */
    for (int i = 0; i < CLIENTS && !leg.adapter; i++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    }
    for (int i = 0; i < 10; i++) {
        CLIENT *client = client_of(&server);
        require_echo(client, 500, (unsigned)i);
        clnt_destroy(client);
    }
    for (int i = 0; i < CLIENTS; i++)
        clnt_destroy(clients[i]);
}

enum { BUSY_THREADS = 4 };

static void *keep_busy(void *client)
{
    u_int milliseconds = 2, longest;
    for (int i = 0; i < rounds(100); i++)
        REQUIRE_STATUS(suite_work_2(&milliseconds, &longest, client), RPC_SUCCESS);
    return NULL;
}

/* How many calls of a client that always has some under way are served in a row while another client calls. */
static u_int in_a_row(void)
{
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *busy = client_of(&server), *other = client_of(&server);
    pthread_t threads[BUSY_THREADS];
    for (int i = 0; i < BUSY_THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, keep_busy, busy) == 0);
    u_int milliseconds = 0, longest = 0;
    for (int i = 0; i < rounds(100); i++)
        REQUIRE_STATUS(suite_work_2(&milliseconds, &longest, other), RPC_SUCCESS);
    for (int i = 0; i < BUSY_THREADS; i++)
        pthread_join(threads[i], NULL);
    TRACE("%u in a row\n", longest);
    clnt_destroy(busy);
    clnt_destroy(other);
    return longest;
}

/* The other client gets its turn after one or two of them; unless it had no processor meanwhile, and so no call to be served. */
static void busy_client_leaves_turns_to_another(long unused)
{
    (void)unused;
    int attempts = 10;
    while (in_a_row() > 3)
        REQUIRE(--attempts > 0);
}

static void reply_from_a_thread(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    for (u_int i = 0; i < (u_int)rounds(500); i++) {
        u_int result = 0;
        REQUIRE_STATUS(suite_thread_replies_2(&i, &result, client), RPC_SUCCESS);
        REQUIRE(result == i);
    }
    clnt_destroy(client);
}

/* With `reply`, the answer must still arrive. Either way the server lives on. */
static void svc_destroy_in_a_dispatch_routine(long reply)
{
    struct server server = server_start("-c", "tli", NULL);
    for (int i = 0; i < 3; i++) {
        CLIENT *client = client_of(&server);
        require_echo(client, 100, 1);
        if (reply)
            REQUIRE_STATUS(suite_reply_and_destroy_2(NULL, NULL, client), RPC_SUCCESS);
        else
            REQUIRE_STATUS(suite_destroy_2(NULL, NULL, client), RPC_CANTRECV);
        REQUIRE(suite_null_2(NULL, NULL, client) != RPC_SUCCESS);
        clnt_destroy(client);
    }
    CLIENT *client = client_of(&server);
    require_echo(client, NOT_INLINE, 2);
}

static void *kill_when_blocked(void *server)
{
    server_await_block(server);
    kill(((struct server *)server)->pid, SIGKILL);
    return NULL;
}

static void server_killed_during_a_call(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    pthread_t helper;
    REQUIRE(pthread_create(&helper, NULL, kill_when_blocked, &server) == 0);
    u_int argument = 1, result;
    REQUIRE_STATUS(suite_block_2(&argument, &result, client), RPC_CANTRECV);
    pthread_join(helper, NULL);
    struct rpc_err error;
    clnt_geterr(client, &error);
    REQUIRE(error.re_status == RPC_CANTRECV);
    REQUIRE(strlen(clnt_sperror(client, "x")) > 5);
    /* The handle stays broken, and clean; a new one to a new server works. */
    signal(SIGPIPE, SIG_IGN);
    REQUIRE(suite_null_2(NULL, NULL, client) != RPC_SUCCESS);
    clnt_destroy(client);
    server_wait(&server);
    server = server_start("-c", "tli", NULL);
    client = client_of(&server);
    require_echo(client, NOT_INLINE, 3);
    clnt_destroy(client);
}

static void dead_connection_raises_no_sigpipe(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    require_echo(client, 100, 3);
    server_kill(&server);
    for (int i = 0; i < 3; i++)
        REQUIRE(suite_null_2(NULL, NULL, client) != RPC_SUCCESS);
    clnt_destroy(client);
}

/* Clients that die in the middle of things are everyday business for a server. */
static void server_survives_clients_that_are_killed(long unused)
{
    (void)unused;
    struct server server = leg.library ? server_start("-c", "tli", NULL) : server_start("-c", "tli", "-i", NULL);
    for (int i = 0; i < rounds(10); i++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            CLIENT *client = client_of(&server);
            u_int argument = 1, result;
            if (i % 2 == 0)
                suite_block_2(&argument, &result, client);
            for (;;)
                require_echo(client, 1000000, 1);
        }
        if (i % 2 == 0) {
            server_await_block(&server);
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            server_release(&server);
        } else {
            /* Somewhere in a large transfer: a call of our own has been served meanwhile. */
            CLIENT *client = client_of(&server);
            require_echo(client, 100, 2);
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
            clnt_destroy(client);
        }
    }
    CLIENT *client = client_of(&server);
    require_echo(client, NOT_INLINE, 3);
    clnt_destroy(client);
}

static void server_survives_bytes_that_are_no_protocol(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    static const char *const garbage[] = {"M", "MPA ID Req Fram", "GET / HTTP/1.0\r\n\r\n", "MPA ID Req Frame\xff\xff\xff\xff"};
    for (size_t i = 0; i < sizeof garbage / sizeof *garbage; i++) {
        struct sockaddr_in address = address_of(&server);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        REQUIRE(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
        REQUIRE(send(fd, garbage[i], strlen(garbage[i]), MSG_NOSIGNAL) > 0);
        shutdown(fd, SHUT_WR);
        close(fd);
    }
    CLIENT *client = client_of(&server);
    require_echo(client, NOT_INLINE, 3);
    clnt_destroy(client);
}

/* svc_run, and a CLIENT in the same process: an intermediate server does both. */
/* How many descriptors libtirpc's loop polls. */
static int polled(void)
{
    int count = 0;
    for (int i = 0; i < svc_max_pollfd; i++)
        count += svc_pollfd[i].fd >= 0;
    return count;
}

/* A listener that cannot be created is not polled, holds no descriptor, and leaves the program's own socket alone. */
static void listener_that_cannot_be_made_leaves_nothing_behind(long own)
{
    struct netconfig *config = getnetconfigent("rdma");
    REQUIRE(config != NULL);
    enum { MOST = 256 };
    for (int i = 0; i < MOST; i++)
        REQUIRE(svc_tli_create(RPC_ANYFD, config, NULL, 0, 0) != NULL);
    int before = polled(), fd = RPC_ANYFD;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (own) {
        fd = socket(AF_INET, SOCK_STREAM, 0);
        REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0 && listen(fd, 5) == 0);
    }
    int next = dup(0);
    close(next);
    REQUIRE(svc_tli_create(fd, config, NULL, 0, 0) == NULL);
    REQUIRE(strstr(clnt_spcreateerror(""), "more than 256 listeners") != NULL);
    REQUIRE(polled() == before);
    int again = dup(0);
    REQUIRE(again == next);
    int listens = 0;
    socklen_t length = sizeof listens;
    REQUIRE(!own || (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens));
    freenetconfigent(config);
}

static void fifty_connections_at_a_time(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    enum { MANY = 50 };
    CLIENT *clients[MANY];
    for (unsigned i = 0; i < MANY; i++)
        clients[i] = client_of(&server);
    for (unsigned round = 0; round < 3; round++) {
        for (unsigned i = 0; i < MANY; i++)
            require_echo(clients[(i * 7) % MANY], 100 + i * 100, i);
    }
    for (unsigned i = 0; i < MANY; i++)
        clnt_destroy(clients[i]);
}

#define SERVES(title, how, loop, forks, what)                                                                         \
    {.name = title, .run = serves, .argument = PACK(how, loop, forks), .needs = what}

const struct test server_tests[] = {
    SERVES("serves_svc_tli_create_svc_run", 0, 0, 0, 0),
    SERVES("serves_svc_tli_create_own_poll_loop", 0, 1, 0, 0),
    SERVES("serves_svc_tli_create_own_select_loop", 0, 2, 0, 0),
    SERVES("serves_svc_tli_create_svc_getreq_common", 0, 3, 0, 0),
    SERVES("serves_svc_tli_create_daemonised", 0, 0, 1, 0),
    SERVES("serves_svc_tli_create_daemonised_select_loop", 0, 2, 1, 0),
    SERVES("serves_svc_tli_create_own_socket_svc_run", 1, 0, 0, 0),
    SERVES("serves_svc_tli_create_own_socket_select_loop", 1, 2, 0, 0),
    SERVES("serves_svc_tli_create_own_socket_daemonised", 1, 0, 1, 0),
    SERVES("serves_svc_vc_create_svc_run", 2, 0, 0, TCP_ONLY),
    SERVES("serves_svc_vc_create_poll_loop", 2, 1, 0, TCP_ONLY),
    SERVES("serves_svc_vc_create_daemonised", 2, 0, 1, TCP_ONLY),
    SERVES("serves_svctcp_create_svc_run", 3, 0, 0, TCP_ONLY),
    SERVES("serves_svctcp_create_select_loop", 3, 2, 0, TCP_ONLY),
    SERVES("serves_svctcp_create_daemonised", 3, 0, 1, TCP_ONLY),
    SERVES("serves_svctcp_create_own_socket", 4, 0, 0, TCP_ONLY),
    SERVES("serves_svc_create_svc_run", 5, 0, 0, RPCBIND),
    SERVES("serves_svc_create_poll_loop", 5, 1, 0, RPCBIND),
    SERVES("serves_svc_create_daemonised", 5, 0, 1, RPCBIND),
    SERVES("serves_svc_tp_create_select_loop", 6, 2, 0, RPCBIND),
    TEST(server_sees_the_caller),
    TEST(server_that_exits_right_after_its_reply_has_replied),
    {.name = "reply_after_the_dispatch_routine", .run = reply_after_the_dispatch_routine, .argument = 300},
    {.name = "reply_after_the_dispatch_routine_at_length", .run = reply_after_the_dispatch_routine, .argument = 150000},
    TEST(reply_from_a_thread, .not_stock = "stock encodes and decodes by one stream, in both threads"),
    TEST(busy_client_leaves_turns_to_another),
    {.name = "the_last_answer_arrives_after_exit", .run = what_a_server_has_answered_arrives_whatever_it_does_then,
     .argument = END_EXIT},
    {.name = "the_last_answer_arrives_after_svc_exit",
     .run = what_a_server_has_answered_arrives_whatever_it_does_then, .argument = END_SVC_EXIT},
    {.name = "the_last_answer_arrives_though_svc_exit_came_first",
     .run = what_a_server_has_answered_arrives_whatever_it_does_then, .argument = END_SVC_EXIT_BEFORE},
    {.name = "the_last_answer_arrives_after_svc_destroy",
     .run = what_a_server_has_answered_arrives_whatever_it_does_then, .argument = END_DESTROY,
     .not_stock = "stock uses the freed transport"},
    TEST(a_thread_in_svc_run_can_be_cancelled),
    TEST(idle_connections_make_room),
    {.name = "child_of_the_server_may_reply", .run = child_of_the_server_may_reply, .argument = 300,
     .needs = SOCKET},
    {.name = "child_of_the_server_may_reply_at_length", .run = child_of_the_server_may_reply,
     .argument = 200000, .needs = SOCKET},
    {.name = "svc_destroy_in_a_dispatch_routine", .run = svc_destroy_in_a_dispatch_routine,
     .not_stock = "stock uses the freed transport"},
    {.name = "svc_destroy_in_a_dispatch_routine_after_the_reply", .run = svc_destroy_in_a_dispatch_routine, .argument = 1, .needs = ORDER,
     .not_stock = "stock uses the freed transport"},
    TEST(server_killed_during_a_call),
    TEST(dead_connection_raises_no_sigpipe, .not_stock = "stock lets SIGPIPE through"),
    TEST(server_survives_clients_that_are_killed),
    TEST(server_survives_bytes_that_are_no_protocol, .needs = SOCKET),
    {.name = "listener_that_cannot_be_made_leaves_nothing_behind", .run = listener_that_cannot_be_made_leaves_nothing_behind, .needs = RDMA_ONLY | SOCKET},
    {.name = "listener_that_cannot_be_made_leaves_the_programs_socket_alone", .run = listener_that_cannot_be_made_leaves_nothing_behind, .argument = 1, .needs = RDMA_ONLY | SOCKET},
    TEST(fifty_connections_at_a_time),
    END_OF_TESTS,
};
