/* load_plan.c: what is called, when, and with which outcome. All of this follows from the seed. See load.h. */
#define _GNU_SOURCE
#include "load.h"
#include <string.h>

const char *const role_names[ROLES] = {"plain", "hasty", "far", "slow", "hung", "nap", "mortal", "cut"};
const char *const kind_names[KINDS] = {"null", "small", "large", "far",  "post", "tally", "poke",   "fail", "mute",
                                       "back", "hasty", "slow",  "hung", "nap",  "mortal", "cut", "break"};

/* How many of a thousand operations are of each kind. */
static const unsigned shares[KINDS] = {
    [K_NULL] = 150,  [K_SMALL] = 360, [K_LARGE] = 60, [K_FAR] = 30,  [K_POST] = 80, [K_TALLY] = 30,
    [K_POKE] = 20,   [K_FAIL] = 30,   [K_MUTE] = 10,  [K_BACK] = 40, [K_HASTY] = 55, [K_SLOW] = 30,
    [K_HUNG] = 20,   [K_NAP] = 20,    [K_MORTAL] = 25, [K_CUT] = 30,  [K_BREAK] = 10,
};

static const int failures[FAILURES] = {RPC_SYSTEMERROR, RPC_CANTDECODEARGS, RPC_PROCUNAVAIL,
                                       RPC_PROGUNAVAIL, RPC_PROGVERSMISMATCH, RPC_AUTHERROR};

/* The finalizer of splitmix64. */
static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

struct random {
    uint64_t state;
};

static uint64_t below(struct random *random, uint64_t bound)
{
    random->state = mix(random->state);
    return random->state % bound;
}

/* From `least` to `most`; all doublings are equally likely. */
static uint32_t by_magnitude(struct random *random, uint32_t least, uint32_t most)
{
    unsigned doublings = 0;
    while (((uint64_t)(least ? least : 1) << (doublings + 1)) <= most)
        doublings++;
    uint64_t low = (uint64_t)(least ? least : 1) << below(random, doublings + 1);
    uint64_t value = low + below(random, low) - (least == 0 && low == 1 ? below(random, 2) : 0);
    return value > most ? most : (uint32_t)value;
}

/* Most are small; one in a thousand of all operations is longer than 1 MiB. */
static uint32_t large(struct random *random)
{
    uint64_t which = below(random, 1000);
    if (which < 100)
        return (uint32_t)below(random, 100);
    if (which < 700)
        return by_magnitude(random, 1 << 10, 64 << 10);
    if (which < 970)
        return by_magnitude(random, 64 << 10, 1 << 20);
    return which < 995 ? by_magnitude(random, 1 << 20, BYTES_MAX) : BYTES_MAX;
}

uint64_t plan_choice(uint64_t seed, const char *what, unsigned which, uint64_t bound)
{
    uint64_t state = mix(seed ^ 0x63686f69636573u);
    for (; *what != '\0'; what++)
        state = mix(state ^ (unsigned char)*what);
    struct random random = {mix(state ^ which)};
    return below(&random, bound);
}

unsigned plan_credits(uint64_t seed, unsigned process)
{
    static const unsigned credits[] = {1, 2, 3, 8, 32, 32, 256, 4096};
    return credits[plan_choice(seed, "credits", process, sizeof credits / sizeof *credits)];
}

bool plan_one_credit(const struct plan *plan, unsigned process, enum role role)
{
    return plan_credits(plan->seed, role) == 1 || plan_credits(plan->seed, ROLES + process) == 1;
}

uint32_t back_extra(struct back back)
{
    return back.times | (uint32_t)back.nested << 4 | back.process << 8 | back.thread << 16 | (uint32_t)back.handle << 24;
}

struct back back_of(uint32_t extra)
{
    return (struct back){extra & 15, extra >> 4 & 1, extra >> 8 & 255, extra >> 16 & 255, extra >> 24};
}

uint32_t post_stream(unsigned process, unsigned thread, enum handle handle)
{
    return (process * THREADS + thread) * HANDLES + handle;
}

/* A loose call to `role`, given up after 1 to `most` milliseconds. */
static void loose(struct operation *op, struct random *random, enum role role, uint32_t most)
{
    op->role = role;
    op->steady = false;
    op->timeout = by_magnitude(random, 1, most);
    op->handle = below(random, 3) == 0 ? SHARED : OWN;
    bool is_large = below(random, 8) == 0;
    op->size = is_large ? large(random) : by_magnitude(random, 0, 4000);
    op->want = is_large ? large(random) : by_magnitude(random, 0, 4000);
}

