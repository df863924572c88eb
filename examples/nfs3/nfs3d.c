/* nfs3d.c: an NFS version 3 server, with MOUNT, as a program of libtirpc and nothing else: the same binary serves
 * over tcp and over rdma.
 *
 *   nfs3d [-n netid] [-d directory] [-a address] [-p port] [-m mountport] [-t threads]
 *
 * Exports the directory -d (default: the working directory) as "/", under its own path too. Without -a, -p and -m
 * it registers with rpcbind: NFS on the netid -n (default: tcp), MOUNT always on tcp. With one of them it listens
 * on those ports (0, the default: any free one; 20049 is that of NFS over RDMA) of the IPv4 address -a (default:
 * all) and does not register with rpcbind, so an ordinary user can run it. When it can be called it prints "READY
 * port mountport".
 *
 * With -t that many threads serve, for which librpcrdma must be loaded (rpcrdma_svc_run).
 *
 * Run by root it acts as the user that an AUTH_SYS credential names, even root, and as nobody for other
 * credentials. It believes what it is told, and is meant for a trusted network. Run by somebody else it does
 * everything as that user.
 *
 * Missing: a cache of replies, so a REMOVE that is sent again finds nothing to remove; and names are made no more
 * durable than the file system makes them by itself. Data are: DATA_SYNC, FILE_SYNC and COMMIT wait for the
 * disk. */
#define _GNU_SOURCE
#include "handles.h"
#include "mount3.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <netconfig.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

void nfs_program_3(struct svc_req *, SVCXPRT *);
void mount_program_3(struct svc_req *, SVCXPRT *);

enum {
    PAGE_MAX = 65536, /* longest result of READDIR and READDIRPLUS */
    NOBODY = 65534,
};
/* The kernel takes offsets of 63 bits, NFS those of 64. No file has bytes beyond this. */
static const uint64 OFFSET_MAX = INT64_MAX;

static char *exported;      /* its real path */
static writeverf3 verifier; /* of WRITE and COMMIT: another one after a restart */
static __thread uid_t acting; /* whose rights the file system checks just now */
/* What READ returns. One for each thread is enough: a reply has been sent, or copied, before the next call is dispatched. */
static __thread char *read_data;

static nfsstat3 status_of(int error)
{
    switch (error) {
    /* These have the same numbers as in Linux. */
    case EPERM: case ENOENT: case EIO: case ENXIO: case EACCES: case EEXIST: case EXDEV: case ENODEV:
    case ENOTDIR: case EISDIR: case EINVAL: case EFBIG: case ENOSPC: case EROFS: case EMLINK:
        return (nfsstat3)error;
    case ENAMETOOLONG: return NFS3ERR_NAMETOOLONG;
    case ENOTEMPTY: return NFS3ERR_NOTEMPTY;
    case EDQUOT: return NFS3ERR_DQUOT;
    case ESTALE: return NFS3ERR_STALE;
    case EBADF: return NFS3ERR_BADHANDLE;
    case EOPNOTSUPP: return NFS3ERR_NOTSUPP;
    case ETXTBSY: return NFS3ERR_ACCES;
    case EBUSY: return NFS3ERR_EXIST;
    case ELOOP: return NFS3ERR_INVAL;
    case EMFILE: case ENFILE: case ENOMEM: case EAGAIN: return NFS3ERR_JUKEBOX;
    default: return NFS3ERR_IO;
    }
}

static nfsstat3 result_of(int outcome)
{
    return outcome < 0 ? status_of(errno) : NFS3_OK;
}

/* setgroups(2) for this thread only: libc's function does it for all threads. */
static int set_groups(size_t count, const gid_t *groups)
{
    return (int)syscall(SYS_setgroups, count, groups);
}

/* Makes the file system check the rights of whoever calls, for this thread; with NULL, those of this process. */
static void act_for(struct svc_req *request)
{
    static __thread bool changed;
    if (geteuid() != 0) {
        acting = geteuid();
        return;
    }
    if (changed) {
        setfsuid(0);
        setfsgid(getegid());
        set_groups(0, NULL);
        changed = false;
    }
    acting = 0;
    if (request == NULL)
        return;
    uid_t uid = NOBODY;
    gid_t gid = NOBODY;
    if (request->rq_cred.oa_flavor == AUTH_SYS) {
        struct authunix_parms *caller = (struct authunix_parms *)request->rq_clntcred;
        if (caller->aup_uid == 0)
            return;
        /* -1 is no user's number: the kernel would take it to mean "leave it as it is". */
        if (caller->aup_uid != (uid_t)-1 && caller->aup_gid != (gid_t)-1 &&
            set_groups(caller->aup_len, caller->aup_gids) == 0) {
            uid = caller->aup_uid;
            gid = caller->aup_gid;
        }
    }
    if (uid == NOBODY && set_groups(0, NULL) < 0)
        err(1, "setgroups");
    changed = true;
    acting = uid;
    setfsgid(gid);
    setfsuid(uid);
    /* Only what these two return the next time shows whether they worked. */
    if ((gid_t)setfsgid(gid) != gid || (uid_t)setfsuid(uid) != uid)
        err(1, "cannot act as user %u", (unsigned)uid);
}

/* What each call begins with: opens its file, then acts for the caller. The path to the file is not walked as the caller:
 * whoever has a handle needs no right to search the directories above. */
static nfsstat3 enter(struct svc_req *request, const nfs_fh3 *handle, struct object *object)
{
    act_for(NULL);
    nfsstat3 status = result_of(open_handle(handle, object));
    act_for(request);
    return status;
}

/* A path that leads to the opened file itself, for the functions that take no descriptor made with O_PATH. */
struct path {
    char text[32];
};
static struct path path_of(const struct object *object)
{
    struct path path;
    snprintf(path.text, sizeof path.text, "/proc/self/fd/%d", object->fd);
    return path;
}

