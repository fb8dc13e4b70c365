"""Files of a run: each is complete, or it does not exist, and only its owner can read it."""

import contextlib
import os
import secrets
from pathlib import Path

SENSITIVE = """This folder is as sensitive as the training data. history.json holds losses of the training data. The
checkpoints hold the whole optimizer state, whose `unreleased_*` fields are functions of the training data that were
never released. No privacy guarantee covers them. Share the parameters, or dpx.publishable_state(state), instead.
"""


def make_folder(path: Path):
    """Makes a folder that only its owner can read or enter; takes the rights of others from one that exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        path.chmod(0o700)


def write(path: Path, text: str):
    """Replaces the file at once, by one that only its owner can read."""
    os.replace(_part(path, text), path)
    keep_names(path.parent)


def create(path: Path, text: str):
    """Makes the file at once, with its text, unless it exists: one of several programs can."""
    part = _part(path, text)
    with contextlib.suppress(FileExistsError):
        try:
            os.link(part, path)
        except FileExistsError:
            raise
        except OSError:  # a disk without links; a program that is killed just here leaves a file without its whole text
            _new(path, text)
    part.unlink()
    keep_names(path.parent)


def keep_names(folder: Path):
    """After it, a loss of power brings no older file back under a name in the folder."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(opened)
        os.close(opened)


def _part(path: Path, text: str) -> Path:
    """A new file beside `path`. Its name is random, because two programs may write the same file."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    _new(part, text)
    return part


def _new(path: Path, text: str):
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(opened, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # a full disk; a file without its whole text would end every later program
        path.unlink()
        raise
