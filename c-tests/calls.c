/* calls.c: what clnt_call and clnt_control do: data of every size and kind, timeouts, batches, errors, signals,
 * threads, credentials. Everything here holds for stock libtirpc over tcp too, unless the table says why not. */
#define _GNU_SOURCE
#include "harness.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static const struct timeval at_once = {0};

static CLIENT *shared_client(void)
{
    return client_of(server_shared());
}

/* ---- Data -------------------------------------------------------------------------------------------------------- */

static void payload_to_the_server(long length)
{
    CLIENT *client = shared_client();
    for (unsigned seed = 0; seed < 2; seed++) {
        suite_blob sent = blob_of((size_t)length, seed);
        suite_digest digest = {0};
        REQUIRE_STATUS(suite_sink_2(&sent, &digest, client), RPC_SUCCESS);
        REQUIRE(digest.length == (unsigned long)length);
        REQUIRE(digest.sum == checksum(sent.suite_blob_val, (size_t)length));
        free(sent.suite_blob_val);
    }
    clnt_destroy(client);
}

static void payload_from_the_server(long length)
{
    CLIENT *client = shared_client();
    suite_blob wanted = blob_of((size_t)length, (unsigned)length);
    for (int i = 0; i < 2; i++) {
        u_int count = (u_int)length;
        suite_blob got = {0};
        REQUIRE_STATUS(suite_source_2(&count, &got, client), RPC_SUCCESS);
        REQUIRE(got.suite_blob_len == count);
        REQUIRE(length == 0 || memcmp(got.suite_blob_val, wanted.suite_blob_val, count) == 0);
        REQUIRE(clnt_freeres(client, (xdrproc_t)xdr_suite_blob, (caddr_t)&got));
    }
    clnt_destroy(client);
}

static void payload_both_ways(long length)
{
    CLIENT *client = shared_client();
    require_echo(client, (size_t)length, 1);
    require_echo(client, (size_t)length, 2);
    clnt_destroy(client);
}

/* At every limit between inline and chunks there is a length that somebody gets wrong. */
static void every_length_around_the_inline_threshold(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    for (int length = 900; length < 1100; length += leg.slow ? 7 : 1)
        require_echo(client, (size_t)length, (unsigned)length);
    for (int length = 3900; length < 4200; length += leg.slow ? 11 : 1)
        require_echo(client, (size_t)length, (unsigned)length);
    for (int length = 262000; length < 262200; length += leg.slow ? 11 : 1)
        require_echo(client, (size_t)length, (unsigned)length);
    clnt_destroy(client);
}

/* The program provides the memory for the result. */
static void result_into_the_callers_own_buffer(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    u_int count = NOT_INLINE;
    suite_blob wanted = blob_of(count, count);
    static char mine[NOT_INLINE];
    suite_blob got = {.suite_blob_len = 0, .suite_blob_val = mine};
    REQUIRE_STATUS(suite_source_2(&count, &got, client), RPC_SUCCESS);
    REQUIRE(got.suite_blob_val == mine && got.suite_blob_len == count);
    REQUIRE(memcmp(mine, wanted.suite_blob_val, count) == 0);
    clnt_destroy(client);
}

static void reply_of_unforeseen_length(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    suite_blob got = {0}, wanted = blob_of(NOT_INLINE, NOT_INLINE);
    REQUIRE_STATUS(suite_next_source_2(NULL, &got, client), RPC_SUCCESS);
    REQUIRE(got.suite_blob_len == NOT_INLINE);
    REQUIRE(memcmp(got.suite_blob_val, wanted.suite_blob_val, NOT_INLINE) == 0);
    clnt_destroy(client);
}

static void fixed_arrays(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    static suite_fixed sent, got;
    sent.first = -5;
    sent.second = 4000000000u;
    sent.fifth = TRUE;
    sent.colour = BLUE;
    fill(sent.raw, sizeof sent.raw, 1);
    for (int i = 0; i < 3000; i++)
        sent.numbers[i] = i * i * (i % 2 ? -1 : 1);
    for (int i = 0; i < 40; i++)
        sent.reals[i] = 1.5 * i - 7;
    sent.single = 0.25f;
    sent.point = (suite_point){.x = -1234567890123456789, .y = 18000000000000000000ull};
    REQUIRE_STATUS(suite_fixed_2(&sent, &got, client), RPC_SUCCESS);
    REQUIRE(got.first == 5 && got.second == 4000000000u && got.fifth == TRUE && got.colour == BLUE);
    REQUIRE(memcmp(got.raw, sent.raw, sizeof got.raw) == 0);
    for (int i = 0; i < 3000; i++)
        REQUIRE(got.numbers[i] == ~sent.numbers[i]);
    REQUIRE(memcmp(got.reals, sent.reals, sizeof got.reals) == 0);
    REQUIRE(got.single == 0.25f && got.point.x == sent.point.x && got.point.y == sent.point.y);
    clnt_destroy(client);
}

static void arrays_of_numbers(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    for (u_int count = 0; count < 100000; count = count * 3 + 1) {
        suite_numbers numbers = {count, calloc(count + 1, sizeof(int))};
        long long sum = 0;
        for (u_int i = 0; i < count; i++)
            sum += numbers.suite_numbers_val[i] = (int)(i * 2654435761u);
        quad_t result = 0;
        REQUIRE_STATUS(suite_sum_2(&numbers, &result, client), RPC_SUCCESS);
        REQUIRE(result == sum);
        free(numbers.suite_numbers_val);
    }
    clnt_destroy(client);
}

