/* Dispatch routines that run the service loop themselves, or that are left by longjmp(3), while there is more to serve: further
 * requests of the same connection, whose CLIENT several threads share, and of other connections that call without a pause. The
 * loop does the same inside a routine as outside.
 *
 *   nested NETID [WAY...]     shared: threads share a CLIENT, which over tcp has one call under way at a time
 *                             turns: the program runs a loop of its own; otherwise svc_run()
 *                             again, stops: only requests that have come together with a jump, or with svc_exit(3), before the
 *                             first loop in a routine
 *                             leaks: only whether memory is left behind
 *                             ADDRESS: one of this host's; otherwise 127.0.0.1 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <malloc.h>
#include <netconfig.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <sched.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PROG = 0x20004C54 };
/* Procedures. MEET runs the loop until MANY are inside, INNER until a FINISH has come. GATE waits for the clients, HOLD until
 * something has come at the listener and at one connection. PUT_OFF is answered by ANSWER, LATER by a thread, and SILENT never.
 * SLOW takes longer than the 100 ms after which a loop inside a routine is woken. LEAVE jumps out of the loop, and so do the
 * xdrprocs of ARGUMENTS and RESULTS. STOP ends the loop, which then goes on with the transports that KNOWN has recorded. */
enum { ECHO = 1, MEET, INNER, FINISH, GATE, PUT_OFF, ANSWER, SILENT, SLOW, LEAVE, TELL, KNOWN, STOP, MEMORY, HOLD, LATER, ARGUMENTS, RESULTS };
enum { MANY = 3 };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0}, now = {0, 0};

static void await(sem_t *sem)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += patient.tv_sec;
    REQUIRE(sem_timedwait(sem, &until) == 0);
}

/* ---- The server -------------------------------------------------------------------------------------------------- */

static int inside, finished, kept, knows;
static struct {
    SVCXPRT *xprt;
    u_int number;
} put_off[4];
static sem_t is_inside, may_go_on, is_told, is_later;
static SVCXPRT *known[3];
static bool own_turns;
static jmp_buf loop;

static void turn(void)
{
    struct pollfd fds[64];
    int count = svc_max_pollfd;
    REQUIRE(count <= 64);
    memcpy(fds, svc_pollfd, (size_t)count * sizeof *fds);
    int ready = poll(fds, (nfds_t)count, (int)(1000 * patient.tv_sec));
    REQUIRE(ready > 0);
    svc_getreq_poll(fds, ready);
}

static void answer(SVCXPRT *xprt, u_int number)
{
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
}

/* Answers the request that was put off last, at once or after a varying delay. */
static void *answers_later(void *unused)
{
    for (u_int round = 0;; round++) {
        while (sem_wait(&is_later) != 0)
            ;
        for (u_int i = 0; i < round % 16; i++)
            sched_yield();
        answer(put_off[0].xprt, put_off[0].number);
    }
    return unused;
}

/* The connection that was last asked for an ECHO, and the one that is held. */
static int latest, held;

static bool both_have_something(void)
{
    struct pollfd fds[] = {{.fd = known[0]->xp_fd, .events = POLLIN}, {.fd = held, .events = POLLIN}};
    return poll(fds, 2, 0) == 2;
}

static bool_t xdr_leaves(XDR *xdrs, u_int *number)
{
    (void)xdrs, (void)number;
    longjmp(loop, 1);
}

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    u_int number = 0;
    int before = finished;
    if (request->rq_proc == ARGUMENTS)
        svc_getargs(xprt, (xdrproc_t)xdr_leaves, (char *)&number);
    if (request->rq_proc != NULLPROC)
        REQUIRE(svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&number));
    switch (request->rq_proc) {
    case MEET:
        inside++;
        REQUIRE(sem_post(&is_inside) == 0);
        while (inside < MANY)
            turn();
        break;
    case INNER:
        REQUIRE(sem_post(&is_inside) == 0);
        while (finished == before)
            turn();
        break;
    case ECHO:
        latest = xprt->xp_fd;
        break;
    case FINISH:
        finished++;
        break;
    case GATE:
        REQUIRE(sem_post(&is_inside) == 0);
        await(&may_go_on);
        break;
    case HOLD:
        REQUIRE(sem_post(&is_inside) == 0);
        for (int i = 0; i < 1000 * patient.tv_sec && !both_have_something(); i++)
            poll(NULL, 0, 1);
        break;
    case LATER:
        put_off[0].xprt = xprt;
        put_off[0].number = number;
        REQUIRE(sem_post(&is_inside) == 0 && sem_post(&is_later) == 0);
        return;
    case PUT_OFF:
        put_off[kept].xprt = xprt;
        put_off[kept++].number = number;
        REQUIRE(sem_post(&is_inside) == 0);
        return;
    case ANSWER:
        for (; kept > 0; kept--)
            answer(put_off[kept - 1].xprt, put_off[kept - 1].number);
        break;
    case SILENT:
        return;
    case SLOW:
        poll(NULL, 0, 150);
        break;
    case RESULTS:
        svc_sendreply(xprt, (xdrproc_t)xdr_leaves, (char *)&number);
        break;
    case LEAVE:
        longjmp(loop, 1);
    case KNOWN:
        known[knows++] = xprt;
        break;
    case STOP:
        answer(xprt, number);
        svc_exit();
        return;
    case TELL:
        REQUIRE(sem_post(&is_told) == 0);
        break;
    case MEMORY:
        number = (u_int)mallinfo2().uordblks;
        break;
    }
    answer(xprt, number);
}

