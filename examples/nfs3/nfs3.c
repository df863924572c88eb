/* nfs3.c: an NFS version 3 client for the command line, as a program of libtirpc and nothing else: the same binary
 * speaks over tcp and over rdma.
 *
 *   nfs3 [-n netid] [-p port] [-m mountport] [-s security] [-e export | -H handle] [-P]
 *        HOST COMMAND [ARGUMENT...]
 *
 *   ls [-l] DIRECTORY       stat PATH               mkdir PATH
 *   get PATH FILE           readlink PATH           rm PATH
 *   put FILE PATH           ln TARGET PATH          check [-N names] [-L lengths] SIZE...
 *   bench read|write SIZE CALLS PATH
 *
 * Paths begin at the export -e (default: "/"); `rm` removes an empty directory too. Without -p the server is looked
 * up with rpcbind. The handle of the export comes from MOUNT over tcp (at -m, or looked up with rpcbind), or is given
 * in hex with -H.
 *
 * -s is how NFS (not MOUNT) knows who calls: sys (the default), or krb5, krb5i, krb5p: RPCSEC_GSS with the service
 * nfs@HOST, which authenticates, also protects against changes, or also encrypts.
 *
 * -P reads into a buffer of this program: libtirpc decodes into the one that the result points to before the call,
 * and allocates one only if there is none.
 *
 * `check` writes files of the sizes, reads them back and compares, makes symbolic links of the lengths -L (separated
 * by commas) and reads them, makes -N files, lists them, and removes them while listing. It says what differs, and
 * then exits with 1.
 *
 * `bench` READs a file or WRITEs one (FILE_SYNC) from its beginning, SIZE bytes a call, one call after the other.
 * It prints microseconds per call, MB/s, and what librpcrdma counted per call, if that is loaded. */
#define _GNU_SOURCE
#include "mount3.h"
#include "nfs3.h"
#include <arpa/inet.h>
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <netconfig.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_GSS
#include <rpc/auth_gss.h>
#include <rpc/rpcsec_gss.h>
#endif

static CLIENT *client;
static nfs_fh3 root;
static uint32 read_most, write_most; /* bytes of one READ and one WRITE: what the server bears, and we */
static char *own_buffer; /* of -P: as long as the longest READ, whatever a server returns */

static const char *name_of(nfsstat3 status)
{
    switch (status) {
#define NAME(x) case x: return #x;
    NAME(NFS3_OK) NAME(NFS3ERR_PERM) NAME(NFS3ERR_NOENT) NAME(NFS3ERR_IO) NAME(NFS3ERR_NXIO) NAME(NFS3ERR_ACCES)
    NAME(NFS3ERR_EXIST) NAME(NFS3ERR_XDEV) NAME(NFS3ERR_NODEV) NAME(NFS3ERR_NOTDIR) NAME(NFS3ERR_ISDIR)
    NAME(NFS3ERR_INVAL) NAME(NFS3ERR_FBIG) NAME(NFS3ERR_NOSPC) NAME(NFS3ERR_ROFS) NAME(NFS3ERR_MLINK)
    NAME(NFS3ERR_NAMETOOLONG) NAME(NFS3ERR_NOTEMPTY) NAME(NFS3ERR_DQUOT) NAME(NFS3ERR_STALE) NAME(NFS3ERR_REMOTE)
    NAME(NFS3ERR_BADHANDLE) NAME(NFS3ERR_NOT_SYNC) NAME(NFS3ERR_BAD_COOKIE) NAME(NFS3ERR_NOTSUPP)
    NAME(NFS3ERR_TOOSMALL) NAME(NFS3ERR_SERVERFAULT) NAME(NFS3ERR_BADTYPE) NAME(NFS3ERR_JUKEBOX)
#undef NAME
    }
    return "an unknown status";
}

/* A call that failed ends the program, and says where. */
static void must(enum clnt_stat outcome, const char *what, const char *path)
{
    if (outcome != RPC_SUCCESS) {
        warnx("%s %s", what, path);
        clnt_perror(client, "server");
        exit(1);
    }
}
static void accept_only(nfsstat3 status, const char *what, const char *path)
{
    if (status != NFS3_OK)
        errx(1, "server: %s %s: %s", what, path, name_of(status));
}