/* rpcgen turns a plain `string` into xdr_wrapstring, which takes at most 9000 bytes. */
static void strings(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    for (size_t length = 0; length < 9000; length = length * 2 + 1) {
        char *text = malloc(length + 1), *got = NULL;
        memset(text, 'q', length);
        text[length] = '\0';
        REQUIRE_STATUS(suite_upper_2(&text, &got, client), RPC_SUCCESS);
        REQUIRE(strlen(got) == length && strspn(got, "Q") == length);
        xdr_free((xdrproc_t)xdr_wrapstring, (char *)&got);
        free(text);
    }
    clnt_destroy(client);
}

static void linked_lists(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    enum { ITEMS = 2000 };
    suite_list list = NULL, got = NULL;
    for (int i = 0; i < ITEMS; i++) {
        suite_item *item = malloc(sizeof *item);
        REQUIRE(asprintf(&item->name, "item %d", i) > 0);
        item->next = list;
        list = item;
    }
    REQUIRE_STATUS(suite_reverse_2(&list, &got, client), RPC_SUCCESS);
    int i = 0;
    for (suite_item *item = got; item != NULL; item = item->next, i++) {
        char name[32];
        snprintf(name, sizeof name, "item %d", i);
        REQUIRE(strcmp(item->name, name) == 0);
    }
    REQUIRE(i == ITEMS);
    xdr_free((xdrproc_t)xdr_suite_list, (char *)&got);
    list = got = NULL;
    REQUIRE_STATUS(suite_reverse_2(&list, &got, client), RPC_SUCCESS);
    REQUIRE(got == NULL);
    clnt_destroy(client);
}

static void unions(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    suite_choice sent = {.colour = RED, .suite_choice_u.blob = blob_of(9999, 3)}, got = {0};
    REQUIRE_STATUS(suite_choose_2(&sent, &got, client), RPC_SUCCESS);
    REQUIRE(got.colour == RED && got.suite_choice_u.blob.suite_blob_len == 9999);
    REQUIRE(memcmp(got.suite_choice_u.blob.suite_blob_val, sent.suite_choice_u.blob.suite_blob_val, 9999) == 0);
    memset(&got, 0, sizeof got);
    sent = (suite_choice){.colour = GREEN, .suite_choice_u.point = {-1, 1}};
    REQUIRE_STATUS(suite_choose_2(&sent, &got, client), RPC_SUCCESS);
    REQUIRE(got.colour == GREEN && got.suite_choice_u.point.x == -1 && got.suite_choice_u.point.y == 1);
    memset(&got, 0, sizeof got);
    sent = (suite_choice){.colour = BLUE};
    REQUIRE_STATUS(suite_choose_2(&sent, &got, client), RPC_SUCCESS);
    REQUIRE(got.colour == BLUE);
    clnt_destroy(client);
}

/* An xdrproc may encode from memory that it frees before it returns. */
static bool_t xdr_from_a_temporary(XDR *xdrs, void *length)
{
    suite_blob blob = blob_of(*(size_t *)length, 5);
    bool_t good = xdr_suite_blob(xdrs, &blob);
    memset(blob.suite_blob_val, 0xee, blob.suite_blob_len);
    free(blob.suite_blob_val);
    return good;
}

static void arguments_from_temporaries(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    for (size_t length = 1; length < 3000000; length *= 9) {
        suite_blob wanted = blob_of(length, 5);
        suite_digest digest = {0};
        REQUIRE_STATUS(clnt_call(client, SUITE_SINK, (xdrproc_t)xdr_from_a_temporary, (caddr_t)&length,
                                 (xdrproc_t)xdr_suite_digest, (caddr_t)&digest, patient),
                       RPC_SUCCESS);
        REQUIRE(digest.length == length && digest.sum == checksum(wanted.suite_blob_val, length));
        free(wanted.suite_blob_val);
    }
    clnt_destroy(client);
}

/* ---- clnt_control ------------------------------------------------------------------------------------------------ */

static void controls_of_address_and_descriptor(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct sockaddr_in wanted = address_of(server_shared()), got = {0};
    REQUIRE(clnt_control(client, CLGET_SERVER_ADDR, (char *)&got));
    REQUIRE(got.sin_port == wanted.sin_port && got.sin_addr.s_addr == wanted.sin_addr.s_addr);
    struct netbuf address = {0};
    REQUIRE(clnt_control(client, CLGET_SVC_ADDR, (char *)&address));
    REQUIRE(address.len >= sizeof wanted && ((struct sockaddr_in *)address.buf)->sin_port == wanted.sin_port);
    int fd = -1;
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
    REQUIRE(!clnt_control(client, CLSET_SVC_ADDR, (char *)&address));

    REQUIRE(clnt_control(client, CLSET_FD_NCLOSE, NULL));
    clnt_destroy(client);
    REQUIRE(fcntl(fd, F_GETFD) >= 0);
    close(fd);
    client = shared_client();
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    REQUIRE(clnt_control(client, CLSET_FD_NCLOSE, NULL));
    REQUIRE(clnt_control(client, CLSET_FD_CLOSE, NULL));
    clnt_destroy(client);
    REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}

