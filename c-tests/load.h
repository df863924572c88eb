/* load.h: the load test: many clients and servers at once, by a plan that follows from a seed.
 *
 * The plan (load_plan.c) is a pure function of the seed, of the client process, its thread and the number of the
 * operation, so that runs over different transports make the same calls, which can be compared one by one. The servers
 * and the proxies before them are in load_server.c, the clients in load_client.c; load.c starts them, watches over
 * them and compares their records. The programs know only libtirpc; where librpcrdma is loaded they find its functions
 * for calls back by name. */
#ifndef LOAD_H
#define LOAD_H

#include <netconfig.h>
#include <rpc/rpc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { LOAD_PROG = 0x20004C44, LOAD_BACK = 0x20004C45, LOAD_VERS = 1 };

enum procedure {
    DO = 1,   /* takes bytes, gives bytes, after a delay */
    POST,     /* one-way: is counted */
    TALLY,    /* what was counted */
    BACK,     /* calls the client back before it answers */
    FAIL,     /* fails in one of libtirpc's ways, or never answers */
    STATE,    /* what the server's process holds */
};

enum {
    BYTES_MAX = (16 << 20) - 4096, /* most bytes either way: with the rest of the message at most 16 MiB */
    LOOSE_TCP = 16 << 10,          /* ... in calls over stock tcp that may be given up: it writes without a timeout */
    PROCESSES = 16,                /* most client processes */
    THREADS = 32,                  /* most threads of one */
    PATIENT = 60000,               /* milliseconds of a call that is not meant to time out */
};

/* The servers of a run. */
enum role {
    PLAIN,  /* healthy; svc_run */
    HASTY,  /* healthy, but many calls are given up before their time; a loop of its own over svc_pollfd */
    FAR,    /* healthy, over a slow connection; svc_getreqset */
    SLOW,   /* takes its time */
    HUNG,   /* stopped before the first call and until after the last */
    NAP,    /* stopped again and again for a while */
    MORTAL, /* dies and returns */
    CUT,    /* healthy, but a proxy cuts, halves and stalls the connections */
    ROLES
};
extern const char *const role_names[ROLES];

enum handle {
    OWN,    /* of the thread */
    SHARED, /* of all threads of the process */
    TWIN,   /* the same, on the descriptor of SHARED */
    BROKEN, /* of the thread; its connection is shut down */
    MUTED,  /* of the thread; some calls over it are never answered */
    HANDLES
};

enum credential { NONE, SHARED_SYS, OWN_SYS };

/* Kinds of operation. */
enum kind {
    K_NULL,   /* procedure 0 */
    K_SMALL,  /* up to 4 KiB each way */
    K_LARGE,  /* up to 16 MiB each way */
    K_FAR,    /* over the slow connection */
    K_POST,   /* without a reply */
    K_TALLY,  /* all that were posted have come */
    K_POKE,   /* a timeout of zero, though there are results */
    K_FAIL,   /* an error that the server gives */
    K_MUTE,   /* never answered; or after such ones */
    K_BACK,   /* with calls back in its midst */
    K_HASTY,  /* given up soon, at a healthy server */
    K_SLOW,   /* at the slow one */
    K_HUNG,   /* at the one that hangs */
    K_NAP,    /* at the one that hangs again and again */
    K_MORTAL, /* at the one that dies */
    K_CUT,    /* over connections that are cut */
    K_BREAK,  /* the program shuts its connection down, and makes another */
    KINDS
};
extern const char *const kind_names[KINDS];

/* Statuses beyond those of clnt_stat: */
enum { NO_CLIENT = 100, SKIPPED = 101 };

struct operation {
    enum kind kind;
    enum role role;
    enum handle handle;
    enum credential credential;
    enum procedure procedure;
    uint64_t tag;         /* names the operation, and is the key of its contents */
    uint32_t size, want;  /* bytes of arguments, and of results */
    uint32_t extra;       /* to the procedure */
    uint32_t delay;       /* microseconds at the server */
    uint32_t timeout;     /* milliseconds */
    bool steady;          /* does not race: ends with `status` over every transport */
    int status;
};

struct plan {
    uint64_t seed;
    unsigned processes, threads;
    uint32_t operations; /* of a thread */
};

