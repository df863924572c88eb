/* Forks at bad moments. A signal handler forks, as a daemon's may, in the midst of a routine that uses the heap. With one thread
 * that is allowed, so nothing that the library does at a fork may use the heap. And a server exits while its threads fork.
 * NETID: "rdma", or "tcp" without the library. "held": a server becomes a daemon while a thread of it sends a reply, over a
 * provider that sends with sendto(2) or sendmsg(2). */
#define _GNU_SOURCE
#include <err.h>
#include <netconfig.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpcrdma.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define REQUIRE(so)                                       \
    do {                                                  \
        if (!(so))                                        \
            errx(1, "handler: line %d: " #so, __LINE__);  \
    } while (0)

enum { PROG = 0x20004C91, VERS = 1, USE_HEAP = 1, EXIT, HOLD, DAEMON, IS_OPEN, END, DAEMON_ALONE, COUNT, SEND_SLOWLY, LEAVE_MAIN, IS_BLOCKED, FORKS = 2000, ROUNDS = 10, THREADS = 8 };

static bool_t xdr_nothing(XDR *xdr, ...)
{
    (void)xdr;
    return TRUE;
}

static volatile sig_atomic_t forks;

static void forks_once(int number)
{
    (void)number;
    if (forks++ >= FORKS)
        return;
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    if (child < 0 || waitpid(child, NULL, 0) != child)
        abort();
}

static sem_t has_forked;

static void *keeps_forking(void *unused)
{
    (void)unused;
    for (;;) {
        pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child)
            abort();
        sem_post(&has_forked);
    }
    return NULL;
}

/* For how many milliseconds a thread stays in its next send; or -1, for ever. */
static __thread int stays_in_send;
static sem_t is_in_send;

static void stay(void)
{
    int stays = stays_in_send;
    stays_in_send = 0;
    if (stays == 0)
        return;
    sem_post(&is_in_send);
    do
        poll(NULL, 0, stays);
    while (stays < 0);
}

/* The library's calls come here. */
ssize_t sendto(int fd, const void *bytes, size_t length, int flags, const struct sockaddr *to, socklen_t size)
{
    stay();
    return syscall(SYS_sendto, fd, bytes, length, flags, to, size);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    stay();
    return syscall(SYS_sendmsg, fd, message, flags);
}

/* Stays in it longer than a child waits for a lock that a thread of its parent may have. */
static void *sends_slowly(void *xprt)
{
    stays_in_send = 300;
    REQUIRE(svc_sendreply(xprt, xdr_nothing, NULL));
    return NULL;
}

static void become_daemon(void)
{
    if (fork() != 0)
        _exit(0);
    /* Also if the test fails. */
    alarm(120);
}

/* A thread that the library has started, not the one that called rpcrdma_svc_run, becomes a daemon: one, because two daemons could
 * not serve the same connections. */
static pthread_t main_thread;
static pid_t parent;
static pthread_mutex_t leaving = PTHREAD_MUTEX_INITIALIZER;

static void leave_main(void)
{
    if (pthread_equal(pthread_self(), main_thread))
        for (;;)
            pause();
    if (getpid() == parent && pthread_mutex_lock(&leaving) == 0)
        become_daemon();
}

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    if (request->rq_proc == USE_HEAP) {
        struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
        signal(SIGALRM, forks_once);
        REQUIRE(setitimer(ITIMER_REAL, &often, NULL) == 0);
        static void *volatile blocks[32];
        for (size_t round = 0; forks < FORKS; round++) {
            free(blocks[round % 32]);
            blocks[round % 32] = malloc(16 + round * 40 % 1000);
        }
        REQUIRE(setitimer(ITIMER_REAL, &never, NULL) == 0);
    }
    if (request->rq_proc == EXIT) {
        pthread_t thread;
        REQUIRE(sem_init(&has_forked, 0, 0) == 0);
        for (int i = 0; i < THREADS; i++)
            REQUIRE(pthread_create(&thread, NULL, keeps_forking, NULL) == 0);
        for (int i = 0; i < 4 * THREADS; i++)
            REQUIRE(sem_wait(&has_forked) == 0);
        REQUIRE(svc_sendreply(xprt, xdr_nothing, NULL));
        exit(0);
    }
    static int fd;
    static struct stat held;
    struct stat now;
    pthread_t thread;
    bool_t is_open = FALSE;
    u_int watched = 0, is_blocked;
    sigset_t mask;
    switch (request->rq_proc) {
    case HOLD:
        fd = xprt->xp_fd;
        REQUIRE(fstat(fd, &held) == 0);
        stays_in_send = -1;
        break;
    case DAEMON:
        REQUIRE(sem_wait(&is_in_send) == 0);
        become_daemon();
        break;
    case DAEMON_ALONE:
        become_daemon();
        break;
    case SEND_SLOWLY:
        REQUIRE(pthread_create(&thread, NULL, sends_slowly, xprt) == 0 && pthread_detach(thread) == 0);
        REQUIRE(sem_wait(&is_in_send) == 0);
        return;
    case LEAVE_MAIN:
        leave_main();
        break;
    case IS_BLOCKED:
        REQUIRE(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
        is_blocked = getpid() == parent ? 2 : (u_int)sigismember(&mask, SIGTERM);
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&is_blocked));
        return;
    case COUNT:
        for (int number = 0; number < FD_SETSIZE; number++)
            watched += FD_ISSET(number, &svc_fdset) != 0;
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&watched));
        return;
    case IS_OPEN:
        is_open = fstat(fd, &now) == 0 && now.st_ino == held.st_ino;
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_bool, (char *)&is_open));
        return;
    case END:
        _exit(0);
    }
    REQUIRE(svc_sendreply(xprt, xdr_nothing, NULL));
}