static void controls_of_timeouts(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct timeval set = {.tv_sec = 3, .tv_usec = 5}, got = {0};
    REQUIRE(clnt_control(client, CLSET_TIMEOUT, (char *)&set));
    REQUIRE(clnt_control(client, CLGET_TIMEOUT, (char *)&got));
    REQUIRE(got.tv_sec == 3 && got.tv_usec == 5);
    struct timeval bad[] = {{-1, 0}, {0, -1}, {200000000, 0}, {0, 2000000}};
    for (int i = 0; i < 4; i++)
        REQUIRE(!clnt_control(client, CLSET_TIMEOUT, (char *)&bad[i]));
    REQUIRE(clnt_control(client, CLGET_TIMEOUT, (char *)&got));
    REQUIRE(got.tv_sec == 3 && got.tv_usec == 5);
    REQUIRE(!clnt_control(client, CLSET_RETRY_TIMEOUT, (char *)&set));
    REQUIRE(!clnt_control(client, CLGET_RETRY_TIMEOUT, (char *)&got));
    require_echo(client, 10, 1);
    clnt_destroy(client);
}

static void controls_of_program_and_version(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    rpcprog_t program = 0;
    rpcvers_t version = 0;
    REQUIRE(clnt_control(client, CLGET_PROG, (char *)&program) && program == SUITE_PROG);
    REQUIRE(clnt_control(client, CLGET_VERS, (char *)&version) && version == SUITE_V2);
    version = SUITE_V4;
    REQUIRE(clnt_control(client, CLSET_VERS, (char *)&version));
    int argument = 4, result = 0;
    REQUIRE_STATUS(suite_twice_4(&argument, &result, client), RPC_SUCCESS);
    REQUIRE(result == 8);
    version = 0;
    REQUIRE(clnt_control(client, CLGET_VERS, (char *)&version) && version == SUITE_V4);
    program = SUITE_PROG + 1;
    REQUIRE(clnt_control(client, CLSET_PROG, (char *)&program));
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_PROGUNAVAIL);
    clnt_destroy(client);
}

static void controls_of_xid(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    u_int32_t first = 0, second = 0, chosen = 7;
    require_echo(client, 1, 1);
    REQUIRE(clnt_control(client, CLGET_XID, (char *)&first));
    require_echo(client, 1, 1);
    REQUIRE(clnt_control(client, CLGET_XID, (char *)&second));
    REQUIRE(first != second);
    REQUIRE(clnt_control(client, CLSET_XID, (char *)&chosen));
    require_echo(client, 1, 1);
    require_echo(client, 1, 1);
    clnt_destroy(client);
}

static void controls_that_do_not_apply_are_refused(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    int value = 1;
    static const u_int not_for_streams[] = {CLSET_PUSH_TIMOD, CLSET_POP_TIMOD, CLSET_ASYNC, CLSET_CONNECT, 4242};
    for (size_t i = 0; i < sizeof not_for_streams / sizeof *not_for_streams; i++)
        REQUIRE(!clnt_control(client, not_for_streams[i], (char *)&value));
    for (u_int request = 1; request <= 20; request++) {
        if (request != CLSET_FD_CLOSE && request != CLSET_FD_NCLOSE)
            REQUIRE(!clnt_control(client, request, NULL));
    }
    require_echo(client, 10, 1);
    clnt_destroy(client);
}

/* ---- Time -------------------------------------------------------------------------------------------------------- */

static void timeout_leaves_the_handle_usable(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct timeval soon = {.tv_usec = 100000};
    for (int i = 0; i < 3; i++) {
        double start = now();
        REQUIRE_STATUS(clnt_call(client, SUITE_NO_REPLY, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, soon),
                       RPC_TIMEDOUT);
        REQUIRE(now() - start >= 0.09);
        REQUIRE(leg.slow || now() - start < 3 * patience());
        require_echo(client, 20000, (unsigned)i);
    }
    clnt_destroy(client);
}

static void timeout_of_the_handle_wins(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct timeval soon = {.tv_sec = leg.slow, .tv_usec = 100000};
    REQUIRE(clnt_control(client, CLSET_TIMEOUT, (char *)&soon));
    double start = now();
    REQUIRE_STATUS(suite_no_reply_2(NULL, NULL, client), RPC_TIMEDOUT);
    REQUIRE(now() - start < 10 * patience());
    struct timeval later = patient;
    REQUIRE(clnt_control(client, CLSET_TIMEOUT, (char *)&later));
    require_echo(client, 20000, 1);
    clnt_destroy(client);
}

/* The reply to a call that was given up must not be taken for that of the next call. */
static void late_reply_is_skipped(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    struct timeval soon = {.tv_usec = 50000};
    for (u_int i = 0; i < 5; i++) {
        u_int argument = i, result = 77;
        REQUIRE_STATUS(clnt_call(client, SUITE_BLOCK, (xdrproc_t)xdr_u_int, (caddr_t)&argument, (xdrproc_t)xdr_u_int,
                                 (caddr_t)&result, soon),
                       RPC_TIMEDOUT);
        server_await_block(&server);
        server_release(&server);
        require_echo(client, 30000, i);
        REQUIRE(result == 77);
    }
    clnt_destroy(client);
}