/* Opens a regular file for data. Returns the descriptor, or -1 and errno. */
static int open_data(const struct object *object, int flags)
{
    mode_t mode = object->st.stx_mode;
    if (!S_ISREG(mode)) {
        errno = S_ISDIR(mode) ? EISDIR : EINVAL;
        return -1;
    }
    struct path path = path_of(object);
    int fd = open(path.text, flags | O_CLOEXEC);
    if (fd >= 0 || errno != EACCES || object->st.stx_uid != acting)
        return fd;
    /* A client that has created a file read-only goes on writing it, as a local program does with the descriptor that
     * it has. RFC 1813 section 4.4: the owner is let in, whatever the mode says. */
    lock_files();
    struct object now = *object;
    if (read_attributes(&now) == 0 && chmod(path.text, (now.st.stx_mode & 07777) | 0600) == 0) {
        fd = open(path.text, flags | O_CLOEXEC);
        int error = errno;
        chmod(path.text, now.st.stx_mode & 07777);
        errno = error;
    } else {
        errno = EACCES;
    }
    unlock_files();
    return fd;
}

static nfstime3 time_of(struct statx_timestamp time)
{
    return (nfstime3){.seconds = (uint32)time.tv_sec, .nseconds = time.tv_nsec};
}

static fattr3 attributes_of(const struct statx *st)
{
    static const ftype3 types[16] = {[S_IFREG >> 12] = NF3REG, [S_IFDIR >> 12] = NF3DIR, [S_IFBLK >> 12] = NF3BLK,
        [S_IFCHR >> 12] = NF3CHR, [S_IFLNK >> 12] = NF3LNK, [S_IFSOCK >> 12] = NF3SOCK, [S_IFIFO >> 12] = NF3FIFO};
    return (fattr3){
        .type = types[st->stx_mode >> 12],
        .mode = st->stx_mode & 07777,
        .nlink = st->stx_nlink,
        .uid = st->stx_uid,
        .gid = st->stx_gid,
        .size = st->stx_size,
        .used = st->stx_blocks * 512,
        .rdev = {.specdata1 = st->stx_rdev_major, .specdata2 = st->stx_rdev_minor},
        .fsid = makedev(st->stx_dev_major, st->stx_dev_minor),
        .fileid = st->stx_ino,
        .atime = time_of(st->stx_atime),
        .mtime = time_of(st->stx_mtime),
        .ctime = time_of(st->stx_ctime),
    };
}

/* The attributes now, at the end of a call. */
static post_op_attr after(const struct object *object)
{
    struct object now = {.fd = object->fd};
    post_op_attr attributes = {.attributes_follow = FALSE};
    if (now.fd >= 0 && read_attributes(&now) == 0) {
        attributes.attributes_follow = TRUE;
        attributes.post_op_attr_u.attributes = attributes_of(&now.st);
    }
    return attributes;
}

/* The attributes before, when the call opened the file, and now. */
static wcc_data before_and_after(const struct object *object)
{
    wcc_data wcc = {.after = after(object)};
    if (object->fd >= 0) {
        wcc.before.attributes_follow = TRUE;
        wcc.before.pre_op_attr_u.attributes = (wcc_attr){
            .size = object->st.stx_size,
            .mtime = time_of(object->st.stx_mtime),
            .ctime = time_of(object->st.stx_ctime),
        };
    }
    return wcc;
}

static struct timespec timespec_of(time_how how, nfstime3 time)
{
    switch (how) {
    case SET_TO_CLIENT_TIME: return (struct timespec){.tv_sec = time.seconds, .tv_nsec = time.nseconds};
    case SET_TO_SERVER_TIME: return (struct timespec){.tv_nsec = UTIME_NOW};
    default: return (struct timespec){.tv_nsec = UTIME_OMIT};
    }
}

/* Sets what `set` asks for. The owner before the mode, because a change of owner clears bits of the mode. */
static nfsstat3 set_attributes(const struct object *object, const sattr3 *set)
{
    struct path path = path_of(object);
    if (set->size.set_it) {
        if (set->size.set_size3_u.size > OFFSET_MAX)
            return NFS3ERR_FBIG;
        int fd = open_data(object, O_WRONLY);
        if (fd < 0 || ftruncate(fd, (off_t)set->size.set_size3_u.size) < 0) {
            nfsstat3 status = status_of(errno);
            if (fd >= 0)
                close(fd);
            return status;
        }
        close(fd);
    }
    uid_t uid = set->uid.set_it ? set->uid.set_uid3_u.uid : (uid_t)-1;
    gid_t gid = set->gid.set_it ? set->gid.set_gid3_u.gid : (gid_t)-1;
    if ((set->uid.set_it || set->gid.set_it) && fchownat(object->fd, "", uid, gid, AT_EMPTY_PATH) < 0)
        return status_of(errno);
    /* A symbolic link has no mode. */
    if (set->mode.set_it && !S_ISLNK(object->st.stx_mode)) {
        lock_files(); /* open_data may have it otherwise for a moment */
        nfsstat3 status = result_of(chmod(path.text, set->mode.set_mode3_u.mode & 07777));
        unlock_files();
        if (status != NFS3_OK)
            return status;
    }
    struct timespec times[2] = {
        timespec_of(set->atime.set_it, set->atime.set_atime_u.atime),
        timespec_of(set->mtime.set_it, set->mtime.set_mtime_u.mtime),
    };
    if ((set->atime.set_it != DONT_CHANGE || set->mtime.set_it != DONT_CHANGE) &&
        utimensat(AT_FDCWD, path.text, times, 0) < 0)
        return status_of(errno);
    return NFS3_OK;
}

/* May something be made or removed under this name? `dots` is the answer for "." and "..". */
static nfsstat3 check_name(const struct object *directory, const char *name, nfsstat3 dots)
{
    if (!S_ISDIR(directory->st.stx_mode))
        return NFS3ERR_NOTDIR;
    if (name[0] == '\0' || strchr(name, '/') != NULL)
        return NFS3ERR_INVAL;
    return strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ? dots : NFS3_OK;
}

