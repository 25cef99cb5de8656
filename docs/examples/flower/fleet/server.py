"""The server: rounds of Δ seconds, models combined by DMS."""

import json
import pathlib

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_digits

import tsfl_jax
import tsfl_jax.flower

app = ServerApp()
X, Y = load_digits(return_X_y=True)


def accuracy(number: int, arrays: ArrayRecord) -> MetricRecord:
    """Of the global model, on all digits."""
    kernel, bias = (arrays[name].numpy() for name in ("kernel", "bias"))
    right = (X / 16 @ kernel + bias).argmax(axis=1) == Y
    return MetricRecord({"accuracy": float(right.mean())})


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds; who has not replied `slack` seconds after Δ is away."""
    settings = context.run_config
    seconds = settings["seconds"]
    # L, G² and σ² at w^0, from the simulation of this fleet: its `metrics.jsonl`.
    constants = tsfl_jax.types.Constants(1.51, 0.37, 0.034)
    strategy = tsfl_jax.flower.strategy(
        "dms",
        seconds=seconds,
        hparams=tsfl_jax.HParams(lr=0.5, constants=constants),
        fraction_evaluate=0.0,
    )
    zeros = {"kernel": np.zeros((64, 10)), "bias": np.zeros(10)}
    start = {name: Array(w.astype(np.float32)) for name, w in zeros.items()}
    result = strategy.start(
        grid,
        ArrayRecord(start),
        num_rounds=settings["rounds"],
        timeout=seconds + settings["slack"],
        evaluate_fn=accuracy,
    )
    for number, done in enumerate(strategy.rounds, 1):
        found = result.evaluate_metrics_serverapp[number]["accuracy"]
        print(f"round {number}: tau {done.tau}, rho {done.rho}, accuracy {found:.3f}")
    if settings["log"]:
        lines = [
            [done.nodes, *(a.tolist() for a in done[1:4]), done.rejected]
            for done in strategy.rounds
        ]
        pathlib.Path(settings["log"]).write_text(json.dumps(lines))
