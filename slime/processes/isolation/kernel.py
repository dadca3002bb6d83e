"""Kernel interfaces that isolate a process tree: namespaces, mounts, capabilities, seccomp and landlock, by ctypes.

Standard library only: the code runs in a process whose root directory has changed, where nothing can be imported.
Every function raises OSError where the kernel refuses.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import socket
import struct

TYPE_CHECKING = False  # As typing's; see init.
if TYPE_CHECKING:
    from collections.abc import Sequence

NAMESPACES = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "cgroup": 0x02000000}
NEW_USER, NEW_MOUNT, NEW_PID = 0x10000000, 0x00020000, 0x20000000
UID = 1000  # The one user of a sandbox; its number inside.
PLAIN_UID = 65534  # What real root becomes before anything else: RLIMIT_NPROC does not bind root.
MESSAGE_BYTES = 1 << 18  # Longest message between a sandbox's first process and its owner.

_libc = ctypes.CDLL(None, use_errno=True)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 4096, 16384, 1 << 18, 2
# Numbers of system calls that are the same on every architecture.
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _OPENAT2 = 442, 444, 445, 446, 437
_SECCOMP_ALLOW, _SECCOMP_ERRNO, _SECCOMP_KILL = 0x7FFF0000, 0x00050000, 0x80000000


def _call(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _syscall(number: int, *arguments: object) -> int:
    return _call(_libc.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones."""
    _call(_libc.unshare(flags), "unshare")


def set_readable_by_peers(readable: bool) -> None:
    """Say whether processes of the same user may trace this one and read its memory (PR_SET_DUMPABLE)."""
    _call(_libc.prctl(4, int(readable), 0, 0, 0), "prctl")


def enter_user_namespace() -> None:
    """Make a user namespace with one user, UID, and get all capabilities in it.

    UID stands for this process's user; for real root it stands for PLAIN_UID, which `become_user` turns this process
    into. Until then it may still open what only root can reach.
    """
    if os.getuid():
        uid, gid = os.getuid(), os.getgid()
        unshare(NEW_USER)
        _write_maps(os.getpid(), uid, gid)
        return
    # Only a process that is root outside may map a user that is not its own.
    entered, tell = os.pipe()
    namesake = os.getpid()
    if helper := os.fork():
        try:
            unshare(NEW_USER)
            os.write(tell, b"1")
        finally:
            os.close(entered)
            os.close(tell)
            failed = os.waitpid(helper, 0)[1]
        if failed:
            raise OSError(errno.EPERM, "the maps of the user namespace cannot be written")
        return
    os.close(tell)
    try:
        if os.read(entered, 1):
            _write_maps(namesake, PLAIN_UID, PLAIN_UID, deny_groups=False)
            os._exit(0)
    finally:
        os._exit(1)


def _write_maps(process: int, uid: int, gid: int, *, deny_groups: bool = True) -> None:
    texts = {"setgroups": "deny"} if deny_groups else {}
    for name, text in {**texts, "uid_map": f"{UID} {uid} 1", "gid_map": f"{UID} {gid} 1"}.items():
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def become_user() -> None:
    """Be UID, the one user of the user namespace, for good; capabilities stay."""
    if os.getuid() != UID:
        os.setgroups([])
        os.setresgid(UID, UID, UID)
        os.setresuid(UID, UID, UID)
    # The change of user took the process's own /proc files from it.
    set_readable_by_peers(True)


