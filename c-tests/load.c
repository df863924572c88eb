/* load.c: runs the load test over one transport, and compares runs. See load.h.
 *
 *   load run -m tcp|rdma|moved|two|placed -d DIR -n CALLS -s SEED [-l LIBRARY] [-b BINDINGS] [-p PROCESSES] [-t THREADS]
 *            [-f PORT]
 *       Starts servers, proxies and clients, makes about CALLS calls, and leaves the clients' records in DIR.
 *       -f PORT: connections to this port are slow anyway; without it a proxy slows one server's connections.
 *
 *   load soak ...
 *       See soak.c.
 *
 *   load compare [-v] DIR DIR...
 *       The first DIR is the run over tcp. -v prints a table for each.
 *
 * Prints nothing but complaints (and the table); each complaint names what is needed to repeat it. TEST_PATIENCE multiplies
 * the second that a call may be late, for machines that are busy with other things. */
#define _GNU_SOURCE
#include "load.h"
#include "soak.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

CLIENT *(*reverse_create)(SVCXPRT *, rpcprog_t, rpcvers_t);
bool_t (*serve_back)(CLIENT *, rpcprog_t, rpcvers_t, void (*)(struct svc_req *, SVCXPRT *));

/* ---- What all parts use ----------------------------------------------------------------------------------------------- */

uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

uint32_t load_address(void)
{
    const char *text = getenv("LOAD_ADDRESS");
    return text == NULL ? htonl(INADDR_LOOPBACK) : inet_addr(text);
}

int count_descriptors(void)
{
    int count = 0;
    DIR *fds = opendir("/proc/self/fd");
    while (fds != NULL && readdir(fds) != NULL)
        count++;
    if (fds != NULL)
        closedir(fds);
    return count - 3; /* ".", ".." and the directory itself */
}

long resident_kb(void)
{
    char line[256];
    long kb = 0, found;
    FILE *status = fopen("/proc/self/status", "r");
    while (status != NULL && fgets(line, sizeof line, status) != NULL) {
        if (sscanf(line, "RssAnon: %ld", &found) == 1)
            kb = found;
    }
    if (status != NULL)
        fclose(status);
    return kb;
}

struct book *book_open(const char *path, size_t *length)
{
    struct stat st;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        err(1, "%s", path);
    *length = (size_t)st.st_size;
    void *book = mmap(NULL, *length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (book == MAP_FAILED)
        err(1, "%s", path);
    close(fd);
    return book;
}

/* ---- Processes -------------------------------------------------------------------------------------------------------- */

struct child {
    pid_t pid;
    int in, out; /* its standard input and output */
    unsigned port;
};

static const char *mode = "tcp", *directory = ".", *library, *bindings;
static struct plan plan = {.seed = 1, .processes = 3, .threads = 4};
static unsigned far_port;
static double factor = 1;
static bool failed;
static struct child servers[ROLES], proxies[2], clients[PROCESSES];
static struct book *books[PROCESSES];

static const char *netid(void)
{
    return strcmp(mode, "tcp") == 0 || strcmp(mode, "moved") == 0 ? "tcp" : "rdma";
}

static void __attribute__((format(printf, 1, 2))) complain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s, seed %#llx: ", mode, (unsigned long long)plan.seed);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    failed = true;
}

/* The library's settings for a process, made in that process. Servers are numbered by their role, clients after them. */
static void settings(unsigned process)
{
    static const char *const lengths[] = {"1024", "4096", "4096", "65536"};
    char text[32];
    if (strcmp(mode, "tcp") == 0)
        return;
    setenv("LD_PRELOAD", library, 1);
    snprintf(text, sizeof text, "%u", plan_credits(plan.seed, process));
    setenv("RPCRDMA_CREDITS", text, 1);
    snprintf(text, sizeof text, "%u", plan_credits(plan.seed, 1000 + process));
    setenv("RPCRDMA_REVERSE_CREDITS", text, 1);
    setenv("RPCRDMA_INLINE", lengths[plan_choice(plan.seed, "inline", process, 4)], 1);
    if (plan_choice(plan.seed, "crc", process, 4) == 0)
        setenv("RPCRDMA_CRC", "yes", 1);
    if (strcmp(mode, "moved") == 0) {
        setenv("RPCRDMA_REDIRECT", "tcp", 1);
        setenv("RPCRDMA_FALLBACK", "no", 1);
    } else if (strcmp(mode, "two") == 0) {
        setenv("RPCRDMA_VERSION", "2", 1);
    } else if (strcmp(mode, "placed") == 0) {
        setenv("RPCRDMA_BINDINGS", bindings, 1);
    }
    if (getenv("LOAD_LOG") != NULL) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/log.%u", directory, process);
        setenv("RPCRDMA_LOG", getenv("LOAD_LOG"), 1);
        setenv("RPCRDMA_LOG_FILE", path, 1);
    }
}

