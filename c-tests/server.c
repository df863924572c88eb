/* server.c: serves suite.x in every way in which an existing program may create its transports and run its loop.
 *
 *   server [-n netid] [-c how] [-l loop] [-f] [-r] [-i] [-g name] [-d number]
 *
 *   -c svc_create   svc_create, with rpcbind          -c tp       svc_tp_create, with rpcbind
 *      tli          svc_tli_create on a free port     -c tlifd    svc_tli_create with an own listening socket
 *      vcfd         svc_vc_create with an own socket  -c svctcp   svctcp_create + svc_register, as rpcgen writes it
 *      svctcpfd     the same with an own socket       -c rpc_reg  rpc_reg, with rpcbind: SUITE_TWICE alone
 *   -l run | poll | select | common: svc_run; own loops over svc_pollfd, svc_fdset, svc_getreq_common
 *   -f forks after creating and serves in the child    -r registers with rpcbind (tli, tlifd, svctcp)
 *   -i ignores SIGPIPE, as a server on stock libtirpc must
 *   -g serves RPCSEC_GSS under this name                -d only that many descriptors, and a limit to the records of a
 *      connection: libtirpc closes idle connections then
 *
 * Prints "READY port pid", and then a 'B' whenever a blocking procedure is entered. Each byte on standard input lets one
 * of these procedures go on. */
#define _GNU_SOURCE
#include "suite.h"
#include "where.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <netconfig.h>
#include <poll.h>
#include <pthread.h>
#include <rpc/pmap_clnt.h>
#include <rpc/rpc_com.h>
#include <rpc/svc_auth.h>
#include <signal.h>
#ifdef WITH_GSS
#include <rpc/auth_gss.h>
#include <rpc/rpcsec_gss.h>
#include <rpc/svc_auth_gss.h>
#endif
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <unistd.h>

void suite_prog_2(struct svc_req *, SVCXPRT *);
void suite_prog_4(struct svc_req *, SVCXPRT *);

static const char *netid = "tcp";
static _Atomic u_int counter;

/* ---- Procedures. FALSE: this procedure has answered already, or never will. -------------------------------------- */

bool_t suite_null_2_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    return TRUE;
}

bool_t suite_null_4_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    return TRUE;
}

bool_t suite_twice_4_svc(int *argument, int *result, struct svc_req *request)
{
    (void)request;
    *result = 2 * *argument;
    return TRUE;
}

/* The argument becomes the result; the argument's memory must not be freed twice. */
bool_t suite_echo_2_svc(suite_blob *argument, suite_blob *result, struct svc_req *request)
{
    (void)request;
    *result = *argument;
    *argument = (suite_blob){0};
    return TRUE;
}

bool_t suite_sum_2_svc(suite_numbers *numbers, quad_t *result, struct svc_req *request)
{
    (void)request;
    *result = 0;
    for (u_int i = 0; i < numbers->suite_numbers_len; i++)
        *result += numbers->suite_numbers_val[i];
    return TRUE;
}

unsigned long long checksum(const char *bytes, size_t length)
{
    unsigned long long sum = 14695981039346656037ull;
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ (unsigned char)bytes[i]) * 1099511628211ull;
    return sum;
}

bool_t suite_sink_2_svc(suite_blob *blob, suite_digest *result, struct svc_req *request)
{
    (void)request;
    *result = (suite_digest){blob->suite_blob_len, checksum(blob->suite_blob_val, blob->suite_blob_len)};
    return TRUE;
}

bool_t suite_source_2_svc(u_int *length, suite_blob *result, struct svc_req *request)
{
    (void)request;
    char *bytes = malloc(*length ? *length : 1);
    *result = (suite_blob){0};
    if (bytes == NULL) {
        svcerr_systemerr(request->rq_xprt);
        return FALSE;
    }
    unsigned state = *length * 2654435761u + 12345; /* fill() of the harness, with the length as seed */
    for (u_int i = 0; i < *length; i++) {
        state = state * 1664525u + 1013904223u;
        bytes[i] = (char)(state >> 24);
    }
    *result = (suite_blob){*length, bytes};
    return TRUE;
}

bool_t suite_next_source_2_svc(void *argument, suite_blob *result, struct svc_req *request)
{
    (void)argument;
    u_int length = 300000; /* NOT_INLINE of the harness */
    return suite_source_2_svc(&length, result, request);
}

