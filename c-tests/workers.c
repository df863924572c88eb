/* rpcrdma_svc_run(): several threads serve. Linked with the library.
 *
 *   workers            every test
 *   workers TEST...    these
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <err.h>
#include <netconfig.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpc/rpc_com.h>
#include <rpcrdma.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROG = 0x20004C57, BACK = 0x40004C57, LONGEST = 300000, REFUSED = 1000 };
/* Procedures. */
enum { NOTHING, ECHO, MEET, DEFER, RELEASE, EXIT, DESTROY, FORK, NEVER, CALL_BACK, WHO, DROP, COUNT, HOLD, RELEASE_LAST, COUNT_DEFERRED, DEEP, GO_BESIDE, TELL };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0}, soon = {0, 300000};

struct data {
    u_int length;
    char *bytes;
};
static bool_t xdr_data(XDR *xdrs, struct data *data)
{
    return xdr_bytes(xdrs, &data->bytes, &data->length, LONGEST);
}

/* ---- The server -------------------------------------------------------------------------------------------------- */

static unsigned threads;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static unsigned inside;
static struct {
    SVCXPRT *xprt;
    unsigned number;
} deferred[32];
static unsigned put_off;
static int gate[2]; /* between the test and a routine of the server */

/* Waits until `count` routines are inside at the same time. */
static bool meet(unsigned count)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += patient.tv_sec;
    int failed = 0;
    pthread_mutex_lock(&lock);
    inside++;
    pthread_cond_broadcast(&changed);
    while (inside % count != 0 && failed == 0) {
        unsigned before = inside;
        failed = pthread_cond_timedwait(&changed, &lock, &until);
        if (inside / count != before / count)
            break;
    }
    pthread_mutex_unlock(&lock);
    return failed == 0;
}

/* Uses that many stack frames of 64 KiB. */
static unsigned deep(unsigned frames)
{
    volatile char frame[1 << 16];
    for (size_t i = 0; i < sizeof frame; i += 4096)
        frame[i] = (char)frames;
    return frames == 0 ? 0 : deep(frames - 1) + (unsigned)(frame[4096] == (char)frames);
}

/* What the library's loop is doing, as far as libtirpc's lock tells: svc_getreq_common(3) has found a transport when it releases
 * this lock, and has not called the transport yet. */
static _Thread_local bool in_routine;
static atomic_bool lingers;
static atomic_int lingering;
int pthread_rwlock_unlock(pthread_rwlock_t *lock)
{
    static int (*real)(pthread_rwlock_t *);
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_rwlock_unlock");
    int done = real(lock);
    if (lingers && !in_routine) {
        lingering++;
        usleep(50000);
        lingering--;
    }
    return done;
}

static SVCXPRT *listener(const char *netid);
static void serves(struct svc_req *request, SVCXPRT *xprt);
static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    in_routine = true;
    serves(request, xprt);
    in_routine = false;
}

