"""Runs one experiment: ``python launch.py --config=configs/svhn_case3.py``.

Any setting of `tsfl_jax.config.Config` can be changed: ``--config.lr=0.01``,
``--config.data.dir=DIR``. Results go to ``--workdir`` (default: a new folder under
``runs/``); the same command with the same workdir resumes.
"""

import functools
import sys

from tsfl_jax import cli, command

if __name__ == "__main__":
    main = functools.partial(cli.main, "launch.py")
    command.run("launch.py", main, sys.argv[1:])
