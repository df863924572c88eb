/* load_client.c: a client process of the load test, and the probe that tests whether a server is all right. See load.h.
 *
 *   load client NETID BOOK PORT...     a port for each role; writes 'R' when it is connected, waits for a byte
 *   load probe NETID PORT [long]       prints "descriptors kilobytes" of the server after a few calls */
#define _GNU_SOURCE
#include "load.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* A CLIENT that may have to be replaced while other threads wait in it. */
struct slot {
    pthread_rwlock_t lock;
    CLIENT *client;
    bool lost; /* the connection: made anew before the next call */
};

struct thread {
    pthread_t id;
    unsigned number;
    AUTH *own_sys;
    struct slot own[ROLES], broken, muted;
    /* What this thread has posted through each CLIENT. */
    struct {
        uint64_t count, sum;
    } posted[HANDLES];
};

static struct book *book;
static const char *netid;
static unsigned ports[ROLES];
static bool library;
static double factor = 1;
static AUTH *none, *shared_sys;
static struct slot shared[ROLES], twin;
static struct thread threads[THREADS];
static atomic_bool over;
static atomic_uint complaints;

enum { SHARED_UID = 500, OWN_UID = 1000, COMPLAINTS = 20 };
/* The timeout of a call over a connection that was just shut down, in milliseconds. */
enum { AFTER_BREAK = 2000 };

static struct timeval milliseconds(uint32_t count)
{
    return (struct timeval){.tv_sec = count / 1000, .tv_usec = count % 1000 * 1000};
}

static void complain(const struct thread *thread, uint32_t number, const struct operation *op, const char *what,
                     CLIENT *client)
{
    if (atomic_fetch_add(&complaints, 1) >= COMPLAINTS)
        return;
    const struct record *record = book_record(book, thread->number, number);
    char *text = client == NULL ? "" : clnt_sperror(client, "");
    fprintf(stderr,
            "seed %#llx process %u thread %u operation %u (%s at %s, handle %d, AUTH %d, %u bytes there, %u back, delay %u us, "
            "timeout %u ms): %s; status %d after %.3f s%.*s\n",
            (unsigned long long)book->plan.seed, book->process, thread->number, number, kind_names[op->kind],
            role_names[op->role], op->handle, op->credential, op->size, op->want, op->delay, op->timeout, what,
            record->status, record->elapsed / 1e6, (int)strcspn(text, "\n"), text);
}

/* ---- CLIENTs -------------------------------------------------------------------------------------------------------- */

CLIENT *connect_to(const char *id, unsigned port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = load_address()};
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    struct netconfig *config = getnetconfigent(id);
    if (config == NULL)
        errx(1, "%s: no such netid", id);
    CLIENT *client = clnt_tli_create(RPC_ANYFD, config, &netbuf, LOAD_PROG, LOAD_VERS, 0, 0);
    freenetconfigent(config);
    return client;
}

static void called_back(struct svc_req *request, SVCXPRT *transport)
{
    struct ask ask = {0};
    if (request->rq_proc != DO || !svc_getargs(transport, (xdrproc_t)xdr_ask, (char *)&ask)) {
        svcerr_decode(transport);
        return;
    }
    struct back back = back_of(ask.extra);
    bool right = contents_right(ask.bytes, ask.length, key_back(ask.tag)) && back.process == book->process;
    if (right && back.nested) {
        /* Its caller waits in it, perhaps in another thread. */
        struct slot *slot = back.handle == OWN      ? &threads[back.thread].own[PLAIN]
                            : back.handle == SHARED ? &shared[PLAIN]
                                                    : &twin;
        right = clnt_call(slot->client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL,
                          milliseconds(PATIENT)) == RPC_SUCCESS;
        if (!right)
            fprintf(stderr, "load client: a call in the midst of a callback: %s", clnt_sperror(slot->client, ""));
    }
    struct answer answer = {.tag = ask.tag, .sum = right ? ask.length : UINT64_MAX, .length = ask.want};
    answer.bytes = malloc(answer.length + 1);
    contents_fill(answer.bytes, answer.length, key_there(ask.tag));
    svc_sendreply(transport, (xdrproc_t)xdr_answer, (char *)&answer);
    free(answer.bytes);
    svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
    __atomic_add_fetch(&book->called_back, 1, __ATOMIC_RELAXED);
}

