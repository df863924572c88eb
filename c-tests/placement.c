/* placement.c: direct data placement through the library's own C API, linked with -lrpcrdma: bindings written in C,
 * the program's own buffers for results and arguments, registered memory. What was copied is read from the counters of
 * both ends. The server is a child process, on a port of the system's choice. Run by tests/placement.sh. */
#include <rpcrdma.h>

#include <arpa/inet.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROG 0x20000067
#define REQUIRE(condition)                                                                                            \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                           \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

enum { PUT = 1, GET = 2, SINK = 3, COPIED = 4, MIB = 1 << 20, LITTLE = 4096 };

static const struct timeval patient = {.tv_sec = 25};

struct blob {
    char *bytes;
    u_int length;
};
struct put {
    char *name;
    struct blob data;
};
struct get {
    char *name;
    u_int count;
};
struct got {
    int error;
    struct blob data;
};

static bool_t xdr_blob(XDR *xdrs, struct blob *blob)
{
    return xdr_bytes(xdrs, &blob->bytes, &blob->length, MIB);
}

static bool_t xdr_put(XDR *xdrs, struct put *put)
{
    return xdr_string(xdrs, &put->name, 255) && xdr_blob(xdrs, &put->data);
}

static bool_t xdr_get(XDR *xdrs, struct get *get)
{
    return xdr_string(xdrs, &get->name, 255) && xdr_u_int(xdrs, &get->count);
}

static bool_t xdr_got(XDR *xdrs, struct got *got)
{
    return xdr_int(xdrs, &got->error) && (got->error != 0 || xdr_blob(xdrs, &got->data));
}

/* ---- Bindings: as the manual page has them. ---------------------------------------------------------------------- */

static bool_t put_arguments(struct rpcrdma_walk *w, void *closure)
{
    (void)closure;
    rpcrdma_walk_reply(w, 4);
    return rpcrdma_walk_opaque(w) && rpcrdma_walk_item(w);
}

static bool_t get_arguments(struct rpcrdma_walk *w, void *closure)
{
    (void)closure;
    uint32_t count;
    if (!rpcrdma_walk_opaque(w) || !rpcrdma_walk_word(w, &count))
        return FALSE;
    rpcrdma_walk_reply(w, 4);
    return rpcrdma_walk_result(w, count);
}

static bool_t get_results(struct rpcrdma_walk *w, void *closure)
{
    (void)closure;
    uint32_t error;
    if (!rpcrdma_walk_word(w, &error))
        return FALSE;
    return error != 0 || rpcrdma_walk_item(w);
}

static void bind_program(void)
{
    const struct rpcrdma_binding put = {sizeof put, PROG, 1, PUT, put_arguments, NULL, NULL};
    const struct rpcrdma_binding get = {sizeof get, PROG, 1, GET, get_arguments, get_results, NULL};
    REQUIRE(rpcrdma_binding_register(&put));
    REQUIRE(rpcrdma_binding_register(&get));
}

/* ---- Server ------------------------------------------------------------------------------------------------------ */

static char pattern(size_t at)
{
    return (char)(at * 7 + at / 251);
}

static uint64_t copied(void)
{
    struct rpcrdma_stats stats;
    REQUIRE(rpcrdma_stats_get(&stats, sizeof stats));
    return stats.bytes_copied;
}

static char source[MIB];

/* PUT answers 0 if the data is not the pattern, 2 if it was placed, else 1. GET of "nothing" fails, of "half" falls short. */
static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    switch (request->rq_proc) {
    case PUT: {
        struct put put = {NULL, {NULL, 0}};
        void *there = NULL;
        size_t length = 0;
        bool placed = rpcrdma_svc_placed(xprt, &there, &length);
        if (placed)
            put.data.bytes = there;
        if (!svc_getargs(xprt, (xdrproc_t)xdr_put, (char *)&put)) {
            svcerr_decode(xprt);
            return;
        }
        int good = !placed || (put.data.bytes == there && put.data.length == length);
        for (size_t i = 0; i < put.data.length; i++)
            good &= put.data.bytes[i] == pattern(i);
        good = good ? 1 + placed : 0;
        svc_sendreply(xprt, (xdrproc_t)xdr_int, (char *)&good);
        if (placed)
            put.data.bytes = NULL;
        svc_freeargs(xprt, (xdrproc_t)xdr_put, (char *)&put);
        return;
    }
    case GET: {
        struct get get = {NULL, 0};
        if (!svc_getargs(xprt, (xdrproc_t)xdr_get, (char *)&get) || get.count > MIB) {
            svcerr_decode(xprt);
            return;
        }
        struct got got = {strcmp(get.name, "nothing") == 0 ? 2 : 0, {source, get.count}};
        if (strcmp(get.name, "half") == 0)
            got.data.length /= 2;
        svc_sendreply(xprt, (xdrproc_t)xdr_got, (char *)&got);
        svc_freeargs(xprt, (xdrproc_t)xdr_get, (char *)&get);
        return;
    }
    case SINK: {
        struct blob blob = {NULL, 0};
        if (!svc_getargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob)) {
            svcerr_decode(xprt);
            return;
        }
        int good = 1;
        for (size_t i = 0; i < blob.length; i++)
            good &= blob.bytes[i] == pattern(i);
        svc_sendreply(xprt, (xdrproc_t)xdr_int, (char *)&good);
        svc_freeargs(xprt, (xdrproc_t)xdr_blob, (char *)&blob);
        return;
    }
    case COPIED: {
        u_quad_t bytes = copied();
        svc_sendreply(xprt, (xdrproc_t)xdr_u_quad_t, (char *)&bytes);
        return;
    }
    default:
        svcerr_noproc(xprt);
    }
}

