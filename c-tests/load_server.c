/* load_server.c: the servers of the load test, and the proxies before them. See load.h.
 *
 *   load serve NETID ROLE [PORT]          prints "READY port"
 *   load proxy MANNER PORT SEED           the same, for the port that it leads to */
#define _GNU_SOURCE
#include "load.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* ---- What was posted ------------------------------------------------------------------------------------------------ */

static struct {
    u_quad_t count, sum;
} posted[STREAMS];

/* ---- Dispatch ------------------------------------------------------------------------------------------------------- */

static void identify(struct svc_req *request, struct answer *answer)
{
    answer->flavor = (uint32_t)request->rq_cred.oa_flavor;
    if (answer->flavor == AUTH_SYS)
        answer->uid = (uint32_t)((struct authunix_parms *)request->rq_clntcred)->aup_uid;
}

/* Calls back over this connection; returns how many callbacks have answered as they should. */
static uint32_t call_back(SVCXPRT *transport, const struct ask *ask)
{
    struct back back = back_of(ask->extra);
    struct timeval patient = {.tv_sec = PATIENT / 1000};
    size_t longest = 512 << 10;
    uint32_t good = 0;
    CLIENT *client = reverse_create(transport, LOAD_BACK, LOAD_VERS);
    if (client == NULL) {
        clnt_pcreateerror("load server: calling back");
        return 0;
    }
    /* The number of CLSET_RDMA_MAXREPLY: rpcrdma.h is for programs that are linked with the library. */
    if (!clnt_control(client, 1380207873, (char *)&longest))
        clnt_perror(client, "load server: CLSET_RDMA_MAXREPLY");
    for (unsigned i = 0; i < back.times; i++) {
        uint64_t tag = ask->tag + i;
        struct ask callback = {.tag = tag, .want = ask->want, .extra = ask->extra, .length = ask->want};
        struct answer answer = {0};
        callback.bytes = malloc(callback.length + 1);
        contents_fill(callback.bytes, callback.length, key_back(tag));
        enum clnt_stat status = clnt_call(client, DO, (xdrproc_t)xdr_ask, (char *)&callback, (xdrproc_t)xdr_answer,
                                          (char *)&answer, patient);
        if (status != RPC_SUCCESS)
            clnt_perror(client, "load server: a callback");
        else if (answer.tag == tag && answer.length == ask->want && answer.sum == callback.length &&
                 contents_right(answer.bytes, answer.length, key_there(tag)))
            good++;
        else
            fprintf(stderr, "load server: the answer to callback %#llx is wrong: %#llx, %u bytes\n",
                    (unsigned long long)tag, (unsigned long long)answer.tag, answer.length);
        free(callback.bytes);
        free(answer.bytes);
    }
    clnt_destroy(client);
    return good;
}

static void fail(SVCXPRT *transport, uint32_t how)
{
    switch (how) {
    case 0: svcerr_systemerr(transport); break;
    case 1: svcerr_decode(transport); break;
    case 2: svcerr_noproc(transport); break;
    case 3: svcerr_noprog(transport); break;
    case 4: svcerr_progvers(transport, 3, 5); break;
    case 5: svcerr_auth(transport, AUTH_REJECTEDCRED); break;
    default: break; /* MUTE: never */
    }
}

