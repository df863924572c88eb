/* local_handshake.c: how two processes come to share memory while others interfere, and what can be done with that memory. See
 * local.h. */
#define _GNU_SOURCE
#include "local.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- Handshakes --------------------------------------------------------------------------------------------------- */

enum { SECRET = 16, FRAME = 20, MOST = 1024 };
static const char mark[] = "RPCRloc\x06";

static int memory(size_t bytes, int seals)
{
    int fd = memfd_create("rpcrdma", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && (seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}
enum { SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };

static socklen_t abstract(struct sockaddr_un *address, const unsigned char *public)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, "rpcrdma-", 8);
    memcpy(address->sun_path + 9, public, SECRET);
    return offsetof(struct sockaddr_un, sun_path) + 9 + SECRET;
}

/* Sends a secret of `length` bytes with `count` descriptors. */
static bool show(int to, const unsigned char *secret, size_t length, const int *fds, int count)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {0};
    struct iovec bytes = {(void *)(uintptr_t)secret, length};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    return sendmsg(to, &message, MSG_NOSIGNAL) == (ssize_t)length;
}

/* What may be sent instead of a segment. */
enum thing {
    SILENCE, NO_DESCRIPTOR, SURPLUS, UNSEALED, TRUNCATED, SHORTER, LONG_SECRET, SHORT_SECRET, A_SEGMENT, THINGS, A_PIPE, MANY
};
static const char *const things[] = {"nothing", "no descriptor", "two descriptors", "memory without seals",
                                     "memory that is truncated then", "memory of another length", "a longer secret",
                                     "a part of the secret", "a segment"};

static bool show_thing(int to, enum thing thing, const unsigned char *secret)
{
    int fds[253], count = 1, pipes[2];
    unsigned char longer[SECRET + 1];
    bool shown;
    memcpy(longer, secret, SECRET);
    longer[SECRET] = 0;
    switch (thing) {
    case SILENCE: return true;
    case NO_DESCRIPTOR: return show(to, secret, SECRET, NULL, 0);
    case SURPLUS: count = 2; break;
    case MANY: count = 253; break;
    case A_PIPE:
        REQUIRE(pipe2(pipes, O_CLOEXEC) == 0);
        shown = show(to, secret, SECRET, pipes, 1);
        close(pipes[0]), close(pipes[1]);
        return shown;
    default: break;
    }
    fds[0] = memory(thing == SHORTER ? SEGMENT - 4096 : SEGMENT, thing == UNSEALED || thing == TRUNCATED ? 0 : SEALS);
    for (int i = 1; i < count; i++)
        fds[i] = fds[0];
    shown = show(to, longer, thing == LONG_SECRET ? SECRET + 1 : thing == SHORT_SECRET ? SECRET - 1 : SECRET, fds, count);
    if (thing == TRUNCATED)
        REQUIRE(ftruncate(fds[0], 0) == 0);
    close(fds[0]);
    return shown;
}

/* Reads a frame of the startup; returns its length, or 0 if the connection ends before that. */
static size_t read_frame(int fd, unsigned char *frame)
{
    size_t have = 0, want = FRAME;
    while (have < want) {
        ssize_t n = recv(fd, frame + have, want - have, 0);
        if (n <= 0)
            return 0;
        have += (size_t)n;
        if (have == FRAME)
            want = FRAME + ((size_t)frame[18] << 8 | frame[19]);
        REQUIRE(want <= MOST);
    }
    return have;
}
/* What follows the mark; NULL if there is no mark. */
static const unsigned char *find_mark(const unsigned char *frame, size_t length, size_t bytes)
{
    const unsigned char *at = memmem(frame, length, mark, 8);
    return at != NULL && at + 8 + bytes <= frame + length ? at + 8 : NULL;
}

