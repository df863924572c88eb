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
#include <sys/xattr.h>
#include <unistd.h>

/* ---- Handshakes --------------------------------------------------------------------------------------------------- */

/* What a client says: its name, its secret, and from whom it takes memory. */
enum { SECRET = 16, ASKED = 2 * SECRET + 12, FRAME = 20, MOST = 1024 };
static const char mark[] = "RPCRloc\x08";

static int memory(size_t bytes, int seals)
{
    int fd = memfd_create("rpcrdma", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0 && (seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0));
    return fd;
}
enum { FIXED = F_SEAL_SHRINK | F_SEAL_GROW, SEALS = FIXED | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL };

static socklen_t abstract(struct sockaddr_un *address, const unsigned char *public)
{
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, "rpcrdma-", 8);
    memcpy(address->sun_path + 9, public, SECRET);
    return offsetof(struct sockaddr_un, sun_path) + 9 + SECRET;
}

/* Sends a secret of `length` bytes with `count` descriptors to this name. */
static bool show(const unsigned char *public, const unsigned char *secret, size_t length, const int *fds, int count)
{
    struct sockaddr_un name;
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(253 * sizeof(int))] = {0};
    struct iovec bytes = {(void *)(uintptr_t)secret, length};
    struct msghdr message = {.msg_name = &name, .msg_namelen = abstract(&name, public), .msg_iov = &bytes, .msg_iovlen = 1};
    int from = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    REQUIRE(from >= 0);
    if (count > 0) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
    }
    bool sent = sendmsg(from, &message, MSG_NOSIGNAL) == (ssize_t)length;
    close(from);
    return sent;
}

/* What may be sent instead of two segments. */
enum thing {
    SILENCE, NO_DESCRIPTOR, ONE, SURPLUS, UNSEALED, SHORTER, LONG_SECRET, SHORT_SECRET, A_PIPE, MANY, SEGMENTS, THINGS, ANOTHERS
};
static const char *const things[] = {"nothing", "no descriptor", "one descriptor", "three descriptors", "memory without seals",
                                     "memory of another length", "a longer secret", "a part of the secret", "a pipe",
                                     "253 descriptors", "two segments"};

