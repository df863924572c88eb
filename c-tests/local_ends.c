/* local_ends.c: processes that are killed, and stopped. See local.h. */
#define _GNU_SOURCE
#include "local.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- Processes that are killed ------------------------------------------------------------------------------------ */

/* Waits until a random moment: in the startup, in the first calls, in the midst of later ones. `tried`: how many waits there
 * were before. */
static void wait_at_random(int tried)
{
    /* Waits longer if too few of the latest processes have got as far as a connection. */
    static unsigned slowness = 1;
    static unsigned long before;
    if (tried % 16 == 15) {
        slowness *= told->connected - before < 6 && slowness < 64 ? 2 : 1;
        before = told->connected;
    }
    /* Microseconds; on a busy machine everything comes later. */
    uint64_t most = (uint64_t)((below(4) == 0 ? 1.5 : 7.5) * patience()) * slowness;
    long wait = (long)(most > 999999 ? below(999999) : below(most + 1)) * 1000;
    nanosleep(&(struct timespec){.tv_nsec = wait}, NULL);
}

void kill_clients(int count)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20) && told->shared == 1, "an honest client calls over shared memory");
    struct held before = holds(server.pid);
    for (int i = 0; i < count; i++) {
        sow(seed, (uint64_t)i);
        pid_t victim = part(call_anyhow, server.port);
        wait_at_random(i);
        end(victim);
        if (!lives(server.pid) || !lives(honest))
            break;
    }
    printf("      %d clients were killed: %lu had connected, after %lu right answers\n", count, told->connected,
           told->answered);
    check(told->connected > (unsigned long)count / 4 && told->answered > (unsigned long)count / 4,
          "clients were killed in the midst of calls");
    check(lives(server.pid) && sees_answers(20), "the server lives, and serves");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + 10 * patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* Reads ports from `from`, a 0 being the last, and answers each with a byte when the server there has gone. */
static int answers, honest_port;
static void be_survivor(int from)
{
    pthread_t beside;
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    int port;
    REQUIRE(pthread_create(&beside, NULL, honest_thread, (void *)(intptr_t)honest_port) == 0);
    while (read(from, &port, sizeof port) == sizeof port && port != 0) {
        CLIENT *client = try_to_connect("127.0.0.1", port);
        if (client != NULL) {
            enum clnt_stat status = RPC_SUCCESS;
            told->connected++;
            while (status == RPC_SUCCESS) {
                bool right;
                status = echo(client, &buffers, &state, length_of_call(&state), 60000, &right);
                if (status == RPC_SUCCESS && !right)
                    errx(1, "a server that was killed has answered wrongly");
                told->answered += right;
            }
            clnt_destroy(client);
        }
        REQUIRE(write(answers, "", 1) == 1);
    }
    REQUIRE(pthread_join(beside, NULL) == 0);
}

void kill_servers(int count)
{
    int ports[2], done[2];
    struct server honest = start_server(be_server);
    honest_port = honest.port;
    REQUIRE(pipe2(ports, O_CLOEXEC) == 0 && pipe2(done, O_CLOEXEC) == 0);
    answers = done[1];
    pid_t client = part(be_survivor, ports[0]);
    close(done[1]);
    check(sees_answers(20) && told->shared == 1, "a client calls an honest server over shared memory");
    struct held before = holds(client);
    double longest = 0;
    bool all = true;
    for (int i = 0; i < count && all; i++) {
        sow(seed, (uint64_t)i);
        struct server server = start_server(be_server);
        REQUIRE(write(ports[1], &server.port, sizeof server.port) == sizeof server.port);
        wait_at_random(i);
        end(server.pid);
        double killed = now();
        struct pollfd seen = {.fd = done[0], .events = POLLIN};
        char byte;
        all = poll(&seen, 1, (int)(20000 + patience())) == 1 && read(done[0], &byte, 1) == 1;
        longest = now() - killed > longest ? now() - killed : longest;
        all = all && lives(client);
    }
    printf("      %d servers were killed: %lu connections, %lu right answers; the client knew after %.1f ms at most\n", count,
           told->connected, told->answered, longest);
    check(all && longest < 1000 + patience(), "a client knows soon that its server was killed");
    check(told->connected > (unsigned long)count / 4 && told->answered > (unsigned long)count / 4,
          "servers were killed in the midst of calls");
    check(lives(client) && sees_answers(20), "the client lives, and is served by others");
    holds_again(client, "the client", before);
    told->stop = true;
    REQUIRE(write(ports[1], &(int){0}, sizeof(int)) == sizeof(int));
    check(ends(client, 60000 + 10 * patience()), "every call to the honest server had the right answer");
    end(honest.pid);
}

/* ---- Processes that are stopped ----------------------------------------------------------------------------------- */

/* Returns when the process has stopped for certain. */
static void stop(pid_t pid)
{
    int status;
    REQUIRE(kill(pid, SIGSTOP) == 0 && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
}

static pid_t stopped_server;
static void be_patient(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    bool right;
    static const u_int lengths[] = {100, 300000};
    CLIENT *client = connected(port);
    for (int i = 0; i < 2; i++) {
        REQUIRE(echo(client, &buffers, &state, lengths[i], 60000, &right) == RPC_SUCCESS && right);
        REQUIRE(kill(stopped_server, SIGSTOP) == 0);
        double began = now();
        enum clnt_stat status = RPC_SUCCESS;
        /* An answer that was on its way already may still come. */
        while (status == RPC_SUCCESS && now() - began < 5000) {
            began = now();
            status = echo(client, &buffers, &state, lengths[i], 500, &right);
        }
        double took = now() - began;
        if (status != RPC_TIMEDOUT || took < 490 || took > 1500 + patience())
            errx(1, "a call of %u bytes to a stopped server took %.0f ms: %s", lengths[i], took, clnt_sperror(client, "call"));
        told->tried++;
        REQUIRE(kill(stopped_server, SIGCONT) == 0);
        /* The earlier call is answered late, and nobody takes the answer; the new call is answered. */
        if (echo(client, &buffers, &state, lengths[i], 60000, &right) != RPC_SUCCESS || !right)
            errx(1, "after a server was stopped: %s", clnt_sperror(client, "call"));
        told->answered++;
    }
    clnt_destroy(client);
}

void stopped(void)
{
    struct server server = start_server(be_server);
    stopped_server = server.pid;
    pid_t client = part(be_patient, server.port);
    check(ends(client, 30000 + 10 * patience()) && told->tried == 2,
          "calls to a stopped server end when their time is over");
    check(told->answered == 2, "when it goes on so do they");

    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    /* This client is stopped in the midst of calls, each of which has to be answered correctly nevertheless. */
    pid_t sleeper = part(be_honest, server.port);
    sow(seed, 3);
    bool others = true, again = true;
    for (int i = 0; i < 8; i++) {
        others = others && sees_answers(20);
        wait_at_random(0);
        stop(sleeper);
        others = others && sees_answers(100);
        kill(sleeper, SIGCONT);
    }
    told->stop = true;
    again = ends(sleeper, 60000 + 10 * patience());
    check(others, "a server whose client is stopped in the midst of calls serves others");
    check(again, "when it goes on its calls have the right answers");
    check(ends(honest, 60000 + 10 * patience()), "every call of the honest client had the right answer");
    end(server.pid);
}
