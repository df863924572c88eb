/* caller.c: makes calls and says how each of them ended. For servers that misbehave.
 *
 *   caller port milliseconds step ...
 *
 *   null      calls procedure 0                  source:n   asks for n bytes
 *   echo:n    sends n bytes and wants them back  one-way    sends a call without reply
 *
 * Connects to netid "rdma" on 127.0.0.1; each call may take so many milliseconds. Prints a line for each step: the
 * status, and what clnt_sperror says. Where no CLIENT can be made there is one line: the negative status, and what
 * clnt_spcreateerror says. -1000 stands for a result that is not what it should be. */
#define _GNU_SOURCE
#include "suite.h"
#include <arpa/inet.h>
#include <err.h>
#include <netconfig.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WRONG_RESULT = -1000 };

/* One line, without the newline that libtirpc ends its texts with. */
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
    struct netconfig *config = getnetconfigent("rdma");
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
        else if (strcmp(argv[i], "one-way") == 0)
            status = clnt_call(client, SUITE_ONE_WAY, (xdrproc_t)xdr_u_int, (char *)&one, NULL, NULL,
                               at_once);
        else
            status = clnt_call(client, SUITE_NULL, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, limit);
        report(status, status == RPC_SUCCESS ? "" : clnt_sperror(client, argv[i]));
        fflush(stdout);
    }
    clnt_destroy(client);
    return 0;
}
