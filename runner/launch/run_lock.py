"""The lock of a run folder, which prevents the same run from being started twice at the same time."""

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
"""File in the run folder. Its content, a process id and a host, is used only in the message."""
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)

log = logging.getLogger("runner")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder`` while the context is open; the system frees it if this process dies.

    Only the process that prepares the run holds the lock, because the ranks end with that process. On a
    filesystem without locks, a warning is logged.

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
                f"run.output_dir: {folder} is in use by {owner}; wait until it has ended, or end it."
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            log.warning("%s: this filesystem has no locks; do not start this run twice.", folder)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