/*
 * The procedures. Where both arms of a result begin with the same attributes, setting one sets the other.
 */

bool_t nfsproc3_null_3_svc(void *args, void *res, struct svc_req *request)
{
    (void)args, (void)res, (void)request;
    return TRUE;
}

bool_t nfsproc3_getattr_3_svc(GETATTR3args *args, GETATTR3res *res, struct svc_req *request)
{
    struct object object;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->object, &object);
    if (res->status == NFS3_OK)
        res->GETATTR3res_u.resok.obj_attributes = attributes_of(&object.st);
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_setattr_3_svc(SETATTR3args *args, SETATTR3res *res, struct svc_req *request)
{
    struct object object;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->object, &object);
    if (res->status == NFS3_OK && args->guard.check) {
        nfstime3 wanted = args->guard.sattrguard3_u.obj_ctime, is = time_of(object.st.stx_ctime);
        if (wanted.seconds != is.seconds || wanted.nseconds != is.nseconds)
            res->status = NFS3ERR_NOT_SYNC;
    }
    if (res->status == NFS3_OK)
        res->status = set_attributes(&object, &args->new_attributes);
    res->SETATTR3res_u.resok.obj_wcc = before_and_after(&object);
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_lookup_3_svc(LOOKUP3args *args, LOOKUP3res *res, struct svc_req *request)
{
    struct object directory, object = NO_OBJECT;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->what.dir, &directory);
    if (res->status == NFS3_OK)
        res->status = result_of(open_name(&directory, args->what.name, &object));
    if (res->status == NFS3_OK) {
        LOOKUP3resok *ok = &res->LOOKUP3res_u.resok;
        ok->object = handle_of(&object);
        ok->obj_attributes = after(&object);
        ok->dir_attributes = after(&directory);
    } else {
        res->LOOKUP3res_u.resfail.dir_attributes = after(&directory);
    }
    close_object(&object);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_access_3_svc(ACCESS3args *args, ACCESS3res *res, struct svc_req *request)
{
    struct object object;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->object, &object);
    if (res->status == NFS3_OK) {
        bool directory = S_ISDIR(object.st.stx_mode);
        struct path path = path_of(&object);
        uint32 granted = 0;
        if (faccessat(AT_FDCWD, path.text, R_OK, AT_EACCESS) == 0)
            granted |= ACCESS3_READ;
        if (faccessat(AT_FDCWD, path.text, W_OK, AT_EACCESS) == 0)
            granted |= ACCESS3_MODIFY | ACCESS3_EXTEND | (directory ? ACCESS3_DELETE : 0);
        if (faccessat(AT_FDCWD, path.text, X_OK, AT_EACCESS) == 0)
            granted |= directory ? ACCESS3_LOOKUP : ACCESS3_EXECUTE;
        res->ACCESS3res_u.resok.access = granted & args->access;
    }
    res->ACCESS3res_u.resok.obj_attributes = after(&object);
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_readlink_3_svc(READLINK3args *args, READLINK3res *res, struct svc_req *request)
{
    struct object object;
    READLINK3resok *ok = &res->READLINK3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->symlink, &object);
    if (res->status == NFS3_OK && !S_ISLNK(object.st.stx_mode))
        res->status = NFS3ERR_INVAL;
    if (res->status == NFS3_OK) {
        ok->data = allocate(NFS3_PATH_LIMIT + 1);
        res->status = result_of((int)readlinkat(object.fd, "", ok->data, NFS3_PATH_LIMIT));
        if (res->status != NFS3_OK)
            free(ok->data);
    }
    ok->symlink_attributes = after(&object);
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_read_3_svc(READ3args *args, READ3res *res, struct svc_req *request)
{
    struct object object;
    READ3resok *ok = &res->READ3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->file, &object);
    int fd = -1;
    if (res->status == NFS3_OK)
        res->status = result_of(fd = open_data(&object, O_RDONLY));
    uint32 count = args->count < NFS3_DATA_LIMIT ? args->count : NFS3_DATA_LIMIT, done = 0;
    if (read_data == NULL)
        read_data = allocate(NFS3_DATA_LIMIT);
    while (res->status == NFS3_OK && done < count && args->offset <= OFFSET_MAX - count) {
        ssize_t n = pread(fd, read_data + done, count - done, (off_t)(args->offset + done));
        if (n < 0 && errno != EINTR)
            res->status = status_of(errno);
        if (n == 0)
            break;
        if (n > 0)
            done += (uint32)n;
    }
    if (fd >= 0)
        close(fd);
    ok->file_attributes = after(&object);
    if (res->status == NFS3_OK) {
        ok->count = done;
        ok->eof = done < count || args->offset + done >= ok->file_attributes.post_op_attr_u.attributes.size;
        ok->data.data_len = done;
        ok->data.data_val = read_data;
    }
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_write_3_svc(WRITE3args *args, WRITE3res *res, struct svc_req *request)
{
    struct object object;
    WRITE3resok *ok = &res->WRITE3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->file, &object);
    if (res->status == NFS3_OK && (args->count != args->data.data_len || args->stable > FILE_SYNC))
        res->status = NFS3ERR_INVAL;
    if (res->status == NFS3_OK && args->offset > OFFSET_MAX - args->count)
        res->status = NFS3ERR_FBIG;
    int fd = -1;
    if (res->status == NFS3_OK)
        res->status = result_of(fd = open_data(&object, O_WRONLY));
    uint32 done = 0;
    while (res->status == NFS3_OK && done < args->count) {
        ssize_t n = pwrite(fd, args->data.data_val + done, args->count - done, (off_t)(args->offset + done));
        if (n >= 0) {
            done += (uint32)n;
        } else if (errno != EINTR) {
            /* What has been written counts. The client sends the rest again, and only that write fails. */
            if (done > 0)
                break;
            res->status = status_of(errno);
        }
    }
    if (res->status == NFS3_OK && args->stable != UNSTABLE)
        res->status = result_of(args->stable == DATA_SYNC ? fdatasync(fd) : fsync(fd));
    /* Some file systems find out here that the disk is full. */
    if (fd >= 0 && close(fd) < 0 && res->status == NFS3_OK)
        res->status = status_of(errno);
    ok->file_wcc = before_and_after(&object);
    if (res->status == NFS3_OK) {
        ok->count = done;
        ok->committed = args->stable;
        memcpy(ok->verf, verifier, sizeof verifier);
    }
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_commit_3_svc(COMMIT3args *args, COMMIT3res *res, struct svc_req *request)
{
    struct object object;
    COMMIT3resok *ok = &res->COMMIT3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->file, &object);
    int fd = -1;
    if (res->status == NFS3_OK)
        res->status = result_of(fd = open_data(&object, O_WRONLY));
    if (res->status == NFS3_OK)
        res->status = result_of(fsync(fd));
    if (fd >= 0)
        close(fd);
    ok->file_wcc = before_and_after(&object);
    if (res->status == NFS3_OK)
        memcpy(ok->verf, verifier, sizeof verifier);
    close_object(&object);
    return TRUE;
}

