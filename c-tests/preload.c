/* A server and a client of netid "rdma" that need nothing of libtirpc but what this library has too: as a plugin, which brings
 * libtirpc into a program that was started without it, and as a program that is linked with nothing but this library.
 *
 * preload: serves, calls, and prints over which netid.
 * preload PLUGIN: loads the plugin, and has it do so (HOST). */
#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>
#include <rpc/rpc.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef HOST
enum { PROG = 0x20005052, VERS = 1 };

static bool_t nothing(XDR *xdrs, void *object)
{
    (void)xdrs, (void)object;
    return TRUE;
}

/* svc_sendreply is libtirpc's. */
static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    (void)request;
    struct rpc_msg reply = {.rm_direction = REPLY};
    reply.rm_reply.rp_stat = MSG_ACCEPTED;
    reply.acpted_rply.ar_verf = xprt->xp_verf;
    reply.acpted_rply.ar_stat = SUCCESS;
    reply.acpted_rply.ar_results.proc = (xdrproc_t)nothing;
    SVC_REPLY(xprt, &reply);
}

static const char *failed(const char *what)
{
    fprintf(stderr, "%s\n", clnt_spcreateerror(what));
    return NULL;
}

/* Returns the netid over which a call has gone; or NULL, with the reason on stderr. */
const char *serve_and_call(void)
{
    static char netid[16];
    struct netconfig *rdma = getnetconfigent("rdma");
    if (rdma == NULL)
        return failed("getnetconfigent");
    SVCXPRT *xprt = svc_tli_create(RPC_ANYFD, rdma, NULL, 0, 0);
    if (xprt == NULL)
        return failed("svc_tli_create");
    if (!svc_reg(xprt, PROG, VERS, dispatch, NULL))
        return failed("svc_reg");
#ifdef COPIES
    /* This program has copies of libtirpc's variables: the program, libtirpc and the library must use the same ones. */
    if (svc_max_pollfd < 1 || svc_pollfd[svc_max_pollfd - 1].fd != xprt->xp_fd)
        return failed("svc_pollfd");
#endif
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    address.sin_port = ((struct sockaddr_in *)xprt->xp_ltaddr.buf)->sin_port;
    pid_t server = fork();
    if (server == 0) {
        svc_run();
        _exit(1);
    }
    struct netbuf to = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    CLIENT *client = clnt_tli_create(RPC_ANYFD, rdma, &to, PROG, VERS, 0, 0);
    enum clnt_stat status = RPC_FAILED;
    if (client == NULL) {
        failed("clnt_tli_create");
    } else {
        struct timeval timeout = {.tv_sec = 25};
        status = clnt_call(client, NULLPROC, (xdrproc_t)nothing, NULL, (xdrproc_t)nothing, NULL, timeout);
        if (status != RPC_SUCCESS)
            fprintf(stderr, "%s\n", clnt_sperror(client, "clnt_call"));
        snprintf(netid, sizeof netid, "%s", client->cl_netid);
        clnt_destroy(client);
    }
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return status == RPC_SUCCESS ? netid : NULL;
}
#endif

int main(int argc, char **argv)
{
#ifdef HOST
    void *plugin = dlopen(argc > 1 ? argv[1] : "", RTLD_NOW | RTLD_LOCAL);
    const char *(*serve_and_call)(void) = plugin ? (const char *(*)(void))dlsym(plugin, "serve_and_call") : NULL;
    if (serve_and_call == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
#else
    (void)argc, (void)argv;
#endif
    const char *netid = serve_and_call();
    if (netid == NULL)
        return 1;
    printf("over %s\n", netid);
    return 0;
}
