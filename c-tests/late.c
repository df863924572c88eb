/* Requests that are put off and answered later: in the routine of another connection's request, or by another thread beside
 * the loop. Requests that come on their connection meanwhile are served too, and a reply that the client does not take at once
 * is still sent.
 *
 * With the argument "pulled": a routine that goes on after it has decoded a long call keeps no other long call from being
 * pulled. To be run with RPCRDMA_POLL=0, so that the loop looks at all connections before it serves one. This test never fails
 * without reason, but it may pass without one: where clients get no processor for a millisecond, the last call is asked for in
 * any case.
 *
 * With "shared": the requests of several threads that share a CLIENT, put off together and answered in any order; and a server
 * that takes the transport out of its loop meanwhile.
 *
 * With "crowd" and RPCRDMA_CREDITS=96: that many threads leave their replies to children at once, some of them in no routine.
 *
 * With "staying" and RPCRDMA_CREDITS=4: routines do not return yet when children have answered their requests, and there are
 * more of these requests than credits.
 *
 * With "much", over a provider that sends with sendto(2) or sendmsg(2): while a thread sends a long reply, another request comes,
 * the routine returns and the loop goes to sleep. Where these take more than 20 ms, the loop sends the rest, and a defect is not
 * found.
 *
 * With "beside": a request that was put off is answered while another routine forks, under a lock that the program takes before
 * a fork; beside a request for a program that was registered without the library; and after its connection has ended or was
 * destroyed. With "beside children": while other routines leave their replies to child processes.
 *
 * Linked with the library, with RPCRDMA_BY_REFERENCE=yes: a reply that is lent to the library makes the loop look at the
 * connection. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpcrdma.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROG = 0x20004C53, UNSEEN, OTHERWISE };
/* Procedures. The three after the first say how a request for the first is answered: in their own routine, by a thread that
 * this routine waits for, or by a thread that begins when the loop sleeps. */
enum { PUT_OFF = 1, IN_ROUTINE, BY_THREAD, BESIDE_LOOP, GATE, TAKE, KEEP, PARK, BACK, LATER, FORK, REPLACE, BUSY, CHILD, BY_CHILD,
       HOLD, LET_GO, STAY, BY_SLOW_CHILD, MUCH };
enum { SHORT = 100000, MEDIUM = 16 << 20, LONG = 200 << 20 };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0}, moment = {0, 20000}, now;

struct data {
    u_int length;
    char *bytes;
};
static bool_t xdr_data(XDR *xdrs, struct data *data)
{
    return xdr_bytes(xdrs, &data->bytes, &data->length, LONG);
}
static bool_t xdr_nothing(XDR *xdrs, void *nothing)
{
    (void)xdrs, (void)nothing;
    return TRUE;
}

/* ---- The server -------------------------------------------------------------------------------------------------- */

static SVCXPRT *waiting;
static sem_t is_put_off, is_inside;
static char reply[LONG];

/* Answers the request that was put off, once another one has come on its connection. */
static void *answers(void *unused)
{
    struct data data = {SHORT, reply};
    struct pollfd came = {.fd = waiting->xp_fd, .events = POLLIN};
    (void)unused;
    REQUIRE(sem_post(&is_inside) == 0);
    REQUIRE(poll(&came, 1, (int)(1000 * patient.tv_sec)) == 1);
    REQUIRE(svc_sendreply(waiting, (xdrproc_t)xdr_data, (char *)&data));
    return NULL;
}

/* Answers it with more than its client takes at once. */
static void *answers_much(void *unused)
{
    struct data data = {LONG, reply};
    (void)unused;
    REQUIRE(svc_sendreply(waiting, (xdrproc_t)xdr_data, (char *)&data));
    return NULL;
}

/* The same, beside its routine and then the loop: the socket seems to be full until the loop sleeps. */
static __thread int is_loop, beside_fd;
static atomic_int loop_sleeps;

static bool_t is_full(void)
{
    int unread;
    if (beside_fd == 0 || loop_sleeps)
        return FALSE;
    REQUIRE(ioctl(beside_fd, FIONREAD, &unread) == 0);
    if (unread == 0)
        REQUIRE(sem_post(&is_inside) == 0);
    errno = EAGAIN;
    return TRUE;
}

