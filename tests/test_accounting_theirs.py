"""dp-accounting's own tests of its accountants, answered by dpx: the classes that its package ships, with its API."""

import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, SelfComposedDpEvent, privacy_accountant
from dp_accounting.dp_event import TruncatedSubsampledGaussianDpEvent
from dp_accounting.pld import pld_privacy_accountant, pld_privacy_accountant_test
from dp_accounting.rdp import rdp_privacy_accountant, rdp_privacy_accountant_test

from dpx import accounting
from dpx.accounting.cost import event_profile
from dpx.accounting.flat_event import from_event
from dpx.accounting.loss import NEIGHBORS
from dpx.accounting.pld import renyi
from dpx.accounting.selection import trial_loss

pytestmark = pytest.mark.long  # tests/data/bills.json has the same costs bit for bit
RELATIONS = {neighbors: relation for relation, neighbors in NEIGHBORS.items()}


class Answered(privacy_accountant.PrivacyAccountant):
    """Their API. Each composed event is one of a `ComposedDpEvent`, of which dpx bills epsilon and delta."""

    def __init__(self, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
        super().__init__(neighboring_relation)
        self._options = {"accountant": "tightest", "relation": RELATIONS[neighboring_relation]}
        self._events = []

    @property
    def _event(self):
        return dp_accounting.ComposedDpEvent(self._events)

    def _maybe_compose(self, event, count, do_compose):
        if do_compose:
            self._events.append(SelfComposedDpEvent(event, count))
            return None
        for inner in getattr(event, "events", [event.event] if isinstance(event, SelfComposedDpEvent) else []):
            if (found := self._maybe_compose(inner, count, False)) is not None:
                return found
        try:
            event_profile(event, **self._options)
        except ValueError as error:
            return self.CompositionErrorDetails(invalid_event=event, error_message=str(error))

    def get_epsilon(self, target_delta):
        below_one = min(target_delta, math.nextafter(1, 0))  # at 1, dpx promises nothing
        return accounting.event_epsilon(self._event, delta=below_one, **self._options)

    def get_delta(self, target_epsilon):
        return accounting.event_delta(self._event, epsilon=target_epsilon, **self._options)


class AnsweredWithOrders(Answered):
    """Epsilon is the tightest that dpx knows, at any orders; divergences are those of dpx at the given ones."""

    def __init__(self, orders=None, neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE):
        super().__init__(neighboring_relation)
        self._orders = np.array(renyi.ORDERS if orders is None else orders, np.float64)

    @property
    def _rdp(self):
        known = np.isfinite(self._orders)
        divergences = np.full(len(known), np.inf)
        above_one = np.maximum(self._orders[known], 1 + 1e-7)  # a divergence grows with its order
        divergences[known] = trial_loss(from_event(self._event), self._options["relation"]).renyi(above_one)
        return divergences


WORDS = "their words, or type, of a refusal; dpx has its own"
MORE = "dpx bills what they refuse"
LESS = "dpx searches more orders, and so is below their number"
INTERNAL = "of their functions alone"
NOT_APPLICABLE = {
    "test_compute_log_a": INTERNAL,
    "test_compute_epsilon_delta": INTERNAL,
    "test_compute_rdp_randomized_response_b": INTERNAL,
    "test_compute_rdp_randomized_response_inf": INTERNAL,
    "test_delta_bounds_gaussian": INTERNAL,
    "test_effective_gaussian": INTERNAL,
    "test_gamma_truncated": INTERNAL,
    "test_log_a_frac_positive": INTERNAL,
    "test_truncated_negative_binomial": INTERNAL,
    "test_composition_errors_for_neighboring_relation4": WORDS,
    "test_raises_on_invalid": WORDS,
    "test_compute_rdp_tree_restart_raise": WORDS,
    "test_log_a_frac_early_termination": "dpx warns of no order that did not converge; others serve",
    "test_supports": MORE,
    "test_truncated_subsampled_gaussian_basic": "dpx has a smaller bill, with a proof: see below",
    "test_compute_rdp_randomized_response": "dpx has none of order infinity, and none where one is replaced",
    "test_repeat_and_select_gaussian_poisson_large": LESS,
    "test_repeat_and_select_pure_poisson_mean10": LESS,
    "test_laplace_repetition": "dpx has the bill of privacy loss distributions, which is below theirs",
    "test_laplace_large_eps": "the privacy loss distribution takes half a minute",
    "test_epsilon_delta_consistency": "epsilon and delta of dpx are of two compositions, equal to a relative 1e-6 only",
}


def answered_by(module, name, accountant, kept=" "):
    """A setUp that exchanges their accountant for dpx, and leaves out what does not apply, but for tests named so."""

    def set_up(self):
        for begin, reason in NOT_APPLICABLE.items():
            if self._testMethodName.startswith(begin) and kept not in self._testMethodName:
                self.skipTest(reason)
        patch = mock.patch.object(module, name, accountant)
        patch.start()
        self.addCleanup(patch.stop)

    return set_up


class TestPld(pld_privacy_accountant_test.PldPrivacyAccountantTest):
    setUp = answered_by(pld_privacy_accountant, "PLDAccountant", Answered, "test_supports")

    def test_a_truncated_sample_costs_at_most_what_they_bill(self):
        sizes = {"sampling_probability": 0.5, "truncated_batch_size": 2, "noise_multiplier": 1.0}
        events = (TruncatedSubsampledGaussianDpEvent(dataset_size=size, **sizes) for size in (4, 3))
        accountant = Answered()
        for event, count in zip(events, (3, 2), strict=True):
            accountant.compose(event, count)
        self.assertLess(accountant.get_delta(17.904330), 1e-6)
        self.assertGreater(accountant.get_delta(17.904330), 1e-7)


class TestRdp(rdp_privacy_accountant_test.RdpPrivacyAccountantTest):
    setUp = answered_by(rdp_privacy_accountant, "RdpAccountant", AnsweredWithOrders)
