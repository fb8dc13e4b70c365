"""The ledger of a data set: one file that programs share, and one budget for all that they release.

`entries.py` has the lines of the file, `ledger.py` what may be released and the page for a data owner. The proof that
releases may be chosen by what was released before is in `dpx/accounting/filters.py`.
"""

from dpx.ledgers.entries import Entry as Entry
from dpx.ledgers.ledger import PrivacyLedger as PrivacyLedger
