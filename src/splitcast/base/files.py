"""Files that are whole or absent, also after a crash, and a lock between processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from splitcast.base.errors import SplitcastError

LOCK = ".lock"


def write_atomically(path: Path, *content: bytes | memoryview) -> None:
    """Write, part after part, under a temporary name, force to disk, rename, force the new name to disk."""
    temporary = temporary_of(path)
    with temporary.open("wb") as file:
        file.writelines(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def temporary_of(path: Path) -> Path:
    """Where `write_atomically` writes first; a process that was killed leaves it behind."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def read_bounded(path: Path, most: int) -> bytes:
    """The content of an ordinary file of at most so many bytes."""
    try:
        if not path.is_file():
            raise SplitcastError(f"run: {path} is not a file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise SplitcastError(f"run: cannot read {path}: {error.strerror}") from None
    if len(content) > most:
        raise SplitcastError(f"run: {path} is damaged: longer than {most} bytes")
    return content


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; refused while another holds it, and over when the process dies."""
    file = folder / LOCK
    opened = _take(file)
    try:
        os.ftruncate(opened, 0)
        os.write(opened, str(os.getpid()).encode())
        yield
    finally:
        file.unlink(missing_ok=True)  # while it is held: who opened it before finds out in `_take`
        os.close(opened)


def writer(folder: Path) -> int | None:
    """The process of this machine that holds a folder; who was killed leaves the file behind, but holds nothing."""
    try:
        who = read_bounded(folder / LOCK, 20)
    except SplitcastError:
        return None
    pid = int(who) if who.isdigit() else 0
    if pid:
        try:
            os.kill(pid, 0)
        except PermissionError:  # another user's
            return pid
        except (OSError, OverflowError):
            return None
    return pid or None


def _take(file: Path) -> int:
    while True:
        try:
            opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise SplitcastError(f"run: cannot write in {file.parent}: {error.strerror}") from None
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.exists() and os.path.samestat(os.fstat(opened), file.stat()):
                return opened
        except BlockingIOError:
            who = os.read(opened, 20).decode("ascii", "replace")
            os.close(opened)
            raise SplitcastError(
                f"run: {file.parent} is being written by process {who if who.isdigit() else '?'}; "
                "wait for it or stop it"
            ) from None
        except FileNotFoundError:  # between exists() and stat()
            pass
        os.close(opened)  # its holder deleted it meanwhile; the name is free again