/* What CREATE, MKDIR, SYMLINK and MKNOD have in common: `status` says how making `name` went. Opens what was made,
 * gives it the attributes that it was not made with, and fills in the result. */
static nfsstat3 finish_making(nfsstat3 status, const diropargs3 *where, const sattr3 *set,
                              struct object *directory, struct object *object, post_op_fh3 *handle,
                              post_op_attr *attributes)
{
    if (status == NFS3_OK)
        status = result_of(open_name(directory, where->name, object));
    if (status != NFS3_OK)
        return status;
    status = set_attributes(object, set);
    if (status != NFS3_OK) {
        forget_name(directory, where->name, object);
        unlinkat(directory->fd, where->name, S_ISDIR(object->st.stx_mode) ? AT_REMOVEDIR : 0);
        return status;
    }
    handle->handle_follows = TRUE;
    handle->post_op_fh3_u.handle = handle_of(object);
    *attributes = after(object);
    return NFS3_OK;
}

/* The mode to make a file with. It is removed from `set`: setting it again would clear what a directory
 * inherits. */
static mode_t take_mode(sattr3 *set, mode_t otherwise)
{
    mode_t mode = set->mode.set_it ? set->mode.set_mode3_u.mode & 07777 : otherwise;
    set->mode.set_it = FALSE;
    return mode;
}

/* A CREATE for a file that exists. */
static nfsstat3 create_again(const createhow3 *how, const struct object *object, const sattr3 *verf_as_times)
{
    const struct statx *st = &object->st;
    if (how->mode == GUARDED || !S_ISREG(st->stx_mode))
        return NFS3ERR_EXIST;
    if (how->mode == EXCLUSIVE) {
        bool ours = st->stx_size == 0 &&
            time_of(st->stx_atime).seconds == verf_as_times->atime.set_atime_u.atime.seconds &&
            time_of(st->stx_mtime).seconds == verf_as_times->mtime.set_mtime_u.mtime.seconds;
        return ours ? NFS3_OK : NFS3ERR_EXIST;
    }
    sattr3 only_size = {.size = how->createhow3_u.obj_attributes.size};
    return set_attributes(object, &only_size);
}