static int listen_at_loopback(int *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    struct timeval limit = {60, 0};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&address, length) == 0 && listen(fd, 16) == 0);
    REQUIRE(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&address, &length) == 0);
    *port = ntohs(address.sin_port);
    return fd;
}
static int connect_to(int port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

/* Passes bytes on, both ways, until both ends have ended. */
static void *pass_on(void *pair)
{
    int *fds = pair, on = 1;
    struct pollfd ends[2] = {{.fd = fds[0], .events = POLLIN}, {.fd = fds[1], .events = POLLIN}};
    static char bytes[65536];
    for (int i = 0; i < 2; i++)
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (ends[0].fd >= 0 || ends[1].fd >= 0) {
        REQUIRE(poll(ends, 2, -1) > 0);
        for (int i = 0; i < 2; i++) {
            if (ends[i].revents == 0 || ends[i].fd < 0)
                continue;
            ssize_t n = recv(fds[i], bytes, sizeof bytes, 0);
            if (n <= 0) {
                shutdown(fds[1 - i], SHUT_WR);
                ends[i].fd = -1;
                continue;
            }
            for (ssize_t sent = 0, more; sent < n; sent += more)
                if ((more = send(fds[1 - i], bytes + sent, (size_t)(n - sent), MSG_NOSIGNAL)) <= 0)
                    break;
        }
    }
    close(fds[0]), close(fds[1]);
    return NULL;
}

/* Whether everybody can see this name of a socket. */
static bool name_is_seen(const unsigned char *public)
{
    static char all[4 << 20];
    char name[10 + SECRET] = "@rpcrdma-";
    int fd = open("/proc/net/unix", O_RDONLY | O_CLOEXEC);
    REQUIRE(fd >= 0);
    size_t length = 0;
    for (ssize_t n; (n = read(fd, all + length, sizeof all - length)) > 0;)
        length += (size_t)n;
    close(fd);
    /* A byte of 0 is written as @. */
    for (int i = 0; i < SECRET; i++)
        name[9 + i] = public[i] != 0 ? (char)public[i] : '@';
    return memmem(all, length, name, 9 + SECRET) != NULL;
}

/* The client of these tests: connects when it is told to, calls, ends, and reports the outcome. */
struct outcome {
    bool connected, shared, right;
    double took;
    int before, after;
    char error[512];
};
static int commands, outcomes, proxy_port;
static void be_waiter(int unused)
{
    (void)unused;
    struct buffers buffers = make_buffers();
    uint64_t state = seed | 1;
    char byte;
    while (read(commands, &byte, 1) == 1 && byte == 'c') {
        struct outcome outcome = {.right = true, .before = descriptors(getpid())};
        double began = now();
        CLIENT *client = try_to_connect("127.0.0.1", proxy_port);
        outcome.took = now() - began;
        if (client != NULL) {
            outcome.connected = true;
            for (int i = 0; i < 10 && outcome.right; i++)
                echo(client, &buffers, &state, length_of_call(&state), 60000, &outcome.right);
            outcome.shared = mappings(getpid(), true) == 2;
            clnt_destroy(client);
        } else {
            snprintf(outcome.error, sizeof outcome.error, "%s", clnt_spcreateerror("clnt_tli_create"));
        }
        outcome.after = descriptors(getpid());
        REQUIRE(write(outcomes, &outcome, sizeof outcome) == sizeof outcome);
    }
}

/* Has the client connect to the server through us: we hold its Request back, know its secret, and connect to its name `count`
 * times to send this thing. */
static struct outcome connect_past(const struct server *server, int listener, int to, int from, enum thing thing, bool right,
                                   int count)
{
    static unsigned char secrets[2][SECRET] = {"of another one."};
    unsigned char frame[MOST];
    struct outcome outcome;
    REQUIRE(write(to, "c", 1) == 1);
    int pair[2] = {accept4(listener, NULL, NULL, SOCK_CLOEXEC)}, squatters[64];
    REQUIRE(pair[0] >= 0);
    size_t length = read_frame(pair[0], frame);
    const unsigned char *asked = find_mark(frame, length, 2 * SECRET);
    REQUIRE(asked != NULL);
    REQUIRE(name_is_seen(asked));
    struct sockaddr_un name;
    socklen_t size = abstract(&name, asked);
    for (int i = 0; i < count; i++) {
        squatters[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        /* There is no room for the last ones. */
        if (connect(squatters[i], (struct sockaddr *)&name, size) == 0)
            show_thing(squatters[i], thing, right ? asked + SECRET : secrets[0]);
    }
    /* Later connections are sent the secret of this one. */
    memcpy(secrets[0], asked + SECRET, SECRET);
    pair[1] = connect_to(server->port);
    REQUIRE(send(pair[1], frame, length, MSG_NOSIGNAL) == (ssize_t)length);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, pass_on, pair) == 0);
    REQUIRE(read(from, &outcome, sizeof outcome) == sizeof outcome);
    REQUIRE(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < count; i++)
        close(squatters[i]);
    return outcome;
}

