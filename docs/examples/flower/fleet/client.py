"""A client: a linear model on its own part of the digits, one pass at a time."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from sklearn.datasets import load_digits

app = ClientApp()
X, Y = load_digits(return_X_y=True)


def one_pass(model: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> None:
    """One local iteration of gradient descent on softmax cross-entropy, in place."""
    logits = x @ model["kernel"] + model["bias"]
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    error = p / p.sum(axis=1, keepdims=True) - np.eye(10)[y]
    model["kernel"] -= 0.5 * x.T @ error / len(y)
    model["bias"] -= 0.5 * error.mean(axis=0)


@app.train()
def train(message: Message, context: Context) -> Message:
    """As many local iterations as are complete after Δ seconds."""
    seconds = message.content["config"]["seconds"]
    end = time.monotonic() + seconds
    number, of = (context.node_config[n] for n in ("partition-id", "num-partitions"))
    pace = context.node_config["pace"]  # seconds of one local iteration
    x, y = X[number::of] / 16, Y[number::of]
    sent = message.content["arrays"]
    model = {name: array.numpy().astype(np.float64) for name, array in sent.items()}
    tau = 0
    while time.monotonic() + pace <= end:
        time.sleep(pace)  # stands for a slow processor
        one_pass(model, x, y)
        tau += 1
    arrays = {name: Array(w.astype(np.float32)) for name, w in model.items()}
    metrics = {"tau": tau, "num-examples": len(y), "client": number}
    content = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
