"""`kill -9` at random moments of a run of `dpx.fit`: does the continued run have the numbers of an uninterrupted one?

    python -m tests.kills [--kills N] [--seed N] [--hosts N] [--report FILE]

One run is killed again and again, each time within a few steps after it continued, until N processes were killed. Then
it may finish. The exit status is 1 if its parameters, its state or its history differ from those of a run that nobody
interrupted, in any bit.

With `--hosts 2`, two processes make the run, each on a device of its own with half of the rows. One of them, drawn at
random, is killed. The other is killed a moment later.

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
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

PRELOADED = ["dpx", "orbax.checkpoint", "dp_accounting.pld", "dp_accounting.rdp", "scipy.stats", "scipy.signal"]
EVERY = 3  # steps from a checkpoint to the next
REACH = 8  # a process is killed at most so many steps after the step that it continued at
LINES = 3  # of a ledger of one run, which pays once: the budget, the run, and that it is made
LONGEST = 120.0  # seconds until a process must have said something


class Kill(NamedTuple):
    """first: the step that the run continued at. last: the last step that it reported. victim: the process that was
    killed."""

    first: int
    last: int
    victim: int


class Place(NamedTuple):
    """Of a process in a run of several: its number, how many there are, and a port for them."""

    rank: int
    hosts: int
    port: int


def run(folder: str | None, steps: int, sender: Connection | None, place: Place | None = None, correlated=False):
    """A run that reports each of its steps, and at its end every number that it has; without `sender`, nothing. With a
    folder, it pays into a ledger.

    correlated: whether it has noise of 4 bands, whose past is in the state.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import dpx
    from tests.compiling import hurry

    hurry()
    sharding = None if place is None else joined(place)
    random_numbers = np.random.default_rng(0)
    data = random_numbers.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    given: Any = {"clip_norm": 1.0, "noise_multiplier": 2.0, "key": dpx.secret_key(11)}
    if correlated:
        groups = dpx.sampling.CyclicPoissonSampling(examples=40, batch_size=8, bands=4)
        mechanism = dpx.methods.band_mf_sgd(bands=4, steps=steps, sampling=groups, **given)
    else:
        mechanism = dpx.dp_sgd(sampling=dpx.PoissonSampling(examples=40, batch_size=8), **given)
    optimizer = dpx.chain(mechanism, optax.sgd(0.5, momentum=0.9))

    ledger = None
    if folder is not None:  # beside it, because what is in it belongs to the run
        ledger = dpx.PrivacyLedger(Path(folder).parent / "ledger.jsonl", epsilon=50.0, delta=1e-5)

    def say(what):
        if sender is not None:
            sender.send(what)

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
        callbacks=[lambda progress: say(progress.step)],
        checkpoints=folder,
        checkpoint_every=EVERY,
        sharding=sharding,
        ledger=ledger,
    )
    leaves = jax.tree.leaves((result.params, result.state))
    say([np.asarray(leaf).tobytes() for leaf in leaves] + [repr(result.history), repr(result.epsilon)])
    if place is not None:
        jax.distributed.shutdown()  # waits for the others


def joined(place: Place) -> Any:
    """The sharding of rows over the devices of all processes, which this one joins."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where = f"localhost:{place.port}"
    jax.distributed.initialize(where, place.hosts, place.rank, initialization_timeout=60)
    mesh = jax.make_mesh((place.hosts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))


def server() -> Any:
    """The context of processes that are forked from a server that has imported jax."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def started(folder: Path | None, steps: int, hosts: int = 1, correlated: bool = False) -> tuple[list[Any], Connection]:
    """The processes of a run, and what the first one says."""
    context = server()
    receiver, sender = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where, processes = None if folder is None else str(folder), []
    for rank in range(hosts):
        place = Place(rank, hosts, port) if hosts > 1 else None
        arguments = where, steps, None if rank else sender, place, correlated
        processes.append(context.Process(target=run, args=arguments, daemon=True))
        processes[-1].start()
    sender.close()
    return processes, receiver


