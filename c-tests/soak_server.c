/* soak_server.c: a server of the soak. See soak.h.
 *
 *   load soak-serve TARGET PORT DIR
 *       Prints "READY port". For each byte that it reads it gives memory back, and answers with that byte. */
#define _GNU_SOURCE
#include "soak.h"
#include <dlfcn.h>
#include <err.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int journal;
static enum target self;
static struct soak_found *found;

/* The calls of the other clients hold whatever somebody has made of them on the way. */
static bool is_honest(const struct ask *ask) { return tag_client(ask->tag) < HONEST; }

static void wrong(const struct ask *ask, const char *what)
{
    if (!is_honest(ask))
        return;
    if (__atomic_fetch_add(&found->wrong, 1, __ATOMIC_RELAXED) < 20)
        fprintf(stderr, "server %s: call %#llx, %u bytes there, %u back: %s\n", target_names[self],
                (unsigned long long)ask->tag, ask->length, ask->want, what);
}

/* Calls back with what it was called with. Returns whether that went well; a connection that breaks meanwhile is no error. */
static bool call_back(SVCXPRT *transport, const struct ask *ask)
{
    struct timeval patience = {.tv_sec = 10};
    CLIENT *client = reverse_create(transport, LOAD_BACK, LOAD_VERS);
    if (client == NULL)
        return false;
    struct ask callback = {.tag = ask->tag, .want = ask->want % 1024, .length = ask->length % 1024};
    struct answer answer = {0};
    callback.extra = soak_check(&callback);
    callback.bytes = malloc(callback.length + 1);
    contents_fill(callback.bytes, callback.length, key_back(ask->tag));
    enum clnt_stat status = clnt_call(client, DO, (xdrproc_t)xdr_ask, (char *)&callback, (xdrproc_t)xdr_answer,
                                      (char *)&answer, patience);
    if (status == RPC_SUCCESS && !(answer.tag == ask->tag && answer.length == callback.want &&
                                   contents_right(answer.bytes, answer.length, key_there(ask->tag)))) {
        wrong(ask, "the answer to the call back is wrong");
        status = RPC_FAILED;
    }
    free(callback.bytes);
    free(answer.bytes);
    clnt_destroy(client);
    return status == RPC_SUCCESS;
}

static void fail(SVCXPRT *transport, uint32_t how)
{
    switch (how % FAILURES) {
    case 0: svcerr_systemerr(transport); break;
    case 1: svcerr_decode(transport); break;
    case 2: svcerr_noproc(transport); break;
    case 3: svcerr_noprog(transport); break;
    case 4: svcerr_progvers(transport, 3, 5); break;
    default: svcerr_auth(transport, AUTH_REJECTEDCRED); break;
    }
}

static void dispatch(struct svc_req *request, SVCXPRT *transport)
{
    struct ask ask = {0};
    struct answer answer = {0};
    uint32_t procedure = request->rq_proc;
    if (procedure == NULLPROC) {
        svc_sendreply(transport, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (procedure != DO && procedure != POST && procedure != BACK && procedure != FAIL) {
        svcerr_noproc(transport);
        return;
    }
    if (!svc_getargs(transport, (xdrproc_t)xdr_ask, (char *)&ask)) {
        svcerr_decode(transport);
        /* Frees what was decoded before decoding failed. */
        svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
        return;
    }
    bool whole = ask.extra == soak_check(&ask) && tag_target(ask.tag) == self && tag_thread(ask.tag) < SOAK_THREADS &&
                 tag_number(ask.tag) < NUMBERS && ask.want <= BYTES_MAX;
    bool right = whole && contents_right(ask.bytes, ask.length, key_there(ask.tag));
    if (whole && !right)
        wrong(&ask, "the arguments are wrong");
    if (!right) {
        __atomic_add_fetch(&found->damaged, 1, __ATOMIC_RELAXED);
        /* A damaged call need not get a reply, but may. */
        if (procedure != POST)
            svcerr_decode(transport);
    } else if (procedure == FAIL) {
        fail(transport, tag_number(ask.tag));
    } else {
        if (is_honest(&ask))
            ledger_count(journal, ask.tag);
        __atomic_add_fetch(&found->served, 1, __ATOMIC_RELAXED);
        if (procedure == BACK)
            answer.uid = call_back(transport, &ask);
        if (ask.delay > 0)
            usleep(ask.delay);
        if (procedure != POST) {
            answer.tag = ask.tag;
            answer.sum = contents_sum(ask.bytes, ask.length);
            answer.length = ask.want;
            answer.bytes = malloc(answer.length + 1);
            if (answer.bytes == NULL) {
                svcerr_systemerr(transport);
            } else {
                contents_fill(answer.bytes, answer.length, key_back(ask.tag));
                svc_sendreply(transport, (xdrproc_t)xdr_answer, (char *)&answer);
                free(answer.bytes);
            }
        }
    }
    svc_freeargs(transport, (xdrproc_t)xdr_ask, (char *)&ask);
}

static void *trims(void *unused)
{
    char byte;
    while (read(STDIN_FILENO, &byte, 1) == 1) {
        malloc_trim(0);
        if (write(STDOUT_FILENO, &byte, 1) != 1)
            break;
    }
    return unused;
}

int soak_serve_main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    self = (enum target)atoi(argv[2]);
    unsigned port = (unsigned)atoi(argv[3]);
    journal = ledger_open(argv[4], "journal", self);
    found = map_file(argv[4], "found", self, sizeof *found);
    bool_t (*run)(unsigned);
    *(void **)&run = dlsym(RTLD_DEFAULT, "rpcrdma_svc_run");
    struct netconfig *config = getnetconfigent("rdma");
    if (run == NULL || config == NULL)
        errx(1, "the library is not there");
    SVCXPRT *transport = svc_tli_create(listen_at(&port), config, NULL, 0, 0);
    if (transport == NULL || !svc_reg(transport, LOAD_PROG, LOAD_VERS, dispatch, NULL))
        errx(1, "no transport: %s", clnt_spcreateerror(""));
    pthread_t thread;
    if (pthread_create(&thread, NULL, trims, NULL) != 0)
        errx(1, "no thread");
    dprintf(STDOUT_FILENO, "READY %u\n", port);
    run(SERVICE_THREADS);
    errx(1, "rpcrdma_svc_run has returned: %s", clnt_spcreateerror(""));
}
