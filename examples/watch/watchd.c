/* watchd.c: keeps names with values, and when one changes calls back the clients that are interested in it.
 *
 *   watchd [-h address] [-p port]
 *
 * Listens on that port (0: any free one) of that IPv4 address (default: all), and does not register with rpcbind. When it
 * can be called it prints "READY port".
 *
 * The calls back go over the connections that the clients have opened, so that they need no port of their own. */
#define _GNU_SOURCE
#include "watch.h"
#include <arpa/inet.h>
#include <err.h>
#include <poll.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

void watch_program_1(struct svc_req *, SVCXPRT *);

/* The others wait as long as this for a client that does not answer. */
static struct timeval patience = {.tv_sec = 1};
/* After that the client is left alone for this long, in seconds. */
enum { RETRY = 5 };

struct value {
    struct value *next;
    char name[WATCH_NAME_MAX + 1], text[WATCH_VALUE_MAX + 1];
    unsigned changes; /* 0: it has no value yet */
};

struct interest {
    struct interest *next;
    struct value *value;
    unsigned told; /* the `changes` that the client knows of */
};

struct client {
    struct client *next;
    u_quad_t number;
    CLIENT *back;
    struct interest *interests;
    time_t registered, not_before;
    bool gone;
};

static struct value *values;
static struct client *clients;
static volatile sig_atomic_t ended;

static time_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

static void *allocate(size_t bytes)
{
    void *memory = calloc(1, bytes);
    if (memory == NULL)
        err(1, NULL);
    return memory;
}

static struct value *value_named(const char *name)
{
    struct value *value = values;
    while (value != NULL && strcmp(value->name, name) != 0)
        value = value->next;
    if (value == NULL) {
        value = allocate(sizeof *value);
        strcpy(value->name, name); /* The XDR routine has bounded it. */
        value->next = values;
        values = value;
    }
    return value;
}

static struct client *client_numbered(u_quad_t number)
{
    struct client *client = clients;
    while (client != NULL && (client->gone || client->number != number))
        client = client->next;
    return client;
}

/* Calls one client back; to the stub it is a CLIENT like any other. */
static void tell(struct client *client, struct interest *interest)
{
    unsigned changes = interest->value->changes;
    watch_entry entry = {.name = interest->value->name, .value = interest->value->text};
    if (watcher_changed_1(&entry, NULL, client->back) == RPC_SUCCESS) {
        interest->told = changes;
        client->not_before = 0;
        return;
    }
    /* The client may be slow, or have lost its connection (then this fails at once): it registers again, or is forgotten. */
    if (client->not_before == 0)
        clnt_perror(client->back, "cannot call back");
    client->not_before = now() + RETRY;
}

/* While a call back waits for its reply, further requests of that client are dispatched: it may ask for a value before
 * it answers, and it may register, unregister, and set. So nothing is freed meanwhile, and the loop that is already
 * running takes care of what such a request adds. */
static void tell_all(void)
{
    static bool telling;
    if (telling)
        return;
    telling = true;
    for (bool all = false; !all;) {
        all = true;
        for (struct client *client = clients; client != NULL; client = client->next)
            for (struct interest *it = client->interests; it != NULL; it = it->next)
                if (it->told != it->value->changes && !client->gone && now() >= client->not_before) {
                    tell(client, it);
                    all = false;
                }
    }
    telling = false;
}

/* Forgets clients that have unregistered, and those that have not been heard of for too long. */
static void forget(bool everybody)
{
    for (struct client **at = &clients, *client; (client = *at) != NULL;) {
        if (!everybody && !client->gone && now() - client->registered <= WATCH_LEASE) {
            at = &client->next;
            continue;
        }
        *at = client->next;
        clnt_destroy(client->back);
        for (struct interest *it; (it = client->interests) != NULL; free(it))
            client->interests = it->next;
        free(client);
    }
}

bool_t watch_null_1_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    return TRUE;
}

