/* threads.c: calls of several threads that share nothing but the AUTH, or a lock of the program. The servers' blocking
 * procedure and semaphores control which waits for which. */
#define _GNU_SOURCE
#include "harness.h"
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- An AUTH of the program's own ------------------------------------------------------------------------------- */

/* An AUTH that may only be marshalled once the previous call has been validated, like AUTHs that compare a reply with their
 * latest call. Its operations are not libtirpc's; what they write is AUTH_NONE. */
static int in_call, disturbed;

static void own_nothing(AUTH *auth) { (void)auth; }
static bool_t own_marshal(AUTH *auth, XDR *xdrs)
{
    (void)auth;
    if (__atomic_add_fetch(&in_call, 1, __ATOMIC_SEQ_CST) != 1)
        disturbed = 1;
    struct opaque_auth none = {0};
    return xdr_opaque_auth(xdrs, &none) && xdr_opaque_auth(xdrs, &none);
}
static bool_t own_validate(AUTH *auth, struct opaque_auth *verifier)
{
    (void)auth, (void)verifier;
    __atomic_sub_fetch(&in_call, 1, __ATOMIC_SEQ_CST);
    return TRUE;
}
static bool_t own_refresh(AUTH *auth, void *message) { (void)auth, (void)message; return FALSE; }
static bool_t own_wrap(AUTH *auth, XDR *xdrs, xdrproc_t procedure, caddr_t object)
{
    (void)auth;
    return procedure(xdrs, object);
}
static struct auth_ops own_ops = {own_nothing, own_marshal, own_validate, own_refresh, own_nothing, own_wrap, own_wrap};

static AUTH *own_auth(void)
{
    AUTH *auth = calloc(1, sizeof *auth);
    REQUIRE(auth != NULL);
    auth->ah_ops = &own_ops;
    return auth;
}

enum flavour { NONE, SYS, OWN };

static AUTH *auth_of(long flavour)
{
    return flavour == NONE ? authnone_create() : flavour == SYS ? authunix_create_default() : own_auth();
}

/* ---- Threads ---------------------------------------------------------------------------------------------------- */

static void *block_one(void *client)
{
    u_int argument = 5, result = 0;
    REQUIRE_STATUS(suite_block_2(&argument, &result, client), RPC_SUCCESS);
    REQUIRE(result == 5);
    return NULL;
}

enum { SERVERS = 4 };

/* Four threads, four servers, one AUTH: all four calls are at their servers before the first of them may answer. */
static void calls_at_several_servers_run_together(long flavour)
{
    struct server servers[SERVERS];
    pthread_t threads[SERVERS];
    CLIENT *clients[SERVERS];
    AUTH *auth = auth_of(flavour);
    for (int i = 0; i < SERVERS; i++) {
        servers[i] = server_start("-c", "tli", NULL);
        clients[i] = client_of(&servers[i]);
        clients[i]->cl_auth = auth;
        REQUIRE(pthread_create(&threads[i], NULL, block_one, clients[i]) == 0);
        server_await_block(&servers[i]);
    }
    /* ... and one more call gets past them. */
    CLIENT *client = client_of(server_shared());
    client->cl_auth = auth;
    require_echo(client, 1000, 1);
    for (int i = 0; i < SERVERS; i++) {
        server_release(&servers[i]);
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    }
}

/* ---- A descriptor of several CLIENTs ----------------------------------------------------------------------------- */

static sem_t closed;

/* Lets the call end when the descriptor has been closed, which must not happen before the call ends; or else after a while. */
static void *release_late(void *server)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (sem_timedwait(&closed, &until) < 0 && errno == EINTR)
        ;
    server_release(server);
    return NULL;
}

/* A CLIENT that closes its descriptor waits for the call of another CLIENT on it, which would otherwise read from whatever
 * gets the number next. */
