"""dpx: training with differential privacy in JAX, as optax transformations that know what they cost."""

from dpx import accounting as accounting
from dpx import keys as keys
from dpx import schedules as schedules
from dpx.accounting import calibrate as calibrate
from dpx.accounting import delta as delta
from dpx.accounting import epsilon as epsilon
from dpx.accounting import privacy_report as privacy_report
from dpx.coordinates import trainable as trainable
from dpx.gaussian import gaussian_mechanism as gaussian_mechanism
from dpx.gradients import PrivateGradient as PrivateGradient
from dpx.gradients import explain as explain
from dpx.gradients import private_grad as private_grad
from dpx.mechanism import Coordinates as Coordinates
from dpx.mechanism import Mechanism as Mechanism
from dpx.mechanism import chain as chain
from dpx.mechanism import in_coordinates as in_coordinates
from dpx.mechanism import public as public
from dpx.mechanism import steps_taken as steps_taken
from dpx.methods import d2p_sgd as d2p_sgd
from dpx.methods import dp_sgd as dp_sgd
from dpx.methods import dynamic_dp_sgd as dynamic_dp_sgd
from dpx.normalization import normalized as normalized
from dpx.sampling import FixedSizeSampling as FixedSizeSampling
from dpx.sampling import FullBatch as FullBatch
from dpx.sampling import PoissonSampling as PoissonSampling
from dpx.sampling import ShuffledEpochs as ShuffledEpochs

__version__ = "0.1.0"