/* Starts this program as one of its parts. */
static struct child start(unsigned process, char *const *argv)
{
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0)
        err(1, "pipe");
    pid_t pid = fork();
    if (pid < 0)
        err(1, "fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        settings(process);
        execv("/proc/self/exe", argv);
        err(127, "%s", argv[0]);
    }
    close(in[0]);
    close(out[1]);
    return (struct child){.pid = pid, .in = in[1], .out = out[0]};
}

/* Reads what a child prints, up to `end`; false when the line is full before that, or the child has gone or says nothing. */
static bool hear(struct child *child, char *line, size_t size, char end)
{
    for (size_t length = 0; length < size - 1;) {
        struct pollfd ready = {.fd = child->out, .events = POLLIN};
        if (poll(&ready, 1, 60000) != 1 || read(child->out, &line[length], 1) != 1)
            return false;
        if (line[length++] == end) {
            line[length] = '\0';
            return true;
        }
    }
    return false;
}

static void forget(struct child *child)
{
    close(child->in);
    close(child->out);
    child->pid = 0;
}

static void start_server(enum role role, bool wait)
{
    char role_text[16], port[16], line[64];
    snprintf(role_text, sizeof role_text, "%d", (int)role);
    snprintf(port, sizeof port, "%u", servers[role].port);
    char *argv[] = {"load", "serve", (char *)netid(), role_text, port, NULL};
    unsigned known = servers[role].port;
    servers[role] = start((unsigned)role, argv);
    servers[role].port = known;
    if (wait && (!hear(&servers[role], line, sizeof line, '\n') || sscanf(line, "READY %u", &servers[role].port) != 1))
        errx(1, "%s: the server %s does not come up", mode, role_names[role]);
}

static void start_proxy(struct child *proxy, const char *how, unsigned target)
{
    char port[16], seed[32], line[64];
    snprintf(port, sizeof port, "%u", target);
    snprintf(seed, sizeof seed, "%#llx", (unsigned long long)plan.seed);
    char *argv[] = {"load", "proxy", (char *)how, port, seed, NULL};
    const char *real = mode;
    mode = "tcp"; /* it knows nothing of RPC */
    *proxy = start(0, argv);
    mode = real;
    if (!hear(proxy, line, sizeof line, '\n') || sscanf(line, "READY %u", &proxy->port) != 1)
        errx(1, "a proxy does not come up");
}

struct state {
    int descriptors;
    long kb;
};

/* Whether a fresh client is served, and what the server holds then. */
static bool probe_once(enum role role, struct state *state)
{
    char port[16], line[64];
    int status;
    snprintf(port, sizeof port, "%u", servers[role].port);
    char *argv[] = {"load", "probe", (char *)netid(), port, role <= HASTY ? "long" : NULL, NULL};
    struct child child = start(2000, argv);
    bool heard = hear(&child, line, sizeof line, '\n') && sscanf(line, "%d %ld", &state->descriptors, &state->kb) == 2;
    if (!heard)
        kill(child.pid, SIGKILL);
    waitpid(child.pid, &status, 0);
    forget(&child);
    return heard && status == 0;
}

/* A server that was stopped has much to do first. */
static bool probe(enum role role, struct state *state)
{
    for (int tries = 0; tries < 20; tries++) {
        if (probe_once(role, state))
            return true;
        usleep(100000);
    }
    return false;
}

static void start_client(unsigned number)
{
    char path[PATH_MAX], ports[ROLES][16];
    size_t length =
        sizeof(struct book) + (size_t)plan.threads * plan.operations * sizeof(struct record);
    snprintf(path, sizeof path, "%s/client.%u", directory, number);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)length) < 0)
        err(1, "%s", path);
    close(fd);
    books[number] = book_open(path, &length);
    books[number]->plan = plan;
    books[number]->process = number;
    char *argv[4 + ROLES + 1] = {"load", "client", (char *)netid(), path};
    for (enum role role = PLAIN; role < ROLES; role++) {
        unsigned port = role == CUT                    ? proxies[0].port
                        : role == FAR && far_port == 0 ? proxies[1].port
                                                       : servers[role].port;
        snprintf(ports[role], sizeof ports[role], "%u", port);
        argv[4 + role] = ports[role];
    }
    clients[number] = start(ROLES + number, argv);
}

