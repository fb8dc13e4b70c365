"""A run that continues on other devices: no noise is used twice, and the bill stays that of the plan.

Here "other devices" are another `norms`, which rounds sums otherwise too. tests/test_hosts.py has other processes.
"""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx
from dpx.fitting import facts, moves
from dpx.fitting.checkpoints import Checkpoints
from dpx.fitting.moves import Reach, require_skippable
from dpx.fitting.settings import Terms

STEPS, KEY = 10, dpx.secret_key(2**70 + 3)
DATA = np.zeros((40, 3), np.float32)
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=8)
PARAMS = {"w": jnp.zeros(3)}
NOISE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "key": KEY}
SHOWN = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))


def made(sampling=SAMPLING):
    return dpx.chain(dpx.dp_sgd(sampling=sampling, **NOISE), SHOWN)


def run(folder=None, *, dies=None, ends=None, error=RuntimeError, made=made, **options):
    """A run without gradients, whose parameters are the noise of the last step: the result, and the noise of each step.

    dies: after so many steps, with `error`, as if it was killed. ends: the step at which a callback ends it.
    """
    noise, optimizer = {}, made()

    def watch(progress):
        noise[progress.step] = np.asarray(progress.params["w"])
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
    with pytest.raises(ValueError, match="norms was 'auto', now 'vmap'. .on_other_devices=True continues it"):
        run(tmp_path, norms="vmap")
    with pytest.raises(ValueError, match="holds another one: (?!.*on_other_devices=True).*key of the batches"):
        run(tmp_path, key=dpx.secret_key(2**70 + 4), **MOVED)
    assert read(tmp_path) == before
    with pytest.warns(UserWarning, match="another value of norms. Its steps 5 to 8 may have been made before"):
        result, rest = run(tmp_path, **MOVED)
    assert list(rest) == [9, 10]
    require_fresh(whole, lost, rest)
    optimizer = made()
    planned = dpx.epsilon(optimizer, STEPS, delta=1e-5, accountant="rdp")
    assert result.steps == STEPS and result.epsilon == planned == whole[0].epsilon
    assert dpx.epsilon(optimizer, result.state, delta=1e-5, accountant="rdp") == planned
    assert result.skipped == 4 and "4 of the steps are billed, but" in str(result.report)
    assert whole[0].skipped == 0 and "of the steps are billed" not in str(whole[0].report)
    assert [row["step"] for row in result.history] == [1, 2, 3, 4, 8, 9, 10]
    assert result.history[4]["skipped"] == 4 and result.history[4]["epsilon"] < result.history[5]["epsilon"]


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


def test_a_run_that_a_callback_ended_skips_nothing(whole, tmp_path):
    first = run(tmp_path, ends=5)[1]
    result, rest = run(tmp_path, **MOVED)
    require_fresh(whole, first, rest)
    assert result.skipped == 0 and list(rest) == [6, 7, 8, 9, 10]
    assert json.loads((tmp_path / "run.json").read_text())["norms"] == "'vmap'"


def test_an_interrupt_between_steps_skips_nothing(whole, tmp_path, monkeypatch):
    draw = dpx.PoissonSampling.draw

    def cut(self, key, step, **options):
        if step == 5:
            raise KeyboardInterrupt
        return draw(self, key, step, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(dpx.PoissonSampling, "draw", cut)
        run(tmp_path)
    result, rest = run(tmp_path, **MOVED)
    assert list(rest) == [6, 7, 8, 9, 10] and result.skipped == 0


def test_killed_while_it_moves(whole, tmp_path, monkeypatch):
    """After the checkpoint with the skipped steps, the folder still names the old devices. Both may continue."""
    lost = run(tmp_path, dies=6)[1]

    def killed(self):
        raise RuntimeError

    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="steps 5 to 8"):
        patched.setattr(Checkpoints, "_name", killed)
        assert run(tmp_path, dies=0, **MOVED) == (None, {})
    result, rest = run(tmp_path)
    require_fresh(whole, lost, rest)
    assert result.skipped == 4


def test_a_program_that_still_runs_makes_no_more_steps(whole, tmp_path):
    """Its steps until its next checkpoint are skipped by the one that took over, and it writes no checkpoint."""
    seen, others = [], {}

    def take_over(progress):
        seen.append(progress.step)
        if progress.step == 2:
            with pytest.warns(UserWarning, match="steps 1 to 4"):
                seen.extend(run(tmp_path, dies=5, **MOVED)[1])  # before it has a checkpoint of its own steps
            others.update(read(tmp_path))

    with pytest.raises(ValueError, match="belong to one program at a time"):
        dpx.fit(
            lambda params, x: 0.0 * jnp.sum(params["w"] + x),
            made(),
            PARAMS,
            DATA,
            steps=STEPS,
            delta=1e-5,
            accountant="rdp",
            evaluate_every=1,
            callbacks=[take_over],
            checkpoints=tmp_path,
            checkpoint_every=4,
        )
    assert sorted(seen) == [1, 2, 3, 4, 5] and read(tmp_path) == others
    assert list(run(tmp_path, **MOVED)[1]) == [5, 6, 7, 8, 9, 10]


