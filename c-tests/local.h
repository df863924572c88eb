/* local.h: memory that two processes of one host share (RPCRDMA_PROVIDER=local): what can only be tested with processes.
 *
 * The process that is started (local.c) uses the library only in its children, each of which plays one part, so that every end
 * is a process. The tests are in local_hostile.c (memory that is rewritten at random), local_ends.c (processes that are killed or
 * stopped), local_handshake.c (how memory comes to be shared, and what a peer can do with it), local_loops.c (requests that are
 * decoded late, and servers whose loop is elsewhere) and local_idle.c (figures). */
#ifndef LOCAL_H
#define LOCAL_H

#include <err.h>
#include <errno.h>
#include <rpc/rpc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

enum { PROG = 0x20004C59, LONGEST = 1 << 20 };
/* Procedures. SINK says how many bytes came; LATE does too, after a while, and its bytes are all alike. NEST runs another loop in
 * its routine, LEAVE leaves the loop, SLEEP holds it up, and CALL_BACK has a thread call back meanwhile. */
enum { NOTHING, ECHO, SINK, LATE, NEST, LEAVE, SLEEP, CALL_BACK };
/* What the library shares: a page of words, a ring behind it, and the outbox. */
enum { HEAD = 4 << 10, RING = 4 << 20, OUTBOX = 4 << 20, SEGMENT = HEAD + RING + OUTBOX };
/* The places of some of the words. */
enum {
    PRODUCED = 0, BASE = 1, WIDE = 2, CONSUMED = 16, WAITS = 32, WANTS_ROOM = 33, COMPANY = 34, WOKEN = 48, RUNG = 49, SHOWN = 64
};

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "%s, line %d: %s (errno %d)", __FILE__, __LINE__, #what, errno))

/* ---- local.c ---- */

/* What the processes tell each other. */
extern struct told {
    atomic_bool stop;
    /* By honest ends: calls that were answered correctly, in all, and connections over shared memory. */
    atomic_ulong right, shared;
    /* By ends whose peer is not honest, or is killed. */
    atomic_ulong tried, answered, timed_out, connected;
    /* The longest time that a call has taken beyond its own time-out, in microseconds; and that creating a CLIENT has taken. */
    atomic_ulong late, connecting;
    /* By the hostile end. */
    atomic_ulong rewritten, theirs;
    /* Calls that were decoded late: those that came whole, those for which something else was decoded, and the others. */
    atomic_ulong whole, mixed, refused;
    atomic_int tcp_port;
} *told;

/* Prints a result line. */
void __attribute__((format(printf, 2, 3))) check(bool good, const char *format, ...);
/* Milliseconds. */
double now(void);
double patience(void);
void raise_to(atomic_ulong *most, double value);

/* Each process has a seed of its own. */
extern uint64_t seed;
void sow(uint64_t from, uint64_t part);
uint64_t next_random(uint64_t *state);
uint64_t below(uint64_t limit);

/* Starts a part, which ends with this process. */
pid_t part(void (*run)(int), int argument);
/* Ends a part that is no longer needed. */
void end(pid_t pid);
/* Whether a part has not ended. */
bool lives(pid_t pid);
/* Whether a part ends well, in time. */
bool ends(pid_t pid, double milliseconds);

int descriptors(pid_t pid);
/* Counts the mappings of a process: all, or only those that it shares with peers (`ours`). */
int mappings(pid_t pid, bool ours);
struct held {
    int descriptors, segments, mappings;
};
struct held holds(pid_t pid);
/* Whether a process comes to hold what it held before. */
bool holds_again(pid_t pid, const char *who, struct held before);

struct data {
    u_int length;
    char *bytes;
};
bool_t xdr_data(XDR *xdrs, struct data *data);

struct server {
    pid_t pid;
    int port;
};
struct server start_server(void (*run)(int));
void serve(struct svc_req *request, SVCXPRT *xprt);
/* Writes its port to `to`; to the standard output, with a word before it. */
void be_server(int to);

/* NULL on failure; rpc_createerr tells why. */
CLIENT *try_to_connect(const char *address, int port);
/* The same, but a failure ends the process. */
CLIENT *connected(int port);

/* What a client sends and gets; the latter lies between bytes that nobody may touch. */
struct buffers {
    char *sent;
    char *guarded;
};
struct buffers make_buffers(void);
u_int length_of_call(uint64_t *state);
/* Makes a call of `length` bytes; *right tells whether the answer is right. */
enum clnt_stat echo(CLIENT *client, struct buffers *buffers, uint64_t *state, u_int length, long milliseconds, bool *right);

/* Makes calls until it is told to stop; each has to be answered correctly. */
void be_honest(int port);
void *honest_thread(void *port);
/* Waits until `count` more calls of the honest clients have been answered. */
bool sees_answers(unsigned long count);
/* Makes calls that need only end, until it is told to stop; creates a new CLIENT when one has failed. */
void call_anyhow(int port);

/* ---- local_hostile.c: the library's calls of mmap(2) come there ---- */

void *real_mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset);
/* Segments that this process has mapped. */
extern atomic_int mapped;
void random_client(double seconds);
void random_server(double seconds);

/* ---- local_ends.c ---- */

void kill_clients(int count);
void kill_servers(int count);
void stopped(void);

/* ---- local_handshake.c ---- */

void handshake_client(void);
void another_users(void);
void handshake_server(bool and_wait);
void segment(void);

/* ---- local_loops.c ---- */

/* What a routine does for NOTHING and the procedures from NEST on, before it answers. */
void serve_elsewhere(rpcproc_t what, SVCXPRT *xprt);
void outbox(void);
void elsewhere(void);

/* ---- local_idle.c ---- */

void idle(int count);

#endif
