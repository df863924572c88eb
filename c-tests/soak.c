/* soak.c: starts the soak, injects faults, and judges. See soak.h.
 *
 *   load soak -d DIR -l LIBRARY -b BINDINGS [-D iwarp|local|rxe|siw] [-t SECONDS] [-k SECONDS] [-s SEED] [-H HOSTILE]
 *
 * -k: seconds between kills of a server (20; 0: never). -H: the program of hostile clients, tests/bad_peers. LOAD_ADDRESS: where
 * the servers are. SOAK_SLOW: the milliseconds after which gdb shows where a call hangs that nothing should hold up.
 * Prints a table and then result lines, "ok" or "FAIL"; complaints go to the standard error. */
#define _GNU_SOURCE
#include "soak.h"
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

const char *const target_names[TARGETS] = {"steady", "dying", "cramped"};
const char *const shape_names[SHAPES] = {"small", "large", "placed", "crowd",   "back",
                                         "two",   "moved", "hasty",  "altered", "doomed"};

/* ---- Ledgers ---------------------------------------------------------------------------------------------------------- */

uint32_t soak_check(const struct ask *ask)
{
    /* All zeros must not pass for a call: a client that rewrites its shared memory produces them. */
    uint64_t sum = ask->tag ^ SOAK_CHECK;
    sum = (sum ^ ask->want) * 0x9e3779b97f4a7c15u;
    sum = (sum ^ sum >> 32 ^ ask->delay) * 0x9e3779b97f4a7c15u;
    sum = (sum ^ sum >> 32 ^ ask->length) * 0x9e3779b97f4a7c15u;
    return (uint32_t)(sum >> 32);
}

int ledger_open(const char *directory, const char *name, enum target target)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s.%d", directory, name, (int)target);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        err(1, "%s", path);
    return fd;
}

void ledger_write(int fd, uint64_t tag, uint8_t value)
{
    if (pwrite(fd, &value, 1, byte_of(tag)) != 1)
        err(1, "a ledger");
}

uint8_t ledger_read(int fd, uint64_t tag)
{
    uint8_t value = 0;
    if (pread(fd, &value, 1, byte_of(tag)) < 0)
        err(1, "a ledger");
    return value;
}

void ledger_count(int fd, uint64_t tag)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    uint8_t value = ledger_read(fd, tag);
    ledger_write(fd, tag, value < UINT8_MAX ? value + 1 : value);
    pthread_mutex_unlock(&lock);
}

void *map_file(const char *directory, const char *name, unsigned number, size_t size)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s.%u", directory, name, number);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)size) < 0)
        err(1, "%s", path);
    void *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        err(1, "%s", path);
    close(fd);
    return map;
}

/* ---- What processes hold ---------------------------------------------------------------------------------------------- */

struct held {
    long kb; /* resident, its own and shared, but for files */
    long descriptors, mappings, threads;
    long space; /* KiB: the most address space so far */
    long segments; /* of memory that is shared with peers */
};