/* The library's calls come here. */
ssize_t sendto(int fd, const void *bytes, size_t length, int flags, const struct sockaddr *to, socklen_t size)
{
    return is_full() ? -1 : syscall(SYS_sendto, fd, bytes, length, flags, to, size);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    return is_full() ? -1 : syscall(SYS_sendmsg, fd, message, flags);
}

/* And the loop's. */
int poll(struct pollfd *fds, nfds_t number, int timeout)
{
    int come = is_loop ? (int)syscall(SYS_poll, fds, number, 0) : 0;
    if (come != 0)
        return come;
    loop_sleeps += is_loop;
    return (int)syscall(SYS_poll, fds, number, timeout);
}

static void *answers_much_beside(void *xprt)
{
    struct data data = {MEDIUM, reply};
    beside_fd = ((SVCXPRT *)xprt)->xp_fd;
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_data, (char *)&data));
    REQUIRE(sem_post(&is_inside) == 0);
    return NULL;
}

/* Another request has come when the reply begins, and is read before the routine ends. */
static void much_beside(SVCXPRT *xprt)
{
    pthread_t thread;
    struct pollfd came = {.fd = xprt->xp_fd, .events = POLLIN};
    REQUIRE(sem_post(&is_put_off) == 0);
    REQUIRE(syscall(SYS_poll, &came, 1, (int)(1000 * patient.tv_sec)) == 1);
    loop_sleeps = 0;
    REQUIRE(sem_init(&is_inside, 0, 0) == 0);
    REQUIRE(pthread_create(&thread, NULL, answers_much_beside, xprt) == 0 && pthread_detach(thread) == 0);
    while (sem_wait(&is_inside) != 0)
        ;
}

/* One more long call than are pulled at a time where one thread serves. */
enum { LONG_CALLS = 5, RECORD = 1 << 20 };
static int taken;

static uint64_t asked_for(void)
{
    struct rpcrdma_stats now;
    REQUIRE(rpcrdma_stats_get(&now, sizeof now));
    return now.bytes_read;
}

static uint64_t before;

static bool_t all_are_asked_for(void)
{
    return asked_for() >= before + (uint64_t)LONG_CALLS * RECORD;
}

/* As the descriptors tell, which the loop does not look at meanwhile. */
static bool_t all_have_come(void)
{
    int came = 0;
    for (int i = 0; i < svc_max_pollfd; i++) {
        struct pollfd fd = {.fd = svc_pollfd[i].fd, .events = POLLIN};
        came += fd.fd >= 0 && poll(&fd, 1, 0) == 1;
    }
    return came >= LONG_CALLS;
}

static void await(bool_t (*what)(void))
{
    for (int i = 0; i < 1000 * patient.tv_sec && !what(); i++)
        poll(NULL, 0, 1);
    REQUIRE(what());
}

/* The routine of the first call, having decoded it, goes on until the last call is asked for. */
static void take(SVCXPRT *xprt)
{
    struct data data = {0, NULL};
    REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_data, (char *)&data) && data.length == RECORD);
    if (taken++ == 0)
        await(all_are_asked_for);
    REQUIRE(svc_freeargs(xprt, (xdrproc_t)xdr_data, (char *)&data));
}

enum { CALLERS = 3 };
static struct {
    SVCXPRT *xprt;
    u_int number;
} kept[CALLERS], parked;
static int keeps;

static u_int number_of(SVCXPRT *xprt)
{
    u_int number;
    REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
    return number;
}

/* Puts the request off until the others have come. The last one is answered first, in its own routine. */
static void keep(SVCXPRT *xprt)
{
    kept[keeps].number = number_of(xprt);
    kept[keeps++].xprt = xprt;
    if (keeps < CALLERS)
        return;
    for (; keeps > 0; keeps--)
        REQUIRE(svc_sendreply(kept[keeps - 1].xprt, (xdrproc_t)xdr_u_int, (char *)&kept[keeps - 1].number));
}

static void park(SVCXPRT *xprt)
{
    REQUIRE(parked.xprt == NULL);
    parked.number = number_of(xprt);
    parked.xprt = xprt;
    xprt_unregister(xprt);
    REQUIRE(sem_post(&is_put_off) == 0);
}

static void take_back(void)
{
    SVCXPRT *xprt = parked.xprt;
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&parked.number));
    parked.xprt = NULL;
    xprt_register(xprt);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static sem_t is_locked, may_answer;

