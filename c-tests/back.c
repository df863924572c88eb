/* Calls back beside threads and loops: CLIENTs and services that begin and end while a service loop serves.
 *
 *   back            the tests, one after the other, each in a process of its own
 *   back NAME       one of them
 *   back svc_run|loop SECONDS [THREADS [SEED]]
 *                   THREADS threads (16) create CLIENTs, serve, call, are called back, end service and destroy, beside
 *                   svc_run() or a loop of this program's own
 *
 * Linked with the library. The server is a child. It calls back as often as a request says, either before it replies or,
 * from a thread, after it has replied: then nobody at the client waits for a reply, and the client's service loop serves. */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpcrdma.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PROG = 0x20004C50, BACK = 0x20004C51 };
/* Procedures of the server; each takes the version and the number of calls back. QUIT and HOLD do as LATER does, and make
 * the server's thread leave its loop, or not return to poll(2), until all calls back have been made. */
enum { NOW = 1, LATER, LEAVE, QUIT, HOLD };
enum { TRIPLE = 1, EXIT };      /* procedures of what is called back */

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0};

/* ---- The server -------------------------------------------------------------------------------------------------- */

struct job {
    CLIENT *back;
    u_int calls, procedure;
    sem_t replied;
};
static sem_t calls_over; /* of QUIT and HOLD */
static int holds;

/* Returns how many calls back succeeded. */
static u_int call_back(struct job *job)
{
    const struct timeval limit = {10, 0};
    u_int went_well = 0;
    for (u_int i = 1; i <= job->calls; i++) {
        u_int result = 0;
        enum clnt_stat status = clnt_call(job->back, job->procedure, (xdrproc_t)xdr_u_int, (char *)&i,
                                          (xdrproc_t)xdr_u_int, (char *)&result, limit);
        if (status == RPC_SUCCESS)
            REQUIRE(result == 3 * i);
        went_well += status == RPC_SUCCESS;
    }
    clnt_destroy(job->back);
    return went_well;
}

static void *call_later(void *argument)
{
    struct job *job = argument;
    while (sem_wait(&job->replied) != 0)
        ;
    call_back(job);
    free(job);
    sem_post(&calls_over);
    return NULL;
}

static bool_t xdr_pair(XDR *xdrs, u_int *pair) { return xdr_u_int(xdrs, pair) && xdr_u_int(xdrs, pair + 1); }

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    u_int pair[2];
    if (request->rq_proc == NULLPROC) {
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (!svc_getargs(xprt, (xdrproc_t)xdr_pair, (char *)pair)) {
        svcerr_decode(xprt);
        return;
    }
    struct job *job = calloc(1, sizeof *job);
    job->back = rpcrdma_clnt_reverse(xprt, BACK, pair[0]);
    job->calls = pair[1];
    job->procedure = request->rq_proc == LEAVE ? EXIT : TRIPLE;
    REQUIRE(job->back != NULL && sem_init(&job->replied, 0, 0) == 0);
    u_int well = 0;
    pthread_t thread;
    if (request->rq_proc == NOW) {
        well = call_back(job);
        svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&well);
        free(job);
        return;
    }
    REQUIRE(pthread_create(&thread, NULL, call_later, job) == 0 && pthread_detach(thread) == 0);
    svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&well);
    sem_post(&job->replied);
    if (request->rq_proc == QUIT)
        svc_exit();
    holds = request->rq_proc == HOLD;
}

/* One turn of a program's own loop. */
static void turn(int milliseconds)
{
    struct pollfd polled[64];
    int count = svc_max_pollfd;
    REQUIRE(count <= 64);
    memcpy(polled, svc_pollfd, (size_t)count * sizeof *polled);
    int ready = poll(polled, (nfds_t)count, milliseconds);
    if (ready > 0)
        svc_getreq_poll(polled, ready);
}

static struct sockaddr_in server_address = {.sin_family = AF_INET};

static void start_server(int own_turns)
{
    int told[2];
    REQUIRE(pipe(told) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(told[0]);
        SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
        REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
        struct sockaddr_in own;
        socklen_t length = sizeof own;
        REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&own, &length) == 0);
        REQUIRE(write(told[1], &own.sin_port, sizeof own.sin_port) == sizeof own.sin_port);
        if (own_turns)
            for (;;) {
                turn(-1);
                for (; holds; holds = 0)
                    while (sem_wait(&calls_over) != 0)
                        ;
            }
        svc_run();
        for (;;)
            pause();
    }
    close(told[1]);
    server_address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(read(told[0], &server_address.sin_port, sizeof server_address.sin_port) == sizeof server_address.sin_port);
    close(told[0]);
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

