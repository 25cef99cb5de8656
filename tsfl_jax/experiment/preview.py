"""What an experiment would do, from Python: the same as ``tsfl explain``."""

from typing import Any

from jax.sharding import Mesh

from tsfl_jax.config import Config
from tsfl_jax.experiment import backend
from tsfl_jax.experiment import explain as explanations
from tsfl_jax.experiment.explain import Explanation
from tsfl_jax.experiment.prepare import Prepared, accepted, prepare_validated


def explain(config: Config, **own: Any) -> Explanation:
    """Explain an experiment without training or compiling it.

    Args:
      config: all settings.
      **own: `model`, `dataset`, `optimizer`, `aggregator`, … as in `simulate`.

    Returns:
      `Explanation`, which prints as ``tsfl explain`` does: `schedule` and `trace`
      (which client delivers what when), `work`, `steps`, `memory`, `timeline`;
      ``chart()`` is the timeline as text, ``plot()`` as a figure.

    Raises:
      UserError: a setting, file or data set that cannot work, in one line.
    """
    config, parts = accepted(config, **own)
    mesh = backend.start_jax(config)
    return of_prepared(prepare_validated(config, parts), mesh)


def of_prepared(prepared: Prepared, mesh: Mesh) -> Explanation:
    """Explain a prepared experiment, with all notes.

    Args:
      prepared: from `prepare_validated`.
      mesh: devices that it would run on.
    """
    known = explanations.explain(prepared, mesh)
    return known._replace(
        notes=prepared.notes + backend.notes_of(prepared.config, mesh)
    )
