/* rpcrdma-run COMMAND [ARGUMENT...]: runs COMMAND with librpcrdma, or says why that cannot be.
 *
 * The loader ignores a preload that it cannot load, and the library moves no program while it does not understand its
 * settings: the program would run over tcp, and nobody would know. So everything that can be known beforehand is checked
 * here. Only the library knows which settings are right, so it is asked: the very one that the program will get. */
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#define NAME "librpcrdma.so.0"
/* LIBDIR, where the library is installed, comes from the Makefile. */

/* As for env(1): a failure before the command, a command that cannot be run like this, and one that does not exist. */
enum { FAILED = 125, NOT_RUN = 126, NOT_FOUND = 127 };

__attribute__((noreturn, format(printf, 2, 3))) static void fail(int status, const char *text, ...)
{
    va_list arguments;
    va_start(arguments, text);
    fputs("rpcrdma-run: ", stderr);
    vfprintf(stderr, text, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(status);
}

static void usage(FILE *to)
{
    fputs("usage: rpcrdma-run [--] COMMAND [ARGUMENT...]   runs COMMAND with librpcrdma\n"
          "       rpcrdma-run --check                      says what is wrong with the settings\n"
          "       rpcrdma-run --version | --help\n"
          "RPCRDMA_REDIRECT=tcp moves programs that ask for tcp; see rpcrdma-run(1), rpcrdma.conf(5).\n",
          to);
}

__attribute__((format(printf, 1, 2))) static char *text_of(const char *format, ...)
{
    char *text;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    if (length < 0)
        fail(FAILED, "no memory");
    return text;
}

/* ---------------------------------------------------------------------------------------------- the library */

/* The one that RPCRDMA_LIB names; the one beside this program, where both were built; the one that was installed. The
 * first that exists is used, even if it turns out to be unusable. */
static char *find_library(void)
{
    const char *named = getenv("RPCRDMA_LIB");
    char *path = NULL;
    if (named && *named) {
        /* Absolute: programs change their directory, and run others. */
        char *here = *named == '/' ? NULL : getcwd(NULL, 0);
        path = here ? text_of("%s/%s", here, named) : strdup(named);
        if (access(path, F_OK) != 0)
            fail(FAILED, "%s, which RPCRDMA_LIB names: %s", path, strerror(errno));
    } else {
        char self[PATH_MAX];
        ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
        char *slash = length > 0 ? memrchr(self, '/', (size_t)length) : NULL;
        if (slash) {
            path = text_of("%.*s/" NAME, (int)(slash - self), self);
            if (access(path, F_OK) != 0 && errno == ENOENT)
                path = NULL;
        }
        if (!path) {
            path = strdup(LIBDIR "/" NAME);
            if (access(path, F_OK) != 0 && errno == ENOENT)
                fail(FAILED, NAME " is neither built nor installed (make, make install), or RPCRDMA_LIB must name it");
        }
    }
    /* ld.so(8): the names in LD_PRELOAD are separated by blanks or colons, there is no escape, and $ begins a token. */
    if (strpbrk(path, " :$"))
        fail(FAILED, "%s: LD_PRELOAD cannot hold a path with a blank, a colon or a $: let RPCRDMA_LIB name a link to it",
             path);
    return path;
}

typedef int settings_check_t(char *why, size_t size);
typedef const char *version_t(void);

static void *load(const char *library)
{
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!handle)
        fail(FAILED, "the library cannot be loaded: %s", dlerror());
    return handle;
}

static void *function(void *handle, const char *library, const char *name, const char *version)
{
    void *found = dlvsym(handle, name, version);
    if (!found)
        fail(FAILED, "%s is not the librpcrdma of this rpcrdma-run: it has no %s", library, name);
    return found;
}

static void check_settings(void *handle, const char *library)
{
    static char why[16384];
    settings_check_t *check = (settings_check_t *)function(handle, library, "rpcrdma_settings_check", "RPCRDMA_PRIVATE");
    if (check(why, sizeof why))
        return;
    if (!*why)
        fail(FAILED, "defect in %s: it does not say what is wrong with the settings", library);
    for (char *line = strtok(why, "\n"); line; line = strtok(NULL, "\n"))
        fprintf(stderr, "rpcrdma-run: %s\n", line);
    exit(FAILED);
}

/* ---------------------------------------------------------------------------------------------- the command */

/* The file that execvp(3) would run, or NULL: its own error is as good as ours. */
static char *find_command(const char *name)
{
    struct stat found;
    if (strchr(name, '/'))
        return strdup(name);
    const char *path = getenv("PATH");
    if (!path)
        path = "/bin:/usr/bin";
    for (;; path++) {
        size_t length = strcspn(path, ":");
        char *file = length ? text_of("%.*s/%s", (int)length, path, name) : text_of("./%s", name);
        if (access(file, X_OK) == 0 && stat(file, &found) == 0 && S_ISREG(found.st_mode))
            return file;
        free(file);
        path += length;
        if (!*path)
            return NULL;
    }
}

