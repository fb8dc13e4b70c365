"""The training loop for those who do not want to write one: `fit`, its records, and checkpoints that replay bit for
bit.

To continue a run later, keep its seed and its checkpoints, both as secret as the data, and run the same program again:

    seed = secrets.randbits(128)                   # once; then written down: seed = 0x...
    key = dpx.secret_key(seed)
    optimizer = dpx.chain(dpx.dp_sgd(..., key=key), optax.adam(1e-3))
    result = dpx.fit(loss, optimizer, params, data, checkpoints="runs/1")

It continues after the last checkpoint, with the same batches and the same noise, so the result has the same bits as
without the interruption. `fit` refuses the checkpoints of another mechanism, schedule, optimizer, sampling, key, delta
or shape of the parameters, data of which some examples differ (64 of arrays, the first one of a source), and another
loss, `chunk_size`, `norms`, backend, kind of machine, flag of XLA, setting of jax or version of a library, because they
decide numbers of a step. With `on_other_devices=True` it accepts what decides no noise and no batch, and skips the
steps that may have been made since the last checkpoint. On a GPU, XLA times its kernels and takes others in the next
process, unless XLA_FLAGS has `--xla_gpu_deterministic_ops=true`. `fit` cannot see whether the other examples are the
same. They must be, because the difference of two runs with the same noise has no noise. For another run take another
key.

Several processes of `jax.distributed` make one run if each calls `fit` with a `sharding` that spans the devices of all.
`checkpoints` is then a folder on a disk that they share. If the processes differ, all of them refuse the run.

`loop.py` has the loop, `step.py` the compiled step; `settings.py` what a run may spend and pays, `facts.py` what
identifies it; `folder.py` its files, with the proofs that no step is released twice, and what a run costs that
continues on other devices; `progress.py` its evaluations and results; `processes.py` what several processes know of
each other.
"""

from dpx.fitting.loop import fit as fit
from dpx.fitting.progress import FitResult as FitResult
from dpx.fitting.progress import Progress as Progress
