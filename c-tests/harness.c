/* harness.c: runs the tests. See harness.h.
 *
 *   suite [-n netid] [-L] [-R] [-b] [-g] [-s] [--list] [test ...]
 *
 *   -n netid that the programs name (tcp)    -L librpcrdma is loaded    -R it redirects tcp
 *   -b an rpcbind is there                   -g a KDC is there          -s slow: fewer rounds, longer limits
 *
 * SUITE_WRAP is prepended to the server's command line (valgrind ...). */
#define _GNU_SOURCE
#include "harness.h"
#include "where.h"
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LIMIT = 20, SLOW_LIMIT = 120 };

struct leg leg = {.netid = "tcp"};
static struct server shared;
static char server_program[PATH_MAX];

void test_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: not so: %s\n", file, line, what);
    fflush(NULL);
    _exit(1);
}

void require_status(const char *file, int line, const char *what, enum clnt_stat got, enum clnt_stat wanted)
{
    if (got == wanted)
        return;
    fprintf(stderr, "%s:%d: %s\n    gave \"%s\" (%d)", file, line, what, clnt_sperrno(got), got);
    fprintf(stderr, ", not \"%s\" (%d)\n", clnt_sperrno(wanted), wanted);
    fflush(NULL);
    _exit(1);
}

double patience(void)
{
    const char *factor = getenv("TEST_PATIENCE");
    if (factor)
        return atof(factor);
    double load;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (getloadavg(&load, 1) != 1 || load <= 3 * (double)processors)
        return 1;
    return load / (double)processors;
}

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int rounds(int normally)
{
    int fewer = normally / 10;
    return !leg.slow ? normally : fewer > 0 ? fewer : 1;
}

/* ---- Servers ---------------------------------------------------------------------------------------------------- */

/* Reads a byte of the server's output; exits (the test fails) if the server has gone. */
static char next_event(int fd)
{
    char c;
    ssize_t n;
    do
        n = read(fd, &c, 1);
    while (n < 0 && errno == EINTR);
    if (n != 1) {
        fprintf(stderr, "the server went away\n");
        test_failed(__FILE__, __LINE__, "n == 1");
    }
    return c;
}

static struct server start(char *const *argv)
{
    int events[2], control[2];
    if (pipe2(events, O_CLOEXEC) < 0 || pipe2(control, O_CLOEXEC) < 0)
        err(1, "pipe");
    pid_t pid = fork();
    if (pid < 0)
        err(1, "fork");
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(control[0], 0);
        dup2(events[1], 1);
        execvp(argv[0], argv);
        warn("%s", argv[0]);
        _exit(127);
    }
    close(events[1]);
    close(control[0]);
    struct server server = {.pid = pid, .events = events[0], .control = control[1]};
    char line[64];
    size_t length = 0;
    do
        line[length] = next_event(server.events);
    while (line[length] != '\n' && ++length < sizeof line - 1);
    line[length] = '\0';
    /* A server that has daemonised is another process by now, and tells its process id. */
    int serving;
    REQUIRE(sscanf(line, "READY %u %d", &server.port, &serving) == 2);
    server.pid = serving;
    TRACE("server %d on port %u\n", server.pid, server.port);
    return server;
}

/* SUITE_WRAP, split at blanks, then the server itself. Returns how many words. */
static int server_command(char **argv, int most)
{
    static char wrap[PATH_MAX * 2];
    int argc = 0;
    snprintf(wrap, sizeof wrap, "%s", getenv("SUITE_WRAP") ? getenv("SUITE_WRAP") : "");
    for (char *word = strtok(wrap, " "); word != NULL && argc < most - 4; word = strtok(NULL, " "))
        argv[argc++] = word;
    argv[argc++] = server_program;
    argv[argc++] = "-n";
    argv[argc++] = (char *)leg.netid;
    return argc;
}

struct server server_start(const char *option, ...)
{
    char *argv[64];
    int argc = server_command(argv, 48);
    va_list options;
    va_start(options, option);
    for (; option != NULL; option = va_arg(options, const char *))
        argv[argc++] = (char *)option;
    va_end(options);
    argv[argc] = NULL;
    return start(argv);
}

struct server *server_shared(void)
{
    return &shared;
}

void server_await_block(struct server *server)
{
    REQUIRE(next_event(server->events) == 'B');
}

void server_release(struct server *server)
{
    REQUIRE(write(server->control, "r", 1) == 1);
}

void server_kill(struct server *server)
{
    kill(server->pid, SIGKILL);
    server_wait(server);
}

