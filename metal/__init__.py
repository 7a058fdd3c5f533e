"""Metal Shading Language sources, installed as ``mlx_selective.metal``.

Complete Metal files, one kernel each, that ``mlx_selective.kernels`` reads; no kernel text stands
in a Python string. They are written in the vocabulary of ``tile/``.
"""