static CLIENT *on_descriptor(int fd)
{
    struct netconfig *netconfig = getnetconfigent("rdma");
    REQUIRE(netconfig != NULL);
    struct sockaddr_in to = server_address;
    struct netbuf address = {sizeof to, sizeof to, &to};
    CLIENT *client = clnt_tli_create(fd, netconfig, &address, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    freenetconfigent(netconfig);
    return client;
}

static int descriptor(CLIENT *client)
{
    int fd = -1;
    REQUIRE(clnt_control(client, CLGET_FD, (char *)&fd));
    return fd;
}

/* Has the server call back a version of the program `calls` times. */
static enum clnt_stat ask(CLIENT *client, u_int procedure, u_int version, u_int calls, u_int *went_well)
{
    u_int pair[] = {version, calls}, well = 0;
    enum clnt_stat status = clnt_call(client, procedure, (xdrproc_t)xdr_pair, (char *)pair, (xdrproc_t)xdr_u_int,
                                      (char *)&well, patient);
    if (went_well != NULL)
        *went_well = well;
    return status;
}

static void answer(struct svc_req *request, SVCXPRT *xprt)
{
    u_int number = 0;
    if (request->rq_proc == NULLPROC) {
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    }
    REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
    number *= 3;
    svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&number);
    if (request->rq_proc == EXIT)
        svc_exit();
}

static void *run_loop(void *unused)
{
    (void)unused;
    svc_run();
    return NULL;
}

static pthread_t loop;
static void start_loop(void) { REQUIRE(pthread_create(&loop, NULL, run_loop, NULL) == 0); }

/* A routine that says when it begins, and ends when it may. */
static sem_t begun, may_end;
static atomic_int answered;
static void held(struct svc_req *request, SVCXPRT *xprt)
{
    sem_post(&begun);
    while (sem_wait(&may_end) != 0)
        ;
    answer(request, xprt);
    answered++;
}

static atomic_int counted;
static void count(struct svc_req *request, SVCXPRT *xprt)
{
    answer(request, xprt);
    counted++;
}

static void await_count(int wanted)
{
    time_t end = time(NULL) + patient.tv_sec;
    while (counted < wanted && time(NULL) < end)
        usleep(1000);
    REQUIRE(counted >= wanted);
}

/* ---- The tests --------------------------------------------------------------------------------------------------- */

static CLIENT *first, *second;

/* While svc_run sleeps, it watches the CLIENT's descriptor, or the one that wakes it for the CLIENT. */
static void end_beside_svc_run(int destroys)
{
    first = on_descriptor(RPC_ANYFD), second = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, count) && rpcrdma_clnt_serve(second, BACK, 1, count));
    start_loop();
    /* The loop has slept, and was woken. */
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    await_count(1);
    if (destroys)
        clnt_destroy(first);
    else
        REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, NULL));
    for (int i = 2; i < 5; i++) {
        REQUIRE(ask(second, LATER, 1, 1, NULL) == RPC_SUCCESS);
        await_count(i);
    }
}
static void destroyed_beside_svc_run(void) { end_beside_svc_run(1); }
static void ended_beside_svc_run(void) { end_beside_svc_run(0); }

static atomic_int returned;
static void *destroy_first(void *unused)
{
    (void)unused;
    clnt_destroy(first);
    returned = 1;
    return NULL;
}
static void *end_first(void *unused)
{
    (void)unused;
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, NULL));
    returned = 1;
    return NULL;
}

/* An end of service waits for a routine that runs: the descriptor stays the connection's as long as the routine may answer. */
static void end_waits(void *(*end)(void *))
{
    first = on_descriptor(RPC_ANYFD);
    int fd = descriptor(first);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, held));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    REQUIRE(sem_wait(&begun) == 0);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, end, NULL) == 0);
    /* No test can see that it never returns; 200 ms are enough to see that it does. */
    usleep(200000);
    REQUIRE(!returned && fcntl(fd, F_GETFD) >= 0);
    sem_post(&may_end);
    REQUIRE(pthread_join(thread, NULL) == 0 && answered == 1);
    if (end == destroy_first)
        REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}
static void destroy_waits_for_a_routine(void) { end_waits(destroy_first); }
static void end_waits_for_a_routine(void) { end_waits(end_first); }