void handshake_client(void)
{
    int to[2], from[2];
    struct server server = start_server(be_server);
    int listener = listen_at_loopback(&proxy_port);
    REQUIRE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    commands = to[0], outcomes = from[1];
    pid_t client = part(be_waiter, 0);
    /* When the client ends, so does what it reports. */
    close(from[1]);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held server_before = holds(server.pid);
    struct outcome outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "a client that nobody disturbs shares memory");
    struct held client_before = holds(client);
    for (int right = 0; right <= 1; right++) {
        for (enum thing thing = right ? NO_DESCRIPTOR : SILENCE; thing < (right ? A_SEGMENT : THINGS); thing++) {
            outcome = connect_past(&server, listener, to[1], from[0], thing, right, 12);
            check(outcome.connected && outcome.shared && outcome.right && outcome.after == outcome.before &&
                      outcome.took < 1000 + patience(),
                  "others show a waiting client %s with %s secret: it shares memory with its server%s%s", things[thing],
                  right ? "its" : "another", outcome.error[0] ? ": " : "", outcome.error);
        }
    }
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 60);
    check(!outcome.connected && outcome.after == outcome.before && outcome.took < 1000 + patience() &&
              strstr(outcome.error, "shares no memory") != NULL,
          "others take every place of a waiting client: it knows in time (%.0f ms) that it shares no memory%s%s", outcome.took,
          strstr(outcome.error, "shares no memory") ? "" : ": ", strstr(outcome.error, "shares no memory") ? "" : outcome.error);
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "the next time it does");
    holds_again(client, "the client", client_before);
    holds_again(server.pid, "the server", server_before);
    outcome = connect_past(&server, listener, to[1], from[0], MANY, false, 1);
    check(outcome.connected && outcome.shared && outcome.right && outcome.after <= outcome.before + 3,
          "others show a waiting client 253 descriptors: it shares memory with its server, and keeps %d descriptors open",
          outcome.after - outcome.before);
    told->stop = true;
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 10000 + patience()) && ends(honest, 60000), "both clients end well");
    end(server.pid);
    close(listener);
}

/* ---- A hostile client, by hand ------------------------------------------------------------------------------------ */

struct offer {
    int tcp, listener, peer;
    unsigned char frame[MOST];
    const unsigned char *secret;
    /* The server's segment. */
    int segment;
};

static int unix_listener(const unsigned char *public, int type, int backlog)
{
    struct sockaddr_un name;
    socklen_t size = abstract(&name, public);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&name, size) == 0 && listen(fd, backlog) == 0);
    return fd;
}

static void random_bytes(unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)below(256);
}

/* Sends a Request for shared memory with this name. */
static int ask(const struct server *server, const unsigned char *public, const unsigned char *secret)
{
    unsigned char request[FRAME + 8 + 2 * SECRET] = "MPA ID Req Frame";
    request[17] = 1;
    request[19] = 8 + 2 * SECRET;
    memcpy(request + FRAME, mark, 8);
    memcpy(request + FRAME + 8, public, SECRET);
    memcpy(request + FRAME + 8 + SECRET, secret, SECRET);
    int fd = connect_to(server->port);
    REQUIRE(send(fd, request, sizeof request, MSG_NOSIGNAL) == sizeof request);
    return fd;
}

