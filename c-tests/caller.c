/* caller.c: makes calls and prints how each of them ended. For servers that misbehave.
 *
 *   caller port milliseconds step ...
 *
 *   null      calls procedure 0                  source:n   asks for n bytes
 *   echo:n    sends n bytes and wants them back  one-way    sends a call without reply
 *   sink:n    sends n bytes and changes them as soon as the call has ended
 *   preset:n  asks for n bytes in a buffer of its own; check: after a failure nobody has changed that buffer since
 *   read:n    READ of NFS version 3 of n bytes   bell:port  makes a TCP connection to that port of 127.0.0.1
 *   memory:n  tells whether this process never had more than n kB resident
 *
 * Connects to 127.0.0.1 over netid "rdma", or over NETID; `milliseconds` is how long each call may take. Prints a line for each
 * step: the status, and what clnt_sperror says. If no CLIENT can be created there is one line: the negative status, and what
 * clnt_spcreateerror says. -1000 stands for a result that is not what it should be. */
#define _GNU_SOURCE
#include "suite.h"
#include <arpa/inet.h>
#include <err.h>
#include <limits.h>
#include <netconfig.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WRONG_RESULT = -1000 };

/* Prints one line, without the newline at the end of libtirpc's texts. */
static void report(int status, const char *text)
{
    printf("%d %.*s\n", status, (int)strcspn(text, "\n"), text);
}

static int echo(CLIENT *client, u_int length, struct timeval limit)
{
    suite_blob sent = {length, malloc(length + 1)}, got = {0};
    memset(sent.suite_blob_val, 0x5a, length);
    int status = clnt_call(client, SUITE_ECHO, (xdrproc_t)xdr_suite_blob, (char *)&sent, (xdrproc_t)xdr_suite_blob,
                           (char *)&got, limit);
    if (status == RPC_SUCCESS &&
        (got.suite_blob_len != length || memcmp(got.suite_blob_val, sent.suite_blob_val, length) != 0))
        status = WRONG_RESULT;
    free(sent.suite_blob_val);
    clnt_freeres(client, (xdrproc_t)xdr_suite_blob, (char *)&got);
    return status;
}

static int source(CLIENT *client, u_int length, struct timeval limit)
{
    suite_blob got = {0};
    int status = clnt_call(client, SUITE_SOURCE, (xdrproc_t)xdr_u_int, (char *)&length, (xdrproc_t)xdr_suite_blob,
                           (char *)&got, limit);
    if (status == RPC_SUCCESS && got.suite_blob_len != length)
        status = WRONG_RESULT;
    clnt_freeres(client, (xdrproc_t)xdr_suite_blob, (char *)&got);
    return status;
}

static int sink(CLIENT *client, u_int length, struct timeval limit)
{
    /* Not freed: a late RDMA Read of this memory must find the changed bytes. */
    suite_blob sent = {length, malloc(length + 1)};
    suite_digest got;
    memset(sent.suite_blob_val, 0x5a, length);
    int status = clnt_call(client, SUITE_SINK, (xdrproc_t)xdr_suite_blob, (char *)&sent, (xdrproc_t)xdr_suite_digest,
                           (char *)&got, limit);
    memset(sent.suite_blob_val, 0xee, length);
    return status;
}

static suite_blob buffer;

/* Fills the buffer when the call has failed: data that comes before that does not matter, but none may come later. */
static int preset(CLIENT *client, u_int length, struct timeval limit)
{
    buffer = (suite_blob){length, malloc(length + 1)};
    char *own = buffer.suite_blob_val;
    int status = clnt_call(client, SUITE_SOURCE, (xdrproc_t)xdr_u_int, (char *)&length, (xdrproc_t)xdr_suite_blob,
                           (char *)&buffer, limit);
    if (status == RPC_SUCCESS && (buffer.suite_blob_val != own || buffer.suite_blob_len != length))
        status = WRONG_RESULT;
    buffer = (suite_blob){length, own};
    if (status != RPC_SUCCESS)
        memset(own, 'x', length);
    return status;
}

static int check(void)
{
    for (u_int i = 0; i < buffer.suite_blob_len; i++) {
        if (buffer.suite_blob_val[i] != 'x')
            return WRONG_RESULT;
    }
    return 0;
}

