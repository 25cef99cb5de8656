"""What tsfl_jax is measured against: a PyTorch loop over clients.

The same networks, data, batches and local iterations; eager mode, float32, all cores,
`torch.optim.SGD` with momentum. Written as a careful user would: tensors stay where
they are, one `load_state_dict` per client, no per-sample Python, no bookkeeping
beyond the optimizer.
"""

import copy

import torch
from torch import nn
from torch.nn import functional


class _Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.na, self.nb = nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)
        self.skip = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                nn.GroupNorm(32, outputs),
            )

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


def _resnet18():
    stem = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    layers, channels = [stem, nn.GroupNorm(32, 64), nn.ReLU()], 64
    for stage, filters in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            layers.append(_Residual(channels, filters, stride))
            channels = filters
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *head)


NETWORKS = {
    "mnist_cnn": _mnist_cnn,
    "fashion_cnn": _fashion_cnn,
    "vgg11": _vgg11,
    "resnet18": _resnet18,
}


def make_interval(name, images, labels, rows, tau, size, *, batch_size, lr, momentum):
    """One FedAvg interval as a function without arguments; returns the global model.

    Args:
      name: a key of `NETWORKS`.
      images: ``[M, H, W, C]`` uint8 NumPy array.
      labels: ``[M]`` integers.
      rows: ``[N, D]`` indices into the samples.
      tau, size: ``[N]`` passes and samples of every client.
      batch_size, lr, momentum: of local SGD.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = NETWORKS[name]().to(device)
    x = torch.tensor(images).permute(0, 3, 1, 2).contiguous().to(device)
    y = torch.tensor(labels).long().to(device)
    rows = [torch.tensor(row).long().to(device) for row in rows]
    weights = torch.tensor(size / size.sum(), dtype=torch.float32)

    def interval():
        start = copy.deepcopy(model.state_dict())
        mean = {k: torch.zeros_like(v) for k, v in start.items()}
        for i, row in enumerate(rows):
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr, momentum)
            for _ in range(int(tau[i])):
                order = row[torch.randperm(int(size[i]), device=device)]
                for batch in order.split(batch_size):
                    optimizer.zero_grad(set_to_none=True)
                    output = model(x[batch].float() / 255)
                    functional.cross_entropy(output, y[batch]).backward()
                    optimizer.step()
            for k, v in model.state_dict().items():
                mean[k] += weights[i] * v
        model.load_state_dict(mean)
        if device == "cuda":
            torch.cuda.synchronize()
        return mean

    return interval