static nfs_fh3 copy_handle(const nfs_fh3 *from)
{
    nfs_fh3 handle = {.data = {.data_len = from->data.data_len, .data_val = malloc(from->data.data_len + 1)}};
    if (handle.data.data_val == NULL)
        err(1, "out of memory");
    memcpy(handle.data.data_val, from->data.data_val, from->data.data_len);
    return handle;
}

static char *text(const char *format, ...)
{
    char *made;
    va_list values;
    va_start(values, format);
    if (vasprintf(&made, format, values) < 0)
        err(1, "out of memory");
    va_end(values);
    return made;
}

/*
 * Calls, each of which succeeds or ends the program.
 */

static nfs_fh3 look_up(nfs_fh3 directory, char *name)
{
    LOOKUP3args args = {.what = {.dir = directory, .name = name}};
    LOOKUP3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_lookup_3(&args, &res, client), "look up", name);
    accept_only(res.status, "look up", name);
    nfs_fh3 found = copy_handle(&res.LOOKUP3res_u.resok.object);
    xdr_free((xdrproc_t)xdr_LOOKUP3res, (char *)&res);
    return found;
}

/* The directory that holds the last component of `path`, and this component. Neither is ever freed: there are only
 * one or two paths in the life of this program. */
static diropargs3 parent_of(const char *path)
{
    diropargs3 at = {.dir = root, .name = NULL};
    while (*(path += strspn(path, "/")) != '\0') {
        size_t length = strcspn(path, "/");
        if (at.name != NULL)
            at.dir = look_up(at.dir, at.name);
        at.name = text("%.*s", (int)length, path);
        path += length;
    }
    return at;
}
static nfs_fh3 handle_at(const char *path)
{
    diropargs3 at = parent_of(path);
    return at.name == NULL ? root : look_up(at.dir, at.name);
}
/* The same for something to be made or removed. */
static diropargs3 name_at(const char *path)
{
    diropargs3 at = parent_of(path);
    if (at.name == NULL)
        errx(2, "%s: this is the exported directory itself", path);
    return at;
}

static fattr3 attributes_of(nfs_fh3 handle, const char *path)
{
    GETATTR3args args = {.object = handle};
    GETATTR3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_getattr_3(&args, &res, client), "get the attributes of", path);
    accept_only(res.status, "get the attributes of", path);
    return res.GETATTR3res_u.resok.obj_attributes;
}

static nfs_fh3 create(diropargs3 where)
{
    CREATE3args args = {.where = where, .how = {.mode = UNCHECKED}};
    sattr3 *set = &args.how.createhow3_u.obj_attributes;
    set->mode.set_it = set->size.set_it = TRUE;
    set->mode.set_mode3_u.mode = 0644;
    CREATE3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_create_3(&args, &res, client), "create", where.name);
    accept_only(res.status, "create", where.name);
    post_op_fh3 *made = &res.CREATE3res_u.resok.obj;
    nfs_fh3 handle =
        made->handle_follows ? copy_handle(&made->post_op_fh3_u.handle) : look_up(where.dir, where.name);
    xdr_free((xdrproc_t)xdr_CREATE3res, (char *)&res);
    return handle;
}

static void make_directory(diropargs3 where)
{
    MKDIR3args args = {.where = where};
    args.attributes.mode.set_it = TRUE;
    args.attributes.mode.set_mode3_u.mode = 0755;
    MKDIR3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_mkdir_3(&args, &res, client), "make directory", where.name);
    accept_only(res.status, "make directory", where.name);
    xdr_free((xdrproc_t)xdr_MKDIR3res, (char *)&res);
}

static void make_link(diropargs3 where, char *target)
{
    SYMLINK3args args = {.where = where, .symlink = {.symlink_data = target}};
    SYMLINK3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_symlink_3(&args, &res, client), "make link", where.name);
    accept_only(res.status, "make link", where.name);
    xdr_free((xdrproc_t)xdr_SYMLINK3res, (char *)&res);
}

/* The caller frees the path. */
static char *read_link(nfs_fh3 handle, const char *path)
{
    READLINK3args args = {.symlink = handle};
    READLINK3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_readlink_3(&args, &res, client), "read link", path);
    accept_only(res.status, "read link", path);
    return res.READLINK3res_u.resok.data;
}

