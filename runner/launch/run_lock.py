"""The lock of a folder of a run or a study, which prevents two processes from writing to it."""

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.contracts.errors import ConfigError

LOCK = "lock"
"""File in the folder. Its content, a process id and a host, is used only in the message."""
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

log = logging.getLogger("runner")


@contextmanager
def locked(folder: Path, key: str = "run.output_dir") -> Iterator[None]:
    """Hold the lock of ``folder`` while the context is open; the system frees it if this process dies.

    ``key`` is the option that names the folder. Only the process that prepares a run locks its folder,
    because the ranks end with that process. On a filesystem without locks, a warning is logged.

    Raises:
        ConfigError: if another process holds the lock.
    """
    # Not truncated when opened, because it may hold the name of its owner. NFS needs write access to lock.
    with os.fdopen(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = file.read().strip() or "another process"
            raise ConfigError(
                f"{key}: {folder} is in use by {owner}; wait until it has ended, or end it."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning("%s: this filesystem has no locks; let only one command use it.", folder)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
