"""Audits: anyone can check that a mechanism does what its bill says.

`check_contract` checks the lines of the privacy contract on any mechanism, also one that you composed yourself. It
measures what one example can move and how large the noise is, and compares their ratio with the bill.
"""

from dpx.audit.contract import check_contract
from dpx.audit.contract_report import ContractReport, Line

__all__ = ["ContractReport", "Line", "check_contract"]
