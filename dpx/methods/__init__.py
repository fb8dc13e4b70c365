"""The papers' methods, each a composition of the parts; one paper a file."""

from dpx.methods.ada_dpigu import ada_dpigu as ada_dpigu
from dpx.methods.d2p2_sgd import d2p2_sgd as d2p2_sgd
from dpx.methods.d2p2_sgd import d2p_sgd as d2p_sgd
from dpx.methods.d2p2_sgd import dp2_sgd as dp2_sgd
from dpx.methods.dice_sgd import dice_sgd as dice_sgd
from dpx.methods.dp_sgd import dp_sgd as dp_sgd
from dpx.methods.dynamic_dp_sgd import dynamic_dp_sgd as dynamic_dp_sgd
from dpx.methods.gep_sgd import gep_sgd as gep_sgd
from dpx.methods.random_freeze import random_freeze_sgd as random_freeze_sgd
from dpx.methods.random_freeze import ranked_freeze_sgd as ranked_freeze_sgd
