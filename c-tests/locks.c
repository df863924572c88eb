/* The locks of Rust's standard library, for the thread sanitizer. That library comes compiled, so the sanitizer does not see what
 * it does. The uncontended path of a lock is compiled into its user; the rest is implemented here once more
 * (tests/long/races.sh links it in).
 *
 * A mutex is 0 when it is free, 1 when it is taken, 2 when it is taken and others may wait. */
#include <errno.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef _Atomic uint32_t word;

static bool futex(word *at, int what, uint32_t value, const struct timespec *time)
{
    return syscall(SYS_futex, at, what | FUTEX_PRIVATE_FLAG, value, time, NULL, 0) >= 0 || errno != ETIMEDOUT;
}

/* Mutex::lock_contended */
void mutex_lock_contended(word *mutex)
{
    while (atomic_exchange(mutex, 2) != 0)
        futex(mutex, FUTEX_WAIT, 2, NULL);
}

static bool wait_on(word *condition, word *mutex, const struct timespec *time)
{
    uint32_t seen = atomic_load(condition), unlocked = 0;
    if (atomic_exchange(mutex, 0) == 2)
        futex(mutex, FUTEX_WAKE, 1, NULL);
    bool in_time = futex(condition, FUTEX_WAIT, seen, time);
    if (!atomic_compare_exchange_strong(mutex, &unlocked, 1))
        mutex_lock_contended(mutex);
    return in_time;
}

/* Condvar::wait */
void condvar_wait(word *condition, word *mutex)
{
    wait_on(condition, mutex, NULL);
}

/* Condvar::wait_timeout; a Duration is passed as its seconds and nanoseconds. */
bool condvar_wait_timeout(word *condition, word *mutex, uint64_t seconds, uint32_t nanoseconds)
{
    struct timespec time = {.tv_sec = seconds < 1000000 ? (time_t)seconds : 1000000, .tv_nsec = nanoseconds};
    return wait_on(condition, mutex, &time);
}