/* Static results, as many servers have them: the next call changes them, or, as here, the end of this one. */
bool_t suite_static_source_2_svc(u_int *byte, suite_blob *result, struct svc_req *request)
{
    static char bytes[1 << 20];
    memset(bytes, (int)*byte, sizeof bytes);
    suite_blob blob = {sizeof bytes, bytes};
    *result = (suite_blob){0}; /* what the dispatcher frees */
    svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_suite_blob, (caddr_t)&blob);
    memset(bytes, 0xee, sizeof bytes);
    return FALSE;
}

/* A request that is answered after its dispatch routine has returned; by another thread where several threads serve. */
static SVCXPRT *_Atomic deferred;
static _Atomic u_int deferred_length;

bool_t suite_defer_2_svc(u_int *length, suite_blob *result, struct svc_req *request)
{
    deferred = request->rq_xprt;
    deferred_length = *length;
    *result = (suite_blob){0};
    return FALSE;
}

bool_t suite_release_2_svc(void *argument, u_int *result, struct svc_req *request)
{
    (void)argument;
    *result = 0;
    if (deferred == NULL)
        return TRUE;
    u_int wanted = deferred_length, length = ~wanted;
    if (svc_getargs(deferred, (xdrproc_t)xdr_u_int, (caddr_t)&length) && length == wanted)
        *result |= SUITE_HAD_ARGUMENTS;
    suite_blob blob;
    if (!suite_source_2_svc(&wanted, &blob, request))
        return FALSE;
    bool_t sent = svc_sendreply(deferred, (xdrproc_t)xdr_suite_blob, (caddr_t)&blob);
    *result |= sent ? SUITE_REPLIED : SUITE_NOT_REPLIED;
    free(blob.suite_blob_val);
    deferred = NULL;
    return TRUE;
}

static struct {
    SVCXPRT *transport;
    u_int value;
} threaded;

static void *reply_in_a_thread(void *unused)
{
    (void)unused;
    svc_sendreply(threaded.transport, (xdrproc_t)xdr_u_int, (caddr_t)&threaded.value);
    return NULL;
}

bool_t suite_thread_replies_2_svc(u_int *argument, u_int *result, struct svc_req *request)
{
    (void)result;
    pthread_t thread;
    threaded.transport = request->rq_xprt;
    threaded.value = *argument;
    if (pthread_create(&thread, NULL, reply_in_a_thread, NULL) != 0)
        svcerr_systemerr(request->rq_xprt);
    else
        pthread_detach(thread);
    return FALSE;
}

/* Whether a client other than this one has sent something that was not read. */
static bool another_waits(int own)
{
    for (int i = 0; i < svc_max_pollfd; i++) {
        struct pollfd other = {.fd = svc_pollfd[i].fd, .events = POLLIN};
        int listens;
        socklen_t length = sizeof listens;
        if (other.fd >= 0 && other.fd != own &&
            getsockopt(other.fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && !listens &&
            poll(&other, 1, 0) > 0)
            return true;
    }
    return false;
}

bool_t suite_work_2_svc(u_int *milliseconds, u_int *result, struct svc_req *request)
{
    static SVCXPRT *_Atomic served;
    static _Atomic u_int run, longest;
    if (request->rq_xprt != served || !another_waits(request->rq_xprt->xp_fd))
        run = 0;
    else if (++run > longest)
        longest = run;
    served = request->rq_xprt;
    poll(NULL, 0, (int)*milliseconds);
    *result = longest;
    return TRUE;
}

bool_t suite_block_2_svc(u_int *argument, u_int *result, struct svc_req *request)
{
    (void)request;
    char c;
    if (write(STDOUT_FILENO, "B", 1) != 1)
        exit(1);
    while (read(STDIN_FILENO, &c, 1) < 0 && errno == EINTR)
        ;
    *result = *argument;
    return TRUE;
}

bool_t suite_last_source_2_svc(suite_last *argument, suite_blob *result, struct svc_req *request)
{
    suite_blob blob;
    u_int length = argument->length, ignored;
    *result = (suite_blob){0};
    if (!suite_source_2_svc(&length, &blob, request) || !suite_block_2_svc(&length, &ignored, request))
        return FALSE;
    if (argument->end == END_SVC_EXIT_BEFORE)
        svc_exit();
    if (!svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_suite_blob, (caddr_t)&blob))
        exit(1);
    free(blob.suite_blob_val);
    switch (argument->end) {
    case END_EXIT: exit(0);
    case END_SVC_EXIT: svc_exit(); break;
    case END_DESTROY: svc_destroy(request->rq_xprt); break;
    case END_SVC_EXIT_BEFORE: break;
    }
    return FALSE;
}

bool_t suite_one_way_2_svc(u_int *argument, void *result, struct svc_req *request)
{
    (void)result, (void)request;
    counter += *argument;
    return FALSE;
}