def mount(source: str, target: str, *, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount, as mount(2) does."""
    result = _libc.mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), data and data.encode()
    )
    _call(result, f"mount {source} on {target}")


def mount_private_tmpfs(target: str, data: str) -> None:
    """Mount an empty file system in memory that no other namespace sees."""
    mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    mount_tmpfs(target, data)


def mount_tmpfs(target: str, data: str) -> None:
    """Mount an empty file system in memory, of the size that `data` says."""
    mount("tmpfs", target, kind="tmpfs", flags=_MS_NOSUID | _MS_NODEV, data=data)


def bind(source: str, target: str) -> None:
    """Show a file or a directory, with what is mounted below it, at a second place."""
    mount(source, target, flags=_MS_BIND | _MS_REC)


def make_read_only(target: str, *, is_device: bool = False, below: bool = True) -> None:
    """Make a mount read-only and set-uid files in it mere files; `below`: what is mounted below it, too."""
    attributes = 1 | 2 | (0 if is_device else 4)  # RDONLY, NOSUID, NODEV
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    _syscall(_MOUNT_SETATTR, -100, target.encode(), 0x8000 if below else 0, request, 32)


def mount_proc(target: str) -> None:
    """Mount /proc of this process's own pid namespace."""
    mount("proc", target, kind="proc", flags=_MS_NOSUID | _MS_NODEV | 8)


def unmount(target: str) -> None:
    """Take a mount out of sight; it ends when nobody uses it any more."""
    _call(_libc.umount2(target.encode(), _MNT_DETACH), f"unmount {target}")


def change_root(root: str) -> None:
    """Make `root`, a mount, the root directory and drop the old one out of reach."""
    os.chdir(root)
    _call(_libc.pivot_root(b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


def raise_loopback() -> None:
    """Switch on the loopback of this network namespace, which begins without it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def drop_capabilities() -> None:
    """Give up every capability, also those that a set-uid program could return."""
    _call(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):  # EINVAL above the last one that this kernel has
        _libc.prctl(24, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _call(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def limit(name: str, value: int) -> None:
    """Lower a resource limit ("NPROC") for good; one that is lower already stays."""
    which = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _call(_libc.prctl(1, 9, 0, 0, 0), "prctl")


def open_regular(path: str) -> int:
    """Open a regular file for reading: no symbolic link, no pipe, no device, nothing of /proc's links to files.

    Returns:
        The descriptor.

    Raises:
        OSError: there is no such file, or it is something else.
    """
    # O_NONBLOCK: opening a pipe without a writer would wait for one. 0x0A: RESOLVE_NO_MAGICLINKS | RESOLVE_BENEATH.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    beneath = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    how = (ctypes.c_uint64 * 3)(flags, 0, 0x02 | 0x08)
    try:
        descriptor = _syscall(_OPENAT2, beneath, path.lstrip("/").encode() or b".", how, 24)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EXDEV):
            raise OSError(error.errno, f"{path} is, or leads through, a symbolic link that is not followed") from None
        raise OSError(error.errno, f"{path}: {os.strerror(error.errno or 0)}") from None
    finally:
        os.close(beneath)
    if os.fstat(descriptor).st_mode & 0o170000 != 0o100000:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{path} is not a regular file")
    return descriptor


# ---- landlock: what files may be written, whatever mounts say ----

_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, list a directory
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_MAKE_DEVICES = 1 << 6 | 1 << 11


def restrict_files(writable: Sequence[str]) -> None:
    """Let this process and its children read what they see, and write below `writable` and to devices alone."""
    version = _syscall(_LANDLOCK_CREATE, None, 0, 1)
    # Rights by the version of landlock that brought them: 13 before any, then refer, truncate, ioctl.
    rights = (1 << (13 + sum(version >= known for known in (2, 3, 5)))) - 1
    # The third word keeps signals and abstract sockets within; the second, of TCP ports, stays empty.
    attributes = (ctypes.c_uint64 * 3)(rights, 0, 3)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _syscall(_LANDLOCK_CREATE, attributes, size, 0)
    allowed = [("/", _READ), ("/dev", _READ | _WRITE_FILE | _TRUNCATE)]
    allowed += [(path, rights & ~_MAKE_DEVICES) for path in writable]
    for path, granted in allowed:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", granted & rights, beneath), 0)
        os.close(beneath)
    _syscall(_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


# ---- seccomp: system calls that no program of a sandbox needs ----

# name -> (number on x86-64, number on arm64; None: does not exist there)
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    # mounts, roots, namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    # parts of the kernel with a history of holes
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "fanotify_init": (300, 262),
    "vmsplice": (278, 75),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the machine
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "vhangup": (153, 58),
    # memory that no watch over processes sees
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}
# "There is no such call" makes C libraries use the older one, whose arguments a filter can see.
_ABSENT = {"clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426)}
_CLONE, _SOCKET, _IOCTL = (56, 220), (41, 198), (16, 29)
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_NEW_NAMESPACES = 0x7E020000
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: type into somebody's terminal


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06


def _refuse(code: int, number: int, error: int) -> bytes:
    """If the loaded word compares with `number`, the call fails with `error`."""
    return _instruction(code, number, 0, 1) + _instruction(_RETURN, _SECCOMP_ERRNO | error)


def _for_call(number: int, argument: int, checks: bytes) -> bytes:
    """For one system call: `checks` on the low word of one argument, then allowed."""
    body = _instruction(_LOAD, 16 + 8 * argument) + checks + _instruction(_RETURN, _SECCOMP_ALLOW)
    return _instruction(_EQUAL, number, 0, len(body) // 8) + body


def filter_program() -> bytes:
    """The filter for this machine's architecture, as BPF instructions.

    Raises:
        OSError: the numbers of this architecture are not known here.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column, audit = _ARCHITECTURES[machine]
    program = _instruction(_LOAD, 4) + _instruction(_EQUAL, audit, 1, 0) + _instruction(_RETURN, _SECCOMP_KILL)
    program += _instruction(_LOAD, 0)
    if machine == "x86_64":  # the same calls again under other numbers (x32)
        program += _refuse(_AT_LEAST, 0x40000000, errno.ENOSYS)
    for numbers, error in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS)):
        for row in numbers.values():
            if (number := row[column]) is not None:
                program += _refuse(_EQUAL, number, error)
    program += _for_call(_CLONE[column], 0, _refuse(_ANY_BIT, _NEW_NAMESPACES, errno.EPERM))
    known = b"".join(
        _instruction(_EQUAL, family, 0, 1) + _instruction(_RETURN, _SECCOMP_ALLOW) for family in _FAMILIES
    )
    program += _for_call(_SOCKET[column], 0, known + _instruction(_RETURN, _SECCOMP_ERRNO | errno.EAFNOSUPPORT))
    typing = b"".join(_refuse(_EQUAL, request, errno.EPERM) for request in _TERMINAL_INPUT)
    program += _for_call(_IOCTL[column], 1, typing)
    return program + _instruction(_RETURN, _SECCOMP_ALLOW)


def restrict_system_calls(program: bytes) -> None:
    """Put a filter over the system calls of this process and its children; it cannot be taken off."""
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    _call(_libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _call(_libc.prctl(22, 2, header, 0, 0), "seccomp")