static void serves(struct svc_req *request, SVCXPRT *xprt)
{
    unsigned number = 0, result = 0;
    struct data data = {0, NULL};
    switch (request->rq_proc) {
    case ECHO:
        if (!svc_getargs(xprt, (xdrproc_t)xdr_data, (caddr_t)&data)) {
            svcerr_decode(xprt);
            return;
        }
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_data, (caddr_t)&data));
        REQUIRE(svc_freeargs(xprt, (xdrproc_t)xdr_data, (caddr_t)&data));
        return;
    case WHO: {
        /* The port of the caller, by each way to ask. */
        struct sockaddr_in peer, *told = (struct sockaddr_in *)svc_getrpccaller(xprt)->buf;
        socklen_t length = sizeof peer;
        REQUIRE(getpeername(xprt->xp_fd, (struct sockaddr *)&peer, &length) == 0 && peer.sin_port == told->sin_port);
        REQUIRE(((struct sockaddr_in *)&xprt->xp_raddr)->sin_port == peer.sin_port);
        result = ntohs(peer.sin_port);
        break;
    }
    case MEET:
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number) && meet(number));
        break;
    case DEFER:
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
        pthread_mutex_lock(&lock);
        deferred[put_off].xprt = xprt;
        deferred[put_off++].number = number;
        pthread_mutex_unlock(&lock);
        return;
    case RELEASE:
        pthread_mutex_lock(&lock);
        result = put_off;
        while (put_off > 0) {
            put_off--;
            if (!svc_sendreply(deferred[put_off].xprt, (xdrproc_t)xdr_u_int, (caddr_t)&deferred[put_off].number))
                result += REFUSED;
        }
        pthread_mutex_unlock(&lock);
        break;
    case RELEASE_LAST:
        pthread_mutex_lock(&lock);
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
        if (put_off > number) {
            put_off--, result = 1;
            REQUIRE(svc_sendreply(deferred[put_off].xprt, (xdrproc_t)xdr_u_int, (caddr_t)&deferred[put_off].number));
        }
        pthread_mutex_unlock(&lock);
        break;
    case COUNT_DEFERRED:
        pthread_mutex_lock(&lock);
        result = put_off;
        pthread_mutex_unlock(&lock);
        break;
    case DEEP:
        REQUIRE(meet(3));
        result = deep(96);
        break;
    case DROP:
        return;
    case COUNT:
        pthread_mutex_lock(&lock);
        result = inside;
        pthread_mutex_unlock(&lock);
        break;
    case HOLD: {
        char letter = 'H';
        REQUIRE(write(gate[1], &letter, 1) == 1 && read(gate[1], &letter, 1) == 1);
        break;
    }
    case TELL: {
        char letter;
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
        letter = (char)number;
        REQUIRE(write(gate[1], &letter, 1) == 1);
        return;
    }
    case EXIT:
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
        svc_exit();
        if (number > 0)
            listener("tcp");
        break;
    case DESTROY:
        svc_destroy(xprt);
        return;
    case GO_BESIDE:
        /* Destroys the connection while the loop is about to look at it for its next request. */
        lingers = true;
        REQUIRE(write(gate[1], &number, 1) == 1);
        for (int i = 0; i < 200 && lingering == 0; i++)
            usleep(1000);
        svc_destroy(xprt);
        lingers = false;
        return;
    case FORK: {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            result = 7;
            REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&result));
            _exit(0);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && status == 0);
        return;
    }
    case NEVER:
        for (;;)
            pause();
    case CALL_BACK: {
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
        CLIENT *back = rpcrdma_clnt_reverse(xprt, BACK, 1);
        REQUIRE(back != NULL);
        if (clnt_call(back, ECHO, (xdrproc_t)xdr_u_int, (char *)&number, (xdrproc_t)xdr_u_int, (char *)&result, patient) !=
            RPC_SUCCESS)
            errx(1, "%s", clnt_sperror(back, "back"));
        clnt_destroy(back);
        break;
    }
    }
    /* Another routine may have destroyed the transport meanwhile, or its client may have gone. */
    svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&result);
}

static SVCXPRT *listener(const char *netid)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct t_bind bound = {.addr = {sizeof any, sizeof any, &any}, .qlen = 256};
    SVCXPRT *made = svc_tli_create(RPC_ANYFD, getnetconfigent(netid), &bound, 0, 0);
    REQUIRE(made != NULL && svc_reg(made, PROG, 1, serve, NULL));
    return made;
}
static unsigned port_of(SVCXPRT *made)
{
    return ntohs(((struct sockaddr_in *)made->xp_ltaddr.buf)->sin_port);
}
static void svc_exits(int signal)
{
    (void)signal;
    svc_exit();
}

/* ---- The clients ------------------------------------------------------------------------------------------------- */

static unsigned ports[2]; /* rdma, tcp */
static pid_t server;
/* How many descriptors the server may have; it then closes idle connections to make room for others. 0: no limit of its own. */
static rlim_t files;

