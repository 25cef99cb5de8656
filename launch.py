"""Runs one experiment: ``python launch.py --config=configs/svhn_case3.py``.

Any setting of `tsfl_jax.config.Config` can be changed: ``--config.lr=0.01``,
``--config.data.dir=DIR``. Results go to ``--workdir`` (default: a new folder under
``runs/``); the same command with the same workdir resumes.
"""

import os
import signal

if __name__ == "__main__":  # imports may swallow a KeyboardInterrupt
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"stopped\n"), os._exit(130)))

from absl import app, flags, logging  # noqa: E402

from tsfl_jax import cli  # noqa: E402

flags.adopt_module_key_flags(cli)  # for --help

if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    app.run(cli.main, flags_parser=cli.parse)
