/* handles.c: from file handles and names to open files of the exported directory, and back.
 *
 * The kernel opens files by name, and NFS names them by handle. So this keeps, for each file that a client has
 * seen, the names it was seen under: a directory and a name in it. Opening a handle means following these up to the
 * exported directory, opening one component after the other from there, following no symbolic link, and checking
 * that what was reached is the file that is meant. Whatever a handle says, nothing outside is reached. After a
 * rename by this server all handles stay valid, including those below a renamed directory: they go by its key, not
 * by its path.
 *
 * An unknown handle may be from before a restart. The first one makes this read the whole tree, once.
 *
 * A handle is not secret, and need not be: whoever may mount may look up every file. */
#include "handles.h"
#include <dirent.h>
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* Deeper directories are not found: two that were moved into each other behind our back must not send us round in
 * circles. */
enum { DEPTH_MAX = 256 };

struct place {
    struct place *next;
    struct key directory;
    char name[];
};
/* A file is known as long as it has a place. A directory has one place at most. */
struct known {
    struct key key;
    struct place *places;
};

static int root = -1;
static struct key root_key;
static void *table; /* of struct known, by key: a tree of search.h */
static pthread_mutex_t files = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

void lock_files(void)
{
    pthread_mutex_lock(&files);
}

void unlock_files(void)
{
    pthread_mutex_unlock(&files);
}

void *allocate(size_t size)
{
    void *memory = calloc(1, size);
    if (memory == NULL)
        err(1, "out of memory");
    return memory;
}

bool same_key(const struct key *a, const struct key *b)
{
    return memcmp(a, b, sizeof *a) == 0;
}

bool is_root(const struct object *object)
{
    return same_key(&object->key, &root_key);
}

static int compare(const void *a, const void *b)
{
    return memcmp(a, b, sizeof(struct key));
}

static struct known *find(const struct key *key)
{
    struct known **found = tfind(key, &table, compare);
    return found ? *found : NULL;
}

int read_attributes(struct object *object)
{
    struct statx *st = &object->st;
    if (statx(object->fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, st) < 0)
        return -1;
    bool has_birth = st->stx_mask & STATX_BTIME;
    object->key = (struct key){
        .device = makedev(st->stx_dev_major, st->stx_dev_minor),
        .inode = st->stx_ino,
        .born = has_birth ? (uint64_t)st->stx_btime.tv_sec * 1000000000 + st->stx_btime.tv_nsec : 0,
    };
    return 0;
}

void close_object(struct object *object)
{
    if (object->fd >= 0)
        close(object->fd);
    object->fd = -1;
}

void export_directory(const char *directory)
{
    struct object object;
    root = object.fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 || read_attributes(&object) < 0)
        err(1, "%s", directory);
    root_key = object.key;
}