bool_t nfsproc3_create_3_svc(CREATE3args *args, CREATE3res *res, struct svc_req *request)
{
    struct object directory, object = NO_OBJECT;
    CREATE3resok *ok = &res->CREATE3res_u.resok;
    const char *name = args->where.name;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->where.dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, name, NFS3ERR_EXIST);

    sattr3 set = {.size = {.set_it = FALSE}};
    mode_t mode = 0600;
    if (args->how.mode == EXCLUSIVE) {
        /* The verifier must outlive a restart. RFC 1813 section 3.3.8 proposes the times of the file; the client
         * sets the right ones afterwards. 31 bits of each are what every file system keeps. */
        uint32 halves[2];
        memcpy(halves, args->how.createhow3_u.verf, sizeof halves);
        set.atime.set_it = SET_TO_CLIENT_TIME;
        set.atime.set_atime_u.atime.seconds = halves[0] & 0x7fffffff;
        set.mtime.set_it = SET_TO_CLIENT_TIME;
        set.mtime.set_mtime_u.mtime.seconds = halves[1] & 0x7fffffff;
    } else {
        set = args->how.createhow3_u.obj_attributes;
        mode = take_mode(&set, 0644);
    }
    if (status == NFS3_OK) {
        int fd = openat(directory.fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
        if (fd >= 0)
            close(fd);
        if (fd < 0 && errno == EEXIST) {
            status = result_of(open_name(&directory, name, &object));
            if (status == NFS3_OK)
                status = create_again(&args->how, &object, &set);
            memset(&set, 0, sizeof set);
            close_object(&object);
        } else {
            status = result_of(fd);
        }
    }
    res->status = finish_making(status, &args->where, &set, &directory, &object, &ok->obj, &ok->obj_attributes);
    wcc_data wcc = before_and_after(&directory);
    if (res->status == NFS3_OK)
        ok->dir_wcc = wcc;
    else
        res->CREATE3res_u.resfail.dir_wcc = wcc;
    close_object(&object);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_mkdir_3_svc(MKDIR3args *args, MKDIR3res *res, struct svc_req *request)
{
    struct object directory, object = NO_OBJECT;
    MKDIR3resok *ok = &res->MKDIR3res_u.resok;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->where.dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, args->where.name, NFS3ERR_EXIST);
    if (status == NFS3_OK)
        status = result_of(mkdirat(directory.fd, args->where.name, take_mode(&args->attributes, 0755)));
    res->status = finish_making(status, &args->where, &args->attributes, &directory, &object, &ok->obj,
                                &ok->obj_attributes);
    wcc_data wcc = before_and_after(&directory);
    if (res->status == NFS3_OK)
        ok->dir_wcc = wcc;
    else
        res->MKDIR3res_u.resfail.dir_wcc = wcc;
    close_object(&object);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_symlink_3_svc(SYMLINK3args *args, SYMLINK3res *res, struct svc_req *request)
{
    struct object directory, object = NO_OBJECT;
    SYMLINK3resok *ok = &res->SYMLINK3res_u.resok;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->where.dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, args->where.name, NFS3ERR_EXIST);
    if (status == NFS3_OK)
        status = result_of(symlinkat(args->symlink.symlink_data, directory.fd, args->where.name));
    args->symlink.symlink_attributes.size.set_it = FALSE;
    res->status = finish_making(status, &args->where, &args->symlink.symlink_attributes, &directory, &object,
                                &ok->obj, &ok->obj_attributes);
    wcc_data wcc = before_and_after(&directory);
    if (res->status == NFS3_OK)
        ok->dir_wcc = wcc;
    else
        res->SYMLINK3res_u.resfail.dir_wcc = wcc;
    close_object(&object);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_mknod_3_svc(MKNOD3args *args, MKNOD3res *res, struct svc_req *request)
{
    struct object directory, object = NO_OBJECT;
    MKNOD3resok *ok = &res->MKNOD3res_u.resok;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->where.dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, args->where.name, NFS3ERR_EXIST);

    ftype3 type = args->what.type;
    bool device = type == NF3CHR || type == NF3BLK;
    sattr3 set = {.size = {.set_it = FALSE}};
    mode_t format = type == NF3CHR ? S_IFCHR : type == NF3BLK ? S_IFBLK : type == NF3SOCK ? S_IFSOCK : S_IFIFO;
    dev_t number = 0;
    if (device) {
        devicedata3 *data = &args->what.mknoddata3_u.device;
        set = data->dev_attributes;
        number = makedev(data->spec.specdata1, data->spec.specdata2);
    } else if (type == NF3SOCK || type == NF3FIFO) {
        set = args->what.mknoddata3_u.pipe_attributes;
    } else if (status == NFS3_OK) {
        status = NFS3ERR_BADTYPE;
    }
    set.size.set_it = FALSE;
    if (status == NFS3_OK)
        status = result_of(mknodat(directory.fd, args->where.name, format | take_mode(&set, 0644), number));
    res->status = finish_making(status, &args->where, &set, &directory, &object, &ok->obj, &ok->obj_attributes);
    wcc_data wcc = before_and_after(&directory);
    if (res->status == NFS3_OK)
        ok->dir_wcc = wcc;
    else
        res->MKNOD3res_u.resfail.dir_wcc = wcc;
    close_object(&object);
    close_object(&directory);
    return TRUE;
}

/* REMOVE, and RMDIR with AT_REMOVEDIR. */
static nfsstat3 remove_name(struct svc_req *request, const diropargs3 *what, int flags, wcc_data *wcc)
{
    struct object directory, object = NO_OBJECT;
    nfsstat3 status = enter(request, &what->dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, what->name, NFS3ERR_INVAL);
    lock_files();
    if (status == NFS3_OK)
        status = result_of(open_name(&directory, what->name, &object));
    if (status == NFS3_OK)
        status = result_of(unlinkat(directory.fd, what->name, flags));
    if (status == NFS3_OK)
        forget_name(&directory, what->name, &object);
    unlock_files();
    *wcc = before_and_after(&directory);
    close_object(&object);
    close_object(&directory);
    return status;
}

bool_t nfsproc3_remove_3_svc(REMOVE3args *args, REMOVE3res *res, struct svc_req *request)
{
    memset(res, 0, sizeof *res);
    res->status = remove_name(request, &args->object, 0, &res->REMOVE3res_u.resok.dir_wcc);
    return TRUE;
}

bool_t nfsproc3_rmdir_3_svc(RMDIR3args *args, RMDIR3res *res, struct svc_req *request)
{
    memset(res, 0, sizeof *res);
    res->status = remove_name(request, &args->object, AT_REMOVEDIR, &res->RMDIR3res_u.resok.dir_wcc);
    return TRUE;
}

bool_t nfsproc3_rename_3_svc(RENAME3args *args, RENAME3res *res, struct svc_req *request)
{
    struct object from, to = NO_OBJECT, moved = NO_OBJECT, replaced = NO_OBJECT;
    RENAME3resok *ok = &res->RENAME3res_u.resok;
    const char *old = args->from.name, *new = args->to.name;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->from.dir, &from);
    if (status == NFS3_OK)
        status = enter(request, &args->to.dir, &to);
    if (status == NFS3_OK)
        status = check_name(&from, old, NFS3ERR_INVAL);
    if (status == NFS3_OK)
        status = check_name(&to, new, NFS3ERR_INVAL);
    lock_files();
    if (status == NFS3_OK)
        status = result_of(open_name(&from, old, &moved));
    if (status == NFS3_OK) {
        open_name(&to, new, &replaced); /* or there is none */
        status = result_of(renameat(from.fd, old, to.fd, new));
    }
    /* Two names of one file both stay, and so do their places. */
    if (status == NFS3_OK && !(replaced.fd >= 0 && same_key(&moved.key, &replaced.key))) {
        if (replaced.fd >= 0)
            forget_name(&to, new, &replaced);
        struct object again;
        if (open_name(&to, new, &again) == 0)
            close_object(&again);
        forget_name(&from, old, &moved);
    }
    unlock_files();
    ok->fromdir_wcc = before_and_after(&from);
    ok->todir_wcc = before_and_after(&to);
    res->status = status;
    close_object(&replaced);
    close_object(&moved);
    close_object(&to);
    close_object(&from);
    return TRUE;
}