bool_t suite_counter_2_svc(void *argument, u_int *result, struct svc_req *request)
{
    (void)argument, (void)request;
    *result = counter;
    return TRUE;
}

bool_t suite_fail_2_svc(suite_error *how, void *result, struct svc_req *request)
{
    (void)result;
    SVCXPRT *transport = request->rq_xprt;
    switch (*how) {
    case SUITE_DECODE: svcerr_decode(transport); break;
    case SUITE_SYSTEMERR: svcerr_systemerr(transport); break;
    case SUITE_NOPROC: svcerr_noproc(transport); break;
    case SUITE_NOPROG: svcerr_noprog(transport); break;
    case SUITE_PROGVERS: svcerr_progvers(transport, 3, 5); break;
    case SUITE_AUTH: svcerr_auth(transport, AUTH_REJECTEDCRED); break;
    case SUITE_WEAKAUTH: svcerr_weakauth(transport); break;
    }
    return FALSE;
}

bool_t suite_no_reply_2_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    return FALSE;
}

bool_t suite_reply_and_exit_2_svc(u_int *argument, u_int *result, struct svc_req *request)
{
    *result = *argument;
    svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_u_int, (caddr_t)result);
    exit(0);
}

bool_t suite_destroy_2_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result;
    svc_destroy(request->rq_xprt);
    return FALSE;
}

bool_t suite_reply_and_destroy_2_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result;
    svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_void, NULL);
    svc_destroy(request->rq_xprt);
    return FALSE;
}

/* As ypserv does for YPPROC_ALL: the child answers on the parent's connection and exits. */
bool_t suite_child_replies_2_svc(suite_blob *argument, suite_blob *result, struct svc_req *request)
{
    *result = (suite_blob){0};
    signal(SIGCHLD, SIG_IGN);
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        svcerr_systemerr(request->rq_xprt);
    } else if (pid == 0) {
        svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_suite_blob, (caddr_t)argument);
        exit(0);
    }
    return FALSE;
}

bool_t suite_fixed_2_svc(suite_fixed *argument, suite_fixed *result, struct svc_req *request)
{
    (void)request;
    *result = *argument;
    result->first = -argument->first;
    for (size_t i = 0; i < sizeof result->numbers / sizeof *result->numbers; i++)
        result->numbers[i] = ~argument->numbers[i];
    return TRUE;
}

bool_t suite_upper_2_svc(char **argument, char **result, struct svc_req *request)
{
    (void)request;
    *result = *argument;
    *argument = NULL;
    for (char *c = *result; *c != '\0'; c++)
        *c = (char)toupper((unsigned char)*c);
    return TRUE;
}

bool_t suite_reverse_2_svc(suite_list *argument, suite_list *result, struct svc_req *request)
{
    (void)request;
    *result = NULL;
    while (*argument != NULL) {
        suite_item *item = *argument;
        *argument = item->next;
        item->next = *result;
        *result = item;
    }
    return TRUE;
}

bool_t suite_choose_2_svc(suite_choice *argument, suite_choice *result, struct svc_req *request)
{
    (void)request;
    *result = *argument;
    memset(argument, 0, sizeof *argument);
    return TRUE;
}

bool_t suite_who_2_svc(void *argument, suite_identity *who, struct svc_req *request)
{
    (void)argument;
    memset(who, 0, sizeof *who);
    who->flavor = request->rq_cred.oa_flavor;
    if (who->flavor == AUTH_SYS) {
        struct authunix_parms *cred = (struct authunix_parms *)request->rq_clntcred;
        who->uid = cred->aup_uid;
        who->gid = cred->aup_gid;
        who->gids.gids_len = cred->aup_len;
        who->gids.gids_val = calloc(cred->aup_len + 1, sizeof(u_int));
        for (u_int i = 0; i < cred->aup_len; i++)
            who->gids.gids_val[i] = cred->aup_gids[i];
    }
    who->principal = strdup("");
#ifdef WITH_GSS
    if (who->flavor == RPCSEC_GSS) {
        rpc_gss_rawcred_t *raw;
        if (rpc_gss_getcred(request, &raw, NULL, NULL)) {
            free(who->principal);
            who->principal = strndup(raw->client_principal->name, (size_t)raw->client_principal->len);
            who->service = (int)raw->service;
        }
    }
#endif
    char text[INET6_ADDRSTRLEN] = "?";
    struct netbuf *caller = svc_getrpccaller(request->rq_xprt);
    if (caller->buf != NULL && ((struct sockaddr *)caller->buf)->sa_family == AF_INET) {
        struct sockaddr_in *address = caller->buf;
        inet_ntop(AF_INET, &address->sin_addr, text, sizeof text);
        who->port = ntohs(address->sin_port);
    }
    who->address = strdup(text);
    who->netid = strdup(request->rq_xprt->xp_netid ? request->rq_xprt->xp_netid : "");
    return TRUE;
}