static void descriptor_is_closed_when_anothers_call_has_ended(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    struct sockaddr_in address = address_of(&server);
    struct netbuf to = {sizeof address, sizeof address, &address};
    CLIENT *owner = client_of(&server);
    int fd = -1, pair[2];
    REQUIRE(clnt_control(owner, CLSET_FD_CLOSE, NULL) && clnt_control(owner, CLGET_FD, (char *)&fd));
    CLIENT *other = clnt_tli_create(fd, the_netconfig(), &to, SUITE_PROG, SUITE_V2, 0, 0);
    REQUIRE(other != NULL);
    sem_init(&closed, 0, 0);
    pthread_t caller, releaser;
    REQUIRE(pthread_create(&caller, NULL, block_one, other) == 0);
    server_await_block(&server);
    REQUIRE(pthread_create(&releaser, NULL, release_late, &server) == 0);
    clnt_destroy(owner);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    REQUIRE(write(pair[1], "mine", 4) == 4);
    if (pair[0] != fd)
        REQUIRE(dup2(pair[0], fd) == fd);
    sem_post(&closed);
    REQUIRE(pthread_join(releaser, NULL) == 0);
    REQUIRE(pthread_join(caller, NULL) == 0);
    char own[8];
    REQUIRE(recv(fd, own, sizeof own, MSG_DONTWAIT) == 4);
    REQUIRE(recv(pair[1], own, sizeof own, MSG_DONTWAIT) < 0);
}

/* ---- A lock of the program's own -------------------------------------------------------------------------------- */

static sem_t entered, done;

/* Encodes or decodes a number, but lets another thread call first. */
static bool_t waits_for_another_thread(XDR *xdrs, u_int *number)
{
    if (xdrs->x_op != XDR_FREE) {
        sem_post(&entered);
        sem_wait(&done);
    }
    return xdr_u_int(xdrs, number);
}

static void *call_that_waits(void *argument)
{
    CLIENT *client = argument;
    xdrproc_t slow = (xdrproc_t)waits_for_another_thread;
    u_int number = 20;

    suite_blob blob = {0};
    /* In the arguments, then in the results: a number as the length of a blob that is asked for, and of an empty one. */
    REQUIRE_STATUS(clnt_call(client, SUITE_SOURCE, slow, (caddr_t)&number, (xdrproc_t)xdr_suite_blob, (caddr_t)&blob,
                             patient), RPC_SUCCESS);
    REQUIRE(blob.suite_blob_len == 20);
    number = 0;
    REQUIRE_STATUS(clnt_call(client, SUITE_COUNTER, (xdrproc_t)xdr_void, NULL, slow, (caddr_t)&number, patient),
                   RPC_SUCCESS);

    return NULL;
}

/* An xdrproc may wait for a call of another thread, as when the program holds a lock of its own around that call. */
static void xdr_procedure_may_wait_for_another_threads_call(long flavour)
{
    AUTH *auth = auth_of(flavour);
    CLIENT *first = client_of(server_shared()), *second = client_of(server_shared());
    first->cl_auth = second->cl_auth = auth;
    sem_init(&entered, 0, 0);
    sem_init(&done, 0, 0);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, call_that_waits, first) == 0);
    for (int i = 0; i < 2; i++) {
        sem_wait(&entered);
        require_echo(second, 1000, (unsigned)i);
        sem_post(&done);
    }
    REQUIRE(pthread_join(thread, NULL) == 0);
}

/* ---- AUTHs that see one call at a time -------------------------------------------------------------------------- */

static void *echo_some(void *client)
{
    for (unsigned i = 0; i < (unsigned)rounds(100); i++)
        require_echo(client, 10 + i, i);
    return NULL;
}

static void auth_of_the_programs_own_sees_one_call_at_a_time(long unused)
{
    (void)unused;
    CLIENT *client = client_of(server_shared());
    client->cl_auth = own_auth();
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        REQUIRE(pthread_create(&threads[i], NULL, echo_some, client) == 0);
    for (int i = 0; i < 4; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    REQUIRE(!disturbed && in_call == 0);
}

/* A call behind a busy AUTH ends after its own timeout; one that is only to be sent ends after that of the handle. */
static void call_behind_a_busy_auth_ends_with_its_time(long zero)
{
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *busy = client_of(&server), *other = client_of(server_shared());
    busy->cl_auth = other->cl_auth = own_auth();
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, block_one, busy) == 0);
    server_await_block(&server);
    struct timeval time = {.tv_sec = 1};
    if (zero) {
        REQUIRE(clnt_control(other, CLSET_TIMEOUT, (char *)&time));
        time.tv_sec = 0;
    }
    double start = now();
    REQUIRE_STATUS(clnt_call(other, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, time),
                   RPC_TIMEDOUT);
    double took = now() - start;
    REQUIRE(took >= 0.99 && took < 15);
    REQUIRE(strstr(clnt_sperror(other, "call"), "with the same AUTH were under way") != NULL);
    server_release(&server);
    REQUIRE(pthread_join(thread, NULL) == 0);
    struct timeval longer = {.tv_sec = 25};
    REQUIRE(clnt_control(other, CLSET_TIMEOUT, (char *)&longer));
    require_echo(other, 1000, 1);
}

