"""The facts that identify a run. If they differ, `fit` refuses the folder, because another run would use its noise."""

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dpx import keys
from dpx.accounting.report import version_of
from dpx.fitting import processes
from dpx.fitting.settings import Terms
from dpx.fitting.steps import Carry
from dpx.mechanism import Mechanism
from dpx.sampling.rows import rows_of
from dpx.states.record import ReleaseState, fingerprint
from dpx.xla.devices import traced_for
from dpx.xla.jaxprs import constants

RECORD = "record of the releases"  # the name of a fact: which fields the states of a run have
PROGRAM = "mechanism and optimizer, with their schedules (their fingerprint)"
LAYOUT = "layout of the arrays (its fingerprint)"
MACHINE = "kind of machine"
SETTINGS = "settings of XLA and jax"
OF_DEVICES = ("processes", "devices", LAYOUT, "backend", MACHINE, SETTINGS)
ROUNDING = (*OF_DEVICES, "chunk_size", "microbatch_size", "norms")  # facts that decide how sums are rounded
SILENT = ("--xla_dump", "--xla_force_host_platform_device_count")  # flags of XLA that change no number
INSTRUCTIONS = ("avx", "fma", "sse", "amx", "asimd", "sve")  # of a CPU, whose numbers a kernel may add in another order
FIRST_EXAMPLE = "first example of the data (its mark)"
READINGS = 16  # after which a source of random flips has shown both, but with probability 2^-15
PACKAGES = ("dpx", "jax", "jaxlib", "optax")  # whose versions decide the numbers of a run


def facts_of(terms: Terms, carry: Carry, options: dict[str, Any]) -> dict[str, Any]:
    """By which a run is known again. A mark tells two keys apart, and reveals neither.

    options: of the gradient. They, the backend, the machine, the settings and the versions decide how its sums are
    rounded, and a step that is made again must be the same in every bit, because it has the same noise.
    """
    optimizer = terms.optimizer
    described = jax.tree_util.tree_leaves_with_path(carry)
    shapes = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in described]
    numbers = sum(leaf.size for leaf in jax.tree.leaves(carry.params))
    facts = {f"stage {number} of the mechanism": stage for number, stage in enumerate(optimizer.stages, start=1)}
    facts |= {RECORD: ", ".join(ReleaseState._fields)}
    facts |= {"event of a step": repr(optimizer.event(1)), "sampling": repr(optimizer.sampling)}
    secrets = {"noise": optimizer.key, "batches": terms.key}
    facts |= {f"key of the {name} (its mark)": int(keys.mark(key)) for name, key in secrets.items()}
    facts |= {"delta": terms.delta, "accountant": terms.accountant}
    facts |= {"records of a person": terms.records} if terms.records > 1 else {}
    facts |= {"parameters": f"{numbers} numbers", "arrays (their fingerprint)": fingerprint("\n".join(shapes))}
    facts |= {PROGRAM: _program(optimizer, carry)}
    facts |= {name: repr(value) for name, value in options.items() if value not in (None, False)}
    facts |= {"processes": jax.process_count()} if jax.process_count() > 1 else {}
    facts |= {SETTINGS: settings} if (settings := settings_of()) else {}
    facts |= {"backend": jax.default_backend(), MACHINE: machine()}
    return facts | {f"version of {name}": version_of(name) for name in PACKAGES}


def _program(optimizer: Mechanism, carry: Carry) -> int:
    """A fingerprint of the equations of `optimizer.update`, which hold every number of every schedule.

    They are those for one device, so that the fingerprint is the same on others.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), carry)  # on no mesh
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), np.float32), shapes.params)
    included = jax.ShapeDtypeStruct((1,), np.bool_)
    with traced_for(devices=1):
        closed = jax.make_jaxpr(
            lambda grads, carry, included: optimizer.update(grads, *carry[::-1], included=included)
        )(grads, shapes, included)
    text = re.sub("0x[0-9a-f]+", "", str(closed.jaxpr))  # without addresses
    return fingerprint(text + repr([bytes_of(constant) for constant in constants(closed) if not keys.is_key(constant)]))


def machine() -> str:
    """The kinds of the devices of all processes; of CPUs, also how many compute, because XLA splits sums over them."""
    if jax.default_backend() != "cpu":
        return ", ".join(sorted({device.device_kind for device in jax.devices()}))
    return "; ".join(dict.fromkeys(processes.everyone(_cpus())))


def _cpus() -> str:
    """How many CPUs this process may use, their name and their instructions (a fingerprint)."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    file = Path("/proc/cpuinfo")
    lines = file.read_text(errors="replace").split("\n\n")[0].splitlines() if file.is_file() else []
    found = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    words = found.get("flags", found.get("features", "")).split()
    known = sorted(word for word in words if word.startswith(INSTRUCTIONS))
    name = found.get("model name", found.get("cpu part", platform.processor() or platform.machine()))
    return f"{os.environ.get('NPROC', count)} CPUs, {name}, instructions {fingerprint(known)}"


def settings_of() -> str:
    """The flags of XLA and the precision of products that this process has chosen; "" for the defaults."""
    flags = [flag for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS") for flag in os.environ.get(name, "").split()]
    config: Any = jax.config
    precision = config.jax_default_matmul_precision
    products = [] if precision is None else [f"products in {precision}"]
    return " ".join([*(flag for flag in flags if not flag.startswith(SILENT)), *products])


def bytes_of(array: Any) -> bytes:
    return np.asarray(processes.readable(array)).tobytes()


def layout_of(carry: Carry, sharding: Any) -> int:
    """A fingerprint of how rows, parameters and state lie on the devices, which decides how sums are rounded."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return fingerprint(jax.device_count())
    shards = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(carry)]
    return fingerprint(
        (jax.device_count(), tuple(sharding.mesh.shape.values()), sharding.num_devices, sharding.spec, shards)
    )


def first_example(data: Any, terms: Terms) -> int | None:
    """A mark of example 0, which says nothing to those who do not know the key; None if each reading is another.

    Processes whose data differ, because each loaded a part of its own, have other marks, but with probability 2^-32.
    """
    rows = rows_of(data, terms.optimizer.sampling.examples)
    secret = np.asarray(keys.words(keys.stream(terms.key, "first example"))).tobytes()
    marks = set()
    for _ in range(READINGS):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(rows(np.zeros(1, np.int32), np.ones(1, bool)))]
        parts = [part for leaf in leaves for part in (f"{leaf.dtype}{leaf.shape}".encode(), leaf.tobytes())]
        marks.add(hashlib.blake2b(b"".join(parts), digest_size=4, key=secret).hexdigest())
        if len(marks) > 1:
            return None
    return int(marks.pop(), 16)