/* Both layouts of an ELF header agree up to e_machine. */
static bool read_header(int fd, Elf64_Ehdr *header)
{
    return pread(fd, header, sizeof *header, 0) >= (ssize_t)sizeof(Elf32_Ehdr) &&
           memcmp(header->e_ident, ELFMAG, SELFMAG) == 0;
}

/* Whether the file asks for a loader. A file that cannot be read to the end is left to the kernel to judge. */
static bool has_loader(int fd, const Elf64_Ehdr *header)
{
    bool wide = header->e_ident[EI_CLASS] == ELFCLASS64;
    const Elf32_Ehdr *narrow = (const Elf32_Ehdr *)header;
    uint64_t offset = wide ? header->e_phoff : narrow->e_phoff;
    unsigned count = wide ? header->e_phnum : narrow->e_phnum, size = wide ? header->e_phentsize : narrow->e_phentsize;
    for (unsigned at = 0; at < count; at++) {
        uint32_t type;
        if (pread(fd, &type, sizeof type, (off_t)(offset + (uint64_t)at * size)) != sizeof type || type == PT_INTERP)
            return true;
    }
    return false;
}

/* Refuses a program into which the loader would silently put no library. */
static void check_command(const char *file, const char *library)
{
    struct stat found;
    struct statvfs system;
    if (stat(file, &found) != 0 || !S_ISREG(found.st_mode))
        return;
    Elf64_Ehdr header = {0}, ours = {0};
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool elf = fd >= 0 && read_header(fd, &header);
    /* A script gains no rights, and its interpreter gets the library. A file that may only be executed is not a script. */
    if (fd >= 0 && !elf) {
        close(fd);
        return;
    }
    const char *more = NULL;
    if ((found.st_mode & S_ISUID) && found.st_uid != getuid())
        more = "is set-user-ID";
    else if ((found.st_mode & (S_ISGID | S_IXGRP)) == (S_ISGID | S_IXGRP) && found.st_gid != getgid())
        more = "is set-group-ID";
    else if (getuid() != 0 && getxattr(file, "security.capability", NULL, 0) > 0)
        more = "has capabilities";
    bool ignored = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 ||
                   (statvfs(file, &system) == 0 && (system.f_flag & ST_NOSUID));
    if (more && !ignored)
        fail(NOT_RUN,
             "%s %s: the loader puts no library into a program with more rights than its caller; link it with librpcrdma, "
             "or give rpcrdma-run itself those rights (sudo rpcrdma-run ...)",
             file, more);
    if (fd < 0)
        return;
    int library_fd = open(library, O_RDONLY | O_CLOEXEC);
    if (library_fd >= 0 && read_header(library_fd, &ours) &&
        (header.e_ident[EI_CLASS] != ours.e_ident[EI_CLASS] || header.e_ident[EI_DATA] != ours.e_ident[EI_DATA] ||
         header.e_machine != ours.e_machine))
        fail(NOT_RUN, "%s is a program for another processor or word size than %s", file, library);
    if (library_fd >= 0)
        close(library_fd);
    /* The loader itself, started as a program, asks for no loader, and takes a preload. */
    const char *slash = strrchr(file, '/');
    bool loader = strncmp(slash ? slash + 1 : file, "ld-linux", 8) == 0 || strcmp(slash ? slash + 1 : file, "ld.so") == 0;
    if (!loader && !has_loader(fd, &header))
        fail(NOT_RUN, "%s is statically linked: no library can be put into it", file);
    close(fd);
}

int main(int argc, char **argv)
{
    int at = 1;
    bool only_check = false, only_version = false;
    if (at < argc && strcmp(argv[at], "--help") == 0) {
        usage(stdout);
        return fflush(stdout) == 0 ? 0 : FAILED;
    }
    if (at < argc && strcmp(argv[at], "--version") == 0)
        only_version = true;
    else if (at < argc && strcmp(argv[at], "--check") == 0)
        only_check = true;
    else if (at < argc && strcmp(argv[at], "--") == 0)
        at++;
    else if (at < argc && argv[at][0] == '-') {
        fprintf(stderr, "rpcrdma-run: %s: no such option\n", argv[at]);
        usage(stderr);
        return FAILED;
    }
    if (at == argc || ((only_check || only_version) && argc > 2)) {
        usage(stderr);
        return FAILED;
    }

    char *library = find_library();
    /* For this program only: not a setting of the library. */
    unsetenv("RPCRDMA_LIB");
    void *handle = load(library);
    if (only_version) {
        version_t *version = (version_t *)function(handle, library, "rpcrdma_version", "RPCRDMA_0");
        printf("rpcrdma-run %s\n%s\n", version(), library);
        return fflush(stdout) == 0 ? 0 : FAILED;
    }
    check_settings(handle, library);
    if (only_check)
        return 0;

    char *file = find_command(argv[at]);
    if (file)
        check_command(file, library);
    const char *others = getenv("LD_PRELOAD");
    char *preload = others && *others ? text_of("%s:%s", library, others) : library;
    if (setenv("LD_PRELOAD", preload, 1) != 0)
        fail(FAILED, "no memory");
    execvp(argv[at], argv + at);
    int why = errno;
    fail(why == ENOENT ? NOT_FOUND : NOT_RUN, "%s: %s", argv[at], strerror(why));
}
