"""The papers' methods, each a composition of the parts; one paper a file."""

from dpx.methods.d2p2_sgd import d2p_sgd as d2p_sgd
from dpx.methods.dp_sgd import dp_sgd as dp_sgd
from dpx.methods.dynamic_dp_sgd import dynamic_dp_sgd as dynamic_dp_sgd