static bool_t xdr_read_arguments(XDR *xdrs, u_int *count)
{
    char *handle = "handle";
    u_int length = 6;
    u_quad_t offset = 0;
    return xdr_bytes(xdrs, &handle, &length, 64) && xdr_u_quad_t(xdrs, &offset) && xdr_u_int(xdrs, count);
}

static bool_t xdr_read_results(XDR *xdrs, suite_blob *data)
{
    int status, attributes, eof;
    u_int count;
    return xdr_int(xdrs, &status) && status == 0 && xdr_int(xdrs, &attributes) && !attributes &&
           xdr_u_int(xdrs, &count) && xdr_int(xdrs, &eof) && xdr_suite_blob(xdrs, data) &&
           data->suite_blob_len == count;
}

static int nfs_read(CLIENT *client, u_int length, struct timeval limit)
{
    rpcprog_t program = 100003, own = SUITE_PROG;
    rpcvers_t version = 3, own_version = SUITE_V2;
    suite_blob got = {0};
    clnt_control(client, CLSET_PROG, (char *)&program);
    clnt_control(client, CLSET_VERS, (char *)&version);
    int status = clnt_call(client, 6, (xdrproc_t)xdr_read_arguments, (char *)&length, (xdrproc_t)xdr_read_results,
                           (char *)&got, limit);
    clnt_freeres(client, (xdrproc_t)xdr_suite_blob, (char *)&got);
    clnt_control(client, CLSET_PROG, (char *)&own);
    clnt_control(client, CLSET_VERS, (char *)&own_version);
    return status;
}

static int bell(struct sockaddr_in address, u_int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_port = htons((uint16_t)port);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        err(1, "bell");
    close(fd);
    return 0;
}

/* Not getrusage(2), which also counts what the process had before its exec. */
static int memory(u_long most)
{
    char line[256];
    u_long peak = ULONG_MAX;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        sscanf(line, "VmHWM: %lu", &peak);
    if (status)
        fclose(status);
    return peak > most ? WRONG_RESULT : 0;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons((uint16_t)atoi(argv[1])),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    struct netbuf netbuf = {.maxlen = sizeof address, .len = sizeof address, .buf = &address};
    long milliseconds = atol(argv[2]);
    struct timeval limit = {milliseconds / 1000, milliseconds % 1000 * 1000};
    struct netconfig *config = getnetconfigent(getenv("NETID") != NULL ? getenv("NETID") : "rdma");
    if (config == NULL)
        errx(1, "no netid rdma: is the library loaded?");
    CLIENT *client = clnt_tli_create(RPC_ANYFD, config, &netbuf, SUITE_PROG, SUITE_V2, 0, 0);
    freenetconfigent(config);
    if (client == NULL) {
        report(-(int)rpc_createerr.cf_stat, clnt_spcreateerror("create"));
        return 0;
    }
    for (int i = 3; i < argc; i++) {
        char *colon = strchr(argv[i], ':');
        u_int length = colon ? (u_int)strtoul(colon + 1, NULL, 0) : 0, one = 1;
        struct timeval at_once = {0, 0};
        int status;
        if (strncmp(argv[i], "echo", 4) == 0)
            status = echo(client, length, limit);
        else if (strncmp(argv[i], "source", 6) == 0)
            status = source(client, length, limit);
        else if (strncmp(argv[i], "sink", 4) == 0)
            status = sink(client, length, limit);
        else if (strncmp(argv[i], "preset", 6) == 0)
            status = preset(client, length, limit);
        else if (strcmp(argv[i], "check") == 0)
            status = check();
        else if (strncmp(argv[i], "read", 4) == 0)
            status = nfs_read(client, length, limit);
        else if (strncmp(argv[i], "bell", 4) == 0)
            status = bell(address, length);
        else if (strncmp(argv[i], "memory", 6) == 0)
            status = memory(length);
        else if (strcmp(argv[i], "one-way") == 0)
            status = clnt_call(client, SUITE_ONE_WAY, (xdrproc_t)xdr_u_int, (char *)&one, NULL, NULL,
                               at_once);
        else
            status = clnt_call(client, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
        report(status, status == RPC_SUCCESS || status == WRONG_RESULT ? "" : clnt_sperror(client, argv[i]));
        fflush(stdout);
    }
    clnt_destroy(client);
    return 0;
}