/* More abandoned calls than any credit limit: the connection must not run out of credits. */
static void many_abandoned_calls_do_not_exhaust_the_connection(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct timeval soon = {.tv_usec = 1000};
    for (int i = 0; i < 100; i++)
        REQUIRE_STATUS(clnt_call(client, SUITE_NO_REPLY, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, soon),
                       RPC_TIMEDOUT);
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

/* A reply that comes after the timeout must not land in memory that the program has reused. */
static void late_reply_does_not_touch_the_callers_memory(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *first = client_of(&server), *blocker = client_of(&server);
    u_int one = 1, count = 1000000;
    /* Batched: sent, and nobody waits for the answer. The server blocks until released. */
    REQUIRE(clnt_call(blocker, SUITE_BLOCK, (xdrproc_t)xdr_u_int, (caddr_t)&one, (xdrproc_t)xdr_void, NULL, at_once) ==
            RPC_TIMEDOUT);
    server_await_block(&server);
    char *mine = malloc(count);
    memset(mine, 'm', count);
    suite_blob got = {.suite_blob_val = mine};
    struct timeval soon = {.tv_usec = 50000};
    REQUIRE_STATUS(clnt_call(first, SUITE_SOURCE, (xdrproc_t)xdr_u_int, (caddr_t)&count, (xdrproc_t)xdr_suite_blob,
                             (caddr_t)&got, soon),
                   RPC_TIMEDOUT);
    server_release(&server);
    require_echo(first, 100, 1);
    for (u_int i = 0; i < count; i++)
        REQUIRE(mine[i] == 'm');
    clnt_destroy(first);
    clnt_destroy(blocker);
}

static void zero_timeout_with_results_sends_and_times_out(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    u_int argument = 3, result = 0;
    REQUIRE_STATUS(clnt_call(client, SUITE_ONE_WAY, (xdrproc_t)xdr_u_int, (caddr_t)&argument, (xdrproc_t)xdr_void, NULL,
                             at_once),
                   RPC_TIMEDOUT);
    REQUIRE_STATUS(suite_counter_2(NULL, &result, client), RPC_SUCCESS);
    REQUIRE(result == 3);
    clnt_destroy(client);
}

static void one_way(CLIENT *client, u_int argument)
{
    REQUIRE_STATUS(clnt_call(client, SUITE_ONE_WAY, (xdrproc_t)xdr_u_int, (caddr_t)&argument, (xdrproc_t)NULL, NULL,
                             at_once),
                   RPC_SUCCESS);
}

static void batch_of_one_way_calls_then_a_call(long count)
{
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    for (int i = 0; i < rounds((int)count); i++)
        one_way(client, 1);
    u_int result = 0;
    REQUIRE_STATUS(suite_counter_2(NULL, &result, client), RPC_SUCCESS);
    REQUIRE(result == (u_int)rounds((int)count));
    clnt_destroy(client);
}

static void batch_of_long_one_way_calls(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    suite_blob blob = blob_of(NOT_INLINE, 1);
    for (int i = 0; i < rounds(50); i++)
        REQUIRE_STATUS(clnt_call(client, SUITE_SINK, (xdrproc_t)xdr_suite_blob, (caddr_t)&blob, (xdrproc_t)NULL, NULL,
                                 at_once),
                       RPC_SUCCESS);
    require_echo(client, NOT_INLINE, 2);
    clnt_destroy(client);
}

/* ---- Sharing ----------------------------------------------------------------------------------------------------- */

static void several_clients_on_one_descriptor(long unused)
{
    (void)unused;
    CLIENT *first = shared_client();
    int fd;
    REQUIRE(clnt_control(first, CLGET_FD, (char *)&fd));
    struct sockaddr_in address = address_of(server_shared());
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    CLIENT *second = clnt_tli_create(fd, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V4, 0, 0);
    CLIENT *third = clnt_tli_create(fd, the_netconfig(), &netbuf, SUITE_PROG, SUITE_V2, 0, 0);
    REQUIRE(second != NULL && third != NULL);
    for (int i = 0; i < 20; i++) {
        require_echo(first, (size_t)(1000 * i), (unsigned)i);
        int result;
        REQUIRE_STATUS(suite_twice_4(&i, &result, second), RPC_SUCCESS);
        REQUIRE(result == 2 * i);
        require_echo(third, (size_t)(NOT_INLINE / (i + 1)), (unsigned)i);
    }
    clnt_destroy(second);
    require_echo(first, NOT_INLINE, 1);
    clnt_destroy(third);
    require_echo(first, NOT_INLINE, 2);
    clnt_destroy(first);
}

struct worker {
    CLIENT *client;
    unsigned number;
    pthread_t thread;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    CLIENT *client = worker->client ? worker->client : shared_client();
    for (unsigned i = 0; i < (unsigned)rounds(150); i++) {
        /* Every third message is too long to go inline. */
        unsigned length = i % 3 == 0 ? 20000 + worker->number * 1000 + i : 10 * i + worker->number;
        require_echo(client, length, worker->number * 1000 + i);
    }
    if (worker->client == NULL)
        clnt_destroy(client);
    return NULL;
}

static void eight_threads(long share)
{
    struct worker workers[8];
    CLIENT *client = share ? shared_client() : NULL;
    for (unsigned i = 0; i < 8; i++) {
        workers[i] = (struct worker){.client = client, .number = i};
        REQUIRE(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_join(workers[i].thread, NULL) == 0);
    if (client != NULL)
        clnt_destroy(client);
}

static void *block_one(void *client)
{
    u_int argument = 5, result = 0;
    REQUIRE_STATUS(suite_block_2(&argument, &result, client), RPC_SUCCESS);
    REQUIRE(result == 5);
    return NULL;
}

/* Two threads, one CLIENT: the second call is on its way while the first still waits. */
static void calls_of_two_threads_overlap(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        REQUIRE(pthread_create(&threads[i], NULL, block_one, client) == 0);
    for (int i = 0; i < 2; i++) {
        server_await_block(&server);
        server_release(&server);
    }
    for (int i = 0; i < 2; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    clnt_destroy(client);
}

/* A thread that is cancelled while it waits for its reply ends when the call has ended, and leaves the CLIENT usable. */
static void cancelled_thread_leaves_the_handle_usable(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, block_one, client) == 0);
    server_await_block(&server);
    REQUIRE(pthread_cancel(thread) == 0);
    server_release(&server);
    REQUIRE(pthread_join(thread, NULL) == 0);
    require_echo(client, NOT_INLINE, 3);
    clnt_destroy(client);
}

/* A forked child that destroys its copy, or just exits, must not disturb the parent's connection. */
static void child_that_destroys_its_copy_leaves_the_parent_alone(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    require_echo(client, 100, 1);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0);
        if (pid == 0) {
            if (i == 0)
                clnt_destroy(client);
            exit(0);
        }
        int status;
        REQUIRE(waitpid(pid, &status, 0) == pid);
        REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        require_echo(client, NOT_INLINE, 2);
    }
    clnt_destroy(client);
}

