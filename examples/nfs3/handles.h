/* handles.h: from file handles and names to open files of the exported directory, and back. */
#ifndef HANDLES_H
#define HANDLES_H
#define _GNU_SOURCE
#include "nfs3.h"
#include <stdbool.h>
#include <stdint.h>
#include <sys/stat.h>

/* Which file is meant, across renames and restarts. These bytes are the handle. The time of birth tells a new file
 * from a removed one whose inode number it got; it is 0 if the file system does not know it. */
struct key {
    uint64_t device, inode, born;
};

/* A file that a call is about: opened with O_PATH, which follows and triggers nothing, and its attributes at that
 * moment. The descriptor is -1 if there is none. */
struct object {
    int fd;
    struct key key;
    struct statx st;
};
#define NO_OBJECT {.fd = -1}

/* Several threads may use all of this at a time. Only one runs between these two: whatever changes names does so, and
 * reports it here, before another thread looks. They may be nested. */
void lock_files(void);
void unlock_files(void);

/* Exports `directory`. Ends the program if it cannot be opened. */
void export_directory(const char *directory);
void open_root(struct object *object);

/* All of these return -1 and errno if there is no such file; ESTALE for a handle. */
int open_handle(const nfs_fh3 *handle, struct object *object);
int open_name(const struct object *directory, const char *name, struct object *object);
int read_attributes(struct object *object);
void close_object(struct object *object);

bool same_key(const struct key *a, const struct key *b);
bool is_root(const struct object *object);
/* Makes a handle whose bytes the caller frees. */
nfs_fh3 handle_of(const struct object *object);

/* `directory` no longer has `object` under this name. */
void forget_name(const struct object *directory, const char *name, const struct object *object);

void *allocate(size_t size);

#endif