static void remove_name(diropargs3 what)
{
    REMOVE3args args = {.object = what};
    REMOVE3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_remove_3(&args, &res, client), "remove", what.name);
    /* Servers differ in what they answer for a directory. */
    if (res.status == NFS3ERR_ISDIR || res.status == NFS3ERR_PERM) {
        RMDIR3args directory = {.object = what};
        RMDIR3res removed;
        memset(&removed, 0, sizeof removed);
        must(nfsproc3_rmdir_3(&directory, &removed, client), "remove", what.name);
        if (removed.status != NFS3ERR_NOTDIR)
            res.status = removed.status;
    }
    accept_only(res.status, "remove", what.name);
}

/* Writes all of `data`. Returns the verifier of the last reply. */
static void write_piece(nfs_fh3 handle, uint64 offset, char *data, uint32 length, stable_how stable,
                        writeverf3 verf)
{
    uint32 done = 0;
    do {
        WRITE3args args = {.file = handle, .offset = offset + done, .count = length - done, .stable = stable,
                           .data = {.data_val = data + done, .data_len = length - done}};
        WRITE3res res;
        memset(&res, 0, sizeof res);
        must(nfsproc3_write_3(&args, &res, client), "write", "");
        accept_only(res.status, "write", "");
        WRITE3resok *ok = &res.WRITE3res_u.resok;
        if (ok->count > length - done || (ok->count == 0 && length > 0) || ok->committed < stable)
            errx(1, "server: %u of %u bytes written, committed %d", ok->count, length - done, ok->committed);
        memcpy(verf, ok->verf, sizeof(writeverf3));
        done += ok->count;
    } while (done < length);
}

static void commit(nfs_fh3 handle, const writeverf3 written)
{
    COMMIT3args args = {.file = handle};
    COMMIT3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_commit_3(&args, &res, client), "commit", "");
    accept_only(res.status, "commit", "");
    if (memcmp(res.COMMIT3res_u.resok.verf, written, sizeof(writeverf3)) != 0)
        errx(1, "the server has restarted meanwhile: what it had not committed may be lost");
}

/* Reads once. The data are in the result, which end_read() frees. */
static READ3resok *read_piece(nfs_fh3 handle, uint64 offset, uint32 count, READ3res *res)
{
    READ3args args = {.file = handle, .offset = offset, .count = count};
    READ3resok *ok = &res->READ3res_u.resok;
    memset(res, 0, sizeof *res);
    if (own_buffer != NULL) {
        ok->data.data_val = own_buffer;
        ok->data.data_len = NFS3_DATA_LIMIT;
    }
    must(nfsproc3_read_3(&args, res, client), "read", "");
    accept_only(res->status, "read", "");
    if (ok->count != ok->data.data_len || ok->count > count || (ok->count == 0 && count > 0 && !ok->eof))
        errx(1, "server: asked for %u bytes, got %u that are %u", count, ok->count, ok->data.data_len);
    return ok;
}
static void end_read(READ3res *res)
{
    if (own_buffer == NULL)
        xdr_free((xdrproc_t)xdr_READ3res, (char *)res);
}

/* Calls `visit` for each entry of a directory, page by page. */
static void each_entry(nfs_fh3 directory, void (*visit)(const entryplus3 *, void *), void *context)
{
    READDIRPLUS3args args = {.dir = directory, .dircount = 8192, .maxcount = 32768};
    bool last;
    do {
        READDIRPLUS3res res;
        memset(&res, 0, sizeof res);
        must(nfsproc3_readdirplus_3(&args, &res, client), "read directory", "");
        accept_only(res.status, "read directory", "");
        READDIRPLUS3resok *ok = &res.READDIRPLUS3res_u.resok;
        last = ok->reply.eof || ok->reply.entries == NULL;
        memcpy(args.cookieverf, ok->cookieverf, sizeof args.cookieverf);
        for (const entryplus3 *entry = ok->reply.entries; entry != NULL; entry = entry->nextentry) {
            args.cookie = entry->cookie;
            visit(entry, context);
        }
        xdr_free((xdrproc_t)xdr_READDIRPLUS3res, (char *)&res);
    } while (!last);
}

/*
 * Commands.
 */

