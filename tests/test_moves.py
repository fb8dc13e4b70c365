"""A run that continues on other devices: no noise is used twice, and the bill stays that of the plan.

Here "other devices" are another `norms`, which rounds sums otherwise too. tests/test_hosts.py has other processes.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx import keys
from dpx.fitting import facts
from dpx.fitting import folder as folders
from dpx.fitting.folder import Folder, require_skippable_steps
from dpx.fitting.settings import RunPlan
from dpx.fitting.step import Carry
from dpx.gradients import clipped_gradients
from tests import kills
from tests.problems import cut_at

STEPS, KEY = 10, dpx.secret_key(2**70 + 3)
DATA = np.zeros((40, 3), np.float32)
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=8)
PARAMS = {"w": jnp.zeros(3)}
NOISE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "key": KEY}
SHOWN = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))


def made(sampling=SAMPLING, key=KEY):
    return dpx.chain(dpx.dp_sgd(sampling=sampling, **NOISE | {"key": key}), SHOWN)


def run(folder=None, *, dies=None, ends=None, error=RuntimeError, made=made, also=None, noise=None, **options):
    """A run without gradients, whose parameters are the noise of the last step: the result, and the noise of each step.

    dies: after so many steps, with `error`, as if it was killed. ends: the step at which a callback ends it. also: a
    callback that returns nothing.
    """
    noise, optimizer = {} if noise is None else noise, made()

    def watch(progress):
        noise[progress.step] = np.asarray(progress.params["w"])
        if also is not None:
            also(progress)
        if progress.step == dies:
            raise error
        return progress.step == ends

    given = {"steps": STEPS, "delta": 1e-5, "accountant": "rdp", "evaluate_every": 1, "checkpoint_every": 4}
    result = None
    try:
        result = dpx.fit(
            lambda params, x: 0.0 * jnp.sum(params["w"] + x),
            optimizer,
            PARAMS,
            DATA,
            callbacks=[watch],
            checkpoints=folder,
            **given | options,
        )
    except error:
        assert dies is not None
    return result, noise


PLAN = RunPlan(optimizer=made(), key=KEY, steps=STEPS, plan=STEPS, delta=1e-5, accountant="rdp", records=1)


@pytest.fixture(scope="module")
def whole():
    return run()


MOVED = {"norms": "vmap", "on_other_devices": True}


def require_fresh(whole, *branches):
    """The branches of a run, each the noise by steps, used the noise of every step once, and that of its number."""
    steps = [step for branch in branches for step in branch]
    assert len(set(steps)) == len(steps)
    for branch in branches:
        for step, noise in branch.items():
            np.testing.assert_allclose(noise, whole[1][step], atol=1e-6)
    noises = np.stack([noise for branch in branches for noise in branch.values()]).round(4)
    assert len(np.unique(noises, axis=0)) == len(noises)


def read(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_steps_that_may_have_been_made_are_skipped(whole, tmp_path):
    lost = run(tmp_path, dies=7)[1]
    before = read(tmp_path)
    with pytest.raises(ValueError, match="norms was 'auto', now 'vmap'. To .*, or on_other_devices=True"):
        run(tmp_path, norms="vmap")
    with pytest.raises(ValueError, match="holds another one: (?!.*on_other_devices=True).*key of the batches"):
        run(tmp_path, key=dpx.secret_key(2**70 + 4), **MOVED)
    assert read(tmp_path) == before
    with pytest.warns(UserWarning, match="another value of norms. Its steps 5 to 8 may have been taken before"):
        result, rest = run(tmp_path, **MOVED)
    assert list(rest) == [9, 10]
    require_fresh(whole, lost, rest)
    optimizer = made()
    planned = dpx.epsilon(optimizer, STEPS, delta=1e-5, accountant="rdp", numbers=3)
    assert result.steps == STEPS and result.epsilon == planned == whole[0].epsilon
    assert dpx.epsilon(optimizer, result.state, delta=1e-5, accountant="rdp") == planned
    assert result.skipped == 4 and "4 of the steps are in epsilon, but not" in str(result.report)
    assert whole[0].skipped == 0 and "of the steps are in epsilon" not in str(whole[0].report)
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 8, 9, 10]
    assert result.history[4]["skipped"] == 4 and {row["epsilon"] for row in result.history} == {planned}


def test_the_longest_branch_counts(whole, tmp_path):
    """Also of an earlier call, which wrote fewer checkpoints."""
    first = run(tmp_path, dies=7, checkpoint_every=8)[1]
    again = run(tmp_path, dies=3, checkpoint_every=2)[1]
    for step, noise in again.items():
        np.testing.assert_array_equal(noise, first[step])  # the same devices make the same steps again
    with pytest.warns(UserWarning, match="steps 3 to 8"):
        rest = run(tmp_path, checkpoint_every=1, **MOVED)[1]
    require_fresh(whole, first, rest)


def test_a_run_moves_again_and_replays(whole, tmp_path):
    one = run(tmp_path, dies=1, checkpoint_every=2)[1]
    with pytest.warns(UserWarning, match="steps 1 to 2"):
        two = run(tmp_path, dies=5, checkpoint_every=2, **MOVED)[1]
    same = run(tmp_path, dies=5, checkpoint_every=2, **MOVED)[1]  # no warning: these are its devices now
    assert list(same) == [5] and np.array_equal(same[5], two[5])
    with pytest.warns(UserWarning, match="steps 5 to 6"):
        result, three = run(tmp_path, **MOVED | {"norms": "auto"})
    require_fresh(whole, one, two, three)
    assert result.skipped == 2 + 2


@pytest.mark.long
def test_a_run_that_a_callback_ended_skips_nothing(whole, tmp_path):
    first = run(tmp_path, ends=5)[1]
    result, rest = run(tmp_path, **MOVED)
    require_fresh(whole, first, rest)
    assert result.skipped == 0 and list(rest) == [6, 7, 8, 9, 10]
    assert json.loads((tmp_path / "run.json").read_text())["facts"]["norms"] == "'vmap'"


def test_an_interrupt_between_steps_skips_nothing(whole, tmp_path):
    with cut_at(5):
        run(tmp_path)
    result, rest = run(tmp_path, **MOVED)
    assert list(rest) == [6, 7, 8, 9, 10] and result.skipped == 0


def test_killed_while_it_moves(whole, tmp_path, monkeypatch):
    """Before the checkpoint with the skipped steps is stored: no program may make them again, on any devices."""
    lost = run(tmp_path, dies=6)[1]

    def killed(self, step, carry):
        raise RuntimeError

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="steps 5 to 8"):
        patched.setattr(Folder, "_store_checkpoint", killed)
        assert run(tmp_path, dies=0, **MOVED) == (None, {})
    with pytest.raises(ValueError, match="holds another one: norms was 'vmap', now 'auto'"):
        run(tmp_path)
    with pytest.raises(
        ValueError, match="on_other_devices must be True for .* steps 5 to 8 may have been taken on other"
    ):
        run(tmp_path, norms="vmap")
    with pytest.warns(UserWarning, match="another value of norms. Its steps 5 to 8"):
        result, rest = run(tmp_path, on_other_devices=True)
    require_fresh(whole, lost, rest)
    assert result.skipped == 4


OTHER_SETTINGS = {
    "jax_threefry_partitionable": False,
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 3,
    "jax_default_matmul_precision": "bfloat16",
    "jax_numpy_dtype_promotion": "standard",
    "jax_enable_x64": True,
}


@pytest.fixture
def settings():
    """Those of jax, which a test may change."""
    before = {name: jax.config.values[name] for name in OTHER_SETTINGS}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


CHANGES = {
    "kind of machine was [^;]*, now 1 CPUs": lambda patched: patched.setattr(
        os, "sched_getaffinity", lambda process: {0}, raising=False
    ),
    "setting XLA_FLAGS was .*, now .*xla_cpu_max_isa=AVX": lambda patched: patched.setenv(
        "XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
    ),
    "setting jax_threefry_partitionable was True, now False": lambda patched: jax.config.update(
        "jax_threefry_partitionable", False
    ),
    "version of numpy was .*, now other": lambda patched: patched.setattr(
        facts, "version_of", lambda name, of=facts.version_of: "other" if name == "numpy" else of(name)
    ),
}


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("said", CHANGES)
@pytest.mark.long_cases("version of numpy", "setting jax")
def test_another_machine_rounds_otherwise(whole, tmp_path, monkeypatch, said):
    """Such as another number of CPUs: XLA splits a sum over them. Or settings, which change random numbers too."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    lost = run(tmp_path, dies=3)[1]
    CHANGES[said](monkeypatch)
    with pytest.raises(ValueError, match=f"holds another one: {said}.*, or on_other_devices=True, which"):
        run(tmp_path)
    with pytest.warns(UserWarning, match="steps 1 to 4 may have been taken before"):
        rest = run(tmp_path, on_other_devices=True)[1]
    require_fresh(whole, lost, rest)