static void dispatch(struct svc_req *request, SVCXPRT *transport)
{
    /* This function is entered again while a call back waits, so it keeps no state of its own. */
    struct ask ask = {0};
    struct answer answer = {0};
    if (request->rq_proc == NULLPROC) {
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (request->rq_proc > STATE) {
        svcerr_noproc(transport);
        return;
    }
    if (!svc_getargs(transport, (xdrproc_t)xdr_ask, (char *)&ask)) {
        svcerr_decode(transport);
        return;
    }
    answer.tag = ask.tag;
    identify(request, &answer);
    answer.sum = contents_sum(ask.bytes, ask.length);
    bool reply = true;
    switch (request->rq_proc) {
    case DO:
        answer.length = ask.want;
        break;
    case POST:
        if (ask.extra < STREAMS) {
            posted[ask.extra].count++;
            posted[ask.extra].sum += answer.sum;
        }
        reply = false;
        break;
    case TALLY:
        if (ask.extra < STREAMS) {
            answer.sum = posted[ask.extra].sum;
            answer.uid = (uint32_t)posted[ask.extra].count;
        }
        break;
    case BACK:
        if (reverse_create != NULL)
            answer.uid = call_back(transport, &ask);
        answer.length = ask.want;
        break;
    case FAIL:
        fail(transport, ask.extra);
        reply = false;
        break;
    case STATE:
        malloc_trim(0);
        answer.uid = (uint32_t)count_descriptors();
        answer.sum = (u_quad_t)resident_kb();
        break;
    }
    if (ask.delay > 0)
        usleep(ask.delay);
    if (reply && answer.length <= BYTES_MAX) {
        answer.bytes = malloc(answer.length + 1);
        contents_fill(answer.bytes, answer.length, key_back(ask.tag));
        svc_sendreply(transport, (xdrproc_t)xdr_answer, (char *)&answer);
        free(answer.bytes);
    }
    svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
}

/* ---- Loops ---------------------------------------------------------------------------------------------------------- */

static void poll_loop(void)
{
    for (;;) {
        int count = svc_max_pollfd;
        struct pollfd *fds = calloc((size_t)count + 1, sizeof *fds);
        for (int i = 0; i < count; i++)
            fds[i] = (struct pollfd){.fd = svc_pollfd[i].fd, .events = svc_pollfd[i].events};
        int ready = poll(fds, (nfds_t)count, -1);
        if (ready > 0)
            svc_getreq_poll(fds, ready);
        else if (ready < 0 && errno != EINTR)
            err(1, "poll");
        free(fds);
    }
}

static void select_loop(void)
{
    for (;;) {
        fd_set fds = svc_fdset;
        int ready = select(svc_maxfd + 1, &fds, NULL, NULL, NULL);
        if (ready > 0)
            svc_getreqset(&fds);
        else if (ready < 0 && errno != EINTR)
            err(1, "select");
    }
}

int listen_at(unsigned *port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)*port), .sin_addr.s_addr = load_address()};
    socklen_t length = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) < 0 ||
        bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 128) < 0 ||
        getsockname(fd, (struct sockaddr *)&address, &length) < 0)
        err(1, "listening on port %u", *port);
    *port = ntohs(address.sin_port);
    return fd;
}

int serve_main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    enum role role = (enum role)atoi(argv[3]);
    unsigned port = argc > 4 ? (unsigned)atoi(argv[4]) : 0;
    struct netconfig *config = getnetconfigent(argv[2]);
    if (config == NULL)
        errx(1, "%s: no such netid", argv[2]);
    int fd = listen_at(&port);
    SVCXPRT *transport = svc_tli_create(fd, config, NULL, 0, 0);
    if (transport == NULL || !svc_reg(transport, LOAD_PROG, LOAD_VERS, dispatch, NULL))
        errx(1, "no transport: %s", clnt_spcreateerror(""));
    dprintf(STDOUT_FILENO, "READY %u\n", port);
    if (role == HASTY)
        poll_loop();
    else if (role == FAR)
        select_loop();
    svc_run();
    errx(1, "svc_run has returned");
}

/* ---- Proxies --------------------------------------------------------------------------------------------------------- */

/* What happens to a connection after a certain number of bytes. */
enum fate { PASS, RESET, CLOSE, END_THERE, END_BACK, STALL, TRICKLE, FATES };

/* What a proxy does to its connections: it slows all of them; or each meets its fate after a certain number of bytes; or
 * after a certain time, if that comes first; or the proxy also alters bytes, except those of the startup. */
enum manner { SLOWS, CUTS, SOON, FUZZES, MANNERS };
static const char *const manner_names[MANNERS] = {"slow", "cut", "soon", "fuzz"};
enum { STARTUP = 512 };