int server_wait(struct server *server)
{
    int status = 0;
    while (waitpid(server->pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

/* ---- Clients ---------------------------------------------------------------------------------------------------- */

struct netconfig *the_netconfig(void)
{
    struct netconfig *config = getnetconfigent(leg.netid);
    REQUIRE(config != NULL);
    return config;
}

struct sockaddr_in address_of(const struct server *server)
{
    struct sockaddr_in address = where_address();
    address.sin_port = htons((uint16_t)server->port);
    return address;
}

CLIENT *client_of(const struct server *server)
{
    struct netconfig *config = the_netconfig();
    struct sockaddr_in address = address_of(server);
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, config, &netbuf, SUITE_PROG, SUITE_V2, 0, 0);
    if (client == NULL)
        clnt_pcreateerror("clnt_tli_create");
    REQUIRE(client != NULL);
    freenetconfigent(config);
    return client;
}

void fill(char *bytes, size_t length, unsigned seed)
{
    unsigned state = seed * 2654435761u + 12345;
    for (size_t i = 0; i < length; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (char)(state >> 24);
    }
}

unsigned long long checksum(const char *bytes, size_t length)
{
    unsigned long long sum = 14695981039346656037ull;
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ (unsigned char)bytes[i]) * 1099511628211ull;
    return sum;
}

suite_blob blob_of(size_t length, unsigned seed)
{
    char *bytes = malloc(length ? length : 1);
    REQUIRE(bytes != NULL);
    fill(bytes, length, seed);
    return (suite_blob){.suite_blob_len = (u_int)length, .suite_blob_val = bytes};
}

void require_echo(CLIENT *client, size_t length, unsigned seed)
{
    suite_blob sent = blob_of(length, seed), got = {0};
    REQUIRE_STATUS(suite_echo_2(&sent, &got, client), RPC_SUCCESS);
    REQUIRE(got.suite_blob_len == length);
    REQUIRE(length == 0 || memcmp(got.suite_blob_val, sent.suite_blob_val, length) == 0);
    REQUIRE(clnt_freeres(client, (xdrproc_t)xdr_suite_blob, (caddr_t)&got));
    free(sent.suite_blob_val);
}

/* ---- The run ---------------------------------------------------------------------------------------------------- */

static const char *why_not(const struct test *test)
{
    if ((test->needs & RPCBIND) && !leg.rpcbind)
        return "no rpcbind here";
    if ((test->needs & TCP_ONLY) && strcmp(leg.netid, "tcp") != 0)
        return "an entry point without a netid";
    if ((test->needs & RDMA_ONLY) && !leg.library)
        return "about the library itself";
    if ((test->needs & GSS) && !leg.gss)
        return "no KDC here";
    if ((test->needs & SOCKET) && leg.adapter)
        return "an adapter's connection is no socket";
    if ((test->needs & UNBOUND) && leg.bound)
        return "a binding makes it otherwise";
    if ((test->needs & ORDER) && leg.threads)
        return "requests are served beside each other";
    if (test->not_stock != NULL && !leg.library)
        return test->not_stock;
    return NULL;
}

/* One server for all tests, started again when a test has brought it down. */
static void revive_shared(void)
{
    if (shared.pid > 0 && waitpid(shared.pid, NULL, WNOHANG) == 0)
        return;
    if (shared.pid > 0) {
        close(shared.events);
        close(shared.control);
    }
    shared = server_start("-c", "tli", NULL);
    setpgid(shared.pid, shared.pid);
}

/* Everything in the test's process group must go, daemonised servers too. */
static void end_group(pid_t group)
{
    kill(-group, SIGKILL);
    while (waitpid(-group, NULL, 0) > 0)
        ;
}

static void show(int output)
{
    FILE *text = fdopen(dup(output), "r");
    char line[400];
    rewind(text);
    for (int n = 0; n < 40 && fgets(line, sizeof line, text); n++)
        printf("      | %s", line);
    fclose(text);
}

/* Runs one test in a child. Returns whether it passed; its output is in the file `output`. */
static bool run(const struct test *test, int output)
{
    int limit = leg.slow ? SLOW_LIMIT : LIMIT, status;
    fflush(stdout);
    pid_t child = fork();
    if (child < 0)
        err(1, "fork");
    if (child == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        sigset_t none;
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        int null = open("/dev/null", O_RDWR);
        dup2(null, 0);
        dup2(null, 1);
        dup2(output, 2);
        test->run(test->argument);
        exit(0);
    }
    setpgid(child, child);
    /* The limit is kept here and not by alarm(2) in the child: some tests want SIGALRM for themselves. */
    double begin = now();
    sigset_t only_child;
    sigemptyset(&only_child);
    sigaddset(&only_child, SIGCHLD);
    bool late = false;
    pid_t done;
    while ((done = waitpid(child, &status, WNOHANG)) == 0) {
        double left = begin + limit * patience() - now();
        if (left <= 0) {
            late = true;
            kill(child, SIGKILL);
            waitpid(child, &status, 0);
            break;
        }
        /* Not for the whole time that is left: the limit follows the load. */
        struct timespec wait = {.tv_sec = left > 5 ? 5 : (time_t)left, .tv_nsec = 100000000};
        sigtimedwait(&only_child, NULL, &wait);
    }
    end_group(child);
    if (late)
        dprintf(output, "longer than %.0f seconds\n", now() - begin);
    else if (WIFSIGNALED(status))
        dprintf(output, "died of signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (WEXITSTATUS(status) > 1)
        dprintf(output, "exit status %d\n", WEXITSTATUS(status));
    bool passed = !late && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    /* Nobody asked the library to print anything. */
    struct stat st;
    if (passed && !(test->needs & NOISY) && fstat(output, &st) == 0 && st.st_size > 0 && !getenv("SUITE_TRACE")) {
        dprintf(output, "(passed, but printed the above)\n");
        passed = false;
    }
    return passed;
}

static bool chosen(const char *name, int count, char **names)
{
    if (count == 0)
        return true;
    for (int i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0)
            return true;
    }
    return false;
}

int main(int argc, char **argv)
{
    bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    int option;
    while (!list && (option = getopt(argc, argv, "n:LRbgsB")) != -1) {
        switch (option) {
        case 'n': leg.netid = optarg; break;
        case 'L': leg.library = true; break;
        case 'R': leg.redirect = true; break;
        case 'b': leg.rpcbind = true; break;
        case 'g': leg.gss = true; break;
        case 's': leg.slow = true; break;
        case 'B': leg.bound = true; break;
        default: errx(2, "usage: suite [-n netid] [-LRbgs] [--list] [test ...]");
        }
    }
    leg.adapter = getenv("SUITE_ADDRESS") != NULL;
    leg.threads = getenv("THREADS") != NULL;
    ssize_t length = readlink("/proc/self/exe", server_program, sizeof server_program - 16);
    if (length < 0)
        err(1, "/proc/self/exe");
    /* Under valgrind this still names the suite; the server is in the same folder. */
    server_program[length] = '\0';
    char *slash = strrchr(server_program, '/');
    strcpy(slash + 1, "server");

    static const struct test *const groups[] = {connect_tests, call_tests, thread_tests, server_tests,
                                                misuse_tests, gss_tests};
    enum { GROUPS = sizeof groups / sizeof *groups };
    if (list) {
        for (int g = 0; g < GROUPS; g++) {
            for (const struct test *test = groups[g]; test->name != NULL; test++)
                puts(test->name);
        }
        return 0;
    }

    sigset_t only_child;
    sigemptyset(&only_child);
    sigaddset(&only_child, SIGCHLD);
    sigset_t before;
    signal(SIGCHLD, SIG_DFL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int passed = 0, failed = 0, skipped = 0, known = 0;
    for (int g = 0; g < GROUPS; g++) {
        for (const struct test *test = groups[g]; test->name != NULL; test++) {
            if (!chosen(test->name, argc - optind, argv + optind))
                continue;
            known++;
            const char *reason = why_not(test);
            if (reason != NULL) {
                printf("skip  %s (%s)\n", test->name, reason);
                skipped++;
                continue;
            }
            revive_shared();
            int output = memfd_create("output", MFD_CLOEXEC);
            double started = now();
            sigprocmask(SIG_BLOCK, &only_child, &before);
            bool good = run(test, output);
            sigprocmask(SIG_SETMASK, &before, NULL);
            printf("%s  %s", good ? "ok  " : "FAIL", test->name);
            if (now() - started > 2)
                printf(" (%.1f s)", now() - started);
            printf("\n");
            if (good) {
                passed++;
            } else {
                failed++;
                show(output);
                kill(shared.pid, SIGKILL);
                waitpid(shared.pid, NULL, 0);
                shared.pid = 0;
            }
            close(output);
        }
    }
    if (shared.pid > 0)
        server_kill(&shared);
    if (argc > optind && known < argc - optind)
        errx(2, "no such test");
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed != 0;
}
