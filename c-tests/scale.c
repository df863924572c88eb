/* Many idle connections: what they cost the server of bench.c, and the one client that calls.
 *
 *   scale idle NETID PORT PID COUNT    COUNT connections that have made a call, beside one that calls. Prints, in this
 *       order: the microseconds of a null call alone, beside them, and after they are gone; those of connecting with a first
 *       call, and of closing; the server's resident KiB alone, beside them, and after they are gone; its mappings, likewise.
 *   scale silent NETID PORT PID COUNT  TCP connections that say nothing, and a fifth as many that send one byte. Prints the same
 *       three times of a null call, and whether the server has closed all of them within 20 seconds: 1 or 0.
 *   scale full NETID PORT PID COUNT    COUNT connections to a server that has fewer descriptors: prints how many of them it
 *       serves, and how many when half of these are gone.
 */
#include <arpa/inet.h>
#include <err.h>
#include <netconfig.h>
#include <poll.h>
#include <rpc/rpc.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PROGRAM = 0x20004245, VERSION = 1, ROUNDS = 5, CALLS = 1000 };

static struct netconfig *config;
static struct sockaddr_in server = {.sin_family = AF_INET};
static const char *pid;

/* Microseconds. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static CLIENT *try_to_connect(void)
{
    struct netbuf address = {sizeof server, sizeof server, &server};
    return clnt_tli_create(RPC_ANYFD, config, &address, PROGRAM, VERSION, 0, 0);
}

static bool try_to_call(CLIENT *client, time_t seconds)
{
    struct timeval timeout = {.tv_sec = seconds};
    return clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout) == RPC_SUCCESS;
}

static void call(CLIENT *client)
{
    if (!try_to_call(client, 60))
        errx(1, "%s", clnt_sperror(client, "call"));
}

static CLIENT *connected(void)
{
    CLIENT *client = try_to_connect();
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("connect"));
    call(client);
    return client;
}

static int compare(const void *a, const void *b)
{
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

/* The best of several medians: others use the machine too. */
static double latency(CLIENT *client)
{
    static double times[CALLS];
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < CALLS; i++) {
            double before = now();
            call(client);
            times[i] = now() - before;
        }
        qsort(times, CALLS, sizeof *times, compare);
        best = times[CALLS / 2] < best ? times[CALLS / 2] : best;
    }
    return best;
}

static FILE *file_of(const char *name)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/%s", pid, name);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        err(1, "%s", path);
    return file;
}

static long resident(void)
{
    char line[256];
    long kib = 0;
    FILE *file = file_of("smaps_rollup");
    while (fgets(line, sizeof line, file) != NULL)
        sscanf(line, "Rss: %ld", &kib);
    fclose(file);
    return kib;
}

static long mappings(void)
{
    char line[512];
    long count = 0;
    FILE *file = file_of("maps");
    while (fgets(line, sizeof line, file) != NULL)
        count++;
    fclose(file);
    return count;
}

static void idle(int count)
{
    CLIENT *one = connected(), **all = calloc((size_t)count, sizeof(CLIENT *));
    double times[3], connects, closes;
    long kib[3], maps[3];
    if (all == NULL)
        err(1, "calloc");
    for (int stage = 0; stage < 3; stage++) {
        double before = now();
        for (int i = 0; i < count; i++) {
            if (stage == 1)
                all[i] = connected();
            else if (stage == 2)
                clnt_destroy(all[i]);
        }
        *(stage == 1 ? &connects : &closes) = (now() - before) / count;
        /* When this is answered, everything that came before has been dealt with. */
        call(one);
        times[stage] = latency(one), kib[stage] = resident(), maps[stage] = mappings();
    }
    printf("%.1f %.1f %.1f %.1f %.1f %ld %ld %ld %ld %ld %ld\n", times[0], times[1], times[2], connects, closes, kib[0],
           kib[1], kib[2], maps[0], maps[1], maps[2]);
    clnt_destroy(one);
    free(all);
}

static int raw(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&server, sizeof server) < 0)
        err(1, "connect");
    return fd;
}

static void silent(int count)
{
    int all = count + count / 5;
    int *fds = calloc((size_t)all, sizeof *fds);
    CLIENT *one = connected();
    double times[3] = {latency(one)};
    if (fds == NULL)
        err(1, "calloc");
    for (int i = 0; i < all; i++) {
        fds[i] = raw();
        if (i >= count && send(fds[i], "M", 1, MSG_NOSIGNAL) != 1)
            err(1, "send");
    }
    times[1] = latency(one);
    clnt_destroy(connected());
    int closed = 0;
    double until = now() + 20e6;
    for (; closed < all; closed++) {
        struct pollfd end = {.fd = fds[closed], .events = POLLIN};
        double left = until - now();
        if (poll(&end, 1, left > 0 ? (int)(left / 1e3) : 0) != 1)
            break;
    }
    for (int i = 0; i < all; i++)
        close(fds[i]);
    call(one);
    times[2] = latency(one);
    printf("%.1f %.1f %.1f %d\n", times[0], times[1], times[2], closed == all);
    clnt_destroy(one);
    free(fds);
}

/* How many of them the server serves; the others are given up. */
static int served(CLIENT **all, int count)
{
    int found = 0;
    for (int i = 0; i < count; i++) {
        if (all[i] == NULL && (all[i] = try_to_connect()) != NULL && !try_to_call(all[i], 1)) {
            clnt_destroy(all[i]);
            all[i] = NULL;
        }
        if (all[i] == NULL)
            break;
        found++;
    }
    return found;
}

static void full(int count)
{
    CLIENT *one = connected(), **all = calloc((size_t)count, sizeof(CLIENT *));
    if (all == NULL)
        err(1, "calloc");
    int first = served(all, count);
    call(one);
    for (int i = 0; i < first / 2; i++) {
        clnt_destroy(all[i]);
        all[i] = NULL;
    }
    call(one);
    printf("%d %d\n", first, served(all, first));
    for (int i = 0; i < first; i++)
        if (all[i] != NULL)
            call(all[i]);
    free(all);
}

int main(int argc, char **argv)
{
    if (argc != 6)
        errx(2, "usage: see the first lines of scale.c");
    config = getnetconfigent(argv[2]);
    if (config == NULL)
        errx(1, "no such netid: %s", argv[2]);
    server.sin_port = htons((uint16_t)atoi(argv[3]));
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    pid = argv[4];
    int count = atoi(argv[5]);
    if (strcmp(argv[1], "idle") == 0)
        idle(count);
    else if (strcmp(argv[1], "silent") == 0)
        silent(count);
    else
        full(count);
    return 0;
}