bool_t nfsproc3_link_3_svc(LINK3args *args, LINK3res *res, struct svc_req *request)
{
    struct object object, directory = NO_OBJECT, again;
    LINK3resok *ok = &res->LINK3res_u.resok;
    memset(res, 0, sizeof *res);
    nfsstat3 status = enter(request, &args->file, &object);
    if (status == NFS3_OK)
        status = enter(request, &args->link.dir, &directory);
    if (status == NFS3_OK)
        status = check_name(&directory, args->link.name, NFS3ERR_EXIST);
    if (status == NFS3_OK) {
        struct path path = path_of(&object);
        status = result_of(linkat(AT_FDCWD, path.text, directory.fd, args->link.name, AT_SYMLINK_FOLLOW));
    }
    if (status == NFS3_OK && open_name(&directory, args->link.name, &again) == 0)
        close_object(&again);
    ok->file_attributes = after(&object);
    ok->linkdir_wcc = before_and_after(&directory);
    res->status = status;
    close_object(&directory);
    close_object(&object);
    return TRUE;
}

/* * Directories. A cookie is a hash of the name, and a directory is returned in the order of the cookies. So a
 * name keeps its cookie while others come and go, on every file system and over restarts, and each page begins
 * where the last one ended: no name that stays is left out or returned twice. Each page reads the whole directory.
 *  */

struct listed {
    uint64_t cookie, inode;
    char *name;
};
struct listing {
    struct listed *entries;
    size_t count;
};

static uint64_t cookie_of(const char *name)
{
    if (strcmp(name, ".") == 0)
        return 1;
    if (strcmp(name, "..") == 0)
        return 2;
    uint64_t hash = 0xcbf29ce484222325; /* FNV-1a */
    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * 0x100000001b3;
    /* Some clients take a cookie for a signed number. 0 begins a directory, 1 and 2 are taken. */
    return 3 + (hash >> 2);
}

static int by_cookie(const void *a, const void *b)
{
    const struct listed *x = a, *y = b;
    return x->cookie != y->cookie ? (x->cookie > y->cookie ? 1 : -1) : strcmp(x->name, y->name);
}

static void free_listing(struct listing *listing)
{
    for (size_t i = 0; i < listing->count; i++)
        free(listing->entries[i].name);
    free(listing->entries);
}

static nfsstat3 list(const struct object *directory, struct listing *listing)
{
    memset(listing, 0, sizeof *listing);
    int fd = openat(directory->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (stream == NULL)
        return status_of(errno);
    struct dirent *entry;
    while ((entry = readdir(stream)) != NULL) {
        if ((listing->count & (listing->count - 1)) == 0) { /* it is full at each power of two */
            size_t room = listing->count ? 2 * listing->count : 1;
            listing->entries = reallocarray(listing->entries, room, sizeof *listing->entries);
            if (listing->entries == NULL)
                err(1, "out of memory");
        }
        bool outside = is_root(directory) && strcmp(entry->d_name, "..") == 0;
        struct listed *next = &listing->entries[listing->count++];
        next->cookie = cookie_of(entry->d_name);
        next->inode = outside ? directory->key.inode : entry->d_ino;
        next->name = strdup(entry->d_name);
        if (next->name == NULL)
            err(1, "out of memory");
    }
    closedir(stream);
    qsort(listing->entries, listing->count, sizeof *listing->entries, by_cookie);
    for (size_t i = 1; i < listing->count; i++)
        if (listing->entries[i].cookie <= listing->entries[i - 1].cookie)
            listing->entries[i].cookie = listing->entries[i - 1].cookie + 1;
    return NFS3_OK;
}

/* Bytes on the wire: a string; what both results have besides their entries (status, attributes, verifier, the end
 * of the list, eof); attributes and handle of an entry. */
static size_t string_size(const char *text) { return 4 + (strlen(text) + 3) / 4 * 4; }
enum { REPLY_SIZE = 4 + 88 + 8 + 4 + 4, PLUS_SIZE = 88 + 4 + 4 + sizeof(struct key) };

bool_t nfsproc3_readdir_3_svc(READDIR3args *args, READDIR3res *res, struct svc_req *request)
{
    struct object directory;
    struct listing listing = {.count = 0};
    READDIR3resok *ok = &res->READDIR3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->dir, &directory);
    if (res->status == NFS3_OK)
        res->status = list(&directory, &listing);
    size_t room = args->count < PAGE_MAX ? args->count : PAGE_MAX, size = REPLY_SIZE;
    entry3 **tail = &ok->reply.entries;
    ok->reply.eof = res->status == NFS3_OK;
    for (size_t i = 0; i < listing.count && ok->reply.eof; i++) {
        struct listed *listed = &listing.entries[i];
        if (listed->cookie <= args->cookie)
            continue;
        size += 4 + 8 + string_size(listed->name) + 8;
        if (size > room) {
            ok->reply.eof = FALSE;
        } else {
            *tail = allocate(sizeof **tail);
            **tail = (entry3){.fileid = listed->inode, .name = listed->name, .cookie = listed->cookie};
            listed->name = NULL;
            tail = &(*tail)->nextentry;
        }
    }
    if (res->status == NFS3_OK && ok->reply.entries == NULL && !ok->reply.eof)
        res->status = NFS3ERR_TOOSMALL;
    ok->dir_attributes = after(&directory);
    free_listing(&listing);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_readdirplus_3_svc(READDIRPLUS3args *args, READDIRPLUS3res *res, struct svc_req *request)
{
    struct object directory;
    struct listing listing = {.count = 0};
    READDIRPLUS3resok *ok = &res->READDIRPLUS3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->dir, &directory);
    if (res->status == NFS3_OK)
        res->status = list(&directory, &listing);
    /* dircount limits the names only. */
    size_t room = args->maxcount < PAGE_MAX ? args->maxcount : PAGE_MAX, size = REPLY_SIZE, names = 0;
    entryplus3 **tail = &ok->reply.entries;
    ok->reply.eof = res->status == NFS3_OK;
    for (size_t i = 0; i < listing.count && ok->reply.eof; i++) {
        struct listed *listed = &listing.entries[i];
        if (listed->cookie <= args->cookie)
            continue;
        size_t name_size = 8 + string_size(listed->name) + 8;
        size += 4 + name_size + PLUS_SIZE;
        names += name_size;
        if (size > room || (names > args->dircount && ok->reply.entries != NULL)) {
            ok->reply.eof = FALSE;
            continue;
        }
        entryplus3 *entry = *tail = allocate(sizeof *entry);
        tail = &entry->nextentry;
        entry->fileid = listed->inode;
        entry->name = listed->name;
        entry->cookie = listed->cookie;
        /* A name that is gone by now, or may not be looked at, gets no attributes and handle. */
        struct object object;
        if (open_name(&directory, listed->name, &object) == 0) {
            entry->name_attributes.attributes_follow = TRUE;
            entry->name_attributes.post_op_attr_u.attributes = attributes_of(&object.st);
            entry->name_handle.handle_follows = TRUE;
            entry->name_handle.post_op_fh3_u.handle = handle_of(&object);
            close_object(&object);
        }
        listed->name = NULL;
    }
    if (res->status == NFS3_OK && ok->reply.entries == NULL && !ok->reply.eof)
        res->status = NFS3ERR_TOOSMALL;
    ok->dir_attributes = after(&directory);
    free_listing(&listing);
    close_object(&directory);
    return TRUE;
}

