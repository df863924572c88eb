/* fileserver.c: serves one directory. It uses only libtirpc: the same binary serves over tcp and over rdma.
 *
 *   fileserver [-n netid] [-p port] [-a address] [-d directory]
 *
 * Without -p it registers with rpcbind (svc_create). With -p it listens on that port (0: any free one) of the
 * IPv4 address -a (default: all) and does not register with rpcbind, so an ordinary user can run it. When it can be
 * called it prints "READY port".
 *
 * Every path is walked one component at a time, below the directory, following no symbolic link: a client reaches
 * nothing else, whatever the path says. */
#define _GNU_SOURCE
#include "fileservice.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netconfig.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void fs_program_1(struct svc_req *, SVCXPRT *);

static int root;

/* Opens the directory that holds the last component of `path` and points *name at a copy of that component
 * ("" for the root itself). Returns the descriptor, or -1 and errno. */
static int open_parent(const char *path, char name[FS_NAME_MAX + 1])
{
    int directory = dup(root);
    name[0] = '\0';
    while (directory >= 0 && *path != '\0') {
        size_t length = strcspn(path, "/");
        bool refused = length == 0 || (length == 1 && path[0] == '.') || (length == 2 && strncmp(path, "..", 2) == 0);
        if (refused || length > FS_NAME_MAX) {
            close(directory);
            errno = refused ? EACCES : ENAMETOOLONG;
            return -1;
        }
        memcpy(name, path, length);
        name[length] = '\0';
        path += length;
        if (*path == '/') {
            int next = openat(directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            int error = errno;
            close(directory);
            errno = error;
            directory = next;
            path++;
            if (*path == '\0' && directory >= 0) { /* "a/b/": a trailing slash names nothing */
                close(directory);
                errno = EACCES;
                return -1;
            }
        }
    }
    return directory;
}

/* Opens what `path` names. Returns the descriptor, or -1 and errno. */
static int open_path(const char *path, int flags, mode_t mode)
{
    char name[FS_NAME_MAX + 1];
    int parent = open_parent(path, name);
    if (parent < 0)
        return -1;
    int fd = openat(parent, name[0] ? name : ".", flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, mode);
    int error = errno;
    close(parent);
    errno = error;
    return fd;
}

static fs_attributes attributes_of(const struct stat *st)
{
    return (fs_attributes){
        .kind = S_ISREG(st->st_mode) ? FS_FILE : S_ISDIR(st->st_mode) ? FS_DIRECTORY : FS_OTHER,
        .mode = st->st_mode & 07777,
        .size = (u_quad_t)st->st_size,
        .modified = st->st_mtime,
    };
}

bool_t fs_null_1_svc(void *argument, void *result, struct svc_req *request)
{
    (void)argument, (void)result, (void)request;
    return TRUE;
}

bool_t fs_stat_1_svc(fs_path *path, fs_stat_result *result, struct svc_req *request)
{
    (void)request;
    memset(result, 0, sizeof *result);
    char name[FS_NAME_MAX + 1];
    struct stat st;
    int parent = open_parent(*path, name);
    if (parent < 0 || fstatat(parent, name, &st, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH) < 0)
        result->error = errno;
    else
        result->fs_stat_result_u.attributes = attributes_of(&st);
    if (parent >= 0)
        close(parent);
    return TRUE;
}

bool_t fs_list_1_svc(fs_list_args *args, fs_list_result *result, struct svc_req *request)
{
    (void)request;
    memset(result, 0, sizeof *result);
    int directory = open_path(args->directory, O_RDONLY | O_DIRECTORY, 0);
    struct dirent **names;
    int count = directory < 0 ? -1 : scandirat(directory, ".", &names, NULL, alphasort);
    if (count < 0) {
        result->error = errno;
        if (directory >= 0)
            close(directory);
        return TRUE;
    }
    fs_page *page = &result->fs_list_result_u.page;
    unsigned most = args->most == 0 || args->most > FS_PAGE_MAX ? FS_PAGE_MAX : args->most;
    page->entries.entries_val = calloc(most, sizeof(fs_entry));
    page->last = TRUE;
    for (int i = 0; i < count; i++) {
        const char *name = names[i]->d_name;
        struct stat st;
        bool wanted = strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strcoll(name, args->after) > 0;
        /* A name that is gone by now is left out, as if the page had been asked for a moment later. */
        if (wanted && page->last && fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW) == 0) {
            if (page->entries.entries_len == most || page->entries.entries_val == NULL) {
                page->last = FALSE;
            } else {
                fs_entry *entry = &page->entries.entries_val[page->entries.entries_len++];
                entry->name = strdup(name);
                entry->attributes = attributes_of(&st);
            }
        }
        free(names[i]);
    }
    free(names);
    close(directory);
    return TRUE;
}