static void slot_fill(struct slot *slot, enum role role, bool keeps_auth)
{
    uint64_t started = now_us();
    slot->lost = false;
    /* A machine may be so busy that a startup takes longer than its limit of ten seconds. */
    for (int tries = role <= FAR ? 20 : 1; tries > 0; tries--) {
        slot->client = connect_to(netid, ports[role]);
        if (slot->client != NULL || rpc_createerr.cf_stat != RPC_TIMEDOUT)
            break;
    }
    uint64_t took = now_us() - started, longest = __atomic_load_n(&book->making, __ATOMIC_RELAXED);
    while (took > longest && !__atomic_compare_exchange_n(&book->making, &longest, took, false, __ATOMIC_RELAXED,
                                                          __ATOMIC_RELAXED))
        ;
    if (slot->client == NULL)
        return;
    __atomic_add_fetch(&book->made, 1, __ATOMIC_RELAXED);
    if (keeps_auth && role % 2 == 0)
        slot->client->cl_auth = shared_sys;
    if (role == PLAIN && serve_back != NULL && !serve_back(slot->client, LOAD_BACK, LOAD_VERS, called_back))
        errx(1, "%s", clnt_sperror(slot->client, "load client: rpcrdma_clnt_serve"));
}

static void slot_empty(struct slot *slot)
{
    if (slot->client != NULL)
        clnt_destroy(slot->client);
    slot->client = NULL;
}

/* A CLIENT whose connection may be good; it stays until slot_leave(). NULL: none could be made. */
static CLIENT *slot_enter(struct slot *slot, enum role role, bool keeps_auth, struct record *record)
{
    pthread_rwlock_rdlock(&slot->lock);
    if (slot->client != NULL && !slot->lost)
        return slot->client;
    pthread_rwlock_unlock(&slot->lock);
    pthread_rwlock_wrlock(&slot->lock);
    if (slot->client == NULL || slot->lost) {
        slot_empty(slot);
        slot_fill(slot, role, keeps_auth);
        record->again++;
    }
    pthread_rwlock_unlock(&slot->lock);
    pthread_rwlock_rdlock(&slot->lock);
    return slot->client;
}

static void slot_leave(struct slot *slot, bool lost)
{
    /* Each thread that finds the connection lost says so; a new CLIENT cannot come before all have left. */
    if (lost)
        __atomic_store_n(&slot->lost, true, __ATOMIC_RELAXED);
    pthread_rwlock_unlock(&slot->lock);
}

/* ---- Operations ----------------------------------------------------------------------------------------------------- */

static uint64_t fold(uint64_t a, uint64_t b)
{
    return (a ^ b) * 0x100000001b3u + (a >> 29);
}

/* Whether the results are those of the plan. */
static bool right(const struct thread *thread, const struct operation *op, const struct answer *answer)
{
    if (op->procedure == NULLPROC)
        return true;
    if (answer->tag != op->tag)
        return false;
    if (op->procedure == TALLY)
        return answer->uid == (uint32_t)thread->posted[op->handle].count &&
               answer->sum == thread->posted[op->handle].sum && answer->length == 0;
    if (answer->sum != contents_expected(op->size, key_there(op->tag)))
        return false;
    if (op->procedure == BACK) {
        if (answer->uid != back_of(op->extra).times)
            return false;
    } else {
        uint32_t uid = op->credential == OWN_SYS ? OWN_UID + thread->number : SHARED_UID + book->process;
        if (answer->flavor != (op->credential == NONE ? AUTH_NONE : AUTH_SYS) ||
            answer->uid != (op->credential == NONE ? 0 : uid))
            return false;
    }
    return answer->length == op->want && contents_right(answer->bytes, answer->length, key_back(op->tag));
}