struct operation plan_operation(const struct plan *plan, unsigned process, unsigned thread, uint32_t number)
{
    uint64_t place = (uint64_t)process << 48 | (uint64_t)thread << 40 | number;
    struct random random = {mix(mix(plan->seed) ^ place)};
    struct operation op = {
        .role = PLAIN,
        .procedure = DO,
        .tag = mix(random.state) | 1,
        .timeout = PATIENT,
        .steady = true,
        .status = RPC_SUCCESS,
    };
    unsigned share = (unsigned)below(&random, 1000);
    while (share >= shares[op.kind])
        share -= shares[op.kind++];
    uint64_t which = below(&random, 6);
    op.handle = which < 3 ? OWN : which < 5 ? SHARED : TWIN;

    switch (op.kind) {
    case K_NULL:
        op.procedure = NULLPROC;
        op.role = (enum role)below(&random, 3);
        break;
    case K_SMALL:
        op.role = below(&random, 2) ? PLAIN : HASTY;
        op.size = by_magnitude(&random, 0, 4000);
        op.want = by_magnitude(&random, 0, 4000);
        break;
    case K_LARGE:
        op.role = below(&random, 2) ? PLAIN : HASTY;
        op.size = large(&random);
        op.want = large(&random);
        break;
    case K_FAR:
        op.role = FAR;
        op.size = by_magnitude(&random, 0, 256 << 10);
        op.want = by_magnitude(&random, 0, 256 << 10);
        break;
    case K_POST:
        op.procedure = POST;
        op.size = below(&random, 20) == 0 ? by_magnitude(&random, 4000, 256 << 10) : by_magnitude(&random, 0, 2000);
        op.extra = post_stream(process, thread, op.handle);
        op.timeout = 0;
        break;
    case K_TALLY:
        op.procedure = TALLY;
        op.extra = post_stream(process, thread, op.handle);
        break;
    case K_POKE:
        op.role = HASTY;
        op.size = by_magnitude(&random, 0, 4000);
        op.want = by_magnitude(&random, 0, 4000);
        op.timeout = 0;
        op.status = RPC_TIMEDOUT;
        break;
    case K_FAIL:
        op.role = below(&random, 2) ? PLAIN : HASTY;
        op.procedure = FAIL;
        op.extra = (uint32_t)below(&random, FAILURES);
        op.status = failures[op.extra];
        break;
    case K_MUTE:
        op.role = HASTY;
        op.handle = MUTED;
        if (below(&random, 2)) {
            op.size = by_magnitude(&random, 0, 4000);
            op.want = by_magnitude(&random, 0, 4000);
            break;
        }
        op.procedure = FAIL;
        op.extra = MUTE;
        op.timeout = by_magnitude(&random, 5, 50);
        op.status = RPC_TIMEDOUT;
        break;
    case K_BACK: {
        op.procedure = BACK;
        op.size = by_magnitude(&random, 0, 2000);
        op.want = below(&random, 4) == 0 ? by_magnitude(&random, 4000, 256 << 10) : by_magnitude(&random, 0, 4000);
        /* A call in the midst of a callback needs a credit besides those of all calls that are under way. */
        unsigned least = plan_credits(plan->seed, PLAIN), own = plan_credits(plan->seed, ROLES + process);
        least = own < least ? own : least;
        bool nested = below(&random, 4) == 0 && least >= 4 * plan->threads;
        op.extra = back_extra((struct back){1 + (unsigned)below(&random, 4), nested, process, thread, op.handle});
        break;
    }
    case K_HASTY:
        loose(&op, &random, HASTY, 50);
        op.delay = below(&random, 4) == 0 ? (uint32_t)below(&random, 4000) : 0;
        break;
    case K_SLOW:
        loose(&op, &random, SLOW, 100);
        op.delay = (uint32_t)below(&random, 8000);
        break;
    case K_HUNG: loose(&op, &random, HUNG, 100); break;
    case K_NAP: loose(&op, &random, NAP, 200); break;
    case K_MORTAL: loose(&op, &random, MORTAL, 500); break;
    case K_CUT: loose(&op, &random, CUT, 500); break;
    case K_BREAK:
        op.handle = BROKEN;
        op.extra = (uint32_t)below(&random, 4);
        op.size = by_magnitude(&random, 0, 64 << 10);
        op.want = by_magnitude(&random, 0, 64 << 10);
        break;
    case KINDS: break;
    }
    if (op.handle == TWIN && op.role != PLAIN)
        op.handle = SHARED;
    /* A CLIENT that threads share keeps its AUTH. */
    if (op.handle == SHARED)
        op.credential = op.role % 2 ? NONE : SHARED_SYS;
    else if (op.handle == TWIN)
        op.credential = NONE;
    else
        op.credential = (enum credential)below(&random, 3);
    return op;
}

