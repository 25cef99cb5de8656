"""What tsfl_jax is measured against: a PyTorch loop over clients.

The same networks, data, batches and local iterations; eager mode, float32, all cores,
`torch.optim.SGD` with momentum. Written as a careful user would: tensors stay where
they are, one `load_state_dict` per client, no per-sample Python, no bookkeeping
beyond the optimizer.
"""

import contextlib
import copy
import multiprocessing

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def _group_norm(channels):
    return nn.GroupNorm(32, channels)


class _Residual(nn.Module):
    def __init__(self, inputs, outputs, stride, norm=_group_norm):
        super().__init__()
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.na, self.nb = norm(outputs), norm(outputs)
        self.skip = nn.Identity()
        if stride > 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.skip = nn.Sequential(conv, norm(outputs))

    def forward(self, x):
        y = functional.relu(self.na(self.a(x)))
        return functional.relu(self.nb(self.b(y)) + self.skip(x))


def _mnist_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(10, 20, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Linear(50, 10),
    )


def _fashion_cnn():
    layers, channels = [], 1
    for filters in (16, 32, 64, 64, 128, 128):
        pool = nn.MaxPool2d(2, ceil_mode=True)
        layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), pool]
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 10))


def _vgg11():
    layers, channels = [], 3
    for filters in (64, "P", 128, "P", 256, 256, "P", 512, 512, "P", 512, 512, "P"):
        if filters == "P":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            channels = filters
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def _resnet(widths, blocks, norm):
    stem, channels = nn.Conv2d(3, widths[0], 3, padding=1, bias=False), widths[0]
    layers = [stem, norm(channels), nn.ReLU()]
    for stage, filters in enumerate(widths):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            layers.append(_Residual(channels, filters, stride, norm))
            channels = filters
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*layers, *head)


def _two_convolutions(channels, width, classes, *, dropout):
    def drop(rate):
        return [nn.Dropout(rate)] if dropout else []

    return nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *drop(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((width - 4) // 2) ** 2, 128),
        nn.ReLU(),
        *drop(0.5),
        nn.Linear(128, classes),
    )


class _Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(80, 8)
        self.cells = kind(8, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 80)

    def forward(self, x):
        return self.head(self.cells(self.embed(x))[0][:, -1])


class _Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(80, 128), nn.Embedding(80, 128)
        settings = dict(dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(128, 4, 512, norm_first=True, **settings)
                for _ in range(2)
            )
        )
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 80)

    def forward(self, x):
        x = self.embed(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.layers(x)).mean(1))


NETWORKS = {
    "mnist_cnn": _mnist_cnn,
    "fashion_cnn": _fashion_cnn,
    "vgg11": _vgg11,
    "resnet18": lambda: _resnet((64, 128, 256, 512), 2, _group_norm),
    # Those of `benchmarks.own`.
    "CNN": lambda: _two_convolutions(3, 32, 10, dropout=False),
    "EMNIST CNN, dropout": lambda: _two_convolutions(1, 28, 62, dropout=True),
    "ResNet-20, batch norm": lambda: _resnet((16, 32, 64), 3, nn.BatchNorm2d),
    "LSTM": lambda: _Recurrent(nn.LSTM),
    "GRU": lambda: _Recurrent(nn.GRU),
    "transformer": _Transformer,
}


def _make_sum(name, images, labels, rows, tau, size, weights, settings, best):
    """The network, and Σ weight · trained as a function of the state to start from."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = False  # float32, as ours; products are already
    memory = torch.channels_last if best else torch.contiguous_format
    model = NETWORKS[name]().to(device, memory_format=memory)
    x = torch.tensor(images)
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=memory)
    x = x.to(device)
    y = torch.tensor(labels).long().to(device)
    rows = [torch.tensor(row).long().to(device) for row in rows]
    lr, momentum = settings["lr"], settings["momentum"]

    def scaled(batch):
        return batch.float() / 255 if batch.dim() == 4 else batch.long()

    def total(start):
        mean = {k: torch.zeros(v.shape, device=v.device) for k, v in start.items()}
        for i, row in enumerate(rows):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(
                model.parameters(), lr, momentum, fused=best or None
            )
            for _ in range(int(tau[i])):
                order = row[torch.randperm(int(size[i]), device=device)]
                for batch in order.split(settings["batch_size"]):
                    optimizer.zero_grad(set_to_none=True)
                    output = model(scaled(x[batch]))
                    functional.cross_entropy(output, y[batch]).backward()
                    optimizer.step()
            for k, v in model.state_dict().items():
                mean[k] += float(weights[i]) * v
        return mean

    return model, total


def make_interval(name, images, labels, rows, tau, size, **settings):
    """One FedAvg interval as a function without arguments; returns the global model.

    Args:
      name: a key of `NETWORKS`.
      images: ``[M, H, W, C]`` uint8 NumPy array, or tokens ``[M, S]``.
      labels: ``[M]`` integers.
      rows: ``[N, D]`` indices into the samples.
      tau, size: ``[N]`` passes and samples of every client.
      settings: batch_size, lr, momentum of local SGD.
    """
    weights = size / size.sum()
    arguments = (name, images, labels, rows, tau, size, weights, settings, False)
    model, total = _make_sum(*arguments)

    def interval():
        mean = total(copy.deepcopy(model.state_dict()))
        model.load_state_dict(mean)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return mean

    return interval


def _work(pipe, arguments):
    """A process with one thread: sums for states that come through the pipe."""
    torch.set_num_threads(1)
    _, total = _make_sum(*arguments)
    with contextlib.suppress(EOFError):  # the end of the process that asks
        while True:
            start = {k: torch.from_numpy(v) for k, v in pipe.recv().items()}
            pipe.send({k: v.numpy() for k, v in total(start).items()})


def make_best(name, images, labels, rows, tau, size, processes=2, **settings):
    """`make_interval` in the fastest set-up of PyTorch that was found on a CPU.

    Processes with one thread each, channels_last, fused SGD. The clients are spread so
    that the processes have about equal work. They end with this process.
    """
    loads, shares = [0] * processes, [[] for _ in range(processes)]
    for i in np.argsort(-(tau * size), kind="stable"):
        least = int(np.argmin(loads))
        loads[least] += tau[i] * size[i]
        shares[least].append(int(i))
    context, pipes = multiprocessing.get_context("spawn"), []
    for share in filter(None, shares):
        pipe, theirs = context.Pipe()
        weights = size[share] / size.sum()
        own = (rows[share], tau[share], size[share], weights)
        arguments = (name, images, labels, *own, settings, True)
        context.Process(target=_work, args=(theirs, arguments), daemon=True).start()
        pipes.append(pipe)
    state = {k: v.numpy() for k, v in NETWORKS[name]().state_dict().items()}

    def interval():
        for pipe in pipes:
            pipe.send(state)
        sums = [pipe.recv() for pipe in pipes]
        state.update({k: np.asarray(sum(part[k] for part in sums)) for k in state})
        return state

    return interval
