"""The settings of schedules, frameworks and fleets."""

from typing import Any

from tsfl_jax.components import checker, component, setting
from tsfl_jax.sections import General
from tsfl_jax.types import UserError


@component("schedule")
class ScheduleConfig:
    """How many local iterations on how many samples, per client and interval."""

    kind: str = setting("case3", "where τ comes from")
    data_size: int = setting(
        44, "samples per client, the mean if sizes are drawn", low=1, high=10**9
    )
    tau: tuple[int, ...] = setting(
        (), "explicit: τ per client or per equal group", low=0
    )
    tau_groups: str = setting("", 'distribution: "normal(2,0.4); uniform(1,5)"')
    size_groups: str = setting(
        "", 'distributions of sizes; "": those of the kind; on a timeline data_size'
    )
    trace: str = setting("", "trace: CSV file, interval,client,tau[,size], from 0")
    iteration: str = setting(
        "pass",
        "one local iteration: a pass over the data or a step",
        ("pass", "step"),
    )
    upload_above: int = setting(0, "client selection: upload only if τ > this", low=0)
    dropout: float = setting(
        0.0, "chance that a client is away for an interval", low=0, below=1
    )
    interval_seconds: float = setting(1.0, "Δ, virtual seconds", low=1e-9)
    arrive_from: float = setting(
        1.0,
        "share of its samples that a client has at first; the others arrive evenly",
        above=0,
        high=1,
    )
    free_riders: int = setting(0, "clients that report work they did not do", low=0)
    free_riding: str = setting(
        "claim",
        "what free riders do, see schedule.make_free_riders",
        ("claim", "echo", "visit"),
        used_by=("free_riders", ()),
    )


@component("timeline")
class TimelineConfig:
    """Virtual time: which clients deliver when, from speeds and delays in seconds."""

    framework: str = setting("none", "none: τ comes from schedule")
    local_iterations: int = setting(
        4, "H of a task; tsfl: as many as fit into Δ", low=1, high=2**31 - 1
    )
    carry: bool = setting(
        False, "tsfl: an unfinished iteration continues in the next interval"
    )
    buffer: int = setting(10, "fedbuff: deliveries per update", low=1)
    tiers: int = setting(3, "fedat: tiers of clients", low=1)
    deadline: float = setting(4.0, "fedcs: seconds per round", low=1e-9)
    fraction: float = setting(
        0.5,
        "safa: share of the clients that ends a round; cached: that uploads in it",
        above=0,
        high=1,
    )
    lag: int = setting(5, "safa, cached: most versions a client may be behind", low=0)
    window: float = setting(
        0.5, "hysync: seconds from a first arrival to its update", low=0
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse estimates of the theory where clients are not in step."""
        del rule
        if config.measure_clients and self.framework not in ("none", "tsfl"):
            raise UserError(
                "--config.measure_clients=true: the theory is about clients in step; "
                f"--config.timeline.framework={self.framework} is not, use none or tsfl"
            )


@component("timeline")
class FleetConfig:
    """How fast and how long the clients work, of every framework."""

    fleet: str = setting("none", "measured fleet that fills settings at their defaults")
    speed: str = setting(
        "uniform(0.25,1)",
        "groups; seconds per iteration at the mean size",
        used_by=("speeds", ("",)),
    )
    jitter: float = setting(
        0.0, "σ of a lognormal factor on each iteration and transfer", low=0, high=10
    )
    download: str = setting("constant(0)", "groups; seconds")
    upload: str = setting("constant(0)", "groups; seconds")
    bandwidth_down: str = setting(
        "", "groups; bytes per second, in addition to download; empty: no limit"
    )
    bandwidth_up: str = setting("", "groups; likewise, in addition to upload")
    online: str = setting(
        "", "groups; hours of each day when a client is online; empty or ≥ 24: always"
    )
    online_from: str = setting(
        "",
        "groups; hour of the day, modulo 24, when it comes online; a run begins at 0",
    )
    speeds: str = setting(
        "",
        "CSV file, client,seconds[,download,upload,bandwidth_…,…]; or FedScale's JSON",
    )
    availability: str = setting(
        "",
        "CSV file, client,start,end in seconds; or FLASH's states, FedScale's behavior",
    )
    period: float = setting(
        0.0,
        "seconds after which the windows of a CSV file repeat; 0: never",
        low=0,
        used_by=("availability", ()),
    )
    resample: bool = setting(
        False, "a client is a user of the files, drawn with replacement; else by number"
    )
    copula: str = setting(
        "", 'correlations, "seconds rarity 0.8"; of seconds, size, rarity, online'
    )
    power: str = setting(
        "", 'groups; watts of compute, transfer, idle, "5,1.5,0.2"', effect=False
    )

    def check(self, config: Any, rule: Any) -> None:
        """Refuse what would be ignored without hours, files, or windows in CSV."""
        del config, rule
        for name, is_ignored, needed in (
            ("online_from", not self.online + self.speeds, "online"),
            ("resample", not self.speeds + self.availability, "availability"),
            ("period", self.availability.endswith(".json"), "availability=FILE.csv"),
        ):
            if is_ignored and (value := getattr(self, name)):
                raise UserError(
                    f"--config.timeline.{name}={value}: would be ignored without "
                    f"--config.timeline.{needed}; leave it out"
                )


check = checker(General, ScheduleConfig, TimelineConfig, FleetConfig)