/* What each thread is doing, and where, if gdb is there. */
static void dump(void)
{
    uint64_t now = now_us();
    for (unsigned p = 0; p < plan.processes; p++) {
        if (clients[p].pid == 0)
            continue;
        for (unsigned t = 0; t < plan.threads; t++) {
            struct doing *doing = &books[p]->doing[t];
            uint64_t since = doing->since;
            if (doing->number >= plan.operations)
                continue;
            struct operation op = plan_operation(&plan, p, t, doing->number);
            fprintf(stderr, "  process %u (%d) thread %u: operation %u (%s at %s, handle %d)", p, clients[p].pid, t,
                    doing->number, kind_names[op.kind], role_names[op.role], op.handle);
            if (since != 0)
                fprintf(stderr, ", in clnt_call for %.1f s with a timeout of %u ms", (double)(now - since) / 1e6,
                        doing->timeout);
            fputc('\n', stderr);
        }
    }
    if (getenv("LOAD_GDB") == NULL)
        return;
    for (unsigned i = 0; i < plan.processes + ROLES; i++) {
        pid_t pid = i < plan.processes ? clients[i].pid : servers[i - plan.processes].pid;
        char command[200];
        snprintf(command, sizeof command, "gdb -p %d -batch -ex 'thread apply all bt 25' >&2 2>/dev/null", pid);
        if (pid != 0 && system(command) != 0)
            continue;
    }
}

static void finish(int status)
{
    struct child *const groups[] = {clients, servers, proxies};
    const unsigned counts[] = {plan.processes, ROLES, 2};
    for (unsigned g = 0; g < 3; g++) {
        for (unsigned i = 0; i < counts[g]; i++) {
            if (groups[g][i].pid > 0) {
                kill(groups[g][i].pid, SIGKILL);
                waitpid(groups[g][i].pid, NULL, 0);
            }
        }
    }
    exit(status);
}

/* Servers that come and go: how long each state lasts follows from the seed. */
struct coming {
    enum role role;
    bool away;
    unsigned turns;
    uint64_t next; /* now_us() */
};

static void come_and_go(struct coming *it)
{
    uint64_t now = now_us();
    if (now < it->next)
        return;
    it->away = !it->away;
    unsigned least = it->away ? 30 : 100, most = it->away ? 600 : 1200;
    it->next = now + 1000 * (least + plan_choice(plan.seed, role_names[it->role], it->turns++, most - least));
    pid_t pid = servers[it->role].pid;
    if (it->role == NAP) {
        kill(pid, it->away ? SIGSTOP : SIGCONT);
    } else if (it->away) {
        int status;
        if (waitpid(pid, &status, WNOHANG) == pid)
            complain("the server %s died by itself: status %#x", role_names[it->role], status);
        else
            kill(pid, SIGKILL), waitpid(pid, NULL, 0);
        forget(&servers[it->role]);
    } else {
        start_server(it->role, false);
    }
}

/* Whether a call has lasted far longer than it may. */
static bool stuck(void)
{
    uint64_t now = now_us();
    for (unsigned p = 0; p < plan.processes; p++) {
        for (unsigned t = 0; t < plan.threads; t++) {
            struct doing *doing = &books[p]->doing[t];
            uint64_t since = __atomic_load_n(&doing->since, __ATOMIC_ACQUIRE);
            if (since != 0 && now > since && now - since > doing->timeout * 1000ull + (uint64_t)(60e6 * factor))
                return true;
        }
    }
    return false;
}

