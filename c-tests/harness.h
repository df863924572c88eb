/* harness.h: what a test is, and the servers that it talks to.
 *
 * A test is a function that returns if it passes. Each runs in a process of its own, in a process group of its own,
 * with a time limit, so that a crash, a hang or a forgotten server spoils one line of the report and nothing else.
 * The order of things is kept by pipes, never by sleeping: a server says when it is ready and when it has entered a
 * blocking procedure, and stays there until the test lets it go. */
#ifndef SUITE_HARNESS_H
#define SUITE_HARNESS_H

#include "suite.h"
#include <rpc/rpc.h>
#include <netconfig.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

/* What must hold for the test to go on. */
#define REQUIRE(condition)                                                                                            \
    do {                                                                                                              \
        if (!(condition))                                                                                             \
            test_failed(__FILE__, __LINE__, #condition);                                                              \
    } while (0)
/* The same for a call; prints what the status was. */
#define REQUIRE_STATUS(call, wanted) require_status(__FILE__, __LINE__, #call, (call), (wanted))
#define TRACE(...)                                                                                                    \
    do {                                                                                                              \
        if (getenv("SUITE_TRACE"))                                                                                    \
            fprintf(stderr, __VA_ARGS__);                                                                             \
    } while (0)

void test_failed(const char *file, int line, const char *what) __attribute__((noreturn));
void require_status(const char *file, int line, const char *what, enum clnt_stat got, enum clnt_stat wanted);

/* Where the suite runs: which netid the programs name, and what is under them. */
struct leg {
    const char *netid;
    bool library;  /* librpcrdma is in the process */
    bool redirect; /* ... and moves tcp to rdma */
    bool rpcbind;  /* there is an rpcbind to register with */
    bool gss;      /* there is a KDC */
    bool bound;    /* the procedures have bindings: their data is placed */
    bool adapter;  /* over an RDMA device: SUITE_ADDRESS is set */
    bool threads;  /* several threads of the server serve: nothing keeps two requests in order */
    bool slow;     /* valgrind or a sanitizer: fewer rounds */
};
extern struct leg leg;

enum need {
    RPCBIND = 1,   /* registers or looks up */
    TCP_ONLY = 2,  /* an entry point without a netid: reaches rdma only by redirection */
    RDMA_ONLY = 4, /* needs the library */
    GSS = 8,
    UNBOUND = 32,  /* shows what happens without a binding */
    SOCKET = 64,   /* an adapter's connection does not outlive a fork, and has no socket to shut down or to listen at */
    ORDER = 128,   /* the server serves one request after the other */
    NOISY = 16,    /* libtirpc itself writes to stderr here */
};

struct test {
    const char *name;
    void (*run)(long);
    long argument;
    unsigned needs;
    const char *not_stock; /* why stock libtirpc cannot pass */
};
#define TEST(function, ...) {.name = #function, .run = function, __VA_ARGS__}
#define END_OF_TESTS {.name = NULL}

extern const struct test connect_tests[], call_tests[], thread_tests[], server_tests[], misuse_tests[], gss_tests[];

struct server {
    pid_t pid;
    unsigned port; /* 0: ask rpcbind */
    int events;    /* the server's standard output, after the READY line */
    int control;   /* one byte lets one blocked call go on */
};

/* Starts the suite's server with these options (NULL at the end) and waits until it is ready. */
struct server server_start(const char *option, ...) __attribute__((sentinel));
/* The server shared by tests that do it no harm. */
struct server *server_shared(void);
/* Waits until the server has entered a blocking procedure. */
void server_await_block(struct server *server);
void server_release(struct server *server);
void server_kill(struct server *server);
/* Waits for a server that ends by itself; returns its wait status. */
int server_wait(struct server *server);

struct netconfig *the_netconfig(void);
struct sockaddr_in address_of(const struct server *server);
/* A CLIENT for version 2 of the suite at this server, by clnt_tli_create(RPC_ANYFD). */
CLIENT *client_of(const struct server *server);

/* Fills in bytes that depend on place and seed, so that nothing that is moved, lost or repeated goes unnoticed. */
void fill(char *bytes, size_t length, unsigned seed);
unsigned long long checksum(const char *bytes, size_t length);
suite_blob blob_of(size_t length, unsigned seed);
/* Echoes `length` bytes and compares. */
void require_echo(CLIENT *client, size_t length, unsigned seed);

/* More bytes than any Send holds, whatever RPCRDMA_INLINE says: they go in chunks. */
enum { NOT_INLINE = 300000 };

double now(void);
/* The factor for time limits: TEST_PATIENCE, or else the load per processor if that is above three. */
double patience(void);
int rounds(int normally);

static const struct timeval patient = {.tv_sec = 25};

#endif
