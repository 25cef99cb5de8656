"""What checks annotations at run time in the tests."""

import beartype

# An int passes for a float, as type checkers have it (PEP 484).
checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))