/* A procedure of the program may call with the AUTH of the call that it belongs to. */
static CLIENT *inner;
static bool_t calls_inside(XDR *xdrs, u_int *number)
{
    if (xdrs->x_op == XDR_ENCODE)
        require_echo(inner, 100, *number);
    return xdr_u_int(xdrs, number);
}

static void procedure_may_call_with_the_same_auth(long flavour)
{
    CLIENT *client = client_of(server_shared());
    inner = client_of(server_shared());
    client->cl_auth = inner->cl_auth = auth_of(flavour);
    u_int number = 30;
    suite_blob blob = {0};
    REQUIRE_STATUS(clnt_call(client, SUITE_SOURCE, (xdrproc_t)calls_inside, (caddr_t)&number, (xdrproc_t)xdr_suite_blob,
                             (caddr_t)&blob, patient), RPC_SUCCESS);
    REQUIRE(blob.suite_blob_len == 30);
}

/* A child does not wait for a thread that only its parent has. */
static void forked_child_does_not_wait_for_a_thread_of_its_parent(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *busy = client_of(&server);
    AUTH *auth = busy->cl_auth = own_auth();
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, block_one, busy) == 0);
    server_await_block(&server);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        CLIENT *client = client_of(server_shared());
        client->cl_auth = auth;
        require_echo(client, 1000, 1);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    server_release(&server);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

/* ---- Cancelled threads ------------------------------------------------------------------------------------------ */

static sem_t under_way;
static int tidied;

static void tidy(void *unused)
{
    (void)unused;
    tidied = 1;
}

enum { CALLS, ONE_WAY };

struct caller {
    CLIENT *client;
    int how;
};

/* Makes calls and does nothing else: there is no other cancellation point. */
static void *only_call(void *argument)
{
    struct caller *worker = argument;
    struct timeval none = {0};
    pthread_cleanup_push(tidy, NULL);
    for (unsigned i = 0;; i++) {
        if (worker->how == CALLS)
            clnt_call(worker->client, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, patient);
        else
            clnt_call(worker->client, SUITE_ONE_WAY, (xdrproc_t)xdr_u_int, (caddr_t)&i, NULL, NULL, none);
        if (i == 10)
            sem_post(&under_way);
    }
    pthread_cleanup_pop(0);
    return NULL;
}

static void thread_that_only_calls_is_cancelled(long how)
{
    struct caller worker = {client_of(server_shared()), (int)how};
    sem_init(&under_way, 0, 0);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, only_call, &worker) == 0);
    sem_wait(&under_way);
    REQUIRE(pthread_cancel(thread) == 0);
    void *end;
    REQUIRE(pthread_join(thread, &end) == 0);
    REQUIRE(end == PTHREAD_CANCELED && tidied);
    require_echo(worker.client, NOT_INLINE, 1);
    clnt_destroy(worker.client);
}

