/* local.c: a test of the local provider: what its processes have in common, and the parts that any of them may play. See local.h.
 *
 *   local random-client SECONDS SEED   a client rewrites what it shares with a server, at random
 *   local random-server SECONDS SEED   a server does
 *   local kill-clients COUNT SEED      clients are killed at random moments
 *   local kill-servers COUNT SEED      servers are
 *   local stopped                      either end is stopped
 *   local handshake-client             other processes send something to the name at which a client waits
 *   local another-users                another user's process does, which knows the client's secret
 *   local handshake-server             a client answers a server's offer wrongly
 *   local silent-server                the same, and with nothing at all: takes ten seconds
 *   local segment                      what a peer cannot do with the segment that it got
 *   local outbox                       long calls that their client gives up before the server decodes them
 *   local elsewhere                    a server that runs another loop, stays in a routine, or has left its loop
 *   local idle COUNT                   figures: with COUNT idle connections, and after a call of 64 MiB
 *   local server                       prints "READY port", and serves
 *   local client ADDRESS PORT          makes calls; prints "memory" or "no memory" for what they went through, and the error
 *
 * Linked with the library. PATIENCE: by how many seconds anything may take longer than on an idle machine (2). NO_SEGMENTS: what
 * peers write cannot be mapped. */
#define _GNU_SOURCE
#include "local.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netconfig.h>
#include <poll.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GUARD = 4096, CALL_TIME = 300 };

struct told *told;
static int failed;

void __attribute__((format(printf, 2, 3))) check(bool good, const char *format, ...)
{
    va_list values;
    failed += !good;
    printf("%s ", good ? "ok   " : "FAIL ");
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    putchar('\n');
}

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

double patience(void)
{
    const char *seconds = getenv("PATIENCE");
    return 1000.0 * (seconds != NULL ? atof(seconds) : 2);
}

uint64_t seed = 1;
uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}
uint64_t below(uint64_t limit) { return next_random(&seed) % limit; }
/* Each process has its own. */
void sow(uint64_t from, uint64_t part)
{
    seed = from * 0x9E3779B97F4A7C15 + part * 0xD1342543DE82EF95 + 1;
    for (int i = 0; i < 8; i++)
        next_random(&seed);
}

void raise_to(atomic_ulong *most, double value)
{
    unsigned long was = atomic_load(most), is = value > 0 ? (unsigned long)value : 0;
    while (was < is && !atomic_compare_exchange_weak(most, &was, is))
        ;
}

/* ---- Processes ---------------------------------------------------------------------------------------------------- */

pid_t part(void (*run)(int), int argument)
{
    pid_t parent = getpid(), child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        run(argument);
        fflush(stdout);
        _exit(0);
    }
    return child;
}

void end(pid_t pid)
{
    kill(pid, SIGKILL);
    kill(pid, SIGCONT);
    waitpid(pid, NULL, 0);
}

bool lives(pid_t pid)
{
    siginfo_t ended = {0};
    return waitid(P_PID, (id_t)pid, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid == 0;
}

bool ends(pid_t pid, double milliseconds)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0), status = 0;
    REQUIRE(fd >= 0);
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    bool in_time = poll(&ended, 1, (int)milliseconds) == 1;
    close(fd);
    if (!in_time)
        kill(pid, SIGKILL);
    REQUIRE(waitpid(pid, &status, 0) == pid);
    if (in_time && status != 0)
        warnx("a process has ended with status 0x%x", (unsigned)status);
    return in_time && status == 0;
}

static int entries(pid_t pid, const char *what)
{
    char path[64];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, what);
    DIR *folder = opendir(path);
    if (folder == NULL)
        err(1, "%s of a process that has ended?", path);
    while (readdir(folder) != NULL)
        count++;
    closedir(folder);
    return count - 2;
}
int descriptors(pid_t pid) { return entries(pid, "fd"); }

int mappings(pid_t pid, bool ours)
{
    char path[64], line[4352];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "r");
    REQUIRE(file != NULL);
    while (fgets(line, sizeof line, file) != NULL)
        count += !ours || strstr(line, "memfd:rpcrdma (") != NULL;
    fclose(file);
    return count;
}

struct held holds(pid_t pid)
{
    return (struct held){descriptors(pid), mappings(pid, true), mappings(pid, false)};
}

/* Whether a process comes to hold what it held before: cleaning up after its peers' ends takes a moment. The heap and its arenas
 * may have grown. */