static int run_main(int argc, char **argv)
{
    unsigned long long calls = 3000;
    struct state before[ROLES], after;
    int option;
    while ((option = getopt(argc, argv, "m:d:n:s:l:b:p:t:f:")) != -1) {
        switch (option) {
        case 'm': mode = optarg; break;
        case 'd': directory = optarg; break;
        case 'n': calls = strtoull(optarg, NULL, 0); break;
        case 's': plan.seed = strtoull(optarg, NULL, 0); break;
        case 'l': library = optarg; break;
        case 'b': bindings = optarg; break;
        case 'p': plan.processes = (unsigned)atoi(optarg); break;
        case 't': plan.threads = (unsigned)atoi(optarg); break;
        case 'f': far_port = (unsigned)atoi(optarg); break;
        default: return 2;
        }
    }
    if (plan.processes < 1 || plan.processes > PROCESSES || plan.threads < 1 || plan.threads > THREADS)
        errx(2, "at most %d processes of at most %d threads", PROCESSES, THREADS);
    plan.operations = (uint32_t)(calls / plan.processes / plan.threads + 1);

    servers[FAR].port = far_port;
    for (enum role role = PLAIN; role < ROLES; role++) {
        start_server(role, true);
        if (!probe(role, &before[role])) {
            complain("the server %s does not serve", role_names[role]);
            finish(1);
        }
    }
    start_proxy(&proxies[0], "cut", servers[CUT].port);
    start_proxy(&proxies[1], "slow", servers[FAR].port);
    for (unsigned p = 0; p < plan.processes; p++)
        start_client(p);
    for (unsigned p = 0; p < plan.processes; p++) {
        char line[2];
        if (!hear(&clients[p], line, sizeof line, 'R')) {
            complain("client process %u does not connect", p);
            dump();
            finish(1);
        }
    }
    kill(servers[HUNG].pid, SIGSTOP);
    for (unsigned p = 0; p < plan.processes; p++) {
        if (write(clients[p].in, "G", 1) != 1)
            err(1, "client process %u", p);
    }

    uint64_t started = now_us();
    uint64_t deadline = started + (uint64_t)((120e6 + (double)calls * 15e3) * factor);
    struct coming nap = {.role = NAP}, mortal = {.role = MORTAL};
    for (unsigned left = plan.processes; left > 0;) {
        usleep(10000);
        come_and_go(&nap);
        come_and_go(&mortal);
        for (unsigned p = 0; p < plan.processes; p++) {
            int status;
            if (clients[p].pid == 0 || waitpid(clients[p].pid, &status, WNOHANG) != clients[p].pid)
                continue;
            if (status != 0)
                complain("client process %u ended with status %#x", p, status);
            forget(&clients[p]);
            left--;
        }
        for (enum role role = PLAIN; role < ROLES; role++) {
            int status;
            if (role != MORTAL && waitpid(servers[role].pid, &status, WNOHANG) == servers[role].pid) {
                servers[role].pid = 0;
                complain("the server %s died: status %#x", role_names[role], status);
                finish(1);
            }
        }
        if (stuck() || now_us() > deadline) {
            complain("stuck after %.1f s:", (double)(now_us() - started) / 1e6);
            dump();
            finish(1);
        }
    }
    double took = (double)(now_us() - started) / 1e6;

    kill(servers[HUNG].pid, SIGCONT);
    kill(servers[NAP].pid, SIGCONT);
    if (mortal.away)
        start_server(MORTAL, true);
    for (enum role role = PLAIN; role < ROLES; role++) {
        /* Connections end when the server's loop looks at them. */
        bool served = false;
        for (int tries = 0; tries < 100; tries++) {
            served = probe(role, &after);
            if (!served || after.descriptors <= before[role].descriptors)
                break;
            usleep(100000);
        }
        if (!served)
            complain("at the end the server %s does not serve", role_names[role]);
        else if (after.descriptors > before[role].descriptors)
            complain("the server %s has %d descriptors at the end, and had %d", role_names[role], after.descriptors,
                     before[role].descriptors);
        if (served && after.kb > before[role].kb + (24 << 10))
            complain("the server %s holds %ld kB at the end, and held %ld", role_names[role], after.kb, before[role].kb);
        if (getenv("LOAD_VERBOSE") != NULL)
            fprintf(stderr, "  server %-6s: %d descriptors (%d), %ld kB (%ld)\n", role_names[role], after.descriptors,
                    before[role].descriptors, after.kb, before[role].kb);
    }
    for (unsigned p = 0; p < plan.processes; p++) {
        struct book *book = books[p];
        if (getenv("LOAD_VERBOSE") != NULL)
            fprintf(stderr,
                    "  client %u: %d descriptors (%d), %ld kB (%ld, %ld in between), %u CLIENTs, the slowest in %.3f s, "
                    "%u callbacks, overslept %.3f s\n",
                    p, book->fds_after, book->fds_before, book->kb_after, book->kb_before, book->kb_midway, book->made,
                    (double)book->making / 1e6, book->called_back, (double)book->overslept / 1e6);
        if (book->fds_after > book->fds_before + 4)
            complain("client process %u has %d descriptors at the end, and had %d", p, book->fds_after, book->fds_before);
        if (book->kb_after > book->kb_before + (24 << 10))
            complain("client process %u holds %ld kB at the end, and held %ld", p, book->kb_after, book->kb_before);
    }
    printf("%.1f\n", took);
    finish(failed);
    return failed;
}

