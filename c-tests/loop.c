/* svc_run(): the library's does whatever libtirpc's own does, over any netid.
 *
 *   loop NETID [own [many]]     own: the library's svc_run is in the process; many: it has more than a few transports
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netconfig.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROG = 0x20004C50 };
/* Procedures. Those from MUTE to PUT_FILE do something to the connection that REMEMBER has recorded. */
enum { NOTHING, EXIT, FORK, REMEMBER, MUTE, UNMUTE, CLOSE, PUT_FILE, LISTEN };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0}, soon = {0, 300000};
static const char *netid;
static bool own;
/* Listeners besides the one that is called. */
static int others;

/* ---- The server -------------------------------------------------------------------------------------------------- */

static SVCXPRT *remembered;
static int place = -1;
static SVCXPRT *listener(void);
static unsigned port_of(SVCXPRT *made);

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    unsigned made = 0;
    switch (request->rq_proc) {
    case EXIT:
        svc_exit();
        break;
    case FORK: {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            /* The child leaves the connection to its parent, and goes on in the loop with the listener. */
            xprt_unregister(xprt);
            return;
        }
        break;
    }
    case REMEMBER:
        remembered = xprt;
        break;
    case MUTE:
        for (place = 0; svc_pollfd[place].fd != remembered->xp_fd; place++)
            REQUIRE(place < svc_max_pollfd);
        svc_pollfd[place].fd = -1;
        break;
    case UNMUTE:
        REQUIRE(svc_pollfd[place].fd == -1);
        svc_pollfd[place].fd = remembered->xp_fd;
        break;
    case CLOSE:
        REQUIRE(close(remembered->xp_fd) == 0);
        break;
    case PUT_FILE:
        for (place = 0; svc_pollfd[place].fd != -1; place++)
            REQUIRE(place < svc_max_pollfd);
        svc_pollfd[place] = (struct pollfd){.fd = open("/proc/self/exe", O_RDONLY), .events = POLLIN};
        break;
    case LISTEN:
        made = port_of(listener());
        break;
    }
    REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&made));
}

static struct netconfig *config(void)
{
    struct netconfig *found = getnetconfigent(netid);
    if (found == NULL)
        errx(1, "no such netid: %s", netid);
    return found;
}

static SVCXPRT *listener(void)
{
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct t_bind bound = {.addr = {sizeof any, sizeof any, &any}, .qlen = 64};
    SVCXPRT *made = svc_tli_create(RPC_ANYFD, config(), &bound, 0, 0);
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
static void nothing(int signal)
{
    (void)signal;
}

static unsigned port;

static void tell(unsigned number)
{
    REQUIRE(write(STDOUT_FILENO, &number, sizeof number) == sizeof number);
}

/* How the server of a test runs once it listens. */
static void just_run(void)
{
    svc_run();
}
static void run_with_handlers(void)
{
    REQUIRE(signal(SIGUSR1, nothing) != SIG_ERR && signal(SIGUSR2, svc_exits) != SIG_ERR);
    svc_run();
}
static void *run_in_thread(void *unused)
{
    svc_run();
    return unused;
}
/* A loop that sleeps is cancelled, and the next one goes on. */
static void run_twice(void)
{
    pthread_t thread;
    void *result;
    REQUIRE(pthread_create(&thread, NULL, run_in_thread, NULL) == 0);
    usleep(100000);
    REQUIRE(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    tell(port);
    svc_run();
}
/* Another thread creates a listener while the loop sleeps, and prints its port on standard output. */
static void run_beside_a_thread_that_listens(void)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, run_in_thread, NULL) == 0);
    usleep(100000);
    tell(port_of(listener()));
    REQUIRE(pthread_join(thread, NULL) == 0);
}

static void *exits_soon(void *unused)
{
    usleep(300000);
    svc_exit();
    return unused;
}
/* Several threads are in the loop when another one ends it. */
static void run_in_several(void)
{
    pthread_t threads[5];
    for (int i = 0; i < 5; i++)
        REQUIRE(pthread_create(&threads[i], NULL, i < 4 ? run_in_thread : exits_soon, NULL) == 0);
    for (int i = 0; i < 5; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
}
/* Another thread ends a loop that had no descriptor left for anything. */
static void run_without_descriptors(void)
{
    pthread_t thread;
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = 64;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0 && pthread_create(&thread, NULL, exits_soon, NULL) == 0);
    while (open("/dev/null", O_RDONLY) >= 0)
        ;
    svc_run();
}

/* ---- The clients ------------------------------------------------------------------------------------------------- */

static pid_t server;
static int from_server;

static unsigned told(void)
{
    unsigned number;
    REQUIRE(read(from_server, &number, sizeof number) == sizeof number);
    return number;
}

static CLIENT *connected(void)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf address = {sizeof to, sizeof to, &to};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, config(), &address, PROG, 1, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    return client;
}

static enum clnt_stat ask_within(CLIENT *client, rpcproc_t procedure, struct timeval time)
{
    unsigned unused;
    return clnt_call(client, procedure, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_u_int, (char *)&unused, time);
}
static void ask(CLIENT *client, rpcproc_t procedure)
{
    if (ask_within(client, procedure, patient) != RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "procedure"));
}
static bool is_served(CLIENT *client)
{
    return ask_within(client, NOTHING, soon) == RPC_SUCCESS;
}

