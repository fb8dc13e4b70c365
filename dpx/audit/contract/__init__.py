"""`check_contract`: the lines of the privacy contract, each measured on a mechanism of any kind."""