bool_t suite_unregister_2_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    svc_unreg(SUITE_PROG, SUITE_V4);
    return TRUE;
}

/* Fails after it has encoded something, as a filter with a bad union arm does. */
static bool_t xdr_impossible(XDR *xdrs, void *ignored)
{
    (void)ignored;
    int n = 1;
    return xdr_int(xdrs, &n) && FALSE;
}

bool_t suite_bad_result_2_svc(void *argument, suite_blob *result, struct svc_req *request)
{
    (void)argument;
    *result = (suite_blob){0};
    /* What rpcgen writes: a reply that cannot be encoded becomes a system error. */
    if (!svc_sendreply(request->rq_xprt, (xdrproc_t)xdr_impossible, NULL))
        svcerr_systemerr(request->rq_xprt);
    return FALSE;
}

int suite_prog_2_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport;
    xdr_free(xdr_result, result);
    return 1;
}

int suite_prog_4_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport, (void)xdr_result, (void)result;
    return 1;
}

/* ---- Transports -------------------------------------------------------------------------------------------------- */

static int listening_socket(void)
{
    struct sockaddr_in address = where_address();
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 64) < 0)
        err(1, "own socket");
    return fd;
}

static unsigned port_of(int fd)
{
    struct sockaddr_in address = {0};
    socklen_t length = sizeof address;
    if (getsockname(fd, (struct sockaddr *)&address, &length) < 0)
        err(1, "getsockname on the listener");
    return ntohs(address.sin_port);
}

static struct netconfig *config(void)
{
    struct netconfig *found = getnetconfigent(netid);
    if (found == NULL)
        errx(1, "%s: no such netid", netid);
    return found;
}

static void must_register(SVCXPRT *transport, struct netconfig *nconf)
{
    if (transport == NULL)
        errx(1, "no transport");
    if (nconf != NULL) {
        rpcb_unset(SUITE_PROG, SUITE_V2, nconf);
        rpcb_unset(SUITE_PROG, SUITE_V4, nconf);
    }
    if (!svc_reg(transport, SUITE_PROG, SUITE_V2, suite_prog_2, nconf) ||
        !svc_reg(transport, SUITE_PROG, SUITE_V4, suite_prog_4, nconf))
        errx(1, "svc_reg");
}

/* rpc_reg decodes into memory that it has not cleared: only arguments without pointers are safe. */
static char *rpc_reg_twice(char *argument)
{
    static int result;
    result = 2 * *(int *)argument;
    return (char *)&result;
}

/* Returns the port, or 0 if only rpcbind knows it. */
static unsigned create(const char *how, bool with_rpcbind)
{
    if (strcmp(how, "svc_create") == 0) {
        int n = svc_create(suite_prog_2, SUITE_PROG, SUITE_V2, netid);
        if (n == 0 || svc_create(suite_prog_4, SUITE_PROG, SUITE_V4, netid) != n)
            errx(1, "svc_create");
        return 0;
    }
    if (strcmp(how, "tp") == 0) {
        rpcb_unset(SUITE_PROG, SUITE_V4, config());
        SVCXPRT *transport = svc_tp_create(suite_prog_2, SUITE_PROG, SUITE_V2, config());
        if (transport == NULL)
            errx(1, "svc_tp_create");
        if (!svc_reg(transport, SUITE_PROG, SUITE_V4, suite_prog_4, config()))
            errx(1, "svc_reg");
        return 0;
    }
    if (strcmp(how, "rpc_reg") == 0) {
        if (rpc_reg(SUITE_PROG, SUITE_V4, SUITE_TWICE, rpc_reg_twice, (xdrproc_t)xdr_int, (xdrproc_t)xdr_int,
                    (char *)netid) != 0)
            errx(1, "rpc_reg");
        return 0;
    }
    if (strcmp(how, "tli") == 0) {
        struct sockaddr_in address = where_address();
        struct t_bind bind_to = {
            .addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 64};
        SVCXPRT *transport = svc_tli_create(RPC_ANYFD, config(), &bind_to, 0, 0);
        must_register(transport, with_rpcbind ? config() : NULL);
        if (transport->xp_ltaddr.len < sizeof address)
            errx(1, "svc_tli_create: no address in xp_ltaddr");
        if (strcmp(transport->xp_netid, netid) != 0)
            errx(1, "svc_tli_create: xp_netid is %s", transport->xp_netid);
        return ntohs(((struct sockaddr_in *)transport->xp_ltaddr.buf)->sin_port);
    }
    if (strcmp(how, "tlifd") == 0) {
        int fd = listening_socket();
        unsigned port = port_of(fd);
        must_register(svc_tli_create(fd, config(), NULL, 0, 0), with_rpcbind ? config() : NULL);
        return port;
    }
    if (strcmp(how, "vcfd") == 0) {
        int fd = listening_socket();
        must_register(svc_vc_create(fd, 0, 0), NULL);
        return port_of(fd);
    }
    if (strcmp(how, "svctcp") == 0 || strcmp(how, "svctcpfd") == 0) {
        int fd = strcmp(how, "svctcpfd") == 0 ? listening_socket() : RPC_ANYSOCK;
        if (with_rpcbind) {
            pmap_unset(SUITE_PROG, SUITE_V2);
            pmap_unset(SUITE_PROG, SUITE_V4);
        }
        SVCXPRT *transport = svctcp_create(fd, 0, 0);
        if (transport == NULL)
            errx(1, "svctcp_create");
        int protocol = with_rpcbind ? IPPROTO_TCP : 0;
        if (!svc_register(transport, SUITE_PROG, SUITE_V2, suite_prog_2, protocol) ||
            !svc_register(transport, SUITE_PROG, SUITE_V4, suite_prog_4, protocol))
            errx(1, "svc_register");
        return transport->xp_port;
    }
    errx(2, "%s: no way to create a transport", how);
}

