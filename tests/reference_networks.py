"""The four convolutional networks in NumPy and float64, with gradients by hand.

Written from the papers and independent of the package, JAX and PyTorch: convolutions
are products with patches, images are ``[B, H, W, C]``, bias and ReLU come before
pooling. Parameters lie flat by path, ``{"Conv_0/kernel": ...}``. A layer takes its
input and its own parameters and returns its output and a function from the output's
gradient to those of the input and of the parameters.
"""

import numpy as np


def conv(x, kernel, stride=1, same=True):
    """Cross-correlation; zero padding to ⌈H/stride⌉ outputs, or none."""
    h, w, channels, filters = kernel.shape
    pads = [(0, 0), (0, 0)]
    if same:
        totals = [
            max((-(-size // stride) - 1) * stride + taps - size, 0)
            for size, taps in zip(x.shape[1:3], (h, w), strict=True)
        ]
        pads = [(total // 2, total - total // 2) for total in totals]
    padded = np.pad(x, [(0, 0), *pads, (0, 0)])
    rows = (padded.shape[1] - h) // stride + 1
    columns = (padded.shape[2] - w) // stride + 1

    def place(i, j):  # inputs that tap (i, j) meets
        down = slice(i, i + (rows - 1) * stride + 1, stride)
        return slice(None), down, slice(j, j + (columns - 1) * stride + 1, stride)

    taps = [(i, j) for i in range(h) for j in range(w)]
    patches = np.stack([padded[place(i, j)] for i, j in taps], axis=3)
    patches = patches.reshape(-1, h * w * channels)
    matrix = kernel.reshape(-1, filters)
    out = (patches @ matrix).reshape(len(x), rows, columns, filters)

    def back(grad):
        grad = grad.reshape(-1, filters)
        d_patches = (grad @ matrix.T).reshape(len(x), rows, columns, h * w, channels)
        d_padded = np.zeros_like(padded)
        for t, (i, j) in enumerate(taps):
            d_padded[place(i, j)] += d_patches[:, :, :, t]
        (top, bottom), (left, right) = pads
        height, width = padded.shape[1:3]
        d_x = d_padded[:, top : height - bottom, left : width - right]
        d_kernel = (patches.T @ grad).reshape(kernel.shape)
        return d_x, d_kernel

    return out, back


def relu(x):
    """max(x, 0), with the gradient 0 at 0."""
    return np.maximum(x, 0), lambda grad: (grad * (x > 0),)


def pool(x):
    """2x2 maximum with ceiling division; the gradient goes to the first of equals.

    Products of equal patches may differ in the last bit, so values within 1e-13 of
    the largest count as equal.
    """
    batch, height, width, channels = x.shape
    padded = np.pad(
        x,
        ((0, 0), (0, height % 2), (0, width % 2), (0, 0)),
        constant_values=-np.inf,
    )
    rows, columns = padded.shape[1] // 2, padded.shape[2] // 2
    windows = padded.reshape(batch, rows, 2, columns, 2, channels)
    windows = windows.transpose(0, 1, 3, 5, 2, 4).reshape(-1, 4)
    largest = windows.max(axis=1)
    first = (windows >= largest[:, None] - 1e-13 * np.abs(x).max()).argmax(axis=1)

    def back(grad):
        spread = np.zeros_like(windows)
        spread[np.arange(len(first)), first] = grad.ravel()
        spread = spread.reshape(batch, rows, columns, channels, 2, 2)
        spread = spread.transpose(0, 1, 4, 2, 5, 3).reshape(padded.shape)
        return (spread[:, :height, :width],)

    return largest.reshape(batch, rows, columns, channels), back


def group_norm(x, scale, bias, groups=32, epsilon=1e-5):
    """(x − mean)/√(variance + ε) · scale + bias, over groups of channels."""
    batch, channels = len(x), x.shape[-1]
    # Channels in order, so that a group is C/groups neighbors.
    grouped = np.moveaxis(x, -1, 1).reshape(batch, groups, -1)
    centered = grouped - grouped.mean(axis=2, keepdims=True)
    deviation = np.sqrt((centered**2).mean(axis=2, keepdims=True) + epsilon)
    normed = (centered / deviation).reshape(batch, channels, *x.shape[1:3])
    normed = np.moveaxis(normed, 1, -1)

    def back(grad):
        d = np.moveaxis(grad * scale, -1, 1).reshape(batch, groups, -1)
        n = centered / deviation
        d = d - d.mean(axis=2, keepdims=True)
        d = (d - n * (d * n).mean(axis=2, keepdims=True)) / deviation
        d = np.moveaxis(d.reshape(batch, channels, *x.shape[1:3]), 1, -1)
        return d, (grad * normed).sum(axis=(0, 1, 2)), grad.sum(axis=(0, 1, 2))

    return normed * scale + bias, back


def add_bias(x, bias):
    """One number per channel."""
    return x + bias, lambda grad: (grad, grad.sum(axis=(0, 1, 2)))


def dense(x, kernel, bias):
    """x W + b on ``[B, D]``."""
    out = x @ kernel + bias
    return out, lambda grad: (grad @ kernel.T, x.T @ grad, grad.sum(axis=0))


def flat(x):
    """``[B, H, W, C]`` to features ``[B, C·H·W]``, by channel first."""
    features = np.moveaxis(x, -1, 1)

    def back(grad):
        return (np.moveaxis(grad.reshape(features.shape), 1, -1),)

    return features.reshape(len(x), -1), back


def spatial_mean(x):
    """``[B, H, W, C]`` to ``[B, 1, 1, C]``."""
    pixels = x.shape[1] * x.shape[2]
    return x.mean(axis=(1, 2), keepdims=True), lambda grad: (
        np.broadcast_to(grad / pixels, x.shape),
    )


def layer(function, *names, **options):
    """A layer with the parameters of these names, as a part of `chain`."""

    def run(w, x):
        out, back = function(x, *(w[name] for name in names), **options)

        def gradients(grad):
            d_x, *own = back(grad)
            return d_x, dict(zip(names, own, strict=True))

        return out, gradients

    return run


def chain(*parts):
    """Parts one after another; itself a part."""

    def run(w, x):
        backs = []
        for part in parts:
            x, back = part(w, x)
            backs.append(back)

        def gradients(grad):
            found = {}
            for back in reversed(backs):
                grad, own = back(grad)
                found |= own
            return grad, found

        return x, gradients

    return run


def residual(main, skip):
    """main(x) + skip(x)."""

    def run(w, x):
        (a, main_back), (b, skip_back) = main(w, x), skip(w, x)

        def gradients(grad):
            (d_a, of_main), (d_b, of_skip) = main_back(grad), skip_back(grad)
            return d_a + d_b, of_main | of_skip

        return a + b, gradients

    return run


def _biased(index, bias, **options):
    """Convolution, bias and ReLU."""
    return (
        layer(conv, f"Conv_{index}/kernel", **options),
        layer(add_bias, bias),
        layer(relu),
    )


def _dense(index):
    return layer(dense, f"Dense_{index}/kernel", f"Dense_{index}/bias")


def mnist_cnn():
    """5x5x10, pool, 5x5x20, pool, 320 → 50 → 10."""
    parts = []
    for i in range(2):
        parts += [*_biased(i, f"ChannelBias_{i}/bias", same=False), layer(pool)]
    return chain(*parts, layer(flat), _dense(0), layer(relu), _dense(1))


def fashion_cnn():
    """Six 3x3 convolutions, each with ReLU and pooling, and one dense layer."""
    parts = []
    for i in range(6):
        parts += [*_biased(i, f"ChannelBias_{i}/bias"), layer(pool)]
    return chain(*parts, layer(flat), _dense(0))


def vgg11():
    """64, P, 128, P, 256, 256, P, 512, 512, P, 512, 512, P, and one dense layer."""
    parts = []
    for i in range(8):
        parts += _biased(i, f"Norm_{i}/ChannelBias_0/bias")
        if i in (0, 1, 3, 5, 7):
            parts.append(layer(pool))
    return chain(*parts, layer(flat), _dense(0))


def resnet18():
    """A 3x3 stem, eight blocks of two convolutions with GroupNorm, and the mean."""
    index = iter(range(100))

    def normed(stride=1):
        i = next(index)
        own = (f"Norm_{i}/GroupNorm_0/scale", f"Norm_{i}/GroupNorm_0/bias")
        kernel = f"Conv_{i}/kernel"
        return layer(conv, kernel, stride=stride), layer(group_norm, *own)

    parts = [*normed(), layer(relu)]
    for block in range(8):
        stride = 2 if block in (2, 4, 6) else 1
        main = chain(*normed(stride), layer(relu), *normed())
        skip = chain(*normed(stride)) if stride == 2 else chain()
        parts += [residual(main, skip), layer(relu)]
    return chain(*parts, layer(spatial_mean), layer(flat), _dense(0))


NETWORKS = {
    "mnist_cnn": mnist_cnn(),
    "fashion_cnn": fashion_cnn(),
    "vgg11": vgg11(),
    "resnet18": resnet18(),
}


def loss_and_gradient(name, w, x, y):
    """Summed cross-entropy, and the gradient of its mean with respect to `w`."""
    logits, back = NETWORKS[name](w, x)
    logits = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    losses = -np.log(p[rows, y])
    p[rows, y] -= 1
    return losses.sum(), back(p / len(y))[1]


def flattened(tree, path=""):
    """Nested dicts of arrays as one dict of float64, by path."""
    found = {}
    for name, part in tree.items():
        if hasattr(part, "items"):
            found |= flattened(part, f"{path}{name}/")
        else:
            found[f"{path}{name}"] = np.asarray(part, np.float64)
    return found
