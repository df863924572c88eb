/* Random plans of what clients and servers may do; prints what they see. A plan follows from its seed alone, and so does what is
 * printed, whatever the netid. tests/differ.sh compares what stock tcp and rdma print.
 *
 *   differ NETID FIRST LAST     the plans of these seeds
 *
 * A line begins with seed, actor and step. Lines have to be sorted by these, since processes and threads write side by side. An
 * actor is a thread of the client with a CLIENT of its own, or with one that all actors share. A step has a procedure number of
 * its own, by which the server knows the step whether its arguments are decoded or not. Where tcp and rdma differ by design, or
 * stock libtirpc is at odds with itself, no step leads there, or nothing is printed; comments there say why. */
#define _GNU_SOURCE
#include <err.h>
#include <netconfig.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/rpc.h>
#include <rpc/svc_mt.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/wait.h>
#include <unistd.h>

/* Each actor has a program, of versions 1 and 3; actors that share a CLIENT use the first one's. */
enum { PROG = 0x20004C55, NO_PROGRAM = PROG + 100, ACTORS = 4, STEPS = 10, END = 1000, NO_PROCEDURE = 2000 };

#define REQUIRE(what) ((what) ? (void)0 : errx(1, "line %d: %s", __LINE__, #what))
static const struct timeval patient = {60, 0}, soon = {0, 15000}, now = {0, 0};

/* ---- The plan ---------------------------------------------------------------------------------------------------- */

/* How a client calls: it waits for the reply; the server gives none; it makes one-way calls without and with a place for
 * results, and then one that waits; it destroys its CLIENT while replies are under way; it calls from a child too. Or it asks
 * its CLIENT about itself, or finds nobody at an address. */
enum manner { PLAIN, SHORT, BATCH, SEND, ABANDON, FORK, CONTROLS, NOBODY, MANNERS };
/* What the routine does. */
enum deed {
    MIRROR, GENERATE, NOTHING, UNREAD, BEYOND, FREE_FIRST, TWICE, ERROR_TOO, ANSWER_TOO, LACKS_PROCEDURE, LACKS_PROGRAM,
    LACKS_VERSION, BAD_ARGUMENTS, REFUSED, TOO_WEAK, SYSTEM, VERIFIER, BY_THREAD, BY_CHILD, TOGGLE, CONTROL, JUMP_ANSWERED,
    CLOSE, CLOSE_ANSWERED, SILENT, JUMP, MEET, NEST, DEEDS
};
enum flavour { OLD, NONE, SYS, STRANGE, FLAVOURS };

enum { ON_PLAIN = 1 << PLAIN, ON_SHORT = 1 << SHORT, WITHOUT_REPLY = 1 << BATCH | 1 << SEND | 1 << ABANDON,
       ON_ANY = ON_PLAIN | WITHOUT_REPLY | 1 << FORK | 1 << CONTROLS };
/* Which actors may: those that share no CLIENT; a single one, since other threads may hold libtirpc's locks at a fork; pairs;
 * and just two, since libtirpc's loop goes on with descriptors that an inner loop has served, and waits there. */
enum { ALONE = 1, SINGLE = 2, PAIRS = 4, TWO = 8 };