/* ---- Loops ------------------------------------------------------------------------------------------------------- */

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

/* With `each`, as gltpd and rpc.statd do it: one descriptor at a time. */
static void select_loop(bool each)
{
    for (;;) {
        fd_set fds = svc_fdset;
        int ready = select(svc_maxfd + 1, &fds, NULL, NULL, NULL);
        if (ready < 0 && errno != EINTR)
            err(1, "select");
        if (ready > 0 && !each)
            svc_getreqset(&fds);
        int last = svc_maxfd;
        for (int fd = 0; ready > 0 && each && fd <= last; fd++) {
            if (FD_ISSET(fd, &fds))
                svc_getreq_common(fd);
        }
    }
}

static void few_descriptors(rlim_t number)
{
    struct rlimit limit;
    int most = 1 << 20;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        err(1, "getrlimit");
    /* The hard limit stays: valgrind lets nobody change it. */
    limit.rlim_cur = number;
    if (setrlimit(RLIMIT_NOFILE, &limit) < 0 || !rpc_control(RPC_SVC_CONNMAXREC_SET, &most))
        err(1, "few descriptors");
}

int main(int argc, char **argv)
{
    const char *how = "tli", *loop = "run", *gss_name = NULL;
    bool daemonise = false, with_rpcbind = false;
    int option;
    while ((option = getopt(argc, argv, "n:c:l:frig:d:")) != -1) {
        switch (option) {
        case 'n': netid = optarg; break;
        case 'c': how = optarg; break;
        case 'l': loop = optarg; break;
        case 'f': daemonise = true; break;
        case 'r': with_rpcbind = true; break;
        case 'i': signal(SIGPIPE, SIG_IGN); break;
        case 'g': gss_name = optarg; break;
        case 'd': few_descriptors((rlim_t)atoi(optarg)); break;
        default: return 2;
        }
    }
#ifdef WITH_GSS
    if (gss_name != NULL && !rpc_gss_set_svc_name((char *)gss_name, "kerberos_v5", 0, SUITE_PROG, SUITE_V2))
        errx(1, "rpc_gss_set_svc_name");
#else
    if (gss_name != NULL)
        errx(2, "built without RPCSEC_GSS");
#endif
    unsigned port = create(how, with_rpcbind);
    if (daemonise) {
        pid_t pid = fork();
        if (pid < 0)
            err(1, "fork");
        if (pid > 0)
            _exit(0);
    }
    dprintf(STDOUT_FILENO, "READY %u %d\n", port, getpid());

    const char *threads = getenv("THREADS");
    bool_t (*run)(unsigned) = (bool_t (*)(unsigned))dlsym(RTLD_DEFAULT, "rpcrdma_svc_run");
    if (strcmp(loop, "run") == 0 && threads != NULL && run != NULL)
        run((unsigned)atoi(threads));
    else if (strcmp(loop, "run") == 0)
        svc_run();
    else if (strcmp(loop, "poll") == 0)
        poll_loop();
    else
        select_loop(strcmp(loop, "common") == 0);
    return 0;
}