static void takes_lock(void)
{
    pthread_mutex_lock(&lock);
}

static void gives_lock(void)
{
    pthread_mutex_unlock(&lock);
}

/* Answers while it holds a lock that a fork waits for. */
static void *answers_locked(void *unused)
{
    (void)unused;
    takes_lock();
    REQUIRE(sem_post(&is_locked) == 0);
    while (sem_wait(&may_answer) != 0)
        ;
    REQUIRE(svc_sendreply(waiting, (xdrproc_t)xdr_u_int, (char *)&(u_int){1}));
    gives_lock();
    return NULL;
}

static void *answers_unseen(void *xprt)
{
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&(u_int){UNSEEN}));
    return NULL;
}

/* A handler that forks while a fork is under way, as a signal handler may. */
static __thread int forks_inside;

static void forks_once(void)
{
    if (forks_inside == 0)
        return;
    forks_inside = 0;
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    REQUIRE(child > 0 && waitpid(child, NULL, 0) == child);
}

/* Leaves the reply to a child. */
static void leave_to_child(SVCXPRT *xprt)
{
    static atomic_uint rounds;
    int status;
    forks_inside = rounds++ % 2;
    pid_t child = fork();
    if (child == 0)
        _exit(!svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&(u_int){CHILD}));
    REQUIRE(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

/* The same, and does not return before it may. */
enum { STAYING = 16 };
static sem_t may_return;

static void stay(SVCXPRT *xprt)
{
    leave_to_child(xprt);
    while (sem_wait(&may_return) != 0)
        ;
}

/* The thread that is to fork takes 10 ms of processor time over it, and counts what routines answer meanwhile. */
static atomic_uint answered, answered_meanwhile;
static __thread int counts_answers;

static void counts_once(void)
{
    struct timespec taken;
    if (counts_answers == 0)
        return;
    counts_answers = 0;
    u_int before = answered;
    do
        REQUIRE(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &taken) == 0);
    while (taken.tv_sec == 0 && taken.tv_nsec < 10000000);
    answered_meanwhile = answered - before;
}

static void leave_to_slow_child(SVCXPRT *xprt)
{
    counts_answers = 1;
    leave_to_child(xprt);
    REQUIRE(sem_post(&may_return) == 0);
}

static void answer_at_once(SVCXPRT *xprt)
{
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&(u_int){BUSY}));
}

/* Requests that routines leave to threads, which answer them outside of any routine. */
enum { ANSWERING = 3, ASKING = 8, QUEUE = 64 };
static struct queue {
    void (*answer)(SVCXPRT *);
    SVCXPRT *left[QUEUE];
    atomic_uint came, taken;
    sem_t has_some;
} at_once = {.answer = answer_at_once}, by_child = {.answer = leave_to_child},
  by_slow_child = {.answer = leave_to_slow_child};

static void leave_to_thread(struct queue *queue, SVCXPRT *xprt)
{
    queue->left[queue->came++ % QUEUE] = xprt;
    REQUIRE(sem_post(&queue->has_some) == 0);
}

static void *answers_on(void *argument)
{
    struct queue *queue = argument;
    for (;;) {
        while (sem_wait(&queue->has_some) != 0)
            ;
        queue->answer(queue->left[queue->taken++ % QUEUE]);
    }
    return NULL;
}

