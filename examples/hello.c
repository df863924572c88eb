/* hello.c: is program PROG, version VERS alive at HOST over RDMA?
 *
 *   cc hello.c $(pkg-config --cflags --libs rpcrdma) -o hello
 *   ./hello filer 100003 3
 *
 * Nothing in it but libtirpc: only the netid is new. */
#include <rpc/rpc.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    if (argc != 4) {
        fprintf(stderr, "usage: %s HOST PROG VERS\n", argv[0]);
        return 2;
    }
    const char *netid = getenv("NETID") ? getenv("NETID") : "rdma";
    struct timeval timeout = {.tv_sec = 5};
    CLIENT *client = clnt_create(argv[1], strtoul(argv[2], NULL, 0), strtoul(argv[3], NULL, 0), netid);
    if (client == NULL) {
        clnt_pcreateerror(argv[1]);
        return 1;
    }
    enum clnt_stat status =
        clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout);
    if (status != RPC_SUCCESS)
        clnt_perror(client, argv[1]);
    else
        printf("program %s version %s at %s is ready over %s\n", argv[2], argv[3], argv[1], client->cl_netid);
    clnt_destroy(client);
    return status != RPC_SUCCESS;
}
