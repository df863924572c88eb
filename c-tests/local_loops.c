/* local_loops.c: what a server finds when it comes late to a request, and clients of a server whose loop is elsewhere. See
 * local.h. */
#define _GNU_SOURCE
#include "local.h"
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <rpcrdma.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- Long calls that are decoded late ----------------------------------------------------------------------------- */

static void be_hasty(int port)
{
    CLIENT *client = connected(port);
    char *bytes = malloc(LONGEST);
    REQUIRE(bytes != NULL);
    for (int i = 0; i < 120; i++) {
        struct data arguments = {LONGEST, bytes};
        u_int length = 0;
        /* Some calls are waited for, and others given up: before the server has seen them, or when it is about to decode them. */
        long milliseconds = i % 4 == 0 ? 60000 : (long)below(14) + 1;
        struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};
        memset(bytes, i + 1, LONGEST);
        enum clnt_stat status =
            clnt_call(client, LATE, (xdrproc_t)xdr_data, (char *)&arguments, (xdrproc_t)xdr_u_int, (char *)&length, limit);
        if (status == RPC_SUCCESS ? length != LONGEST : status != RPC_TIMEDOUT)
            errx(1, "call %d has status %d and length %u: %s", i, status, length, clnt_sperror(client, "call"));
        told->answered += status == RPC_SUCCESS;
        told->timed_out += status == RPC_TIMEDOUT;
        if (i % 10 == 9) {
            clnt_destroy(client);
            client = connected(port);
        }
    }
    clnt_destroy(client);
}
void outbox(void)
{
    struct server server = start_server(be_server);
    pid_t clients[] = {part(be_hasty, server.port), part(be_hasty, server.port)};
    check(ends(clients[0], 60000 + patience()) && ends(clients[1], 60000 + patience()),
          "clients whose long calls are answered, or given up, end well");
    check(told->answered >= 60 && told->timed_out >= 20, "there are many of both: %lu and %lu", told->answered,
          told->timed_out);
    check(told->mixed == 0 && told->whole >= told->answered,
          "the server has decoded %lu of them as they were sent, %lu not at all, and %lu as something else", told->whole,
          told->refused, told->mixed);
    end(server.pid);
}

/* ---- A loop that is elsewhere ------------------------------------------------------------------------------------- */

static const xdrproc_t nil = (xdrproc_t)(void (*)(void))xdr_void;
static jmp_buf left;
static CLIENT *back;
static atomic_bool sleeps;

/* A loop of the program's own. */
static void serve_for(double milliseconds)
{
    struct pollfd fds[64];
    for (double until = now() + milliseconds; now() < until;) {
        REQUIRE(svc_max_pollfd <= 64);
        memcpy(fds, svc_pollfd, (size_t)svc_max_pollfd * sizeof *fds);
        int ready = poll(fds, (nfds_t)svc_max_pollfd, 20);
        if (ready > 0)
            svc_getreq_poll(fds, ready);
    }
}
static void *call_back(void *unused)
{
    struct timeval limit = {2, 0};
    while (!sleeps)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    for (int i = 0; i < 5; i++)
        told->answered += clnt_call(back, NOTHING, nil, NULL, nil, NULL, limit) == RPC_SUCCESS;
    told->tried = 5;
    return unused;
}
void serve_elsewhere(rpcproc_t what, SVCXPRT *xprt)
{
    pthread_t thread;
    switch (what) {
    case NEST: serve_for(3000); break;
    case LEAVE: svc_sendreply(xprt, nil, NULL); longjmp(left, 1);
    case SLEEP:
        sleeps = true;
        for (double until = now() + 15000; told->tried == 0 && now() < until;)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        break;
    case CALL_BACK:
        REQUIRE((back = rpcrdma_clnt_reverse(xprt, PROG, 1)) != NULL);
        REQUIRE(pthread_create(&thread, NULL, call_back, NULL) == 0);
        break;
    default: break;
    }
}

/* Serves the same program over TCP too, and goes on when a routine leaves its loop. */
static void be_elsewhere(int to)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    SVCXPRT *listener = svctcp_create(RPC_ANYSOCK, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    told->tcp_port = ntohs(address.sin_port);
    if (setjmp(left) == 0)
        be_server(to);
    for (;;)
        serve_for(1000);
}

static void answer_back(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    svc_sendreply(xprt, nil, NULL);
}
/* Calls without a pause, and serves calls back meanwhile. Records in told->late how long the longest call took. */
static void be_busy(int port)
{
    struct timeval limit = {60, 0};
    CLIENT *client = connected(port);
    REQUIRE(rpcrdma_clnt_serve(client, PROG, 1, answer_back));
    for (bool first = true; !told->stop; first = false) {
        double began = now();
        if (clnt_call(client, first ? CALL_BACK : NOTHING, nil, NULL, nil, NULL, limit) != RPC_SUCCESS)
            errx(1, "%s", clnt_sperror(client, "call"));
        raise_to(&told->late, (now() - began) * 1000);
        told->right++;
    }
    clnt_destroy(client);
}
static int what_else;
static void be_other(int port)
{
    struct sockaddr_in server = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval limit = {60, 0};
    int fd = RPC_ANYSOCK;
    CLIENT *client = port == told->tcp_port ? clnttcp_create(&server, PROG, 1, &fd, 0, 0) : connected(port);
    REQUIRE(client != NULL);
    REQUIRE(clnt_call(client, (rpcproc_t)what_else, nil, NULL, nil, NULL, limit) == RPC_SUCCESS);
    clnt_destroy(client);
}

void elsewhere(void)
{
    static const struct {
        int what;
        bool tcp;
        const char *text;
    } cases[] = {{NEST, false, "another loop in a routine"}, {NEST, true, "another loop in a routine of a TCP transport"},
                 {LEAVE, false, "another loop when a routine has left the first"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct server server = start_server(be_elsewhere);
        told->stop = false;
        pid_t busy = part(be_busy, server.port);
        check(sees_answers(500), "a client calls without a pause");
        told->late = 0;
        what_else = cases[i].what;
        pid_t other = part(be_other, cases[i].tcp ? told->tcp_port : server.port);
        bool ended = ends(other, 30000 + patience());
        nanosleep(&(struct timespec){.tv_sec = 1}, NULL);
        unsigned long since = told->right;
        check(ended && sees_answers(100) && told->late < 1500000, "it is heard by %s: after %.1f ms at most, %lu calls",
              cases[i].text, (double)told->late / 1000, since);
        told->stop = true;
        check(ends(busy, 70000), "its calls are answered");
        end(server.pid);
    }
    /* Whether the loop was about to look is a matter of chance. */
    for (int i = 0; i < 8; i++) {
        struct server server = start_server(be_elsewhere);
        told->stop = false;
        told->tried = told->answered = 0;
        pid_t busy = part(be_busy, server.port);
        bool good = sees_answers(500);
        what_else = SLEEP;
        pid_t other = part(be_other, told->tcp_port);
        good = ends(other, 30000 + patience()) && good;
        told->stop = true;
        good = ends(busy, 70000) && good && told->answered == told->tried;
        end(server.pid);
        if (!good || i == 7)
            check(good, "calls back of a thread are answered while a TCP transport keeps the loop: %lu of %lu", told->answered,
                  told->tried);
        if (!good)
            break;
    }
}