/* Destroys the transport that waits, and creates a listener of libtirpc's own with the same descriptor number. */
static void replace(void)
{
    static SVCXPRT *made;
    int number = waiting->xp_fd, socket_made = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(socket_made >= 0 && listen(socket_made, 8) == 0);
    svc_destroy(waiting);
    REQUIRE(dup2(socket_made, number) == number && close(socket_made) == 0);
    SVCXPRT *before = made;
    made = svc_vc_create(number, 0, 0);
    REQUIRE(made != NULL);
    if (before != NULL)
        svc_destroy(before);
}

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    pthread_t thread;
    u_int number;
    pid_t child;
    switch (request->rq_proc) {
    case PUT_OFF:
        waiting = xprt;
        REQUIRE(sem_post(&is_put_off) == 0);
        return;
    case KEEP:
        keep(xprt);
        return;
    case PARK:
        park(xprt);
        return;
    case BACK:
        take_back();
        break;
    case LATER:
        waiting = xprt;
        REQUIRE(sem_post(&is_put_off) == 0);
        if (request->rq_prog == PROG)
            return;
        /* A thread answers, which is all that tells this request from the one that was put off. */
        REQUIRE(pthread_create(&thread, NULL, answers_unseen, xprt) == 0 && pthread_join(thread, NULL) == 0);
        return;
    case FORK:
        REQUIRE(pthread_create(&thread, NULL, answers_locked, NULL) == 0 && sem_wait(&is_locked) == 0);
        REQUIRE(sem_post(&may_answer) == 0);
        child = fork();
        if (child == 0)
            _exit(0);
        REQUIRE(child > 0 && waitpid(child, NULL, 0) == child && pthread_join(thread, NULL) == 0);
        number = 2;
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
        return;
    case REPLACE:
        replace();
        break;
    case BUSY:
        leave_to_thread(&at_once, xprt);
        return;
    case CHILD:
        leave_to_child(xprt);
        return;
    case STAY:
        stay(xprt);
        return;
    case HOLD:
        waiting = xprt;
        REQUIRE(sem_post(&is_put_off) == 0);
        return;
    case LET_GO:
        leave_to_thread(&by_child, waiting);
        break;
    case BY_CHILD:
        leave_to_thread(&by_child, xprt);
        return;
    case BY_SLOW_CHILD:
        leave_to_thread(&by_slow_child, xprt);
        while (sem_wait(&may_return) != 0)
            ;
        return;
    case MUCH:
        much_beside(xprt);
        return;
    case IN_ROUTINE:
        answers(NULL);
        break;
    case GATE:
        before = asked_for();
        REQUIRE(sem_post(&is_inside) == 0);
        await(all_have_come);
        break;
    case TAKE:
        take(xprt);
        break;
    case BY_THREAD:
        REQUIRE(pthread_create(&thread, NULL, answers, NULL) == 0 && pthread_join(thread, NULL) == 0);
        break;
    }
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_nothing, NULL));
    answered++;
}

static u_int service_threads;

static void *run(void *unused)
{
    is_loop = 1;
    if (service_threads > 0)
        REQUIRE(rpcrdma_svc_run(service_threads));
    else
        svc_run();
    return unused;
}

/* ---- The clients ------------------------------------------------------------------------------------------------- */

static struct sockaddr_in address = {.sin_family = AF_INET};
static CLIENT *first, *second;

static CLIENT *connected(void)
{
    struct netconfig *netconfig = getnetconfigent("rdma");
    struct netbuf to = {sizeof address, sizeof address, &address};
    REQUIRE(netconfig != NULL);
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    freenetconfigent(netconfig);
    return client;
}

static enum clnt_stat ask(CLIENT *client, u_int procedure)
{
    return clnt_call(client, procedure, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_nothing, NULL, patient);
}

static void *is_answered(void *length)
{
    struct data data = {0, NULL};
    enum clnt_stat status = clnt_call(first, PUT_OFF, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_data,
                                      (char *)&data, patient);
    REQUIRE(status == RPC_SUCCESS && data.length == *(u_int *)length);
    clnt_freeres(first, (xdrproc_t)xdr_data, (char *)&data);
    return NULL;
}

static void *has_it_answered(void *procedure)
{
    REQUIRE(ask(second, *(u_int *)procedure) == RPC_SUCCESS);
    return NULL;
}

static void *passes_the_gate(void *unused)
{
    (void)unused;
    REQUIRE(ask(first, GATE) == RPC_SUCCESS);
    return NULL;
}

static void *makes_a_long_call(void *own)
{
    struct data data = {RECORD, reply};
    CLIENT *client = own;
    enum clnt_stat status = clnt_call(client, TAKE, (xdrproc_t)xdr_data, (char *)&data, (xdrproc_t)xdr_nothing, NULL, patient);
    REQUIRE(status == RPC_SUCCESS);
    return NULL;
}