struct operation plan_operation(const struct plan *plan, unsigned process, unsigned thread, uint32_t number);
/* Whether an operation that may end in several ways may end with this status. */
bool plan_allows(const struct operation *operation, int status);
/* A number below `bound` that follows from the seed, for choices beside the operations. */
uint64_t plan_choice(uint64_t seed, const char *what, unsigned which, uint64_t bound);
/* The credits that a process asks for or grants. Servers are numbered by their role, clients after them. */
unsigned plan_credits(uint64_t seed, unsigned process);
/* Whether a client process has only one credit in all at this server: librpcrdma then refuses calls without a reply. */
bool plan_one_credit(const struct plan *plan, unsigned process, enum role role);

/* Makes the bytes that follow from a key, and tells whether bytes are those; 8 at a time. */
void contents_fill(char *bytes, size_t length, uint64_t key);
bool contents_right(const char *bytes, size_t length, uint64_t key);
uint64_t contents_sum(const char *bytes, size_t length);
/* What contents_sum() gives for those bytes. */
uint64_t contents_expected(size_t length, uint64_t key);
/* The keys of what goes to the server and of what comes back from it. */
uint64_t key_there(uint64_t tag), key_back(uint64_t tag);

struct ask {
    u_quad_t tag;
    uint32_t want, extra, delay;
    u_int length;
    char *bytes;
};
struct answer {
    u_quad_t tag;
    uint32_t flavor, uid;
    u_quad_t sum; /* of the arguments' bytes; or a count */
    u_int length;
    char *bytes;
};
bool_t xdr_ask(XDR *xdrs, struct ask *ask);
bool_t xdr_answer(XDR *xdrs, struct answer *answer);

/* BACK's extra: how often to call back, and through which CLIENT the callback itself makes a call; see back_extra(). */
struct back {
    unsigned times;
    bool nested;
    unsigned process, thread;
    enum handle handle;
};
uint32_t back_extra(struct back back);
struct back back_of(uint32_t extra);
/* The streams of POST calls that are counted separately: one for each thread and CLIENT. */
uint32_t post_stream(unsigned process, unsigned thread, enum handle handle);
enum { STREAMS = PROCESSES * THREADS * HANDLES };
/* How FAIL fails; extra's values. */
enum { FAILURES = 6, MUTE = FAILURES };

/* What a client process records, in a file that load.c maps too. */
struct record {
    uint8_t status;
    uint8_t wrong;    /* contents are not what the plan says, or another rule was broken */
    uint16_t again;   /* CLIENTs made for it */
    uint32_t elapsed; /* microseconds in clnt_call */
    uint64_t sum;     /* of what came */
};
struct doing {
    uint32_t number;      /* operation; those before are done */
    uint32_t timeout;     /* milliseconds */
    uint64_t since;       /* now_us(), 0 between calls */
};
struct book {
    struct plan plan;
    unsigned process;
    int fds_before, fds_after;
    long kb_before, kb_midway, kb_after; /* resident */
    uint64_t overslept;   /* microseconds: the most by which a thread that only sleeps woke late */
    uint64_t making;      /* microseconds: the longest that making a CLIENT took */
    uint32_t made;        /* CLIENTs */
    uint32_t called_back;
    struct doing doing[THREADS];
    struct record records[];
};
static inline struct record *book_record(struct book *book, unsigned thread, uint32_t number)
{
    return &book->records[(size_t)thread * book->plan.operations + number];
}
struct book *book_open(const char *path, size_t *length);

uint64_t now_us(void);
/* Where servers and proxies are: 127.0.0.1, or what LOAD_ADDRESS says. In network order. */
uint32_t load_address(void);
/* A listener that can be made again on the same port at once. */
int listen_at(unsigned *port);
int count_descriptors(void);
long resident_kb(void);

/* What librpcrdma adds, NULL without it. */
extern CLIENT *(*reverse_create)(SVCXPRT *, rpcprog_t, rpcvers_t);
extern bool_t (*serve_back)(CLIENT *, rpcprog_t, rpcvers_t, void (*)(struct svc_req *, SVCXPRT *));

CLIENT *connect_to(const char *netid, unsigned port);
int serve_main(int argc, char **argv);
int proxy_main(int argc, char **argv);
int client_main(int argc, char **argv);
int probe_main(int argc, char **argv);

#endif