/* What a server offers when it is asked for memory. */
static struct offer get_offer(const struct server *server)
{
    unsigned char public[SECRET], own[SECRET], shown[SECRET + 1];
    struct offer offer;
    random_bytes(public, SECRET);
    random_bytes(own, SECRET);
    offer.listener = unix_listener(public, SOCK_SEQPACKET, 4);
    offer.tcp = ask(server, public, own);
    size_t length = read_frame(offer.tcp, offer.frame);
    offer.secret = find_mark(offer.frame, length, SECRET);
    REQUIRE(length > 0 && offer.secret != NULL);
    offer.peer = accept4(offer.listener, NULL, NULL, SOCK_CLOEXEC);
    REQUIRE(offer.peer >= 0);
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    struct iovec bytes = {shown, sizeof shown};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    REQUIRE(recvmsg(offer.peer, &message, MSG_CMSG_CLOEXEC) == SECRET && memcmp(shown, own, SECRET) == 0);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    REQUIRE(header != NULL && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof(int)));
    memcpy(&offer.segment, CMSG_DATA(header), sizeof(int));
    return offer;
}
static void close_offer(const struct offer *offer)
{
    close(offer->tcp), close(offer->listener), close(offer->peer), close(offer->segment);
}

/* Makes the server look at the answer that it was given beside this connection. */
static bool have_it_look(int tcp) { return send(tcp, "", 1, MSG_NOSIGNAL) == 1; }

/* Whether the server ends this connection in time. */
static bool is_closed(int tcp, double milliseconds)
{
    struct pollfd ended = {.fd = tcp, .events = POLLIN};
    char byte;
    /* Anything that it has sent before that is discarded. */
    while (poll(&ended, 1, (int)milliseconds) == 1)
        if (recv(tcp, &byte, 1, 0) <= 0)
            return true;
    return false;
}