static void starts(unsigned count)
{
    int ends[2];
    threads = count;
    REQUIRE(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, gate) == 0);
    server = fork();
    REQUIRE(server >= 0);
    if (server == 0) {
        struct rlimit limit;
        int longest = LONGEST + 400;
        if (files > 0) {
            /* The hard limit stays: valgrind lets nobody change it. */
            REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
            limit.rlim_cur = files;
            REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0 && rpc_control(RPC_SVC_CONNMAXREC_SET, &longest));
        }
        REQUIRE(signal(SIGUSR1, svc_exits) != SIG_ERR);
        ports[0] = port_of(listener("rdma")), ports[1] = port_of(listener("tcp"));
        REQUIRE(write(ends[1], ports, sizeof ports) == sizeof ports);
        REQUIRE(rpcrdma_svc_run(count));
        _exit(0);
    }
    REQUIRE(close(ends[1]) == 0 && read(ends[0], ports, sizeof ports) == sizeof ports && close(ends[0]) == 0);
}
static void has_ended(void)
{
    int status;
    REQUIRE(waitpid(server, &status, 0) == server && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static CLIENT *connected_over(const char *netid)
{
    struct sockaddr_in to = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)ports[strcmp(netid, "tcp") == 0]),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf address = {sizeof to, sizeof to, &to};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, getnetconfigent(netid), &address, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    return client;
}

static enum clnt_stat ask_within(CLIENT *client, rpcproc_t procedure, unsigned number, unsigned *result,
                                 struct timeval time)
{
    unsigned unused;
    return clnt_call(client, procedure, (xdrproc_t)xdr_u_int, (char *)&number, (xdrproc_t)xdr_u_int,
                     (char *)(result != NULL ? result : &unused), time);
}
static unsigned ask(CLIENT *client, rpcproc_t procedure, unsigned number)
{
    unsigned result;
    if (ask_within(client, procedure, number, &result, patient) != RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "procedure"));
    return result;
}

/* A client that has been granted the server's credits. */
static CLIENT *connected(void)
{
    CLIENT *client = connected_over("rdma");
    ask(client, NOTHING, 0);
    return client;
}

struct asking {
    pthread_t thread;
    CLIENT *client;
    rpcproc_t procedure;
    unsigned number, result;
    enum clnt_stat outcome;
};
static void *asks(void *argument)
{
    struct asking *asking = argument;
    asking->outcome =
        ask_within(asking->client, asking->procedure, asking->number, &asking->result, patient);
    return NULL;
}
static void begin(struct asking *asking, CLIENT *client, rpcproc_t procedure, unsigned number)
{
    *asking = (struct asking){.client = client, .procedure = procedure, .number = number};
    REQUIRE(pthread_create(&asking->thread, NULL, asks, asking) == 0);
}
static void end(struct asking *asking)
{
    REQUIRE(pthread_join(asking->thread, NULL) == 0);
}

static void requests_of_one_connection_are_served_beside_each_other(void)
{
    struct asking all[16];
    starts(16);
    CLIENT *client = connected();
    for (int i = 0; i < 16; i++)
        begin(&all[i], client, MEET, 16);
    for (int i = 0; i < 16; i++) {
        end(&all[i]);
        REQUIRE(all[i].outcome == RPC_SUCCESS);
    }
    ask(client, EXIT, 0);
    has_ended();
}

static void those_of_several_connections_too(void)
{
    struct asking all[4];
    starts(4);
    for (int i = 0; i < 4; i++)
        begin(&all[i], connected_over(i % 2 ? "rdma" : "tcp"), MEET, 4);
    for (int i = 0; i < 4; i++) {
        end(&all[i]);
        REQUIRE(all[i].outcome == RPC_SUCCESS);
    }
    ask(connected(), EXIT, 0);
    has_ended();
}

static CLIENT *both[3];
static atomic_int failures;
/* Random lengths; what comes back is what was sent. */
static void *echoes(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    char *sent = malloc(LONGEST), *got = malloc(LONGEST);
    REQUIRE(sent != NULL && got != NULL);
    for (int i = 0; i < 150; i++) {
        u_int length = (u_int)rand_r(&seed) % (i % 8 == 0 ? LONGEST : 2000);
        for (u_int k = 0; k < length; k++)
            sent[k] = (char)rand_r(&seed);
        struct data to = {length, sent}, from = {0, got};
        CLIENT *client = both[rand_r(&seed) % 3];
        if (clnt_call(client, ECHO, (xdrproc_t)xdr_data, (char *)&to, (xdrproc_t)xdr_data, (char *)&from, patient) !=
                RPC_SUCCESS ||
            from.length != length || memcmp(sent, got, length) != 0)
            failures++;
    }
    free(sent), free(got);
    return NULL;
}
static void each_gets_its_own_reply(void)
{
    pthread_t all[8];
    starts(4);
    both[0] = connected(), both[1] = connected(), both[2] = connected_over("tcp");
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_create(&all[i], NULL, echoes, (void *)(uintptr_t)(i + 1)) == 0);
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_join(all[i], NULL) == 0);
    REQUIRE(failures == 0);
    ask(both[0], EXIT, 0);
    has_ended();
}

