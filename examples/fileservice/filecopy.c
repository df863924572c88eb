/* filecopy.c: copies a tree of files to or from a fileserver.
 *
 *   filecopy [-n netid] [-r] host[:port] TREE
 *   filecopy [-n netid] -c CALLS host[:port]
 *
 * Sends TREE into the server's directory; with -r receives the server's directory into TREE; with -c only makes CALLS
 * calls that do nothing. Without a port the server is looked up with rpcbind. Ends with one line on standard output: files
 * or calls, bytes and seconds. */
#define _GNU_SOURCE
#include "fileservice.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netconfig.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static CLIENT *client;
static unsigned long files;
static unsigned long long bytes;

/* A call that failed ends the program, and says where. */
static void must(enum clnt_stat status, const char *what, const char *path)
{
    if (status != RPC_SUCCESS) {
        warnx("%s %s", what, *path ? path : ".");
        errx(1, "%s", clnt_sperror(client, "server"));
    }
}

static void refused(int error, const char *what, const char *path)
{
    if (error != 0)
        errx(1, "server: %s %s: %s", what, *path ? path : ".", strerror(error));
}

static char *join(const char *directory, const char *name)
{
    char *path;
    if (asprintf(&path, "%s%s%s", directory, *directory ? "/" : "", name) < 0)
        err(1, "out of memory");
    return path;
}

static void send_file(const char *local, char *remote, mode_t mode)
{
    static char buffer[FS_IO_MAX];
    int fd = open(local, O_RDONLY);
    if (fd < 0)
        err(1, "%s", local);
    fs_write_args args = {.path = remote, .mode = mode & 0777, .data = {.fs_data_val = buffer}};
    ssize_t n;
    do {
        n = read(fd, buffer, sizeof buffer);
        if (n < 0)
            err(1, "%s", local);
        /* An empty file is one empty write; otherwise the end of the file needs none. */
        if (n > 0 || args.offset == 0) {
            int error;
            args.data.fs_data_len = (u_int)n;
            must(fs_write_1(&args, &error, client), "write", remote);
            refused(error, "write", remote);
            args.offset += (u_quad_t)n;
        }
    } while (n > 0);
    bytes += args.offset;
    files++;
    close(fd);
}

static void send_tree(const char *local, char *remote)
{
    struct dirent **names;
    int count = scandir(local, &names, NULL, alphasort);
    if (count < 0)
        err(1, "%s", local);
    for (int i = 0; i < count; i++) {
        const char *name = names[i]->d_name;
        if (strcmp(name, ".") != 0 && strcmp(name, "..") != 0) {
            char *from = join(local, name), *to = join(remote, name);
            struct stat st;
            if (lstat(from, &st) < 0)
                err(1, "%s", from);
            if (S_ISDIR(st.st_mode)) {
                fs_make_args args = {.path = to, .mode = st.st_mode & 0777};
                int error;
                must(fs_make_directory_1(&args, &error, client), "make directory", to);
                refused(error == EEXIST ? 0 : error, "make directory", to);
                send_tree(from, to);
            } else if (S_ISREG(st.st_mode)) {
                send_file(from, to, st.st_mode);
            } else {
                warnx("%s: neither file nor directory, left out", from);
            }
            free(from);
            free(to);
        }
        free(names[i]);
    }
    free(names);
}

static void receive_file(char *remote, const char *local, mode_t mode)
{
    int fd = open(local, O_WRONLY | O_CREAT | O_TRUNC, mode);
    if (fd < 0)
        err(1, "%s", local);
    fs_read_args args = {.path = remote, .count = FS_IO_MAX};
    u_int got;
    do {
        fs_read_result result;
        memset(&result, 0, sizeof result);
        must(fs_read_1(&args, &result, client), "read", remote);
        refused(result.error, "read", remote);
        fs_data *data = &result.fs_read_result_u.data;
        got = data->fs_data_len;
        for (u_int done = 0; done < got;) {
            ssize_t n = write(fd, data->fs_data_val + done, got - done);
            if (n < 0)
                err(1, "%s", local);
            done += (u_int)n;
        }
        args.offset += got;
        xdr_free((xdrproc_t)xdr_fs_read_result, (char *)&result);
    } while (got == FS_IO_MAX);
    bytes += args.offset;
    files++;
    if (close(fd) < 0)
        err(1, "%s", local);
}