static bool show_thing(const unsigned char *public, enum thing thing, const unsigned char *secret)
{
    int fds[253], count = 2;
    unsigned char longer[SECRET + 1];
    size_t length = thing == SHORTER ? SEGMENT - 4096 : SEGMENT;
    memcpy(longer, secret, SECRET);
    longer[SECRET] = 0;
    switch (thing) {
    case SILENCE: return true;
    case NO_DESCRIPTOR: count = 0; break;
    case ONE: count = 1; break;
    case SURPLUS: count = 3; break;
    case MANY: count = 253; break;
    default: break;
    }
    if (thing == A_PIPE)
        REQUIRE(pipe2(fds, O_CLOEXEC) == 0);
    else
        fds[0] = memory(length, thing == UNSEALED ? 0 : SEALS), fds[1] = memory(length, thing == UNSEALED ? 0 : FIXED);
    for (int i = 2; i < count; i++)
        fds[i] = fds[0];
    bool shown = show(public, longer, thing == LONG_SECRET ? SECRET + 1 : thing == SHORT_SECRET ? SECRET - 1 : SECRET, fds, count);
    close(fds[0]), close(fds[1]);
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
    /* Whether it has asked for memory: seen by us. */
    bool asked;
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

/* A connection that whoever closes it last waits for, for minutes. */
static int lingering(void)
{
    struct linger linger = {1, 300};
    int port, at = listen_at_loopback(&port), fd = connect_to(port);
    static char bytes[4096];
    REQUIRE(accept(at, NULL, NULL) >= 0 && setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger) == 0);
    while (send(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        continue;
    close(at);
    return fd;
}

/* Has another user's process send such a connection. */
static void show_as_another(const unsigned char *public, const unsigned char *secret)
{
    int status, fd = lingering(), fds[2] = {fd, fd};
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0)
        _exit(setresuid(4321, 4321, 4321) < 0 || !show(public, secret, SECRET, fds, 2));
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    close(fd);
}

/* Has the client connect to the server through us: we hold its Request back, know its secret, and send this thing to its name
 * `count` times. */
static struct outcome connect_past(const struct server *server, int listener, int to, int from, enum thing thing, bool right,
                                   int count)
{
    static unsigned char latest[SECRET] = "of another one.";
    unsigned char frame[MOST];
    struct outcome outcome;
    REQUIRE(write(to, "c", 1) == 1);
    int pair[2] = {accept4(listener, NULL, NULL, SOCK_CLOEXEC)};
    REQUIRE(pair[0] >= 0);
    size_t length = read_frame(pair[0], frame);
    const unsigned char *asked = find_mark(frame, length, ASKED);
    if (asked != NULL) {
        REQUIRE(name_is_seen(asked));
        /* A socket that discards a message takes any number of them. */
        for (int i = 0; i < count && thing != ANOTHERS; i++)
            REQUIRE(show_thing(asked, thing, right ? asked + SECRET : latest));
        if (thing == ANOTHERS)
            show_as_another(asked, asked + SECRET);
        /* Later connections are sent the secret of this one. */
        memcpy(latest, asked + SECRET, SECRET);
    }
    pair[1] = connect_to(server->port);
    REQUIRE(send(pair[1], frame, length, MSG_NOSIGNAL) == (ssize_t)length);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, pass_on, pair) == 0);
    REQUIRE(read(from, &outcome, sizeof outcome) == sizeof outcome);
    REQUIRE(pthread_join(thread, NULL) == 0);
    outcome.asked = asked != NULL;
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
    for (enum thing thing = SILENCE; thing < THINGS; thing++) {
        outcome = connect_past(&server, listener, to[1], from[0], thing, false, 100);
        check(outcome.connected && outcome.shared && outcome.right && outcome.after == outcome.before &&
                  outcome.took < 1000 + patience(),
              "others send a waiting client %s with another secret: it shares memory with its server%s%s", things[thing],
              outcome.error[0] ? ": " : "", outcome.error);
    }
    for (enum thing thing = NO_DESCRIPTOR; thing < SEGMENTS; thing++) {
        bool discarded = thing == LONG_SECRET || thing == SHORT_SECRET;
        outcome = connect_past(&server, listener, to[1], from[0], thing, true, 1);
        bool knows = !outcome.connected && strstr(outcome.error, "shares no memory") != NULL;
        check((discarded ? outcome.shared && outcome.right : knows) && outcome.after == outcome.before &&
                  outcome.took < 1000 + patience(),
              "who knows its secret sends it %s: %s in time (%.0f ms)%s%s", things[thing],
              discarded ? "it shares memory with its server" : "it knows that it shares no memory", outcome.took,
              outcome.error[0] && !knows ? ": " : "", knows ? "" : outcome.error);
    }
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "the next time it does");
    holds_again(client, "the client", client_before);
    holds_again(server.pid, "the server", server_before);
    told->stop = true;
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 10000 + patience()) && ends(honest, 60000), "both clients end well");
    end(server.pid);
    close(listener);
}

/* A server of another user: its client goes on with software iWARP. */
void another_users(void)
{
    int to[2], from[2], kept = 0;
    if (geteuid() != 0) {
        printf("skip  a server of another user passes what takes long to close (needs root)\n");
        return;
    }
    struct server server = start_server(be_server);
    int listener = listen_at_loopback(&proxy_port);
    REQUIRE(pipe2(to, O_CLOEXEC) == 0 && pipe2(from, O_CLOEXEC) == 0);
    commands = to[0], outcomes = from[1];
    pid_t client = part(be_waiter, 0);
    close(from[1]);
    struct outcome outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(outcome.connected && outcome.shared && outcome.right, "a client that nobody disturbs shares memory");
    bool all = true;
    for (int i = 0; i < 16 && all; i++) {
        outcome = connect_past(&server, listener, to[1], from[0], ANOTHERS, true, 1);
        all = outcome.connected && !outcome.shared && outcome.right && outcome.took < 1000 + patience();
        kept += outcome.after - outcome.before;
    }
    check(all && kept == 16, "who knows its secret is another user, who passes what takes long to close: it goes on without memory%s%s,"
                             " and leaves %d sockets open", outcome.error[0] ? ": " : "", outcome.error, kept);
    outcome = connect_past(&server, listener, to[1], from[0], SILENCE, false, 0);
    check(!outcome.asked && outcome.connected && outcome.right, "then it asks for memory no more, and works on");
    REQUIRE(write(to[1], "e", 1) == 1);
    check(ends(client, 1000 + patience()), "and ends in time");
    end(server.pid);
    close(listener);
}

