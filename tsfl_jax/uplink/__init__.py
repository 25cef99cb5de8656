"""The table of all links that an update can pass on its way to the server."""

from typing import Any

from tsfl_jax.components import Part, check_name, component, section_of, setting
from tsfl_jax.types import UserError, parts_of
from tsfl_jax.uplink import attack, clip, local_layers, noise, quantize, sparse
from tsfl_jax.uplink.link import Uplink

# Those that their settings choose; first, since attackers choose what they send.
_BY_SETTINGS = (
    *(attack.ATTACK, attack.COLLUSION),
    *(local_layers.LOCAL, local_layers.PERIODIC),
)
# Those that `uplink.chain` may name.
UPLINKS: dict[str, Uplink] = {
    "topk": sparse.TOPK,
    "randk": sparse.RANDK,
    "quantize": quantize.QUANTIZE,
    "sign": quantize.SIGN,
    "model_download": quantize.MODEL_DOWNLOAD,
    "clip": clip.CLIP,
    "noise": noise.NOISE,
}


@component("uplink")
class UplinkConfig:
    """What an update passes on its way to the server."""

    chain: str = setting(
        "", "links that updates pass, in their order, comma-separated", static=True
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse an unknown link, and a vector of which parts are sent at times."""
        del rule
        for name in parts_of(self.chain):
            check_name("--config.uplink.chain", name, UPLINKS)
            compresses = hasattr(UPLINKS[name].section, "feedback")
            if compresses and config.model.local_period:
                raise UserError(
                    f"--config.uplink.chain={self.chain}: compresses what is always "
                    "sent; choose --config.model.local_period=0"
                )


def part_of(text: str) -> Part:
    """What the links of `uplink.chain` read, together."""
    named = (UPLINKS[name] for name in parts_of(text) if name in UPLINKS)
    return Part(sections=tuple(kind for link in named for kind in link.sections))


def chain_of(sections: Any) -> tuple[Uplink, ...]:
    """The links of an experiment: those that their settings choose, then those named.

    `sections` has the settings of each component by its section, as `Config` has.
    """
    chosen = [
        link
        for link in _BY_SETTINGS
        if link.applies and link.applies(getattr(sections, section_of(link.section)))
    ]
    named = (name for name in parts_of(sections.uplink.chain) if name in UPLINKS)
    return (*chosen, *(UPLINKS[name] for name in named))  # `check` refuses others