static void the_caller_is_told(void)
{
    starts(4);
    for (int i = 0; i < 3; i++) {
        struct sockaddr_in own;
        socklen_t length = sizeof own;
        int fd;
        CLIENT *client = connected();
        REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
        REQUIRE(getsockname(fd, (struct sockaddr *)&own, &length) == 0);
        REQUIRE(ask(client, WHO, 0) == ntohs(own.sin_port));
    }
    ask(connected(), EXIT, 0);
    has_ended();
}

static void routines_that_do_not_reply_may_reply_later(void)
{
    struct asking all[20];
    starts(3);
    CLIENT *one = connected(), *other = connected();
    for (int round = 0; round < 20; round++) {
        for (unsigned i = 0; i < 20; i++)
            begin(&all[i], i % 2 ? one : other, DEFER, 1000 + i);
        unsigned released = 0;
        while (released < 20)
            released += ask(other, RELEASE, 0);
        for (unsigned i = 0; i < 20; i++) {
            end(&all[i]);
            REQUIRE(all[i].outcome == RPC_SUCCESS && all[i].result == 1000 + i);
        }
    }
    ask(one, EXIT, 0);
    has_ended();
}

/* However many others were answered late meanwhile. */
static void the_latest_without_a_reply_may_be_answered(void)
{
    struct asking first, next;
    starts(3);
    CLIENT *client = connected(), *other = connected();
    begin(&first, client, DEFER, 7);
    while (ask(other, COUNT_DEFERRED, 0) < 1)
        sched_yield();
    for (unsigned i = 0; i < 80; i++) {
        begin(&next, client, DEFER, 1000 + i);
        while (ask(other, RELEASE_LAST, 1) == 0)
            sched_yield();
        end(&next);
        REQUIRE(next.outcome == RPC_SUCCESS && next.result == 1000 + i);
    }
    REQUIRE(ask(other, RELEASE, 0) == 1);
    end(&first);
    REQUIRE(first.outcome == RPC_SUCCESS && first.result == 7);
    ask(other, EXIT, 0);
    has_ended();
}

static void a_late_reply_to_who_has_gone_is_refused(void)
{
    starts(3);
    CLIENT *other = connected();
    for (int i = 0; i < 20; i++) {
        CLIENT *client = connected();
        REQUIRE(ask_within(client, DEFER, 0, NULL, (struct timeval){0, 50000}) == RPC_TIMEDOUT);
        clnt_destroy(client);
        /* The server learns of the end, and gives the connection's memory to others. */
        for (int k = 0; k < 4; k++) {
            CLIENT *next = connected();
            ask(next, NOTHING, 0);
            clnt_destroy(next);
        }
        REQUIRE(ask(other, RELEASE, 0) == 1 + REFUSED);
    }
    ask(other, EXIT, 0);
    has_ended();
}

static void routines_have_the_stack_of_other_threads(void)
{
    struct asking all[3];
    starts(3);
    CLIENT *client = connected();
    for (int i = 0; i < 3; i++)
        begin(&all[i], client, DEEP, 0);
    for (int i = 0; i < 3; i++) {
        end(&all[i]);
        REQUIRE(all[i].outcome == RPC_SUCCESS && all[i].result == 96);
    }
    ask(client, EXIT, 0);
    has_ended();
}

static void those_that_never_do_hold_up_nobody(void)
{
    starts(3);
    CLIENT *client = connected();
    struct timeval at_once = {0, 1000};
    for (int i = 0; i < 300; i++)
        ask_within(client, DROP, 0, NULL, at_once);
    ask(client, NOTHING, 0);
    ask(client, EXIT, 0);
    has_ended();
}