/* Makes the call and writes down how it ended. */
static int call(struct thread *thread, uint32_t number, const struct operation *op, CLIENT *client, char *arguments)
{
    struct record *record = book_record(book, thread->number, number);
    struct doing *doing = &book->doing[thread->number];
    struct ask ask = {.tag = op->tag, .want = op->want, .extra = op->extra, .delay = op->delay, .length = op->size,
                      .bytes = arguments};
    struct answer answer = {0};
    bool null = op->procedure == NULLPROC, posts = op->procedure == POST;
    doing->timeout = op->timeout;
    __atomic_store_n(&doing->since, now_us(), __ATOMIC_RELEASE);
    uint64_t started = now_us();
    enum clnt_stat status = clnt_call(client, op->procedure, null ? (xdrproc_t)xdr_void : (xdrproc_t)xdr_ask, (char *)&ask,
                                      posts  ? NULL
                                      : null ? (xdrproc_t)xdr_void
                                             : (xdrproc_t)xdr_answer,
                                      posts ? NULL : (char *)&answer, milliseconds(op->timeout));
    uint64_t elapsed = now_us() - started;
    __atomic_store_n(&doing->since, 0, __ATOMIC_RELEASE);
    record->status = (uint8_t)status;
    record->elapsed = elapsed > UINT32_MAX ? UINT32_MAX : (uint32_t)elapsed;

    if (posts && status == RPC_SUCCESS) {
        thread->posted[op->handle].count++;
        thread->posted[op->handle].sum += contents_expected(op->size, key_there(op->tag));
    } else if (status == RPC_SUCCESS) {
        record->sum = fold(fold(answer.sum, answer.uid), answer.length);
        if (!right(thread, op, &answer)) {
            record->wrong = 1;
            complain(thread, number, op, "the results are wrong", NULL);
        }
    }
    if (op->steady ? (int)status != op->status : !plan_allows(op, (int)status)) {
        record->wrong = 1;
        complain(thread, number, op, "this status may not be", status == RPC_SUCCESS ? NULL : client);
    }
    if (status == RPC_TIMEDOUT && elapsed + 3000 < op->timeout * 1000u) {
        record->wrong = 1;
        complain(thread, number, op, "timed out too soon", NULL);
    }
    free(answer.bytes);
    return (int)status;
}

/* Breaks the connection under a CLIENT, calls over it, and makes another one, which must work. */
static void break_and_mend(struct thread *thread, uint32_t number, const struct operation *op, char *arguments)
{
    struct record *record = book_record(book, thread->number, number);
    struct slot *slot = &thread->broken;
    CLIENT *client = slot_enter(slot, PLAIN, false, record);
    if (client != NULL) {
        struct operation after = *op;
        int fd = -1;
        after.timeout = AFTER_BREAK;
        after.steady = false;
        if (op->extra == 3) {
            after.procedure = FAIL;
            after.extra = MUTE + 1; /* the server ends it */
        } else if (!clnt_control(client, CLGET_FD, (char *)&fd) || shutdown(fd, (int)op->extra) < 0) {
            err(1, "shutdown of a connection");
        }
        client->cl_auth = op->credential == NONE ? none : op->credential == SHARED_SYS ? shared_sys : thread->own_sys;
        call(thread, number, &after, client, arguments);
        if (record->elapsed > (AFTER_BREAK + 1000 * factor) * 1000) {
            record->wrong = 1;
            complain(thread, number, op, "late, over a connection that was shut down", client);
        }
    }
    slot_leave(slot, true);
    client = slot_enter(slot, PLAIN, false, record);
    if (client == NULL) {
        record->status = NO_CLIENT;
        record->wrong = 1;
        complain(thread, number, op, clnt_spcreateerror("no CLIENT"), NULL);
    } else {
        client->cl_auth = op->credential == NONE ? none : op->credential == SHARED_SYS ? shared_sys : thread->own_sys;
        call(thread, number, op, client, arguments);
    }
    slot_leave(slot, false);
}