/* Nothing but a call takes notice of a cancellation: creation and destruction do all of their work first. */
static void *create_and_destroy(void *unused)
{
    (void)unused;
    pthread_cleanup_push(tidy, NULL);
    REQUIRE(pthread_cancel(pthread_self()) == 0);
    CLIENT *client = client_of(server_shared());
    int fd;
    REQUIRE(clnt_control(client, CLSET_FD_CLOSE, NULL) && clnt_control(client, CLGET_FD, (char *)&fd));
    clnt_destroy(client);
    pthread_testcancel();
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancelled_thread_creates_and_destroys(long unused)
{
    (void)unused;
    pthread_t thread;
    void *end;
    int before = dup(0);
    REQUIRE(pthread_create(&thread, NULL, create_and_destroy, NULL) == 0);
    REQUIRE(pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED && tidied);
    close(before);
    int after = dup(0);
    REQUIRE(after == before);
    require_echo(client_of(server_shared()), 1000, 1);
}

static void cancelled_dispatch(struct svc_req *request, SVCXPRT *transport)
{
    (void)request;
    u_int number;
    if (!svc_getargs(transport, (xdrproc_t)xdr_u_int, (caddr_t)&number))
        return;
    pthread_cancel(pthread_self());
    svc_sendreply(transport, (xdrproc_t)xdr_u_int, (caddr_t)&number);
}

static void *serve(void *unused)
{
    (void)unused;
    svc_run();
    return NULL;
}

/* A thread in svc_run that is cancelled while it serves a request answers it, and ends in poll. */
static void cancelled_service_loop_answers_first(long unused)
{
    (void)unused;
    struct netconfig *config = the_netconfig();
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, config, NULL, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, SUITE_PROG, SUITE_V2, cancelled_dispatch, NULL));
    struct sockaddr_in bound;
    socklen_t length = sizeof bound;
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&bound, &length) == 0);
    struct server here = {.port = ntohs(bound.sin_port)};
    CLIENT *client = NULL;
    for (u_int i = 0; i < 5; i++) {
        pthread_t thread;
        void *end;
        u_int number = 0;
        REQUIRE(pthread_create(&thread, NULL, serve, NULL) == 0);
        if (client == NULL)
            client = client_of(&here);
        REQUIRE_STATUS(clnt_call(client, SUITE_BLOCK, (xdrproc_t)xdr_u_int, (caddr_t)&i, (xdrproc_t)xdr_u_int,
                                 (caddr_t)&number, patient), RPC_SUCCESS);
        REQUIRE(number == i);
        REQUIRE(pthread_join(thread, &end) == 0 && end == PTHREAD_CANCELED);
    }
    clnt_destroy(client);
    freenetconfigent(config);
}

#define FLAVOUR(function, flavour) {.name = #function "_" #flavour, .run = function, .argument = flavour}
static const char leaves_its_lock[] = "stock leaves its lock taken for ever";
static const char no_limit[] = "stock does not count the wait for another thread's call";

const struct test thread_tests[] = {
    FLAVOUR(calls_at_several_servers_run_together, NONE),
    FLAVOUR(calls_at_several_servers_run_together, SYS),
    FLAVOUR(xdr_procedure_may_wait_for_another_threads_call, NONE),
    FLAVOUR(xdr_procedure_may_wait_for_another_threads_call, SYS),
    TEST(auth_of_the_programs_own_sees_one_call_at_a_time),
    TEST(descriptor_is_closed_when_anothers_call_has_ended),
    {.name = "call_behind_a_busy_auth_ends_with_its_time", .run = call_behind_a_busy_auth_ends_with_its_time, .not_stock = no_limit},
    {.name = "one_way_call_behind_a_busy_auth_ends_with_its_time", .run = call_behind_a_busy_auth_ends_with_its_time, .argument = 1, .not_stock = no_limit},
    FLAVOUR(procedure_may_call_with_the_same_auth, SYS),
    FLAVOUR(procedure_may_call_with_the_same_auth, OWN),
    TEST(forked_child_does_not_wait_for_a_thread_of_its_parent, .needs = SOCKET),
    {.name = "thread_that_only_calls_is_cancelled", .run = thread_that_only_calls_is_cancelled, .argument = CALLS, .not_stock = leaves_its_lock},
    {.name = "thread_that_only_makes_one_way_calls_is_cancelled", .run = thread_that_only_calls_is_cancelled, .argument = ONE_WAY, .not_stock = leaves_its_lock},
    TEST(cancelled_thread_creates_and_destroys, .not_stock = "stock leaves what it has half done"),
    TEST(cancelled_service_loop_answers_first, .not_stock = "stock ends in the midst of the reply"),
    END_OF_TESTS,
};