/* The loop registers a connection likewise when it accepts one. */
static void what_is_registered_meanwhile_does_not_keep_it_from_its_end(void)
{
    starts(4);
    ask(connected(), EXIT, 1);
    has_ended();
}

static void a_handler_ends_it(void)
{
    starts(4);
    CLIENT *client = connected();
    ask(client, NOTHING, 0);
    usleep(50000);
    REQUIRE(kill(server, SIGUSR1) == 0);
    has_ended();
}

static void a_routine_destroys_its_transport_beside_others(void)
{
    struct asking all[3];
    starts(4);
    CLIENT *client = connected(), *other = connected();
    for (int i = 0; i < 10; i++) {
        begin(&all[0], client, MEET, 4);
        begin(&all[1], client, MEET, 4);
        begin(&all[2], client, MEET, 4);
        while (ask(other, COUNT, 0) % 4 != 3)
            sched_yield();
        REQUIRE(ask_within(client, DESTROY, 0, NULL, soon) != RPC_SUCCESS);
        ask(other, MEET, 4);
        for (int k = 0; k < 3; k++)
            end(&all[k]);
        ask(other, NOTHING, 0);
        clnt_destroy(client);
        client = connected();
        ask(client, NOTHING, 0);
    }
    ask(other, EXIT, 0);
    has_ended();
}

static void the_loop_has_in_hand_what_a_routine_destroys(void)
{
    starts(4);
    CLIENT *other = connected();
    for (int i = 0; i < 5; i++) {
        struct asking goes;
        char letter;
        CLIENT *client = connected();
        struct timeval time = soon;
        REQUIRE(clnt_control(client, CLSET_TIMEOUT, (char *)&time));
        begin(&goes, client, GO_BESIDE, 0);
        REQUIRE(read(gate[0], &letter, 1) == 1);
        ask_within(client, NOTHING, 0, NULL, soon);
        end(&goes);
        clnt_destroy(client);
        ask(other, NOTHING, 0);
    }
    ask(other, EXIT, 0);
    has_ended();
}

static void a_child_of_a_routine_replies(void)
{
    starts(4);
    CLIENT *client = connected();
    for (int i = 0; i < 5; i++)
        REQUIRE(ask(client, FORK, 0) == 7);
    ask(client, NOTHING, 0);
    ask(client, EXIT, 0);
    has_ended();
}

static void one_that_never_returns_holds_up_nobody(void)
{
    starts(3);
    CLIENT *client = connected(), *other = connected_over("tcp");
    REQUIRE(ask_within(client, NEVER, 0, NULL, soon) == RPC_TIMEDOUT);
    REQUIRE(ask_within(connected_over("tcp"), NEVER, 0, NULL, soon) == RPC_TIMEDOUT);
    for (int i = 0; i < 100; i++) {
        ask(client, NOTHING, 0);
        ask(other, NOTHING, 0);
    }
    REQUIRE(kill(server, SIGKILL) == 0 && waitpid(server, NULL, 0) == server);
}

/* Not the client that poll(2) or epoll(7) reports first. */
static void whoever_was_served_the_longest_time_ago_is_next(void)
{
    struct timeval at_once = {0, 0};
    starts(2);
    CLIENT *both[2] = {connected(), connected()}, *holders[2] = {connected(), connected()};
    for (unsigned round = 0; round < 4; round++) {
        struct asking held[2];
        char letter;
        CLIENT *early = both[round % 2], *late = both[1 - round % 2];
        ask(early, NOTHING, 0);
        ask(late, NOTHING, 0);
        for (int i = 0; i < 2; i++) {
            begin(&held[i], holders[i], HOLD, 0);
            REQUIRE(read(gate[0], &letter, 1) == 1 && letter == 'H');
        }
        /* Nobody reads these yet. */
        unsigned names[2] = {'l', 'e'};
        CLIENT *callers[2] = {late, early};
        for (int i = 0; i < 2; i++)
            REQUIRE(clnt_call(callers[i], TELL, (xdrproc_t)xdr_u_int, (char *)&names[i], NULL, NULL, at_once) == RPC_SUCCESS);
        REQUIRE(write(gate[0], &letter, 1) == 1);
        REQUIRE(read(gate[0], &letter, 1) == 1 && letter == 'e');
        REQUIRE(read(gate[0], &letter, 1) == 1 && letter == 'l');
        REQUIRE(write(gate[0], &letter, 1) == 1);
        for (int i = 0; i < 2; i++) {
            end(&held[i]);
            REQUIRE(held[i].outcome == RPC_SUCCESS);
        }
    }
    ask(both[0], EXIT, 0);
    has_ended();
}