static void *run(void *unused)
{
    (void)setjmp(loop);
    while (!own_turns) {
        svc_run();
        for (int i = 0; i < knows; i++)
            xprt_register(known[i]);
    }
    for (;;)
        turn();
    return unused;
}

/* ---- The clients ------------------------------------------------------------------------------------------------- */

static struct netconfig *netconfig;
static struct sockaddr_in address = {.sin_family = AF_INET};
static bool shared;
static CLIENT *first, *second;

static enum clnt_stat call(CLIENT *client, u_int procedure, u_int number, u_int *result, struct timeval timeout)
{
    return clnt_call(client, procedure, (xdrproc_t)xdr_u_int, (char *)&number, (xdrproc_t)xdr_u_int, (char *)result,
                     timeout);
}

static void ask(CLIENT *client, u_int procedure, u_int number)
{
    u_int result = ~number;
    REQUIRE(call(client, procedure, number, &result, patient) == RPC_SUCCESS && result == number);
}

/* Waits for no reply. */
static void send_only(CLIENT *client, u_int procedure)
{
    u_int unused;
    REQUIRE(call(client, procedure, 0, &unused, now) == RPC_TIMEDOUT);
}

static CLIENT *connected(void)
{
    struct netbuf to = {sizeof address, sizeof address, &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    /* The first reply grants the credits. */
    ask(client, ECHO, 1);
    return client;
}

struct caller {
    pthread_t thread;
    CLIENT *client;
    u_int procedure, number;
};

static void *calls(void *own)
{
    struct caller *caller = own;
    ask(caller->client, caller->procedure, caller->number);
    if (caller->client != first && caller->client != second)
        clnt_destroy(caller->client);
    return NULL;
}

static struct caller *begin_with(CLIENT *client, u_int procedure, u_int number)
{
    struct caller *caller = malloc(sizeof *caller);
    REQUIRE(caller != NULL);
    *caller = (struct caller){.client = client, .procedure = procedure, .number = number};
    REQUIRE(pthread_create(&caller->thread, NULL, calls, caller) == 0);
    return caller;
}

static struct caller *begin(u_int procedure, u_int number)
{
    return begin_with(shared ? first : connected(), procedure, number);
}

static void end(struct caller *caller)
{
    REQUIRE(pthread_join(caller->thread, NULL) == 0);
    free(caller);
}

/* ---- The tests --------------------------------------------------------------------------------------------------- */

static void meet(void)
{
    struct caller *callers[MANY];
    for (u_int round = 0; round < 50; round++) {
        bool one_by_one = round % 2;
        inside = 0;
        for (u_int i = 0; i < MANY; i++) {
            callers[i] = begin(MEET, MANY * round + i);
            if (one_by_one)
                await(&is_inside);
        }
        for (u_int i = 0; i < MANY; i++)
            end(callers[i]);
        for (u_int i = 0; i < MANY && !one_by_one; i++)
            await(&is_inside);
    }
    printf("ok    routines run the loop until others are inside too\n");
}

/* In a loop inside of a routine: a request that is put off, and another one whose routine runs the loop. */
static void nested(void)
{
    for (u_int round = 0; round < 50; round++) {
        bool is_late = round % 2;
        struct caller *outer = begin(INNER, 10);
        await(&is_inside);
        struct caller *late = begin(PUT_OFF, 20);
        await(&is_inside);
        struct caller *deep = begin(INNER, 30);
        await(&is_inside);
        end(begin(ECHO, 40));
        if (!is_late)
            end(begin(ANSWER, 50)), end(late);
        end(begin(FINISH, 60));
        end(deep), end(outer);
        if (is_late)
            end(begin(ANSWER, 70)), end(late);
    }
    printf("ok    requests are put off in a loop inside of a routine\n");
}

enum { BUSY = 300 };

static void *calls_on(void *own)
{
    CLIENT *client = own;
    for (u_int i = 0, rounds = 0; rounds < BUSY; i++) {
        ask(client, ECHO, i);
        if (sem_trywait(&is_inside) == 0)
            ask(client, FINISH, i), rounds++;
    }
    return NULL;
}

static void busy(void)
{
    pthread_t other;
    REQUIRE(pthread_create(&other, NULL, calls_on, second) == 0);
    for (u_int i = 0; i < BUSY; i++)
        ask(first, INNER, i);
    REQUIRE(pthread_join(other, NULL) == 0);
    printf("ok    a routine runs the loop while another client calls without a pause\n");
}

/* Sends the calls one after the other while the gate is closed, so that they are read together. */
static void together(const u_int *procedures, u_int count)
{
    struct caller *gate = begin_with(second, GATE, count);
    await(&is_inside);
    for (u_int i = 0; i < count; i++)
        send_only(first, procedures[i]);
    REQUIRE(sem_post(&may_go_on) == 0);
    end(gate);
}

/* Over tcp libtirpc forgets what it has read with a request whose routine does not return. */
static void jumps(void)
{
    static const u_int leave[] = {LEAVE, TELL};
    for (u_int round = 0; round < 20; round++) {
        together(leave, 2);
        await(&is_told);
        /* The same while another request is put off. */
        struct caller *late = begin(PUT_OFF, 20);
        await(&is_inside);
        send_only(first, LEAVE);
        send_only(first, TELL);
        await(&is_told);
        end(begin(ANSWER, 30)), end(late);
    }
    printf("ok    what has come with a request whose routine jumps out of the loop is served\n");
}

static const u_int inner[] = {INNER, FINISH, TELL};

static int descriptors(void)
{
    int count = 0;
    DIR *all = opendir("/proc/self/fd");
    REQUIRE(all != NULL);
    while (readdir(all) != NULL)
        count++;
    closedir(all);
    return count;
}

/* A request whose xdrproc is left by a jump does not keep its connection once that has ended. */
static void xdrprocs(void)
{
    int before = descriptors();
    for (u_int i = 0; i < 6; i++) {
        CLIENT *client = connected();
        send_only(client, i % 2 ? ARGUMENTS : RESULTS);
        clnt_destroy(client);
    }
    ask(second, ECHO, 7);
    for (int i = 0; i < 1000 * patient.tv_sec && descriptors() > before; i++)
        poll(NULL, 0, 1);
    REQUIRE(descriptors() <= before);
    printf("ok    a jump out of an xdrproc leaves no connection behind\n");
}

static void again(void)
{
    static const u_int slow[] = {SLOW, LEAVE, TELL};
    for (u_int round = 0; round < 3; round++) {
        together(slow, 3);
        await(&is_told);
        together(inner, 3);
        await(&is_inside), await(&is_told);
    }
    printf("ok    a routine runs the loop after a jump\n");
}

static void stops(void)
{
    static const u_int slow[] = {SLOW, STOP};
    ask(second, KNOWN, 1), ask(first, KNOWN, 2);
    for (u_int round = 0; round < 3; round++) {
        together(slow, 2);
        ask(second, ECHO, round);
        together(inner, 3);
        await(&is_inside), await(&is_told);
    }
    printf("ok    a routine runs the loop after svc_exit\n");
}

/* Calls of a program and of a version that are not there. */
static void unknown(void)
{
    u_int unused, program = PROG + 1, version = 9, same = PROG, one = 1;
    struct rpc_err error;
    for (u_int round = 0; round < 10; round++) {
        struct caller *late = begin(PUT_OFF, round);
        await(&is_inside);
        REQUIRE(clnt_control(first, CLSET_PROG, (char *)&program));
        REQUIRE(call(first, ECHO, 1, &unused, patient) == RPC_PROGUNAVAIL);
        REQUIRE(clnt_control(first, CLSET_PROG, (char *)&same) && clnt_control(first, CLSET_VERS, (char *)&version));
        REQUIRE(call(first, ECHO, 1, &unused, patient) == RPC_PROGVERSMISMATCH);
        clnt_geterr(first, &error);
        REQUIRE(error.re_vers.low == 1 && error.re_vers.high == 1);
        REQUIRE(clnt_control(first, CLSET_VERS, (char *)&one));
        struct caller *other = begin(PUT_OFF, round + 100);
        await(&is_inside);
        end(begin(ANSWER, 30)), end(late), end(other);
    }
    printf("ok    a request that was put off is answered behind calls of programs that are not there\n");
}

/* The same, while a thread answers at any time. */
static void unknown_meanwhile(void)
{
    u_int unused, program = PROG + 1, same = PROG;
    for (u_int round = 0; round < 500; round++) {
        struct caller *late = begin(LATER, round);
        await(&is_inside);
        REQUIRE(clnt_control(first, CLSET_PROG, (char *)&program));
        for (int i = 0; i < 3; i++)
            REQUIRE(call(first, ECHO, 1, &unused, patient) == RPC_PROGUNAVAIL);
        REQUIRE(clnt_control(first, CLSET_PROG, (char *)&same));
        end(late);
    }
    printf("ok    a thread answers a request beside calls of programs that are not there\n");
}

static void *finishes(void *unused)
{
    CLIENT *client = connected();
    ask(client, FINISH, 1);
    clnt_destroy(client);
    return unused;
}

/* A client that has connected meanwhile is accepted once, by the loop in the routine or by the one outside. */
static void accepts(void)
{
    pthread_t thread;
    CLIENT *older = connected();
    held = latest;
    CLIENT *newer = connected();
    struct caller *holds = begin_with(newer, HOLD, 1);
    await(&is_inside);
    struct caller *inner = begin_with(older, INNER, 2);
    REQUIRE(pthread_create(&thread, NULL, finishes, NULL) == 0);
    await(&is_inside);
    REQUIRE(pthread_join(thread, NULL) == 0);
    end(holds), end(inner);
    ask(first, ECHO, 3);
    printf("ok    a loop in a routine accepts who connects, and the one outside does not wait for another\n");
}

enum { MANY_MORE = 4000 };

static u_int memory(void)
{
    u_int bytes;
    REQUIRE(call(second, MEMORY, 0, &bytes, patient) == RPC_SUCCESS);
    return bytes;
}

/* Connections whose server has jumped out of a routine. The library may keep something of the latest thousand of them, since
 * requests that were put off may still be answered. */
static void leave_behind(u_int count)
{
    for (u_int i = 0; i < count; i++) {
        CLIENT *client = connected();
        send_only(client, SILENT);
        send_only(client, LEAVE);
        ask(client, ECHO, i);
        clnt_destroy(client);
    }
}

static void leaks(void)
{
    leave_behind(1500);
    u_int before = memory();
    leave_behind(MANY_MORE);
    int grown = (int)(memory() - before);
    /* The library's pools may have grown by a megabyte. */
    if (grown >= MANY_MORE * 500)
        errx(1, "%d connections have left %d bytes behind", MANY_MORE, grown);
    printf("ok    a jump out of a routine leaves no memory behind\n");
}

int main(int argc, char **argv)
{
    pthread_t thread;
    void (*only)(void) = NULL;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    REQUIRE(argc >= 2 && (netconfig = getnetconfigent(argv[1])) != NULL);
    for (int i = 2; i < argc; i++) {
        shared |= strcmp(argv[i], "shared") == 0;
        own_turns |= strcmp(argv[i], "turns") == 0;
        only = strcmp(argv[i], "again") == 0 ? again : strcmp(argv[i], "stops") == 0 ? stops
            : strcmp(argv[i], "leaks") == 0 ? leaks : only;
        inet_pton(AF_INET, argv[i], &address.sin_addr);
    }
    struct t_bind bind = {.addr = {sizeof address, sizeof address, &address}, .qlen = 64};
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, netconfig, &bind, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    known[knows++] = listener;
    address = *(struct sockaddr_in *)listener->xp_ltaddr.buf;
    sem_init(&is_inside, 0, 0), sem_init(&may_go_on, 0, 0), sem_init(&is_told, 0, 0), sem_init(&is_later, 0, 0);
    REQUIRE(pthread_create(&thread, NULL, run, NULL) == 0);
    REQUIRE(pthread_create(&thread, NULL, answers_later, NULL) == 0);
    first = connected(), second = connected();
    if (only != NULL) {
        only();
    } else {
        meet();
        nested();
        /* libtirpc's own loop may wait 35 s for what the loop in the routine has served. */
        if (strcmp(argv[1], "tcp") != 0)
            busy();
        unknown();
        if (address.sin_addr.s_addr == htonl(INADDR_LOOPBACK))
            accepts();
        else
            printf("skip  a loop in a routine accepts who connects (no listener tells of an adapter's connections)\n");
        if (shared) {
            unknown_meanwhile();
            xdrprocs();
            jumps();
        }
    }
    clnt_destroy(first), clnt_destroy(second);
    fflush(stdout);
    _exit(0);
}