/* Has it served by another process. */
static pid_t served(void)
{
    pid_t server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        svc_run();
        _exit(0);
    }
    REQUIRE(server > 0);
    return server;
}

/* Ends the server of the client, which otherwise might accept the next one's connection: it has ended when the client's has. */
static void end(CLIENT *client)
{
    struct timeval patient = {60, 0}, now = {0, 0};
    clnt_call(client, END, xdr_nothing, NULL, xdr_nothing, NULL, now);
    while (clnt_call(client, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS)
        ;
}

/* The child cannot serve a connection that a thread which it does not have is in the midst of. */
static void held(const struct netconfig *netconfig, struct netbuf *to)
{
    struct timeval patient = {60, 0}, moment = {0, 50000}, now = {0, 0};
    REQUIRE(sem_init(&is_in_send, 0, 0) == 0);
    pid_t server = fork();
    if (server == 0) {
        REQUIRE(rpcrdma_svc_run(3));
        _exit(0);
    }
    CLIENT *held = clnt_tli_create(RPC_ANYFD, netconfig, to, PROG, VERS, 0, 0);
    CLIENT *other = clnt_tli_create(RPC_ANYFD, netconfig, to, PROG, VERS, 0, 0);
    REQUIRE(server > 0 && held != NULL && other != NULL);
    REQUIRE(clnt_call(held, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    REQUIRE(clnt_call(held, HOLD, xdr_nothing, NULL, xdr_nothing, NULL, now) == RPC_TIMEDOUT);
    REQUIRE(clnt_call(other, DAEMON, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    REQUIRE(waitpid(server, NULL, 0) == server);
    bool_t is_open = TRUE;
    for (int i = 0; i < 100 && is_open; i++) {
        /* Makes itself heard. */
        clnt_call(held, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, moment);
        REQUIRE(clnt_call(other, IS_OPEN, xdr_nothing, NULL, (xdrproc_t)xdr_bool, (char *)&is_open, patient) ==
                RPC_SUCCESS);
    }
    enum clnt_stat status = clnt_call(held, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient);
    end(other);
    REQUIRE(!is_open && (status == RPC_CANTSEND || status == RPC_CANTRECV));
    clnt_destroy(held);
    clnt_destroy(other);
    puts("ok    a daemon ends a connection that a thread of its parent was sending over");
}

/* Servers made by rpcgen count what is in svc_fdset to find out whether they are idle: here a listener and a connection, when what
 * its start was watched for is no longer there. */
static void count(CLIENT *client)
{
    struct timeval patient = {60, 0};
    u_int watched = 0;
    for (int i = 0; i < 5000 && watched != 2; i++) {
        REQUIRE(clnt_call(client, COUNT, xdr_nothing, NULL, (xdrproc_t)xdr_u_int, (char *)&watched, patient) == RPC_SUCCESS);
        poll(NULL, 0, 1);
    }
    if (watched != 2)
        errx(1, "handler: %u descriptors in svc_fdset", watched);
}

static void alone(const struct netconfig *netconfig, struct netbuf *to)
{
    struct timeval patient = {60, 0};
    pid_t server = served();
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, to, PROG, VERS, 0, 0);
    REQUIRE(client != NULL);
    count(client);
    REQUIRE(clnt_call(client, DAEMON_ALONE, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    REQUIRE(waitpid(server, NULL, 0) == server);
    count(client);
    end(client);
    clnt_destroy(client);
    puts("ok    a daemon serves a connection that it has inherited");
}

/* The loop waits for a lock that a thread of its own process holds. */
static void slowly(const struct netconfig *netconfig, struct netbuf *to)
{
    struct timeval patient = {60, 0};
    REQUIRE(sem_init(&is_in_send, 0, 0) == 0);
    pid_t server = served();
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, to, PROG, VERS, 0, 0);
    REQUIRE(client != NULL);
    REQUIRE(clnt_call(client, DAEMON_ALONE, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    REQUIRE(waitpid(server, NULL, 0) == server);
    REQUIRE(clnt_call(client, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    enum clnt_stat status = clnt_call(client, SEND_SLOWLY, xdr_nothing, NULL, xdr_nothing, NULL, patient);
    end(client);
    if (status != RPC_SUCCESS)
        errx(1, "handler: a reply of a daemon's thread: %s", clnt_sperrno(status));
    clnt_destroy(client);
    puts("ok    a daemon waits for its own threads");
}

static void masked(const struct netconfig *netconfig, struct netbuf *to)
{
    struct timeval patient = {60, 0}, now = {0, 0};
    u_int is_blocked = 2;
    pid_t server = fork();
    if (server == 0) {
        main_thread = pthread_self(), parent = getpid();
        REQUIRE(rpcrdma_svc_run(3));
        _exit(0);
    }
    CLIENT *clients[3];
    for (int i = 0; i < 3; i++) {
        clients[i] = clnt_tli_create(RPC_ANYFD, netconfig, to, PROG, VERS, 0, 0);
        REQUIRE(clients[i] != NULL);
        /* Not over the last one, which the daemon is to serve: the thread that has replied may still be in svc_sendreply. */
        REQUIRE(i == 2 || clnt_call(clients[i], NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    }
    for (int i = 0; i < 2; i++)
        clnt_call(clients[i], LEAVE_MAIN, xdr_nothing, NULL, xdr_nothing, NULL, now);
    REQUIRE(waitpid(server, NULL, 0) == server);
    REQUIRE(clnt_call(clients[2], IS_BLOCKED, xdr_nothing, NULL, (xdrproc_t)xdr_u_int, (char *)&is_blocked, patient) == RPC_SUCCESS);
    end(clients[2]);
    if (is_blocked != 0)
        errx(1, "handler: signals of a daemon: %u", is_blocked);
    for (int i = 0; i < 3; i++)
        clnt_destroy(clients[i]);
    puts("ok    a daemon takes signals, whichever thread has forked it");
}

int main(int argc, char **argv)
{
    int is_held = argc > 1 && strcmp(argv[1], "held") == 0;
    struct netconfig *netconfig = getnetconfigent(argc > 1 && !is_held ? argv[1] : "rdma");
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct t_bind bind = {{sizeof any, sizeof any, &any}, 8};
    REQUIRE(netconfig != NULL);
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, netconfig, &bind, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, VERS, serve, NULL));
    struct sockaddr_in address;
    memcpy(&address, listener->xp_ltaddr.buf, sizeof address);
    struct netbuf to = {sizeof address, sizeof address, &address};
    if (is_held) {
        held(netconfig, &to);
        slowly(netconfig, &to);
        masked(netconfig, &to);
        return 0;
    }
    alone(netconfig, &to);
    struct timeval patient = {120, 0};
    pid_t server = served();
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, VERS, 0, 0);
    REQUIRE(client != NULL);
    REQUIRE(clnt_call(client, USE_HEAP, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    REQUIRE(clnt_call(client, NULLPROC, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
    clnt_destroy(client);
    REQUIRE(kill(server, SIGKILL) == 0 && waitpid(server, NULL, 0) == server);
    puts("ok    the handler of a signal may fork in the midst of malloc");
    fflush(stdout);
    for (int round = 0; round < ROUNDS; round++) {
        server = served();
        client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, VERS, 0, 0);
        REQUIRE(client != NULL);
        REQUIRE(clnt_call(client, EXIT, xdr_nothing, NULL, xdr_nothing, NULL, patient) == RPC_SUCCESS);
        clnt_destroy(client);
        int status;
        REQUIRE(waitpid(server, &status, 0) == server && status == 0);
    }
    puts("ok    a server exits while its threads fork");
    return 0;
}