/* A free thread looks for calls of other clients before it takes the next of many, if no thread has looked for a while. */
static void many_calls_of_one_client_do_not_keep_another_one_waiting(void)
{
    enum { MANY = 16, THREADS = 2 };
    struct timeval at_once = {0, 0};
    for (int threads = 1; threads <= THREADS; threads++) {
        unsigned name = 'o';
        int held = 0;
        char letter;
        starts(threads);
        CLIENT *one = connected(), *other = connected();
        /* These wait for no reply. */
        for (int i = 0; i < MANY; i++)
            REQUIRE(clnt_call(one, HOLD, (xdrproc_t)xdr_void, NULL, NULL, NULL, at_once) == RPC_SUCCESS);
        for (; held < threads; held++)
            REQUIRE(read(gate[0], &letter, 1) == 1 && letter == 'H');
        REQUIRE(clnt_call(other, TELL, (xdrproc_t)xdr_u_int, (char *)&name, NULL, NULL, at_once) == RPC_SUCCESS);
        do {
            usleep(2000);
            REQUIRE(write(gate[0], &letter, 1) == 1 && read(gate[0], &letter, 1) == 1);
            held += letter == 'H';
        } while (letter == 'H');
        REQUIRE(held <= threads + 2);
        for (; held < MANY; held++)
            REQUIRE(read(gate[0], &letter, 1) == 1 && letter == 'H' && write(gate[0], &letter, 1) == 1);
        for (int i = 0; i < threads; i++)
            REQUIRE(write(gate[0], &letter, 1) == 1);
        ask(one, EXIT, 0);
        has_ended();
        clnt_destroy(one);
        clnt_destroy(other);
    }
}

/* A client gets their credits back with each reply that comes meanwhile. */
static void calls_without_a_reply_that_take_long_leave_room_for_others(void)
{
    enum { LONG_ONES = 60 };
    unsigned number = LONG_ONES + 1;
    starts(LONG_ONES + 2);
    CLIENT *client = connected();
    struct timeval at_once = {0, 0};
    for (int i = 0; i < LONG_ONES; i++) {
        REQUIRE(clnt_call(client, MEET, (xdrproc_t)xdr_u_int, (char *)&number, NULL, NULL, at_once) == RPC_SUCCESS);
        ask(client, NOTHING, 0);
    }
    ask(client, MEET, number);
    ask(client, EXIT, 0);
    has_ended();
}

/* Clients go away while threads are serving their requests. */
static void clients_that_go_meanwhile_hold_up_nobody(void)
{
    starts(4);
    CLIENT *one = connected();
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            struct asking all[8];
            CLIENT *client = connected();
            for (unsigned k = 0; k < 8; k++)
                begin(&all[k], client, k % 2 ? DROP : NOTHING, 0);
            usleep((useconds_t)(i * 100));
            _exit(0);
        }
        ask(one, NOTHING, 0);
        REQUIRE(waitpid(child, NULL, 0) == child);
    }
    ask(one, NOTHING, 0);
    ask(one, EXIT, 0);
    has_ended();
}

/* libtirpc then destroys the connection that was idle longest, but not one that a thread is serving just now, though nothing
 * has come there since. */