static CLIENT *client;

static void start(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf netbuf = {sizeof at, sizeof at, &at};
    socklen_t length = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 8) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&at, &length) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (size_t i = 0; i < sizeof source; i++)
            source[i] = pattern(i);
        SVCXPRT *xprt = svc_rdma_create(fd, 0, 0);
        REQUIRE(xprt != NULL && svc_reg(xprt, PROG, 1, dispatch, NULL));
        svc_run();
        _exit(1);
    }
    close(fd);
    client = clnt_rdma_create(RPC_ANYFD, &netbuf, PROG, 1, 0, 0);
    if (client == NULL)
        clnt_pcreateerror("clnt_rdma_create");
    REQUIRE(client != NULL);
}

/* ---- Client ------------------------------------------------------------------------------------------------------ */

static void must(rpcproc_t procedure, xdrproc_t in, void *arguments, xdrproc_t out, void *results)
{
    enum clnt_stat status = clnt_call(client, procedure, in, arguments, out, results, patient);
    if (status != RPC_SUCCESS)
        clnt_perror(client, "call");
    REQUIRE(status == RPC_SUCCESS);
}

static u_quad_t copied_there(void)
{
    u_quad_t bytes = 0;
    must(COPIED, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_u_quad_t, &bytes);
    return bytes;
}

/* Bytes copied by both ends since the last call. */
static void copies(uint64_t *here, u_quad_t *there)
{
    static uint64_t here_before;
    static u_quad_t there_before;
    u_quad_t now_there = copied_there();
    uint64_t now_here = copied();
    *here = now_here - here_before;
    *there = now_there - there_before;
    here_before = now_here;
    there_before = now_there;
}

static char buffer[MIB];

static void puts_in_place(void)
{
    uint64_t here;
    u_quad_t there;
    static const u_int sizes[] = {0, 1, 399, 400, 401, 3999, 4097, 65535, 65536, 65537, MIB - 1, MIB};
    for (size_t i = 0; i < sizeof buffer; i++)
        buffer[i] = pattern(i);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct put put = {"x", {buffer, sizes[i]}};
        int answer = 0;
        copies(&here, &there);
        must(PUT, (xdrproc_t)xdr_put, &put, (xdrproc_t)xdr_int, &answer);
        copies(&here, &there);
        /* What fits inline is not placed. */
        REQUIRE(answer == (sizes[i] > 4000 ? 2 : 1));
        REQUIRE(here <= (sizes[i] < LITTLE ? sizes[i] : 0) + 200);
        REQUIRE(there <= (sizes[i] < LITTLE ? sizes[i] : 0) + 200);
    }
    puts("ok    a bound argument is copied nowhere where both ends are ready for it");
}