static void receive_tree(char *remote, const char *local)
{
    if (mkdir(local, 0777) < 0 && errno != EEXIST)
        err(1, "%s", local);
    char after[FS_NAME_MAX + 1] = "";
    bool_t last;
    do {
        fs_list_args args = {.directory = remote, .after = after, .most = FS_PAGE_MAX};
        fs_list_result result;
        memset(&result, 0, sizeof result);
        must(fs_list_1(&args, &result, client), "list", remote);
        refused(result.error, "list", remote);
        fs_page *page = &result.fs_list_result_u.page;
        for (u_int i = 0; i < page->entries.entries_len; i++) {
            fs_entry *entry = &page->entries.entries_val[i];
            /* The names come from the network: none may lead out of `local`. */
            if (strchr(entry->name, '/') != NULL || strcmp(entry->name, "..") == 0 || strcmp(entry->name, ".") == 0)
                errx(1, "server: bad name \"%s\"", entry->name);
            char *from = join(remote, entry->name), *to = join(local, entry->name);
            if (entry->attributes.kind == FS_DIRECTORY)
                receive_tree(from, to);
            else if (entry->attributes.kind == FS_FILE)
                receive_file(from, to, entry->attributes.mode & 0777);
            free(from);
            free(to);
            snprintf(after, sizeof after, "%s", entry->name);
        }
        last = page->last || page->entries.entries_len == 0;
        xdr_free((xdrproc_t)xdr_fs_list_result, (char *)&result);
    } while (!last);
}

static void make_calls(unsigned long calls)
{
    char none;
    for (; calls > 0; calls--)
        must(fs_null_1(NULL, &none, client), "call", "");
}

static CLIENT *connect_to(const char *netid, char *host)
{
    char *port = strrchr(host, ':');
    if (port == NULL)
        return clnt_create(host, FS_PROGRAM, FS_VERSION, netid);
    *port++ = '\0';
    struct addrinfo *found, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int error = getaddrinfo(host, port, &hints, &found);
    if (error != 0)
        errx(1, "%s: %s", host, gai_strerror(error));
    struct netconfig *config = getnetconfigent(netid);
    if (config == NULL)
        errx(1, "%s: no such netid (for rdma, is librpcrdma loaded?)", netid);
    struct netbuf address = {
        .maxlen = found->ai_addrlen, .len = found->ai_addrlen, .buf = found->ai_addr};
    CLIENT *made = clnt_tli_create(RPC_ANYFD, config, &address, FS_PROGRAM, FS_VERSION, 0, 0);
    freenetconfigent(config);
    freeaddrinfo(found);
    return made;
}

int main(int argc, char **argv)
{
    const char *netid = "tcp";
    int receive = 0, option;
    unsigned long calls = 0;
    while ((option = getopt(argc, argv, "n:rc:")) != -1) {
        switch (option) {
        case 'n': netid = optarg; break;
        case 'r': receive = 1; break;
        case 'c': calls = strtoul(optarg, NULL, 10); break;
        default: argc = 0;
        }
    }
    if (argc - optind != (calls > 0 ? 1 : 2))
        errx(2, "usage: filecopy [-n netid] [-r] host[:port] TREE | filecopy [-n netid] -c CALLS host[:port]");

    client = connect_to(netid, argv[optind]);
    if (client == NULL)
        errx(1, "%s", clnt_spcreateerror(argv[optind]));
    struct timespec start, end;
    clock_gettime(CLOCK_MONOTONIC, &start);
    if (calls > 0)
        make_calls(calls);
    else if (receive)
        receive_tree("", argv[optind + 1]);
    else
        send_tree(argv[optind + 1], "");
    clock_gettime(CLOCK_MONOTONIC, &end);
    clnt_destroy(client);
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) / 1e9;
    if (calls > 0)
        printf("%lu calls, %.3f seconds\n", calls, seconds);
    else
        printf("%lu files, %llu bytes, %.3f seconds\n", files, bytes, seconds);
    return 0;
}
