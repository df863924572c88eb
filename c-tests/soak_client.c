/* soak_client.c: an honest client of the soak. See soak.h.
 *
 *   load soak-client NETID SHAPE SEED DIR ROUTES PORT...
 *       For each target: its own port, and that of the proxy before it.
 *
 * SOAK_REWRITES=yes: it also rewrites the memory that it shares with its servers.
 *
 * ROUTES is "direct", "proxied" or "both". Writes 'R' when it is ready, and then obeys one byte at a time: 'G' begins or
 * resumes; 'Q' stops all threads and destroys all CLIENTs, and is answered with 'q'; 'P' makes some calls over fresh CLIENTs
 * and is answered with 'p', or 'x' if one of them failed; 'E' ends. */
#define _GNU_SOURCE
#include "soak.h"
#include <arpa/inet.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* A CLIENT that may have to be replaced while other threads wait in it. */
struct slot {
    pthread_rwlock_t lock;
    CLIENT *client;
    enum route route;
    uint32_t left; /* calls until it is replaced */
    bool lost;     /* replaced before the next call */
};

/* Posted calls that a later reply on the same connection proves to have been sent, if the connection is still the same. */
enum { POSTS = 64 };

struct thread {
    pthread_t id;
    unsigned number;
    uint64_t random;
    uint32_t next[TARGETS]; /* numbers */
    struct slot own[TARGETS];
    uint64_t posted[TARGETS][POSTS];
    unsigned posts[TARGETS], connections[TARGETS];
    int schedstat; /* a descriptor */
};

struct attempt {
    enum procedure procedure;
    uint32_t size, want, delay, timeout; /* bytes, bytes, microseconds, milliseconds */
};

static const char *netid;
static enum shape shape;
static bool routes[ROUTES];
static unsigned ports[TARGETS][ROUTES], thread_count;
static struct soak_tally *tally;
static struct slot shared[TARGETS];
static struct thread threads[SOAK_THREADS];
static int books[TARGETS], journals[TARGETS], backs[TARGETS];
static double factor = 1;
static atomic_uint complaints;

/* All threads stop here. */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static bool closed = true;
static unsigned waiting;

static uint64_t below(struct thread *thread, uint64_t bound)
{
    thread->random ^= thread->random << 13;
    thread->random ^= thread->random >> 7;
    thread->random ^= thread->random << 17;
    return thread->random % bound;
}

/* All orders of magnitude are equally likely. */
static uint32_t magnitude(struct thread *thread, uint32_t most)
{
    unsigned bits = 0;
    while (most >> bits > 1)
        bits++;
    uint64_t bound = (uint64_t)1 << below(thread, bits + 1);
    uint64_t value = bound - 1 + below(thread, bound);
    return value < most ? (uint32_t)value : most;
}

static void add(uint64_t *counter) { __atomic_add_fetch(counter, 1, __ATOMIC_RELAXED); }

