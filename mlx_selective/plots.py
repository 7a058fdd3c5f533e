"""Pictures, where matplotlib is installed (the extra ``plots``)."""

from typing import Any


def new_figure(width: float, height: float) -> Any | None:
    """An empty matplotlib figure that needs no display.

    Args:
        width, height: in inches.

    Returns:
        The figure, or None where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
