"""Which keys have trained in this process: the cell of a notebook that is run again has the noise of the first run."""

import warnings
from pathlib import Path
from typing import Any

from dpx.mechanism import Mechanism

_TRAINED: dict[int, Path | None] = {}  # the folder of the last run of each key, by the mark of the key


def remember(optimizer: Mechanism, folder: Any):
    """Warns if the key of a run that now makes steps has trained before, unless the run continues in its folder.

    The data, the loss and the parameters are not compared, so a run that is the same in all is warned of too.
    """
    mark, path = int(optimizer.noise_key), folder.path and folder.path.resolve()
    if mark in _TRAINED and not (folder.continued and path == _TRAINED[mark]):
        warnings.warn(
            "the key of this optimizer has trained before in this process, in a run that this one does not continue. "
            "Both have the same noise: if anything else differs, such as one example, their difference shows it "
            "without noise. Take a new dpx.secret_key() for every run, or continue the first one in its own folder",
            stacklevel=4,
        )
    _TRAINED[mark] = path