static SVCXPRT *put_off;
static void keep(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    put_off = xprt;
    sem_post(&begun);
}

static void answered_when_its_CLIENT_was_destroyed(void)
{
    u_int number = 3;
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, keep));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    while (sem_wait(&begun) != 0)
        ;
    clnt_destroy(first);
    REQUIRE(!svc_sendreply(put_off, (xdrproc_t)xdr_u_int, (char *)&number));
}

/* The very routine that answers on a CLIENT destroys it: the answer goes nowhere, and to no other file. Not while the call that
 * led to the routine is ending: the CLIENT would only end with that call, and no other file could have its descriptor until
 * then. */
static int pair[2];
static atomic_int sent = -1;
static sem_t asked;
static void destroy_inside(struct svc_req *request, SVCXPRT *xprt)
{
    u_int number = 0;
    (void)request;
    REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
    int fd = descriptor(first);
    while (sem_wait(&asked) != 0)
        ;
    clnt_destroy(first);
    REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    if (pair[0] != fd && pair[1] != fd)
        REQUIRE(dup2(pair[0], fd) == fd);
    sent = svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&number);
}
static void destroyed_inside_a_routine(void)
{
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(sem_init(&asked, 0, 0) == 0 && rpcrdma_clnt_serve(first, BACK, 1, destroy_inside));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    sem_post(&asked);
    time_t end = time(NULL) + patient.tv_sec;
    while (sent < 0 && time(NULL) < end)
        usleep(1000);
    REQUIRE(sent == FALSE);
    char byte;
    for (int i = 0; i < 2; i++)
        REQUIRE(recv(pair[i], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
    /* The loop goes on. */
    second = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(second, BACK, 1, count) && ask(second, LATER, 1, 1, NULL) == RPC_SUCCESS);
    await_count(1);
}

/* svc_run sleeps, with a listener, when the first CLIENT of the process begins to serve. */
static void begun_while_svc_run_sleeps(void)
{
    REQUIRE(svc_rdma_create(RPC_ANYFD, 0, 0) != NULL);
    start_loop();
    usleep(100000);
    for (int i = 1; i < 4; i++) {
        first = on_descriptor(RPC_ANYFD);
        REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, count) && ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
        await_count(i);
    }
}

/* These replace libc's: svc_run() calls one of them. */
static _Thread_local int wait_fails;
int epoll_wait(int set, struct epoll_event *events, int most, int milliseconds)
{
    if (wait_fails) {
        errno = EFAULT;
        return -1;
    }
    return epoll_pwait(set, events, most, milliseconds, NULL);
}
int poll(struct pollfd *fds, nfds_t count, int milliseconds)
{
    if (wait_fails) {
        errno = EFAULT;
        return -1;
    }
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    return ppoll(fds, count, milliseconds < 0 ? NULL : &time, NULL);
}

/* One of two loops ends because it cannot wait; the other one, which sleeps, goes on serving. */
static void one_of_two_loops_fails(void)
{
    REQUIRE(svc_rdma_create(RPC_ANYFD, 0, 0) != NULL);
    start_loop();
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, count) && ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    await_count(1);
    /* The loop is asleep again by then. */
    usleep(100000);
    wait_fails = 1;
    svc_run();
    wait_fails = 0;
    for (int i = 2; i < 5; i++) {
        REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
        await_count(i);
    }
}

/* A routine ends service on its connection and begins it on another one: each connection goes on by itself. */
static void swap(struct svc_req *request, SVCXPRT *xprt)
{
    if (counted == 0) {
        REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, NULL));
        REQUIRE(rpcrdma_clnt_serve(second, BACK, 1, swap));
    }
    count(request, xprt);
}
static double processor_time(void)
{
    struct rusage usage;
    REQUIRE(getrusage(RUSAGE_SELF, &usage) == 0);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}
static void swapped_in_a_routine(void)
{
    first = on_descriptor(RPC_ANYFD), second = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, swap));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    await_count(1);
    REQUIRE(ask(second, LATER, 1, 2, NULL) == RPC_SUCCESS);
    await_count(3);
    double before = processor_time();
    usleep(500000);
    REQUIRE(processor_time() - before < 0.2);
}