def test_what_changes_no_number_is_no_setting(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder --xla_force_host_platform_device_count=8")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    found = facts.settings_affecting_results()
    assert not {"XLA_FLAGS", "jax_compilation_cache_dir", "jax_log_compiles"} & found.keys()


@pytest.mark.usefixtures("settings")
def test_what_changes_numbers_is_a_setting(monkeypatch):
    before = facts.settings_affecting_results()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    for name, value in OTHER_SETTINGS.items():
        jax.config.update(name, value)
    found = facts.settings_affecting_results()
    changed = {name for name in found if found[name] != before.get(name)}
    assert changed == {"NVIDIA_TF32_OVERRIDE", "XLA_FLAGS", *OTHER_SETTINGS}
    with jax.default_matmul_precision("highest"):
        assert facts.settings_affecting_results() != found  # in this context alone


def test_every_setting_of_jax_is_a_fact_or_known_to_be_quiet():
    """Also those of a later version of jax."""
    found, known = facts.settings_affecting_results(), set(jax.config.values)
    for name in known - found.keys():
        assert any(name.startswith(f"jax_{quiet}") for quiet in facts.QUIET), name
    decide = ("enable_x64", "default_prng_impl", "numpy_dtype_promotion", "softmax_custom_jvp")
    decide += ("random_seed_offset", "disable_most_optimizations", "default_device", "high_dynamic_range_gumbel")
    assert {f"jax_{name}" for name in decide} & known <= found.keys()


@pytest.mark.usefixtures("settings")
def test_no_setting_changes_the_noise_or_the_batches():
    """Otherwise steps could not be skipped under other settings: an epoch would take an example twice."""

    def drawn():
        samplings = [made().sampling, *(make().sampling for make in COVERED.values())]
        noise = keys.normals_of_release(KEY, 3, {"w": jnp.zeros((3, 2), jnp.float32)})["w"]
        return [*(np.asarray(s.draw(KEY, step).indices) for s in samplings for step in (0, 4)), np.asarray(noise)]

    before = drawn()
    for name, value in OTHER_SETTINGS.items():
        jax.config.update(name, value)
    for one, other in zip(before, drawn(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_run_keeps_to_the_memory_that_it_began_with(whole, tmp_path, monkeypatch):
    """The microbatches are those of the first machine, so that a step that is made again has the same bits."""
    sizes, choose = [], clipped_gradients.choose_microbatches

    def chosen(*arguments, **given):
        sizes.append(choose(*arguments, **given).size)
        return choose(*arguments, **given)

    monkeypatch.setattr(clipped_gradients, "choose_microbatches", chosen)
    real = os.sysconf
    pages = lambda number: lambda name: number if name == "SC_PHYS_PAGES" else 32 if "SIZE" in name else real(name)  # noqa: E731
    monkeypatch.setattr(os, "sysconf", pages(12))
    lost = run(tmp_path, dies=6)[1]
    (first,) = set(sizes)
    sizes.clear()
    monkeypatch.setattr(os, "sysconf", pages(10**6))
    again = run(tmp_path, dies=7)[1]
    assert set(sizes) == {first} and first < SAMPLING.usual_rows
    for step in (5, 6):
        np.testing.assert_array_equal(lost[step], again[step])
    sizes.clear()
    assert run()[0].steps == STEPS and set(sizes) != {first}  # another run has the memory of its machine
    sizes.clear()
    with pytest.warns(UserWarning, match="another value of norms, bytes of memory .*. Its steps 5 to 8"):
        rest = run(tmp_path, dies=9, **MOVED)[1]
    assert (
        set(sizes) != {first} and json.loads((tmp_path / "run.json").read_text())["facts"][facts.MEMORY] == 32 * 10**6
    )
    require_fresh(whole, lost | again, rest)
    monkeypatch.setattr(os, "sysconf", pages(12))
    with pytest.warns(
        UserWarning, match="another value of norms, bytes of memory .*"
    ):  # that of run.json is not `auto`'s
        run(tmp_path, on_other_devices=True, steps=STEPS + 10)


def test_a_gpu_times_its_kernels(whole, tmp_path, monkeypatch):
    """So no other program makes a step again, unless a flag forbids it; a run that was ended loses nothing."""
    monkeypatch.setattr(folders, "autotunes_kernels", lambda: True)
    lost = run(tmp_path, ends=3)[1]
    lost |= run(tmp_path, dies=6)[1]
    with pytest.raises(ValueError, match="steps 5 to 8 may have been taken on other .*xla_gpu_deterministic_ops=true"):
        run(tmp_path)
    with pytest.warns(UserWarning, match="another value of kernels that the GPU has timed .* Its steps 5 to 8"):
        rest = run(tmp_path, on_other_devices=True)[1]
    assert list(rest) == [9, 10]
    require_fresh(whole, lost, rest)


def test_where_kernels_are_timed(monkeypatch, tmp_path):
    assert not facts.autotunes_kernels()
    assert "jaxlib" in str(facts._library_versions()) and len(facts._library_versions()) > 2
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    assert facts.autotunes_kernels()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder --xla_gpu_deterministic_ops=true")
    assert not facts.autotunes_kernels()
    (tmp_path / "flags").write_text("--xla_gpu_deterministic_ops\n--xla_gpu_enable_fast_min_max=false\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert not facts.autotunes_kernels() and "fast_min_max" in facts.settings_affecting_results()["XLA_FLAGS"]


def test_kinds_of_devices(monkeypatch):
    class Device:
        device_kind = "NVIDIA H100"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    assert facts.device_kinds() == "NVIDIA H100"


# ------------------------------------------------------------------ The folder


def test_one_program_has_a_folder_at_a_time(whole, tmp_path):
    """Whatever it is about to do, the other one is refused before it changes anything."""
    refused = []

    def also(progress):
        before = read(tmp_path)
        for options in ({}, MOVED):
            with pytest.raises(ValueError, match="must belong to one program at a time, but another one has it now"):
                run(tmp_path, **options)
            refused.append(progress.step)
        assert read(tmp_path) == before

    noise = run(tmp_path, dies=7, also=also)[1]
    assert refused == [step for step in range(1, 8) for _ in range(2)]
    require_fresh(whole, noise, {step: run(tmp_path)[1][step] for step in (8,)})


def hold(folder, sender):
    lock = folders.acquire_lock(folder)  # which would be free without a name
    sender.send(f"held {lock.is_locked}")
    signal.pause()


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    receiver, sender = kills.server().Pipe(duplex=False)
    holder = kills.server().Process(target=hold, args=(tmp_path, sender), daemon=True)
    holder.start()
    assert kills.heard(receiver) == "held True"
    with pytest.raises(ValueError, match="another one has it now"):
        folders.acquire_lock(tmp_path)
    holder.kill()
    holder.join()
    assert (tmp_path / "lock").exists()
    folders.acquire_lock(tmp_path).release()


def test_where_a_lock_holds_on_one_host_alone(whole, tmp_path, monkeypatch):
    """A program whose folder another one has continued makes no step after its next checkpoint."""
    free = SimpleNamespace(release=lambda: None)
    monkeypatch.setattr(folders, "acquire_lock", lambda path: (path / "lock").touch() or free)
    rest = {}

    def take_over(progress):
        if progress.step == 2:
            with pytest.warns(UserWarning, match="steps 1 to 4"):
                rest.update(run(tmp_path, dies=7, **MOVED)[1])

    lost = {}
    with pytest.raises(ValueError, match="one program at a time, but another one has continued the run: end this one"):
        run(tmp_path, noise=lost, also=take_over)
    require_fresh(whole, lost, rest)
    assert list(lost) == [1, 2, 3, 4] and list(rest) == [5, 6, 7]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    """No later program could read half of run.json, or of a score."""

    def full(opened):
        raise OSError("full")

    folders.replace_file(tmp_path / "run.json", "whole")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
        patched.setattr(os, "fsync", full)
        folders.replace_file(tmp_path / "run.json", "other")
    assert (tmp_path / "run.json").read_text() == "whole"
    folders.replace_file(tmp_path / "run.json", "other")
    assert read(tmp_path) == {"run.json": b"other"}


def test_a_damaged_checkpoint_is_named(whole, tmp_path):
    """Without it, the run continues at the one before. Where other devices made steps after that, they are skipped."""
    first = run(tmp_path, ends=6)[1]
    second = run(tmp_path, dies=7, **MOVED)[1]
    shutil.rmtree(tmp_path / "6" / "default")
    with pytest.raises(ValueError, match=r"6 must be a whole checkpoint, .*\(KeyError\)\. .* remove only this folder"):
        run(tmp_path, **MOVED)
    shutil.rmtree(tmp_path / "6")
    with pytest.warns(UserWarning, match="where other devices may have been before. Its steps 5 to 8 may have been"):
        rest = run(tmp_path, **MOVED)[1]
    require_fresh(whole, first, second, rest)


def test_a_checkpoint_is_not_replaced(tmp_path):
    run(tmp_path, ends=4)
    carry = Carry({"w": jnp.ones(3)}, made().init(PARAMS))
    found = Folder(tmp_path, json.loads((tmp_path / "run.json").read_text())["facts"], PLAN, False)
    with pytest.raises(ValueError, match="already exists"):
        found._store_checkpoint(4, carry)
    found.close()


class Killed(BaseException):
    """Raised in a program before it changes a file or makes a step."""


class Made:
    """In place of a carry: the number of each step, and on which devices it was made."""

    state = None

    def __init__(self, *steps):
        self.steps, self.steps_made = steps, steps[-1][0]

    def is_deleted(self):
        return False


class InMemory(Folder):
    """Checkpoints that hold `Made`. chance, kills: of the program, which may be killed at any change."""

    checkpoints: dict[int, Made]
    turn = staticmethod(lambda: None)

    def _store_checkpoint(self, step, carry):
        self.turn()
        assert step not in self.checkpoints
        self.checkpoints[step] = carry

    def _load_checkpoint(self, step, like):
        return self.checkpoints[step]

    def _checkpoint_steps(self):
        return sorted(self.checkpoints)

    def _delete_older_checkpoints(self):
        for old in self._checkpoint_steps()[:-2]:
            self.turn()
            del self.checkpoints[old]


def train(folder, releases, turn, *, devices, start, every, ends, on_other_devices):
    """What `fit` does. releases: what each step was made of, in sets. ends: the step at which a callback ends it."""
    steps = 6
    plan = SimpleNamespace(steps=steps, plan=steps, epsilon=lambda state: 0.0)
    with contextlib.closing(InMemory(folder, {facts.RECORD: "one", "norms": devices}, plan, on_other_devices)) as run:
        made = run.restore(Made((0, start)))[0]
        while made.steps_made < steps:
            reach = min(steps, (made.steps_made // every + 1) * every)
            run.record_possible_steps(reach)
            while made.steps_made < (ends if made.steps_made < (ends or 0) <= reach else reach):
                turn()
                releases.setdefault(made.steps_made + 1, set()).add((made.steps, devices))
                made = Made(*made.steps, (made.steps_made + 1, devices))
            run.save(made, [])
            if made.steps_made == ends:
                return run.record_possible_steps(ends)


@pytest.mark.filterwarnings("ignore:the run continues")
def test_no_kill_releases_a_step_twice(tmp_path, monkeypatch):
    """Programs on two kinds of devices, one after the other, each killed at a random change of a file or at a step.
    At times the last checkpoint is lost."""
    write, finished = folders.replace_file, 0
    monkeypatch.setattr(folders, "replace_file", lambda path, text: (InMemory.turn(), write(path, text)))
    monkeypatch.setattr(folders, "set_run_plan", lambda carry, plan: carry)
    monkeypatch.setattr(folders, "require_skippable_steps", lambda *arguments: None)
    skip = lambda made, run, reach: Made(*made.steps, (reach, "skipped"))  # noqa: E731
    monkeypatch.setattr(folders, "count_as_skipped", skip)
    for seed in range(60):
        chance, releases, InMemory.checkpoints = random.Random(seed), {}, {}
        kills = chance.choice([0.02, 0.05, 0.1])

        def turn(chance=chance, kills=kills):
            if chance.random() < kills:
                raise Killed

        monkeypatch.setattr(InMemory, "turn", staticmethod(turn))
        for start in range(10):
            given = {"devices": chance.choice("AB"), "every": chance.choice((1, 2, 3)), "start": start}
            given |= {"ends": chance.choice([None, None, 1, 3, 4]), "on_other_devices": chance.random() < 0.8}
            with contextlib.suppress(Killed, ValueError):  # it may not be allowed to continue on other devices
                train(tmp_path / str(seed), releases, turn, **given)
            if chance.random() < 0.1 and len(InMemory.checkpoints) > 1:
                del InMemory.checkpoints[max(InMemory.checkpoints)]
        for step, found in releases.items():
            assert len(found) == 1, (seed, step, found)
        finished += 6 in releases
    assert finished > 20


def correlated():
    groups = dpx.sampling.CyclicPoissonSampling(examples=40, batch_size=4, bands=3)
    return dpx.chain(dpx.methods.band_mf_sgd(bands=3, steps=STEPS, sampling=groups, **NOISE), SHOWN)


def with_error():
    norms = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.5}
    full = dpx.FullBatch(examples=40)
    return dpx.chain(dpx.methods.dice_sgd(**norms, noise_multiplier=9.0, sampling=full, key=KEY), SHOWN)


REFUSED = {
    "noise is correlated: later noise has parts of that of skipped steps": correlated,
    "state is not a function of releases alone: it has inner/unreleased_error": with_error,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_proof_is_refused_and_loses_nothing(tmp_path, said):
    run(tmp_path, dies=3, made=REFUSED[said])
    before = read(tmp_path)
    with pytest.raises(ValueError, match=f"checkpoint is of step 0, .* steps up to 4: .*{said}"):
        run(tmp_path, made=REFUSED[said], **MOVED)
    assert read(tmp_path) == before


def test_correlated_noise_goes_on_where_nothing_is_skipped(tmp_path):
    run(tmp_path, ends=4, made=correlated)
    result, rest = run(tmp_path, made=correlated, **MOVED)
    assert list(rest) == [5, 6, 7, 8, 9, 10] and result.skipped == 0


def test_fresh_projections_are_refused():
    """Their draw is billed, and numbered by the steps that trained."""
    inner = dpx.dp_sgd(sampling=SAMPLING, **NOISE)
    optimizer = dpx.mechanisms.clip_then_project(inner, rank=2, kind="gaussian")
    state = optimizer.init(PARAMS)
    with pytest.raises(
        ValueError, match="is that of ProjectedGaussianDpEvent.*, for which skipped steps have no proof"
    ):
        require_skippable_steps(dataclasses.replace(PLAN, optimizer=optimizer), state, 0, 4)


def scheduled():
    """With schedules of the noise, a clip norm that follows the data, and masks that are drawn again."""
    noise = {"noise_multiplier": optax.linear_schedule(4.0, 2.0, 6), "key": KEY, "sampling": SAMPLING}
    inner = dpx.mechanisms.adaptive_clipping(initial_clip_norm=1.0, indicator_noise=5.0, quantile=0.5, **noise)
    mechanism = dpx.in_coordinates(inner, dpx.coordinates.random_freeze(freeze_rate=0.5, every=2, key=KEY))
    return dpx.chain(mechanism, SHOWN)


COVERED = {
    "schedules": scheduled,
    "allocation": lambda: made(dpx.sampling.RandomAllocation(examples=40, steps_per_epoch=5)),
    "epochs": lambda: made(dpx.ShuffledEpochs(examples=40, batch_size=8)),
}


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.long_cases("schedules", "allocation")
def test_the_bill_of_what_is_covered(tmp_path, name):
    run(tmp_path, dies=3, made=COVERED[name])
    with pytest.warns(UserWarning, match="steps 1 to 4"):
        result, rest = run(tmp_path, made=COVERED[name], **MOVED)
    assert list(rest) == [5, 6, 7, 8, 9, 10]
    planned = dpx.epsilon(COVERED[name](), STEPS, delta=1e-5, accountant="rdp", numbers=3)
    assert result.epsilon == dpx.epsilon(COVERED[name](), result.state, delta=1e-5, accountant="rdp") == planned