static void print_attributes(const fattr3 *a)
{
    static const char types[] = "?-dbclsp";
    time_t seconds = a->mtime.seconds;
    char when[32];
    strftime(when, sizeof when, "%F %T", gmtime(&seconds));
    printf("%c%04o %3u %5u %5u %12llu %s ", types[a->type <= NF3FIFO ? a->type : 0], a->mode & 07777, a->nlink,
           a->uid, a->gid, (unsigned long long)a->size, when);
}

static void print_entry(const entryplus3 *entry, void *is_long)
{
    if (*(bool *)is_long && entry->name_attributes.attributes_follow)
        print_attributes(&entry->name_attributes.post_op_attr_u.attributes);
    puts(entry->name);
}

static void get(const char *path, const char *local)
{
    nfs_fh3 handle = handle_at(path);
    FILE *file = fopen(local, "w");
    if (file == NULL)
        err(1, "%s", local);
    bool eof;
    uint64 offset = 0;
    do {
        READ3res res;
        READ3resok *ok = read_piece(handle, offset, read_most, &res);
        if (fwrite(ok->data.data_val, 1, ok->count, file) != ok->count)
            err(1, "%s", local);
        offset += ok->count;
        eof = ok->eof;
        end_read(&res);
    } while (!eof);
    if (fclose(file) != 0)
        err(1, "%s", local);
}

static void put(const char *local, const char *path)
{
    static char piece[NFS3_DATA_LIMIT];
    FILE *file = fopen(local, "r");
    if (file == NULL)
        err(1, "%s", local);
    nfs_fh3 handle = create(name_at(path));
    writeverf3 first, now;
    uint64 offset = 0;
    size_t length;
    while ((length = fread(piece, 1, write_most, file)) > 0) {
        write_piece(handle, offset, piece, (uint32)length, UNSTABLE, now);
        if (offset == 0)
            memcpy(first, now, sizeof first);
        offset += length;
    }
    if (ferror(file))
        err(1, "%s", local);
    /* With the verifier of the first reply, so that a restart at any time after it shows. */
    if (offset > 0)
        commit(handle, first);
    fclose(file);
}

/*
 * check.
 */

static unsigned differences;

__attribute__((format(printf, 1, 2))) static void differs(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fputs("differs: ", stdout);
    vprintf(format, values);
    putchar('\n');
    va_end(values);
    differences++;
}

/* Bytes in which a piece that was left out or moved does not go unnoticed. */
static void fill(unsigned char *data, size_t length, unsigned seed)
{
    uint32_t x = seed * 2654435761u + 1;
    for (size_t i = 0; i < length; i++) {
        x = x * 1664525u + 1013904223u;
        data[i] = (unsigned char)(x >> 24);
    }
}

static void compare(const char *what, size_t size, uint64 offset, const READ3resok *ok, const unsigned char *want)
{
    for (uint32 i = 0; i < ok->count; i++) {
        if ((unsigned char)ok->data.data_val[i] != want[offset + i]) {
            differs("size %zu, %s: byte %llu is %02x and was %02x", size, what, (unsigned long long)offset + i,
                    (unsigned char)ok->data.data_val[i], want[offset + i]);
            return;
        }
    }
}

