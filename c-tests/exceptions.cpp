/* XDR procedures and dispatch routines that are left without returning: by C++ exceptions and by pthread_exit(3).
 *
 *   exceptions NETID          the tests, one after the other, each in a process of its own
 *   exceptions NETID NAME     one of them
 *
 * Over rdma everything goes on with the same CLIENT and the same connection afterwards. Over stock tcp the tests only look
 * at what is thrown: libtirpc's CLIENT stays locked with all signals blocked, after clnt_freeres() a lock of all CLIENTs is
 * held too, and the server's end of the connection is in the middle of a record. */
#include <err.h>
#include <dirent.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

enum : u_int { PROG = 0x20004C52, VERS = 1 };
/* Procedures; each takes a number. */
enum : u_int {
    ECHO = 1,    /* the number and one */
    BYTES,       /* so many bytes */
    DESCRIPTORS, /* how many the server has open */
    CAUGHT,      /* exceptions that have left the server's loop */
    ARGUMENTS,   /* catches what svc_getargs throws */
    RESULTS,     /* catches what svc_sendreply throws */
    FREEING,     /* catches what svc_freeargs throws */
    THROW,       /* what leaves the dispatch routine: thrown there, */
    THROW_ARGUMENTS, /* or in its XDR procedures */
    THROW_RESULTS,
    EXIT, /* pthread_exit(3), there or in its XDR procedure */
    EXIT_ARGUMENTS,
    WAIT,    /* as ECHO, when there was a RESUME: it runs as a coroutine */
    WAITING, /* whether there is a WAIT */
    RESUME,  /* as ECHO */
};

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const timeval patient = {60, 0}, soon = {0, 100000};
static bool stock; /* over tcp */

struct Thrown {
    int number;
};
static int alive; /* objects on stacks that are unwound */
struct Object {
    Object() { alive++; }
    ~Object() { alive--; }
};

/* ---- XDR procedures ---------------------------------------------------------------------------------------------- */

/* `words`: how many words it encodes or decodes first. */
struct Bad {
    u_int words;
    bool exits;
};
static bool_t xdr_bad(XDR *xdrs, Bad *bad)
{
    Object object;
    u_int word = 7;
    for (u_int i = 0; i < bad->words; i++)
        REQUIRE(xdrs->x_op == XDR_FREE || xdr_u_int(xdrs, &word));
    if (bad->exits)
        pthread_exit(bad);
    throw Thrown{(int)bad->words};
}
struct Bytes {
    char *at;
    u_int length;
};
static bool_t xdr_some(XDR *xdrs, Bytes *bytes) { return xdr_bytes(xdrs, &bytes->at, &bytes->length, ~0u); }

static xdrproc_t procedure(bool_t (*f)(XDR *, Bad *)) { return reinterpret_cast<xdrproc_t>(f); }
static const xdrproc_t number = (xdrproc_t)xdr_u_int, bad = procedure(xdr_bad);

/* ---- The server -------------------------------------------------------------------------------------------------- */

static u_int caught;
static ucontext_t looping, waiting;
static bool waits, resumes;

static u_int descriptors()
{
    u_int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    REQUIRE(folder != nullptr);
    while (readdir(folder) != nullptr)
        count++;
    closedir(folder);
    return count;
}

template <typename Work> static bool throws(Work work, int what)
{
    try {
        work();
    } catch (const Thrown &thrown) {
        return thrown.number == what;
    }
    return false;
}

