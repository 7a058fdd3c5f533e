"""Metal Shading Language sources, installed as ``mlx_selective.metal``.

There are none yet: every method runs on its plain MLX definition. Kernels come here as real
files that a loader reads; no kernel text stands in a Python string.
"""
