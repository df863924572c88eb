/* local_idle.c: what idle connections and long calls hold. See local.h. */
#define _GNU_SOURCE
#include "local.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static void resident(pid_t pid, long *rss, long *pss, long *shared)
{
    char path[64], line[256];
    *rss = *pss = *shared = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)pid);
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL) {
        sscanf(line, "Rss: %ld", rss);
        sscanf(line, "Pss: %ld", pss);
        sscanf(line, "Pss_Shmem: %ld", shared);
    }
    fclose(file);
}
struct figures {
    long rss, pss, shared, descriptors, mappings;
};
static struct figures figures(pid_t pid)
{
    struct figures figures;
    resident(pid, &figures.rss, &figures.pss, &figures.shared);
    figures.descriptors = descriptors(pid), figures.mappings = mappings(pid, false);
    return figures;
}

/* Makes its connections, reports that, and makes a long call each time it is asked to. */
static int idle_count, commands, outcomes;
static void be_idle(int port)
{
    struct timeval limit = {120, 0};
    char byte;
    CLIENT **all = calloc((size_t)idle_count, sizeof *all), *last = connected(port);
    REQUIRE(all != NULL);
    for (int stage = 0; read(commands, &byte, 1) == 1 && byte == 'c'; stage++) {
        for (int i = 0; stage == 0 && i < idle_count; i++) {
            all[i] = connected(port);
            REQUIRE(clnt_call(all[i], NOTHING, (xdrproc_t)(void (*)(void))xdr_void, NULL, (xdrproc_t)(void (*)(void))xdr_void,
                              NULL, limit) == RPC_SUCCESS);
        }
        for (int calls = stage == 1 ? 1 : stage == 2 ? 3 : 0; calls > 0; calls--) {
            struct data data = {64 << 20, malloc(64 << 20)};
            u_int length = 0;
            REQUIRE(data.bytes != NULL);
            memset(data.bytes, 0x77, data.length);
            if (clnt_call(last, SINK, (xdrproc_t)xdr_data, (char *)&data, (xdrproc_t)xdr_u_int, (char *)&length, limit) !=
                    RPC_SUCCESS ||
                length != data.length)
                errx(1, "64 MiB: %s", clnt_sperror(last, "call"));
            free(data.bytes);
        }
        if (stage == 3) {
            for (int i = 0; i < idle_count; i++)
                clnt_destroy(all[i]);
        }
        REQUIRE(write(outcomes, "", 1) == 1);
    }
}

void idle(int count)
{
    int to[2], from[2];
    char byte;
    struct rlimit limit;
    REQUIRE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    if ((rlim_t)count + 100 > limit.rlim_cur)
        count = (int)limit.rlim_cur - 100;
    setenv("RPCRDMA_MAX_CALL", "128M", 1);
    struct server server = start_server(be_server);
    idle_count = count;
    REQUIRE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    commands = to[0], outcomes = from[1];
    pid_t client = part(be_idle, server.port);
    close(from[1]);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(50), "an honest client calls");
    told->stop = true;
    REQUIRE(ends(honest, 60000));
    /* The server sees that end, and the client's one connection is there. */
    for (double until = now() + 10000 + patience(); now() < until;) {
        if (mappings(server.pid, true) == 2 && mappings(client, true) == 2)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    const struct {
        const char *who;
        pid_t pid;
    } both[] = {{"server", server.pid}, {"client", client}};
    struct figures before[2] = {figures(server.pid), figures(client)};
    static const char *const stages[] = {"idle connections", "idle connections, after a call of 64 MiB on one more",
                                         "idle connections, after three more in a row, and a while",
                                         "connections that have ended"};
    struct figures quiet[2] = {0};
    const long given_back = 16 << 10;
    for (int stage = 0; stage < 4; stage++) {
        REQUIRE(write(to[1], "c", 1) == 1 && read(from[0], &byte, 1) == 1);
        /* The server takes a moment to see so many connections end, to finish its last call, or to see that no more calls come. */
        for (double until = now() + 10000 + patience(); now() < until;) {
            bool ended = stage < 3 || descriptors(server.pid) <= before[0].descriptors;
            if (ended && (stage == 0 || figures(server.pid).rss - quiet[0].rss < given_back))
                break;
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        }
        for (int i = 0; i < 2; i++) {
            struct figures is = figures(both[i].pid);
            printf("      %d %s, %s: Rss %ld KiB (%+ld), Pss %ld (%+ld, %.1f each), of it shared %ld; %ld mappings (%+ld), %ld "
                   "descriptors (%+ld)\n",
                   count, stages[stage], both[i].who, is.rss, is.rss - before[i].rss, is.pss, is.pss - before[i].pss,
                   (double)(is.pss - before[i].pss) / count, is.shared, is.mappings, is.mappings - before[i].mappings,
                   is.descriptors, is.descriptors - before[i].descriptors);
            if (stage == 0)
                quiet[i] = is;
            else if (stage == 1 || (stage == 2 && i == 0))
                check(is.rss - quiet[i].rss < given_back, "%s: what %s of 64 MiB took is given back", both[i].who,
                      stage == 1 ? "a call" : "several calls");
        }
    }
    /* A descriptor that served the startup of the first connection may not have been closed before. */
    bool same = figures(server.pid).descriptors <= before[0].descriptors &&
                figures(client).descriptors <= before[1].descriptors && mappings(server.pid, true) + mappings(client, true) == 4;
    check(same, "what they hold afterwards is what they held");
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 60000 + patience()) && lives(server.pid), "%d connections are made, used and ended", count);
    end(server.pid);
}