CHANGES = {
    "kind of machine was [^;]*, now 1 CPUs": lambda patched: patched.setattr(
        os, "sched_getaffinity", lambda process: {0}, raising=False
    ),
    "settings of XLA and jax was .*, now .*xla_cpu_max_isa=AVX": lambda patched: patched.setenv(
        "XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_another_machine_rounds_otherwise(whole, tmp_path, monkeypatch, said):
    """Such as another number of CPUs: XLA splits a sum over them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    lost = run(tmp_path, dies=3)[1]
    CHANGES[said](monkeypatch)
    with pytest.raises(ValueError, match=f"holds another one: {said}.*on_other_devices=True continues it"):
        run(tmp_path)
    with pytest.warns(UserWarning, match="steps 1 to 4 may have been made before"):
        rest = run(tmp_path, on_other_devices=True)[1]
    require_fresh(whole, lost, rest)


def test_what_changes_no_number_is_no_setting(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=folder --xla_force_host_platform_device_count=8")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert facts.settings_of() == ""


def test_kinds_of_devices(monkeypatch):
    class Device:
        device_kind = "NVIDIA H100"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device(), Device()])
    assert facts.machine() == "NVIDIA H100"


def reached(folder):
    """The reach of a run that three programs continue: two on the same devices, of which the first is at step 4."""
    Reach.begin(folder)
    first = Reach(folder)
    first.reserve(4)
    return first, Reach(folder)


def test_two_programs_on_the_same_devices_forget_no_step(tmp_path):
    first, second = reached(tmp_path)
    first.reserve(8)
    second.reserve(3)
    assert Reach(tmp_path).steps == 8


def test_a_program_that_is_taken_over_while_it_writes_must_end(tmp_path, monkeypatch):
    """It has seen no move before it wrote, and the other one may have read what was there before."""
    first, second = reached(tmp_path)
    write, taken = moves.write, []

    def slowly(path, text):
        if path == first.file and not taken:
            taken.append(second.take_over())
        write(path, text)

    monkeypatch.setattr(moves, "write", slowly)
    with pytest.raises(ValueError, match="must belong to one program at a time"):
        first.reserve(8)
    assert taken == [4]
    second.reserve(12)


def test_steps_that_are_made_during_the_move_have_a_proof_too(tmp_path, monkeypatch):
    run(tmp_path, ends=4, made=correlated)
    take_over = Reach.take_over

    def late(reach):
        Reach(tmp_path).reserve(8)
        return take_over(reach)

    monkeypatch.setattr(Reach, "take_over", late)
    with pytest.raises(ValueError, match="checkpoint is of step 4, .* steps up to 8: .*noise is correlated"):
        run(tmp_path, made=correlated, **MOVED)


def test_a_folder_without_reach_may_have_made_its_plan(tmp_path):
    run(tmp_path, dies=3)
    (tmp_path / "reach.json").unlink()
    with pytest.raises(ValueError, match="no step is left to train, because all 10 may have been made"):
        run(tmp_path, **MOVED)


def correlated():
    groups = dpx.sampling.CyclicPoissonSampling(examples=40, batch_size=4, bands=3)
    return dpx.chain(dpx.methods.band_mf_sgd(bands=3, steps=STEPS, sampling=groups, **NOISE), SHOWN)


def with_error():
    norms = {"clip_norm": 1.0, "feedback_norm": 1.0, "outer_clip_norm": 1.5}
    full = dpx.FullBatch(examples=40)
    return dpx.methods.dice_sgd(**norms, noise_multiplier=9.0, sampling=full, key=KEY)


REFUSED = {
    "noise is correlated: later noise has parts of that of skipped steps": correlated,
    "state is not a function of releases alone: it has unreleased_error": with_error,
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
    optimizer = dpx.mechanisms.clip_then_project(inner, rank=2, kind="gaussian", key=KEY)
    terms = Terms(optimizer=optimizer, key=KEY, steps=STEPS, delta=1e-5, accountant="rdp", records=1)
    state = optimizer.init(PARAMS)
    require_skippable(terms, state, 0)
    with pytest.raises(ValueError, match="billed as ProjectedGaussianDpEvent.*, for which skipped steps have no proof"):
        require_skippable(terms, state, 4)


def scheduled():
    """With schedules of the noise, a clip norm that follows the data, and masks that are drawn again."""
    noise = {"noise_multiplier": optax.linear_schedule(4.0, 2.0, 6), "key": KEY, "sampling": SAMPLING}
    inner = dpx.mechanisms.adaptive_clipping(initial_clip_norm=1.0, indicator_noise=5.0, quantile=0.5, **noise)
    return dpx.in_coordinates(inner, dpx.coordinates.random_freeze(freeze_rate=0.5, every=2, key=KEY))


COVERED = {
    "schedules": scheduled,
    "allocation": lambda: made(dpx.sampling.RandomAllocation(examples=40, steps_per_epoch=5)),
    "epochs": lambda: made(dpx.ShuffledEpochs(examples=40, batch_size=8)),
}


@pytest.mark.parametrize("name", COVERED)
def test_the_bill_of_what_is_covered(tmp_path, name):
    run(tmp_path, dies=3, made=COVERED[name])
    with pytest.warns(UserWarning, match="steps 1 to 4"):
        result, rest = run(tmp_path, made=COVERED[name], **MOVED)
    assert list(rest) == [5, 6, 7, 8, 9, 10]
    planned = dpx.epsilon(COVERED[name](), STEPS, delta=1e-5, accountant="rdp")
    assert result.epsilon == dpx.epsilon(COVERED[name](), result.state, delta=1e-5, accountant="rdp") == planned