static void most(uint64_t *longest, uint64_t value)
{
    uint64_t known = __atomic_load_n(longest, __ATOMIC_RELAXED);
    while (value > known &&
           !__atomic_compare_exchange_n(longest, &known, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* Microseconds for which each thread was ready to run but had no processor so far, plus one. 0: not known. */
static void look_at_waits(uint64_t waits[SOAK_THREADS])
{
    for (unsigned i = 0; i < thread_count; i++) {
        char text[64] = "";
        unsigned long long ran, waited;
        int schedstat = __atomic_load_n(&threads[i].schedstat, __ATOMIC_ACQUIRE);
        /* 0 where the kernel does not count. */
        bool known = schedstat > 0 && pread(schedstat, text, sizeof text - 1, 0) > 0 &&
                     sscanf(text, "%llu %llu", &ran, &waited) == 2;
        waits[i] = known ? waited / 1000 + 1 : 0;
    }
}

/* For how long a thread has had no processor since `before`. Where threads share CLIENTs, and it waits for the one that reads,
 * plus the longest such time of another thread. */
static uint64_t starved(const struct thread *thread, const uint64_t before[SOAK_THREADS])
{
    uint64_t now[SOAK_THREADS], own = 0, other = 0;
    look_at_waits(now);
    for (unsigned i = 0; i < thread_count; i++) {
        uint64_t waited = before[i] > 0 && now[i] > before[i] ? now[i] - before[i] : 0;
        if (&threads[i] == thread)
            own = waited;
        else if (shape == S_CROWD)
            most(&other, waited);
    }
    return own + other;
}

static void complain(uint64_t tag, const struct attempt *op, const char *what, int status, uint64_t elapsed,
                     uint64_t waited, CLIENT *client, enum route route)
{
    if (atomic_fetch_add(&complaints, 1) >= 20)
        return;
    char *text = client == NULL ? "" : clnt_sperror(client, "");
    fprintf(stderr,
            "client %s thread %u, at %s%s, number %u, procedure %d, %u bytes there, %u back, delay %u us, timeout %u ms: "
            "%s; status %d after %.3f s, of which %.3f s without a processor%.*s\n",
            shape_names[shape], tag_thread(tag), target_names[tag_target(tag)],
            route == DIRECT ? "" : " behind the proxy", tag_number(tag), op->procedure, op->size, op->want, op->delay,
            op->timeout, what, status, (double)elapsed / 1e6, (double)waited / 1e6, (int)strcspn(text, "\n"), text);
}

/* ---- CLIENTs -------------------------------------------------------------------------------------------------------- */

static void called_back(struct svc_req *request, SVCXPRT *transport)
{
    struct ask ask = {0};
    if (request->rq_proc != DO || !svc_getargs(transport, (xdrproc_t)xdr_ask, (char *)&ask)) {
        svcerr_decode(transport);
        /* Frees what was decoded before decoding failed. */
        svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
        return;
    }
    bool right = ask.extra == soak_check(&ask) && tag_client(ask.tag) == shape && tag_thread(ask.tag) < SOAK_THREADS &&
                 tag_target(ask.tag) < TARGETS && contents_right(ask.bytes, ask.length, key_back(ask.tag));
    if (!right && shape >= HONEST) {
        svcerr_decode(transport);
    } else if (!right) {
        add(&tally->wrong);
        fprintf(stderr, "client %s: the arguments of call back %#llx are wrong\n", shape_names[shape],
                (unsigned long long)ask.tag);
        svcerr_decode(transport);
    } else {
        ledger_count(backs[tag_target(ask.tag)], ask.tag);
        struct answer answer = {.tag = ask.tag, .length = ask.want, .bytes = malloc(ask.want + 1)};
        contents_fill(answer.bytes, answer.length, key_there(ask.tag));
        svc_sendreply(transport, (xdrproc_t)xdr_answer, (char *)&answer);
        free(answer.bytes);
        add(&tally->called_back);
    }
    svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
}

static CLIENT *make(enum target target, enum route route)
{
    CLIENT *client = NULL;
    /* A machine may be so busy that a startup takes longer than its limit of ten seconds. */
    for (int tries = target == STEADY && route == DIRECT ? 20 : 1; tries > 0 && client == NULL; tries--) {
        uint64_t started = now_us();
        client = connect_to(netid, ports[target][route]);
        uint64_t took = now_us() - started;
        most(&tally->making, took);
        if (target == STEADY && route == DIRECT)
            most(&tally->making_directly, took);
        if (client == NULL && rpc_createerr.cf_stat != RPC_TIMEDOUT)
            break;
    }
    if (client == NULL)
        return NULL;
    add(&tally->made);
    if ((shape == S_BACK || shape >= HONEST) && !serve_back(client, LOAD_BACK, LOAD_VERS, called_back))
        errx(1, "client %s: %s", shape_names[shape], clnt_sperror(client, "rpcrdma_clnt_serve"));
    return client;
}

static void slot_empty(struct slot *slot)
{
    if (slot->client != NULL)
        clnt_destroy(slot->client);
    slot->client = NULL;
    slot->lost = false;
}

static void slot_fill(struct slot *slot, enum target target, struct thread *thread)
{
    slot_empty(slot);
    slot->route = !routes[PROXIED] ? DIRECT : !routes[DIRECT] ? PROXIED : (enum route)below(thread, ROUTES);
    /* Each connection through a proxy meets a fate of its own. */
    slot->left = 1 + magnitude(thread, shape >= S_HASTY ? 50 : slot->route == PROXIED ? 500 : 5000);
    slot->client = make(target, slot->route);
}

/* A CLIENT that stays until slot_leave(). NULL: none could be made. */
static CLIENT *slot_enter(struct slot *slot, enum target target, struct thread *thread)
{
    pthread_rwlock_rdlock(&slot->lock);
    if (slot->client != NULL && !slot->lost)
        return slot->client;
    pthread_rwlock_unlock(&slot->lock);
    pthread_rwlock_wrlock(&slot->lock);
    if (slot->client == NULL || slot->lost)
        slot_fill(slot, target, thread);
    pthread_rwlock_unlock(&slot->lock);
    pthread_rwlock_rdlock(&slot->lock);
    return slot->client;
}

static void slot_leave(struct slot *slot, bool lost)
{
    if (lost || __atomic_sub_fetch(&slot->left, 1, __ATOMIC_RELAXED) == 0)
        __atomic_store_n(&slot->lost, true, __ATOMIC_RELAXED);
    pthread_rwlock_unlock(&slot->lock);
}

/* ---- Calls ---------------------------------------------------------------------------------------------------------- */

static struct attempt choose(struct thread *thread, enum target target, enum route route)
{
    struct attempt op = {.procedure = DO};
    uint32_t bytes = 4096;
    uint64_t die = below(thread, 16);
    /* Only the machine itself can delay calls of the first kind. */
    op.timeout = target == STEADY && route == DIRECT && shape < HONEST ? 60000 : 2000 + (uint32_t)below(thread, 6000);
    switch (shape) {
    case S_SMALL:
        op.procedure = die < 3 ? POST : die == 3 ? FAIL : die == 4 ? NULLPROC : DO;
        break;
    case S_LARGE: bytes = 8 << 20; break;
    case S_PLACED: bytes = 1 << 20; break;
    case S_CROWD:
        bytes = 64 << 10;
        op.procedure = die == 0 ? FAIL : die == 1 ? NULLPROC : DO;
        op.delay = die == 2 ? (uint32_t)below(thread, 20000) : 0;
        break;
    case S_BACK:
        bytes = 64 << 10;
        op.procedure = die < 8 ? BACK : DO;
        break;
    case S_TWO: bytes = die == 0 ? 1 << 20 : 16 << 10; break;
    case S_MOVED: bytes = 256 << 10; break;
    case S_ALTERED:
    case S_DOOMED:
        bytes = die == 0 ? 1 << 20 : 16 << 10;
        op.procedure = die < 4 ? BACK : die < 6 ? POST : DO;
        break;
    case S_HASTY:
        bytes = die < 4 ? 1 << 20 : 16 << 10;
        op.delay = die % 2 == 0 ? (uint32_t)below(thread, 30000) : 0;
        op.timeout = 1 + (uint32_t)below(thread, 60);
        break;
    default: break;
    }
    if (op.procedure != NULLPROC) {
        op.size = magnitude(thread, bytes);
        op.want = op.procedure == DO || op.procedure == BACK ? magnitude(thread, bytes) : 0;
    }
    if (op.procedure == POST)
        op.timeout = 0;
    return op;
}

/* How FAIL fails; see soak_server.c. */
static int failure(uint32_t number)
{
    static const int statuses[FAILURES] = {RPC_SYSTEMERROR, RPC_CANTDECODEARGS, RPC_PROCUNAVAIL, RPC_PROGUNAVAIL,
                                           RPC_PROGVERSMISMATCH, RPC_AUTHERROR};
    return statuses[number % FAILURES];
}

static bool right(uint64_t tag, const struct attempt *op, const struct answer *answer)
{
    return answer->tag == tag && answer->sum == contents_expected(op->size, key_there(tag)) &&
           answer->length == op->want && contents_right(answer->bytes, answer->length, key_back(tag));
}

static void judge(struct thread *thread, enum target target, enum route route, uint64_t tag,
                  const struct attempt *op, const struct answer *answer, int status, uint64_t elapsed,
                  uint64_t waited, CLIENT *client)
{
    bool hasty = shape == S_HASTY, excused = target != STEADY || route != DIRECT;
    const char *what = NULL;
    if (shape >= HONEST || (op->procedure == FAIL && status == failure(thread->next[target]))) {
        /* It ended as it should, or may. */
    } else if (status == RPC_SUCCESS) {
        if (op->procedure == FAIL || ((op->procedure == DO || op->procedure == BACK) && !right(tag, op, answer))) {
            add(&tally->wrong);
            what = "the results are wrong";
        } else if (op->procedure == DO || op->procedure == BACK) {
            ledger_write(books[target], tag, MUST | (op->procedure == BACK && answer->uid ? WITH_BACK : 0));
            if (ledger_read(journals[target], tag) == 0) {
                add(&tally->lost);
                what = "success without an effect";
            } else if (op->procedure == BACK && !answer->uid && !excused) {
                add(&tally->unexcused);
                what = "the call back has failed";
            }
        }
    } else if (status == RPC_TIMEDOUT && elapsed + 3000 < (uint64_t)op->timeout * 1000) {
        add(&tally->wrong);
        what = "timed out too soon";
    } else if (target == CRAMPED &&
               (status == RPC_SYSTEMERROR || status == RPC_CANTDECODEARGS || status == RPC_FAILED)) {
        /* The server has no memory for the arguments or the results. */
    } else if (status != RPC_TIMEDOUT && status != RPC_CANTSEND && status != RPC_CANTRECV) {
        add(&tally->wrong);
        what = "this status may not be";
    } else if (!excused && !(hasty && status == RPC_TIMEDOUT)) {
        add(&tally->unexcused);
        what = "failed, though nothing was in the way";
    }
    /* A call without a reply may have to wait until others have their replies. */
    int64_t late = (int64_t)elapsed - (int64_t)op->timeout * 1000;
    if (op->procedure != POST) {
        int64_t latest = __atomic_load_n(&tally->latest, __ATOMIC_RELAXED);
        while (late > latest &&
               !__atomic_compare_exchange_n(&tally->latest, &latest, late, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            ;
    }
    /* This process knows by how much the machine itself delays it: a thread that has slept gets a processor sooner than one that
     * has used one. */
    uint64_t overslept = __atomic_load_n(&tally->overslept, __ATOMIC_RELAXED);
    if (late > (int64_t)((op->procedure == POST ? 61e6 : 1e6) * factor) + 3 * (int64_t)overslept + (int64_t)waited) {
        add(&tally->late);
        what = "late";
    }
    if (what != NULL)
        complain(tag, op, what, status, elapsed, waited, status == RPC_SUCCESS ? NULL : client, route);
}

static unsigned connections(CLIENT *client)
{
    /* The number of CLGET_RDMA_CONNECTIONS: rpcrdma.h is for programs that are linked with the library. */
    unsigned count = 0;
    return clnt_control(client, 0x52444d08, (char *)&count) ? count : 0;
}

/* What was posted on this connection has reached the server (`proven`), or is not known to have reached it. */
static void settle(struct thread *thread, enum target target, bool proven)
{
    /* A server that is killed right after it has answered may not have served them. */
    for (unsigned i = 0; proven && target == STEADY && shape < HONEST && i < thread->posts[target]; i++)
        ledger_write(books[target], thread->posted[target][i], MUST);
    thread->posts[target] = 0;
}

static int call(struct thread *thread, enum target target, enum route route, const struct attempt *op,
                CLIENT *client)
{
    struct soak_line *line = &tally->lines[target][route];
    struct doing *doing = &tally->doing[thread->number];
    bool null = op->procedure == NULLPROC, posts = op->procedure == POST;
    uint64_t tag = soak_tag(target, shape, thread->number, ++thread->next[target]);
    struct ask ask = {.tag = tag, .want = op->want, .delay = op->delay, .length = op->size};
    struct answer answer = {0};
    if (thread->next[target] == NUMBERS - 1)
        errx(1, "client %s has run out of numbers", shape_names[shape]);
    ask.extra = soak_check(&ask);
    ask.bytes = malloc(ask.length + 1);
    contents_fill(ask.bytes, ask.length, key_there(tag));
    if (posts && thread->posts[target] == 0)
        thread->connections[target] = connections(client);
    if (!null && op->procedure != FAIL && shape < HONEST)
        ledger_write(books[target], tag, MAY);
    doing->timeout = op->timeout;
    doing->number = tag_number(tag);
    struct timeval timeout = {.tv_sec = op->timeout / 1000, .tv_usec = op->timeout % 1000 * 1000};
    uint64_t waits[SOAK_THREADS];
    look_at_waits(waits);
    uint64_t started = now_us();
    __atomic_store_n(&doing->since, started, __ATOMIC_RELEASE);
    int status = (int)clnt_call(client, op->procedure, null ? (xdrproc_t)xdr_void : (xdrproc_t)xdr_ask, (char *)&ask,
                                posts  ? NULL
                                : null ? (xdrproc_t)xdr_void
                                       : (xdrproc_t)xdr_answer,
                                posts ? NULL : (char *)&answer,
                                timeout);
    uint64_t elapsed = now_us() - started;
    __atomic_store_n(&doing->since, 0, __ATOMIC_RELEASE);
    uint64_t waited = starved(thread, waits);
    add(&line->calls);
    add(&line->statuses[status & 127]);
    if (status == RPC_SUCCESS && !posts)
        most(&line->worst, elapsed);
    judge(thread, target, route, tag, op, &answer, status, elapsed, waited, client);
    if (posts && status == RPC_SUCCESS)
        thread->posted[target][thread->posts[target]++] = tag;
    else if (!posts && thread->posts[target] > 0)
        settle(thread, target, status == RPC_SUCCESS && connections(client) == thread->connections[target]);
    __atomic_add_fetch(&tally->bytes, op->size + answer.length, __ATOMIC_RELAXED);
    free(ask.bytes);
    free(answer.bytes);
    return status;
}

static void operate(struct thread *thread)
{
    uint64_t die = below(thread, 16);
    enum target target = die < 7 ? STEADY : die < 14 ? DYING : CRAMPED;
    struct slot *slot = shape == S_CROWD ? &shared[target] : &thread->own[target];
    bool lost = false, refused = false;
    CLIENT *client = slot_enter(slot, target, thread);
    if (client == NULL) {
        refused = true;
        add(&tally->lines[target][slot->route].calls);
        add(&tally->lines[target][slot->route].statuses[NO_CLIENT]);
        settle(thread, target, false);
        if (target == STEADY && slot->route == DIRECT && shape < HONEST) {
            add(&tally->unexcused);
            fprintf(stderr, "client %s: no CLIENT though nothing was in the way: %s\n", shape_names[shape],
                    clnt_spcreateerror(""));
        }
    } else {
        struct attempt op = choose(thread, target, slot->route);
        if (op.procedure == POST && thread->posts[target] == POSTS)
            op = (struct attempt){.procedure = DO, .timeout = 60000};
        int status = call(thread, target, slot->route, &op, client);
        refused = status == RPC_CANTSEND || status == RPC_CANTRECV;
        /* Both are tried: a new connection under the same CLIENT, and a new CLIENT. */
        lost = refused && below(thread, 2) == 0;
        lost = lost || (shape == S_HASTY && status == RPC_TIMEDOUT && below(thread, 8) == 0);
        if (lost || slot->left == 1)
            settle(thread, target, false);
    }
    slot_leave(slot, lost);
    /* A thread that is refused again and again leaves the others a processor. */
    if (refused)
        usleep(1000 + (useconds_t)below(thread, 30000));
}

static void *calls(void *argument)
{
    struct thread *thread = argument;
    __atomic_store_n(&thread->schedstat, open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC), __ATOMIC_RELEASE);
    for (;;) {
        pthread_mutex_lock(&gate);
        while (closed) {
            if (shape != S_CROWD) {
                for (enum target target = 0; target < TARGETS; target++) {
                    settle(thread, target, false);
                    slot_empty(&thread->own[target]);
                }
            }
            waiting++;
            pthread_cond_broadcast(&turned);
            pthread_cond_wait(&turned, &gate);
            waiting--;
        }
        pthread_mutex_unlock(&gate);
        operate(thread);
    }
    return NULL;
}

/* The number of segments of memory that the library shares in this process. */
static unsigned segments(void)
{
    char line[512];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "memfd:rpcrdma (") != NULL;
    if (maps != NULL)
        fclose(maps);
    return count;
}

/* A shared range of addresses. */
struct area {
    unsigned long from, to;
};

static unsigned writable(struct area *areas, unsigned most_areas)
{
    char line[512], rights[8];
    unsigned count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && count < most_areas && fgets(line, sizeof line, maps) != NULL) {
        struct area *area = &areas[count];
        if (strstr(line, "memfd:rpcrdma (") != NULL &&
            sscanf(line, "%lx-%lx %7s", &area->from, &area->to, rights) == 3 && rights[1] == 'w')
            count++;
    }
    if (maps != NULL)
        fclose(maps);
    return count;
}

/* Writes through a file, which does no harm when the library unmaps the memory meanwhile. */
static void *rewrites(void *unused)
{
    static struct thread dice = {.random = 1};
    struct area areas[64];
    int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
    dice.random = now_us() | 1;
    for (unsigned turn = 0; memory >= 0; turn++) {
        unsigned count = writable(areas, 64);
        for (unsigned i = 0; i < 32 && count > 0; i++) {
            const struct area *area = &areas[below(&dice, count)];
            uint64_t value = below(&dice, 2) ? below(&dice, 1 << 20) : dice.random;
            /* Most connections live longer when only data is altered; the words that say where data lies come first. */
            uint64_t length = area->to - area->from, at = below(&dice, turn % 8 == 0 ? 512 : length) / 8 * 8;
            if (turn % 8 != 0 && at < 4096)
                continue;
            if (pwrite(memory, &value, 1 + below(&dice, 8), (off_t)(area->from + at)) < 0)
                break;
        }
        usleep(2000);
    }
    return unused;
}

static void *oversleeps(void *unused)
{
    uint64_t lately[2] = {0}, turned_at = now_us();
    unsigned turns = 0;
    for (;;) {
        uint64_t before = now_us();
        usleep(20000);
        uint64_t now = now_us(), late = now - before - 20000;
        if (late > lately[0])
            lately[0] = late;
        if (turns++ % 50 == 0)
            most(&tally->shared, segments());
        if (now - turned_at > 60000000) {
            lately[1] = lately[0];
            lately[0] = 0;
            turned_at = now;
        }
        __atomic_store_n(&tally->overslept, lately[0] > lately[1] ? lately[0] : lately[1], __ATOMIC_RELAXED);
    }
    return unused;
}

static void stop_all(void)
{
    pthread_mutex_lock(&gate);
    closed = true;
    while (waiting < thread_count)
        pthread_cond_wait(&turned, &gate);
    pthread_mutex_unlock(&gate);
    for (enum target target = 0; target < TARGETS; target++)
        slot_empty(&shared[target]);
    malloc_trim(0);
    /* What is in use, and what is only kept. */
    if (getenv("SOAK_MALLOC") != NULL)
        malloc_info(0, stderr);
}

static void go_on(void)
{
    pthread_mutex_lock(&gate);
    closed = false;
    pthread_cond_broadcast(&turned);
    pthread_mutex_unlock(&gate);
}

/* While all threads are stopped: makes a call on behalf of the first one to each server, over a fresh CLIENT. */
static bool probe(void)
{
    bool served = true;
    if (shape >= HONEST)
        return true;
    for (enum target target = 0; target < TARGETS; target++) {
        struct attempt op = {.procedure = DO, .size = 1 << 20, .want = 1 << 20, .timeout = 20000};
        int status = NO_CLIENT;
        /* The cramped server may still be closing its connections. */
        for (int tries = target == CRAMPED ? 20 : 1; tries > 0 && status != RPC_SUCCESS; tries--) {
            CLIENT *client = make(target, DIRECT);
            if (client == NULL) {
                fprintf(stderr, "client %s: at the end no CLIENT: %s\n", shape_names[shape], clnt_spcreateerror(""));
                continue;
            }
            status = call(&threads[0], target, DIRECT, &op, client);
            clnt_destroy(client);
        }
        served = served && status == RPC_SUCCESS;
    }
    malloc_trim(0);
    return served;
}

int soak_client_main(int argc, char **argv)
{
    static const unsigned counts[SHAPES] = {[S_SMALL] = 1, [S_LARGE] = 1, [S_PLACED] = 2, [S_CROWD] = 4,
                                            [S_BACK] = 2,  [S_TWO] = 2,   [S_MOVED] = 1,  [S_HASTY] = 2,
                                            [S_ALTERED] = 1, [S_DOOMED] = 3};
    if (argc < 7 + TARGETS * ROUTES)
        return 2;
    netid = argv[2];
    shape = (enum shape)atoi(argv[3]);
    const char *directory = argv[5];
    routes[DIRECT] = strcmp(argv[6], "proxied") != 0;
    routes[PROXIED] = strcmp(argv[6], "direct") != 0;
    thread_count = counts[shape];
    if (getenv("TEST_PATIENCE") != NULL)
        factor = atof(getenv("TEST_PATIENCE"));
    tally = map_file(directory, "tally", shape, sizeof *tally);
    for (enum target target = 0; target < TARGETS; target++) {
        books[target] = ledger_open(directory, "book", target);
        journals[target] = ledger_open(directory, "journal", target);
        backs[target] = ledger_open(directory, "back", target);
        pthread_rwlock_init(&shared[target].lock, NULL);
        for (enum route route = 0; route < ROUTES; route++)
            ports[target][route] = (unsigned)atoi(argv[7 + target * ROUTES + route]);
    }
    pthread_t sleeper;
    pthread_create(&sleeper, NULL, oversleeps, NULL);
    if (getenv("SOAK_REWRITES") != NULL)
        pthread_create(&sleeper, NULL, rewrites, NULL);
    for (unsigned i = 0; i < thread_count; i++) {
        threads[i].number = i;
        threads[i].random = plan_choice(strtoull(argv[4], NULL, 0), shape_names[shape], i, UINT64_MAX) | 1;
        for (enum target target = 0; target < TARGETS; target++)
            pthread_rwlock_init(&threads[i].own[target].lock, NULL);
        pthread_create(&threads[i].id, NULL, calls, &threads[i]);
    }
    stop_all();
    char byte = 'R';
    while (write(STDOUT_FILENO, &byte, 1) == 1) {
        do {
            if (read(STDIN_FILENO, &byte, 1) != 1 || byte == 'E')
                return 0;
            if (byte == 'G')
                go_on();
        } while (byte == 'G');
        if (byte == 'Q') {
            stop_all();
            byte = 'q';
        } else {
            byte = probe() ? 'p' : 'x';
        }
    }
    return 0;
}