def finished(folder: Path | None, steps: int, hosts: int = 1, correlated: bool = False) -> tuple[list[int], list[Any]]:
    """The steps that a run made, and every number at its end."""
    processes, receiver = started(folder, steps, hosts, correlated)
    said = [heard(receiver)]
    while isinstance(said[-1], int):
        said.append(heard(receiver))
    for process in processes:
        process.join()
    return said[:-1], said[-1]


def killed(folder: Path, steps: int, chance: random.Random, hosts: int = 1, correlated: bool = False) -> Kill:
    """A run of which one process is killed at a random moment after a random step."""
    processes, receiver = started(folder, steps, hosts, correlated)
    first = last = heard(receiver)
    target = min(first + chance.randrange(REACH), steps - 1)
    while last < target:
        last = heard(receiver)
    time.sleep(chance.random() * 0.02)  # seconds: a step takes a few milliseconds, a checkpoint a hundred
    victim = chance.randrange(hosts) if hosts > 1 else 0
    os.kill(processes[victim].pid, signal.SIGKILL)
    if hosts > 1:
        time.sleep(chance.random() * 0.2)  # the others may go on, or wait
    for process in processes:
        process.kill()
        process.join()
    with contextlib.suppress(EOFError, OSError):  # the kill can cut the last message
        while isinstance(said := receiver.recv(), int):
            last = said
    return Kill(first - 1, last, victim)


def heard(receiver: Connection) -> Any:
    if not receiver.poll(LONGEST):
        raise TimeoutError(f"a run said nothing for {LONGEST} seconds")
    return receiver.recv()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Does a killed run replay?")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=1, help="how many processes make the run")
    parser.add_argument("--report", type=Path, help="write a table here")
    given = parser.parse_args(arguments)
    steps, chance = 4 * given.kills, random.Random(given.seed)
    _, expected = finished(None, steps, given.hosts)
    with tempfile.TemporaryDirectory() as folder:
        kills = [killed(Path(folder) / "run", steps, chance, given.hosts) for _ in range(given.kills)]
        made, found = finished(Path(folder) / "run", steps, given.hosts)
        paid = (Path(folder) / "ledger.jsonl").read_text().count("\n") == LINES
    same = found == expected and paid
    if given.report:
        given.report.write_text(report(given, steps, kills, made[0] - 1, same))
    print(f"{len(kills)} kills, then {len(made)} steps of {steps}: {'the same bits' if same else 'OTHER NUMBERS'}")
    return 0 if same else 1


def report(given: argparse.Namespace, steps: int, kills: list[Kill], last_first: int, same: bool) -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "optax", "orbax-checkpoint"))
    continued = [kill.first for kill in kills[1:]] + [last_first]
    columns = ["kill", "the run continued at step", "the last step that it reported", "the next one continued at step"]
    rows = [
        [number, kill.first, kill.last, then]
        for number, (kill, then) in enumerate(zip(kills, continued, strict=True), 1)
    ]
    command, where = f"--kills {given.kills} --seed {given.seed}", ""
    if given.hosts > 1:
        command, where = f"{command} --hosts {given.hosts}", f" in {given.hosts} processes"
        columns.append("the process that was killed")
        rows = [[*row, kill.victim] for row, kill in zip(rows, kills, strict=True)]
    verdict = "are those of a run without interruption, bit for bit" if same else "DIFFER from an uninterrupted run"
    head, *lines = ("| " + " | ".join(map(str, row)) + " |\n" for row in [columns, *rows])
    table = "".join([head, f"|{'---|' * len(columns)}\n", *lines])
    return f"""# Killed runs

`python -m tests.kills {command} --report FILE`, {datetime.date.today()}, {versions}.

One run of `dpx.fit` of {steps} steps{where}, with a checkpoint every {EVERY} steps, was killed by
SIGKILL {len(kills)} times at random moments. Its parameters, optimizer state, history and epsilon at the end
{verdict}.

{table}"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