bool_t nfsproc3_fsstat_3_svc(FSSTAT3args *args, FSSTAT3res *res, struct svc_req *request)
{
    struct object object;
    struct statvfs fs;
    FSSTAT3resok *ok = &res->FSSTAT3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->fsroot, &object);
    if (res->status == NFS3_OK)
        res->status = result_of(fstatvfs(object.fd, &fs));
    ok->obj_attributes = after(&object);
    if (res->status == NFS3_OK) {
        ok->tbytes = (size3)fs.f_blocks * fs.f_frsize;
        ok->fbytes = (size3)fs.f_bfree * fs.f_frsize;
        ok->abytes = (size3)fs.f_bavail * fs.f_frsize;
        ok->tfiles = fs.f_files;
        ok->ffiles = fs.f_ffree;
        ok->afiles = fs.f_favail;
    }
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_fsinfo_3_svc(FSINFOargs *args, FSINFO3res *res, struct svc_req *request)
{
    struct object object;
    FSINFO3resok *ok = &res->FSINFO3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->fsroot, &object);
    ok->obj_attributes = after(&object);
    if (res->status == NFS3_OK) {
        ok->rtmax = ok->rtpref = ok->wtmax = ok->wtpref = NFS3_DATA_LIMIT;
        ok->rtmult = ok->wtmult = 4096;
        ok->dtpref = PAGE_MAX;
        ok->maxfilesize = OFFSET_MAX;
        ok->time_delta.nseconds = 1;
        ok->properties = FSF3_LINK | FSF3_SYMLINK | FSF3_HOMOGENEOUS | FSF3_CANSETTIME;
    }
    close_object(&object);
    return TRUE;
}

bool_t nfsproc3_pathconf_3_svc(PATHCONF3args *args, PATHCONF3res *res, struct svc_req *request)
{
    struct object object;
    struct statvfs fs;
    PATHCONF3resok *ok = &res->PATHCONF3res_u.resok;
    memset(res, 0, sizeof *res);
    res->status = enter(request, &args->object, &object);
    if (res->status == NFS3_OK)
        res->status = result_of(fstatvfs(object.fd, &fs));
    ok->obj_attributes = after(&object);
    if (res->status == NFS3_OK) {
        long links = fpathconf(object.fd, _PC_LINK_MAX);
        ok->linkmax = links > 0 && links <= INT32_MAX ? (uint32)links : INT32_MAX;
        ok->name_max = (uint32)fs.f_namemax;
        ok->no_trunc = TRUE;
        ok->chown_restricted = TRUE;
        ok->case_insensitive = FALSE;
        ok->case_preserving = TRUE;
    }
    close_object(&object);
    return TRUE;
}

int nfs_program_3_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport;
    if (xdr_result == (xdrproc_t)xdr_READ3res && ((READ3res *)result)->status == NFS3_OK)
        ((READ3res *)result)->READ3res_u.resok.data.data_val = NULL;
    xdr_free(xdr_result, result);
    return 1;
}

/*
 * MOUNT.
 */

bool_t mountproc3_null_3_svc(void *args, void *res, struct svc_req *request)
{
    (void)args, (void)res, (void)request;
    return TRUE;
}

bool_t mountproc3_mnt_3_svc(dirpath *path, mountres3 *res, struct svc_req *request)
{
    memset(res, 0, sizeof *res);
    act_for(NULL);
    struct object at;
    open_root(&at);
    act_for(request);
    size_t length = strlen(exported);
    const char *rest = *path;
    if (strncmp(rest, exported, length) == 0 && (rest[length] == '/' || rest[length] == '\0'))
        rest += length;
    int failed = 0;
    while (!failed && *(rest += strspn(rest, "/")) != '\0') {
        char *name = strndup(rest, strcspn(rest, "/"));
        struct object next = NO_OBJECT;
        if (name == NULL)
            err(1, "out of memory");
        rest += strlen(name);
        failed = open_name(&at, name, &next);
        free(name);
        close_object(&at);
        at = next;
    }
    if (!failed && !S_ISDIR(at.st.stx_mode)) {
        failed = -1;
        errno = ENOTDIR;
    }
    if (failed) {
        nfsstat3 status = status_of(errno);
        bool known = status == NFS3ERR_NOENT || status == NFS3ERR_ACCES || status == NFS3ERR_NOTDIR ||
            status == NFS3ERR_NAMETOOLONG || status == NFS3ERR_PERM || status == NFS3ERR_INVAL;
        res->fhs_status = known ? (mountstat3)status : MNT3ERR_IO;
    } else {
        mountres3_ok *ok = &res->mountres3_u.mountinfo;
        nfs_fh3 handle = handle_of(&at);
        ok->fhandle = (fhandle3){.fhandle3_len = handle.data.data_len, .fhandle3_val = handle.data.data_val};
        ok->auth_flavors.auth_flavors_val = allocate(sizeof(int));
        ok->auth_flavors.auth_flavors_val[0] = AUTH_SYS;
        ok->auth_flavors.auth_flavors_len = 1;
    }
    close_object(&at);
    return TRUE;
}