static void check_file(nfs_fh3 directory, size_t size, unsigned number)
{
    static const char *stabilities[] = {"UNSTABLE", "DATA_SYNC", "FILE_SYNC"};
    stable_how stable = (stable_how)(number % 3);
    char *name = text("size %zu %s", size, stabilities[stable]);
    diropargs3 where = {.dir = directory, .name = name};
    nfs_fh3 handle = create(where);
    unsigned char *data = malloc(size + 1);
    if (data == NULL)
        err(1, "out of memory");
    fill(data, size, number);

    writeverf3 verf = {0};
    uint64 offset = 0;
    do {
        uint32 length = size - offset < write_most ? (uint32)(size - offset) : write_most;
        write_piece(handle, offset, (char *)data + offset, length, stable, verf);
        offset += length;
    } while (offset < size);
    if (stable == UNSTABLE)
        commit(handle, verf);

    fattr3 attributes = attributes_of(handle, name);
    if (attributes.size != size || attributes.type != NF3REG)
        differs("size %zu: the server says %llu, type %d", size, (unsigned long long)attributes.size,
                attributes.type);

    /* All of it; more than there is; and, if there is a middle, the middle from an odd offset to an odd end. */
    READ3res res;
    bool eof = false;
    for (offset = 0; !eof; end_read(&res)) {
        READ3resok *ok = read_piece(handle, offset, read_most, &res);
        eof = ok->eof;
        if (ok->count > size - offset || (eof && offset + ok->count < size)) {
            differs("size %zu: %u bytes at %llu, eof %d", size, ok->count, (unsigned long long)offset, eof);
            eof = true;
        } else {
            compare("whole", size, offset, ok, data);
        }
        offset += ok->count;
    }
    if (size > 0 && size <= read_most) {
        READ3resok *ok = read_piece(handle, 0, (uint32)size, &res);
        if (ok->count == size && ok->eof)
            compare("exactly", size, 0, ok, data);
        else
            differs("size %zu: read exactly, got %u bytes, eof %d", size, ok->count, ok->eof);
        end_read(&res);
    }
    if (size > 4) {
        uint32 length = size - 4 < read_most ? (uint32)(size - 4) | 1 : read_most - 1;
        READ3resok *ok = read_piece(handle, 3, length, &res);
        uint32 want = length < size - 3 ? length : (uint32)(size - 3);
        if (ok->count == want)
            compare("middle", size, 3, ok, data);
        else
            differs("size %zu: %u bytes from the middle, not %u", size, ok->count, want);
        end_read(&res);
    }
    READ3resok *ok = read_piece(handle, size + 1, 100, &res);
    if (ok->count != 0 || !ok->eof)
        differs("size %zu: %u bytes after the end, eof %d", size, ok->count, ok->eof);
    end_read(&res);

    remove_name(where);
    free(data);
    free(handle.data.data_val);
    free(name);
}

static void check_link(nfs_fh3 directory, size_t length)
{
    char *name = text("link %zu", length), *target = malloc(length + 1);
    if (target == NULL)
        err(1, "out of memory");
    for (size_t i = 0; i < length; i++)
        target[i] = i % 64 == 63 ? '/' : (char)('a' + (i * 7 + length) % 26);
    target[length] = '\0';
    diropargs3 where = {.dir = directory, .name = name};
    make_link(where, target);
    nfs_fh3 handle = look_up(directory, name);
    char *got = read_link(handle, name);
    if (strcmp(got, target) != 0)
        differs("link of %zu bytes: %zu came back", length, strlen(got));
    remove_name(where);
    free(got);
    free(handle.data.data_val);
    free(target);
    free(name);
}

struct seen {
    unsigned count, *times;
    nfs_fh3 *remove_from; /* NULL: only look */
};
static char *name_of_file(unsigned i)
{
    /* Of all lengths from 6 to 250. */
    char *name = text("n %04u%*s", i, (int)(i * 13 % 245), "");
    for (char *at = name + 6; *at != '\0'; at++)
        *at = 'x';
    return name;
}
static void see(const entryplus3 *entry, void *context)
{
    struct seen *seen = context;
    unsigned i;
    if (strcmp(entry->name, ".") == 0 || strcmp(entry->name, "..") == 0)
        return;
    if (sscanf(entry->name, "n %u", &i) != 1 || i >= seen->count) {
        differs("name \"%s\" was never made", entry->name);
        return;
    }
    char *want = name_of_file(i);
    if (strcmp(entry->name, want) != 0)
        differs("name \"%s\" should be \"%s\"", entry->name, want);
    free(want);
    seen->times[i]++;
    const post_op_attr *attributes = &entry->name_attributes;
    if (attributes->attributes_follow && (attributes->post_op_attr_u.attributes.type != NF3REG ||
                                          attributes->post_op_attr_u.attributes.fileid != entry->fileid))
        differs("name \"%s\": the attributes are those of something else", entry->name);
    if (seen->remove_from != NULL)
        remove_name((diropargs3){.dir = *seen->remove_from, .name = entry->name});
}

