"""The launch's private folder, its lock, and the names of its sockets.

libzmq gives a unix socket the modes of the umask and lets a second bind take a path away without an error, so
protection and mutual exclusion come from here: a folder of mode 0700 that only this user can enter, and
`flock`ed lock files. A lock ends with its process, so a folder whose lock is free belongs to a dead
launch and is swept away by the next one.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from strata_coord.ipc.errors import AlreadyRunningError, InvariantError, PlanError

MAX_SOCKET_PATH_BYTES = 107  # of struct sockaddr_un, without the final zero
_LOCK_NAME = "lock"
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_.")
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_LOCK = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def new_launch_id() -> str:
    """Return 128 random bits in hex: the identity of a launch."""
    return secrets.token_hex(16)


def control_endpoint(folder: Path) -> str:
    """Return the address of the coordinator's control socket."""
    return _endpoint(folder, "control")


def link_endpoint(folder: Path, link: int, generation: int) -> str:
    """Return the address of a neighbour link; every generation has its own."""
    return _endpoint(folder, f"link-{link}-{generation}")


def socket_path(endpoint: str) -> Path:
    """Return the path behind an address of this module."""
    return Path(endpoint.removeprefix("ipc://"))


def _endpoint(folder: Path, name: str) -> str:
    path = folder / name
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        message = (
            f"the runtime directory is too deep: a socket path of {size} bytes, at most "
            f"{MAX_SOCKET_PATH_BYTES} are allowed; set XDG_RUNTIME_DIR to a shorter one"
        )
        raise PlanError(message)
    return f"ipc://{path}"


def base_directory() -> Path:
    """Return the folder of all launches of this user, made if need be, mode 0700 and owned by us.

    Raises:
        PlanError: it belongs to someone else, others may enter it, or it cannot be made.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        base = Path(runtime) / "strata-coord"
    else:
        base = Path(tempfile.gettempdir()) / f"strata-coord-{os.getuid()}"
    os.close(_private_folder(base))
    return base


class RuntimeDirectory:
    """The private folder of one launch, from entering the context to leaving it.

    Entering sweeps what dead launches left. The folder is made and swept under a lock on the base folder, so
    a launch that is just starting is never taken for a dead one.
    """

    def __init__(self, launch: str) -> None:
        self._launch = launch
        self._lock_fd = -1
        self._path: Path | None = None

    @property
    def path(self) -> Path:
        """The folder.

        Raises:
            InvariantError: outside the context.
        """
        if self._path is None:
            message = "the runtime directory is used outside its context"
            raise InvariantError(message)
        return self._path

    def __enter__(self) -> "RuntimeDirectory":
        base = base_directory()
        with _folder_lock(base) as base_fd:
            _sweep(base_fd)
            # Twelve digits keep the socket paths short; a clash of two living launches is refused by mkdir.
            name = _checked_name(self._launch)[:12]
            try:
                os.mkdir(name, 0o700, dir_fd=base_fd)
            except FileExistsError:
                message = f"a launch with the identity {name} is running"
                raise AlreadyRunningError(message) from None
            folder_fd = os.open(name, _OPEN_FOLDER, dir_fd=base_fd)
            try:
                self._lock_fd = os.open(
                    _LOCK_NAME, _OPEN_LOCK | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder_fd
                )
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(folder_fd)
        self._path = base / name
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        path, self._path = self.path, None
        with contextlib.suppress(FileNotFoundError), _folder_lock(path.parent) as base_fd:
            _remove_folder(base_fd, path.name)
        os.close(self._lock_fd)


def sweep() -> int:
    """Remove the folders of launches that are gone; return how many there were."""
    with _folder_lock(base_directory()) as base_fd:
        return _sweep(base_fd)


class NamedLock:
    """At most one living process of this user holds the lock of a name, such as a device or a cache entry."""

    def __init__(self, name: str) -> None:
        self._name = _checked_name(name)
        self._file = f"{self._name}.lock"
        self._fd = -1

    def __enter__(self) -> "NamedLock":
        with _folder_lock(base_directory()) as base_fd:
            fd = os.open(self._file, _OPEN_LOCK | os.O_CREAT, 0o600, dir_fd=base_fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                os.close(fd)
                message = f"{self._name} is in use by another launch (pid {holder or 'unknown'})"
                raise AlreadyRunningError(message) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            self._fd = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Under the base folder's lock nobody else can be between opening and locking this file.
        with _folder_lock(base_directory()) as base_fd, contextlib.suppress(FileNotFoundError):
            os.unlink(self._file, dir_fd=base_fd)
        os.close(self._fd)


def _checked_name(name: str) -> str:
    if not name or name.startswith(".") or not _NAME_CHARACTERS.issuperset(name) or len(name) > 64:
        message = f"lock name of {len(name)} characters, 1 to 64 of a-z 0-9 - _ . are allowed"
        raise InvariantError(message)
    return name


def _private_folder(path: Path) -> int:
    """Return a descriptor of a folder that only we may enter, made if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        fd = os.open(path, _OPEN_FOLDER)
    except OSError as error:
        kind = "a link or a file" if error.errno in {errno.ELOOP, errno.ENOTDIR} else error.strerror
        message = f"the runtime directory cannot be used: {kind}"
        raise PlanError(message) from error
    found = os.fstat(fd)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.getuid() or mode & 0o077:
        os.close(fd)
        message = (
            f"the runtime directory has owner {found.st_uid} and mode {mode:04o}, "
            f"owner {os.getuid()} and mode 0700 are needed"
        )
        raise PlanError(message)
    return fd


@contextlib.contextmanager
def _folder_lock(path: Path) -> Iterator[int]:
    """Hold the lock on a folder itself; held for a few file operations only, so waiting is short."""
    fd = _private_folder(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _sweep(base_fd: int) -> int:
    removed = 0
    for name in os.listdir(base_fd):
        found = os.stat(name, dir_fd=base_fd, follow_symlinks=False)
        is_folder = stat.S_ISDIR(found.st_mode)
        if found.st_uid != os.getuid() or not (is_folder or name.endswith(".lock")):
            continue
        if _lock_is_free(base_fd, f"{name}/{_LOCK_NAME}" if is_folder else name):
            if is_folder:
                _remove_folder(base_fd, name)
                removed += 1
            else:
                os.unlink(name, dir_fd=base_fd)
    return removed


def _lock_is_free(base_fd: int, name: str) -> bool:
    try:
        fd = os.open(name, _OPEN_LOCK, dir_fd=base_fd)
    except FileNotFoundError:
        return True  # its launch died before it made the lock
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _remove_folder(base_fd: int, name: str) -> None:
    """Remove a launch's folder. It holds files and sockets only; anything else stays."""
    try:
        folder_fd = os.open(name, _OPEN_FOLDER, dir_fd=base_fd)
    except OSError:
        return
    try:
        for entry in os.listdir(folder_fd):
            with contextlib.suppress(OSError):
                os.unlink(entry, dir_fd=folder_fd)
    finally:
        os.close(folder_fd)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=base_fd)