/* Another thread ends service and begins it anew while a routine runs: TRUE means that the program is served. */
static void *end_and_begin(void *unused)
{
    (void)unused;
    sem_post(&begun);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, NULL) && rpcrdma_clnt_serve(first, BACK, 1, count));
    returned = 1;
    return NULL;
}
static void ended_and_begun_while_a_routine_runs(void)
{
    pthread_t thread;
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, held));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    REQUIRE(sem_wait(&begun) == 0);
    REQUIRE(pthread_create(&thread, NULL, end_and_begin, NULL) == 0);
    REQUIRE(sem_wait(&begun) == 0);
    usleep(100000);
    sem_post(&may_end);
    REQUIRE(pthread_join(thread, NULL) == 0);
    REQUIRE(ask(first, LATER, 1, 2, NULL) == RPC_SUCCESS);
    await_count(2);
    REQUIRE(answered == 1);
}

/* Ends service and begins it anew inside a routine, which must not wait for itself; still only one routine runs at a time. */
static atomic_int at_once;
static void begin_anew(struct svc_req *request, SVCXPRT *xprt)
{
    REQUIRE(at_once++ == 0);
    if (counted == 0) {
        REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, NULL) && rpcrdma_clnt_serve(first, BACK, 1, begin_anew));
        usleep(100000);
    }
    at_once--;
    count(request, xprt);
}
static void ended_and_begun_inside_a_routine(void)
{
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, begin_anew));
    start_loop();
    for (int i = 0; i < 4; i++)
        REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    while (counted < 4)
        REQUIRE(rpcrdma_clnt_poll(first, (struct timeval){0, 1000}) >= 0);
}

/* Two routines that run at the same time, one in the service loop and one in rpcrdma_clnt_poll(), and each destroys the
 * other's CLIENT or ends the other's service: neither waits for the other, and the last one out closes what is left. */
static pthread_barrier_t both_run;
static int each_destroys;
static atomic_int over_with;
static void end_the_other(CLIENT *other, struct svc_req *request, SVCXPRT *xprt)
{
    int own = xprt->xp_fd;
    pthread_barrier_wait(&both_run);
    if (each_destroys)
        clnt_destroy(other);
    else
        REQUIRE(rpcrdma_clnt_serve(other, BACK, 1, NULL));
    /* Each has ended the other's, and both still run: the descriptor is still theirs. */
    pthread_barrier_wait(&both_run);
    REQUIRE(fcntl(own, F_GETFD) >= 0);
    answer(request, xprt);
    over_with++;
}
static void end_second(struct svc_req *request, SVCXPRT *xprt)
{
    sem_post(&begun);
    end_the_other(second, request, xprt);
}
static void end_first_too(struct svc_req *request, SVCXPRT *xprt) { end_the_other(first, request, xprt); }
static void *poll_second(void *unused)
{
    (void)unused;
    while (rpcrdma_clnt_poll(second, patient) == 0)
        ;
    return NULL;
}
static void end_each_other(int destroy)
{
    pthread_t thread;
    each_destroys = destroy;
    REQUIRE(pthread_barrier_init(&both_run, NULL, 2) == 0);
    first = on_descriptor(RPC_ANYFD), second = on_descriptor(RPC_ANYFD);
    int fds[] = {descriptor(first), descriptor(second)};
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, end_second) && rpcrdma_clnt_serve(second, BACK, 1, end_first_too));
    start_loop();
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS);
    REQUIRE(sem_wait(&begun) == 0);
    /* The loop is busy, so what comes now is for rpcrdma_clnt_poll(). */
    REQUIRE(ask(second, LATER, 1, 1, NULL) == RPC_SUCCESS);
    REQUIRE(pthread_create(&thread, NULL, poll_second, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    time_t end = time(NULL) + patient.tv_sec;
    while (over_with < 2 && time(NULL) < end)
        usleep(1000);
    REQUIRE(over_with == 2);
    if (destroy)
        for (int i = 0; i < 2; i++) {
            while (fcntl(fds[i], F_GETFD) >= 0 && time(NULL) < end)
                usleep(1000);
            REQUIRE(fcntl(fds[i], F_GETFD) < 0 && errno == EBADF);
        }
    if (destroy)
        first = on_descriptor(RPC_ANYFD), second = on_descriptor(RPC_ANYFD);
    /* The loop goes on, and serves both. */
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, count) && rpcrdma_clnt_serve(second, BACK, 1, count));
    REQUIRE(ask(first, LATER, 1, 1, NULL) == RPC_SUCCESS && ask(second, LATER, 1, 1, NULL) == RPC_SUCCESS);
    await_count(2);
}
static void two_routines_destroy_each_others_CLIENT(void) { end_each_other(1); }
static void two_routines_end_each_others_service(void) { end_each_other(0); }

