/* soak.h: the soak test: honest clients of eight shapes, and servers of four threads, run among faults for any length of time.
 *
 * How a lost or a doubled call is detected reliably: every call that has an effect has a number, counted up by the thread
 * that makes it, and is made once. Before the call, the client writes into its book that the effect may happen; after
 * success, that it must have happened. The server writes into its journal, for each number, how often it was served. Book
 * and journal are files, written by one system call for each byte, so that they survive any process that is killed. At the
 * end they are compared: a call that has succeeded has had its effect once, one that has failed at most once, and one that
 * was never made not at all. A call without a reply must have had its effect once a later call on the same connection has
 * succeeded. Calls back are counted the same way, by the client in place of the server.
 *
 * How growth is detected: from time to time all clients stop and destroy their CLIENTs, and every process gives free memory
 * back. What the clients and the servers that are never killed hold then is compared over the run: the least in its last
 * third with the most in its first, since the library keeps as much as was ever needed at a time.
 *
 * soak.c starts everything, injects faults and judges; soak_client.c and soak_server.c are the two ends. The contents, the
 * wire format and the proxies are those of the load test (load.h); the hostile clients are tests/bad_peers/soak.rs. */
#ifndef SOAK_H
#define SOAK_H

#include "load.h"

enum target {
    STEADY,  /* never killed */
    DYING,   /* killed every so many seconds, and started again */
    CRAMPED, /* never killed, and has hardly any descriptors and memory */
    TARGETS
};
extern const char *const target_names[TARGETS];

enum route { DIRECT, PROXIED, ROUTES };

/* The proxies before a server. */
enum proxy { CUTTING, ALTERING, PROXIES };

enum shape {
    S_SMALL,  /* up to 4 KiB, some without a reply, some that fail */
    S_LARGE,  /* up to 8 MiB */
    S_PLACED, /* up to 1 MiB, placed directly */
    S_CROWD,  /* four threads with one CLIENT */
    S_BACK,   /* called back */
    S_TWO,    /* in Version Two */
    S_MOVED,  /* a program of tcp, moved */
    S_HASTY,  /* gives most calls up before their time, and makes many CLIENTs */
    HONEST,
    /* Without checksums, through a proxy that alters bytes: it must live and end in time, but may receive anything. */
    S_ALTERED = HONEST,
    S_DOOMED, /* is killed again and again; where memory is shared, it rewrites that */
    SHAPES
};
extern const char *const shape_names[SHAPES];

enum {
    SOAK_THREADS = 4,    /* most of a client */
    SERVICE_THREADS = 4, /* of a server */
    NUMBERS = 1 << 26,   /* most calls of a thread to one server */
};

/* What the checksum of a call begins with. */
#define SOAK_CHECK 0x736f616b

/* The tag that identifies a call. Clients from HONEST on are not judged by their calls. */
static inline uint64_t soak_tag(enum target target, unsigned client, unsigned thread, uint32_t number)
{
    return (uint64_t)target << 48 | (uint64_t)client << 40 | (uint64_t)thread << 32 | number;
}
static inline enum target tag_target(uint64_t tag) { return (enum target)(tag >> 48); }
static inline unsigned tag_client(uint64_t tag) { return (unsigned)(tag >> 40 & 0xff); }
static inline unsigned tag_thread(uint64_t tag) { return (unsigned)(tag >> 32 & 0xff); }
static inline uint32_t tag_number(uint64_t tag) { return (uint32_t)tag; }

/* ask.extra: a checksum of the rest of the head and the length, so that a call that was damaged in a stream without
 * checksums can be told from one that the library has corrupted. */
uint32_t soak_check(const struct ask *ask);

/* Books, journals: one byte for each number of each thread of each client. */
enum { MAY = 1, MUST = 2, WITH_BACK = 4 };
static inline off_t byte_of(uint64_t tag)
{
    return ((off_t)tag_client(tag) * SOAK_THREADS + tag_thread(tag)) * NUMBERS + tag_number(tag);
}
int ledger_open(const char *directory, const char *name, enum target target);
void ledger_write(int fd, uint64_t tag, uint8_t value);
uint8_t ledger_read(int fd, uint64_t tag);
/* Adds one; saturates. */
void ledger_count(int fd, uint64_t tag);

/* What a client reports while it runs, in a file that soak.c maps too. */
struct soak_line {
    uint64_t calls, statuses[128];
    uint64_t worst; /* microseconds: the longest call that succeeded */
};
struct soak_tally {
    struct soak_line lines[TARGETS][ROUTES];
    uint64_t wrong;     /* contents that are not right, or an outcome that there is not */
    uint64_t lost;      /* success without an effect */
    uint64_t unexcused; /* failed, though nothing was in the way */
    uint64_t late;      /* returned too long after the timeout */
    uint64_t shared;    /* segments that it has shared with servers at a time */
    int64_t latest;     /* microseconds after the timeout */
    uint64_t made, called_back, bytes;
    /* Microseconds: the longest time that creating a CLIENT took, and creating one directly, with nothing in the way. */
    uint64_t making, making_directly;
    uint64_t overslept; /* microseconds: the most by which a thread that only sleeps woke late, lately */
    struct doing doing[SOAK_THREADS];
};

/* What a server has found, reported in the same way; over all its lives. */
struct soak_found {
    uint64_t wrong;   /* arguments of honest calls that are not right, or calls back that went wrong */
    uint64_t damaged; /* calls that were refused: what was in them was damaged on the way */
    uint64_t served;
};

void *map_file(const char *directory, const char *name, unsigned number, size_t size);

int soak_main(int argc, char **argv);
int soak_serve_main(int argc, char **argv);
int soak_client_main(int argc, char **argv);

#endif