/* An NFS server does not need to know who has mounted: this one does not remember it. */
bool_t mountproc3_dump_3_svc(void *args, mountlist *res, struct svc_req *request)
{
    (void)args, (void)request;
    *res = NULL;
    return TRUE;
}

bool_t mountproc3_umnt_3_svc(dirpath *path, void *res, struct svc_req *request)
{
    (void)path, (void)res, (void)request;
    return TRUE;
}

bool_t mountproc3_umntall_3_svc(void *args, void *res, struct svc_req *request)
{
    (void)args, (void)res, (void)request;
    return TRUE;
}

bool_t mountproc3_export_3_svc(void *args, exports *res, struct svc_req *request)
{
    (void)args, (void)request;
    *res = allocate(sizeof **res);
    (*res)->ex_dir = strdup("/");
    if ((*res)->ex_dir == NULL)
        err(1, "out of memory");
    return TRUE;
}

int mount_program_3_freeresult(SVCXPRT *transport, xdrproc_t xdr_result, caddr_t result)
{
    (void)transport;
    xdr_free(xdr_result, result);
    return 1;
}

/* Listens on `port` of `where`, without registering with rpcbind. Returns the port. */
static unsigned listen_on(const char *netid, const char *where, unsigned port, unsigned long program,
                          void (*dispatch)(struct svc_req *, SVCXPRT *))
{
    struct netconfig *config = getnetconfigent(netid);
    if (config == NULL)
        errx(1, "%s: no such netid (for rdma, is librpcrdma loaded?)", netid);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (inet_pton(AF_INET, where, &address.sin_addr) != 1)
        errx(2, "%s: not an IPv4 address", where);
    struct t_bind bind_to = {.addr = {.maxlen = sizeof address, .len = sizeof address, .buf = &address},
                             .qlen = 64};
    SVCXPRT *listener = svc_tli_create(RPC_ANYFD, config, &bind_to, 0, 0);
    if (listener == NULL)
        errx(1, "cannot listen on %s port %u", netid, port);
    if (!svc_reg(listener, program, 3, dispatch, NULL))
        errx(1, "cannot register the program");
    freenetconfigent(config);
    return ntohs(((struct sockaddr_in *)listener->xp_ltaddr.buf)->sin_port);
}

static unsigned number_of(const char *text, unsigned long most, const char *what)
{
    char *end;
    unsigned long number = strtoul(text, &end, 10);
    if (*end != '\0' || end == text || number > most)
        errx(2, "%s: not a %s", text, what);
    return (unsigned)number;
}

/* Serves with `threads` threads, or in the calling thread. */
static void serve(unsigned threads)
{
    if (threads == 0) {
        svc_run();
        errx(1, "svc_run returned");
    }
    bool_t (*run)(unsigned) = (bool_t (*)(unsigned))dlsym(RTLD_DEFAULT, "rpcrdma_svc_run");
    if (run == NULL)
        errx(1, "-t needs librpcrdma");
    if (!run(threads))
        errx(1, "%s", clnt_spcreateerror("rpcrdma_svc_run"));
    errx(1, "rpcrdma_svc_run returned");
}

int main(int argc, char **argv)
{
    const char *netid = "tcp", *directory = ".", *address = "0.0.0.0";
    unsigned port = 0, mount_port = 0, threads = 0;
    bool rpcbind = true;
    int option;
    while ((option = getopt(argc, argv, "n:d:a:p:m:t:")) != -1) {
        switch (option) {
        case 'n': netid = optarg; break;
        case 'd': directory = optarg; break;
        case 'a': address = optarg; rpcbind = false; break;
        case 'p': port = number_of(optarg, 65535, "port"); rpcbind = false; break;
        case 'm': mount_port = number_of(optarg, 65535, "port"); rpcbind = false; break;
        case 't': threads = number_of(optarg, 1024, "number of threads"); break;
        default:
            errx(2, "usage: nfs3d [-n netid] [-d directory] [-a address] [-p port] [-m mountport] [-t threads]");
        }
    }
    export_directory(directory);
    exported = realpath(directory, NULL);
    if (exported == NULL)
        err(1, "%s", directory);
    umask(0);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint32_t started[2] = {(uint32_t)now.tv_sec, (uint32_t)now.tv_nsec};
    memcpy(verifier, started, sizeof verifier);

    if (!rpcbind) {
        port = listen_on(netid, address, port, NFS_PROGRAM, nfs_program_3);
        mount_port = listen_on("tcp", address, mount_port, MOUNT_PROGRAM, mount_program_3);
    } else if (svc_create(nfs_program_3, NFS_PROGRAM, NFS_V3, netid) == 0 ||
               svc_create(mount_program_3, MOUNT_PROGRAM, MOUNT_V3, "tcp") == 0) {
        errx(1, "cannot create the service on %s", netid);
    }
    signal(SIGPIPE, SIG_IGN);
    printf("READY %u %u\n", port, mount_port);
    fflush(stdout);
    serve(threads);
}