static void gets_in_place(void)
{
    uint64_t here;
    u_quad_t there;
    static const u_int sizes[] = {0, 1, 399, 400, 401, 3999, 4097, 65535, 65536, 65537, MIB - 1, MIB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        u_int size = sizes[i];
        memset(buffer, 'x', sizeof buffer);
        struct get get = {"whole", size};
        struct got got = {0, {buffer, sizeof buffer}};
        copies(&here, &there);
        must(GET, (xdrproc_t)xdr_get, &get, (xdrproc_t)xdr_got, &got);
        copies(&here, &there);
        REQUIRE(got.error == 0 && got.data.bytes == buffer && got.data.length == size);
        for (u_int at = 0; at < sizeof buffer; at++)
            REQUIRE(buffer[at] == (at < size ? pattern(at) : 'x'));
        REQUIRE(here <= (size < LITTLE ? size : 0) + 200);
        REQUIRE(there <= (size < 65536 ? size : 0) + 200);
        /* Without a buffer of its own it is copied once, into memory that libtirpc makes. */
        got = (struct got){0, {NULL, 0}};
        must(GET, (xdrproc_t)xdr_get, &get, (xdrproc_t)xdr_got, &got);
        copies(&here, &there);
        REQUIRE(got.error == 0 && got.data.length == size && here >= size && here <= size + 200);
        for (u_int at = 0; at < size; at++)
            REQUIRE(got.data.bytes[at] == pattern(at));
        clnt_freeres(client, (xdrproc_t)xdr_got, (char *)&got);
    }
    puts("ok    a bound result is copied nowhere if the client gives a buffer");

    /* Less than was asked for, and nothing at all. */
    struct get get = {"half", MIB};
    struct got got = {0, {buffer, sizeof buffer}};
    must(GET, (xdrproc_t)xdr_get, &get, (xdrproc_t)xdr_got, &got);
    REQUIRE(got.error == 0 && got.data.bytes == buffer && got.data.length == MIB / 2 && buffer[MIB / 2 - 1] == pattern(MIB / 2 - 1));
    get.name = "nothing";
    got = (struct got){0, {buffer, sizeof buffer}};
    must(GET, (xdrproc_t)xdr_get, &get, (xdrproc_t)xdr_got, &got);
    REQUIRE(got.error == 2);
    /* A buffer that is too short for what might come is not written to by the peer. */
    get = (struct get){"half", 10000};
    got = (struct got){0, {buffer, 5000}};
    memset(buffer, 'x', sizeof buffer);
    must(GET, (xdrproc_t)xdr_get, &get, (xdrproc_t)xdr_got, &got);
    REQUIRE(got.data.bytes == buffer && got.data.length == 5000 && buffer[4999] == pattern(4999) && buffer[5000] == 'x');
    puts("ok    results shorter than announced, none, and buffers that are too short");
}

static void registered_memory(void)
{
    uint64_t here;
    u_quad_t there;
    int good = 0;
    for (size_t i = 0; i < sizeof buffer; i++)
        buffer[i] = pattern(i);
    struct blob blob = {buffer, MIB};
    copies(&here, &there);
    must(SINK, (xdrproc_t)xdr_blob, &blob, (xdrproc_t)xdr_int, &good);
    copies(&here, &there);
    REQUIRE(good && here >= MIB && there >= MIB);
    REQUIRE(rpcrdma_mem_register(buffer, sizeof buffer));
    REQUIRE(!rpcrdma_mem_register(buffer + 1, 1));
    must(SINK, (xdrproc_t)xdr_blob, &blob, (xdrproc_t)xdr_int, &good);
    copies(&here, &there);
    REQUIRE(good && here < LITTLE && there >= MIB && there < MIB + LITTLE);
    REQUIRE(rpcrdma_mem_unregister(buffer));
    REQUIRE(!rpcrdma_mem_unregister(buffer));
    must(SINK, (xdrproc_t)xdr_blob, &blob, (xdrproc_t)xdr_int, &good);
    copies(&here, &there);
    REQUIRE(good && here >= MIB);
    REQUIRE(!rpcrdma_mem_register(NULL, 5) && !rpcrdma_mem_register(buffer, 0));
    puts("ok    rpcrdma_mem_register: an argument without a binding is not copied at the client");
}

static bool_t never(struct rpcrdma_walk *w, void *closure)
{
    (void)w;
    (void)closure;
    abort();
}

static void misuse(void)
{
    struct rpcrdma_binding binding = {sizeof binding, PROG, 1, PUT, never, never, NULL};
    REQUIRE(!rpcrdma_binding_register(&binding));
    REQUIRE(strstr(clnt_spcreateerror("register"), "procedure") != NULL);
    binding.program = 100003, binding.version = 3, binding.procedure = 7;
    REQUIRE(!rpcrdma_binding_register(&binding));
    binding.size = 3, binding.program = PROG + 1;
    REQUIRE(!rpcrdma_binding_register(&binding));
    REQUIRE(!rpcrdma_binding_register(NULL));
    void *address;
    size_t length;
    REQUIRE(!rpcrdma_svc_placed(NULL, &address, &length));
    uint32_t word = 7;
    uint64_t hyper = 7;
    REQUIRE(!rpcrdma_walk_word(NULL, &word) && !rpcrdma_walk_hyper(NULL, &hyper) && word == 7 && hyper == 7);
    REQUIRE(!rpcrdma_walk_skip(NULL, 4) && !rpcrdma_walk_opaque(NULL) && !rpcrdma_walk_item(NULL));
    REQUIRE(!rpcrdma_walk_result(NULL, 4) && !rpcrdma_walk_reply(NULL, 4));
    puts("ok    what cannot be registered is refused");
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    bind_program();
    start();
    puts_in_place();
    gets_in_place();
    registered_memory();
    misuse();
    clnt_destroy(client);
    return 0;
}
