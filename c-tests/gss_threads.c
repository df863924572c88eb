/* gss_threads.c: calls with RPCSEC_GSS to a server of several threads. The KDC and the environment are kdc.sh's. Prints a line
 * for each number of threads that works; tests/gss.sh runs it. */
#include <arpa/inet.h>
#include <err.h>
#include <rpc/auth_gss.h>
#include <rpc/rpc.h>
#include <rpc/rpcsec_gss.h>
#include <rpcrdma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

/* HOLD blocks until a letter comes; COUNT is one of MANY; EXIT ends the service. */
enum { PROGRAM = 0x20003203, VERSION = 1, HOLD = 1, COUNT = 2, EXIT = 3, MANY = 5 };

static const struct timeval patient = {.tv_sec = 25}, at_once = {0};
static char service_name[] = "suite@localhost", mechanism[] = "kerberos_v5";
/* What the server has served, in the order of service. */
static struct { unsigned count, numbers[MANY]; } *served;
static int gate[2];

static void dispatch(struct svc_req *request, SVCXPRT *xprt)
{
    u_int number = 0;
    char letter = 'H';
    switch (request->rq_proc) {
    case HOLD:
        if (write(gate[1], &letter, 1) != 1 || read(gate[1], &letter, 1) != 1)
            _exit(2);
        return;
    case COUNT:
        if (!svc_getargs(xprt, (xdrproc_t)xdr_u_int, (caddr_t)&number) || served->count == MANY)
            _exit(3);
        served->numbers[served->count++] = number;
        return;
    case EXIT: svc_exit(); break;
    default: break;
    }
    svc_sendreply(xprt, (xdrproc_t)xdr_void, NULL);
}

/* Requests that wait behind one with RPCSEC_GSS when svc_exit() is called are served too, in their order. */
static int served_to_the_end(unsigned threads)
{
    SVCXPRT *listener = svc_rdma_create(RPC_ANYFD, 0, 0);
    if (listener == NULL)
        errx(1, "%s", clnt_spcreateerror("svc_rdma_create"));
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    if (getsockname(listener->xp_fd, (struct sockaddr *)&address, &length) != 0 ||
        socketpair(AF_UNIX, SOCK_STREAM, 0, gate) != 0)
        err(1, "sockets");
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    served->count = 0;
    fflush(stdout);
    pid_t server = fork();
    if (server == 0) {
        svc_reg(listener, PROGRAM, VERSION, dispatch, NULL);
        _exit(rpcrdma_svc_run(threads) ? 0 : 4);
    }
    svc_destroy(listener);
    struct netbuf netbuf = {.len = sizeof address, .maxlen = sizeof address, .buf = &address};
    CLIENT *client = clnt_rdma_create(RPC_ANYFD, &netbuf, PROGRAM, VERSION, 0, 0);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror("clnt_rdma_create"));
    rpc_gss_options_ret_t details;
    AUTH *plain = client->cl_auth;
    AUTH *auth = rpc_gss_seccreate(client, service_name, mechanism, rpcsec_gss_svc_integrity, NULL, NULL, &details);
    if (auth == NULL)
        errx(1, "rpc_gss_seccreate");
    client->cl_auth = auth;
    char letter;
    int status = -1;
    bool right = clnt_call(client, HOLD, (xdrproc_t)xdr_void, NULL, NULL, NULL, at_once) == RPC_SUCCESS &&
                 read(gate[0], &letter, 1) == 1;
    for (u_int number = 0; number < MANY; number++)
        right &= clnt_call(client, COUNT, (xdrproc_t)xdr_u_int, &number, NULL, NULL, at_once) == RPC_SUCCESS;
    /* When this has its reply, all requests before it have been read. The thread that ran the loop may end meanwhile, or not. */
    client->cl_auth = plain;
    right &= clnt_call(client, EXIT, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, patient) == RPC_SUCCESS;
    usleep(20000);
    right &= write(gate[0], &letter, 1) == 1;
    right &= waitpid(server, &status, 0) == server && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    right &= served->count == MANY;
    for (unsigned i = 0; i < served->count; i++)
        right &= served->numbers[i] == i;
    if (right)
        printf("ok    %u threads serve calls with RPCSEC_GSS that wait when the service ends\n", threads);
    else
        warnx("%u threads: status %#x; %u of %u calls were served", threads, status, served->count, MANY);
    client->cl_auth = plain;
    clnt_destroy(client);
    close(gate[0]);
    close(gate[1]);
    return !right;
}

int main(void)
{
    served = mmap(NULL, sizeof *served, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (served == MAP_FAILED)
        err(1, "mmap");
    if (!rpc_gss_set_svc_name(service_name, mechanism, 0, PROGRAM, VERSION))
        errx(1, "rpc_gss_set_svc_name");
    return served_to_the_end(2) + served_to_the_end(4) > 0;
}