/* A CLIENT keeps working in every process that has it: parent, child, parent, another child. */
static void client_is_used_by_parent_and_children(long together)
{
    CLIENT *client = shared_client();
    require_echo(client, 100, 1);
    for (int i = 0; i < 3; i++) {
        pid_t children[2];
        for (int n = 0; n < 2; n++) {
            children[n] = fork();
            REQUIRE(children[n] >= 0);
            if (children[n] == 0) {
                require_echo(client, 1000, 10 + n);
                require_echo(client, NOT_INLINE, 20 + n);
                exit(0);
            }
            int status;
            if (together)
                continue;
            REQUIRE(waitpid(children[n], &status, 0) == children[n] && status == 0);
            require_echo(client, NOT_INLINE, 2);
        }
        for (int n = 0; together && n < 2; n++) {
            int status;
            require_echo(client, NOT_INLINE, 3 + n);
            REQUIRE(waitpid(children[n], &status, 0) == children[n] && status == 0);
        }
        require_echo(client, 100, 5);
    }
    clnt_destroy(client);
}

/* ---- Errors ------------------------------------------------------------------------------------------------------ */

static void unknown_program_version_and_procedure(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct rpc_err error;
    REQUIRE_STATUS(clnt_call(client, 999, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, patient),
                   RPC_PROCUNAVAIL);
    rpcvers_t version = 7;
    clnt_control(client, CLSET_VERS, (char *)&version);
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_PROGVERSMISMATCH);
    clnt_geterr(client, &error);
    REQUIRE(error.re_status == RPC_PROGVERSMISMATCH && error.re_vers.low == 2 && error.re_vers.high == 4);
    REQUIRE(strstr(clnt_sperror(client, "x"), "low version = 2") != NULL);
    rpcprog_t program = SUITE_PROG + 9;
    clnt_control(client, CLSET_PROG, (char *)&program);
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_PROGUNAVAIL);
    program = SUITE_PROG;
    version = SUITE_V2;
    clnt_control(client, CLSET_PROG, (char *)&program);
    clnt_control(client, CLSET_VERS, (char *)&version);
    require_echo(client, NOT_INLINE, 1);
    clnt_geterr(client, &error);
    REQUIRE(error.re_status == RPC_SUCCESS);
    clnt_destroy(client);
}

static void errors_that_the_server_reports(long unused)
{
    (void)unused;
    static const struct {
        suite_error how;
        enum clnt_stat status;
    } errors[] = {
        {SUITE_DECODE, RPC_CANTDECODEARGS},    {SUITE_SYSTEMERR, RPC_SYSTEMERROR}, {SUITE_NOPROC, RPC_PROCUNAVAIL},
        {SUITE_NOPROG, RPC_PROGUNAVAIL},       {SUITE_PROGVERS, RPC_PROGVERSMISMATCH},
        {SUITE_AUTH, RPC_AUTHERROR},           {SUITE_WEAKAUTH, RPC_AUTHERROR},
    };
    CLIENT *client = shared_client();
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        suite_error how = errors[i].how;
        struct rpc_err error;
        REQUIRE_STATUS(suite_fail_2(&how, NULL, client), errors[i].status);
        clnt_geterr(client, &error);
        REQUIRE(error.re_status == errors[i].status);
        if (how == SUITE_PROGVERS)
            REQUIRE(error.re_vers.low == 3 && error.re_vers.high == 5);
        if (how == SUITE_AUTH)
            REQUIRE(error.re_why == AUTH_REJECTEDCRED);
        if (how == SUITE_WEAKAUTH)
            REQUIRE(error.re_why == AUTH_TOOWEAK);
        REQUIRE(strlen(clnt_sperror(client, "x")) > 8);
        require_echo(client, 5000, (unsigned)i);
    }
    clnt_destroy(client);
}

/* An xdrproc that refuses. */
static bool_t xdr_refuses(XDR *xdrs, void *ignored)
{
    (void)ignored;
    int n = 5;
    return xdr_int(xdrs, &n) && FALSE;
}

