"""What XLA's compilers for TPUs and GPUs make of a private step, without such a device.

    make accelerators                                         # an environment of its own, and the whole table
    python -m benchmarks.accelerators --for v5e --for h100    # by .venv-accelerators/bin/python

Each step is compiled three times: without privacy, by hand (`jax.vmap`, clipping and a sum, with the noise of
`jax.random.normal`), and with dpx; and with Adam for 8 or 64 chips, by FSDP (an array of 2^14 numbers or more is
sharded) or tensor parallel, without the row by hand. Of each, the table has the temporary memory, the bytes that its
kernels read and write, those that several chips send, and the seconds to compile. For a TPU it has the cycles that the
compiler estimates; for a GPU, the operations of its products, weighed by the peak rate of the unit that computes them.
Loops count once a turn, and of an array that a kernel cuts, the part counts; bytes that were counted in another way are
left out. Nothing runs, so no number is a time. Every program is compiled in a process of its own, because a compiler
may end it.

`--bounds` asks what of dpx's cycles any private step needs: those of the step without privacy with dpx's noise alone,
and with this noise and a clip that nothing proves, in three ways: dpx without its barriers, roundings and blocks, where
one product adds all positions of all examples; by hand; and by hand in two backward passes, the second of the weighted
losses. `--row` asks for one row alone, also for dpx in two backward passes or in microbatches of 4, and for the step
without privacy in parts of 4.

Peak rates are those of the makers' data sheets, dense. The facts of a GPU are what XLA asks the driver for. Figures are
kept in benchmarks/results/accelerators.jsonl, so a command replaces the lines of its own models; all lines together
are benchmarks/results/accelerators.md.
"""

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import programs, report, sharded

PLAIN, BY_HAND, PRIVATE, OTHER_NOISE = "not private", "by hand", "dpx", "dpx, its noise left out"
PLAIN_IN_PARTS = "not private, in parts of 4"
WAYS = (sharded.TWICE, sharded.IN_PARTS, PLAIN_IN_PARTS)
ROWS, SHARDED_ROWS = (PLAIN, BY_HAND, PRIVATE, OTHER_NOISE), (PLAIN, PRIVATE)
NOISED, NOISED_BY_HAND, TWICE = "not private, with noise", "by hand, with dpx's noise", "by hand, two backward passes"
UNGUARDED = "dpx without its proof"
BOUNDS = (PLAIN, NOISED, PRIVATE, UNGUARDED, TWICE, NOISED_BY_HAND, BY_HAND)
ALL_ROWS = tuple(dict.fromkeys((*ROWS, *WAYS, *BOUNDS)))
MODELS = {"mlp": 256, "adadpigu_cnn": 256, "resnet20": 64, "transformer": 64, "vit_small": 16}
LAYERS = {f"a layer of GPT-2, 16 of {length}": (1, 768, 12, 64, length, 16) for length in (512, 128)}
SCANS = {"gpt of 4 layers": (4, 256, 4, 5000, 64, 8), "gpt2_small": (12, 768, 12, 50_257, 512, 8)}
BOUNDED = ("mlp", "adadpigu_cnn", "gpt of 4 layers, scanned", *LAYERS, "gpt2_small, scanned")
LORA = "GPT-2 small, scanned, LoRA"
FSDP = ("GPT-2, 2 layers", "GPT-2 small", "Llama 1B", "Llama 1B, LoRA")
SHARDED = {f"{name}, on 8 chips": (name, "FSDP", 8) for name in FSDP} | {
    "GPT-2, 2 layers, tensor parallel on 8 chips": ("GPT-2, 2 layers", "tensor parallel", 8),
    "GPT-2, 2 layers, 64 of 512, on 64 chips": ("GPT-2, 2 layers", "FSDP", 64),
}
FORMS = {"": "own arrays", ", scanned": "scan", ", scanned, rematerialised": "scan with remat"}
KEPT = Path(__file__).parent / "results" / "accelerators.jsonl"
TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
GPU = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: %(lanes)s
  shared_memory_per_block: 49152 shared_memory_per_core: %(shared)s shared_memory_per_block_optin: %(optin)s
  core_count: %(cores)s block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: %(bandwidth)s l2_cache_size: %(cache)s clock_rate_ghz: %(clock)s device_memory_size: %(memory)s
  cuda_compute_capability { major: %(capability)s } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }
device_description_str: "%(name)s"
"""


class Device(NamedTuple):
    """topology: its name for a TPU, None for a GPU. facts: of a GPU. rates: float operations a second by the type of
    the operands of a product, a GPU's: "f32" is the rate of plain float32, and "f32 DEFAULT" that of TF32."""

    topology: str | None
    facts: dict[str, Any]
    rates: dict[str, float]