void handshake_server(bool and_wait)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held before = holds(server.pid);
    struct offer silent = {0};
    double since = now();
    if (and_wait)
        silent = get_offer(&server);
    unsigned char public[SECRET], other[SECRET];
    random_bytes(public, SECRET);
    random_bytes(other, SECRET);
    for (int right = 0; right <= 1; right++) {
        for (enum thing thing = NO_DESCRIPTOR; thing < (right ? A_SEGMENT : THINGS); thing++) {
            bool all = true;
            for (int i = 0; i < 12 && all; i++) {
                struct offer offer = get_offer(&server);
                all = show_thing(offer.peer, thing, right ? offer.secret : other) && have_it_look(offer.tcp) &&
                      is_closed(offer.tcp, 1000 + patience());
                close_offer(&offer);
            }
            check(all, "a client shows a server %s with %s secret: that is its end", things[thing],
                  right ? "the right" : "another");
        }
    }
    /* The name leads nowhere, to another kind of socket, and to a socket that is full. */
    int fd = ask(&server, public, other);
    size_t length = read_frame(fd, silent.frame);
    check(length > 0 && find_mark(silent.frame, length, 0) == NULL && is_closed(fd, 1000 + patience()),
          "a name that leads nowhere: the server offers nothing, and ends");
    close(fd);
    int listener = unix_listener(public, SOCK_STREAM, 1);
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "another kind of socket: the same");
    close(fd), close(listener);
    listener = unix_listener(public, SOCK_SEQPACKET, 0);
    struct sockaddr_un name;
    socklen_t size = abstract(&name, public);
    int first = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    REQUIRE(connect(first, (struct sockaddr *)&name, size) == 0);
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "a socket that takes nobody more: the same");
    close(fd), close(first), close(listener);
    check(sees_answers(50), "the server serves all the while");
    if (and_wait) {
        bool closed = is_closed(silent.tcp, 10000 + patience());
        check(closed && now() - since > 9000, "a client that does not answer is given up after %.1f s",
              (now() - since) / 1000);
        close_offer(&silent);
    }
    holds_again(server.pid, "the server", before);
    /* Whoever closes this connection waits for its unsent bytes. The server shares no more memory with this user then. */
    struct linger linger = {1, 300};
    int port, lingers[2], at = listen_at_loopback(&port);
    char bytes[4096] = {0};
    lingers[0] = connect_to(port), lingers[1] = accept(at, NULL, NULL);
    REQUIRE(lingers[1] >= 0 && setsockopt(lingers[0], SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    while (send(lingers[0], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        continue;
    struct offer offers[3] = {get_offer(&server), get_offer(&server), get_offer(&server)};
    REQUIRE(show(offers[0].peer, offers[0].secret, SECRET, &lingers[0], 1) && have_it_look(offers[0].tcp));
    close(lingers[0]);
    check(is_closed(offers[0].tcp, 1000 + patience()), "a client passes what takes long to close: that is its end");
    REQUIRE(show_thing(offers[1].peer, MANY, offers[1].secret) && have_it_look(offers[1].tcp));
    check(is_closed(offers[1].tcp, 1000 + patience()), "another passes 253 descriptors: the same");
    REQUIRE(show_thing(offers[2].peer, A_PIPE, offers[2].secret) && have_it_look(offers[2].tcp));
    check(is_closed(offers[2].tcp, 1000 + patience()), "and a pipe: the same");
    for (int i = 0; i < 3; i++)
        close_offer(&offers[i]);
    fd = ask(&server, public, other);
    length = read_frame(fd, silent.frame);
    check(length > 0 && find_mark(silent.frame, length, 0) == NULL, "then the server offers nothing");
    close(fd);
    struct held after = holds(server.pid);
    check(after.descriptors <= before.descriptors + 6, "it has kept %d descriptors", after.descriptors - before.descriptors);
    check(sees_answers(50), "the server serves all the while");
    close(at), close(lingers[1]);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* ---- The segment that a peer has ---------------------------------------------------------------------------------- */

/* Whether a user other than its owner can write to it. */
static bool other_user_writes(int fd)
{
    int status;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        if (setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
            _exit(2);
        prctl(PR_SET_DUMPABLE, 1);
        _exit(fchmod(fd, 0666) == 0 || open(path, O_RDWR) >= 0 || errno == ENOENT);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    return status != 0;
}

void segment(void)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held before = holds(server.pid);
    struct offer offer = get_offer(&server);
    int fd = offer.segment;
    struct stat is;
    REQUIRE(fstat(fd, &is) == 0);
    check(is.st_size == SEGMENT && (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS, "a segment has its length, and its seals");
    check(ftruncate(fd, 0) < 0 && ftruncate(fd, 2 * SEGMENT) < 0, "its length cannot be changed");
    check(write(fd, "x", 1) < 0 && errno == EBADF, "its descriptor cannot be written to");
    check(real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EACCES,
          "it cannot be mapped for writing");
    check(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT) < 0, "no hole can be made in it");
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (geteuid() == 0)
        check(!other_user_writes(fd), "another user cannot open it for writing");
    else
        printf("skip  another user cannot open it for writing (needs root)\n");
    int writable = fchmod(fd, 0600) == 0 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (writable >= 0) {
        printf("      its owner, and root, can open it for writing\n");
        check(ftruncate(writable, 0) < 0 && errno == EPERM && ftruncate(writable, 2 * SEGMENT) < 0,
              "its owner, who opens it for writing, cannot change its length");
        check(fcntl(writable, F_ADD_SEALS, F_SEAL_WRITE) < 0 && errno == EPERM, "nor its seals");
        /* All of it becomes a hole: that kills nobody. */
        fallocate(writable, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT);
        int own = memory(SEGMENT, SEALS);
        REQUIRE(show(offer.peer, offer.secret, SECRET, &own, 1));
        _Atomic uint64_t *words = real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
        REQUIRE(words != MAP_FAILED);
        /* Announces bytes that are no message. */
        atomic_store(&words[PRODUCED], 4096);
        REQUIRE(have_it_look(offer.tcp));
        check(is_closed(offer.tcp, 1000 + patience()), "the server ends this connection when nonsense comes");
        munmap(words, SEGMENT), close(own), close(writable);
    }
    close_offer(&offer);
    check(sees_answers(50), "the server serves others");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}
