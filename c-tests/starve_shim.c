/* starve_shim.c, preloaded before librpcrdma: the n-th request of librpcrdma for memory or for a descriptor fails.
 *
 *   void starve_arm(long n, long more)   the n-th request from here on fails, and `more` after it
 *   long starve_disarm(void)             nothing fails any more; returns how many requests there were since
 *   long starve_live(void)               blocks of the heap that librpcrdma has asked for and nobody has freed
 *   const char *starve_where(void)       what failed last: the function, its size, and an offset in the library for addr2line
 *   void starve_accept(long n)           libtirpc's n-th request for memory for connections that it accepts fails. A connection
 *                                        takes four: three for its record stream, and one for the address of its peer
 *   bool starve_accepted(void)           whether that request has failed
 *
 * Ends the process if the library has glibc drop something at the end of a thread.
 *
 * The return address tells who made a request. Only the library's requests count: what libtirpc and libc do when theirs fail is
 * their own business, except for connections that libtirpc accepts for the library. Besides the heap, requests are for memory
 * mappings and for the descriptors of a connection. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* glibc's own names for its allocator: they need no dlsym(3), which itself allocates. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static uintptr_t low, high;     /* where the library lies */
static uintptr_t tirpc, tirpc_end;
static atomic_long left = -1;   /* requests until one fails; negative: nothing is armed */
static atomic_long more, seen, live;
static atomic_bool armed;
static char where[256];

static int look(struct dl_phdr_info *object, size_t size, void *unused)
{
    (void)size, (void)unused;
    const char *name = strrchr(object->dlpi_name, '/');
    bool ours = name != NULL && strncmp(name, "/librpcrdma.so", 14) == 0;
    if (!ours && (name == NULL || strncmp(name, "/libtirpc.so", 12) != 0))
        return 0;
    uintptr_t end = 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && part->p_vaddr + part->p_memsz > end)
            end = part->p_vaddr + part->p_memsz;
    }
    *(ours ? &low : &tirpc) = object->dlpi_addr;
    *(ours ? &high : &tirpc_end) = object->dlpi_addr + end;
    return 0;
}

__attribute__((constructor)) static void find(void)
{
    dl_iterate_phdr(look, NULL);
    if (low == 0) {
        static const char text[] = "starve_shim: librpcrdma is not loaded\n";
        _exit(write(STDERR_FILENO, text, sizeof text - 1) ? 3 : 3);
    }
}

#define CALLER ((uintptr_t)__builtin_return_address(0))

static bool is_ours(uintptr_t caller)
{
    return caller >= low && caller < high;
}

/* Whether this request has to fail. */
static bool fails(const char *what, size_t size, uintptr_t caller)
{
    if (!armed || !is_ours(caller))
        return false;
    atomic_fetch_add(&seen, 1);
    long n = atomic_fetch_sub(&left, 1);
    if (n > 1 || n <= -atomic_load(&more))
        return false;
    snprintf(where, sizeof where, "%s of %zu from %#zx", what, size, (size_t)(caller - low));
    return true;
}

/* How many requests for connections that libtirpc accepts are left until one fails; 0: none fails. */
static atomic_long accept_left;
static atomic_bool accepted;
/* The calling thread is creating the record stream of a connection, or has: a failure before that leaves no transport. */
static __thread bool accepts;

static bool accept_fails(uintptr_t caller)
{
    if (!accepts || caller < tirpc || caller >= tirpc_end || atomic_load(&accept_left) == 0)
        return false;
    if (atomic_fetch_sub(&accept_left, 1) != 1)
        return false;
    atomic_store(&accepted, true);
    return true;
}

/* ---- Which blocks of the heap are the library's ------------------------------------------------------------------ */

