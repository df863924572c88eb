/* watched.c: a client that tests/stat.sh watches. `watched PORT` calls the service of bench/bench.c, procedure 0, at
 * 127.0.0.1 over netid rdma, as it is told on standard input, and answers each line with one:
 *
 *   calls N      makes N calls, on its CLIENT or a new one
 *   counters     prints the first counters of struct rpcrdma_stats, in order
 *   fork N       forks a child that makes N calls and then does as it is told; prints the child's process id
 *   close        closes all descriptors but 0 to 2, as daemons do
 *   end          ends
 */
#include <netinet/in.h>
#include <rpc/rpc.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PROGRAM = 0x20004245, VERSION = 1, COUNTERS = 15 };

static CLIENT *client;

static CLIENT *create(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct netbuf address = {.buf = &to, .len = sizeof to, .maxlen = sizeof to};
    struct netconfig *netid = getnetconfigent("rdma");
    CLIENT *made = netid == NULL ? NULL : clnt_tli_create(RPC_ANYFD, netid, &address, PROGRAM, VERSION, 0, 0);
    if (made == NULL) {
        clnt_pcreateerror("watched");
        exit(1);
    }
    freenetconfigent(netid);
    return made;
}

static void calls(int port, long n)
{
    struct timeval timeout = {.tv_sec = 10};
    if (client == NULL)
        client = create(port);
    while (n-- > 0) {
        if (clnt_call(client, NULLPROC, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout) != RPC_SUCCESS) {
            clnt_perror(client, "watched");
            exit(1);
        }
    }
}

int main(int argc, char **argv)
{
    char line[100];
    uint64_t counters[COUNTERS];
    bool_t (*get)(void *, size_t) = (bool_t (*)(void *, size_t))dlsym(RTLD_DEFAULT, "rpcrdma_stats_get");
    if (argc != 2 || get == NULL) {
        fprintf(stderr, "usage: watched PORT, with the library\n");
        return 2;
    }
    int port = atoi(argv[1]);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin) != NULL) {
        long n = strchr(line, ' ') == NULL ? 0 : atol(strchr(line, ' '));
        if (strncmp(line, "calls", 5) == 0) {
            calls(port, n);
            puts("done");
        } else if (strncmp(line, "counters", 8) == 0) {
            get(counters, sizeof counters);
            for (int i = 0; i < COUNTERS; i++)
                printf("%llu%c", (unsigned long long)counters[i], i + 1 < COUNTERS ? ' ' : '\n');
        } else if (strncmp(line, "fork", 4) == 0) {
            pid_t child = fork();
            if (child == 0) {
                calls(port, n);
                printf("%ld\n", (long)getpid());
            } else {
                /* The child reads standard input from here on, until it is told to end. */
                waitpid(child, NULL, 0);
                puts("done");
            }
        } else if (strncmp(line, "close", 5) == 0) {
            /* The CLIENT is lost with its descriptor; the next calls create another. */
            client = NULL;
            for (int fd = 3; fd < 1024; fd++)
                close(fd);
            puts("done");
        } else {
            break;
        }
    }
    return 0;
}
