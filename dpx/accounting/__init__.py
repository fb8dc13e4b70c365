"""Privacy accounting: what a mechanism, an event or a schedule of noise multipliers costs."""

from dpx.accounting import comparisons as comparisons
from dpx.accounting import curves as curves
from dpx.accounting import gdp as gdp
from dpx.accounting.bill import delta as delta
from dpx.accounting.bill import epsilon as epsilon
from dpx.accounting.budget import Budget as Budget
from dpx.accounting.budget import calibrated as calibrated
from dpx.accounting.calibration import CalibratedSchedule as CalibratedSchedule
from dpx.accounting.calibration import calibrate as calibrate
from dpx.accounting.calibration import calibrate_schedule as calibrate_schedule
from dpx.accounting.compose import Composition as Composition
from dpx.accounting.compose import compose as compose
from dpx.accounting.events import event_delta as event_delta
from dpx.accounting.events import event_epsilon as event_epsilon
from dpx.accounting.events import register as register
from dpx.accounting.horizon import max_steps as max_steps
from dpx.accounting.report import PrivacyReport as PrivacyReport
from dpx.accounting.report import privacy_report as privacy_report
from dpx.accounting.schedule import Interval as Interval
from dpx.accounting.schedule import schedule_delta as schedule_delta
from dpx.accounting.schedule import schedule_epsilon as schedule_epsilon