static void pulled(void)
{
    CLIENT *clients[LONG_CALLS];
    pthread_t gate, callers[LONG_CALLS];
    for (int i = 0; i < LONG_CALLS; i++) {
        clients[i] = connected();
        REQUIRE(ask(clients[i], NULLPROC) == RPC_SUCCESS);
    }
    REQUIRE(pthread_create(&gate, NULL, passes_the_gate, NULL) == 0);
    REQUIRE(sem_wait(&is_inside) == 0);
    for (int i = 0; i < LONG_CALLS; i++)
        REQUIRE(pthread_create(&callers[i], NULL, makes_a_long_call, clients[i]) == 0);
    REQUIRE(pthread_join(gate, NULL) == 0);
    for (int i = 0; i < LONG_CALLS; i++)
        REQUIRE(pthread_join(callers[i], NULL) == 0);
    for (int i = 0; i < LONG_CALLS; i++)
        clnt_destroy(clients[i]);
    printf("ok    a routine that has decoded a long call keeps no other one waiting\n");
}

struct caller {
    u_int procedure, number;
};

static void *gets_its_own(void *own)
{
    struct caller *caller = own;
    u_int number = 0;
    enum clnt_stat status = clnt_call(first, caller->procedure, (xdrproc_t)xdr_u_int, (char *)&caller->number,
                                      (xdrproc_t)xdr_u_int, (char *)&number, patient);
    REQUIRE(status == RPC_SUCCESS && number == caller->number);
    return NULL;
}

static void shared(void)
{
    pthread_t threads[CALLERS];
    struct caller callers[CALLERS];
    /* The first reply grants the credits. */
    REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
    for (u_int round = 0; round < 200; round++) {
        u_int procedure = round % 2 ? PARK : KEEP;
        for (u_int i = 0; i < CALLERS; i++) {
            callers[i] = (struct caller){procedure, CALLERS * round + i};
            REQUIRE(pthread_create(&threads[i], NULL, gets_its_own, &callers[i]) == 0);
        }
        for (u_int i = 0; i < CALLERS && procedure == PARK; i++) {
            REQUIRE(sem_wait(&is_put_off) == 0);
            REQUIRE(ask(second, NULLPROC) == RPC_SUCCESS && ask(second, BACK) == RPC_SUCCESS);
        }
        for (u_int i = 0; i < CALLERS; i++)
            REQUIRE(pthread_join(threads[i], NULL) == 0);
    }
    printf("ok    requests of threads that share a CLIENT are put off together, and each gets its own reply\n");
    printf("ok    what was taken out of the loop has no request before it is back\n");
}

static u_int ask_number(CLIENT *client, u_int program, u_int procedure)
{
    u_int number = 0;
    rpcprog_t named = program;
    REQUIRE(clnt_control(client, CLSET_PROG, (char *)&named));
    enum clnt_stat status = clnt_call(client, procedure, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_u_int,
                                      (char *)&number, patient);
    if (status != RPC_SUCCESS)
        errx(1, "procedure %u: %s", procedure, clnt_sperrno(status));
    return number;
}

static void *is_put_off_until_fork(void *unused)
{
    (void)unused;
    REQUIRE(ask_number(first, PROG, LATER) == 1);
    return NULL;
}

/* The routine that forks serves the connection of the request that was put off, or another one. */
static void forks(void)
{
    pthread_t thread;
    for (u_int round = 0; round < 20; round++) {
        REQUIRE(pthread_create(&thread, NULL, is_put_off_until_fork, NULL) == 0);
        REQUIRE(sem_wait(&is_put_off) == 0);
        REQUIRE(ask_number(round % 2 ? first : second, PROG, FORK) == 2);
        REQUIRE(pthread_join(thread, NULL) == 0);
    }
    printf("ok    a request is answered under a lock that a routine which forks waits for\n");
}

static atomic_int is_over;
static void *keeps_it_busy(void *unused)
{
    while (!is_over)
        REQUIRE(ask_number(first, PROG, BUSY) == BUSY);
    return unused;
}

static void *is_held(void *unused)
{
    REQUIRE(ask_number(first, PROG, HOLD) == CHILD);
    return unused;
}