static void check_names(nfs_fh3 directory, unsigned count)
{
    struct seen seen = {.count = count, .times = calloc(count + 1, sizeof *seen.times)};
    if (seen.times == NULL)
        err(1, "out of memory");
    for (unsigned i = 0; i < count; i++) {
        char *name = name_of_file(i);
        nfs_fh3 handle = create((diropargs3){.dir = directory, .name = name});
        free(handle.data.data_val);
        free(name);
    }
    each_entry(directory, see, &seen);
    /* Once more, removing each name as it comes: the others must come all the same. */
    seen.remove_from = &directory;
    each_entry(directory, see, &seen);
    for (unsigned i = 0; i < count; i++) {
        char *name = name_of_file(i);
        if (seen.times[i] != 2)
            differs("name \"%s\" was listed %u times in two lists", name, seen.times[i]);
        free(name);
    }
    free(seen.times);
}

static unsigned long number_of(const char *word)
{
    char *end;
    unsigned long number = strtoul(word, &end, 10);
    if (*end != '\0' || end == word || number > 1ul << 40)
        errx(2, "%s: not a number", word);
    return number;
}

static int check(int argc, char **argv)
{
    unsigned names = 300, links = 0;
    char *lengths = NULL;
    int option;
    optind = 1;
    while ((option = getopt(argc, argv, "+N:L:")) != -1) {
        switch (option) {
        case 'N': names = (unsigned)number_of(optarg); break;
        case 'L': lengths = optarg; break;
        default: errx(2, "usage: check [-N names] [-L length,length...] SIZE...");
        }
    }
    char *name = text("check %ld", (long)getpid());
    diropargs3 where = {.dir = root, .name = name};
    make_directory(where);
    nfs_fh3 directory = look_up(root, name);
    for (int i = optind; i < argc; i++)
        check_file(directory, number_of(argv[i]), (unsigned)(i - optind));
    for (char *word = lengths ? strtok(lengths, ",") : NULL; word != NULL; word = strtok(NULL, ","), links++)
        check_link(directory, number_of(word));
    check_names(directory, names);
    remove_name(where);
    free(directory.data.data_val);
    free(name);
    printf("%d sizes, %u links, %u names: %u differences\n", argc - optind, links, names, differences);
    return differences > 0;
}

/*
 * bench.
 */

/* The counters of struct rpcrdma_stats, up to the last one that is shown. */
enum { COPIED = 6, REGISTRATIONS = 8, SENDS = 10, SYSCALLS = 12, DOORBELLS = 20, BINDS, COUNTERS };

static bool read_counters(uint64_t *counters)
{
    int (*get)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))dlsym(RTLD_DEFAULT, "rpcrdma_stats_get");
    return get != NULL && get(counters, COUNTERS * sizeof *counters);
}

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void bench(const char *what, unsigned long size, unsigned long calls, const char *path)
{
    bool reads = strcmp(what, "read") == 0;
    uint32 most = reads ? read_most : write_most;
    if ((!reads && strcmp(what, "write") != 0) || size == 0 || size > most || calls == 0)
        errx(2, "bench read|write SIZE CALLS PATH; at most %u bytes a call", most);
    nfs_fh3 handle = reads ? handle_at(path) : create(name_at(path));
    unsigned char *data = malloc(size);
    if (data == NULL)
        err(1, "out of memory");
    fill(data, size, 1);
    double began = 0;
    uint64_t before[COUNTERS] = {0}, after[COUNTERS] = {0};
    /* The first call is not counted, since nothing is prepared for it. */
    for (unsigned long i = 0; i <= calls; i++) {
        if (i == 1) {
            read_counters(before);
            began = seconds_now();
        }
        uint64 offset = (uint64)(i > 0 ? i - 1 : 0) * size;
        if (reads) {
            READ3res res;
            if (read_piece(handle, offset, (uint32)size, &res)->count != size)
                errx(1, "%s has less than %lu bytes", path, size * calls);
            end_read(&res);
        } else {
            writeverf3 verf;
            write_piece(handle, offset, (char *)data, (uint32)size, FILE_SYNC, verf);
        }
    }
    double micros = (seconds_now() - began) / (double)calls * 1e6;
    printf("%s %lu: %.1f us, %.2f MB/s", what, size, micros, (double)size / micros);
    if (read_counters(after)) {
        for (int i = 0; i < COUNTERS; i++)
            after[i] -= before[i];
        double count = (double)calls;
        printf("; per call %.1f bytes copied, %.2f registrations, %.2f binds, %.2f Sends, %.2f doorbells, "
               "%.2f system calls",
               (double)after[COPIED] / count, (double)after[REGISTRATIONS] / count, (double)after[BINDS] / count,
               (double)after[SENDS] / count, (double)after[DOORBELLS] / count, (double)after[SYSCALLS] / count);
    }
    putchar('\n');
    free(data);
}