static void operate(struct thread *thread, uint32_t number)
{
    struct operation op = plan_operation(&book->plan, book->process, thread->number, number);
    struct record *record = book_record(book, thread->number, number);
    if (op.kind == K_BACK && serve_back == NULL) {
        record->status = SKIPPED;
        return;
    }
    /* libtirpc over tcp looks up the status of a call only after another thread may have made one with that CLIENT. */
    if (!library && (op.handle == SHARED || op.handle == TWIN) && (!op.steady || op.status != RPC_SUCCESS))
        op.handle = OWN;
    if (!library && !op.steady) {
        op.size = op.size < LOOSE_TCP ? op.size : LOOSE_TCP;
        op.want = op.want < LOOSE_TCP ? op.want : LOOSE_TCP;
    }
    if (library && (op.kind == K_POST || op.kind == K_POKE) && plan_one_credit(&book->plan, book->process, op.role))
        op.status = RPC_CANTSEND;
    char *arguments = malloc(op.size + 1);
    contents_fill(arguments, op.size, key_there(op.tag));
    if (op.kind == K_BREAK) {
        break_and_mend(thread, number, &op, arguments);
    } else {
        struct slot *slot = op.handle == OWN      ? &thread->own[op.role]
                            : op.handle == SHARED ? &shared[op.role]
                            : op.handle == TWIN   ? &twin
                                                  : &thread->muted;
        CLIENT *client = slot_enter(slot, op.role, op.handle == SHARED, record);
        bool lost = false;
        if (client == NULL) {
            record->status = NO_CLIENT;
            if (op.steady || !plan_allows(&op, NO_CLIENT)) {
                record->wrong = 1;
                complain(thread, number, &op, clnt_spcreateerror("no CLIENT"), NULL);
            }
        } else {
            if (op.handle == OWN || op.handle == MUTED)
                client->cl_auth = op.credential == NONE         ? none
                                  : op.credential == SHARED_SYS ? shared_sys
                                                                : thread->own_sys;
            int status = call(thread, number, &op, client, arguments);
            /* The server that hangs answers nobody who connects, and two CLIENTs share a descriptor. */
            lost = (status == RPC_CANTSEND || status == RPC_CANTRECV) && status != op.status && op.role != HUNG &&
                   !(op.role == PLAIN && (op.handle == SHARED || op.handle == TWIN));
            /* After a call without any answer libtirpc over tcp takes the next reply for the late one. */
            lost |= !library && op.kind == K_MUTE;
        }
        slot_leave(slot, lost);
    }
    free(arguments);
}

static void *run_thread(void *argument)
{
    struct thread *thread = argument;
    for (uint32_t number = 0; number < book->plan.operations; number++) {
        __atomic_store_n(&book->doing[thread->number].number, number, __ATOMIC_RELAXED);
        operate(thread, number);
    }
    __atomic_store_n(&book->doing[thread->number].number, book->plan.operations, __ATOMIC_RELAXED);
    return NULL;
}

/* Sleeps 5 ms at a time: how much later it wakes tells how busy the machine is. */
static void *run_pacer(void *argument)
{
    (void)argument;
    while (!atomic_load(&over)) {
        uint64_t started = now_us(), done = 0;
        usleep(5000);
        uint64_t late = now_us() - started - 5000;
        if (late > book->overslept)
            book->overslept = late;
        for (unsigned i = 0; i < book->plan.threads; i++)
            done += __atomic_load_n(&book->doing[i].number, __ATOMIC_RELAXED);
        if (book->kb_midway == 0 && done * 4 >= (uint64_t)book->plan.operations * book->plan.threads)
            book->kb_midway = resident_kb();
    }
    return NULL;
}

static void make_auths(void)
{
    gid_t groups[1] = {100};
    none = authnone_create();
    shared_sys = authunix_create("load", (uid_t)(SHARED_UID + book->process), 100, 0, groups);
    for (unsigned i = 0; i < book->plan.threads; i++) {
        threads[i].number = i;
        threads[i].own_sys = authunix_create("load", (uid_t)(OWN_UID + i), 100, 1, groups);
    }
}

static void slot_first(struct slot *slot, enum role role, bool keeps_auth)
{
    pthread_rwlock_init(&slot->lock, NULL);
    for (int tries = 20; slot->client == NULL && tries > 0; tries--)
        slot_fill(slot, role, keeps_auth);
    if (slot->client == NULL)
        errx(1, "%s", clnt_spcreateerror(role_names[role]));
}

static void make_clients(void)
{
    for (enum role role = PLAIN; role < ROLES; role++) {
        slot_first(&shared[role], role, true);
        for (unsigned i = 0; i < book->plan.threads; i++)
            slot_first(&threads[i].own[role], role, false);
    }
    for (unsigned i = 0; i < book->plan.threads; i++)
        slot_first(&threads[i].broken, PLAIN, false), slot_first(&threads[i].muted, HASTY, false);
    /* Another CLIENT on the shared one's descriptor. */
    int fd;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)ports[PLAIN]), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    struct netconfig *config = getnetconfigent(netid);
    pthread_rwlock_init(&twin.lock, NULL);
    if (!clnt_control(shared[PLAIN].client, CLGET_FD, (char *)&fd) ||
        (twin.client = clnt_tli_create(fd, config, &netbuf, LOAD_PROG, LOAD_VERS, 0, 0)) == NULL)
        errx(1, "%s", clnt_spcreateerror("load client: two CLIENTs on one descriptor"));
    freenetconfigent(config);
}