/* A routine that runs inside a call destroys the call's CLIENT: the call ends as it would otherwise, then the CLIENT does. */
static void destroy_caller(struct svc_req *request, SVCXPRT *xprt)
{
    clnt_destroy(first);
    answer(request, xprt);
}
static void destroyed_inside_its_own_call(void)
{
    u_int well = 0;
    first = on_descriptor(RPC_ANYFD);
    int fd = descriptor(first);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, destroy_caller));
    REQUIRE(ask(first, NOW, 1, 1, &well) == RPC_SUCCESS && well == 1);
    REQUIRE(fcntl(fd, F_GETFD) < 0 && errno == EBADF);
}

/* The server's loop does not read: each call back ends all the same, and not only by its timeout of ten seconds. */
static void loop_is_away(u_int how)
{
    first = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(first, BACK, 1, count) && ask(first, how, 1, 5, NULL) == RPC_SUCCESS);
    time_t begin = time(NULL);
    while (counted < 5)
        REQUIRE(rpcrdma_clnt_poll(first, patient) >= 0);
    REQUIRE(time(NULL) - begin < 9);
    if (how == HOLD)
        /* The loop is back, and was told what was read on its behalf meanwhile. */
        REQUIRE(ask(first, LATER, 1, 0, NULL) == RPC_SUCCESS);
}
static void the_server_has_left_its_loop(void) { loop_is_away(QUIT); }
static void the_server_works_between_two_polls(void) { loop_is_away(HOLD); }

static const struct {
    const char *name;
    void (*run)(void);
    int own_turns;
} tests[] = {
#define TEST(name) {#name, name, 0}
    TEST(destroyed_beside_svc_run),
    TEST(ended_beside_svc_run),
    TEST(destroy_waits_for_a_routine),
    TEST(end_waits_for_a_routine),
    TEST(destroyed_inside_a_routine),
    TEST(answered_when_its_CLIENT_was_destroyed),
    TEST(begun_while_svc_run_sleeps),
    TEST(one_of_two_loops_fails),
    TEST(swapped_in_a_routine),
    TEST(ended_and_begun_while_a_routine_runs),
    TEST(ended_and_begun_inside_a_routine),
    TEST(two_routines_destroy_each_others_CLIENT),
    TEST(two_routines_end_each_others_service),
    TEST(destroyed_inside_its_own_call),
    TEST(the_server_has_left_its_loop),
    {"the_server_works_between_two_polls", the_server_works_between_two_polls, 1},
};
enum { TESTS = sizeof tests / sizeof *tests };

/* ---- All at once ------------------------------------------------------------------------------------------------- */

enum { SLOTS = 64 };
static struct {
    atomic_int open, runs;
} slots[SLOTS + 1];
static atomic_long made, served, calls_made;
static time_t until;
static unsigned first_seed;
static atomic_int over;

/* The version tells whose call it is. */
static void routine(struct svc_req *request, SVCXPRT *xprt)
{
    u_int version = request->rq_vers;
    REQUIRE(version <= SLOTS && slots[version].open);
    slots[version].runs++;
    answer(request, xprt);
    REQUIRE(slots[version].open);
    slots[version].runs--;
    served++;
}