static void serve(svc_req *request, SVCXPRT *xprt)
{
    Object object;
    u_int n = 0;
    Bad some = {1, false}, none = {0, false}, exits = {1, true};
    auto answer = [&](u_int result) { svc_sendreply(xprt, number, (char *)&result); };
    switch (request->rq_proc) {
    case ARGUMENTS:
        REQUIRE(throws([&] { svc_getargs(xprt, bad, (char *)&some); }, 1));
        return svcerr_decode(xprt);
    case THROW_ARGUMENTS:
        svc_getargs(xprt, bad, (char *)&some);
        errx(1, "not thrown");
    case EXIT_ARGUMENTS:
        svc_getargs(xprt, bad, (char *)&exits);
        errx(1, "still here");
    case WAIT:
        waits = true;
        REQUIRE(swapcontext(&waiting, &looping) == 0);
        waits = false;
    }
    if (!svc_getargs(xprt, number, (char *)&n))
        return svcerr_decode(xprt);
    switch (request->rq_proc) {
    case RESUME:
        resumes = true;
        return answer(n + 1);
    case WAITING:
        return answer(waits);
    case ECHO:
    case WAIT:
        return answer(n + 1);
    case BYTES: {
        std::vector<char> memory(n, 'x');
        Bytes bytes = {memory.data(), n};
        svc_sendreply(xprt, reinterpret_cast<xdrproc_t>(xdr_some), (char *)&bytes);
        return;
    }
    case DESCRIPTORS:
        return answer(descriptors());
    case CAUGHT:
        return answer(caught);
    case RESULTS:
        some.words = n;
        REQUIRE(throws([&] { svc_sendreply(xprt, bad, (char *)&some); }, (int)n));
        return svcerr_systemerr(xprt);
    case FREEING:
        REQUIRE(throws([&] { svc_freeargs(xprt, bad, (char *)&none); }, 0));
        return answer(n);
    case THROW:
        throw Thrown{0};
    case THROW_RESULTS:
        svc_sendreply(xprt, bad, (char *)&some);
        errx(1, "not thrown");
    case EXIT:
        pthread_exit(nullptr);
    }
    svcerr_noproc(xprt);
}

/* One turn of a program's own loop. */
static void turn()
{
    std::vector<pollfd> polled(svc_pollfd, svc_pollfd + svc_max_pollfd);
    int ready = poll(polled.data(), polled.size(), -1);
    if (ready > 0)
        svc_getreq_poll(polled.data(), ready);
}
/* The same on a separate stack, unless a dispatch routine waits there. */
static void coroutine_turn()
{
    static char stack[1 << 18];
    if (waits)
        turn();
    else {
        REQUIRE(getcontext(&waiting) == 0);
        waiting.uc_stack.ss_sp = stack;
        waiting.uc_stack.ss_size = sizeof stack;
        waiting.uc_link = &looping;
        makecontext(&waiting, turn, 0);
        REQUIRE(swapcontext(&looping, &waiting) == 0);
    }
    if (waits && resumes)
        REQUIRE(swapcontext(&looping, &waiting) == 0);
    resumes = false;
}
static void (*serves)();
static void *loop(void *)
{
    for (;;)
        try {
            serves();
        } catch (const Thrown &) {
            REQUIRE(alive == 0);
            caught++;
        }
}

static netconfig *transport;
static sockaddr_in server = {};