bool holds_again(pid_t pid, const char *who, struct held before)
{
    double until = now() + 5 * patience();
    struct held after;
    do {
        after = holds(pid);
        if (after.descriptors == before.descriptors && after.segments == before.segments &&
            after.mappings <= before.mappings + 8)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    } while (now() < until);
    bool same = after.descriptors == before.descriptors && after.segments == before.segments &&
                after.mappings <= before.mappings + 8;
    check(same, "%s holds what it held: %d descriptors and %d, %d segments and %d, %d mappings and %d", who,
          before.descriptors, after.descriptors, before.segments, after.segments, before.mappings, after.mappings);
    return same;
}

/* ---- Servers ------------------------------------------------------------------------------------------------------ */

bool_t xdr_data(XDR *xdrs, struct data *data) { return xdr_bytes(xdrs, &data->bytes, &data->length, 65 << 20); }

/* Its client may have given the call up by now, and something else may lie in its place. */
static void note_late(const struct data *data, bool decoded)
{
    bool alike = decoded && data->length == LONGEST && memcmp(data->bytes, data->bytes + 1, LONGEST - 1) == 0;
    (alike ? &told->whole : decoded ? &told->mixed : &told->refused)[0]++;
}

void serve(struct svc_req *request, SVCXPRT *xprt)
{
    struct data data = {0};
    if (request->rq_proc == NOTHING || request->rq_proc >= NEST) {
        serve_elsewhere(request->rq_proc, xprt);
        svc_sendreply(xprt, (xdrproc_t)(void (*)(void))xdr_void, NULL);
        return;
    }
    if (request->rq_proc == LATE)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    bool decoded = svc_getargs(xprt, (xdrproc_t)xdr_data, (char *)&data);
    if (request->rq_proc == LATE)
        note_late(&data, decoded);
    if (!decoded)
        svcerr_decode(xprt);
    else if (request->rq_proc == ECHO)
        svc_sendreply(xprt, (xdrproc_t)xdr_data, (char *)&data);
    else
        svc_sendreply(xprt, (xdrproc_t)xdr_u_int, (char *)&data.length);
    svc_freeargs(xprt, (xdrproc_t)xdr_data, (char *)&data);
}

void be_server(int to)
{
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    REQUIRE(listener != NULL && svc_reg(listener, PROG, 1, serve, NULL));
    REQUIRE(getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) == 0);
    int port = ntohs(address.sin_port);
    if (to == 1) {
        printf("READY %d\n", port);
        fflush(stdout);
    } else {
        REQUIRE(write(to, &port, sizeof port) == sizeof port);
        close(to);
    }
    svc_run();
}

struct server start_server(void (*run)(int))
{
    int ends[2];
    struct server server;
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    server.pid = part(run, ends[1]);
    close(ends[1]);
    REQUIRE(read(ends[0], &server.port, sizeof server.port) == sizeof server.port);
    close(ends[0]);
    return server;
}

/* ---- Clients ------------------------------------------------------------------------------------------------------ */

CLIENT *try_to_connect(const char *address, int port)
{
    struct sockaddr_in server = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    struct netbuf to = {sizeof server, sizeof server, &server};
    REQUIRE(inet_pton(AF_INET, address, &server.sin_addr) == 1);
    struct netconfig *netconfig = getnetconfigent("rdma");
    REQUIRE(netconfig != NULL);
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &to, PROG, 1, 0, 0);
    freenetconfigent(netconfig);
    return client;
}
CLIENT *connected(int port)
{
    CLIENT *client = try_to_connect("127.0.0.1", port);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("an honest client cannot connect"));
    return client;
}

struct buffers make_buffers(void)
{
    struct buffers buffers = {malloc(LONGEST), malloc(GUARD + LONGEST + GUARD)};
    REQUIRE(buffers.sent != NULL && buffers.guarded != NULL);
    memset(buffers.guarded, 0x6b, GUARD + LONGEST + GUARD);
    return buffers;
}
static bool guarded(const struct buffers *buffers, u_int length)
{
    for (int i = 0; i < GUARD; i++)
        if (buffers->guarded[i] != 0x6b)
            return false;
    /* Between the results and the guard behind them lie results of earlier calls. */
    for (u_int i = GUARD + LONGEST; i < GUARD + LONGEST + GUARD; i++)
        if (buffers->guarded[i] != 0x6b)
            return false;
    return length <= LONGEST;
}

u_int length_of_call(uint64_t *state)
{
    /* When two long calls follow each other, the second one goes by the outbox. */
    static const u_int lengths[] = {0, 1, 100, 1000, 4096, 60000, 70000, 300000, 300001, 500000, LONGEST - 3, LONGEST};
    return lengths[next_random(state) % (sizeof lengths / sizeof *lengths)];
}