/* Bytes per second of a slow connection, either way, and the microseconds by which they are delayed. */
enum { SLOW_RATE = 40 << 20, SLOW_DELAY = 1000 };

enum { CONNECTIONS = 512, CHUNK = 64 << 10 };

struct direction {
    char bytes[CHUNK];
    size_t start, end;  /* what waits in it */
    uint64_t not_before; /* now_us(): it goes on then */
    bool ended;         /* the source has closed */
    bool told;          /* ... and the sink knows */
};

struct relay {
    int fds[2]; /* of the client, of the server */
    struct direction *directions[2]; /* from fds[0] to fds[1], and back */
    enum fate fate;
    uint64_t passed, until; /* bytes; the fate's number of them, then when a stall ends */
    uint64_t deadline;      /* now_us(): the fate's, however few bytes have gone through */
    bool struck;
};

static struct relay relays[CONNECTIONS];
static size_t relay_count;

static void relay_close(struct relay *relay, bool reset)
{
    struct linger at_once = {.l_onoff = 1};
    for (int i = 0; i < 2; i++) {
        if (reset)
            setsockopt(relay->fds[i], SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        close(relay->fds[i]);
        free(relay->directions[i]);
    }
    *relay = relays[--relay_count];
}

/* The factor for what counts as soon on this machine. */
static double patience(void)
{
    const char *text = getenv("TEST_PATIENCE");
    return text == NULL ? 1 : atof(text);
}

static void relay_open(int fd, unsigned port, enum manner manner, uint64_t seed)
{
    static unsigned number;
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = load_address()};
    int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (relay_count == CONNECTIONS || server < 0 || connect(server, (struct sockaddr *)&address, sizeof address) < 0) {
        close(server);
        close(fd);
        return;
    }
    fcntl(fd, F_SETFL, O_NONBLOCK);
    fcntl(server, F_SETFL, O_NONBLOCK);
    struct relay *relay = &relays[relay_count++];
    *relay = (struct relay){.fds = {fd, server}, .fate = PASS, .deadline = UINT64_MAX};
    for (int i = 0; i < 2; i++)
        relay->directions[i] = calloc(1, sizeof *relay->directions[i]);
    if (manner != SLOWS) {
        relay->fate = (enum fate)plan_choice(seed, "fate", number, FATES);
        /* Not in the startup: a moved client would take the server for one of tcp then. */
        relay->until = STARTUP + ((uint64_t)1 << plan_choice(seed, "when", number, 20)) +
                       plan_choice(seed, "just when", number, 5000);
        if (manner >= SOON && relay->fate != PASS)
            relay->deadline = now_us() + (uint64_t)(patience() * (double)(10000 + (1 << plan_choice(seed, "how soon", number, 22))));
    }
    number++;
}

/* Alters one of these bytes, now and then. */
static void alter(char *bytes, size_t length, uint64_t seed)
{
    static unsigned number;
    number++;
    if (plan_choice(seed, "alter", number, 8) == 0)
        bytes[plan_choice(seed, "where", number, length)] ^= (char)(1 << plan_choice(seed, "what", number, 8));
}