int client_main(int argc, char **argv)
{
    if (argc < 4 + ROLES)
        return 2;
    netid = argv[2];
    library = dlsym(RTLD_DEFAULT, "rpcrdma_version") != NULL;
    for (enum role role = PLAIN; role < ROLES; role++)
        ports[role] = (unsigned)atoi(argv[4 + role]);
    if (getenv("TEST_PATIENCE") != NULL)
        factor = atof(getenv("TEST_PATIENCE"));
    size_t length;
    book = book_open(argv[3], &length);
    book->fds_before = count_descriptors();
    book->kb_before = resident_kb();
    make_auths();
    make_clients();
    char go;
    if (write(STDOUT_FILENO, "R", 1) != 1 || read(STDIN_FILENO, &go, 1) != 1)
        errx(1, "nobody lets me go");

    pthread_t pacer;
    if ((errno = pthread_create(&pacer, NULL, run_pacer, NULL)) != 0)
        err(1, "pthread_create");
    for (unsigned i = 0; i < book->plan.threads; i++) {
        if ((errno = pthread_create(&threads[i].id, NULL, run_thread, &threads[i])) != 0)
            err(1, "pthread_create");
    }
    for (unsigned i = 0; i < book->plan.threads; i++)
        pthread_join(threads[i].id, NULL);
    atomic_store(&over, true);
    pthread_join(pacer, NULL);

    slot_empty(&twin);
    for (enum role role = PLAIN; role < ROLES; role++) {
        slot_empty(&shared[role]);
        for (unsigned i = 0; i < book->plan.threads; i++)
            slot_empty(&threads[i].own[role]);
    }
    for (unsigned i = 0; i < book->plan.threads; i++) {
        slot_empty(&threads[i].broken);
        slot_empty(&threads[i].muted);
        AUTH_DESTROY(threads[i].own_sys);
    }
    AUTH_DESTROY(shared_sys);
    malloc_trim(0);
    book->fds_after = count_descriptors();
    book->kb_after = resident_kb();
    unsigned count = atomic_load(&complaints);
    if (count > COMPLAINTS)
        fprintf(stderr, "load client: and %u more complaints\n", count - COMPLAINTS);
    return 0;
}

/* ---- The probe ------------------------------------------------------------------------------------------------------ */

int probe_main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    struct timeval patient = milliseconds(PATIENT);
    CLIENT *client = connect_to(argv[2], (unsigned)atoi(argv[3]));
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("load probe"));
    static const uint32_t sizes[] = {0, 1000, 100000, BYTES_MAX};
    size_t count = argc > 4 ? 4 : 3;
    for (size_t i = 0; i < count; i++) {
        struct ask ask = {.tag = i + 1, .want = sizes[i], .length = sizes[i], .bytes = malloc(sizes[i] + 1)};
        struct answer answer = {0};
        contents_fill(ask.bytes, ask.length, key_there(ask.tag));
        enum clnt_stat status = clnt_call(client, DO, (xdrproc_t)xdr_ask, (char *)&ask, (xdrproc_t)xdr_answer,
                                          (char *)&answer, patient);
        if (status != RPC_SUCCESS)
            errx(1, "%s", clnt_sperror(client, "load probe"));
        if (answer.sum != contents_expected(ask.length, key_there(ask.tag)) || answer.length != ask.want ||
            !contents_right(answer.bytes, answer.length, key_back(ask.tag)))
            errx(1, "load probe: the results are wrong");
        free(ask.bytes);
        free(answer.bytes);
    }
    struct ask ask = {.tag = 1};
    struct answer answer = {0};
    if (clnt_call(client, STATE, (xdrproc_t)xdr_ask, (char *)&ask, (xdrproc_t)xdr_answer, (char *)&answer, patient) !=
        RPC_SUCCESS)
        errx(1, "%s", clnt_sperror(client, "load probe"));
    printf("%u %llu\n", answer.uid, (unsigned long long)answer.sum);
    clnt_destroy(client);
    return 0;
}