/* Open addressing; 0 is a free place, 1 a place that was used before. Never full: the tests are small. */
enum { PLACES = 1 << 20 };
static uintptr_t blocks[PLACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t hash(uintptr_t block)
{
    return (size_t)((block >> 4) * 0x9e3779b97f4a7c15ull >> 44) % PLACES;
}

static void *note(void *block, uintptr_t caller)
{
    if (block == NULL || !is_ours(caller))
        return block;
    pthread_mutex_lock(&lock);
    size_t at = hash((uintptr_t)block);
    while (blocks[at] > 1)
        at = (at + 1) % PLACES;
    blocks[at] = (uintptr_t)block;
    pthread_mutex_unlock(&lock);
    atomic_fetch_add(&live, 1);
    return block;
}

static bool forget(void *block)
{
    bool was = false;
    if (block == NULL || atomic_load(&live) == 0)
        return false;
    pthread_mutex_lock(&lock);
    for (size_t at = hash((uintptr_t)block), i = 0; blocks[at] != 0 && i < PLACES; at = (at + 1) % PLACES, i++) {
        if (blocks[at] == (uintptr_t)block) {
            blocks[at] = 1;
            was = true;
            atomic_fetch_sub(&live, 1);
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return was;
}

/* ---- What is stood in front of ----------------------------------------------------------------------------------- */

void *malloc(size_t size)
{
    if (fails("malloc", size, CALLER))
        return errno = ENOMEM, NULL;
    return note(__libc_malloc(size), CALLER);
}

void *calloc(size_t count, size_t size)
{
    if (fails("calloc", count * size, CALLER) || accept_fails(CALLER))
        return errno = ENOMEM, NULL;
    return note(__libc_calloc(count, size), CALLER);
}

void *realloc(void *block, size_t size)
{
    if (fails("realloc", size, CALLER))
        return errno = ENOMEM, NULL;
    /* Forget it before realloc: afterwards its address may be another thread's. */
    bool was = forget(block);
    void *moved = __libc_realloc(block, size);
    if (moved == NULL && size != 0)
        return was ? note(block, CALLER) : NULL, NULL;
    return was || block == NULL ? note(moved, was ? low : CALLER) : moved;
}

int posix_memalign(void **block, size_t alignment, size_t size)
{
    if (fails("posix_memalign", size, CALLER))
        return ENOMEM;
    void *made = note(__libc_memalign(alignment, size), CALLER);
    if (made == NULL)
        return ENOMEM;
    *block = made;
    return 0;
}

void free(void *block)
{
    int kept = errno;
    forget(block);
    __libc_free(block);
    errno = kept;
}

/* glibc records what a thread is to drop at its end in memory from the heap, and ends the process if there is none. So the
 * library must not ask for that. */
int __cxa_thread_atexit_impl(void (*drop)(void *), void *what, void *handle);
int __cxa_thread_atexit_impl(void (*drop)(void *), void *what, void *handle)
{
    static int (*next)(void (*)(void *), void *, void *);
    if (is_ours(CALLER)) {
        static const char text[] = "starve_shim: librpcrdma has glibc drop something at the end of a thread\n";
        _exit(write(STDERR_FILENO, text, sizeof text - 1) ? 3 : 3);
    }
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "__cxa_thread_atexit_impl");
    return next(drop, what, handle);
}

/* The other functions, which dlsym(3) does not need, are looked up when they are first called. */
#define NEXT(name) \
    static __typeof__(name) *next; \
    if (next == NULL) \
        next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
    NEXT(mmap);
    if (fails("mmap", size, CALLER))
        return errno = ENOMEM, MAP_FAILED;
    return next(address, size, protection, flags, fd, offset);
}
void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

void *mremap(void *old, size_t old_size, size_t size, int flags, ...)
{
    static void *(*next)(void *, size_t, size_t, int, ...);
    if (next == NULL)
        next = (void *(*)(void *, size_t, size_t, int, ...))dlsym(RTLD_NEXT, "mremap");
    if (fails("mremap", size, CALLER))
        return errno = ENOMEM, MAP_FAILED;
    return next(old, old_size, size, flags);
}

#define DESCRIPTOR(name, error, parameters, ...) \
    int name parameters \
    { \
        static int (*next) parameters; \
        if (next == NULL) \
            next = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        if (fails(#name, 0, CALLER)) \
            return errno = (error), -1; \
        return next(__VA_ARGS__); \
    }
DESCRIPTOR(memfd_create, ENOMEM, (const char *name, unsigned flags), name, flags)
DESCRIPTOR(eventfd, EMFILE, (unsigned count, int flags), count, flags)
DESCRIPTOR(epoll_create1, EMFILE, (int flags), flags)
DESCRIPTOR(timerfd_create, EMFILE, (int clock, int flags), clock, flags)
DESCRIPTOR(socket, EMFILE, (int domain, int type, int protocol), domain, type, protocol)
DESCRIPTOR(dup, EMFILE, (int fd), fd)

/* libtirpc calls its own functions like everybody else's, so they can be interposed. */
typedef int stream_io(void *, void *, int);
void xdrrec_create(void *stream, unsigned send, unsigned receive, void *handle, stream_io *in, stream_io *out)
{
    static void (*next)(void *, unsigned, unsigned, void *, stream_io *, stream_io *);
    if (next == NULL)
        *(void **)&next = dlvsym(RTLD_NEXT, "xdrrec_create", "TIRPC_0.3.0");
    accepts = true;
    next(stream, send, receive, handle, in, out);
}

int accept(int fd, struct sockaddr *restrict address, socklen_t *restrict length)
{
    static int (*next)(int, struct sockaddr *restrict, socklen_t *restrict);
    if (next == NULL)
        next = (int (*)(int, struct sockaddr *restrict, socklen_t *restrict))dlsym(RTLD_NEXT, "accept");
    accepts = false;
    return next(fd, address, length);
}

/* ---- What the test calls ----------------------------------------------------------------------------------------- */

void starve_arm(long n, long further)
{
    where[0] = '\0';
    atomic_store(&seen, 0);
    atomic_store(&more, further);
    atomic_store(&left, n);
    atomic_store(&armed, true);
}

long starve_disarm(void)
{
    atomic_store(&armed, false);
    return atomic_load(&seen);
}

long starve_live(void)
{
    return atomic_load(&live);
}

const char *starve_where(void)
{
    return where;
}

void starve_accept(long n)
{
    atomic_store(&accepted, false);
    atomic_store(&accept_left, n);
}

bool starve_accepted(void)
{
    return atomic_load(&accepted);
}