/*
 * Connecting.
 */

static CLIENT *connect_to(const char *host, const char *port, const char *netid, rpcprog_t program)
{
    CLIENT *made;
    if (port == NULL) {
        made = clnt_create(host, program, 3, netid);
    } else {
        struct addrinfo *found, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
        int error = getaddrinfo(host, port, &hints, &found);
        if (error != 0)
            errx(1, "%s: %s", host, gai_strerror(error));
        struct netconfig *config = getnetconfigent(netid);
        if (config == NULL)
            errx(1, "%s: no such netid (for rdma, is librpcrdma loaded?)", netid);
        struct netbuf address = {.maxlen = found->ai_addrlen, .len = found->ai_addrlen, .buf = found->ai_addr};
        made = clnt_tli_create(RPC_ANYFD, config, &address, program, 3, 0, 0);
        freenetconfigent(config);
        freeaddrinfo(found);
    }
    if (made == NULL) {
        clnt_pcreateerror(host);
        exit(1);
    }
    made->cl_auth = authunix_create_default();
    return made;
}

/* The service of RPCSEC_GSS that a word of -s means, as on the wire (RFC 2203); 0 for AUTH_SYS. */
static int service_of(const char *word)
{
    static const char *const words[] = {"sys", "krb5", "krb5i", "krb5p"};
    for (int service = 0; service < 4; service++)
        if (strcmp(word, words[service]) == 0)
            return service;
    errx(2, "%s: not sys, krb5, krb5i or krb5p", word);
}

#ifdef WITH_GSS
static AUTH *secured(const char *host, int service)
{
    char *principal = text("nfs@%s", host);
    rpc_gss_options_ret_t details = {0};
    AUTH *auth = rpc_gss_seccreate(client, principal, "kerberos_v5", (rpc_gss_service_t)service, NULL, NULL,
                                   &details);
    if (auth == NULL) {
        rpc_gss_error_t error;
        rpc_gss_get_error(&error);
        errx(1, "%s: no security context: error %d, system error %d, GSS %#x %d", principal, error.rpc_gss_error,
             error.system_error, (unsigned)details.major_status, details.minor_status);
    }
    free(principal);
    return auth;
}
#else
static AUTH *secured(const char *host, int service)
{
    errx(2, "%s: service %d: built without RPCSEC_GSS", host, service);
}
#endif

static nfs_fh3 mount_root(const char *host, const char *port, dirpath path)
{
    client = connect_to(host, port, "tcp", MOUNT_PROGRAM);
    mountres3 res;
    memset(&res, 0, sizeof res);
    must(mountproc3_mnt_3(&path, &res, client), "mount", path);
    /* The errors of MOUNT have the numbers and meanings of those of NFS. */
    accept_only((nfsstat3)res.fhs_status, "mount", path);
    fhandle3 *got = &res.mountres3_u.mountinfo.fhandle;
    nfs_fh3 handle = {.data = {.data_len = got->fhandle3_len, .data_val = got->fhandle3_val}};
    nfs_fh3 copy = copy_handle(&handle);
    xdr_free((xdrproc_t)xdr_mountres3, (char *)&res);
    auth_destroy(client->cl_auth);
    clnt_destroy(client);
    return copy;
}

static void ask_limits(void)
{
    FSINFOargs args = {.fsroot = root};
    FSINFO3res res;
    memset(&res, 0, sizeof res);
    must(nfsproc3_fsinfo_3(&args, &res, client), "fsinfo", "");
    accept_only(res.status, "fsinfo", "");
    FSINFO3resok *ok = &res.FSINFO3res_u.resok;
    if (ok->rtmax < 1024 || ok->wtmax < 1024)
        errx(1, "server: at most %u bytes of a READ and %u of a WRITE", ok->rtmax, ok->wtmax);
    read_most = ok->rtmax < NFS3_DATA_LIMIT ? ok->rtmax : NFS3_DATA_LIMIT;
    write_most = ok->wtmax < NFS3_DATA_LIMIT ? ok->wtmax : NFS3_DATA_LIMIT;
    xdr_free((xdrproc_t)xdr_FSINFO3res, (char *)&res);
}

