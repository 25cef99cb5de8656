"""The settings of data sets."""

from tsfl_jax.components import component, setting


@component("data")
class DataConfig:
    """Where the samples come from."""

    name: str = setting("digits", "data set; svhn is svhn_cropped")
    dir: str = setting(
        "",
        'TFDS data, "": $TFDS_DATA_DIR or ~/tensorflow_datasets; others: the files',
        effect=False,
    )
    file: str = setting(
        "",
        "npz: the file; idx: part of EMNIST; tff, fedjax: name before _train",
        effect=False,
    )
    download: bool = setting(
        True, "fetch and prepare a missing TFDS data set", effect=False
    )
    normalize: str = setting(
        "unit",
        "unit: to [0, 1]; standard: mean 0, variance 1 of each channel or feature",
        ("unit", "standard"),
    )
    shape: tuple[int, ...] = setting(
        (28, 28, 1), "synthetic: shape of one sample; quadratic: (d,)"
    )
    num_classes: int = setting(10, "synthetic: number of classes", low=2)
    train_size: int = setting(0, "training samples; 0: all, synthetic 4096", low=0)
    test_size: int = setting(0, "test samples; 0: all, synthetic 1024", low=0)
    validation: int = setting(
        0,
        "V, held-out training samples of all classes, for oracle and measure_regret",
        low=0,
    )