/* ---- A hostile client, by hand ------------------------------------------------------------------------------------ */

struct offer {
    int tcp, mailbox;
    unsigned char frame[MOST];
    /* The server's segment, and ours. */
    int segment, own;
};

static int unix_socket(const unsigned char *public, int type)
{
    struct sockaddr_un name;
    socklen_t size = abstract(&name, public);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&name, size) == 0 && (type == SOCK_DGRAM || listen(fd, 1) == 0));
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
    unsigned char request[FRAME + 8 + ASKED] = "MPA ID Req Frame";
    request[17] = 1;
    request[19] = 8 + ASKED;
    memcpy(request + FRAME, mark, 8);
    memcpy(request + FRAME + 8, public, SECRET);
    memcpy(request + FRAME + 8 + SECRET, secret, SECRET);
    memset(request + FRAME + 8 + 2 * SECRET, 0xFF, 4);
    memset(request + FRAME + 8 + 2 * SECRET + 4, 0, 8);
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
    offer.mailbox = unix_socket(public, SOCK_DGRAM);
    offer.tcp = ask(server, public, own);
    size_t length = read_frame(offer.tcp, offer.frame);
    REQUIRE(length > 0 && find_mark(offer.frame, length, 0) != NULL);
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))];
    struct iovec bytes = {shown, sizeof shown};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    REQUIRE(recvmsg(offer.mailbox, &message, MSG_CMSG_CLOEXEC) == SECRET && memcmp(shown, own, SECRET) == 0);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    REQUIRE(header != NULL && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(2 * sizeof(int)));
    memcpy(&offer.segment, CMSG_DATA(header), sizeof(int));
    memcpy(&offer.own, CMSG_DATA(header) + sizeof(int), sizeof(int));
    return offer;
}
static void close_offer(const struct offer *offer)
{
    close(offer->tcp), close(offer->mailbox), close(offer->segment), close(offer->own);
}

/* Makes the server look whether its client has become the writer of its segment. */
static bool have_it_look(int tcp) { return send(tcp, "", 1, MSG_NOSIGNAL) == 1; }

/* The same, of one that has; returns what the server says of it: 1, it shares this memory; 0, it does not. -1: nothing. */
static int answer(int tcp)
{
    struct pollfd said = {.fd = tcp, .events = POLLIN};
    unsigned char byte;
    bool came = have_it_look(tcp) && poll(&said, 1, (int)(1000 + patience())) == 1 && recv(tcp, &byte, 1, 0) == 1;
    return came ? byte : -1;
}

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
    static const struct {
        int seals;
        const char *what;
    } answers[] = {{0, "does nothing with its segment"},
                   {F_SEAL_SEAL, "only says that nobody may seal it any more"},
                   {F_SEAL_FUTURE_WRITE, "only says that it has a writer"}};
    for (size_t answer = 0; answer < sizeof answers / sizeof *answers; answer++) {
        bool all = true;
        for (int i = 0; i < 12 && all; i++) {
            struct offer offer = get_offer(&server);
            all = fcntl(offer.own, F_ADD_SEALS, answers[answer].seals) == 0 && have_it_look(offer.tcp) &&
                  is_closed(offer.tcp, 1000 + patience());
            close_offer(&offer);
        }
        check(all, "a client %s: that is its end", answers[answer].what);
    }
    /* The name leads nowhere, to another kind of socket, and to a socket that is full. */
    unsigned char public[SECRET], other[SECRET];
    random_bytes(public, SECRET);
    random_bytes(other, SECRET);
    int fd = ask(&server, public, other);
    size_t length = read_frame(fd, silent.frame);
    check(length > 0 && find_mark(silent.frame, length, 0) == NULL && is_closed(fd, 1000 + patience()),
          "a name that leads nowhere: the server offers nothing, and ends");
    close(fd);
    int named = unix_socket(public, SOCK_STREAM);
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "another kind of socket: the same");
    close(fd), close(named);
    named = unix_socket(public, SOCK_DGRAM);
    while (show(public, other, SECRET, NULL, 0))
        continue;
    fd = ask(&server, public, other);
    check(read_frame(fd, silent.frame) > 0 && is_closed(fd, 1000 + patience()), "a socket that takes no more: the same");
    close(fd), close(named);
    check(sees_answers(50), "the server serves all the while");
    if (and_wait) {
        bool closed = is_closed(silent.tcp, 10000 + patience());
        check(closed && now() - since > 9000, "a client that does not answer is given up after %.1f s",
              (now() - since) / 1000);
        close_offer(&silent);
    }
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}

