"""`kill -9` at random moments of a run of `dpx.fit`: does the continued run have the numbers of an uninterrupted one?

    python -m tests.kills [--kills N] [--seed N] [--report FILE]

One run is killed again and again, each time within a few steps after it continued, until N processes were killed. Then
it may finish. The exit status is 1 if its parameters, its state or its history differ from those of a run that nobody
interrupted, in any bit.

Every process is forked from a server that has imported jax, because that takes as long as the rest of its life.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = ["dpx", "orbax.checkpoint", "dp_accounting.pld", "dp_accounting.rdp", "scipy.stats", "scipy.signal"]
EVERY = 3  # steps from a checkpoint to the next
REACH = 8  # a process is killed at most so many steps after the step that it continued at
LONGEST = 120.0  # seconds until a process must have said something


class Kill(NamedTuple):
    """first: the step that the process continued at. last: the last step that it reported."""

    first: int
    last: int


def run(folder: str | None, steps: int, sender: Connection):
    """A run that reports each of its steps, and at its end every number that it has."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dpx

    random_numbers = np.random.default_rng(0)
    data = random_numbers.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    sampling = dpx.PoissonSampling(examples=40, batch_size=8)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=sampling, key=dpx.secret_key(11))
    optimizer = dpx.chain(mechanism, optax.sgd(0.5, momentum=0.9))

    def loss(params, example):
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], label)

    result = dpx.fit(
        loss,
        optimizer,
        {"w": jnp.zeros((3, 2))},
        data,
        steps=steps,
        delta=1e-5,
        accountant="rdp",
        evaluate=lambda params: {"norm": jnp.linalg.norm(params["w"])},
        evaluate_every=1,
        callbacks=[lambda progress: sender.send(progress.step)],
        checkpoints=folder,
        checkpoint_every=EVERY,
    )
    leaves = jax.tree.leaves((result.params, result.state))
    sender.send([np.asarray(leaf).tobytes() for leaf in leaves] + [repr(result.history), repr(result.epsilon)])


def server() -> Any:
    """The context of processes that are forked from a server that has imported jax."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def started(folder: Path | None, steps: int) -> tuple[Any, Connection]:
    context = server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(None if folder is None else str(folder), steps, sender), daemon=True)
    process.start()
    sender.close()
    return process, receiver


def finished(folder: Path | None, steps: int) -> tuple[list[int], list[Any]]:
    """The steps that a process made, and every number at its end."""
    process, receiver = started(folder, steps)
    said = [heard(receiver)]
    while isinstance(said[-1], int):
        said.append(heard(receiver))
    process.join()
    return said[:-1], said[-1]


def killed(folder: Path, steps: int, chance: random.Random) -> Kill:
    """A process that is killed at a random moment after a random step."""
    process, receiver = started(folder, steps)
    first = last = heard(receiver)
    target = min(first + chance.randrange(REACH), steps - 1)
    while last < target:
        last = heard(receiver)
    time.sleep(chance.random() * 0.02)  # seconds: a step takes a few milliseconds, a checkpoint a hundred
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with contextlib.suppress(EOFError, OSError):  # the kill can cut the last message
        while isinstance(said := receiver.recv(), int):
            last = said
    return Kill(first - 1, last)


def heard(receiver: Connection) -> Any:
    if not receiver.poll(LONGEST):
        raise TimeoutError(f"a run said nothing for {LONGEST} seconds")
    return receiver.recv()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Does a killed run replay?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="write a table here")
    given = parser.parse_args(arguments)
    steps, chance = 4 * given.kills, random.Random(given.seed)
    _, expected = finished(None, steps)
    with tempfile.TemporaryDirectory() as folder:
        kills = [killed(Path(folder) / "run", steps, chance) for _ in range(given.kills)]
        made, found = finished(Path(folder) / "run", steps)
    same = found == expected
    if given.report:
        given.report.write_text(report(given, steps, kills, made[0] - 1, same))
    print(f"{len(kills)} kills, then {len(made)} steps of {steps}: {'the same bits' if same else 'OTHER NUMBERS'}")
    return 0 if same else 1


def report(given: argparse.Namespace, steps: int, kills: list[Kill], last_first: int, same: bool) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax", "orbax-checkpoint"))
    continued = [kill.first for kill in kills[1:]] + [last_first]
    rows = [
        f"| {number} | {kill.first} | {kill.last} | {then} |"
        for number, (kill, then) in enumerate(zip(kills, continued, strict=True), start=1)
    ]
    verdict = "are those of a run without interruption, bit for bit" if same else "DIFFER from an uninterrupted run"
    return f"""# Killed runs

`python -m tests.kills --kills {given.kills} --seed {given.seed} --report FILE`, {datetime.date.today()}, {versions}.

One run of `dpx.fit` of {steps} steps, with a checkpoint every {EVERY} steps, was killed by SIGKILL {len(kills)} times
at random moments. Its parameters, optimizer state, history and epsilon at the end
{verdict}.

| kill | the process continued at step | the last step that it reported | the next one continued at step |
|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
