"""Oort's choice in plain Python and float64, one candidate after another."""

import math


def start(clients):
    """(utility, last round) of clients that were never heard of."""
    return [(0.0, 0)] * clients


def factors(steps, preferred, penalty):
    if preferred >= 100:
        return [1.0] * len(steps)
    limit = sorted(steps)[min(int(len(steps) * preferred / 100), len(steps) - 1)]
    return [(limit / t) ** penalty if t > limit else 1.0 for t in steps]


def utilities(state, factor, number):
    """Of those that were heard of, by place."""
    values = sorted(utility for utility, last in state if last)
    if not values:
        return {}
    low, high = 0.999 * values[0], values[-1]
    most = values[min(int(0.95 * len(values)), len(values) - 1)]
    found = {}
    for i, (utility, last) in enumerate(state):
        if last:
            scaled = (min(utility, most) - low) / max(high - low, 1e-4)
            stale = math.sqrt(0.1 * math.log(number) / last)
            found[i] = (scaled + stale) * factor[i]
    return found


def oort(state, held, steps, gumbel, number, size, preferred, penalty):
    """Sorted places of those chosen."""
    factor = factors(list(steps), preferred, penalty)
    found = utilities(state, factor, number)
    new = [i for i in range(len(state)) if i not in found]
    explored = min(math.floor(size * max(0.9 * 0.98 ** (number - 1), 0.2)), len(new))
    again = min(size - explored, len(found))
    chosen = []
    if again:
        cut = 0.95 * sorted(found.values(), reverse=True)[again - 1]
        keys = {
            i: math.log(max(u, 1e-30)) + gumbel[i] for i, u in found.items() if u >= cut
        }
        chosen += sorted(keys, key=lambda i: -keys[i])[:again]
    keys = {i: math.log(max(held[i] * factor[i], 1e-30)) + gumbel[i] for i in new}
    chosen += sorted(keys, key=lambda i: -keys[i])[: size - again]
    return sorted(chosen)