DEVICES = {
    "v5e": Device("v5e:2x2", {}, {}),
    "v6e": Device("v6e:2x2", {}, {}),
    "v5p": Device("v5p:2x2x2", {}, {}),
    "a100": Device(
        None,
        {"name": "NVIDIA A100-SXM4-80GB", "cores": 108, "lanes": 64, "shared": 167936, "optin": 166912}
        | {"bandwidth": 2039 * 10**9, "cache": 40 * 2**20, "clock": 1.41, "memory": 80 * 2**30, "capability": 8},
        {"f32": 19.5e12, "f32 DEFAULT": 156e12, "bf16": 312e12},
    ),
    "h100": Device(
        None,
        {"name": "NVIDIA H100 80GB HBM3", "cores": 132, "lanes": 128, "shared": 233472, "optin": 232448}
        | {"bandwidth": 3352 * 10**9, "cache": 50 * 2**20, "clock": 1.98, "memory": 80 * 2**30, "capability": 9},
        {"f32": 67e12, "f32 DEFAULT": 495e12, "bf16": 990e12},
    ),
    "b200": Device(
        None,
        {"name": "NVIDIA B200", "cores": 148, "lanes": 128, "shared": 233472, "optin": 232448}
        | {"bandwidth": 8000 * 10**9, "cache": 126 * 2**20, "clock": 1.97, "memory": 180 * 2**30, "capability": 10},
        {"f32": 80e12, "f32 DEFAULT": 1100e12, "bf16": 2250e12},
    ),
}


def models() -> list[str]:
    return [*MODELS, *LAYERS, *(name + more for name in SCANS for more in FORMS), LORA, *SHARDED]


@functools.cache
def problem(model: str, size: int | None = None) -> tuple[Any, Callable, Any, Callable[[str], bool]]:
    """The parameters, the loss of one example, and a batch, whose numbers do not matter, and what is trained.

    size: of the batch, if not the table's."""
    if model in MODELS:
        from benchmarks import models

        made = models.PROBLEMS[model]()
        return made.params, made.loss, made.batch(size or MODELS[model]), lambda path: True
    if model == LORA:
        of = sharded.decoder("gpt2", layers=12, lora_rank=8, **sharded.GPT2 | {"batch": size or 8})
        assert of.trained is not None
        return of.params, of.loss, of.batch, of.trained
    from benchmarks import scans

    name = model if model in LAYERS else model.split(",")[0]
    shape = scans.Shape(*(LAYERS | SCANS)[name])
    shape = shape._replace(batch=size or shape.batch)
    return *scans.build(shape, FORMS[model.removeprefix(name)]), lambda path: True


def step(model: str, row: str, platform: str, size: int | None = None) -> tuple[Callable, tuple]:
    """The step for a platform, and its inputs, of which the state of a mechanism is of shapes. size: as `problem`."""
    import jax
    import jax.numpy as jnp
    import optax

    import dpx
    from dpx.values import leaf_path

    params, loss, batch, trained = problem(model, size)
    rows = jax.tree.leaves(batch)[0].shape[0]

    def held(path, x):
        return x if trained(leaf_path(path)) else jax.lax.stop_gradient(x)

    def of_trained(params, row):
        return loss(jax.tree_util.tree_map_with_path(held, params), row)

    def not_private(params, batch):
        return jax.grad(lambda p: jax.vmap(of_trained, (None, 0))(p, batch).mean())(params)

    def in_parts(params, batch):
        def add(total, part):
            return jax.tree.map(lambda x, y: x + y * 4 / rows, total, not_private(params, part)), None

        parts = jax.tree.map(lambda x: x.reshape(-1, 4, *x.shape[1:]), batch)
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]

    def clipped(params, batch, passes=1):
        grads = jax.vmap(jax.grad(of_trained), (None, 0))(params, batch)
        factors = jnp.minimum(1, 1 / jax.vmap(optax.tree.norm)(grads)) / rows
        if passes == 2:
            return jax.grad(lambda p: factors @ jax.vmap(of_trained, (None, 0))(p, batch))(params)
        return jax.tree.map(lambda g: jnp.tensordot(factors, g, 1), grads)

    def by_hand(params, batch):
        noise = optax.tree.random_like(jax.random.key(0), params, jax.random.normal)
        return jax.tree.map(lambda g, n: g + n / rows, clipped(params, batch), noise)

    without_state = {PLAIN: not_private, PLAIN_IN_PARTS: in_parts, BY_HAND: by_hand}
    if row in without_state:
        return without_state[row], (params, batch)
    sampling = dpx.PoissonSampling(examples=50_000, batch_size=rows)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=jax.random.key(2))
    if model == LORA:
        mechanism = dpx.in_coordinates(mechanism, dpx.coordinates.trainable(mask=trained))
    state = jax.eval_shape(mechanism.init, params)
    sums = {NOISED: not_private, NOISED_BY_HAND: clipped, TWICE: functools.partial(clipped, passes=2)}
    if row in sums:
        of_batch = sums[row]
        noised = lambda params, batch, state: mechanism.release((of_batch(params, batch),), state, params)  # noqa: E731
        return noised, (params, batch, state)
    if row == UNGUARDED:
        leave_out_the_proof()
    if row == OTHER_NOISE:
        mechanism = mechanism.replace(
            release=lambda sums, state, params: (jax.tree.map(lambda s: s / rows, sums[0].high), state)
        )
    ways: Any = {sharded.TWICE: {"norms": "ghost", "backward_passes": 2}, sharded.IN_PARTS: {"microbatch_size": 4}}
    private = dpx.private_updates(loss, mechanism, platform=platform, **ways.get(row, {}))
    return lambda params, batch, state: private(params, dpx.Batch(batch, None), state)[:2], (params, batch, state)


