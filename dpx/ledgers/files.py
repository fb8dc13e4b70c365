"""Small files that only their owner can read, and that stay intact if the process is killed or power is lost."""

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def make_folder(path: Path):
    """Makes a folder that only its owner can read or enter; if it exists, removes everyone else's permissions."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def acquire_lock(path: Path) -> FileLock:
    """Acquires and returns the lock of a folder. The program holds the lock until it exits or releases it.

    Raises ValueError if another program holds it.
    """
    lock = FileLock(path / "lock", timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{path} must belong to one program at a time, but another one has it now: end that one first, because "
            "both would use the same noise"
        ) from error
    return lock


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def replace_file(path: Path, text: str):
    """Replaces the file atomically. Only its owner can read the new file, which survives a loss of power."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # left by a killed program, perhaps readable by others
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path):
    """Ensures that no replaced file of the folder reappears after a loss of power."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(opened)
        os.close(opened)
