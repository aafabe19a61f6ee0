"""Files in the user's cache folder that save later processes a compilation.

The environment variable WARPSPEC_CACHE_DIR names the folder; by default it is ``warpspec`` in ``$XDG_CACHE_HOME`` or
``~/.cache``. If it is set but empty, caching is off. The variable is read at every access.

Any number of processes may share the folder, on one machine or over a network. The files contain code that will run, so
a folder that somebody else owns, or may write to, is refused with a warning. Nothing here raises for a folder that
cannot be read or written, or for a damaged file: the file counts as absent, and there is a RuntimeWarning.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "WARPSPEC_CACHE_DIR"
MAGIC = b"warpspec"  # start of a file; the SHA-256 of its name and content follows
HEADER_BYTES = len(MAGIC) + hashlib.sha256().digest_size
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
LOCK_SECONDS = 300  # how long a process waits for another one's compilation before it compiles itself
POLL_SECONDS = 0.05
ABANDONED_SECONDS = 3600  # age after which an unfinished file counts as abandoned
PART_SUFFIX, LOCK_SUFFIX = ".part", ".lock"


def cache_folder() -> Path | None:
    """The folder that has the sub-folders of all caches; None if caching is off."""
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "warpspec"


class DiskCache:
    """Contents by name, in a sub-folder of the cache folder.

    limit: bytes that the sub-folder may hold; beyond it, the least recently used files are deleted.
    """

    def __init__(self, name: str, limit: int):
        self.name, self.limit = name, limit

    @property
    def folder(self) -> Path | None:
        """The sub-folder, which need not exist; None if caching is off."""
        root = cache_folder()
        return None if root is None else root / self.name

    def __contains__(self, name: str) -> bool:
        """Whether there is a file with this name, whatever its content."""
        folder = self.folder
        return folder is not None and os.path.exists(folder / name)

    def read(self, name: str) -> bytes | None:
        """The content stored under a name; None if there is none."""
        folder = self.folder
        if folder is None:
            return None
        path = folder / name
        try:
            if not _is_trusted(folder):
                return None
            data = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _warn(f"{path} cannot be read: {error}")
            return None
        content = data[HEADER_BYTES:]
        if data[:HEADER_BYTES] != _header(name, content):
            _warn(f"{path} is damaged or not ours; it is made again")
            return None
        with contextlib.suppress(OSError):  # a folder whose owner does not delete by age
            os.utime(path)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Store a content atomically, and delete the least recently used ones beyond the limit."""
        folder = self.folder
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_trusted(folder):
                return
            descriptor, part = tempfile.mkstemp(suffix=PART_SUFFIX, dir=folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(_header(name, content))
                    file.write(content)
                os.replace(part, folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part)
                raise
        except OSError as error:
            _warn(f"nothing is kept in {folder}: {error}. {CACHE_VARIABLE} names another folder")
            return
        with contextlib.suppress(OSError):  # another process was faster
            self._drop_beyond_limit(folder)

    def _drop_beyond_limit(self, folder: Path) -> None:
        now, total, found = time.time(), 0, []
        for entry in os.scandir(folder):
            if entry.name.endswith(LOCK_SUFFIX):
                continue
            with contextlib.suppress(FileNotFoundError):  # deleted by another process
                status = entry.stat()
                if not entry.name.endswith(PART_SUFFIX):
                    found.append((status.st_mtime, status.st_size, entry.path))
                elif now - status.st_mtime > ABANDONED_SECONDS:
                    os.unlink(entry.path)
        for _, size, path in sorted(found, reverse=True):
            total += size
            if total > self.limit:
                Path(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def making(self, name: str, seconds: float = LOCK_SECONDS) -> Iterator[bool]:
        """A context in which no other process makes this content; its value is whether it had to wait for another one.

        Several names may share a lock. The context is entered anyway after ``seconds``, and if the folder or its file
        system has no locks: content that is made twice is the same.
        """
        with contextlib.ExitStack() as stack:
            waited = False
            try:
                descriptor = self._open_lock(name)
                if descriptor is not None:
                    stack.callback(os.close, descriptor)  # which also unlocks it
                    waited = _lock(descriptor, time.monotonic() + seconds)
            except OSError:
                pass
            yield waited

    def _open_lock(self, name: str) -> int | None:
        folder = self.folder
        if folder is None:
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / (hashlib.sha256(name.encode()).hexdigest()[:2] + LOCK_SUFFIX)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _lock(descriptor: int, deadline: float) -> bool:
    """Take a lock, or give up at the deadline. Returns whether another process had it first."""
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return waited
        except BlockingIOError:
            waited = True
            if time.monotonic() > deadline:
                return waited
            time.sleep(POLL_SECONDS)


def _header(name: str, content: bytes) -> bytes:
    return MAGIC + hashlib.sha256(name.encode() + b"\0" + content).digest()


def _is_trusted(folder: Path) -> bool:
    """Whether only this user and root can have written the folder's files; warns if not."""
    status = os.stat(folder)
    if status.st_uid not in (0, os.geteuid()):
        _warn(
            f"{folder} belongs to user {status.st_uid}: code in it is not run. {CACHE_VARIABLE} names another"
        )
        return False
    if status.st_mode & WRITABLE_BY_OTHERS:
        _warn(
            f"{folder} may be written by others (mode {stat.S_IMODE(status.st_mode):o}): code in it is not run. "
            f"`chmod go-w` allows it, or {CACHE_VARIABLE} names another"
        )
        return False
    return True


def _warn(text: str) -> None:
    warnings.warn(f"warpspec cache: {text}", RuntimeWarning, stacklevel=3)