def leave_out_the_proof() -> None:
    """In this process: no barriers, no roundings of operands, one block, and one product for a sum."""
    import jax
    import jax.numpy as jnp

    from dpx.gradients.ghost import weighted_sums
    from dpx.sums import rounding
    from dpx.xla.matrix_units import MatrixUnit

    one_by_one = weighted_sums.sum_gradients_one_by_one

    def at_once(sites, groups, shape, records, factors):
        if len(sites) > 1 or sites[0].lookup:
            return one_by_one(sites, groups, shape, records, factors)
        a, b = jax.vmap(sites[0].matrices)(*records[0])
        total = jnp.einsum("nkti,nkto->kio", a, b * factors[:, None, None, None])
        return weighted_sums.apply_transpose(sites[0].arrange, shape, total)

    patched: Any = jax.lax, rounding, MatrixUnit, weighted_sums
    patched[0].optimization_barrier = lambda tree: tree
    patched[1].may_add_in_float32 = lambda *_, **__: True
    patched[2].round_operand = patched[2].truncate_operand = lambda _, x: x.astype(jnp.float32)
    patched[3].sum_gradients_one_by_one = at_once


def described(device: str, count: int | None = None) -> Any:
    """Devices of this kind, for the compiler alone: so many, or else some TPUs or one GPU."""
    from jax.experimental import topologies

    one = DEVICES[device]
    if one.topology:
        name = f"{device}:4x4x4" if count == 64 else one.topology
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    config = GPU % one.facts
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count or 1}").devices


def measured(device: str, model: str, row: str) -> dict[str, Any]:
    """What the compiler says of one program, by name."""
    import jax

    from dpx.xla.place import tracing_for_place

    name, kind, count = SHARDED.get(model, (model, "", None))
    devices, platform = described(device, count), "tpu" if DEVICES[device].topology else "cuda"
    with tracing_for_place(platform=platform, devices=count or 1, memory=None):
        if count:
            jitted, inputs, _ = sharded.case(name, kind, row, devices, platform)
        else:
            function, inputs = step(model, row, platform)
            place = jax.sharding.SingleDeviceSharding(devices[0])
            inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), inputs)
            jitted = jax.jit(function, out_shardings=place)
        start = time.process_time()
        traced = jitted.trace(*inputs)
    program = traced.lower(lowering_platforms=(platform,)).compile()
    seconds = time.process_time() - start
    text, memory = program.as_text() or "", program.memory_analysis()
    sent = programs.collectives(programs.instructions(text)).values()
    flops: dict[str, float] = {}
    for one in programs.products(text):
        flops[one.algorithm] = flops.get(one.algorithm, 0.0) + one.flops
    return {
        "MiB": memory.temp_size_in_bytes / 2**20 if memory else math.nan,
        "GB": programs.traffic(text) / 1e9,
        "cycles": programs.cycles(text),
        "flops": flops,
        "seconds": seconds,
    } | ({"sent": sum(size for _, size in sent) / 2**20} if count else {})