enum clnt_stat echo(CLIENT *client, struct buffers *buffers, uint64_t *state, u_int length, long milliseconds,
                           bool *right)
{
    for (u_int i = 0; i < length; i += 64) {
        uint64_t number = next_random(state);
        memcpy(buffers->sent + i, &number, length - i < 8 ? length - i : 8);
    }
    struct data arguments = {length, buffers->sent}, results = {LONGEST, buffers->guarded + GUARD};
    struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};
    double began = now();
    enum clnt_stat status =
        clnt_call(client, ECHO, (xdrproc_t)xdr_data, (char *)&arguments, (xdrproc_t)xdr_data, (char *)&results, limit);
    raise_to(&told->late, (now() - began - (double)milliseconds) * 1000);
    if (!guarded(buffers, 0))
        errx(1, "bytes beside the results of a call were written");
    *right = status == RPC_SUCCESS && results.length == length && results.bytes == buffers->guarded + GUARD &&
             memcmp(results.bytes, arguments.bytes, length) == 0;
    return status;
}

void be_honest(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    CLIENT *client = connected(port);
    for (bool first = true; !told->stop; first = false) {
        bool right;
        u_int length = length_of_call(&state);
        enum clnt_stat status = echo(client, &buffers, &state, length, 60000, &right);
        if (!right)
            errx(1, "an honest call of %u bytes has status %d: %s", length, status, clnt_sperror(client, "call"));
        if (first) {
            told->shared += mappings(getpid(), true) >= 2;
        }
        told->right++;
    }
    clnt_destroy(client);
}
void *honest_thread(void *port)
{
    be_honest((int)(intptr_t)port);
    return NULL;
}

bool sees_answers(unsigned long count)
{
    unsigned long from = told->right;
    double until = now() + 30000 + 10 * patience();
    while (told->right < from + count && now() < until)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return told->right >= from + count;
}

void call_anyhow(int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    while (!told->stop) {
        double began = now();
        CLIENT *client = try_to_connect("127.0.0.1", port);
        raise_to(&told->connecting, (now() - began) * 1000);
        if (client == NULL)
            continue;
        told->connected++;
        for (int i = 0; i < 200 && !told->stop; i++) {
            bool right;
            told->tried++;
            enum clnt_stat status = echo(client, &buffers, &state, length_of_call(&state), CALL_TIME, &right);
            told->timed_out += status == RPC_TIMEDOUT;
            if (status != RPC_SUCCESS)
                break;
            told->answered += right;
        }
        clnt_destroy(client);
    }
}

/* ---- Plain ends, for other users and namespaces ------------------------------------------------------------------- */

static int be_client(const char *address, int port)
{
    struct buffers buffers = make_buffers();
    uint64_t state = 1;
    CLIENT *client = try_to_connect(address, port);
    if (client == NULL) {
        printf("none %s\n", clnt_spcreateerror("clnt_tli_create"));
        return 1;
    }
    for (int i = 0; i < 50; i++) {
        bool right;
        enum clnt_stat status = echo(client, &buffers, &state, length_of_call(&state), 60000, &right);
        if (!right) {
            printf("wrong %d %s\n", status, clnt_sperror(client, "call"));
            return 1;
        }
    }
    /* There may be no /proc. */
    printf("%s\n", mapped >= 2 ? "memory" : "no memory");
    clnt_destroy(client);
    return 0;
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    told = real_mmap(NULL, sizeof *told, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(told != MAP_FAILED);
    if (count < 2)
        errx(2, "usage: see the first lines of local.c");
    const char *what = arguments[1];
    int number = count > 2 ? atoi(arguments[2]) : 0;
    sow(count > 3 ? strtoull(arguments[3], NULL, 10) : 1, 0);
    if (strcmp(what, "server") == 0)
        be_server(1);
    else if (strcmp(what, "client") == 0 && count == 4)
        return be_client(arguments[2], atoi(arguments[3]));
    else if (strcmp(what, "random-client") == 0)
        random_client(number);
    else if (strcmp(what, "random-server") == 0)
        random_server(number);
    else if (strcmp(what, "kill-clients") == 0)
        kill_clients(number);
    else if (strcmp(what, "kill-servers") == 0)
        kill_servers(number);
    else if (strcmp(what, "stopped") == 0)
        stopped();
    else if (strcmp(what, "handshake-client") == 0)
        handshake_client();
    else if (strcmp(what, "another-users") == 0)
        another_users();
    else if (strcmp(what, "handshake-server") == 0)
        handshake_server(false);
    else if (strcmp(what, "silent-server") == 0)
        handshake_server(true);
    else if (strcmp(what, "segment") == 0)
        segment();
    else if (strcmp(what, "outbox") == 0)
        outbox();
    else if (strcmp(what, "elsewhere") == 0)
        elsewhere();
    else if (strcmp(what, "idle") == 0)
        idle(number);
    else
        errx(2, "usage: see the first lines of local.c");
    return failed != 0;
}