/* ---- The segment that a peer has ---------------------------------------------------------------------------------- */

/* Whether a user other than its owner can write to it, or give it an attribute. */
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
        _exit(fchmod(fd, 0666) == 0 || open(path, O_RDWR) >= 0 || errno == ENOENT ||
              fsetxattr(fd, "user.x", "y", 1, 0) == 0);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    return status != 0;
}

/* Whether its bytes can be changed by whoever has this descriptor. */
static bool is_changed(int fd)
{
    return ftruncate(fd, 0) == 0 || ftruncate(fd, 2 * SEGMENT) == 0 || write(fd, "x", 1) == 1 ||
           real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED ||
           fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT) == 0 ||
           fallocate(fd, FALLOC_FL_KEEP_SIZE, SEGMENT, 4096) == 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0;
}

void segment(void)
{
    struct server server = start_server(be_server);
    pid_t honest = part(be_honest, server.port);
    check(sees_answers(20), "an honest client calls");
    struct held before = holds(server.pid);
    struct offer offer = get_offer(&server);
    int fd = offer.segment;
    struct stat is, own;
    REQUIRE(fstat(fd, &is) == 0 && fstat(offer.own, &own) == 0);
    check(is.st_size == SEGMENT && fcntl(fd, F_GET_SEALS) >= 0 && (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS,
          "a server's segment has its length, and its writer");
    check(own.st_size == SEGMENT && (fcntl(offer.own, F_GET_SEALS) & SEALS) == FIXED, "its client's has none yet");
    check(!is_changed(fd), "the client cannot change what the server writes");
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (geteuid() == 0)
        check(!other_user_writes(fd), "another user cannot open it for writing");
    else
        printf("skip  another user cannot open it for writing (needs root)\n");
    int writable = fchmod(fd, 0600) == 0 ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (writable >= 0) {
        check(!is_changed(writable), "nor can its owner, and root, who open it again");
        close(writable);
    }
    check(ftruncate(offer.own, 0) < 0 && ftruncate(offer.own, 2 * SEGMENT) < 0,
          "nor can the client change the length of its own");
    _Atomic uint64_t *words = real_mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, offer.own, 0);
    REQUIRE(words != MAP_FAILED && fcntl(offer.own, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0);
    check(answer(offer.tcp) == 1, "the server takes it");
    check(!is_changed(offer.own), "nor, once it is its writer, anything in it but through its mapping");
    /* Announces bytes that are no message. */
    atomic_store(&words[PRODUCED], 4096);
    REQUIRE(have_it_look(offer.tcp));
    check(is_closed(offer.tcp, 1000 + patience()), "the server ends this connection when nonsense comes");
    munmap(words, SEGMENT);
    close_offer(&offer);
    offer = get_offer(&server);
    REQUIRE(fallocate(offer.own, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, SEGMENT) == 0);
    REQUIRE(fcntl(offer.own, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) == 0);
    check(answer(offer.tcp) == 0, "it takes none in which its client has made a hole before");
    close_offer(&offer);
    check(sees_answers(50), "the server serves others");
    holds_again(server.pid, "the server", before);
    told->stop = true;
    check(ends(honest, 60000 + patience()), "every call of the honest client had the right answer");
    end(server.pid);
}