bool plan_allows(const struct operation *op, int status)
{
    switch (status) {
    case RPC_SUCCESS: return op->kind != K_HUNG;
    case RPC_TIMEDOUT: return true;
    case RPC_CANTSEND:
    case RPC_CANTRECV: return op->kind != K_HASTY && op->kind != K_SLOW;
    case NO_CLIENT: return op->kind == K_NAP || op->kind == K_MORTAL || op->kind == K_CUT;
    default: return false;
    }
}

/* ---- Contents ---------------------------------------------------------------------------------------------------- */

uint64_t key_there(uint64_t tag)
{
    return mix(tag ^ 0x7468657265u);
}

uint64_t key_back(uint64_t tag)
{
    return mix(tag ^ 0x6261636bu);
}

/* Cheap enough for gigabytes: no two words of one key are alike, and none equals that of a neighbour. */
static uint64_t word(uint64_t key, size_t at)
{
    uint64_t x = (key + at) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

void contents_fill(char *bytes, size_t length, uint64_t key)
{
    for (size_t at = 0; at < length; at += 8) {
        uint64_t value = word(key, at);
        memcpy(bytes + at, &value, length - at < 8 ? length - at : 8);
    }
}

bool contents_right(const char *bytes, size_t length, uint64_t key)
{
    uint64_t differences = 0;
    for (size_t at = 0; at < length; at += 8) {
        size_t part = length - at < 8 ? length - at : 8;
        uint64_t value = 0, wanted = word(key, at);
        memcpy(&value, bytes + at, part);
        if (part < 8)
            wanted &= ((uint64_t)1 << part * 8) - 1;
        differences |= value ^ wanted;
    }
    return differences == 0;
}

static uint64_t sum_step(uint64_t sum, uint64_t value)
{
    sum = (sum ^ value) * 0x100000001b3u;
    return sum ^ sum >> 32;
}

uint64_t contents_sum(const char *bytes, size_t length)
{
    uint64_t sum = length;
    for (size_t at = 0; at < length; at += 8) {
        uint64_t value = 0;
        memcpy(&value, bytes + at, length - at < 8 ? length - at : 8);
        sum = sum_step(sum, value);
    }
    return sum;
}

uint64_t contents_expected(size_t length, uint64_t key)
{
    uint64_t sum = length;
    for (size_t at = 0; at < length; at += 8) {
        uint64_t value = word(key, at);
        if (length - at < 8)
            value &= ((uint64_t)1 << (length - at) * 8) - 1;
        sum = sum_step(sum, value);
    }
    return sum;
}

/* ---- On the wire. c-tests/load.conf has the same shapes. ----------------------------------------------------------- */

bool_t xdr_ask(XDR *xdrs, struct ask *ask)
{
    return xdr_u_quad_t(xdrs, &ask->tag) && xdr_u_int32_t(xdrs, &ask->want) && xdr_u_int32_t(xdrs, &ask->extra) &&
           xdr_u_int32_t(xdrs, &ask->delay) && xdr_bytes(xdrs, &ask->bytes, &ask->length, BYTES_MAX);
}

bool_t xdr_answer(XDR *xdrs, struct answer *answer)
{
    return xdr_u_quad_t(xdrs, &answer->tag) && xdr_u_int32_t(xdrs, &answer->flavor) &&
           xdr_u_int32_t(xdrs, &answer->uid) && xdr_u_quad_t(xdrs, &answer->sum) &&
           xdr_bytes(xdrs, &answer->bytes, &answer->length, BYTES_MAX);
}