bool_t fs_make_directory_1_svc(fs_make_args *args, int *result, struct svc_req *request)
{
    (void)request;
    char name[FS_NAME_MAX + 1];
    int parent = open_parent(args->path, name);
    *result = parent >= 0 && mkdirat(parent, name, args->mode & 0777) == 0 ? 0 : errno;
    if (parent >= 0)
        close(parent);
    return TRUE;
}

bool_t fs_write_1_svc(fs_write_args *args, int *result, struct svc_req *request)
{
    (void)request;
    *result = 0;
    int fd = open_path(args->path, O_WRONLY | O_CREAT, args->mode & 0777);
    size_t done = 0;
    while (fd >= 0 && done < args->data.fs_data_len) {
        ssize_t n = pwrite(fd, args->data.fs_data_val + done, args->data.fs_data_len - done, (off_t)(args->offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            break;
        done += (size_t)n;
    }
    if (fd < 0 || done < args->data.fs_data_len)
        *result = errno;
    if (fd >= 0 && close(fd) < 0 && *result == 0)
        *result = errno;
    return TRUE;
}

bool_t fs_read_1_svc(fs_read_args *args, fs_read_result *result, struct svc_req *request)
{
    (void)request;
    memset(result, 0, sizeof *result);
    u_int count = args->count > FS_IO_MAX ? FS_IO_MAX : args->count;
    int fd = open_path(args->path, O_RDONLY, 0);
    char *bytes = fd < 0 ? NULL : malloc(count ? count : 1);
    size_t done = 0;
    ssize_t n = 0;
    while (bytes != NULL && done < count) {
        n = pread(fd, bytes + done, count - done, (off_t)(args->offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        done += (size_t)n;
    }
    if (bytes == NULL || n < 0) {
        result->error = errno;
        free(bytes);
    } else {
        result->fs_read_result_u.data = (fs_data){.fs_data_len = (u_int)done, .fs_data_val = bytes};
    }
    if (fd >= 0)
        close(fd);
    return TRUE;
}

int fs_program_1_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport;
    xdr_free(xdr_result, result);
    return 1;
}

/* Listens on `port` of `where`, without registering with rpcbind. Returns the port. */
static unsigned listen_on(const char *netid, const char *where, unsigned port)
{
    struct netconfig *config = getnetconfigent(netid);
    if (config == NULL)
        errx(1, "%s: no such netid (for rdma, is librpcrdma loaded?)", netid);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, where, &address.sin_addr) != 1)
        errx(2, "%s: not an IPv4 address", where);
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address}, .qlen = 64};
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, config, &bind_to, 0, 0);
    if (listener == NULL)
        errx(1, "cannot listen on %s port %u", netid, port);
    if (!svc_reg(listener, FS_PROGRAM, FS_VERSION, fs_program_1, NULL))
        errx(1, "cannot register the program");
    freenetconfigent(config);
    return ntohs(((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port);
}

int main(int argc, char **argv)
{
    const char *netid = "tcp", *directory = ".", *address = "0.0.0.0", *wanted_port = NULL;
    int option;
    while ((option = getopt(argc, argv, "n:p:a:d:")) != -1) {
        switch (option) {
        case 'n': netid = optarg; break;
        case 'p': wanted_port = optarg; break;
        case 'a': address = optarg; break;
        case 'd': directory = optarg; break;
        default: errx(2, "usage: fileserver [-n netid] [-p port] [-a address] [-d directory]");
        }
    }
    root = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        err(1, "%s", directory);
    umask(0);

    unsigned port = 0;
    if (wanted_port != NULL) {
        char *end;
        unsigned long number = strtoul(wanted_port, &end, 10);
        if (*end != '\0' || end == wanted_port || number > 65535)
            errx(2, "%s: not a port", wanted_port);
        port = listen_on(netid, address, (unsigned)number);
    } else if (svc_create(fs_program_1, FS_PROGRAM, FS_VERSION, netid) == 0) {
        errx(1, "cannot create the service on %s", netid);
    }
    signal(SIGPIPE, SIG_IGN);
    printf("READY %u\n", port);
    fflush(stdout);
    svc_run();
    errx(1, "svc_run returned");
}