static void *worker(void *argument)
{
    u_int version = (u_int)(uintptr_t)argument;
    unsigned seed = version * 7919 + first_seed;
    do {
        CLIENT *client = on_descriptor(RPC_ANYFD), *twin = NULL;
        int choice = rand_r(&seed) % 8;
        clnt_control(client, CLSET_TIMEOUT, (char *)&patient);
        slots[version].open = 1;
        REQUIRE(rpcrdma_clnt_serve(client, BACK, version, routine));
        made++;
        if (choice & 1)
            twin = on_descriptor(descriptor(client));
        for (int i = rand_r(&seed) % 4; i >= 0; i--) {
            u_int well = 0, times = (u_int)rand_r(&seed) % 3;
            int now = rand_r(&seed) % 2;
            REQUIRE(ask(twin ? twin : client, now ? NOW : LATER, version, times, &well) == RPC_SUCCESS);
            if (now)
                REQUIRE(well == times);
            calls_made++;
            if (rand_r(&seed) % 4 == 0)
                REQUIRE(rpcrdma_clnt_poll(client, (struct timeval){0, rand_r(&seed) % 3000}) >= 0);
        }
        if (choice & 2)
            usleep((unsigned)rand_r(&seed) % 500);
        if (choice & 4) {
            REQUIRE(rpcrdma_clnt_serve(client, BACK, version, NULL));
            REQUIRE(slots[version].runs == 0);
            slots[version].open = 0;
            if (rand_r(&seed) % 2) {
                slots[version].open = 1;
                REQUIRE(rpcrdma_clnt_serve(client, BACK, version, routine));
                REQUIRE(ask(client, LATER, version, 1, NULL) == RPC_SUCCESS);
            }
        }
        int own[2];
        if (twin != NULL) {
            clnt_control(twin, CLSET_FD_NCLOSE, NULL);
            clnt_destroy(twin);
        }
        if (choice & 1)
            clnt_control(client, CLSET_FD_CLOSE, NULL);
        clnt_destroy(client);
        REQUIRE(slots[version].runs == 0);
        slots[version].open = 0;
        /* Likely to have the same number: nothing may be written to this socket, and nothing read from it. */
        REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, own) == 0 && write(own[1], "mine", 4) == 4);
        if (choice & 2)
            usleep((unsigned)rand_r(&seed) % 500);
        char bytes[8];
        REQUIRE(recv(own[0], bytes, sizeof bytes, MSG_DONTWAIT) == 4 && memcmp(bytes, "mine", 4) == 0);
        REQUIRE(recv(own[1], bytes, sizeof bytes, MSG_DONTWAIT) < 0 && errno == EAGAIN);
        close(own[0]);
        close(own[1]);
    } while (time(NULL) < until);
    return NULL;
}

static void *own_loop(void *unused)
{
    (void)unused;
    while (!over) {
        /* Nothing is registered after the first CLIENT serves, so nobody reallocates svc_pollfd. */
        turn(100);
    }
    return NULL;
}

static int descriptors(void)
{
    int open = 0;
    for (int fd = 0; fd < 1024; fd++)
        open += fcntl(fd, F_GETFD) >= 0;
    return open;
}

static int all_at_once(int runs_svc_run, int seconds, int threads, int seed)
{
    first_seed = (unsigned)seed;
    REQUIRE(threads <= SLOTS);
    start_server(0);
    CLIENT *last = on_descriptor(RPC_ANYFD);
    REQUIRE(rpcrdma_clnt_serve(last, BACK, 1, answer));
    int before = descriptors();
    REQUIRE(pthread_create(&loop, NULL, runs_svc_run ? run_loop : own_loop, NULL) == 0);
    until = time(NULL) + seconds;
    pthread_t workers[SLOTS];
    for (int i = 0; i < threads; i++)
        REQUIRE(pthread_create(&workers[i], NULL, worker, (void *)(uintptr_t)(i + 2)) == 0);
    for (int i = 0; i < threads; i++)
        REQUIRE(pthread_join(workers[i], NULL) == 0);
#ifndef OPENS_FILES /* what this is compiled with */
    /* svc_run() has an epoll set of what it waits for, and a descriptor that wakes it; and a timer with a set of its own once
     * memory of messages is to be given back after a time. */
    int more = descriptors() - before;
    REQUIRE(runs_svc_run ? more == 2 || more == 4 : more == 0);
#else
    (void)before;
#endif
    over = 1;
    REQUIRE(ask(last, LEAVE, 1, 1, NULL) == RPC_SUCCESS);
    REQUIRE(pthread_join(loop, NULL) == 0);
    clnt_destroy(last);
    REQUIRE(made >= threads && served > 0);
    printf("ok    %d threads beside %s: %ld CLIENTs, %ld calls, %ld calls back\n", threads,
           runs_svc_run ? "svc_run" : "a loop of the program's own", made, calls_made, served);
    return 0;
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    sem_init(&begun, 0, 0);
    sem_init(&may_end, 0, 0);
    sem_init(&calls_over, 0, 0);
    const char *name = count > 1 ? arguments[1] : NULL;
    if (name != NULL && (strcmp(name, "svc_run") == 0 || strcmp(name, "loop") == 0))
        return all_at_once(*name == 's', count > 2 ? atoi(arguments[2]) : 5, count > 3 ? atoi(arguments[3]) : 16,
                           count > 4 ? atoi(arguments[4]) : 1);
    int failed = 0;
    for (int i = 0; i < TESTS; i++) {
        if (name != NULL && strcmp(name, tests[i].name) != 0)
            continue;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            alarm(120);
            start_server(tests[i].own_turns);
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
