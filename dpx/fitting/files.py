"""Files of a run: each is complete, or it does not exist, and only its owner can read it."""

import os
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
    part = path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)  # of a process that was killed; its mode may be another
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # a loss of power must not bring back an older file
    os.replace(part, path)
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(folder)
        os.close(folder)