struct choice {
    const char *name;
    u_int weight, who, manners;
};
static const struct choice manners[MANNERS] = {
    [PLAIN] = {"plain", 24, 0, 0},         [SHORT] = {"short", 2, ALONE, 0},          [BATCH] = {"batch", 3, 0, 0},
    [SEND] = {"send", 3, ALONE, 0},        [ABANDON] = {"abandon", 2, ALONE, 0},      [FORK] = {"fork", 6, SINGLE | ALONE, 0},
    [CONTROLS] = {"controls", 3, ALONE, 0}, [NOBODY] = {"nobody", 1, ALONE, 0},
};
static const struct choice deeds[DEEDS] = {
    [MIRROR] = {"mirror", 24, 0, ON_ANY},
    [GENERATE] = {"generate", 24, 0, ON_ANY},
    [NOTHING] = {"nothing", 3, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [UNREAD] = {"unread", 6, 0, ON_PLAIN | WITHOUT_REPLY},
    [BEYOND] = {"beyond", 3, 0, ON_PLAIN},
    [FREE_FIRST] = {"free first", 3, 0, ON_PLAIN},
    [TWICE] = {"twice", 4, 0, ON_PLAIN},
    [ERROR_TOO] = {"error too", 3, ALONE, ON_PLAIN},
    [ANSWER_TOO] = {"answer too", 3, ALONE, ON_PLAIN},
    [LACKS_PROCEDURE] = {"lacks procedure", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [LACKS_PROGRAM] = {"lacks program", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [LACKS_VERSION] = {"lacks version", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [BAD_ARGUMENTS] = {"bad arguments", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [REFUSED] = {"refused", 5, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [TOO_WEAK] = {"too weak", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [SYSTEM] = {"system", 2, ALONE, ON_PLAIN | WITHOUT_REPLY},
    [VERIFIER] = {"verifier", 5, ALONE, ON_PLAIN},
    [BY_THREAD] = {"by a thread", 3, 0, ON_PLAIN},
    [BY_CHILD] = {"by a child", 3, 0, ON_PLAIN},
    [TOGGLE] = {"toggle", 4, ALONE, ON_PLAIN},
    [CONTROL] = {"control", 2, 0, ON_PLAIN},
    [JUMP_ANSWERED] = {"jump, answered", 4, 0, ON_PLAIN},
    [CLOSE] = {"close", 2, ALONE, ON_PLAIN},
    [CLOSE_ANSWERED] = {"close, answered", 2, ALONE, ON_PLAIN},
    [SILENT] = {"silent", 6, 0, ON_SHORT},
    [JUMP] = {"jump", 6, 0, ON_SHORT},
    [MEET] = {"meet", 8, ALONE | PAIRS, ON_PLAIN},
    [NEST] = {"nest", 8, ALONE | PAIRS | TWO, ON_PLAIN},
};

enum { NEVER = 99 };
struct step {
    u_int actor, position, procedure, program, version, calls, arguments, results;
    enum manner manner;
    enum deed deed;
    enum flavour flavour;
    uint64_t seed;
    /* The item at which encoding or decoding fails. `is_sound`: only data that does not itself make decoding fail. */
    u_int arguments_unsent, arguments_unread, results_unsent, results_unread;
    bool is_sound, ignores_results;
};

static unsigned long seed;
static struct step plan[ACTORS][STEPS];
static u_int actors, steps;
/* The server's loop: svc_run(), or the program's own with select() or poll(). */
static enum { RUN, SELECT, POLL, WAYS_TO_SERVE } way_to_serve;
static bool shared;
static struct netconfig *netconfig;
/* Tells the actors that the server has seen a request that it does not answer. */
static sem_t *is_seen;

static uint64_t roll(uint64_t *dice)
{
    uint64_t mixed = *dice += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
    return mixed ^ mixed >> 31;
}

static u_int draw(uint64_t *dice, u_int below)
{
    return (u_int)(roll(dice) % below);
}

static bool one_in(uint64_t *dice, u_int many)
{
    return draw(dice, many) == 0;
}

/* A length near one of those at which a message is sent another way, less the header and what precedes the item. */
static u_int length(uint64_t *dice, bool is_short)
{
    static const u_int near[] = {0, 1024, 4096, 65536, 262144, 1048576};
    if (is_short || one_in(dice, 2))
        return draw(dice, 700);
    int length = (int)near[draw(dice, one_in(dice, 3) ? 6 : 4)] + (int)draw(dice, 9) - 4;
    if (one_in(dice, 2))
        length -= (int)draw(dice, 220);
    return length < 0 ? 0 : (u_int)length;
}

static u_int choose(uint64_t *dice, const struct choice *choices, u_int count, enum manner manner, u_int actor)
{
    for (;;) {
        u_int i = draw(dice, count), who = choices[i].who;
        if (draw(dice, 24) >= choices[i].weight || (choices[i].manners && !(choices[i].manners & 1U << manner)))
            continue;
        if (((who & ALONE) && shared) || ((who & SINGLE) && actors > 1) || ((who & TWO) && actors != 2))
            continue;
        if (!(who & PAIRS) || (actor % 2 == 0 && actor + 1 < actors))
            return i;
    }
}

static void plan_step(uint64_t *dice, struct step *step, u_int actor, u_int position)
{
    const struct step *partner = actor % 2 ? &plan[actor - 1][position] : NULL;
    *step = (struct step){.actor = actor, .position = position, .procedure = actor * STEPS + position + 1};
    step->manner = choose(dice, manners, MANNERS, 0, actor);
    step->deed = step->manner == NOBODY ? MIRROR : choose(dice, deeds, DEEDS, step->manner, actor);
    /* Two actors meet at the same step, and the one that comes first is answered when the other one is there. */
    if (partner != NULL && (partner->deed == MEET || partner->deed == NEST))
        step->manner = PLAIN, step->deed = partner->deed;
    /* A turn of the loop may also serve the next request of a connection, and a routine that runs the loop again there would
     * wait for a routine that waits further up the stack. */
    for (u_int i = 0; i < position && step->deed == NEST; i++)
        step->deed = plan[actor][i].deed == NEST ? MEET : NEST;
    bool is_plain = !shared && step->manner == PLAIN && (step->deed == MIRROR || step->deed == GENERATE);
    /* A reply of any kind would race with a short timeout, and one too many would leave the other actor waiting. What a call
     * leaves unread of its reply, libtirpc's next call skips: parent and child would both do that. libtirpc's clnt_call takes
     * the status from the CLIENT when another thread may already have begun a call. And a reply over tcp does not arrive if part
     * of the request is unread when the connection is closed. */
    step->is_sound = shared || step->manner == SHORT || step->manner == FORK || step->deed == MEET || step->deed == NEST ||
                     step->deed == CLOSE_ANSWERED;
    step->seed = roll(dice);
    step->program = PROG + (shared ? 0 : actor);
    step->version = 1;
    if (!step->is_sound && step->deed < VERIFIER && one_in(dice, 3))
        step->version = one_in(dice, 4) ? 2 + 5 * draw(dice, 2) : 3;
    if (is_plain && one_in(dice, 20))
        step->procedure += NO_PROCEDURE;
    if (is_plain && one_in(dice, 20))
        step->program = NO_PROGRAM;
    step->calls = step->manner == SHORT || step->deed == MEET || step->deed == NEST ? 1 : 1 + draw(dice, 3);
    /* Data that nobody reads fills the buffers of tcp, and then both ends wait for each other. And a server can pull long
     * arguments by RDMA only as long as their call waits. */
    bool is_short = (1 << step->manner & WITHOUT_REPLY) != 0;
    step->arguments = length(dice, is_short || step->manner == SHORT);
    step->results = length(dice, is_short || step->deed == UNREAD);
    step->flavour = step->is_sound ? OLD : step->deed == VERIFIER ? SYS : draw(dice, FLAVOURS);
    step->arguments_unsent = is_plain && one_in(dice, 12) ? draw(dice, 4) : NEVER;
    step->arguments_unread = (is_plain || is_short) && !shared && one_in(dice, 12) ? draw(dice, 4) : NEVER;
    step->results_unsent = step->deed == GENERATE && is_plain && one_in(dice, 12) ? draw(dice, 4) : NEVER;
    step->results_unread = !step->is_sound && one_in(dice, 12) ? draw(dice, 4) : NEVER;
    step->ignores_results = !step->is_sound && one_in(dice, 12);
}

static void make_plan(void)
{
    uint64_t dice = seed;
    actors = 1 + draw(&dice, ACTORS);
    shared = actors > 1 && one_in(&dice, 4);
    steps = 3 + draw(&dice, STEPS - 2);
    way_to_serve = draw(&dice, WAYS_TO_SERVE);
    for (u_int actor = 0; actor < actors; actor++)
        for (u_int position = 0; position < steps; position++)
            plan_step(&dice, &plan[actor][position], actor, position);
}

/* Writes the line in one piece, so that no two lines mix. Without a step: about the process itself. */
__attribute__((format(printf, 3, 4))) static void say(const struct step *step, char side, const char *format, ...)
{
    char line[512];
    va_list values;
    va_start(values, format);
    u_int actor = step ? step->actor : ACTORS, position = step ? step->position : 0;
    int begin = snprintf(line, sizeof line, "%010lu.%u.%02u%c ", seed, actor, position, side);
    int end = begin + vsnprintf(line + begin, sizeof line - (size_t)begin - 1, format, values);
    va_end(values);
    REQUIRE(end < (int)sizeof line - 1);
    line[end++] = '\n';
    REQUIRE(write(STDOUT_FILENO, line, (size_t)end) == end);
}

/* ---- Arguments and results --------------------------------------------------------------------------------------- */

/* PIECES go through memory that is reused at once. The last kinds can only be the last item: decoding wants more than there is,
 * or allows less than has come, or leaves something unread. */
enum kind { NUMBER, BYTES, STRING, WORDS, PIECES, INLINE, OPTIONAL, GREEDY, TOO_LONG, IGNORED, KINDS };
enum { ITEMS = 4, LONGEST = 1 << 22, PIECE = 1001, WORDS_INLINE = 100, REFUSED_LENGTH = 100 };
struct item {
    u_int kind, length;
    uint64_t number;
    char *bytes;
};
struct value {
    u_int count, fails;
    struct item items[ITEMS];
};

static size_t size(const struct item *item)
{
    switch (item->kind) {
    case WORDS:
    case INLINE:
        return sizeof(u_int) * item->length;
    case OPTIONAL:
        return sizeof(u_int);
    default:
        return item->length;
    }
}

static bool_t xdr_pieces(XDR *xdrs, struct item *item)
{
    char piece[PIECE];
    for (u_int done = 0, part; done < item->length; done += part) {
        part = item->length - done < PIECE ? item->length - done : PIECE;
        memcpy(piece, item->bytes + done, part);
        bool_t is_good = xdr_opaque(xdrs, piece, part);
        if (xdrs->x_op == XDR_DECODE)
            memcpy(item->bytes + done, piece, part);
        memset(piece, 0xEE, sizeof piece);
        if (!is_good)
            return FALSE;
    }
    return TRUE;
}

static bool_t xdr_words_inline(XDR *xdrs, struct item *item)
{
    u_int *words = (u_int *)(void *)item->bytes;
    int32_t *raw = xdr_inline(xdrs, item->length * BYTES_PER_XDR_UNIT);
    for (u_int i = 0; i < item->length; i++)
        if (raw == NULL && !xdr_u_int(xdrs, &words[i]))
            return FALSE;
        else if (raw != NULL && xdrs->x_op == XDR_ENCODE)
            IXDR_PUT_U_LONG(raw, words[i]);
        else if (raw != NULL)
            words[i] = IXDR_GET_U_LONG(raw);
    return TRUE;
}

static bool_t xdr_item(XDR *xdrs, struct item *item)
{
    u_int unused;
    if (!xdr_u_int(xdrs, &item->kind) || item->kind >= KINDS)
        return FALSE;
    switch (item->kind) {
    case NUMBER:
        return xdr_uint64_t(xdrs, &item->number);
    case BYTES:
        return xdr_bytes(xdrs, &item->bytes, &item->length, LONGEST);
    case STRING:
        if (!xdr_string(xdrs, &item->bytes, LONGEST))
            return FALSE;
        item->length = (u_int)strlen(item->bytes);
        return TRUE;
    case WORDS:
        return xdr_array(xdrs, &item->bytes, &item->length, LONGEST, sizeof(u_int), (xdrproc_t)xdr_u_int);
    case PIECES:
    case INLINE:
        if (!xdr_u_int(xdrs, &item->length) || item->length > LONGEST)
            return FALSE;
        if (item->bytes == NULL)
            REQUIRE((item->bytes = calloc(1, size(item) + 1)) != NULL);
        return item->kind == PIECES ? xdr_pieces(xdrs, item) : xdr_words_inline(xdrs, item);
    case OPTIONAL:
        return xdr_pointer(xdrs, &item->bytes, sizeof(u_int), (xdrproc_t)xdr_u_int);
    case GREEDY:
        return xdrs->x_op == XDR_ENCODE || xdr_u_int(xdrs, &unused);
    case TOO_LONG:
        return xdr_bytes(xdrs, &item->bytes, &item->length, xdrs->x_op == XDR_DECODE ? REFUSED_LENGTH : LONGEST);
    default:
        return xdrs->x_op == XDR_DECODE || xdr_bytes(xdrs, &item->bytes, &item->length, LONGEST);
    }
}

static bool_t xdr_value(XDR *xdrs, struct value *value)
{
    if (xdrs->x_op == XDR_FREE) {
        for (u_int i = 0; i < ITEMS; i++)
            free(value->items[i].bytes), value->items[i].bytes = NULL;
        return TRUE;
    }
    if (!xdr_u_int(xdrs, &value->count) || value->count > ITEMS)
        return FALSE;
    for (u_int i = 0; i < value->count; i++)
        if (i == value->fails || !xdr_item(xdrs, &value->items[i]))
            return FALSE;
    return TRUE;
}

static bool_t xdr_nothing(XDR *xdrs, void *unused)
{
    (void)xdrs, (void)unused;
    return TRUE;
}

static void discard(struct value *value)
{
    xdr_free((xdrproc_t)xdr_value, (char *)value);
}

static struct value made(uint64_t from, u_int length, bool is_sound, u_int fails)
{
    static const enum kind long_kinds[] = {BYTES, STRING, WORDS, PIECES};
    struct value value = {.count = 1 + draw(&from, ITEMS), .fails = fails};
    u_int longest = draw(&from, value.count);
    for (u_int i = 0; i < value.count; i++) {
        struct item *item = &value.items[i];
        item->kind = draw(&from, GREEDY);
        if (!is_sound && i + 1 == value.count && one_in(&from, 10))
            item->kind = GREEDY + draw(&from, KINDS - GREEDY);
        else if (i == longest)
            item->kind = long_kinds[draw(&from, 4)];
        item->length = item->kind == TOO_LONG ? REFUSED_LENGTH + 1 + draw(&from, 100) : i == longest ? length : draw(&from, 60);
        if (item->kind == WORDS)
            item->length /= sizeof(u_int);
        else if (item->kind == INLINE)
            item->length = draw(&from, WORDS_INLINE);
        else if (item->kind == NUMBER || item->kind == GREEDY)
            item->length = 0, item->number = roll(&from);
        if (item->kind == NUMBER || item->kind == GREEDY || (item->kind == OPTIONAL && one_in(&from, 2)))
            continue;
        size_t bytes = size(item);
        REQUIRE((item->bytes = malloc(bytes + sizeof(uint64_t))) != NULL);
        for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
            uint64_t word = roll(&from);
            memcpy(item->bytes + at, &word, sizeof word);
        }
        for (size_t at = 0; at < bytes && item->kind == STRING; at++)
            item->bytes[at] = (char)('a' + (item->bytes[at] & 15));
        if (item->kind == STRING)
            item->bytes[bytes] = '\0';
    }
    return value;
}

static u_int add(u_int sum, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        sum = (sum ^ ((const unsigned char *)bytes)[i]) * 16777619;
    return sum;
}

static u_int checksum(const struct value *value)
{
    u_int sum = add(2166136261, &value->count, sizeof value->count);
    for (u_int i = 0; i < value->count && i < ITEMS; i++) {
        const struct item *item = &value->items[i];
        sum = add(sum, item, offsetof(struct item, bytes));
        if (item->bytes != NULL)
            sum = add(sum, item->bytes, size(item));
    }
    return sum;
}

/* ---- The server -------------------------------------------------------------------------------------------------- */

static SVCXPRT *listener;
static jmp_buf loop;
static u_int depth;
static bool is_rdma, is_over, has_third[ACTORS];
static struct {
    SVCXPRT *first;
    struct value arguments;
    bool is_here, have_met;
} meetings[ACTORS][STEPS];
static bool is_lost[ACTORS][STEPS];

static void turn(void)
{
    if (way_to_serve == SELECT) {
        fd_set fds = svc_fdset;
        REQUIRE(select(FD_SETSIZE, &fds, NULL, NULL, &(struct timeval){patient.tv_sec, 0}) > 0);
        svc_getreqset(&fds);
        return;
    }
    struct pollfd fds[64];
    int count = svc_max_pollfd;
    REQUIRE(count <= 64);
    memcpy(fds, svc_pollfd, (size_t)count * sizeof *fds);
    int ready = poll(fds, (nfds_t)count, (int)(1000 * patient.tv_sec));
    REQUIRE(ready > 0);
    svc_getreq_poll(fds, ready);
}

struct reply {
    SVCXPRT *xprt;
    struct value *value;
    bool_t is_sent;
};

static void *answers(void *own)
{
    struct reply *reply = own;
    reply->is_sent = svc_sendreply(reply->xprt, (xdrproc_t)xdr_value, (char *)reply->value);
    return NULL;
}

static bool_t answer(SVCXPRT *xprt, struct value *value)
{
    struct reply reply = {xprt, value, FALSE};
    answers(&reply);
    return reply.is_sent;
}

static u_int credentials(struct svc_req *request)
{
    if (request->rq_cred.oa_flavor != AUTH_SYS)
        return 0;
    struct authunix_parms *parms = (struct authunix_parms *)request->rq_clntcred;
    u_int sum = add(1, parms->aup_machname, strlen(parms->aup_machname));
    sum = add(add(sum, &parms->aup_uid, sizeof parms->aup_uid), &parms->aup_gid, sizeof parms->aup_gid);
    return add(sum, parms->aup_gids, parms->aup_len * sizeof *parms->aup_gids);
}

/* The credential that a client of AUTH_SYS is to call with from now on; no client here does. */
static void give_verifier(SVCXPRT *xprt)
{
    XDR xdrs;
    struct opaque_auth shorter = {AUTH_SHORT, "shorter", 8};
    xdrmem_create(&xdrs, xprt->xp_verf.oa_base, MAX_AUTH_BYTES, XDR_ENCODE);
    REQUIRE(xdr_opaque_auth(&xdrs, &shorter));
    xprt->xp_verf.oa_flavor = AUTH_SHORT;
    xprt->xp_verf.oa_length = xdr_getpos(&xdrs);
}

static void lose(SVCXPRT *xprt, const struct step *step)
{
    is_lost[step->actor][step->position] = true;
    /* libtirpc's loop goes on with the transport that it has destroyed. */
    if (is_rdma)
        svc_destroy(xprt);
    else
        (void)shutdown(xprt->xp_fd, SHUT_RDWR);
}

static void by_child(SVCXPRT *xprt, const struct step *step, struct value *value)
{
    int status;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        say(step, 's', "sent by a child: %d", answer(xprt, value));
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}


/* The request that comes first is put off, and answered in the routine of the other. */
static void meet(SVCXPRT *xprt, const struct step *step, struct value *arguments)
{
    const u_int pair = step->actor / 2, position = step->position;
    SVCXPRT *first = meetings[pair][position].first;
    if (first == NULL) {
        meetings[pair][position].first = xprt;
        meetings[pair][position].arguments = *arguments;
        *arguments = (struct value){0};
        return;
    }
    struct value *kept = &meetings[pair][position].arguments;
    say(&plan[step->actor ^ 1][position], 's', "met: %d", answer(first, kept));
    discard(kept);
    say(step, 's', "met: %d", answer(xprt, arguments));
}

/* The routine that begins first runs the loop until the other one is there. */
static void nest(const struct step *step)
{
    const u_int pair = step->actor / 2, position = step->position;
    bool is_second = meetings[pair][position].is_here;
    meetings[pair][position].is_here = true;
    meetings[pair][position].have_met = is_second;
    depth++;
    while (!meetings[pair][position].have_met)
        turn();
    depth--;
}

static void serve(struct svc_req *request, SVCXPRT *xprt);

static void toggle(const struct step *step)
{
    bool *is_there = &has_third[step->actor];
    *is_there = !*is_there;
    if (*is_there)
        say(step, 's', "svc_reg: %d", svc_reg(listener, PROG + step->actor, 3, serve, NULL));
    else
        svc_unreg(PROG + step->actor, 3);
}

static void (*const errors[])(SVCXPRT *) = {
    [LACKS_PROCEDURE] = svcerr_noproc, [LACKS_PROGRAM] = svcerr_noprog, [BAD_ARGUMENTS] = svcerr_decode,
    [TOO_WEAK] = svcerr_weakauth,      [SYSTEM] = svcerr_systemerr,
};

/* What the routine does with a request whose arguments were decoded, if it decodes any. */
static void act(SVCXPRT *xprt, const struct step *step, struct value *arguments, struct value *results)
{
    pthread_t thread;
    struct reply reply = {xprt, results, FALSE};
    u_int unused = 0, number = draw(&(uint64_t){step->seed}, 1000);
    switch (step->deed) {
    case MIRROR:
    case TWICE:
        say(step, 's', "sent: %d", answer(xprt, arguments));
        /* libtirpc sends a second reply, which the client skips; the library refuses it. */
        if (step->deed == TWICE)
            answer(xprt, arguments);
        return;
    case NOTHING:
        say(step, 's', "sent: %d", svc_sendreply(xprt, (xdrproc_t)xdr_nothing, NULL));
        return;
    case BEYOND:
        say(step, 's', "beyond: %d", svc_getargs(xprt, (xdrproc_t)xdr_u_int, (char *)&unused));
        break;
    case FREE_FIRST:
        say(step, 's', "freed: %d", svc_freeargs(xprt, (xdrproc_t)xdr_value, (char *)arguments));
        break;
    case ANSWER_TOO:
        svcerr_noproc(xprt);
        break;
    case LACKS_VERSION:
        svcerr_progvers(xprt, number, number + 7);
        return;
    case REFUSED:
        svcerr_auth(xprt, (enum auth_stat)(number % 15));
        return;
    case LACKS_PROCEDURE:
    case LACKS_PROGRAM:
    case BAD_ARGUMENTS:
    case TOO_WEAK:
    case SYSTEM:
        errors[step->deed](xprt);
        return;
    case VERIFIER:
        give_verifier(xprt);
        break;
    case BY_THREAD:
        REQUIRE(pthread_create(&thread, NULL, answers, &reply) == 0 && pthread_join(thread, NULL) == 0);
        say(step, 's', "sent by a thread: %d", reply.is_sent);
        return;
    case BY_CHILD:
        by_child(xprt, step, results);
        return;
    case TOGGLE:
        toggle(step);
        break;
    case CONTROL:
        say(step, 's', "control: %d %d", SVC_CONTROL(xprt, SVCGET_CONNMAXREC, &unused), SVC_CONTROL(xprt, number, &unused));
        break;
    case MEET:
        meet(xprt, step, arguments);
        return;
    case NEST:
        nest(step);
        break;
    case CLOSE:
        lose(xprt, step);
        return;
    case SILENT:
    case JUMP:
        REQUIRE(sem_post(&is_seen[step->actor]) == 0);
        return;
    default:
        break;
    }
    /* libtirpc sends the part of the results that was encoded before encoding failed, so the client's side is not compared. */
    bool_t is_sent = answer(xprt, results);
    if (step->deed != ANSWER_TOO)
        say(step, 's', "sent: %d", is_sent);
    if ((!is_sent && step->deed != ANSWER_TOO) || step->deed == ERROR_TOO)
        svcerr_systemerr(xprt);
    if (step->deed == CLOSE_ANSWERED)
        lose(xprt, step);
}

static void serve(struct svc_req *request, SVCXPRT *xprt)
{
    u_int number = request->rq_proc % NO_PROCEDURE - 1;
    /* A one-way call over rdma does not take the last credit: a call of NULLPROC may go before it. */
    if (request->rq_proc == NULLPROC || request->rq_proc == END) {
        REQUIRE(svc_sendreply(xprt, (xdrproc_t)xdr_nothing, NULL));
        is_over = request->rq_proc == END;
        if (is_over)
            svc_exit();
        return;
    }
    REQUIRE(number < ACTORS * STEPS);
    const struct step *step = &plan[number / STEPS][number % STEPS];
    /* It had come before the connection was shut down. */
    if (is_lost[step->actor][step->position])
        return;
    /* libtirpc sends the part of the arguments that was encoded before encoding failed; and calls that a client has abandoned
     * may come, or not. */
    bool is_quiet = step->arguments_unsent != NEVER || step->manner == ABANDON;
    if (is_quiet) {
        struct value results = made(step->seed, step->results, false, NEVER);
        answer(xprt, &results);
        discard(&results);
        return;
    }
    say(step, 's', "program %x version %u procedure %u flavour %d length %u credentials %08x", request->rq_prog,
        request->rq_vers, request->rq_proc, request->rq_cred.oa_flavor, request->rq_cred.oa_length, credentials(request));
    if (request->rq_proc > NO_PROCEDURE) {
        svcerr_noproc(xprt);
        return;
    }
    struct value arguments = {.fails = step->arguments_unread};
    if (step->deed != UNREAD) {
        bool_t is_decoded = svc_getargs(xprt, (xdrproc_t)xdr_value, (char *)&arguments);
        say(step, 's', "arguments: %d %08x", is_decoded, is_decoded ? checksum(&arguments) : 0);
        if (!is_decoded) {
            svcerr_decode(xprt);
            say(step, 's', "freed: %d", svc_freeargs(xprt, (xdrproc_t)xdr_value, (char *)&arguments));
            return;
        }
    }
    arguments.fails = NEVER;
    struct value results = made(~step->seed, step->results, step->is_sound, step->results_unsent);
    act(xprt, step, &arguments, &results);
    /* Not through the transport, which may have been destroyed. */
    discard(&arguments), discard(&results);
    /* A jump out of a routine inside another one would leave that one too. */
    if ((step->deed == JUMP || step->deed == JUMP_ANSWERED) && depth == 0)
        longjmp(loop, 1);
}

static void run_server(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct t_bind bind = {.addr = {sizeof address, sizeof address, &address}, .qlen = 64};
    listener = svc_tli_create(RPC_ANYFD, netconfig, &bind, 0, 0);
    REQUIRE(listener != NULL);
    for (u_int actor = 0; actor < actors; actor++) {
        has_third[actor] = true;
        REQUIRE(svc_reg(listener, PROG + actor, 1, serve, NULL) && svc_reg(listener, PROG + actor, 3, serve, NULL));
    }
    address = *(struct sockaddr_in *)listener->xp_ltaddr.buf;
    REQUIRE(write(port, &address, sizeof address) == sizeof address);
    (void)setjmp(loop);
    while (!is_over && way_to_serve != RUN)
        turn();
    if (!is_over)
        svc_run();
    say(NULL, 's', "the loop ends");
    exit(0);
}

/* ---- The client -------------------------------------------------------------------------------------------------- */

struct actor {
    CLIENT *client;
    int fd;
};

static struct sockaddr_in address;

/* Credentials of a flavour that no server knows, until they have been refused `refusals` times. */
struct strange {
    AUTH auth;
    u_int refusals;
    bool is_valid;
};

static void next_verifier(AUTH *unused)
{
    (void)unused;
}

static int marshal(AUTH *auth, XDR *xdrs)
{
    char body[] = "strange.";
    struct opaque_auth none = {0}, credentials = {77, body, 8};
    bool is_known = ((struct strange *)auth)->refusals == 0;
    return xdr_opaque_auth(xdrs, is_known ? &none : &credentials) && xdr_opaque_auth(xdrs, &none);
}

static int validate(AUTH *auth, struct opaque_auth *unused)
{
    (void)unused;
    return ((struct strange *)auth)->is_valid;
}

static int refresh(AUTH *auth, void *unused)
{
    (void)unused;
    struct strange *strange = (struct strange *)auth;
    return strange->refusals > 0 && strange->refusals-- < 4;
}

static int as_it_is(AUTH *unused, XDR *xdrs, xdrproc_t procedure, caddr_t where)
{
    (void)unused;
    return procedure(xdrs, where);
}

static struct auth_ops strange_ops = {next_verifier, marshal, validate, refresh, next_verifier, as_it_is, as_it_is};

static AUTH *auth_of(const struct step *step, struct strange *strange)
{
    uint64_t dice = step->seed;
    gid_t groups[NGRPS];
    char name[MAX_MACHINE_NAME + 1] = {0};
    switch (step->flavour) {
    case NONE:
        return authnone_create();
    case SYS:
        memset(name, 'm', draw(&dice, one_in(&dice, 4) ? MAX_MACHINE_NAME : 20));
        for (u_int i = 0; i < NGRPS; i++)
            groups[i] = draw(&dice, 1 << 30);
        return authunix_create(name, draw(&dice, 1 << 30), draw(&dice, 1 << 30), (int)draw(&dice, NGRPS + 1), groups);
    default:
        *strange = (struct strange){.auth.ah_ops = &strange_ops, .refusals = draw(&dice, 6), .is_valid = !one_in(&dice, 6)};
        return &strange->auth;
    }
}

static void attach(struct actor *actor, const struct step *step)
{
    uint64_t dice = step->seed;
    struct sockaddr_in to = address, own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf buffer = {sizeof to, sizeof to, &to};
    u_int way = draw(&dice, 4);
    actor->fd = RPC_ANYFD;
    if (way > 0)
        REQUIRE((actor->fd = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
    if (way == 2)
        REQUIRE(bind(actor->fd, (struct sockaddr *)&own, sizeof own) == 0);
    if (way == 3)
        REQUIRE(connect(actor->fd, (struct sockaddr *)&to, sizeof to) == 0);
    actor->client = clnt_tli_create(actor->fd, netconfig, &buffer, step->program, 1, draw(&dice, 9000), draw(&dice, 9000));
    if (actor->client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_tli_create"));
    say(step, 'c', "attached: way %u, auth %d", way, actor->client->cl_auth->ah_cred.oa_flavor);
    if (way > 0 && one_in(&dice, 2)) {
        say(step, 'c', "CLSET_FD_CLOSE: %d", clnt_control(actor->client, CLSET_FD_CLOSE, NULL));
        actor->fd = RPC_ANYFD;
    }
}

/* Reads what is left of the latest reply. Otherwise the server may be told, when the connection ends, that sending it failed. */
static void settle(const struct actor *actor)
{
    if (actor->client != NULL)
        clnt_call(actor->client, NULLPROC, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_nothing, NULL, patient);
}

static void part(struct actor *actor)
{
    if (actor->client != NULL)
        clnt_destroy(actor->client);
    if (actor->fd != RPC_ANYFD)
        close(actor->fd);
    *actor = (struct actor){NULL, RPC_ANYFD};
}

/* The part of an error that is the same in each run. */
static const char *outcome(char text[128], CLIENT *client, enum clnt_stat status)
{
    struct rpc_err error = {0};
    /* Whether it is sending or receiving that first fails depends on when the end of a connection has come. */
    if (status == RPC_CANTSEND || status == RPC_CANTRECV)
        return "lost";
    int end = sprintf(text, "status %d", status);
    if (shared)
        return text;
    clnt_geterr(client, &error);
    end += sprintf(text + end, " error %d", error.re_status);
    if (status == RPC_PROGVERSMISMATCH || status == RPC_VERSMISMATCH)
        sprintf(text + end, " versions %u to %u", error.re_vers.low, error.re_vers.high);
    if (status == RPC_AUTHERROR)
        sprintf(text + end, " why %d", error.re_why);
    return text;
}

static enum clnt_stat call(struct actor *actor, const struct step *step, u_int number, struct timeval timeout,
                           bool with_results)
{
    struct value arguments = made(step->seed + number, step->arguments, step->is_sound, step->arguments_unsent);
    struct value results = {.fails = step->results_unread};
    char text[128];
    xdrproc_t procedure = !with_results ? NULL : step->ignores_results ? (xdrproc_t)xdr_nothing : (xdrproc_t)xdr_value;
    enum clnt_stat status = clnt_call(actor->client, step->procedure, (xdrproc_t)xdr_value, (char *)&arguments, procedure,
                                      (char *)&results, timeout);
    u_int sum = status == RPC_SUCCESS ? checksum(&results) : 0;
    bool_t is_freed = clnt_freeres(actor->client, (xdrproc_t)xdr_value, (char *)&results);
    if (step->results_unsent == NEVER)
        say(step, 'c', "%s call %u of %u bytes for %s: %s results %08x freed %d", manners[step->manner].name, number,
            step->arguments, deeds[step->deed].name, outcome(text, actor->client, status), sum, is_freed);
    discard(&arguments);
    return status;
}

/* The CLIENT is destroyed afterwards. What CLGET_XID returns is not compared: libtirpc counts down in the host's byte order. */
static void controls(struct actor *actor, const struct step *step)
{
    static const u_int requests[] = {
        CLSET_TIMEOUT, CLGET_TIMEOUT, CLGET_SERVER_ADDR, CLGET_FD, CLGET_SVC_ADDR, CLSET_XID, CLGET_VERS, CLSET_VERS,
        CLGET_PROG, CLSET_SVC_ADDR, CLSET_PUSH_TIMOD, CLSET_POP_TIMOD, CLSET_RETRY_TIMEOUT, CLGET_RETRY_TIMEOUT, CLSET_ASYNC,
        CLSET_CONNECT, 999,
    };
    static const struct timeval times[] = {{30, 0}, {45, 500000}, {-1, 0}, {0, -1}, {100000001, 0}, {5, 1000001}};
    uint64_t dice = step->seed;
    for (u_int i = 0; i < 12; i++) {
        union {
            struct timeval time;
            struct sockaddr_in address;
            struct netbuf buffer;
            u_int32_t number;
            int fd;
            char room[256];
        } info;
        struct sockaddr_in peer = {0};
        memset(&info, 0, sizeof info);
        u_int request = requests[draw(&dice, sizeof requests / sizeof *requests)], told = 0;
        if (request == CLSET_TIMEOUT)
            info.time = times[draw(&dice, sizeof times / sizeof *times)];
        else if (request == CLSET_XID || request == CLSET_VERS)
            info.number = 1 + draw(&dice, 3);
        else if (request == CLSET_SVC_ADDR)
            info.buffer = (struct netbuf){sizeof address, sizeof address, &address};
        bool is_null = one_in(&dice, 8);
        bool_t is_done = clnt_control(actor->client, request, is_null ? NULL : (char *)&info);
        if (is_done && request == CLGET_SERVER_ADDR)
            told = memcmp(&info.address, &address, sizeof address) == 0;
        else if (is_done && request == CLGET_SVC_ADDR)
            told = memcmp(info.buffer.buf, &address, sizeof address) == 0 && info.buffer.len == sizeof address;
        else if (is_done && request == CLGET_FD)
            told = getpeername(info.fd, (struct sockaddr *)&peer, &(socklen_t){sizeof peer}) == 0 &&
                   peer.sin_port == address.sin_port;
        else if (is_done && (request == CLGET_VERS || request == CLGET_PROG))
            told = info.number;
        else if (is_done && request == CLGET_TIMEOUT)
            told = (u_int)(info.time.tv_sec * 1000 + info.time.tv_usec / 1000);
        say(step, 'c', "control %u%s: %d %u", request, is_null ? " of NULL" : "", is_done, told);
    }
    call(actor, step, 0, patient, true);
    settle(actor), part(actor);
}

static void find_nobody(const struct step *step)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf buffer = {sizeof to, sizeof to, &to};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    /* Nobody else gets this port, and nobody listens. */
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&to, sizeof to) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&to, &(socklen_t){sizeof to}) == 0);
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &buffer, step->program, 1, 0, 0);
    REQUIRE(client == NULL);
    say(step, 'c', "nobody: status %d error %d", rpc_createerr.cf_stat, rpc_createerr.cf_error.re_errno);
    close(fd);
}

/* Makes as many calls as the step has. */
static enum clnt_stat calls(struct actor *actor, const struct step *step, struct timeval timeout, bool with_results)
{
    enum clnt_stat status = RPC_SUCCESS;
    for (u_int i = 0; i < step->calls; i++)
        status = call(actor, step, i, timeout, with_results);
    return status;
}

static void in_a_child(struct actor *actor, const struct step *step)
{
    int status;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        calls(actor, step, patient, true);
        if (step->seed % 2)
            clnt_destroy(actor->client);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
}

static void perform(struct actor *actor, const struct step *step)
{
    u_int program = step->program, version = step->version;
    struct strange strange;
    if (step->manner == NOBODY) {
        find_nobody(step);
        return;
    }
    if (step->manner == FORK || step->manner == ABANDON)
        settle(actor);
    /* Nothing may remain in libtirpc's buffers, which parent and child would both have. */
    if (step->manner == FORK)
        part(actor);
    if (actor->client == NULL)
        attach(actor, step);
    if (step->manner == CONTROLS) {
        controls(actor, step);
        return;
    }
    AUTH *old = actor->client->cl_auth;
    if (!shared)
        REQUIRE(clnt_control(actor->client, CLSET_PROG, (char *)&program) &&
                clnt_control(actor->client, CLSET_VERS, (char *)&version));
    if (step->flavour != OLD)
        REQUIRE((actor->client->cl_auth = auth_of(step, &strange)) != NULL);
    if (step->manner == FORK)
        in_a_child(actor, step);
    if (1 << step->manner & WITHOUT_REPLY)
        calls(actor, step, now, step->manner != BATCH);
    enum clnt_stat status = RPC_SUCCESS;
    if (step->manner == SHORT)
        calls(actor, step, soon, true);
    else if (step->manner != ABANDON)
        status = calls(actor, step, patient, true);
    if (step->flavour != OLD) {
        auth_destroy(actor->client->cl_auth);
        actor->client->cl_auth = old;
    }
    if (step->manner == SHORT) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += patient.tv_sec;
        REQUIRE(sem_timedwait(&is_seen[step->actor], &until) == 0);
    }
    /* After a timeout libtirpc skips the next reply, whichever it is. */
    if (step->manner == SHORT || step->manner == ABANDON || step->deed == CLOSE || step->deed == CLOSE_ANSWERED ||
        status == RPC_CANTSEND || status == RPC_CANTRECV) {
        if (step->manner == PLAIN)
            settle(actor);
        part(actor);
    }
}

static struct actor all;

static void *plays(void *own)
{
    const struct step *of = own;
    struct actor actor = shared ? all : (struct actor){NULL, RPC_ANYFD};
    for (u_int i = 0; i < steps; i++)
        perform(&actor, &of[i]);
    if (!shared)
        settle(&actor), part(&actor);
    return NULL;
}

static void run_client(int port)
{
    pthread_t threads[ACTORS];
    REQUIRE(read(port, &address, sizeof address) == sizeof address);
    if (shared)
        attach(&all, &plan[0][0]);
    for (u_int i = 0; i < actors; i++)
        if (actors == 1)
            plays(plan[i]);
        else
            REQUIRE(pthread_create(&threads[i], NULL, plays, plan[i]) == 0);
    for (u_int i = 0; i < actors && actors > 1; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    settle(&all), part(&all);
    struct netbuf buffer = {sizeof address, sizeof address, &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, netconfig, &buffer, PROG, 1, 0, 0);
    REQUIRE(client != NULL);
    enum clnt_stat status = clnt_call(client, END, (xdrproc_t)xdr_nothing, NULL, (xdrproc_t)xdr_nothing, NULL, patient);
    say(NULL, 'c', "end: status %d", status);
    clnt_destroy(client);
    exit(0);
}

/* A process of its own, which is killed if it hangs. */
static pid_t begin(void (*run)(int), int end)
{
    pid_t process = fork();
    REQUIRE(process >= 0);
    if (process == 0) {
        /* libtirpc does not block it. */
        signal(SIGPIPE, SIG_IGN);
        alarm(3 * (u_int)patient.tv_sec);
        run(end);
    }
    return process;
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 4 && (netconfig = getnetconfigent(argv[1])) != NULL);
    is_rdma = strcmp(argv[1], "rdma") == 0;
    is_seen = mmap(NULL, ACTORS * sizeof *is_seen, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(is_seen != MAP_FAILED);
    for (seed = strtoul(argv[2], NULL, 0); seed <= strtoul(argv[3], NULL, 0); seed++) {
        int ends[2], client_status, server_status;
        for (u_int i = 0; i < ACTORS; i++)
            sem_init(&is_seen[i], 1, 0);
        make_plan();
        REQUIRE(pipe(ends) == 0);
        pid_t server = begin(run_server, ends[1]), client = begin(run_client, ends[0]);
        close(ends[0]), close(ends[1]);
        REQUIRE(waitpid(client, &client_status, 0) == client);
        if (client_status != 0)
            kill(server, SIGKILL);
        REQUIRE(waitpid(server, &server_status, 0) == server);
        say(NULL, 'z', "client %x server %x", client_status, server_status);
    }
    return 0;
}