/* ---- Comparison ------------------------------------------------------------------------------------------------------- */

struct run {
    const char *path;
    unsigned count;
    struct book *books[PROCESSES];
};

struct line {
    uint64_t calls, total, worst, statuses[128];
    int64_t latest; /* microseconds after the timeout */
};

static struct run run_open(const char *path)
{
    struct run run = {.path = path};
    for (; run.count < PROCESSES; run.count++) {
        char name[PATH_MAX];
        size_t length;
        snprintf(name, sizeof name, "%s/client.%u", path, run.count);
        if (access(name, R_OK) < 0)
            break;
        run.books[run.count] = book_open(name, &length);
    }
    if (run.count == 0)
        errx(1, "%s: no client has written anything", path);
    return run;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

/* Adds up a run, and complains of anything in it that must not happen. */
static void judge(const struct run *run, const struct run *tcp, const struct line *reference, struct line *lines)
{
    unsigned wrong = 0, different = 0, late = 0, missing = 0;
    double noise = 0;
    for (unsigned p = 0; p < run->count; p++) {
        struct book *book = run->books[p];
        /* The process knows by how much the machine itself delayed it. */
        int64_t grace = (int64_t)(1e6 * factor) + 3 * (int64_t)book->overslept;
        if ((double)book->overslept > noise)
            noise = (double)book->overslept;
        for (unsigned t = 0; t < book->plan.threads; t++) {
            for (uint32_t n = 0; n < book->plan.operations; n++) {
                struct operation op = plan_operation(&book->plan, p, t, n);
                const struct record *record = book_record(book, t, n);
                const struct record *other = book_record(tcp->books[p], t, n);
                struct line *line = &lines[op.kind];
                if (n >= book->doing[t].number) {
                    missing++;
                    continue;
                }
                int64_t lateness = (int64_t)record->elapsed - (int64_t)op.timeout * 1000;
                if (record->status == SKIPPED)
                    continue;
                line->calls++;
                line->total += record->elapsed;
                line->statuses[record->status]++;
                if (record->elapsed > line->worst)
                    line->worst = record->elapsed;
                if (record->status != NO_CLIENT && lateness > line->latest)
                    line->latest = lateness;
                if (record->wrong && wrong++ < 5)
                    complain("process %u thread %u operation %u (%s at %s) is wrong: status %d, tcp's %d", p, t, n,
                             kind_names[op.kind], role_names[op.role], record->status, other->status);
                bool refused = (op.kind == K_POST || op.kind == K_POKE || op.kind == K_TALLY) &&
                               plan_one_credit(&book->plan, p, op.role);
                if (op.steady && !refused && n < tcp->books[p]->doing[t].number && other->status != SKIPPED &&
                    (record->status != other->status || record->sum != other->sum) && different++ < 5)
                    complain("process %u thread %u operation %u (%s at %s) is another one than over tcp: status %d and %d", p, t,
                             n, kind_names[op.kind], role_names[op.role], record->status, other->status);
                /* tcp has no limit for a call that waits for another thread's, or for room in a socket. A call without
                 * a reply may have to wait for another call's reply, as long as that takes. */
                int64_t limit = grace;
                if (op.kind == K_POST && reference != NULL)
                    limit += (int64_t)reference[K_LARGE].worst;
                if (reference != NULL && record->status != NO_CLIENT && lateness > limit && late++ < 5)
                    complain("process %u thread %u operation %u (%s at %s, handle %d) is late: %.3f s with a timeout of %.3f s, "
                             "status %d",
                             p, t, n, kind_names[op.kind], role_names[op.role], op.handle, record->elapsed / 1e6,
                             op.timeout / 1e3, record->status);
            }
        }
    }
    /* Nobody starves. */
    for (enum kind kind = K_NULL; reference != NULL && kind < KINDS; kind++) {
        const struct line *line = &lines[kind], *other = &reference[kind];
        if (line->calls == 0 || other->calls == 0)
            continue;
        double mean = (double)line->total / (double)line->calls, others = (double)other->total / (double)other->calls;
        if (mean > 5 * others + 100e3 * factor || (double)line->worst > 10 * (double)other->worst + 2e6 * factor + 3 * noise)
            complain("the calls of kind %s take %.1f ms on average and %.1f at worst, over tcp %.1f and %.1f", kind_names[kind],
                     mean / 1e3, (double)line->worst / 1e3, others / 1e3, (double)other->worst / 1e3);
    }
    if (wrong + different + late + missing > 0)
        complain("%u wrong, %u different from tcp, %u late, %u not made", wrong, different, late, missing);
}

static void print_lines(const char *name, const struct line *lines, const struct line *reference)
{
    printf("%s:\n  %-7s %8s %9s %9s %9s %9s  outcomes\n", name, "", "calls", "mean ms", "worst ms", "tcp's", "late ms");
    struct line all = {0};
    for (enum kind kind = K_NULL; kind <= KINDS; kind++) {
        const struct line *line = kind == KINDS ? &all : &lines[kind];
        if (line->calls == 0)
            continue;
        printf("  %-7s %8llu %9.2f %9.1f %9.1f %9.1f ", kind == KINDS ? "all" : kind_names[kind],
               (unsigned long long)line->calls, (double)line->total / (double)line->calls / 1e3, (double)line->worst / 1e3,
               kind == KINDS ? 0 : (double)reference[kind].worst / 1e3, line->latest > 0 ? (double)line->latest / 1e3 : 0);
        for (int status = 0; status < 128; status++) {
            if (line->statuses[status] == 0)
                continue;
            const char *text = status == NO_CLIENT ? "no CLIENT" : clnt_sperrno((enum clnt_stat)status);
            const char *colon = strstr(text, ": ");
            printf(" %llu %s;", (unsigned long long)line->statuses[status], colon == NULL ? text : colon + 2);
            all.statuses[status] += kind == KINDS ? 0 : line->statuses[status];
        }
        printf("\n");
        all.calls += line->calls;
        all.total += line->total;
    }
}

static int compare_main(int argc, char **argv)
{
    bool verbose = argc > 2 && strcmp(argv[2], "-v") == 0;
    int first = verbose ? 3 : 2;
    static struct line reference[KINDS];
    if (argc <= first)
        return 2;
    struct run tcp = run_open(argv[first]);
    plan = tcp.books[0]->plan;
    for (int i = first; i < argc; i++) {
        struct run run = i == first ? tcp : run_open(argv[i]);
        static struct line lines[KINDS];
        memset(lines, 0, sizeof lines);
        mode = base_name(argv[i]);
        if (run.count != tcp.count || memcmp(&run.books[0]->plan, &plan, sizeof plan) != 0)
            errx(1, "%s is not a run of the same plan", argv[i]);
        judge(&run, &tcp, i == first ? NULL : reference, i == first ? reference : lines);
        if (verbose)
            print_lines(mode, i == first ? reference : lines, reference);
    }
    return failed;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*main)(int, char **);
    } parts[] = {{"run", run_main},       {"compare", compare_main}, {"serve", serve_main},
                 {"proxy", proxy_main}, {"client", client_main},   {"probe", probe_main},
                 {"soak", soak_main},   {"soak-serve", soak_serve_main}, {"soak-client", soak_client_main}};
    signal(SIGPIPE, SIG_IGN);
    /* Fixed: otherwise malloc keeps large blocks, and memory at the end tells nothing. */
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
    if (getenv("TEST_PATIENCE") != NULL)
        factor = atof(getenv("TEST_PATIENCE"));
    /* Through void **: in C, dlsym returns no pointer to a function. */
    *(void **)&reverse_create = dlsym(RTLD_DEFAULT, "rpcrdma_clnt_reverse");
    *(void **)&serve_back = dlsym(RTLD_DEFAULT, "rpcrdma_clnt_serve");
    for (size_t i = 0; argc > 1 && i < sizeof parts / sizeof *parts; i++) {
        if (strcmp(argv[1], parts[i].name) != 0)
            continue;
        /* getopt(3) begins after the part's name. */
        if (parts[i].main == run_main || parts[i].main == soak_main)
            return parts[i].main(argc - 1, argv + 1);
        return parts[i].main(argc, argv);
    }
    errx(2, "usage: load run | compare ...; see load.c");
}
