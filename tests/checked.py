"""What checks annotations at run time in the tests."""

import io
from typing import IO

import beartype

# An int passes for a float, as type checkers have it (PEP 484). beartype takes IO[str]
# for a protocol that no stream of the standard library fulfills, not even an open file.
checked = beartype.beartype(
    conf=beartype.BeartypeConf(
        is_pep484_tower=True,
        hint_overrides=beartype.FrozenDict({IO[str]: io.TextIOBase}),
    )
)
