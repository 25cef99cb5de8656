"""Fleets as measured: settings by flat name, for those that are at their defaults.

Where each number is from, and how it was fitted, is in docs/howto/fleets.md.
"""

from tsfl_jax.components import Part

PRESETS = {
    "none": Part({}),
    # Phones that are idle, charging and on Wi-Fi; seconds of a mini-batch of 10 images
    # through FEMNIST's CNN.
    "mobile": Part(
        {
            "timeline.speed": "lognormal(1.16,0.52)",
            "timeline.bandwidth_down": "lognormal(5.95e6,0.48)",
            "timeline.bandwidth_up": "lognormal(4.06e6,0.7)",
            "timeline.online": "lognormal(2.28,1.05)",
            "timeline.online_from": "normal(1.5,6.5)",
            "timeline.power": "4.62,0.71,0.02",
            "schedule.dropout": 0.08,
        }
    ),
    # Data centers with a GPU each; seconds of a local step of the same network.
    "cross_silo": Part(
        {
            "timeline.speed": "constant(0.0046)",
            "timeline.bandwidth_down": "lognormal(3.43e7,1.09)",
            "timeline.bandwidth_up": "lognormal(3.43e7,1.09)",
            "timeline.power": "300,0,0",
        }
    ),
    # Raspberry Pi 4; seconds of 16 images of 224 × 224 through MobileNetV3-small.
    "raspberry_pi": Part(
        {"timeline.speed": "constant(4.74)", "timeline.power": "raspberry_pi_4"}
    ),
}