static void descriptors_run_out_beside_a_routine_of_tcp(void)
{
    struct asking slow;
    char letter;
    files = 128;
    starts(2);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)ports[1]),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    begin(&slow, connected_over("tcp"), HOLD, 2);
    REQUIRE(read(gate[0], &letter, 1) == 1);
    for (int i = 0; i < 150; i++)
        REQUIRE(connect(socket(AF_INET, SOCK_STREAM, 0), (struct sockaddr *)&to, sizeof to) == 0);
    /* All have been accepted by then, if accepting goes on meanwhile. */
    for (int i = 0; i < 2; i++)
        REQUIRE(ask_within(connected_over("tcp"), NOTHING, 0, NULL, soon) <= RPC_TIMEDOUT);
    REQUIRE(write(gate[0], &letter, 1) == 1);
    end(&slow);
    REQUIRE(slow.outcome == RPC_SUCCESS);
    ask(connected(), EXIT, 0);
    has_ended();
}

static void called_back(struct svc_req *request, SVCXPRT *xprt)
{
    unsigned number;
    (void)request;
    REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
    number *= 2;
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number));
}
static void routines_call_back_beside_each_other(void)
{
    struct asking all[8];
    starts(4);
    CLIENT *client = connected();
    REQUIRE(rpcrdma_clnt_serve(client, BACK, 1, called_back));
    for (int round = 0; round < 20; round++) {
        for (unsigned i = 0; i < 8; i++)
            begin(&all[i], client, CALL_BACK, i);
        for (unsigned i = 0; i < 8; i++) {
            end(&all[i]);
            if (all[i].outcome != RPC_SUCCESS || all[i].result != 2 * i)
                errx(1, "round %d: %u: %s: %u", round, i, clnt_sperrno(all[i].outcome), all[i].result);
        }
    }
    ask(client, EXIT, 0);
    has_ended();
}

static void it_says_why_it_does_not_begin(void)
{
    REQUIRE(!rpcrdma_svc_run(0) && strstr(clnt_spcreateerror("run"), "0 threads") != NULL);
    REQUIRE(!rpcrdma_svc_run(100000) && strstr(clnt_spcreateerror("run"), "100000 threads") != NULL);
    /* Nothing is registered. */
    REQUIRE(rpcrdma_svc_run(4));
    REQUIRE(rpcrdma_svc_run(4));
}

static const struct test {
    const char *name;
    void (*run)(void);
} tests[] = {
#define TEST(name) {#name, name}
    TEST(requests_of_one_connection_are_served_beside_each_other),
    TEST(those_of_several_connections_too),
    TEST(each_gets_its_own_reply),
    TEST(the_caller_is_told),
    TEST(routines_that_do_not_reply_may_reply_later),
    TEST(the_latest_without_a_reply_may_be_answered),
    TEST(a_late_reply_to_who_has_gone_is_refused),
    TEST(routines_have_the_stack_of_other_threads),
    TEST(those_that_never_do_hold_up_nobody),
    TEST(what_is_registered_meanwhile_does_not_keep_it_from_its_end),
    TEST(a_handler_ends_it),
    TEST(a_routine_destroys_its_transport_beside_others),
    TEST(the_loop_has_in_hand_what_a_routine_destroys),
    TEST(a_child_of_a_routine_replies),
    TEST(one_that_never_returns_holds_up_nobody),
    TEST(whoever_was_served_the_longest_time_ago_is_next),
    TEST(many_calls_of_one_client_do_not_keep_another_one_waiting),
    TEST(calls_without_a_reply_that_take_long_leave_room_for_others),
    TEST(clients_that_go_meanwhile_hold_up_nobody),
    TEST(descriptors_run_out_beside_a_routine_of_tcp),
    TEST(routines_call_back_beside_each_other),
    TEST(it_says_why_it_does_not_begin),
};

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *limit = getenv("LIMIT");
    int failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        bool wanted = argc == 1;
        for (int k = 1; k < argc; k++)
            wanted |= strcmp(argv[k], tests[i].name) == 0;
        if (!wanted)
            continue;
        int status;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            REQUIRE(signal(SIGPIPE, SIG_IGN) != SIG_ERR && setpgid(0, 0) == 0);
            alarm(limit == NULL ? 120 : (unsigned)atoi(limit));
            tests[i].run();
            _exit(0);
        }
        REQUIRE(waitpid(child, &status, 0) == child);
        kill(-child, SIGKILL);
        bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        failed += !good;
        printf("%s%s\n", good ? "ok    " : "FAIL  ", tests[i].name);
    }
    return failed > 0;
}