bool_t watch_register_1_svc(watch_interest *argument, void *result, struct svc_req *request)
{
    (void)result;
    struct client *client = client_numbered(argument->client);
    if (client == NULL) {
        CLIENT *back = rpcrdma_clnt_reverse(request->rq_xprt, WATCHER_PROGRAM, WATCHER_VERSION);
        if (back == NULL) {
            clnt_pcreateerror("cannot call back");
            svcerr_systemerr(request->rq_xprt);
            return FALSE; /* no other reply */
        }
        clnt_control(back, CLSET_TIMEOUT, (char *)&patience);
        client = allocate(sizeof *client);
        client->number = argument->client;
        client->back = back;
        client->next = clients;
        clients = client;
    } else if (!rpcrdma_clnt_rebind(client->back, request->rq_xprt)) {
        /* The request came over another connection, if the first was lost. */
        clnt_perror(client->back, "cannot call back");
        svcerr_systemerr(request->rq_xprt);
        return FALSE;
    }
    client->registered = now();
    client->not_before = 0;
    struct value *value = value_named(argument->name);
    for (struct interest *it = client->interests; it != NULL; it = it->next)
        if (it->value == value)
            return TRUE;
    struct interest *interest = allocate(sizeof *interest);
    interest->value = value;
    interest->next = client->interests;
    client->interests = interest;
    return TRUE;
}

bool_t watch_unregister_1_svc(u_quad_t *argument, void *result, struct svc_req *request)
{
    (void)result, (void)request;
    struct client *client = client_numbered(*argument);
    if (client != NULL)
        client->gone = true; /* A call to it may be waiting: clnt_destroy() would wait for that. */
    return TRUE;
}

bool_t watch_set_1_svc(watch_entry *argument, void *result, struct svc_req *request)
{
    (void)result, (void)request;
    struct value *value = value_named(argument->name);
    strcpy(value->text, argument->value);
    value->changes++;
    tell_all();
    return TRUE;
}

bool_t watch_get_1_svc(watch_name *argument, watch_value *result, struct svc_req *request)
{
    (void)request;
    *result = value_named(*argument)->text;
    return TRUE;
}

int watch_program_1_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport, (void)xdr_result, (void)result;
    return 1; /* The text stays the server's. */
}

static void end(int signal)
{
    (void)signal;
    ended = 1;
}

int main(int argc, char **argv)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(WATCH_PORT)};
    for (int option; (option = getopt(argc, argv, "h:p:")) != -1;) {
        char *rest = "";
        switch (option) {
        case 'h':
            if (inet_pton(AF_INET, optarg, &address.sin_addr) != 1)
                errx(2, "%s: not an IPv4 address", optarg);
            break;
        case 'p': {
            unsigned long port = strtoul(optarg, &rest, 10);
            if (port > 65535)
                errx(2, "%s: not a port", optarg);
            address.sin_port = htons((uint16_t)port);
            break;
        }
        default: rest = "?";
        }
        if (*rest != '\0')
            errx(2, "usage: watchd [-h address] [-p port]");
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0)
        err(1, "cannot listen on port %u", ntohs(address.sin_port));
    SVCXPRT *listener = svc_rdma_create(fd, 0, 0);
    if (listener == NULL || !svc_reg(listener, WATCH_PROGRAM, WATCH_VERSION, watch_program_1, NULL))
        errx(1, "%s", clnt_spcreateerror("cannot serve"));

    /* Signals are let through only while the loop sleeps. */
    sigset_t signals, before;
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, &before);
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGPIPE, SIG_IGN);
    printf("READY %u\n", ntohs(((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port));
    fflush(stdout);

    /* svc_run(), but with something to do when nobody calls. */
    while (!ended) {
        int count = svc_max_pollfd;
        struct pollfd *polled = allocate((size_t)count * sizeof *polled);
        memcpy(polled, svc_pollfd, (size_t)count * sizeof *polled);
        int ready = ppoll(polled, (nfds_t)count, &(struct timespec){.tv_sec = RETRY}, &before);
        if (ready > 0)
            svc_getreq_poll(polled, ready);
        free(polled);
        tell_all();
        forget(false);
    }
    forget(true);
    svc_destroy(listener);
    for (struct value *value; (value = values) != NULL; free(value))
        values = value->next;
    return 0;
}
