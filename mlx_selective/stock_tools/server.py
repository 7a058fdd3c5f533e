"""mlx-lm's server, made to fail and to end as a command does.

Left to itself it opens the model in a thread and serves on when that fails, and the thread keeps
the process alive when the port is taken.
"""

import os
from contextlib import suppress
from typing import Any

import mlx.core as mx
from huggingface_hub import constants

from ..errors import UserError
from .exchange import exchanged


def serve(server: Any) -> None:
    """Serves until Ctrl-C.

    Args:
        server: the module ``mlx_lm.server``.

    Raises:
        UserError: if the model cannot be opened, or the address cannot be had.
        KeyboardInterrupt: at the end.
    """
    threads: list[Any] = []
    with exchanged(server, **_parts(server, threads)):
        try:
            server.main()
        finally:
            for thread in threads:
                thread.stop_and_join()
    raise KeyboardInterrupt  # mlx-lm ends at one as if nothing had been


def _parts(server: Any, threads: list[Any]) -> dict[str, Any]:
    """What takes the place of parts of the server; its threads are listed as they start."""
    run_http_server = server._run_http_server

    class ModelProvider(server.ModelProvider):
        def __init__(self, *args):
            super().__init__(*args)
            self.load_default()
            if self.model is not None:
                # What is pending can only be computed on the thread that asked for it.
                mx.eval(self.model.parameters())

        def load(self, model_path, adapter_path=None, draft_model_path=None):
            # mlx-lm 0.31 forgets the default model's adapter.
            adapter_path = self._adapter_map.get(model_path, adapter_path)
            return super().load(model_path, adapter_path, draft_model_path)

    class ResponseGenerator(server.ResponseGenerator):
        def __init__(self, *args):
            super().__init__(*args)
            threads.append(self)

    def listen(host, port, *args, **options):
        if not 0 <= port <= 65535:  # the system would take the remainder
            raise UserError(f"--port must be from 0 to 65535, got {port}.")
        with suppress(OSError):  # /v1/models lists this folder, and fails where there is none
            os.makedirs(constants.HF_HUB_CACHE, exist_ok=True)
        try:
            run_http_server(host, port, *args, **options)
        except OSError as error:
            raise UserError(f"--host {host} --port {port}: {error.strerror or error}.") from None

    return {
        "ModelProvider": ModelProvider,
        "ResponseGenerator": ResponseGenerator,
        "_run_http_server": listen,
    }
