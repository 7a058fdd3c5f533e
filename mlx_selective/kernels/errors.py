"""What is wrong with a kernel file, or with a call of a kernel."""


class KernelError(ValueError):
    """A kernel file or a launch that MLX would misread; the message names the file and the fault.

    It is a mistake in this package or in a kernel under development, never the user's.
    """