/* One request waits while children answer more requests than are kept for an answer. */
static void children(void)
{
    pthread_t threads[ASKING], worker, held;
    REQUIRE(pthread_create(&held, NULL, is_held, NULL) == 0 && sem_wait(&is_put_off) == 0);
    for (int i = 0; i < ANSWERING; i++)
        REQUIRE(pthread_create(&worker, NULL, answers_on, &at_once) == 0);
    for (int i = 0; i < ASKING; i++)
        REQUIRE(pthread_create(&threads[i], NULL, keeps_it_busy, NULL) == 0);
    REQUIRE(pthread_create(&worker, NULL, answers_on, &by_child) == 0);
    for (u_int round = 0; round < 300; round++)
        REQUIRE(ask_number(first, PROG, CHILD) == CHILD && ask_number(first, PROG, BY_CHILD) == CHILD);
    is_over = 1;
    for (int i = 0; i < ASKING; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    REQUIRE(ask(first, LET_GO) == RPC_SUCCESS && pthread_join(held, NULL) == 0);
    printf("ok    a child answers while other threads answer requests of the same connection\n");
}

static void staying(void)
{
    for (int i = 0; i < STAYING - 1; i++)
        REQUIRE(ask_number(first, PROG, STAY) == CHILD);
    for (int i = 0; i < STAYING; i++)
        REQUIRE(sem_post(&may_return) == 0);
    REQUIRE(ask_number(first, PROG, STAY) == CHILD);
    printf("ok    routines may stay on when children have answered\n");
}

/* As many threads as calls that are under way, each of which forks; and some in no routine that fork too. */
enum { CROWD = 96 };
static void *asks_children(void *procedure)
{
    for (int i = 0; i < 4; i++)
        REQUIRE(ask_number(first, PROG, *(u_int *)procedure) == CHILD);
    return NULL;
}
static void crowd(void)
{
    u_int procedures[] = {CHILD, CHILD, CHILD, BY_CHILD};
    pthread_t threads[CROWD], worker;
    REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
    for (int i = 0; i < ANSWERING; i++)
        REQUIRE(pthread_create(&worker, NULL, answers_on, &by_child) == 0);
    for (int i = 0; i < CROWD; i++)
        REQUIRE(pthread_create(&threads[i], NULL, asks_children, &procedures[i % 4]) == 0);
    for (int i = 0; i < CROWD; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    printf("ok    children answer that many threads have forked at once\n");
}

/* The first fork of the process, by a thread that a routine waits for: no request has been put off. */
static void *asks_nothing(void *unused)
{
    while (!is_over)
        REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
    return unused;
}
static void slow(void)
{
    pthread_t threads[ASKING], worker;
    REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
    for (int i = 0; i < ASKING; i++)
        REQUIRE(pthread_create(&threads[i], NULL, asks_nothing, NULL) == 0);
    REQUIRE(pthread_create(&worker, NULL, answers_on, &by_slow_child) == 0);
    REQUIRE(ask_number(first, PROG, BY_SLOW_CHILD) == CHILD);
    is_over = 1;
    for (int i = 0; i < ASKING; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    /* Each of the others may have sent a reply before, and count it now. */
    if (answered_meanwhile >= STAYING)
        errx(1, "%u requests were answered during a fork", answered_meanwhile);
    printf("ok    a thread that a routine waits for forks, and others leave the connection alone\n");
}

static void *asks_much(void *unused)
{
    struct data data = {0, NULL};
    enum clnt_stat status = clnt_call(first, MUCH, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_data, (char *)&data, patient);
    REQUIRE(status == RPC_SUCCESS && data.length == MEDIUM);
    clnt_freeres(first, (xdrproc_t)xdr_data, (char *)&data);
    return unused;
}

static void much(void)
{
    pthread_t thread;
    REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
    for (int round = 0; round < 20; round++) {
        REQUIRE(pthread_create(&thread, NULL, asks_much, NULL) == 0 && sem_wait(&is_put_off) == 0);
        REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
        REQUIRE(pthread_join(thread, NULL) == 0);
    }
    printf("ok    a request that comes during a thread's long reply is served, though its routine has returned\n");
}

/* What was put off is a call that nobody waits for. */
static void unseen(SVCXPRT *listener)
{
    bool_t (*unseen_reg)(SVCXPRT *, rpcprog_t, rpcvers_t, void (*)(struct svc_req *, SVCXPRT *), const struct netconfig *);
    void *library = dlopen("libtirpc.so.3", RTLD_NOW);
    REQUIRE(library != NULL && (*(void **)&unseen_reg = dlsym(library, "svc_reg")) != NULL);
    REQUIRE(unseen_reg(listener, UNSEEN, 1, serve, NULL));
    for (u_int round = 0; round < 3; round++) {
        rpcprog_t program = PROG;
        REQUIRE(clnt_control(first, CLSET_PROG, (char *)&program));
        clnt_call(first, LATER, (xdrproc_t)xdr_nothing, NULL, NULL, NULL, now);
        REQUIRE(sem_wait(&is_put_off) == 0);
        REQUIRE(ask_number(first, UNSEEN, LATER) == UNSEEN && sem_wait(&is_put_off) == 0);
    }
    printf("ok    a thread answers a program that was registered past the library, beside a request that was put off\n");
}

static void serve_otherwise(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&(u_int){OTHERWISE}));
}

/* libtirpc serves a program with the routine that was registered last, even where rpcbind could not be reached for it. */
static void otherwise(SVCXPRT *listener)
{
    struct netconfig *tcp = getnetconfigent("tcp"), unknown = *tcp;
    SVCXPRT *other = svc_tli_create(RPC_ANYFD, tcp, NULL, 0, 0);
    unknown.nc_protofmly = unknown.nc_proto = "unknown";
    REQUIRE(other != NULL && svc_reg(other, OTHERWISE, 1, serve, NULL));
    REQUIRE(!svc_reg(listener, OTHERWISE, 1, serve_otherwise, &unknown));
    rpcprog_t program = PROG;
    REQUIRE(clnt_control(first, CLSET_PROG, (char *)&program));
    clnt_call(first, LATER, (xdrproc_t)xdr_nothing, NULL, NULL, NULL, now);
    REQUIRE(sem_wait(&is_put_off) == 0 && ask_number(first, OTHERWISE, NULLPROC) == OTHERWISE);
    REQUIRE(ask_number(second, OTHERWISE, NULLPROC) == OTHERWISE);
    printf("ok    the routine that was registered last is called beside a request that was put off\n");
}

/* More requests are put off than are kept for an answer, here of calls that nobody waits for: the oldest get no answer, and no
 * other request gets theirs. */
static void passed_over(void)
{
    pthread_t thread;
    /* The transport of the connection, and one that is the request's own. */
    SVCXPRT *oldest[2];
    rpcprog_t program = PROG;
    REQUIRE(clnt_control(first, CLSET_PROG, (char *)&program));
    for (int i = 0; i < 70; i++) {
        clnt_call(first, LATER, (xdrproc_t)xdr_nothing, NULL, NULL, NULL, now);
        REQUIRE(sem_wait(&is_put_off) == 0);
        if (i < 2)
            oldest[i] = waiting;
    }
    REQUIRE(pthread_create(&thread, NULL, is_put_off_until_fork, NULL) == 0 && sem_wait(&is_put_off) == 0);
    for (int i = 0; i < 2; i++)
        REQUIRE(!svc_sendreply(oldest[i], (xdrproc_t)xdr_u_int, (char *)&(u_int){OTHERWISE}));
    REQUIRE(svc_sendreply(waiting, (xdrproc_t)xdr_u_int, (char *)&(u_int){1}) && pthread_join(thread, NULL) == 0);
    printf("ok    a request that waited too long for its answer gets none, and no other one gets it\n");
}

static bool_t connection_has_ended(void)
{
    return waiting->xp_fd == -1;
}

/* A client whose first call times out makes another connection, since it has no credit left. Its server does not hear of it. */
static void ended(void)
{
    for (u_int round = 0; round < 10; round++) {
        CLIENT *client = connected();
        u_int number = 0;
        enum clnt_stat status = clnt_call(client, LATER, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_u_int,
                                          (char *)&number, moment);
        REQUIRE(status == RPC_TIMEDOUT && sem_wait(&is_put_off) == 0);
        REQUIRE(ask(client, NULLPROC) == RPC_SUCCESS);
        await(connection_has_ended);
        REQUIRE(!svc_sendreply(waiting, (xdrproc_t)xdr_u_int, (char *)&number));
        xprt_register(waiting), xprt_unregister(waiting);
        REQUIRE(ask(client, NULLPROC) == RPC_SUCCESS);
        clnt_destroy(client);
    }
    printf("ok    a request may be answered when its connection has ended\n");
}

/* Connections that the loop looks at without asking their descriptors. */
static void replaced(void)
{
    for (u_int round = 0; round < 60; round++) {
        CLIENT *client = connected();
        REQUIRE(ask(client, NULLPROC) == RPC_SUCCESS);
        clnt_call(client, LATER, (xdrproc_t)xdr_nothing, NULL, NULL, NULL, now);
        REQUIRE(sem_wait(&is_put_off) == 0);
        for (int i = 0; i < 20; i++)
            REQUIRE(ask(second, NULLPROC) == RPC_SUCCESS && ask(client, NULLPROC) == RPC_SUCCESS);
        REQUIRE(ask(second, REPLACE) == RPC_SUCCESS && ask(second, NULLPROC) == RPC_SUCCESS);
        clnt_destroy(client);
    }
    printf("ok    a listener that has the number of a connection that was destroyed is not taken for it\n");
}

int main(int argc, char **argv)
{
    u_int lengths[] = {SHORT, SHORT, LONG};
    pthread_t loop, one, other;
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    socklen_t length = sizeof address;
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    sem_init(&is_put_off, 0, 0);
    sem_init(&is_inside, 0, 0);
    sem_init(&is_locked, 0, 0);
    sem_init(&at_once.has_some, 0, 0);
    sem_init(&by_child.has_some, 0, 0);
    sem_init(&by_slow_child.has_some, 0, 0);
    sem_init(&may_answer, 0, 0);
    sem_init(&may_return, 0, 0);
    void (*with_threads)(void) = NULL;
    if (argc > 1 && strcmp(argv[1], "staying") == 0)
        with_threads = staying, service_threads = STAYING;
    else if (argc > 1 && strcmp(argv[1], "crowd") == 0)
        with_threads = crowd, service_threads = CROWD;
    else if (argc > 1 && strcmp(argv[1], "slow") == 0)
        with_threads = slow, service_threads = STAYING;
    REQUIRE(pthread_atfork(takes_lock, gives_lock, gives_lock) == 0 && pthread_atfork(NULL, forks_once, NULL) == 0 &&
            pthread_atfork(counts_once, NULL, NULL) == 0);
    REQUIRE(pthread_create(&loop, NULL, run, NULL) == 0);
    first = connected(), second = connected();
    if (argc > 1 && strcmp(argv[1], "pulled") == 0) {
        pulled();
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "shared") == 0) {
        shared();
        clnt_destroy(first), clnt_destroy(second);
        svc_exit();
        REQUIRE(pthread_join(loop, NULL) == 0);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "much") == 0)
        with_threads = much;
    if (with_threads != NULL) {
        with_threads();
        clnt_destroy(first), clnt_destroy(second);
        svc_exit();
        REQUIRE(pthread_join(loop, NULL) == 0);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "beside") == 0) {
        /* The first reply grants the credits. */
        REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS && ask(second, NULLPROC) == RPC_SUCCESS);
        if (argc > 2)
            children();
        else
            forks(), passed_over(), unseen(listener), otherwise(listener), ended(), replaced();
        clnt_destroy(first), clnt_destroy(second);
        svc_exit();
        REQUIRE(pthread_join(loop, NULL) == 0);
        return 0;
    }
    for (u_int procedure = IN_ROUTINE; procedure <= BESIDE_LOOP; procedure++) {
        /* The first reply grants the credits. */
        REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
        REQUIRE(pthread_create(&one, NULL, is_answered, &lengths[procedure - IN_ROUTINE]) == 0);
        REQUIRE(sem_wait(&is_put_off) == 0);
        if (procedure == BESIDE_LOOP) {
            /* When this has its reply, the loop goes to sleep. */
            REQUIRE(ask(second, NULLPROC) == RPC_SUCCESS);
            REQUIRE(pthread_create(&other, NULL, answers_much, NULL) == 0);
        } else {
            REQUIRE(pthread_create(&other, NULL, has_it_answered, &procedure) == 0);
            REQUIRE(sem_wait(&is_inside) == 0);
            REQUIRE(ask(first, NULLPROC) == RPC_SUCCESS);
        }
        REQUIRE(pthread_join(one, NULL) == 0 && pthread_join(other, NULL) == 0);
        static const char *const names[] = {"in the routine of another request", "by a thread of that routine",
                                            "beside the loop, with much"};
        printf("ok    a request is answered %s\n", names[procedure - IN_ROUTINE]);
        fflush(stdout);
    }
    clnt_destroy(first), clnt_destroy(second);
    svc_exit();
    return 0;
}