def in_its_process(device: str, model: str, row: str) -> dict[str, Any]:
    """`measured` there, or {"failure": words}."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | TPU
    environment["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"  # nothing can be timed
    command = [sys.executable, "-m", "benchmarks.accelerators", "--one", device, model, row]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reasons = [line for line in done.stderr.splitlines() if "Error" in line or "Check fail" in line]
    return {"failure": (reasons or done.stderr.splitlines() or ["died"])[-1][:150]}


def weighed(device: str, flops: dict[str, float]) -> float:
    """Microseconds at the peak rates."""
    rates = DEVICES[device].rates
    return 1e6 * sum(amount / rate_of(rates, algorithm) for algorithm, amount in flops.items())


def rate_of(rates: dict[str, float], algorithm: str) -> float:
    """Of a product: several passes are as many products."""
    if algorithm.startswith("BF16"):
        return rates["bf16"] / (int(algorithm[-1]) if "_X" in algorithm else 1)
    if algorithm.startswith("TF32"):
        return rates["f32 DEFAULT"] / (3 if "_X3" in algorithm else 1)
    operands, precision = algorithm.split() if " " in algorithm else (algorithm, "HIGHEST")
    if operands in ("bf16", "f16"):
        return rates["bf16"]
    return rates.get(f"{operands} {precision}", rates["f32"])


def table(device: str, results: dict[str, dict[str, Any]]) -> str:
    """A line for each model and row, with each figure, and its ratio to that of the step without privacy."""

    def figure(row: dict[str, Any], name: str) -> float:
        return weighed(device, row["flops"]) if name == "weighed" else row.get(name, math.nan)

    main = "cycles" if DEVICES[device].topology else "weighed"
    columns = {main: "million cycles" if main == "cycles" else "us at peak rates"}
    columns |= {"GB": "GB moved", "MiB": "MiB temporary", "seconds": "seconds to compile"}
    if any(figure(row, "sent") > 0 for rows in results.values() for row in rows.values()):
        columns["sent"] = "MiB sent"
    scale = {"cycles": 1e-6}
    lines = []
    for model, rows in results.items():
        for row in rows:
            cells = [f"{model}, {row}"]
            for name in columns:
                if "failure" in rows[row]:
                    cells.append("fails")
                    continue
                own, plain = figure(rows[row], name), rows[PLAIN]
                of_plain = 0.0 if row == PLAIN or "failure" in plain else figure(plain, name)
                ratio = f" ({own / of_plain:.2f})" if of_plain > 0 else ""
                cells.append("" if math.isnan(own) else f"{own * scale.get(name, 1):.3g}{ratio}")
            lines.append(cells)
    return report.grid(["model, batch", *columns.values()], lines)


def table_of_bounds(device: str, kept: dict[tuple[str, str, str], dict[str, Any]]) -> str:
    """The cycles of every row of BOUNDS, divided by those of the step without privacy."""
    lines = []
    for model in BOUNDED:
        cycles = {row: kept.get((device, model, row), {}).get("cycles", math.nan) for row in BOUNDS}
        if not math.isnan(cycles[NOISED]):
            ratios = {row: "" if math.isnan(of) else f"{of / cycles[PLAIN]:.2f}" for row, of in cycles.items()}
            lines.append([model, *(ratios[row] for row in BOUNDS[1:])])
    return report.grid(["model", *BOUNDS[1:]], lines) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--for", dest="devices", action="append", choices=DEVICES, help="a device; several times")
    parser.add_argument("--model", dest="models", action="append", choices=models(), help="a model; several times")
    parser.add_argument("--row", dest="rows", action="append", choices=ALL_ROWS, help="a row; several times")
    parser.add_argument("--bounds", action="store_true", help="the rows of what a step needs, for a TPU")
    parser.add_argument(
        "--one", nargs=3, metavar=("DEVICE", "MODEL", "ROW"), help="print one program's figures as JSON"
    )
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(*options.one)))
        return
    for device in options.devices or (["v5e"] if options.bounds else [*DEVICES]):
        for model in options.models or (BOUNDED if options.bounds else models()):
            if device not in ("v5p", "h100") if model in SHARDED else device == "v5p":
                continue
            for row in SHARDED_ROWS if model in SHARDED else options.rows or (BOUNDS if options.bounds else ROWS):
                found = in_its_process(device, model, row)
                print(device, model, row, found, file=sys.stderr, flush=True)
                write(keep(device, model, row, found))


def keep(device: str, model: str, row: str, found: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """All figures that are kept, by device, model and row, with those of this program."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    kept = {tuple(one.pop("of")): one for one in map(json.loads, lines)} | {(device, model, row): found}
    KEPT.write_text("".join(json.dumps({"of": of} | one) + "\n" for of, one in kept.items()))
    return kept


def write(kept: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    """The page with a table for each device."""
    tables, failures = {}, []
    for device in DEVICES:
        found = {
            model: {row: kept[device, model, row] for row in (*ROWS, *WAYS) if (device, model, row) in kept}
            for model in models()
        }
        found = {model: rows for model, rows in found.items() if PLAIN in rows}
        if bounds := table_of_bounds(device, kept):
            tables[f"{device}: cycles that a private step needs, divided by those of the step without privacy"] = bounds
        if found:
            tables[f"{device}; in parentheses, divided by the step without privacy"] = table(device, found)
        failures += [
            f"{device}, {model}, {row}: `{one['failure']}`"
            for model, rows in found.items()
            for row, one in rows.items()
            if "failure" in one
        ]
    head = report.heading("benchmarks.accelerators", ("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "flax", "optax"))
    report.write("accelerators", head, tables, notes=failures)


if __name__ == "__main__":
    main()