static nfs_fh3 handle_from_hex(const char *hex)
{
    char bytes[NFS3_FHSIZE];
    nfs_fh3 handle = {.data = {.data_val = bytes}};
    for (; hex[0] != '\0'; hex += 2) {
        unsigned byte;
        int used;
        if (handle.data.data_len == sizeof bytes || sscanf(hex, "%2x%n", &byte, &used) != 1 || used != 2)
            errx(2, "a handle is at most %zu bytes in hex", sizeof bytes);
        bytes[handle.data.data_len++] = (char)byte;
    }
    return copy_handle(&handle);
}

static int run(int argc, char **argv)
{
    const char *command = argv[0], *first = argc > 1 ? argv[1] : "", *second = argc > 2 ? argv[2] : "";
    if (strcmp(command, "check") == 0)
        return check(argc, argv);
    if (strcmp(command, "bench") == 0 && argc == 5) {
        bench(first, number_of(second), number_of(argv[3]), argv[4]);
        return 0;
    }
    if (strcmp(command, "ls") == 0 && (argc == 2 || (argc == 3 && strcmp(first, "-l") == 0))) {
        bool is_long = argc == 3;
        each_entry(handle_at(argv[argc - 1]), print_entry, &is_long);
    } else if (strcmp(command, "stat") == 0 && argc == 2) {
        nfs_fh3 handle = handle_at(first);
        fattr3 attributes = attributes_of(handle, first);
        print_attributes(&attributes);
        printf("%s\nhandle ", first);
        for (u_int i = 0; i < handle.data.data_len; i++)
            printf("%02x", (unsigned char)handle.data.data_val[i]);
        putchar('\n');
    } else if (strcmp(command, "get") == 0 && argc == 3) {
        get(first, second);
    } else if (strcmp(command, "put") == 0 && argc == 3) {
        put(first, second);
    } else if (strcmp(command, "readlink") == 0 && argc == 2) {
        char *target = read_link(handle_at(first), first);
        puts(target);
        free(target);
    } else if (strcmp(command, "ln") == 0 && argc == 3) {
        make_link(name_at(second), argv[1]);
    } else if (strcmp(command, "mkdir") == 0 && argc == 2) {
        make_directory(name_at(first));
    } else if (strcmp(command, "rm") == 0 && argc == 2) {
        remove_name(name_at(first));
    } else {
        errx(2, "%s: no such command, or not so many arguments", command);
    }
    return 0;
}

int main(int argc, char **argv)
{
    const char *netid = "tcp", *port = NULL, *mount_port = NULL, *handle = NULL;
    int service = 0;
    char *path = "/";
    bool own = false;
    int option;
    while ((option = getopt(argc, argv, "+n:p:m:s:e:H:P")) != -1) {
        switch (option) {
        case 'n': netid = optarg; break;
        case 'p': port = optarg; break;
        case 'm': mount_port = optarg; break;
        case 's': service = service_of(optarg); break;
        case 'e': path = optarg; break;
        case 'H': handle = optarg; break;
        case 'P': own = true; break;
        default: argc = 0;
        }
    }
    if (argc - optind < 2)
        errx(2, "usage: nfs3 [-n netid] [-p port] [-m mountport] [-s security] [-e export | -H handle] [-P] "
                "HOST COMMAND [ARGUMENT...]");
    const char *host = argv[optind];
    if (own && (own_buffer = malloc(NFS3_DATA_LIMIT)) == NULL)
        err(1, "out of memory");
    root = handle != NULL ? handle_from_hex(handle) : mount_root(host, mount_port, path);
    client = connect_to(host, port, netid, NFS_PROGRAM);
    if (service > 0) {
        AUTH *by_name = client->cl_auth;
        client->cl_auth = secured(host, service);
        auth_destroy(by_name);
    }
    ask_limits();
    int result = run(argc - optind - 1, argv + optind + 1);
    auth_destroy(client->cl_auth);
    clnt_destroy(client);
    free(root.data.data_val);
    free(own_buffer);
    return result;
}
