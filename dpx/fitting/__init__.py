"""A ready-made training loop: `fit`, its records, and checkpoints from which a run continues with the same bits.

To continue a run later, keep its seed and its checkpoints as secret as the data, and run the same program again:

    seed = secrets.randbits(128)                   # draw it once, then write it down: seed = 0x...
    key = dpx.secret_key(seed)
    optimizer = dpx.chain(dpx.dp_sgd(..., key=key), optax.adam(1e-3))
    result = dpx.fit(loss, optimizer, params, data, checkpoints="runs/1")

The run continues after the last checkpoint with the same batches and noise, so its result has the same bits as if it
had never stopped. `fit` refuses a checkpoint if anything that affects the numbers of a step has changed: the mechanism,
schedule, optimizer, sampling, key, delta, shapes of the parameters, loss, `chunk_size`, `norms`, backend, kind of
machine, XLA flags, jax settings or library versions. It compares only 64 rows of the data, or 8 items of a source. The
other examples must be the same too, because subtracting two runs with the same noise would remove the noise. Use a new
key for a new run. With `on_other_devices=True`, `fit` accepts changes that affect neither the noise nor the batches,
and skips every step that may have been made since the last checkpoint. On a GPU, XLA times its kernels and may choose
different ones in the next process, unless XLA_FLAGS has `--xla_gpu_deterministic_ops=true`.

Several processes of `jax.distributed` can share one run: each calls `fit` with a `sharding` over the devices of all
processes, and with `checkpoints` in one folder on a shared disk. If the processes disagree, all of them refuse the run.

`loop.py` has the loop and `step.py` the compiled step. `settings.py` says what a run may spend and charges a ledger for
it. `facts.py` says what identifies a run. `folder.py` has the files of a run, and proves that no step is released twice
and that the cost covers skipped steps. `progress.py` has evaluations and results. In `processes.py`, processes share
facts and errors.
"""

from dpx.fitting.loop import fit as fit
from dpx.fitting.progress import FitResult as FitResult
from dpx.fitting.progress import Progress as Progress