static void arguments_that_cannot_be_encoded(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    REQUIRE_STATUS(clnt_call(client, SUITE_ECHO, (xdrproc_t)xdr_refuses, NULL, (xdrproc_t)xdr_void, NULL, patient),
                   RPC_CANTENCODEARGS);
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

static void arguments_that_the_server_cannot_decode(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    /* A length word that promises more than there is. */
    u_int lie = 1000;
    suite_blob got = {0};
    REQUIRE_STATUS(clnt_call(client, SUITE_ECHO, (xdrproc_t)xdr_u_int, (caddr_t)&lie, (xdrproc_t)xdr_suite_blob,
                             (caddr_t)&got, patient),
                   RPC_CANTDECODEARGS);
    REQUIRE_STATUS(clnt_call(client, SUITE_ECHO, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_suite_blob, (caddr_t)&got,
                             patient),
                   RPC_CANTDECODEARGS);
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

static void results_that_cannot_be_decoded(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    static const u_int lengths[] = {10, NOT_INLINE};
    for (int i = 0; i < 2; i++) {
        u_int length = lengths[i];
        REQUIRE_STATUS(clnt_call(client, SUITE_SOURCE, (xdrproc_t)xdr_u_int, (caddr_t)&length, (xdrproc_t)xdr_refuses,
                                 NULL, patient),
                       RPC_CANTDECODERES);
        require_echo(client, NOT_INLINE, 1);
    }
    clnt_destroy(client);
}

static void results_that_the_program_does_not_want(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    static const u_int lengths[] = {10, NOT_INLINE};
    for (int i = 0; i < 2; i++) {
        u_int length = lengths[i];
        REQUIRE_STATUS(clnt_call(client, SUITE_SOURCE, (xdrproc_t)xdr_u_int, (caddr_t)&length, (xdrproc_t)xdr_void,
                                 NULL, patient),
                       RPC_SUCCESS);
        require_echo(client, NOT_INLINE, 1);
    }
    clnt_destroy(client);
}

static void results_that_the_server_cannot_encode(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    suite_blob got = {0};
    REQUIRE_STATUS(suite_bad_result_2(NULL, &got, client), RPC_SYSTEMERROR);
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

static void reply_beyond_the_limit_is_a_clear_error(long unused)
{
    (void)unused;
    setenv("RPCRDMA_MAX_REPLY", "65536", 1);
    CLIENT *client = shared_client();
    require_echo(client, 50000, 1);
    for (int i = 0; i < 3; i++) {
        u_int length = NOT_INLINE;
        suite_blob got = {0};
        double start = now();
        enum clnt_stat status = suite_source_2(&length, &got, client);
        REQUIRE(status != RPC_SUCCESS && status != RPC_TIMEDOUT);
        REQUIRE(now() - start < 10 * patience());
        REQUIRE(strlen(clnt_sperror(client, "x")) > 8);
        TRACE("%s\n", clnt_sperror(client, "reply too long"));
        /* The connection lives on. */
        require_echo(client, 50000, 2);
    }
    clnt_destroy(client);
}

/* ---- Signals ----------------------------------------------------------------------------------------------------- */

static volatile sig_atomic_t signals;
static struct server *to_release;

static void count_signal(int number)
{
    (void)number;
    signals++;
}

static void release_on_signal(int number)
{
    (void)number;
    signals++;
    if (write(to_release->control, "r", 1) != 1)
        _exit(1);
}

static void signals_do_not_disturb_calls(long restart)
{
    CLIENT *client = shared_client();
    struct sigaction action = {.sa_handler = count_signal, .sa_flags = restart ? SA_RESTART : 0};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {.it_interval = {.tv_usec = 1000}, .it_value = {.tv_usec = 1000}};
    setitimer(ITIMER_REAL, &often, NULL);
    for (unsigned i = 0; i < (unsigned)rounds(300) || signals < 20; i++)
        require_echo(client, i % 2 ? 65536 : 100, i);
    often = (struct itimerval){0};
    setitimer(ITIMER_REAL, &often, NULL);
    clnt_destroy(client);
}

struct interrupter {
    struct server *server;
    pthread_t target;
};

static void *interrupt_when_blocked(void *argument)
{
    struct interrupter *interrupter = argument;
    server_await_block(interrupter->server);
    pthread_kill(interrupter->target, SIGALRM);
    return NULL;
}

/* The handler itself lets the server answer. If signals were blocked for the whole call, the call would never end. */
static void handler_runs_while_a_call_waits(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    struct sigaction action = {.sa_handler = release_on_signal};
    to_release = &server;
    sigaction(SIGALRM, &action, NULL);
    struct interrupter interrupter = {&server, pthread_self()};
    pthread_t helper;
    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm_only, NULL);
    REQUIRE(pthread_create(&helper, NULL, interrupt_when_blocked, &interrupter) == 0);
    pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
    u_int argument = 6, result = 0;
    REQUIRE_STATUS(clnt_call(client, SUITE_BLOCK, (xdrproc_t)xdr_u_int, (caddr_t)&argument, (xdrproc_t)xdr_u_int,
                             (caddr_t)&result, ((struct timeval){.tv_sec = 10})),
                   RPC_SUCCESS);
    REQUIRE(result == 6 && signals == 1);
    pthread_join(helper, NULL);
    clnt_destroy(client);
}

static CLIENT *called_by_handler;
static enum clnt_stat status_in_handler;

static void call_on_signal(int number)
{
    int kept = errno;
    release_on_signal(number);
    status_in_handler = clnt_call(called_by_handler, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL,
                                  ((struct timeval){.tv_sec = 5}));
    errno = kept;
}

/* Only the handler itself can receive its reply: the call that it interrupts waits for its end. */
static void handler_may_call_on_the_client_that_it_interrupts(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    struct sigaction action = {.sa_handler = call_on_signal};
    to_release = &server;
    called_by_handler = client;
    sigaction(SIGALRM, &action, NULL);
    struct interrupter interrupter = {&server, pthread_self()};
    pthread_t helper;
    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_SUCCESS);
    pthread_sigmask(SIG_BLOCK, &alarm_only, NULL);
    REQUIRE(pthread_create(&helper, NULL, interrupt_when_blocked, &interrupter) == 0);
    pthread_sigmask(SIG_UNBLOCK, &alarm_only, NULL);
    u_int argument = 6, result = 0;
    REQUIRE_STATUS(clnt_call(client, SUITE_BLOCK, (xdrproc_t)xdr_u_int, (caddr_t)&argument, (xdrproc_t)xdr_u_int,
                             (caddr_t)&result, ((struct timeval){.tv_sec = 10})),
                   RPC_SUCCESS);
    REQUIRE(result == 6 && signals == 1);
    REQUIRE_STATUS(status_in_handler, RPC_SUCCESS);
    pthread_join(helper, NULL);
    clnt_destroy(client);
}

static void blocked_signals_stay_blocked(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    sigset_t blocked, after;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    sigaddset(&blocked, SIGTERM);
    sigprocmask(SIG_SETMASK, &blocked, NULL);
    raise(SIGUSR1);
    struct timeval soon = {.tv_usec = 20000};
    require_echo(client, NOT_INLINE, 1);
    REQUIRE_STATUS(clnt_call(client, SUITE_NO_REPLY, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, soon),
                   RPC_TIMEDOUT);
    sigprocmask(SIG_SETMASK, NULL, &after);
    for (int number = 1; number < 32; number++)
        REQUIRE(sigismember(&after, number) == sigismember(&blocked, number));
    clnt_destroy(client);
}

/* ---- Credentials ------------------------------------------------------------------------------------------------- */

static void auth_none_and_auth_sys(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    suite_identity who = {0};
    REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
    REQUIRE(who.flavor == AUTH_NONE);
    gid_t gids[] = {11, 12, 13};
    char machine[] = "machine";
    AUTH *none = client->cl_auth;
    client->cl_auth = authunix_create(machine, 1234, 5678, 3, gids);
    for (int i = 0; i < 3; i++) {
        memset(&who, 0, sizeof who);
        REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
        REQUIRE(who.flavor == AUTH_SYS && who.uid == 1234 && who.gid == 5678);
        REQUIRE(who.gids.gids_len == 3 && who.gids.gids_val[2] == 13);
        require_echo(client, NOT_INLINE, (unsigned)i);
    }
    auth_destroy(client->cl_auth);
    client->cl_auth = none;
    memset(&who, 0, sizeof who);
    REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
    REQUIRE(who.flavor == AUTH_NONE);
    client->cl_auth = authunix_create_default();
    memset(&who, 0, sizeof who);
    REQUIRE_STATUS(suite_who_2(NULL, &who, client), RPC_SUCCESS);
    REQUIRE(who.flavor == AUTH_SYS && who.uid == geteuid());
    auth_destroy(client->cl_auth);
    clnt_destroy(client);
}

/* An AUTH that sends whatever it is told to. */
static char *credential;
static size_t credential_length;
static void odd_nextverf(AUTH *auth) { (void)auth; }
static int odd_marshal(AUTH *auth, XDR *xdrs)
{
    (void)auth;
    return XDR_PUTBYTES(xdrs, credential, (u_int)credential_length);
}
static int odd_validate(AUTH *auth, struct opaque_auth *verifier)
{
    (void)auth, (void)verifier;
    return TRUE;
}
static int odd_refresh(AUTH *auth, void *message)
{
    (void)auth, (void)message;
    return FALSE;
}
static void odd_destroy(AUTH *auth) { (void)auth; }
static int odd_wrap(AUTH *auth, XDR *xdrs, xdrproc_t proc, caddr_t where)
{
    (void)auth;
    return proc(xdrs, where);
}

static void bad_credentials(long unused)
{
    (void)unused;
    CLIENT *client = shared_client();
    struct auth_ops ops = {odd_nextverf, odd_marshal, odd_validate, odd_refresh, odd_destroy, odd_wrap, odd_wrap};
    AUTH odd = {.ah_ops = &ops}, *none = client->cl_auth;
    struct rpc_err error;
    client->cl_auth = &odd;
    /* Flavor 77, empty; no verifier. */
    u_int unknown[] = {htonl(77), 0, 0, 0};
    credential = (char *)unknown;
    credential_length = sizeof unknown;
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_AUTHERROR);
    clnt_geterr(client, &error);
    REQUIRE(error.re_why == AUTH_REJECTEDCRED);
    /* AUTH_SYS whose machine name is longer than the credential. */
    u_int broken[] = {htonl(AUTH_SYS), htonl(8), htonl(1), htonl(200), 0, 0};
    credential = (char *)broken;
    credential_length = sizeof broken;
    REQUIRE_STATUS(suite_null_2(NULL, NULL, client), RPC_AUTHERROR);
    clnt_geterr(client, &error);
    REQUIRE(error.re_why == AUTH_BADCRED);
    client->cl_auth = none;
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

/* A credential longer than the 400 bytes of RFC 5531: no answer is required, but the server must live. */
static void credential_beyond_the_limit(long unused)
{
    (void)unused;
    struct server server = server_start("-c", "tli", NULL);
    CLIENT *client = client_of(&server);
    struct auth_ops ops = {odd_nextverf, odd_marshal, odd_validate, odd_refresh, odd_destroy, odd_wrap, odd_wrap};
    AUTH odd = {.ah_ops = &ops};
    AUTH *none = client->cl_auth;
    static u_int large[300];
    large[0] = htonl(AUTH_SYS);
    large[1] = htonl(1000);
    client->cl_auth = &odd;
    credential = (char *)large;
    credential_length = sizeof large;
    struct timeval soon = {.tv_usec = 300000};
    enum clnt_stat status =
        clnt_call(client, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, soon);
    REQUIRE(status != RPC_SUCCESS);
    client->cl_auth = none;
    clnt_destroy(client);
    client = client_of(&server);
    require_echo(client, NOT_INLINE, 1);
    clnt_destroy(client);
}

#define SIZED(function, n) {.name = #function "_" #n, .run = function, .argument = n}
#define SIZES(function)                                                                                               \
    SIZED(function, 0), SIZED(function, 1), SIZED(function, 3), SIZED(function, 4095), SIZED(function, 4096),         \
        SIZED(function, 4097), SIZED(function, 65536), SIZED(function, 1048576), SIZED(function, 16777216)

static const char skips_a_reply[] = "after a timeout stock skips the next reply, whichever it is";

const struct test call_tests[] = {
    SIZES(payload_to_the_server),
    SIZES(payload_from_the_server),
    SIZES(payload_both_ways),
    TEST(every_length_around_the_inline_threshold),
    TEST(result_into_the_callers_own_buffer),
    TEST(reply_of_unforeseen_length),
    TEST(fixed_arrays),
    TEST(arrays_of_numbers),
    TEST(strings),
    TEST(linked_lists),
    TEST(unions),
    TEST(arguments_from_temporaries, .needs = UNBOUND),
    TEST(controls_of_address_and_descriptor),
    TEST(controls_of_timeouts),
    TEST(controls_of_program_and_version),
    TEST(controls_of_xid),
    TEST(controls_that_do_not_apply_are_refused),
    TEST(timeout_leaves_the_handle_usable, .not_stock = skips_a_reply),
    TEST(timeout_of_the_handle_wins, .not_stock = skips_a_reply),
    TEST(late_reply_is_skipped, .needs = ORDER),
    TEST(late_reply_does_not_touch_the_callers_memory, .needs = ORDER),
    TEST(many_abandoned_calls_do_not_exhaust_the_connection, .not_stock = skips_a_reply),
    TEST(zero_timeout_with_results_sends_and_times_out, .needs = ORDER),
    {.name = "batch_of_three_one_way_calls", .run = batch_of_one_way_calls_then_a_call, .argument = 3, .needs = ORDER},
    {.name = "batch_of_10000_one_way_calls", .run = batch_of_one_way_calls_then_a_call, .argument = 10000, .needs = ORDER},
    TEST(batch_of_long_one_way_calls),
    TEST(several_clients_on_one_descriptor),
    {.name = "eight_threads_on_one_client", .run = eight_threads, .argument = 1},
    {.name = "eight_threads_on_their_own_clients", .run = eight_threads, .argument = 0},
    TEST(calls_of_two_threads_overlap),
    TEST(cancelled_thread_leaves_the_handle_usable, .not_stock = "stock leaves its lock taken for ever"),
    TEST(child_that_destroys_its_copy_leaves_the_parent_alone),
    {.name = "client_is_used_by_parent_and_children", .run = client_is_used_by_parent_and_children, .needs = SOCKET},
    {.name = "client_is_used_by_parent_and_children_together", .run = client_is_used_by_parent_and_children, .argument = 1, .needs = SOCKET,
     .not_stock = "stock has one connection, and mixes up the replies of all"},
    TEST(unknown_program_version_and_procedure),
    TEST(errors_that_the_server_reports),
    TEST(arguments_that_cannot_be_encoded),
    TEST(arguments_that_the_server_cannot_decode),
    TEST(results_that_cannot_be_decoded),
    TEST(results_that_the_program_does_not_want),
    TEST(results_that_the_server_cannot_encode, .not_stock = "stock sends the half-encoded reply all the same"),
    TEST(reply_beyond_the_limit_is_a_clear_error, .needs = RDMA_ONLY | UNBOUND),
    {.name = "signals_do_not_disturb_calls", .run = signals_do_not_disturb_calls},
    {.name = "restarting_signals_do_not_disturb_calls", .run = signals_do_not_disturb_calls, .argument = 1},
    TEST(handler_runs_while_a_call_waits, .not_stock = "stock blocks all signals during a call"),
    TEST(handler_may_call_on_the_client_that_it_interrupts, .not_stock = "stock blocks all signals during a call"),
    TEST(blocked_signals_stay_blocked),
    TEST(auth_none_and_auth_sys),
    TEST(bad_credentials),
    TEST(credential_beyond_the_limit),
    END_OF_TESTS,
};
