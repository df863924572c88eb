/* gss_back.c: calls back with RPCSEC_GSS: here the server creates the context, and the client accepts it. The KDC and the
 * environment are kdc.sh's. Prints a line for each service that works; tests/gss.sh runs it. */
#include <arpa/inet.h>
#include <err.h>
#include <rpc/auth_gss.h>
#include <rpc/rpc.h>
#include <rpc/rpcsec_gss.h>
#include <rpcrdma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* TRY has the server call back with security, PLAIN without. */
enum { FORWARD = 0x20003201, BACK = 0x20003202, VERSION = 1, TRY = 1, PLAIN = 2, ECHO = 1 };
enum { LONGEST = 20000 };

static const struct timeval patient = {.tv_sec = 25};
static char service_name[] = "suite@localhost", mechanism[] = "kerberos_v5";

struct blob { u_int length; char *bytes; };
static bool_t xdr_blob(XDR *xdrs, struct blob *blob) { return xdr_bytes(xdrs, &blob->bytes, &blob->length, LONGEST); }

/* Makes a secured call back of each length; returns the status of the one that fails. */
static u_int call_back(CLIENT *back, u_int service)
{
    static const u_int lengths[] = {0, 1, 1000, 3000, 5000, LONGEST};
    rpc_gss_options_ret_t details;
    size_t most = LONGEST + 1000;
    clnt_control(back, CLSET_RDMA_MAXREPLY, &most);
    AUTH *plain = back->cl_auth;
    AUTH *auth = rpc_gss_seccreate(back, service_name, mechanism, (rpc_gss_service_t)service, NULL, NULL, &details);
    if (auth == NULL)
        return RPC_AUTHERROR;
    back->cl_auth = auth;
    u_int status = RPC_SUCCESS;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && status == RPC_SUCCESS; i++) {
        struct blob sent = {lengths[i], malloc(lengths[i] + 1)}, got = {0};
        memset(sent.bytes, 'a' + (int)i, lengths[i]);
        status = clnt_call(back, ECHO, (xdrproc_t)xdr_blob, &sent, (xdrproc_t)xdr_blob, &got, patient);
        if (status != RPC_SUCCESS)
            clnt_perror(back, "call back");
        else if (got.length != sent.length || memcmp(got.bytes, sent.bytes, got.length) != 0)
            status = RPC_CANTDECODERES;
        free(sent.bytes);
        clnt_freeres(back, (xdrproc_t)xdr_blob, &got);
    }
    auth_destroy(auth);
    back->cl_auth = plain;
    return status;
}

static void forward(struct svc_req *request, SVCXPRT *xprt)
{
    u_int service, status = RPC_FAILED;
    if (request->rq_proc == NULLPROC) {
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (request->rq_proc == TRY && !svc_getargs(xprt, (xdrproc_t)xdr_u_int, &service)) {
        svcerr_decode(xprt);
        return;
    }
    CLIENT *back = rpcrdma_clnt_reverse(xprt, BACK, VERSION);
    if (back == NULL) {
        clnt_pcreateerror("rpcrdma_clnt_reverse");
    } else {
        status = request->rq_proc == TRY
                     ? call_back(back, service)
                     : clnt_call(back, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, patient);
        clnt_destroy(back);
    }
    svc_sendreply(xprt, (xdrproc_t)xdr_u_int, &status);
}

static u_int expected;
static CLIENT *client;

static void called_back(struct svc_req *request, SVCXPRT *xprt)
{
    struct blob blob = {0};
    rpc_gss_rawcred_t *raw;
    if (request->rq_proc == NULLPROC) {
        /* libtirpc also dispatches the request that ends a context: the context is gone by now. */
        svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
        return;
    }
    if (request->rq_cred.oa_flavor != RPCSEC_GSS || !rpc_gss_getcred(request, &raw, NULL, NULL) || raw->service != expected) {
        svcerr_weakauth(xprt);
        return;
    }
    if (!svc_getargs(xprt, (xdrproc_t)xdr_blob, &blob)) {
        svcerr_decode(xprt);
        return;
    }
    /* Another request on the same SVCXPRT, without security, comes and goes before the reply. */
    u_int status = RPC_FAILED;
    enum clnt_stat called = clnt_call(client, PLAIN, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_u_int, &status, patient);
    if (called != RPC_SUCCESS || status != RPC_SUCCESS)
        warnx("a call back inside a call back: call %s; call back %s", clnt_sperrno(called), clnt_sperrno(status));
    svc_sendreply(xprt, (xdrproc_t)xdr_blob, &blob);
    svc_freeargs(xprt, (xdrproc_t)xdr_blob, &blob);
}

int main(void)
{
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    if (listener == NULL)
        errx(1, "%s", clnt_spcreateerror("svc_rdma_create"));
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    if (getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) != 0)
        err(1, "getsockname");
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    fflush(stdout);
    pid_t server = fork();
    if (server == 0) {
        svc_reg(listener, FORWARD, VERSION, forward, NULL);
        svc_run();
        _exit(0);
    }
    svc_destroy(listener);
    if (!rpc_gss_set_svc_name(service_name, mechanism, 0, BACK, VERSION))
        errx(1, "rpc_gss_set_svc_name");
    struct netbuf netbuf = {.len = sizeof address, .maxlen = sizeof address, .buf = &address};
    int failed = 0;
    /* A connection for each, and all three on one. */
    for (u_int round = 0; round < 2; round++) {
        client = NULL;
        for (u_int service = rpcsec_gss_svc_none; service <= rpcsec_gss_svc_privacy; service++) {
            if (client == NULL) {
                client = clnt_rdma_create(RPC_ANYFD, &netbuf, FORWARD, VERSION, 0, 0);
                if (client == NULL)
                    errx(1, "%s", clnt_spcreateerror("clnt_rdma_create"));
                if (!rpcrdma_clnt_serve(client, BACK, VERSION, called_back))
                    errx(1, "%s", clnt_sperror(client, "rpcrdma_clnt_serve"));
            }
            u_int status = RPC_FAILED;
            expected = service;
            enum clnt_stat called = clnt_call(client, TRY, (xdrproc_t)xdr_u_int, &service, (xdrproc_t)xdr_u_int, &status, patient);
            if (called == RPC_SUCCESS && status == RPC_SUCCESS) {
                printf("ok    calls back with RPCSEC_GSS, service %u%s\n", service, round ? ", on one connection" : "");
            } else {
                failed = 1;
                warnx("service %u: call %s; call back %s", service, clnt_sperrno(called), clnt_sperrno(status));
            }
            if (round == 0) {
                clnt_destroy(client);
                client = NULL;
            }
        }
        if (client != NULL)
            clnt_destroy(client);
    }
    kill(server, SIGTERM);
    waitpid(server, NULL, 0);
    return failed;
}