static void starts(void (*run)(void))
{
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    server = fork();
    REQUIRE(server >= 0);
    if (server == 0) {
        REQUIRE(dup2(ends[1], STDOUT_FILENO) >= 0 && close(ends[0]) == 0 && close(ends[1]) == 0);
        for (int i = 0; i < others; i++)
            listener();
        tell(port = port_of(listener()));
        run();
        _exit(0);
    }
    REQUIRE(close(ends[1]) == 0);
    from_server = ends[0];
    port = told();
}
static void has_ended(void)
{
    int status;
    REQUIRE(waitpid(server, &status, 0) == server && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    REQUIRE(close(from_server) == 0);
}

static void a_routine_ends_it(void)
{
    starts(just_run);
    ask(connected(), EXIT);
    has_ended();
}

static void a_handler_ends_it_and_other_signals_do_not(void)
{
    starts(run_with_handlers);
    CLIENT *client = connected();
    for (int i = 0; i < 10; i++) {
        ask(client, NOTHING);
        usleep(1000);
        REQUIRE(kill(server, SIGUSR1) == 0);
    }
    ask(client, NOTHING);
    /* The loop sleeps by then, or looks at what svc_exit(3) leaves before it sleeps. */
    usleep(100000);
    REQUIRE(kill(server, SIGUSR2) == 0);
    has_ended();
}

/* Beside `idle` other connections. */
static void muted_by_hand(int idle)
{
    starts(just_run);
    CLIENT *client = connected(), *other = connected();
    ask(other, REMEMBER);
    for (int i = 0; i < idle; i++)
        ask(connected(), NOTHING);
    for (int i = 0; i < 3; i++) {
        ask(client, MUTE);
        REQUIRE(!is_served(other));
        ask(client, UNMUTE);
        ask(other, NOTHING);
    }
    ask(client, EXIT);
    has_ended();
}
static void who_is_taken_out_of_the_table_by_hand_is_not_served(void) { muted_by_hand(0); }
static void the_same_in_a_long_table(void)
{
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max < 4096 ? limit.rlim_max : 4096;
    REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    muted_by_hand(limit.rlim_cur < 4096 ? 300 : 1200);
}

static void one_that_is_closed_by_hand_keeps_nobody_from_being_served(void)
{
    starts(just_run);
    CLIENT *client = connected(), *other = connected();
    ask(other, REMEMBER);
    ask(client, CLOSE);
    ask(client, NOTHING);
    /* The descriptor's number is now that of another connection. */
    CLIENT *next = connected();
    ask(next, NOTHING);
    ask(next, NOTHING);
    ask(client, EXIT);
    has_ended();
}

static void a_file_in_the_table_keeps_nobody_from_being_served(void)
{
    starts(just_run);
    CLIENT *client = connected(), *other = connected();
    ask(other, NOTHING);
    clnt_destroy(other);
    /* Until the connection has its place back. */
    for (int i = 0; i < 100; i++)
        ask(client, NOTHING);
    ask(client, PUT_FILE);
    ask(client, NOTHING);
    ask(connected(), NOTHING);
    ask(client, EXIT);
    has_ended();
}

static void a_forked_child_goes_on_in_the_loop(void)
{
    starts(just_run);
    CLIENT *client = connected();
    ask(client, FORK);
    ask(client, NOTHING);
    ask(client, EXIT);
    has_ended();
    client = connected();
    ask(client, NOTHING);
    ask(client, EXIT);
}

static void a_routine_makes_a_listener(void)
{
    starts(just_run);
    CLIENT *client = connected();
    REQUIRE(clnt_call(client, LISTEN, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_u_int, (char *)&port, patient) ==
            RPC_SUCCESS);
    ask(connected(), NOTHING);
    ask(client, EXIT);
    has_ended();
}

static void a_thread_that_sleeps_in_it_can_be_cancelled(void)
{
    starts(run_twice);
    told();
    CLIENT *client = connected();
    ask(client, NOTHING);
    ask(client, EXIT);
    has_ended();
}

/* libtirpc's svc_run() only looks at what is registered when it wakes for something else. */
static void another_thread_makes_a_listener(void)
{
    if (!own)
        return;
    starts(run_beside_a_thread_that_listens);
    port = told();
    CLIENT *client = connected();
    ask(client, NOTHING);
    ask(client, EXIT);
    has_ended();
}

static void all_loops_end(void)
{
    if (!own)
        return;
    starts(run_in_several);
    has_ended();
}
static void one_without_descriptors_ends_too(void)
{
    if (!own)
        return;
    starts(run_without_descriptors);
    has_ended();
}

static const struct test {
    const char *name;
    void (*run)(void);
} tests[] = {
#define TEST(name) {#name, name}
    TEST(a_routine_ends_it),
    TEST(a_handler_ends_it_and_other_signals_do_not),
    TEST(who_is_taken_out_of_the_table_by_hand_is_not_served),
    TEST(the_same_in_a_long_table),
    TEST(one_that_is_closed_by_hand_keeps_nobody_from_being_served),
    TEST(a_file_in_the_table_keeps_nobody_from_being_served),
    TEST(a_forked_child_goes_on_in_the_loop),
    TEST(a_routine_makes_a_listener),
    TEST(a_thread_that_sleeps_in_it_can_be_cancelled),
    TEST(another_thread_makes_a_listener),
    TEST(all_loops_end),
    TEST(one_without_descriptors_ends_too),
};

int main(int argc, char **argv)
{
    REQUIRE(argc >= 2);
    netid = argv[1], own = argc > 2, others = argc > 3 ? 20 : 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    int failed = 0;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        pid_t child = fork();
        int status;
        REQUIRE(child >= 0);
        if (child == 0) {
            REQUIRE(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
            alarm(120);
            tests[i].run();
            _exit(0);
        }
        REQUIRE(waitpid(child, &status, 0) == child);
        bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        failed += !good;
        char name[128];
        strncpy(name, tests[i].name, sizeof name - 1);
        name[sizeof name - 1] = 0;
        for (char *c = name; *c; c++)
            *c = *c == '_' ? ' ' : *c;
        printf("%s%s\n", good ? "ok    " : "FAIL  ", name);
    }
    return failed > 0;
}
