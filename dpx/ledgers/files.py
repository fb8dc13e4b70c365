"""Small files that only their owner can read, and that a kill or a loss of power leaves whole."""

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout


def make_folder(path: Path):
    """Makes a folder that only its owner can read or enter; if it exists, takes away the rights of others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def acquire_lock(path: Path) -> FileLock:
    """Takes and returns the lock of a folder, which the program holds until it releases it or ends.

    Raises ValueError if another program has it.
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
    """What a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def replace_file(path: Path, text: str):
    """Replaces the file at once, by one that only its owner can read and that survives a loss of power."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)  # of a program that was killed; others may be able to read it
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path):
    """Ensures that a loss of power brings no older file back under a name in the folder."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(opened)
        os.close(opened)
