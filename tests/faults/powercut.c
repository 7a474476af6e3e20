/* Records the file operations of a program below one folder, in the order in which they happened, with their data.

   Loaded with LD_PRELOAD. POWERCUT_ROOT is the folder, POWERCUT_LOG the log. A record is one line,

       operation <tab> inode <tab> offset <tab> bytes of data <tab> path <tab> second path

   followed by the data. The operations are seen as system calls, since some libraries (safetensors) do not go through the
   C library: a seccomp filter turns them into SIGSYS, whose handler makes the call and records it. The calls of the handler
   itself are recognised by a value in the sixth argument, which none of them uses.

   Operations are serialised across threads and processes by a lock in shared memory, so the order of the log is the order
   on disk. What was written is read back from the file. `powercuts.py` reads the log, and refuses it if replaying it does
   not give the files on disk (after writes through a memory map, for instance). */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef __x86_64__
#error "only for x86_64"
#endif

#define OURS 0x706f7763u
#define CHUNK (1 << 16)

static char root[PATH_MAX], buffer[CHUNK]; /* the buffer belongs to whoever has the lock */
static int log_file = -1;
static atomic_int *lock;

static long call(long number, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = OURS;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static void take(void) {
    while (atomic_exchange(lock, 1)) sched_yield();
}

static void release(void) { atomic_store(lock, 0); }

static void put(const char *data, size_t size) {
    while (size) {
        long done = call(SYS_write, log_file, (long)data, size, 0, 0);
        if (done < 0 && done != -EINTR) abort();
        if (done > 0) data += done, size -= done;
    }
}

static void record(const char *what, ino_t inode, off_t offset, size_t size, const char *path, const char *other) {
    char line[2 * PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%s\t%lu\t%ld\t%zu\t%s\t%s\n", what, (unsigned long)inode, (long)offset, size,
                          path, other);
    put(line, length);
}

/* -- paths and descriptors ------------------------------------------------------------------------------------------ */

static int is_inside(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

/* The absolute path of a name. Its folder is resolved, but not the name itself: it may be a link. */
static int absolute(int folder, const char *name, char *path) {
    char parent[PATH_MAX];
    size_t length = strlen(name);
    while (length > 1 && name[length - 1] == '/') length--;
    if (length >= PATH_MAX) return 0;
    memcpy(parent, name, length);
    parent[length] = 0;
    char *slash = strrchr(parent, '/'), last[NAME_MAX + 1];
    snprintf(last, sizeof last, "%s", slash ? slash + 1 : parent);
    if (slash) slash[slash == parent] = 0;
    int fd = call(SYS_openat, folder, (long)(slash ? parent : "."), O_PATH | O_DIRECTORY | O_CLOEXEC, 0, 0);
    if (fd < 0) return 0;
    int found = path_of(fd, path);
    close(fd);
    if (!found || strlen(path) + strlen(last) + 2 > PATH_MAX) return 0;
    strcat(strcat(path, "/"), last);
    return is_inside(path);
}

static int is_file_inside(int fd, struct stat *info, char *path) {
    return !fstat(fd, info) && S_ISREG(info->st_mode) && path_of(fd, path) && is_inside(path);
}

static ino_t inode_of(const char *path) {
    struct stat info;
    return lstat(path, &info) ? 0 : info.st_ino;
}

/* -- one function per kind of operation: each makes the call, records it if it succeeded, and returns its result ----------- */

static long opening(long number, long folder, long name, long flags, long mode) {
    struct stat info;
    char path[PATH_MAX];
    long fd = call(number, folder, name, flags, mode, 0);
    if (fd >= 0 && is_file_inside(fd, &info, path))
        record((flags & O_TMPFILE) == O_TMPFILE ? "unnamed" : flags & O_TRUNC ? "truncating" : "open", info.st_ino, 0, 0,
               path, "");
    return fd;
}

/* `place` is where it is written; if negative, where the descriptor stands. */
static long writing(long number, long a, long b, long c, long d, long e, off_t place) {
    struct stat info;
    char path[PATH_MAX], link[64];
    long result = call(number, a, b, c, d, e);
    if (result <= 0 || !is_file_inside(a, &info, path)) return result;
    if (place < 0) place = lseek(a, 0, SEEK_CUR) - result;
    record("write", info.st_ino, place, result, path, "");
    snprintf(link, sizeof link, "/proc/self/fd/%ld", a);
    int file = call(SYS_openat, AT_FDCWD, (long)link, O_RDONLY | O_CLOEXEC, 0, 0);
    for (size_t size = result; size;) {
        ssize_t done = pread(file, buffer, size < CHUNK ? size : CHUNK, place);
        if (done <= 0) abort();
        put(buffer, done);
        place += done, size -= done;
    }
    close(file);
    return result;
}

static long sizing(long number, long fd, long a, long b, long c) {
    struct stat info;
    char path[PATH_MAX];
    long result = call(number, fd, a, b, c, 0);
    if (!result && is_file_inside(fd, &info, path)) record("size", info.st_ino, info.st_size, 0, path, "");
    return result;
}

static long syncing(long number, long fd) {
    struct stat info;
    char path[PATH_MAX];
    long result = call(number, fd, 0, 0, 0, 0);
    if (!result && !fstat(fd, &info) && path_of(fd, path) && is_inside(path))
        record(S_ISDIR(info.st_mode) ? "sync folder" : "sync file", info.st_ino, 0, 0, path, "");
    return result;
}

static long renaming(long folder, long name, long other, long target, long flags) {
    char from[PATH_MAX] = "", to[PATH_MAX] = "";
    int inside = absolute(folder, (char *)name, from);
    inside = absolute(other, (char *)target, to) || inside;
    long result = call(SYS_renameat2, folder, name, other, target, flags);
    if (!result && inside) record("rename", inode_of(to), 0, 0, from, to);
    return result;
}

/* One name that appears or disappears. */
static long naming(const char *what, int folder, long name, const char *content, long number, long a, long b, long c,
                   long d, long e) {
    char path[PATH_MAX];
    int inside = absolute(folder, (char *)name, path);
    long result = call(number, a, b, c, d, e);
    if (!result && inside) record(what, inode_of(path), 0, 0, path, content);
    return result;
}

static long operation(long n, long a, long b, long c, long d, long e) {
    switch (n) {
    case SYS_open: return opening(SYS_openat, AT_FDCWD, a, b, c);
    case SYS_openat: return opening(n, a, b, c, d);
    case SYS_creat: return opening(SYS_openat, AT_FDCWD, a, O_CREAT | O_WRONLY | O_TRUNC, b);
    case SYS_write: case SYS_writev: case SYS_sendfile: return writing(n, a, b, c, d, e, -1);
    case SYS_pwrite64: case SYS_pwritev: return writing(n, a, b, c, d, e, d);
    case SYS_pwritev2: case SYS_copy_file_range: return -ENOSYS; /* callers fall back to the others */
    case SYS_ftruncate: case SYS_fallocate: return sizing(n, a, b, c, d);
    case SYS_fsync: case SYS_fdatasync: return syncing(n, a);
    case SYS_rename: return renaming(AT_FDCWD, a, AT_FDCWD, b, 0);
    case SYS_renameat: return renaming(a, b, c, d, 0);
    case SYS_renameat2: return renaming(a, b, c, d, e);
    case SYS_mkdir: return naming("mkdir", AT_FDCWD, a, "", n, a, b, c, d, e);
    case SYS_mkdirat: return naming("mkdir", a, b, "", n, a, b, c, d, e);
    case SYS_link: return naming("link", AT_FDCWD, b, "", n, a, b, c, d, e);
    case SYS_linkat: return naming("link", c, d, "", n, a, b, c, d, e);
    case SYS_symlink: return naming("symlink", AT_FDCWD, b, (char *)a, n, a, b, c, d, e);
    case SYS_symlinkat: return naming("symlink", b, c, (char *)a, n, a, b, c, d, e);
    case SYS_unlink: case SYS_rmdir: return naming("remove", AT_FDCWD, a, "", n, a, b, c, d, e);
    case SYS_unlinkat: return naming("remove", a, b, "", n, a, b, c, d, e);
    case SYS_truncate: {
        long fd = call(SYS_openat, AT_FDCWD, a, O_WRONLY | O_CLOEXEC, 0, 0);
        if (fd < 0) return fd;
        long result = sizing(SYS_ftruncate, fd, b, 0, 0);
        close(fd);
        return result;
    }
    }
    abort();
}

static const int OPERATIONS[] = {
    SYS_creat,  SYS_write,    SYS_writev, SYS_sendfile, SYS_pwrite64, SYS_pwritev, SYS_pwritev2,  SYS_copy_file_range,
    SYS_ftruncate, SYS_fallocate, SYS_fsync, SYS_fdatasync, SYS_rename, SYS_renameat, SYS_renameat2, SYS_mkdir,
    SYS_mkdirat, SYS_link, SYS_linkat, SYS_symlink, SYS_symlinkat, SYS_unlink, SYS_rmdir, SYS_unlinkat, SYS_truncate,
};
#define COUNT (sizeof OPERATIONS / sizeof *OPERATIONS)

static void handle(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    int error = errno, n = info->si_syscall;
    struct stat target;
    int is_write = n == SYS_write || n == SYS_writev || n == SYS_sendfile;
    if (is_write && (fstat(r[REG_RDI], &target) || !S_ISREG(target.st_mode))) { /* a full pipe blocks: without the lock */
        r[REG_RAX] = call(n, r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8]);
    } else {
        take();
        r[REG_RAX] = operation(n, r[REG_RDI], r[REG_RSI], r[REG_RDX], r[REG_R10], r[REG_R8]);
        release();
    }
    errno = error;
}

/* -- set-up --------------------------------------------------------------------------------------------------------- */

#define FIELD(name) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, name))
#define WHEN(test, value, yes, no) BPF_JUMP(BPF_JMP | test | BPF_K, value, yes, no)
#define ANSWER(value) BPF_STMT(BPF_RET | BPF_K, value)
#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

static void trap(void) {
    struct sock_filter filter[COUNT + 32] = {
        FIELD(arch), WHEN(BPF_JEQ, AUDIT_ARCH_X86_64, 1, 0), ANSWER(SECCOMP_RET_ALLOW),
        FIELD(args[5]), WHEN(BPF_JEQ, OURS, 0, 1), ANSWER(SECCOMP_RET_ALLOW),
        FIELD(nr),
        /* Only files that are opened to be changed: the dynamic linker, which runs before us, reads. */
        WHEN(BPF_JEQ, SYS_open, 0, 4),
        FIELD(args[1]), WHEN(BPF_JSET, CHANGES, 0, 1), ANSWER(SECCOMP_RET_TRAP), ANSWER(SECCOMP_RET_ALLOW),
        WHEN(BPF_JEQ, SYS_openat, 0, 4),
        FIELD(args[2]), WHEN(BPF_JSET, CHANGES, 0, 1), ANSWER(SECCOMP_RET_TRAP), ANSWER(SECCOMP_RET_ALLOW),
    };
    int length = 17;
    for (unsigned i = 0; i < COUNT; i++)
        filter[length++] = (struct sock_filter)WHEN(BPF_JEQ, OPERATIONS[i], (unsigned char)(COUNT - i), 0);
    filter[length++] = (struct sock_filter)ANSWER(SECCOMP_RET_ALLOW);
    filter[length++] = (struct sock_filter)ANSWER(SECCOMP_RET_TRAP);
    struct sock_fprog program = {length, filter};
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART};
    sigfillset(&action.sa_mask); /* a handler that writes would wait for the lock of the handler it interrupts */
    sigdelset(&action.sa_mask, SIGSYS);
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("powercut: seccomp is not available");
        _exit(99);
    }
}

__attribute__((constructor)) static void start(void) {
    const char *folder = getenv("POWERCUT_ROOT"), *path = getenv("POWERCUT_LOG");
    if (!folder || !path || !realpath(folder, root)) return;
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.lock", path);
    int shared = call(SYS_openat, AT_FDCWD, (long)name, O_RDWR | O_CREAT | O_CLOEXEC, 0600, 0);
    if (shared < 0 || call(SYS_ftruncate, shared, sizeof *lock, 0, 0, 0)) abort();
    lock = mmap(NULL, sizeof *lock, PROT_READ | PROT_WRITE, MAP_SHARED, shared, 0);
    int file = call(SYS_openat, AT_FDCWD, (long)path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600, 0);
    log_file = fcntl(file, F_DUPFD_CLOEXEC, 500); /* out of the way of programs that expect low numbers */
    if (lock == MAP_FAILED || log_file < 0) abort();
    close(file);
    close(shared);
    trap();
}

/* What the program itself has to say, and in which folder it works. */
void powercut_mark(const char *text) {
    char folder[PATH_MAX];
    if (!getcwd(folder, sizeof folder)) abort();
    take();
    record("mark", 0, 0, 0, text, folder);
    release();
}