static struct held held_by(pid_t pid)
{
    struct held held = {0};
    char path[64], line[512];
    long number;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "RssAnon: %ld", &number) == 1 || sscanf(line, "RssShmem: %ld", &number) == 1)
            held.kb += number;
        if (sscanf(line, "Threads: %ld", &number) == 1)
            held.threads = number;
        if (sscanf(line, "VmPeak: %ld", &number) == 1)
            held.space = number;
    }
    if (file != NULL)
        fclose(file);
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    file = fopen(path, "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        held.mappings += strchr(line, '\n') != NULL, held.segments += strstr(line, "memfd:rpcrdma (") != NULL;
    if (file != NULL)
        fclose(file);
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *fds = opendir(path);
    while (fds != NULL && readdir(fds) != NULL)
        held.descriptors++;
    if (fds != NULL)
        closedir(fds);
    held.descriptors -= 2; /* "." and ".." */
    return held;
}

enum { SAMPLES = 64 };
static struct held samples[TARGETS + SHAPES][SAMPLES];
static unsigned sample_count;

static const char *holder(unsigned i) { return i < TARGETS ? target_names[i] : shape_names[i - TARGETS]; }

/* ---- Processes -------------------------------------------------------------------------------------------------------- */

struct child {
    pid_t pid;
    int in, out; /* its standard input and output */
    unsigned port;
};

static const char *directory = ".", *library, *bindings, *device = "iwarp", *hostile_program;
static uint64_t seed = 1;
static unsigned seconds = 60, kill_every = 20, slow;
static double factor = 1;
static struct child servers[TARGETS], proxies[TARGETS][PROXIES], clients[SHAPES], hostile;
static struct soak_tally *tallies[SHAPES];
static struct soak_found *found[TARGETS];
static unsigned crashes, hung, failures, mistreated;

static void __attribute__((format(printf, 1, 2))) complain(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

static void set(const char *name, const char *value) { setenv(name, value, 1); }

/* The settings of every process with the library. */
static void settings(const char *provider, unsigned process)
{
    char text[32];
    set("LD_PRELOAD", library);
    set("RPCRDMA_PROVIDER", provider);
    /* More than one: calls without a reply need another one to follow. */
    snprintf(text, sizeof text, "%u", 2 + (unsigned)plan_choice(seed, "credits", process, 62));
    set("RPCRDMA_CREDITS", text);
    set("RPCRDMA_LOG", getenv("SOAK_LOG") == NULL ? "error" : getenv("SOAK_LOG"));
}

static bool on_adapters(void) { return strcmp(device, "rxe") == 0 || strcmp(device, "siw") == 0; }

static enum route route_of(enum shape shape) { return (shape + seed) % 2 == 0 ? DIRECT : PROXIED; }

/* An adapter can only be reached directly, and a client that did not reach one remembers that for a while. So half of the
 * clients go over adapters, and the others through the proxies. */
static const char *routes_of(enum shape shape)
{
    if (shape < HONEST && !on_adapters())
        return "both";
    return shape == S_DOOMED || (shape < HONEST && route_of(shape) == DIRECT) ? "direct" : "proxied";
}

/* Whether a proxy alters this client's bytes. Checksums reveal that to all of these clients but the last. */
static bool altered(enum shape shape)
{
    return shape == S_SMALL || shape == S_LARGE || shape == S_TWO || shape == S_ALTERED;
}

static void client_settings(enum shape shape)
{
    bool verbs = on_adapters(), local = strcmp(device, "local") == 0;
    /* Where memory is shared, little goes through proxies. So some clients send everything there. */
    bool streams = shape == S_TWO || shape == S_MOVED || shape == S_ALTERED;
    bool adapter = verbs && strcmp(routes_of(shape), "direct") == 0;
    settings(adapter ? "verbs" : local && !streams ? "auto" : "iwarp", 100 + (unsigned)shape);
    if (altered(shape))
        set("RPCRDMA_CRC", shape < HONEST ? "yes" : "no");
    switch (shape) {
    case S_PLACED: set("RPCRDMA_BINDINGS", bindings); break;
    case S_CROWD: set("RPCRDMA_INLINE", "4096"); break;
    case S_TWO: set("RPCRDMA_VERSION", "2"); break;
    case S_DOOMED:
        if (local)
            set("SOAK_REWRITES", "yes");
        break;
    case S_MOVED:
        set("RPCRDMA_REDIRECT", "tcp");
        set("RPCRDMA_FALLBACK", "no");
        break;
    default: break;
    }
}

enum { CRAMPED_MEMORY = 256 << 20 };

static void server_settings(enum target target)
{
    /* An iWARP adapter has the port for itself, so there is no software iWARP beside it; it speaks the same protocol. */
    settings(strcmp(device, "iwarp") == 0 ? "iwarp" : strcmp(device, "siw") == 0 ? "verbs" : "auto", (unsigned)target);
    set("RPCRDMA_VERSION", "auto");
    /* A peer whose binding is another one, or none, is no error. */
    if (target == STEADY)
        set("RPCRDMA_BINDINGS", bindings);
    if (target == CRAMPED) {
        /* Descriptors for some dozens of connections; memory for some long calls. */
        struct rlimit descriptors = {40, 40}, memory = {CRAMPED_MEMORY, CRAMPED_MEMORY};
        set("RPCRDMA_MAX_PULLED", "64M");
        set("MALLOC_ARENA_MAX", "2");
        if (setrlimit(RLIMIT_NOFILE, &descriptors) < 0 || setrlimit(RLIMIT_AS, &memory) < 0)
            err(1, "setrlimit");
    }
}

/* Starts this program as one of its parts. Its standard error is appended to DIR/NAME.log. */
static struct child start(const char *name, unsigned number, void (*prepare)(unsigned), char *const *argv)
{
    int in[2], out[2];
    char path[PATH_MAX];
    pid_t parent = getpid();
    if (pipe2(in, O_CLOEXEC) < 0 || pipe2(out, O_CLOEXEC) < 0)
        err(1, "pipe");
    pid_t pid = fork();
    if (pid < 0)
        err(1, "fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        snprintf(path, sizeof path, "%s/%s.log", directory, name);
        int log = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
        dup2(log, STDERR_FILENO);
        dup2(in[0], STDIN_FILENO);
        dup2(out[1], STDOUT_FILENO);
        if (prepare != NULL)
            prepare(number);
        execv(strchr(argv[0], '/') == NULL ? "/proc/self/exe" : argv[0], argv);
        err(127, "%s", argv[0]);
    }
    close(in[0]);
    close(out[1]);
    return (struct child){.pid = pid, .in = in[1], .out = out[0]};
}

/* The next byte that a child writes; 0 when it has gone, or has written nothing for two minutes. */
static char hear(struct child *child)
{
    struct pollfd ready = {.fd = child->out, .events = POLLIN};
    char byte;
    int some;
    while ((some = poll(&ready, 1, (int)(120000 * factor))) < 0 && errno == EINTR)
        ;
    return some == 1 && read(child->out, &byte, 1) == 1 ? byte : 0;
}

static bool hear_port(struct child *child)
{
    char line[64];
    for (size_t length = 0; length < sizeof line - 1;) {
        char byte = hear(child);
        if (byte == 0)
            return false;
        line[length++] = byte;
        if (byte == '\n') {
            line[length] = '\0';
            return sscanf(line, "READY %u", &child->port) == 1;
        }
    }
    return false;
}

static void tell(struct child *child, char byte)
{
    if (child->pid > 0 && write(child->in, &byte, 1) != 1)
        complain("a child (%d) does not listen", child->pid);
}

static void forget(struct child *child)
{
    if (child->pid <= 0)
        return;
    close(child->in);
    close(child->out);
    child->pid = 0;
}

static void end(struct child *child)
{
    if (child->pid <= 0)
        return;
    kill(child->pid, SIGKILL);
    waitpid(child->pid, NULL, 0);
    forget(child);
}

static void prepare_server(unsigned target) { server_settings((enum target)target); }
static void prepare_client(unsigned shape) { client_settings((enum shape)shape); }

static void start_server(enum target target)
{
    char number[16], port[16];
    unsigned known = servers[target].port;
    snprintf(number, sizeof number, "%d", (int)target);
    snprintf(port, sizeof port, "%u", known);
    char *argv[] = {"load", "soak-serve", number, port, (char *)directory, NULL};
    /* The kernel's siw may hold the port of a killed server for a while. */
    uint64_t until = now_us() + (known == 0 ? 0 : 30000000);
    do {
        servers[target] = start(target_names[target], (unsigned)target, prepare_server, argv);
        servers[target].port = known;
        if (hear_port(&servers[target]))
            return;
        end(&servers[target]);
        usleep(100000);
    } while (now_us() < until);
    errx(1, "the server %s does not come up", target_names[target]);
}

static void start_proxy(enum target target, enum proxy which)
{
    char port[16], number[32];
    snprintf(port, sizeof port, "%u", servers[target].port);
    snprintf(number, sizeof number, "%#llx", (unsigned long long)(seed + target));
    char *argv[] = {"load", "proxy", which == CUTTING ? "soon" : "fuzz", port, number, NULL};
    proxies[target][which] = start("proxy", (unsigned)target, NULL, argv);
    if (!hear_port(&proxies[target][which]))
        errx(1, "a proxy does not come up");
}

static void prepare_hostile(unsigned turn)
{
    char text[32];
    snprintf(text, sizeof text, "%u,%u", servers[STEADY].port, servers[CRAMPED].port);
    set("SOAK_PORTS", text);
    snprintf(text, sizeof text, "%llu", (unsigned long long)(seed * 1000 + turn));
    set("SOAK_SEED", text);
}

/* Hostile clients run from one pause of the soak to the next. */
static void start_hostile(void)
{
    char *argv[] = {(char *)hostile_program, "--ignored", "--exact", "soak::hostile_clients", "--nocapture", NULL};
    if (hostile_program != NULL)
        hostile = start("hostile", sample_count, prepare_hostile, argv);
}

static void start_client(enum shape shape)
{
    char number[16], seed_text[32], ports[TARGETS][ROUTES][16];
    if (tallies[shape] == NULL)
        tallies[shape] = map_file(directory, "tally", (unsigned)shape, sizeof *tallies[shape]);
    memset(tallies[shape]->doing, 0, sizeof tallies[shape]->doing);
    snprintf(number, sizeof number, "%d", (int)shape);
    snprintf(seed_text, sizeof seed_text, "%#llx", (unsigned long long)seed);
    char *argv[7 + TARGETS * ROUTES + 1] = {"load",    "soak-client",     shape == S_MOVED ? "tcp" : "rdma", number,
                                            seed_text, (char *)directory, (char *)routes_of(shape)};
    for (enum target target = 0; target < TARGETS; target++) {
        for (enum route route = 0; route < ROUTES; route++) {
            const struct child *proxy = &proxies[target][altered(shape) ? ALTERING : CUTTING];
            snprintf(ports[target][route], sizeof ports[target][route], "%u",
                     route == DIRECT ? servers[target].port : proxy->port);
            argv[7 + target * ROUTES + route] = ports[target][route];
        }
    }
    clients[shape] = start(shape_names[shape], (unsigned)shape, prepare_client, argv);
}

/* ---- The course ------------------------------------------------------------------------------------------------------- */

static void finish(void)
{
    end(&hostile);
    for (enum shape shape = 0; shape < SHAPES; shape++)
        end(&clients[shape]);
    for (enum target target = 0; target < TARGETS; target++) {
        for (enum proxy which = 0; which < PROXIES; which++)
            end(&proxies[target][which]);
        end(&servers[target]);
    }
}

/* Where a client and the servers are. */
static void dump(enum shape shape)
{
    const pid_t pids[] = {clients[shape].pid, servers[STEADY].pid, servers[DYING].pid, servers[CRAMPED].pid};
    for (size_t i = 0; i < sizeof pids / sizeof *pids; i++) {
        char command[200];
        snprintf(command, sizeof command, "gdb -p %d -batch -ex 'thread apply all bt 25' >&2 2>/dev/null", pids[i]);
        if (pids[i] > 0 && system(command) != 0)
            complain("no gdb");
    }
}

static void hang(enum shape shape, const char *what)
{
    hung++;
    complain("client %s %s", shape_names[shape], what);
    for (unsigned t = 0; t < SOAK_THREADS; t++) {
        struct doing doing = tallies[shape]->doing[t];
        if (doing.since != 0)
            complain("  thread %u: call %u, for %.1f s with a timeout of %u ms", t, doing.number,
                     (double)(now_us() - doing.since) / 1e6, doing.timeout);
    }
    if (getenv("LOAD_GDB") != NULL)
        dump(shape);
    end(&clients[shape]);
}

/* Checks whether a child has ended by itself. */
static void look_after(struct child *child, const char *what, const char *name)
{
    int status;
    if (child->pid <= 0 || waitpid(child->pid, &status, WNOHANG) != child->pid)
        return;
    crashes++;
    complain("%s %s ended with status %#x", what, name, status);
    forget(child);
}

static void look_after_all(void)
{
    uint64_t now = now_us();
    for (enum target target = 0; target < TARGETS; target++) {
        look_after(&servers[target], "server", target_names[target]);
        for (enum proxy which = 0; which < PROXIES; which++)
            look_after(&proxies[target][which], "the proxy of", target_names[target]);
        /* So that the rest goes on. */
        if (servers[target].pid == 0 && target != DYING)
            start_server(target);
    }
    /* A client that has rewritten its own shared memory may crash of that. */
    if (strcmp(device, "local") == 0 && clients[S_DOOMED].pid > 0 && waitpid(clients[S_DOOMED].pid, NULL, WNOHANG) > 0)
        forget(&clients[S_DOOMED]);
    for (enum shape shape = 0; shape < SHAPES; shape++) {
        look_after(&clients[shape], "client", shape_names[shape]);
        for (unsigned t = 0; clients[shape].pid > 0 && t < SOAK_THREADS; t++) {
            struct doing *doing = &tallies[shape]->doing[t];
            uint64_t since = __atomic_load_n(&doing->since, __ATOMIC_ACQUIRE);
            if (since != 0 && slow > 0 && doing->timeout == 60000 && now > since && now - since > slow * 1000ull) {
                slow = 0;
                complain("client %s waits for %.3f s", shape_names[shape], (double)(now - since) / 1e6);
                dump(shape);
            }
            if (since != 0 && now > since && now - since > doing->timeout * 1000ull + (uint64_t)(90e6 * factor))
                hang(shape, "hangs in a call");
        }
    }
}

/* Has all clients do something, and waits until they report it done. */
static void together(char byte, char answer)
{
    for (enum shape shape = 0; shape < SHAPES; shape++)
        tell(&clients[shape], byte);
    for (enum shape shape = 0; shape < SHAPES; shape++) {
        char said = clients[shape].pid == 0 ? answer : hear(&clients[shape]);
        if (said == 0) {
            hang(shape, "does not come to rest");
        } else if (said != answer) {
            failures++;
            complain("client %s is not served at the end", shape_names[shape]);
        }
    }
}

/* All clients are at rest. Records what the processes hold once everything that ends has ended. */
static void sample(void)
{
    for (enum target target = 0; target < TARGETS; target++) {
        struct held *first = &samples[target][0], *now = &samples[target][sample_count];
        for (unsigned tries = 0; target != DYING && tries < 200; tries++) {
            tell(&servers[target], 'T');
            hear(&servers[target]);
            *now = held_by(servers[target].pid);
            /* A server sees the end of a connection when its loop gets to it. For the first sample nothing tells how
             * many there should be. */
            if (sample_count > 0 ? now->descriptors <= first->descriptors : tries >= 40)
                break;
            usleep(50000);
        }
    }
    for (enum shape shape = 0; shape < SHAPES; shape++) {
        if (clients[shape].pid > 0)
            samples[TARGETS + shape][sample_count] = held_by(clients[shape].pid);
    }
    sample_count++;
}

/* Their exit status tells how they have fared. */
static void end_hostile(void)
{
    int status = 0;
    if (hostile.pid <= 0)
        return;
    close(hostile.in);
    uint64_t until = now_us() + (uint64_t)(60e6 * factor);
    pid_t ended;
    while ((ended = waitpid(hostile.pid, &status, WNOHANG)) == 0 && now_us() < until)
        usleep(10000);
    if (ended == 0) {
        kill(hostile.pid, SIGKILL);
        waitpid(hostile.pid, NULL, 0);
    }
    if (ended == 0 || status != 0) {
        mistreated++;
        complain("the hostile clients have ended with status %#x", status);
    }
    close(hostile.out);
    hostile.pid = 0;
}

/* One client is killed again and again, in the midst of whatever it is doing. */
static uint64_t doomed_at;
static unsigned doomed;

static void rest(void)
{
    end_hostile();
    end(&clients[S_DOOMED]);
    doomed_at = 0;
    together('Q', 'q');
    sample();
}

/* The server that is killed: all its lives are equally long; the pauses between them follow from the seed. */
static uint64_t turns_at;
static unsigned lives = 1, turns;
static bool away;

static void come_and_go(void)
{
    int status;
    if (now_us() < turns_at)
        return;
    if (away) {
        start_server(DYING);
        lives++;
        turns_at = now_us() + kill_every * 1000000ull;
    } else {
        struct child *child = &servers[DYING];
        if (child->pid > 0 && waitpid(child->pid, &status, WNOHANG) == 0)
            kill(child->pid, SIGKILL), waitpid(child->pid, NULL, 0);
        else if (child->pid > 0)
            crashes++, complain("the server dying ended with status %#x before it was killed", status);
        forget(child);
        turns_at = now_us() + plan_choice(seed, "away", turns++, 2000000);
    }
    away = !away;
}

static void doom(void)
{
    struct child *child = &clients[S_DOOMED];
    if (now_us() < doomed_at)
        return;
    end(child);
    start_client(S_DOOMED);
    doomed_at = now_us() + 500000 + plan_choice(seed, "doomed", doomed++, 3000000);
    if (hear(child) == 'R')
        tell(child, 'G');
}

/* What the clients and the servers have counted. */
struct sums {
    unsigned long long calls, wrong, lost, unexcused, late;
};

static struct sums sum_up(void)
{
    struct sums sums = {0};
    for (enum shape shape = 0; shape < SHAPES; shape++) {
        const struct soak_tally *tally = tallies[shape];
        for (enum target target = 0; target < TARGETS; target++)
            for (enum route route = 0; route < ROUTES; route++)
                sums.calls += tally->lines[target][route].calls;
        sums.wrong += tally->wrong, sums.lost += tally->lost, sums.unexcused += tally->unexcused, sums.late += tally->late;
    }
    for (enum target target = 0; target < TARGETS; target++)
        sums.wrong += found[target]->wrong;
    return sums;
}

/* For a machine that does not live to the end of the run. The ledgers are compared only there. */
static void tell_progress(uint64_t started)
{
    static uint64_t told;
    uint64_t now = now_us();
    if (told == 0)
        told = started;
    if (now - told < 300000000)
        return;
    told = now;
    struct sums sums = sum_up();
    printf("so far %5llu s: %llu calls, %llu wrong, %llu lost, %llu failed though nothing was in the way, %llu late, %u hung, "
           "%u crashes\n",
           (unsigned long long)(now - started) / 1000000, sums.calls, sums.wrong, sums.lost, sums.unexcused, sums.late, hung,
           crashes);
    fflush(stdout);
}

static void course(void)
{
    uint64_t started = now_us(), until = started + seconds * 1000000ull;
    /* Caches have a quarter of the time, or a minute, to fill. */
    uint64_t warm = seconds < 240 ? seconds * 250000ull : 60000000;
    unsigned count = seconds / 30 + 2 < 3 ? 3 : seconds / 30 + 2 > SAMPLES / 2 ? SAMPLES / 2 : seconds / 30 + 2;
    uint64_t next = started + warm, step = (until - next) / (count - 1);
    turns_at = kill_every == 0 ? UINT64_MAX : started + kill_every * 1000000ull;
    while (sample_count < count) {
        for (enum shape shape = 0; shape < SHAPES; shape++)
            tell(&clients[shape], 'G');
        start_hostile();
        for (; now_us() < next; usleep(10000)) {
            come_and_go();
            doom();
            look_after_all();
        }
        rest();
        tell_progress(started);
        next += step;
    }
    if (away)
        turns_at = 0, come_and_go();
    together('P', 'p');
    look_after_all();
}

/* ---- The verdict ------------------------------------------------------------------------------------------------------ */

static unsigned long long lost, doubled, forged;

static void mismatch(unsigned long long *counter, const char *what, enum target target, uint64_t at, unsigned book,
                     unsigned times)
{
    if ((*counter)++ < 10)
        complain("%s: the call of client %s, thread %llu, number %llu to the server %s: the client's book says %u, it had "
                 "its effect %u times",
                 what, shape_names[at / NUMBERS / SOAK_THREADS], (unsigned long long)(at / NUMBERS % SOAK_THREADS),
                 (unsigned long long)(at % NUMBERS), target_names[target], book, times);
}

/* Compares what the clients know with what the servers have done, or with the calls back that were served. */
static void compare(enum target target, const char *done_name, bool back)
{
    static uint8_t book[1 << 16], done[1 << 16];
    int books = ledger_open(directory, "book", target), dones = ledger_open(directory, done_name, target);
    for (unsigned stream = 0; stream < HONEST * SOAK_THREADS; stream++) {
        off_t begin = (off_t)stream * NUMBERS;
        for (off_t at = begin; at < begin + NUMBERS; at += (off_t)sizeof book) {
            /* Bytes that were never written lie behind the end of a file, or in a hole; calls are numbered consecutively. */
            memset(book, 0, sizeof book);
            memset(done, 0, sizeof done);
            if (pread(books, book, sizeof book, at) < 0 || pread(dones, done, sizeof done, at) < 0)
                err(1, "a ledger");
            bool any = false;
            for (size_t i = 0; i < sizeof book; i++) {
                bool must = back ? book[i] & WITH_BACK : book[i] & MUST;
                any = any || book[i] || done[i];
                if (must && done[i] == 0)
                    mismatch(&lost, "lost", target, (uint64_t)at + i, book[i], done[i]);
                if (done[i] > 1)
                    mismatch(&doubled, "doubled", target, (uint64_t)at + i, book[i], done[i]);
                if (done[i] > 0 && book[i] == 0)
                    mismatch(&forged, "nobody has made it", target, (uint64_t)at + i, book[i], done[i]);
            }
            /* Calls without an effect leave holes, but never such long ones. A call that nobody made could lie anywhere. */
            if (!any) {
                off_t data = lseek(dones, at, SEEK_DATA);
                if (data < 0 || data >= begin + NUMBERS)
                    break;
                at = data / (off_t)sizeof book * (off_t)sizeof book;
                if (data >= at + (off_t)sizeof book)
                    continue;
                at -= (off_t)sizeof book;
            }
        }
    }
    close(books);
    close(dones);
}

static bool all_good = true;

static void __attribute__((format(printf, 2, 3))) verdict(bool good, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    all_good = all_good && good;
    printf(good ? "ok    " : "FAIL  ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
    fflush(stdout);
}

static void print_line(const char *name, enum target target, enum route route, const struct soak_line *line)
{
    if (line->calls == 0)
        return;
    printf("      %-7s %-6s %-7s %10llu  %10.1f ", name, target_names[target], route == DIRECT ? "direct" : "proxied",
           (unsigned long long)line->calls, (double)line->worst / 1e3);
    for (int status = 0; status < 128; status++) {
        if (line->statuses[status] == 0)
            continue;
        const char *text = status == NO_CLIENT ? "no CLIENT" : clnt_sperrno((enum clnt_stat)status);
        const char *colon = strstr(text, ": ");
        printf(" %llu %s;", (unsigned long long)line->statuses[status], colon == NULL ? text : colon + 2);
    }
    printf("\n");
}

/* The least in the last third of the samples, less the most in the first third. */
static long growth(unsigned who, size_t member)
{
    unsigned third = sample_count < 6 ? 1 : sample_count / 3;
    long first = 0, last = LONG_MAX;
    for (unsigned i = 0; i < third; i++) {
        long before, after;
        memcpy(&before, (const char *)&samples[who][i] + member, sizeof before);
        memcpy(&after, (const char *)&samples[who][sample_count - 1 - i] + member, sizeof after);
        first = before > first ? before : first;
        last = after < last ? after : last;
    }
    return last - first;
}

/* The library keeps as many blocks as were ever in use at a time: up to eight of 1088 KiB of each of two kinds, and 4 MiB of
 * each of two lengths of Receives (src/memory.rs). In a short run the first sample may come before any of these are in use; in a
 * long one the busiest moment of one kind may come late. */
static long slack_kb(void) { return seconds < 240 ? 2 * 8 * 1088 + 2 * 4096 : 8 * 1088; }
/* Descriptors: a loop uses one more while it has many connections. */
enum { SLACK_MAPPINGS = 32, SLACK_DESCRIPTORS = 2 };

static unsigned judge_growth(void)
{
    unsigned growing = 0;
    printf("      %-14s %21s %8s %15s %15s %11s\n", "held at rest", "KiB", "grown", "descriptors", "mappings", "threads");
    for (unsigned who = 0; who < TARGETS + SHAPES; who++) {
        if (who == DYING || who == TARGETS + S_DOOMED)
            continue;
        const struct held *first = &samples[who][0], *last = &samples[who][sample_count - 1];
        long kb = growth(who, offsetof(struct held, kb));
        bool grows = kb > slack_kb() || growth(who, offsetof(struct held, descriptors)) > SLACK_DESCRIPTORS ||
                     growth(who, offsetof(struct held, mappings)) > SLACK_MAPPINGS ||
                     growth(who, offsetof(struct held, threads)) > 0;
        growing += grows;
        printf("      %-14s %9ld -> %8ld %8ld %6ld -> %5ld %6ld -> %5ld %4ld -> %3ld%s\n", holder(who), first->kb, last->kb,
               kb > 0 ? kb : 0, first->descriptors, last->descriptors, first->mappings, last->mappings, first->threads,
               last->threads, grows ? "  grows" : "");
        if (!grows && getenv("SOAK_VERBOSE") == NULL)
            continue;
        printf("        KiB:");
        for (unsigned i = 0; i < sample_count; i++)
            printf(" %ld", samples[who][i].kb);
        printf("; segments: %ld -> %ld\n", first->segments, last->segments);
    }
    return growing;
}

static int report(void)
{
    struct sums sums = sum_up();
    unsigned long long damaged = 0;
    unsigned long long shared = 0, bytes = 0, made = 0, called_back = 0;
    unsigned long long succeeded[TARGETS][ROUTES] = {0};
    uint64_t worst = 0, making = 0, directly = 0;
    int64_t latest = INT64_MIN;
    printf("      %-7s %-6s %-7s %10s  %10s  outcomes\n", "client", "server", "", "calls", "worst ms");
    for (enum shape shape = 0; shape < SHAPES; shape++) {
        const struct soak_tally *tally = tallies[shape];
        for (enum target target = 0; target < TARGETS; target++) {
            for (enum route route = 0; route < ROUTES; route++) {
                const struct soak_line *line = &tally->lines[target][route];
                print_line(shape_names[shape], target, route, line);
                succeeded[target][route] += line->statuses[RPC_SUCCESS];
                if (target == STEADY && route == DIRECT && line->worst > worst)
                    worst = line->worst;
            }
        }
        shared += tally->shared, bytes += tally->bytes, made += tally->made, called_back += tally->called_back;
        making = tally->making > making ? tally->making : making;
        directly = tally->making_directly > directly ? tally->making_directly : directly;
        latest = tally->latest > latest ? tally->latest : latest;
    }
    lost += sums.lost;
    for (enum target target = 0; target < TARGETS; target++) {
        damaged += found[target]->damaged;
        compare(target, "journal", false);
        compare(target, "back", true);
    }
    unsigned growing = judge_growth();
    printf("      %llu CLIENTs, the slowest in %.1f ms (directly %.1f); %llu calls back; %llu MiB; %u lives of the server that dies, "
           "%u of a client; the latest call ended "
           "%.1f ms after its timeout; up to %llu segments of "
           "memory were shared\n",
           made, (double)making / 1e3, (double)directly / 1e3, called_back, bytes >> 20, lives, doomed, (double)latest / 1e3, shared);
    printf("      %llu calls were refused by a server as damaged; the cramped one took %ld of %d MiB of address space\n", damaged,
           samples[CRAMPED][sample_count - 1].space >> 10, CRAMPED_MEMORY >> 20);
    bool reached = true;
    for (enum target target = 0; target < TARGETS; target++) {
        for (enum route route = 0; route < ROUTES; route++)
            reached = reached && succeeded[target][route] > 0;
    }
    verdict(reached,
            "calls succeeded directly and behind proxies: %llu and %llu at the server that stays, %llu and %llu at the one "
            "that dies, %llu and %llu at the cramped one",
            succeeded[STEADY][DIRECT], succeeded[STEADY][PROXIED], succeeded[DYING][DIRECT], succeeded[DYING][PROXIED],
            succeeded[CRAMPED][DIRECT], succeeded[CRAMPED][PROXIED]);
    verdict(sums.wrong == 0, "of %llu calls, %llu wrong", sums.calls, sums.wrong);
    verdict(lost == 0, "%llu lost: all that succeeded have had their effect", lost);
    verdict(doubled + forged == 0, "%llu doubled, %llu that nobody made: no call has had its effect twice", doubled,
            forged);
    verdict(sums.unexcused == 0, "%llu failed though nothing was in the way; the longest took %.1f ms", sums.unexcused,
            (double)worst / 1e3);
    verdict(sums.late == 0 && hung == 0, "%llu late by more than a second, %u hung", sums.late, hung);
    verdict(crashes == 0, "%u crashes", crashes);
    verdict(strcmp(device, "local") == 0 ? shared > 0 : shared == 0,
            "memory was shared where it should be: %llu segments", shared);
    if (hostile_program != NULL)
        verdict(mistreated == 0, "what hostile clients are told is well-formed");
    verdict(failures == 0, "at the end all clients are served");
    verdict(growing == 0, "nobody grows: by more than %ld KiB, %d descriptors and %d mappings, nor by a thread", slack_kb(),
            SLACK_DESCRIPTORS, SLACK_MAPPINGS);
    return !all_good;
}

int soak_main(int argc, char **argv)
{
    int option;
    while ((option = getopt(argc, argv, "d:l:b:D:t:k:s:H:")) != -1) {
        switch (option) {
        case 'd': directory = optarg; break;
        case 'l': library = optarg; break;
        case 'b': bindings = optarg; break;
        case 'D': device = optarg; break;
        case 't': seconds = (unsigned)atoi(optarg); break;
        case 'k': kill_every = (unsigned)atoi(optarg); break;
        case 'H': hostile_program = optarg; break;
        case 's': seed = strtoull(optarg, NULL, 0); break;
        default: return 2;
        }
    }
    if (library == NULL || bindings == NULL || seconds < 4)
        errx(2, "see the first lines of soak.c");
    if (getenv("TEST_PATIENCE") != NULL)
        factor = atof(getenv("TEST_PATIENCE"));
    if (getenv("SOAK_SLOW") != NULL)
        slow = (unsigned)atoi(getenv("SOAK_SLOW"));
    for (enum target target = 0; target < TARGETS; target++) {
        found[target] = map_file(directory, "found", (unsigned)target, sizeof *found[target]);
        start_server(target);
        for (enum proxy which = 0; which < PROXIES; which++)
            start_proxy(target, which);
    }
    for (enum shape shape = 0; shape < S_DOOMED; shape++)
        start_client(shape);
    tallies[S_DOOMED] = map_file(directory, "tally", S_DOOMED, sizeof *tallies[S_DOOMED]);
    for (enum shape shape = 0; shape < S_DOOMED; shape++) {
        if (hear(&clients[shape]) != 'R')
            errx(1, "client %s does not start", shape_names[shape]);
    }
    course();
    int failed = report();
    fflush(stdout);
    finish();
    return failed;
}