/* Something has come, or can be sent. False: the connection is over. */
static bool relay_move(struct relay *relay, enum manner manner, uint64_t seed, short from, short to)
{
    uint64_t now = now_us();
    for (int i = 0; i < 2; i++) {
        struct direction *direction = relay->directions[i];
        short in = i == 0 ? from : to, out = i == 0 ? to : from;
        if (direction->start == direction->end && !direction->ended && in & (POLLIN | POLLHUP | POLLERR)) {
            ssize_t n = read(relay->fds[i], direction->bytes, CHUNK);
            if (n < 0 && errno != EAGAIN)
                return false;
            if (n == 0)
                direction->ended = true;
            if (n > 0) {
                direction->start = 0;
                direction->end = (size_t)n;
                if (manner == FUZZES && relay->passed > STARTUP)
                    alter(direction->bytes, (size_t)n, seed);
                direction->not_before = manner != SLOWS ? 0 : now + SLOW_DELAY + (uint64_t)n * 1000000 / SLOW_RATE;
            }
        }
        if (direction->start < direction->end && now >= direction->not_before && out & (POLLOUT | POLLHUP | POLLERR)) {
            size_t part = direction->end - direction->start;
            bool trickles = relay->struck && relay->fate == TRICKLE;
            if (trickles && part > 700)
                part = 700;
            ssize_t n = send(relay->fds[!i], direction->bytes + direction->start, part, MSG_NOSIGNAL);
            if (n < 0 && errno != EAGAIN)
                return false;
            if (n > 0) {
                direction->start += (size_t)n;
                relay->passed += (uint64_t)n;
                direction->not_before = trickles ? now + 5000 : 0;
            }
        }
        if (direction->ended && !direction->told && direction->start == direction->end) {
            shutdown(relay->fds[!i], SHUT_WR);
            direction->told = true;
        }
    }
    if (relay->directions[0]->told && relay->directions[1]->told)
        return false;
    if (!relay->struck && relay->fate != PASS && (relay->passed >= relay->until || now >= relay->deadline)) {
        relay->struck = true;
        relay->until = now + 300000;
        switch (relay->fate) {
        case RESET: return false;
        case CLOSE: return false;
        case END_THERE: relay->directions[0]->ended = true; break;
        case END_BACK: relay->directions[1]->ended = true; break;
        case STALL:
            relay->directions[0]->not_before = relay->directions[1]->not_before = relay->until;
            break;
        default: break;
        }
    }
    /* After a while a trickle becomes a stream again. */
    if (relay->struck && relay->fate == TRICKLE && now > relay->until)
        relay->fate = PASS;
    return true;
}

int proxy_main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    enum manner manner = SLOWS;
    while (manner < MANNERS && strcmp(argv[2], manner_names[manner]) != 0)
        manner++;
    if (manner == MANNERS)
        return 2;
    unsigned port = 0, target = (unsigned)atoi(argv[3]);
    uint64_t seed = strtoull(argv[4], NULL, 0);
    int listening = listen_at(&port);
    dprintf(STDOUT_FILENO, "READY %u\n", port);
    for (;;) {
        static struct pollfd fds[1 + 2 * CONNECTIONS];
        uint64_t now = now_us(), wake = UINT64_MAX;
        size_t count = relay_count;
        fds[0] = (struct pollfd){.fd = listening, .events = POLLIN};
        for (size_t i = 0; i < count; i++) {
            struct pollfd *both = &fds[1 + 2 * i];
            for (int side = 0; side < 2; side++)
                both[side] = (struct pollfd){.fd = relays[i].fds[side]};
            for (int side = 0; side < 2; side++) {
                struct direction *direction = relays[i].directions[side];
                bool waits = direction->not_before > now;
                if (waits && direction->not_before < wake)
                    wake = direction->not_before;
                if (!relays[i].struck && relays[i].deadline < wake)
                    wake = relays[i].deadline;
                if (direction->start == direction->end && !direction->ended && !waits)
                    both[side].events |= POLLIN;
                if (direction->start < direction->end && !waits)
                    both[!side].events |= POLLOUT;
            }
            /* A descriptor without requested events would wake poll(2) again and again once its peer has ended. */
            for (int side = 0; side < 2; side++) {
                if (both[side].events == 0)
                    both[side].fd = -1;
            }
        }
        int wait = wake == UINT64_MAX ? -1 : wake < now ? 0 : (int)((wake - now) / 1000 + 1);
        if (poll(fds, (nfds_t)(1 + 2 * count), wait) < 0 && errno != EINTR)
            err(1, "poll");
        for (size_t i = count; i-- > 0;) {
            if (!relay_move(&relays[i], manner, seed, fds[1 + 2 * i].revents, fds[2 + 2 * i].revents))
                relay_close(&relays[i], relays[i].struck && relays[i].fate == RESET);
        }
        if (fds[0].revents & POLLIN) {
            int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0)
                relay_open(fd, target, manner, seed);
        }
    }
}