static void start_server(void (*by)())
{
    serves = by;
    int told[2];
    REQUIRE(pipe(told) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    server.sin_family = AF_INET;
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(told[0]);
        t_bind address = {{sizeof server, sizeof server, &server}, 64};
        SVCXPRT *listener = svc_tli_create(RPC_ANYFD, transport, &address, 0, 0);
        REQUIRE(listener != nullptr && svc_reg(listener, PROG, VERS, serve, nullptr));
        socklen_t length = sizeof server;
        REQUIRE(getsockname(listener->xp_fd, (sockaddr *)&server, &length) == 0);
        REQUIRE(write(told[1], &server, sizeof server) == sizeof server);
        close(told[1]);
        for (;;) { /* A thread that has ended is followed by another. */
            pthread_t thread;
            void *result;
            REQUIRE(pthread_create(&thread, nullptr, loop, nullptr) == 0);
            REQUIRE(pthread_join(thread, &result) == 0);
        }
    }
    close(told[1]);
    REQUIRE(read(told[0], &server, sizeof server) == sizeof server);
    close(told[0]);
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

static CLIENT *client()
{
    netbuf address = {sizeof server, sizeof server, &server};
    CLIENT *clnt = clnt_tli_create(RPC_ANYFD, transport, &address, PROG, VERS, 0, 0);
    if (clnt == nullptr)
        errx(1, "%s", clnt_spcreateerror("no CLIENT"));
    return clnt;
}
static u_int ask(CLIENT *clnt, u_int proc, u_int n)
{
    u_int result = 0;
    if (clnt_call(clnt, proc, number, (char *)&n, number, (char *)&result, patient) != RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(clnt, "a call"));
    return result;
}
static clnt_stat outcome(CLIENT *clnt, u_int proc, u_int n, timeval limit = patient)
{
    u_int result = 0;
    return clnt_call(clnt, proc, number, (char *)&n, number, (char *)&result, limit);
}
/* The CLIENT goes on as if nothing had happened; over tcp there is a new one. */
static void goes_on(CLIENT *&clnt, clnt_stat last)
{
    sigset_t mask, none;
    if (stock) {
        sigemptyset(&none);
        pthread_sigmask(SIG_SETMASK, &none, nullptr);
        clnt = client();
    } else {
        rpc_err error;
        clnt_geterr(clnt, &error);
        REQUIRE(error.re_status == last);
    }
    REQUIRE(alive == 0);
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    for (int signal = 1; signal < 32; signal++)
        REQUIRE(!sigismember(&mask, signal));
    REQUIRE(ask(clnt, ECHO, 41) == 42);
}
static void ends(CLIENT *clnt)
{
    if (!stock)
        clnt_destroy(clnt);
}

static void arguments()
{
    CLIENT *clnt = client();
    u_int result;
    for (u_int words : {0, 1, 5000, 100000})
        for (int i = 0; i < 10 && (!stock || words < 5000); i++) {
            Bad thrown = {words, false};
            REQUIRE(throws([&] { clnt_call(clnt, ECHO, bad, (char *)&thrown, number, (char *)&result, patient); },
                           (int)words));
            goes_on(clnt, RPC_CANTENCODEARGS);
        }
    ends(clnt);
}
static void results()
{
    CLIENT *clnt = client();
    for (u_int length : {4u, 2000u, 200000u}) /* in a Send, and in a Reply chunk */
        for (int i = 0; i < 40; i++) {
            Bad thrown = {1 + length / 8, false};
            REQUIRE(throws([&] { clnt_call(clnt, BYTES, number, (char *)&length, bad, (char *)&thrown, patient); },
                           (int)thrown.words));
            goes_on(clnt, RPC_CANTDECODERES);
        }
    ends(clnt);
}
static void freeing()
{
    CLIENT *clnt = client();
    Bad thrown = {3, false};
    for (int i = 0; i < 3; i++) {
        REQUIRE(throws([&] { clnt_freeres(clnt, bad, (char *)&thrown); }, 3));
        if (stock)
            return;
        goes_on(clnt, RPC_SUCCESS);
    }
    ends(clnt);
}
/* An exception in a call that an XDR procedure makes leaves both calls. */
static CLIENT *inner;
static bool_t xdr_calls(XDR *, Bad *thrown)
{
    u_int result;
    clnt_call(inner, ECHO, bad, (char *)thrown, number, (char *)&result, patient);
    errx(1, "not thrown");
}
static void nested()
{
    CLIENT *clnt = client();
    Bad thrown = {2, false};
    u_int n = 1;
    for (int i = 0; i < 5; i++)
        for (bool decodes : {false, true}) {
            inner = stock ? client() : clnt;
            REQUIRE(throws([&] {
                clnt_call(clnt, ECHO, decodes ? number : procedure(xdr_calls), decodes ? (char *)&n : (char *)&thrown,
                          decodes ? procedure(xdr_calls) : number, (char *)&thrown, patient);
            }, 2));
            goes_on(clnt, decodes ? RPC_CANTDECODERES : RPC_CANTENCODEARGS);
        }
    ends(clnt);
}

/* A thread that ends in an XDR procedure. */
struct Ending {
    CLIENT *clnt;
    bool decodes;
};
static Bad exits = {1, true};
static void *end_in_call(void *argument)
{
    Object object;
    auto *ending = static_cast<Ending *>(argument);
    u_int n = 1;
    bool decodes = ending->decodes;
    clnt_call(ending->clnt, ECHO, decodes ? number : bad, decodes ? (char *)&n : (char *)&exits,
              decodes ? bad : number, decodes ? (char *)&exits : (char *)&n, patient);
    errx(1, "still here");
}
static void thread_exit()
{
    CLIENT *clnt = client();
    for (int i = 0; i < 5; i++)
        for (bool decodes : {false, true}) {
            Ending ending = {clnt, decodes};
            pthread_t thread;
            void *result;
            REQUIRE(pthread_create(&thread, nullptr, end_in_call, &ending) == 0);
            REQUIRE(pthread_join(thread, &result) == 0 && result == &exits);
            goes_on(clnt, decodes ? RPC_CANTDECODERES : RPC_CANTENCODEARGS);
        }
    ends(clnt);
}

/* ---- What a server's XDR procedures and dispatch routines throw -------------------------------------------------- */

static void server_catches()
{
    CLIENT *clnt = client();
    for (int i = 0; i < 10; i++) {
        REQUIRE(outcome(clnt, ARGUMENTS, 1) == RPC_CANTDECODEARGS);
        REQUIRE(outcome(clnt, FREEING, 1) == RPC_SUCCESS);
        /* With libtirpc the record holds the beginning of the first reply, and then the second one. */
        for (u_int words : {0, 1, 50000})
            REQUIRE(stock || outcome(clnt, RESULTS, words) == RPC_SYSTEMERROR);
        REQUIRE(ask(clnt, ECHO, 1) == 2);
    }
    clnt_destroy(clnt);
}
/* Requests that get no reply leave nothing behind. */
static void leaves(const std::vector<u_int> &procedures, bool exceptions)
{
    CLIENT *other = client();
    u_int thrown = 0, open = ask(other, DESCRIPTORS, 0);
    for (int round = 0; round < 3; round++)
        for (u_int proc : procedures) {
            CLIENT *clnt = client();
            REQUIRE(ask(clnt, ECHO, 7) == 8);
            REQUIRE(outcome(clnt, proc, 0, soon) == RPC_TIMEDOUT);
            thrown += exceptions;
            if (round > 0 && !stock)
                REQUIRE(ask(clnt, ECHO, 1) == 2);
            if (round > 1 && !stock) {
                REQUIRE(outcome(clnt, proc, 0, soon) == RPC_TIMEDOUT);
                thrown += exceptions;
            }
            clnt_destroy(clnt);
        }
    REQUIRE(ask(other, CAUGHT, 0) == thrown);
    /* The server notices sooner or later that its clients have gone. */
    const timespec moment = {0, 5000000};
    for (int i = 0; ask(other, DESCRIPTORS, 0) != open; i++) {
        REQUIRE(i < 2000);
        nanosleep(&moment, nullptr);
    }
    clnt_destroy(other);
}
static void dispatch_throws() { leaves({THROW, THROW_ARGUMENTS, THROW_RESULTS}, true); }
static void dispatch_exits() { leaves({EXIT, EXIT_ARGUMENTS}, false); }

static void *ask_to_wait(void *clnt)
{
    REQUIRE(ask(static_cast<CLIENT *>(clnt), WAIT, 41) == 42);
    return nullptr;
}
static void coroutine()
{
    CLIENT *one = client(), *other = client();
    for (int i = 0; i < 5; i++) {
        pthread_t thread;
        REQUIRE(pthread_create(&thread, nullptr, ask_to_wait, one) == 0);
        while (!ask(other, WAITING, 0)) {}
        REQUIRE(ask(other, RESUME, 1) == 2);
        REQUIRE(pthread_join(thread, nullptr) == 0);
    }
    clnt_destroy(one);
    clnt_destroy(other);
}

static const struct {
    const char *name, *text;
    void (*test)();
    void (*serves)();
} tests[] = {
    {"arguments", "an exception passes from an argument's procedure to the caller of clnt_call", arguments, svc_run},
    {"results", "an exception passes from a result's procedure to the caller of clnt_call", results, svc_run},
    {"freeing", "an exception passes from a result's procedure to the caller of clnt_freeres", freeing, svc_run},
    {"nested", "an exception passes through two calls, one in the other", nested, svc_run},
    {"exit", "a thread ends in the XDR procedures of a call", thread_exit, svc_run},
    {"server", "a dispatch routine catches what its XDR procedures throw", server_catches, svc_run},
    {"svc_run", "an exception passes from a dispatch routine to the caller of svc_run", dispatch_throws, svc_run},
    {"loop", "an exception passes from a dispatch routine to a loop of the program's own", dispatch_throws, turn},
    {"leave", "a thread in svc_run ends in a dispatch routine, and another goes on", dispatch_exits, svc_run},
    {"end", "a thread in a loop of the program's own ends in a dispatch routine, and another goes on", dispatch_exits, turn},
    {"coroutine", "a dispatch routine that waits as a coroutine is not taken for one that was left", coroutine, coroutine_turn},
};

int main(int count, char **words)
{
    REQUIRE(count >= 2);
    transport = getnetconfigent(words[1]);
    REQUIRE(transport != nullptr);
    stock = strcmp(words[1], "tcp") == 0;
    int failed = 0;
    for (auto &it : tests) {
        if (count > 2 && strcmp(words[2], it.name) != 0)
            continue;
        fflush(stdout);
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) {
            alarm(300);
            start_server(it.serves);
            it.test();
            _exit(0);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child);
        if (status == 0)
            printf("ok    %s\n", it.text);
        else {
            printf("FAIL  %s (%s: status %#x)\n", it.text, it.name, (unsigned)status);
            failed = 1;
        }
    }
    return failed;
}
