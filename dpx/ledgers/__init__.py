"""The ledger of a data set: one file that programs share, with one budget for everything they release.

`entries.py` defines the lines of the file; `ledger.py` decides what may be released and prints the data owner's page.
`dpx/accounting/filters.py` proves that a release may be chosen based on earlier ones.
"""

from dpx.ledgers.entries import LedgerEntry as LedgerEntry
from dpx.ledgers.ledger import PrivacyLedger as PrivacyLedger
