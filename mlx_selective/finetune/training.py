"""mlx-lm's training loop, with our loss, batches whose order is known, and a way to stop."""

import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten
from mlx_lm.tuner import trainer

from ..attention.selective.memory_loss import TrainingPass, training_pass
from ..errors import UserError
from ..files import one_line
from ..stock_tools.exchange import exchanged
from . import adapters
from .objective import GAIN, KEEP, NEEDED, UNREPORTED, Objective, hold, let_go
from .picture import draw
from .progress import CURVE, Progress, Silent
from .settings import buffer_of
from .state import FILE, load_state, save_state


class Stopped(Exception):
    """The user wants to stop; what is done is saved.

    Args:
        iteration: the last one that is done.
    """

    def __init__(self, iteration: int):
        super().__init__(f"stopped after iteration {iteration}")
        self.iteration = iteration


class Run:
    """One training, or the rest of one.

    Args:
        args: the settings of ``mlx-selective finetune``.
        schedules: what selective layers follow, ``{GAIN: ..., KEEP: ...}``, each a function of
            the iteration.
        settings: what has to be the same for a training to go on.
        config: what adapter_config.json holds.
    """

    def __init__(
        self,
        args: SimpleNamespace,
        schedules: dict[str, Callable[[int], float]],
        settings: dict[str, Any],
        config: dict[str, Any],
    ):
        self._args, self._schedules, self._settings = args, schedules, settings
        self._folder, self._config = Path(args.adapter_path), config
        self._done = self._saved = 0
        self._wants_to_stop = False

    def train(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        train_dataset: Any,
        val_dataset: Any,
        args: trainer.TrainingArgs,
        training_callback: Any = None,
    ) -> None:
        """In place of ``mlx_lm.tuner.trainer.train``, with its arguments.

        Raises:
            UserError: if a training is to go on that is not there, or is at its end.
            Stopped: if Ctrl-C came, once what is done is saved.
        """
        self._model, self._optimizer = model, optimizer
        own = TrainingPass(block_size=self._block_size())
        # mlx-lm would write its files in place
        args.adapter_file = self._folder / f".{adapters.WEIGHTS}.partial.safetensors"
        args.steps_per_save = args.iters + 1
        with training_pass(own), self._interrupts():
            try:
                self._prepare(args.iters)
                progress = Progress(model, self._folder, args.iters, self._done, training_callback)
                self._progress = progress
                with exchanged(trainer, **self._exchanges()):
                    trainer.train(
                        model=model,
                        optimizer=optimizer,
                        train_dataset=train_dataset,
                        val_dataset=val_dataset,
                        args=args,
                        loss=Objective(own, self._args.memory_loss),
                        iterate_batches=self._batches,
                        training_callback=progress,
                    )
                self._write_adapter(args.iters)
                self._save(args.iters)
                self._leave_no_other_state()
                self._show()
            except (OSError, RuntimeError) as error:
                raise self._meaning_of(error) from None
            finally:
                Path(args.adapter_file).unlink(missing_ok=True)
                let_go(model)

    def _block_size(self) -> int:
        """Queries after which keys are dropped: small beside the fewest that stay."""
        fewest = buffer_of(self._args)[1] if KEEP in self._schedules else 128
        return max(1, min(32, fewest // 4))

    def _meaning_of(self, error: Exception) -> Exception:
        # Ctrl-C reaches the compiler too, where MLX has just called one
        if self._wants_to_stop:
            return Stopped(self._saved)
        if isinstance(error, OSError) or str(error).startswith("[write]"):
            why = getattr(error, "strerror", None) or one_line(error)
            return UserError(f"{self._folder} cannot be written: {why}")
        return error

    def _leave_no_other_state(self) -> None:
        """A state of another training would go on in place of this one."""
        if not self._saved:
            (self._folder / FILE).unlink(missing_ok=True)

    def _show(self) -> None:
        """Where the curve is."""
        picture = draw(self._folder)
        hint = "" if picture else ' (pip install "mlx-selective[plots]" for a picture)'
        print(f"Curve: {picture or self._folder / CURVE}{hint}")

    def _prepare(self, last: int) -> None:
        """Takes back the state of a stopped training, and gives the model what schedules move."""
        hold(self._model, **{UNREPORTED: [0.0, 0.0]})
        if self._args.resume:
            self._done = load_state(self._folder, self._model, self._optimizer, self._settings)
            self._saved = self._done
            if self._done >= last:
                raise UserError(
                    f"--resume: {self._done} of --iters {last} are done already; give more."
                )
        self._follow_schedules(self._done + 1)
        layers = len(_selective_methods(self._model))
        if layers:
            hold(self._model, **{NEEDED: [0.0] * layers})

    def _exchanges(self) -> dict[str, Any]:
        """mlx-lm's loop counts from 1, and prints."""
        done = self._done

        def count_on(*limits):
            # the loop's own is the only one of two limits
            return range(done + 1, limits[1]) if len(limits) == 2 else range(*limits)

        parts: dict[str, Any] = {"range": count_on}
        if hasattr(trainer, "TrainUI"):
            parts["TrainUI"] = Silent
        else:
            parts["print"] = lambda *_, **__: None
        return parts

    def _batches(self, dataset, batch_size, max_seq_length, loop=False, **options):
        """mlx-lm's batches: of training from the place on, of validation always the same ones.

        Between two batches all of an iteration is done: here its state is saved.
        """
        make = trainer.iterate_batches
        if not loop:
            for batch in make(dataset, batch_size, max_seq_length, seed=self._args.seed, **options):
                self._stop_if_wanted(self._iteration - 1)
                yield batch
            return
        batches = self._from_place(make, dataset, batch_size, max_seq_length, options)
        for iteration in itertools.count(self._done + 1):
            self._iteration, before = iteration, iteration - 1
            if before - self._saved >= self._args.save_every:
                self._save(before, numbered=True)
            self._stop_if_wanted(before)
            self._follow_schedules(iteration)
            try:
                batch = next(batches)
            except UserError:  # an example that is none
                self._save(before)
                raise
            yield batch

    def _from_place(self, make, dataset, batch_size, max_seq_length, options) -> Iterator[Any]:
        """Epoch after epoch, each in an order of its own that the seed tells."""
        in_epoch = max(1, len(dataset) // batch_size)
        for epoch in itertools.count(self._done // in_epoch):
            seed = self._args.seed + 1 + epoch
            one = make(dataset, batch_size, max_seq_length, seed=seed, **options)
            skip = self._done % in_epoch if epoch == self._done // in_epoch else 0
            yield from itertools.islice(one, skip, None)

    def _follow_schedules(self, iteration: int) -> None:
        hold(self._model, **{name: at(iteration) for name, at in self._schedules.items()})

    def _save(self, iteration: int, numbered: bool = False) -> None:
        """All of it, where gradients are not being accumulated."""
        if iteration == 0 or iteration % self._args.grad_accumulation_steps:
            return
        save_state(self._folder, self._model, self._optimizer, iteration, self._settings)
        self._write_adapter(iteration, numbered)
        self._saved = iteration

    def _write_adapter(self, iteration: int, numbered: bool = False) -> None:
        """Weights and config; ``numbered``: the weights under mlx-lm's name for a snapshot too."""
        weights = dict(tree_flatten(self._model.trainable_parameters()))
        if numbered:
            adapters.save_weights(weights, self._folder / f"{iteration:07d}_{adapters.WEIGHTS}")
        adapters.save_weights(weights, self._folder / adapters.WEIGHTS)
        config = dict(self._config)
        if GAIN in self._schedules:
            gain = self._schedules[GAIN](iteration)
            if gain < 1 or _gain_of(self._model) != 1:
                config["attention_gain"] = gain
        adapters.save_config(config, self._folder / adapters.CONFIG)
        self._progress.save()

    def _stop_if_wanted(self, iteration: int) -> None:
        if self._wants_to_stop and iteration % self._args.grad_accumulation_steps == 0:
            self._save(iteration)
            raise Stopped(iteration)

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Ctrl-C is looked at between two iterations; the second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def want(number, frame):
            if self._wants_to_stop:
                raise KeyboardInterrupt
            self._wants_to_stop = True

        before = signal.signal(signal.SIGINT, want)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def _selective_methods(model: nn.Module) -> list[Any]:
    modules = (module for _, module in model.named_modules())
    methods = (getattr(module, "attention_method", None) for module in modules)
    return [method for method in methods if method is not None and method.kind == "selective"]


def _gain_of(model: nn.Module) -> float:
    """The gain that the model has by itself."""
    return min(method.gain for method in _selective_methods(model))