/* Opens `name` as it stands, without a look into the table. */
static int open_plain(int directory, const char *name, struct object *object)
{
    object->fd = openat(directory, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (object->fd < 0)
        return -1;
    if (read_attributes(object) < 0) {
        close_object(object);
        return -1;
    }
    return 0;
}

void open_root(struct object *object)
{
    if (open_plain(root, ".", object) < 0)
        err(1, "the exported directory");
}

static void learn(const struct object *directory, const char *name, const struct object *object)
{
    if (is_root(object))
        return;
    struct known *known = find(&object->key);
    if (known == NULL) {
        known = allocate(sizeof *known);
        known->key = object->key;
        if (tsearch(known, &table, compare) == NULL)
            err(1, "out of memory");
    }
    for (struct place *place = known->places; place != NULL; place = place->next)
        if (same_key(&place->directory, &directory->key) && strcmp(place->name, name) == 0)
            return;
    struct place *place = allocate(sizeof *place + strlen(name) + 1);
    place->directory = directory->key;
    strcpy(place->name, name);
    if (S_ISDIR(object->st.stx_mode)) {
        free(known->places);
    } else {
        place->next = known->places;
    }
    known->places = place;
}

static void forget(struct known *known)
{
    tdelete(known, &table, compare);
    while (known->places != NULL) {
        struct place *place = known->places;
        known->places = place->next;
        free(place);
    }
    free(known);
}

static void forget_place(struct known *known, const struct object *directory, const char *name)
{
    for (struct place **at = &known->places; *at != NULL; at = &(*at)->next) {
        struct place *place = *at;
        if (same_key(&place->directory, &directory->key) && strcmp(place->name, name) == 0) {
            *at = place->next;
            free(place);
            break;
        }
    }
    if (known->places == NULL)
        forget(known);
}

void forget_name(const struct object *directory, const char *name, const struct object *object)
{
    lock_files();
    struct known *known = find(&object->key);
    if (known != NULL)
        forget_place(known, directory, name);
    unlock_files();
}

/* Opens the file of this key. Only a file has several places, so this is one path, tried once for each of them. */
static int open_key(const struct key *key, int depth, struct object *object)
{
    object->fd = -1;
    if (same_key(key, &root_key))
        return open_plain(root, ".", object);
    struct known *known = find(key);
    errno = ESTALE;
    for (struct place *place = known ? known->places : NULL; place != NULL; place = place->next) {
        struct object directory;
        if (depth == DEPTH_MAX || open_key(&place->directory, depth + 1, &directory) < 0)
            continue;
        int failed = open_plain(directory.fd, place->name, object), error = errno;
        close_object(&directory);
        if (!failed && same_key(key, &object->key))
            return 0;
        close_object(object);
        errno = failed && error != ENOENT && error != ENOTDIR ? error : ESTALE;
    }
    return -1;
}

static void learn_tree(const struct object *directory, int depth)
{
    int fd = openat(directory->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *entry;
    while (stream != NULL && (entry = readdir(stream)) != NULL) {
        struct object object;
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        if (open_name(directory, entry->d_name, &object) == 0) {
            if (entry->d_type == DT_DIR && depth < DEPTH_MAX)
                learn_tree(&object, depth + 1);
            close_object(&object);
        }
    }
    if (stream != NULL)
        closedir(stream);
}

/* Like open_key(), for a key that may be from before a restart, or of a file that is gone. */
static int open_any(const struct key *key, struct object *object)
{
    static bool read_all;
    if (find(key) == NULL && !same_key(key, &root_key) && !read_all) {
        struct object top;
        open_root(&top);
        learn_tree(&top, 0);
        close_object(&top);
        read_all = true;
    }
    if (open_key(key, 0, object) == 0)
        return 0;
    struct known *known = find(key);
    if (errno == ESTALE && known != NULL) {
        forget(known);
        errno = ESTALE;
    }
    return -1;
}

int open_handle(const nfs_fh3 *handle, struct object *object)
{
    struct key key;
    object->fd = -1;
    if (handle->data.data_len != sizeof key) {
        errno = EBADF;
        return -1;
    }
    memcpy(&key, handle->data.data_val, sizeof key);
    lock_files();
    int outcome = open_any(&key, object);
    unlock_files();
    return outcome;
}

static int open_below(const struct object *directory, const char *name, struct object *object)
{
    if (!S_ISDIR(directory->st.stx_mode)) {
        errno = ENOTDIR;
        return -1;
    }
    if (name[0] == '\0' || strchr(name, '/') != NULL) {
        errno = EINVAL;
        return -1;
    }
    if (strcmp(name, ".") == 0)
        return open_key(&directory->key, 0, object);
    if (strcmp(name, "..") == 0) {
        /* Not by the kernel's "..", which leads out of the exported directory. */
        struct known *known = find(&directory->key);
        return open_key(known && known->places ? &known->places->directory : &root_key, 0, object);
    }
    if (open_plain(directory->fd, name, object) < 0)
        return -1;
    learn(directory, name, object);
    return 0;
}

int open_name(const struct object *directory, const char *name, struct object *object)
{
    object->fd = -1;
    lock_files();
    int outcome = open_below(directory, name, object);
    unlock_files();
    return outcome;
}

nfs_fh3 handle_of(const struct object *object)
{
    nfs_fh3 handle = {.data = {.data_len = sizeof object->key, .data_val = allocate(sizeof object->key)}};
    memcpy(handle.data.data_val, &object->key, sizeof object->key);
    return handle;
}
