"""A folder that convert wrote, taken to another dtype or quantised; any model of mlx-lm."""

from .layout import Layout, require


def _config(source):
    require(source, "base_model_type", "attention")
    return dict(source)


OWN = Layout(
    name="mlx-selective",
    model_types=("mlx_selective",),
    base_model_type=None,
    config=_config,
    attention=lambda source: source["attention"],
    weights=None,
)
