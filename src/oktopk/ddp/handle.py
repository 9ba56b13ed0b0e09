"""`Handle`: the records, the residuals, the settings and the checkpoints of an exchange, for whoever drives it."""

from __future__ import annotations

import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from html import escape
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oktopk.algorithms import ALGORITHMS, Algorithm, Dense, as_algorithm, make_algorithm
from oktopk.ddp.engine import Engine
from oktopk.ddp.exclude import Exclusion, rules_of
from oktopk.errors import MismatchError, SettingError, StateError
from oktopk.kernels import NUMPY, kernels_for
from oktopk.reducer import compile_kernels
from oktopk.telemetry.format import count
from oktopk.telemetry.schema import StepRecord
from oktopk.telemetry.summary import Summary

VERSION = 3


class Handle:
    """An engine and its worker thread. `rank` and `size` are those of `group`, the process group of the exchange."""

    _engine: Engine
    group: dist.ProcessGroup | None
    place: Mapping[str, int] = MappingProxyType({})
    """With FSDP: the shard of this rank, and the number of shards."""
    MORE: tuple[str, ...] = ()
    """Further entries of one rank's state dict."""

    def _start(
        self,
        engine: Engine,
        own: Sequence[dist.ProcessGroup],
        timeout: float,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the worker thread, once all ranks are seen to be about to do the same.

        At the end `leave` is called, and the groups `own` are destroyed.
        """
        self._engine, self.rank, self.size = engine, engine.comm.rank, engine.comm.size
        self._worker = WorkerThread()
        self._finalizer = weakref.finalize(self, _shut_down, os.getpid(), leave, self._worker, engine, own, timeout)
        try:
            engine.agree()
        except MismatchError:
            self._finalizer()
            raise

    @property
    def last(self) -> StepRecord | None:
        """The record of the latest step; None before the first."""
        return self._engine.last

    @property
    def residual(self) -> dict[str, Tensor]:
        """A copy of what this rank has not delivered yet, by parameter, flat; with FSDP of this rank's padded shard."""
        return {name: tensor for group in self._engine.groups for name, tensor in group.by_name().items()}

    def residual_norm(self) -> float:
        """Return the norm of this rank's residual. It takes a pass over all elements, so do not call it every step."""
        return float(self.residual_norm_tensor())

    def residual_norm_tensor(self) -> Tensor:
        """Return the same norm on the residual's device; the host does not wait for it."""
        norms = [torch.linalg.vector_norm(group.residual.held).double() for group in self._engine.groups]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    @property
    def algorithm(self) -> Any:
        """The algorithm of the sparse steps. May be set between steps, on all ranks alike; residuals stay."""
        return self._engine.config.algorithm.given

    @algorithm.setter
    def algorithm(self, algorithm: Algorithm | str) -> None:
        self._engine.change(replace(self._engine.config, algorithm=algorithm_of(algorithm)))

    @property
    def density(self) -> float | None:
        """The density of the sparse steps, past any schedule. May be set between steps, on all ranks alike."""
        algorithm = self._engine.config.algorithm
        return algorithm.density if algorithm.has_density else None

    @density.setter
    def density(self, density: float) -> None:
        self.algorithm = self._engine.config.algorithm.with_density(density)

    def exclude(self, exclude: Exclusion | Iterable[Exclusion]) -> None:
        """Make other parameters travel dense from the next step on, which also delivers their residuals."""
        self._engine.change(replace(self._engine.config, exclude=rules_of(exclude)))

    def summary(self) -> Summary:
        """Return the totals of all steps so far; `print` shows them as a table."""
        return self._engine.summary

    def log(self, **figures: Any) -> None:
        """Add figures of yours, such as a loss, to the record of the latest step, for the report and the sinks.

        Numbers and tensors of one element are taken; for one on a GPU the host waits. A NaN or Inf is kept as unknown.
        """
        self._engine.log({name: _number_of(name, value) for name, value in figures.items()})

    def flush(self) -> None:
        """Write the records of all steps so far to the sinks; on the device path this waits for the steps."""
        self._engine.flush_records(delay=0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which this rank resumes bit for bit; every rank saves its own."""
        self._engine.save_()
        return {
            "version": VERSION,
            "algorithm": type(self.algorithm).__name__,
            "rank": self.rank,
            "size": self.size,
            **self.place,
            "step": self._engine.next_step,
            "residual": self.residual,
            "groups": [group.state_dict() for group in self._engine.groups],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from this rank's `state_dict`; one that does not fit is refused and changes nothing.

        Mode, ranking and all other settings are those of this attachment, not the saved ones.
        """
        version = saved.get("version") if isinstance(saved, Mapping) else None
        if version != VERSION:
            raise StateError(f"wanted an attachment's state dict of version {VERSION}, not of version {version!r}")
        self.check_kind(saved)
        self._check_parameters({name: tensor.numel() for name, tensor in saved["residual"].items()}, self._sizes_here())
        mine = {"algorithm": type(self.algorithm).__name__, "size": self.size, "rank": self.rank}
        for what, ours in {**mine, "shards": None, "shard": None, **self.place}.items():
            if saved.get(what) != ours:
                changeable = what in ("size", "shards")
                advice = "; save_distributed and load_distributed change the world size" if changeable else ""
                raise StateError(f"the state dict is of {what} {saved.get(what)!r}, here it is {ours!r}{advice}")
        self.load_residual(saved["residual"], saved["step"])
        self.load_groups(saved["groups"])
        self.load_rest(saved, is_own=True)

    def owed(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the part of a rank's gradients, given its state dict, that all ranks are still to get."""
        return dict(saved["residual"])

    def load_rest(self, saved: Mapping[str, Any], is_own: bool) -> None:
        """Go on with the other entries of a state dict, this rank's own or another's. An attachment has none."""

    def detach(self) -> None:
        """End: join the worker, and close the sinks."""
        raise NotImplementedError

    def load_residual(self, residual: Mapping[str, Tensor], step: int) -> None:
        """Hold these residuals, by parameter, and go on at `step`."""
        self._engine.state_to_host()
        for group in self._engine.groups:
            group.load_by_name_(residual)
            group.state = None
        self._engine.go_on_at(int(step))

    def load_groups(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Resume with these algorithm states; where they do not fit the current settings, the algorithm starts anew."""
        groups, comm, algorithm = self._engine.groups, self._engine.comm, self._engine.config.algorithm
        if [int(group["group"]) for group in saved] != [group.fingerprint for group in groups]:
            why = "for other groups of parameters than here"
        else:
            fits = [group.load_state_dict_(each, algorithm, comm) for group, each in zip(groups, saved, strict=True)]
            if all(fits):
                return
            why = f"with another algorithm, mode or ranking than {self.algorithm}"
        if self._engine.is_first:
            sys.stderr.write(f"oktopk: the state was saved {why}: residuals are kept, the algorithm starts anew\n")

    def _when(self) -> str:
        """Return which steps exchange what, as a part of the sentence with the settings."""
        raise NotImplementedError

    def __str__(self) -> str:
        numel, held = self._engine.numel, self._engine.groups[0].residual.held
        ranks = count(self.size, "replica" if self.place else "rank")
        ranks += f" of {count(self.place['shards'], 'shard')}" if self.place else ""
        where = f"{_short(self.algorithm)} on {ranks}"
        if isinstance(self.algorithm, Dense):
            return f"{where}: every step is dense"
        kernel = "gpu (triton), steps stay there" if self._engine.on_device else kernels_for(held).name
        return f"{where}: {self._when()} ({numel - sum(self._dense_numels):,} of {numel:,} elements); {kernel}"

    def _repr_html_(self) -> str:
        """Return settings and summary, for notebooks."""
        return f"<p>{escape(str(self))}</p>{self.summary()._repr_html_()}"

    @property
    def _dense_numels(self) -> list[int]:
        """Elements of the parameters that travel dense."""
        names = (name for group in self._engine.groups for name in group.dense_names)
        return [self._engine.parameters[name].numel() for name in names]

    def compile_kernels(self) -> None:
        """Compile the CPU kernels now, so that no step is timed with it; say so if it takes seconds."""
        held = max((group.residual.held for group in self._engine.groups), key=Tensor.numel)
        is_ours = type(self.algorithm) in ALGORITHMS.values() and not isinstance(self.algorithm, Dense)
        if not is_ours or held.device.type != "cpu" or kernels_for(held) is NUMPY:
            return
        seconds = compile_kernels(self.algorithm, held.dtype)
        if seconds > 1 and self._engine.is_first:
            sys.stderr.write(f"oktopk: made the CPU kernels ready in {seconds:.1f} s; the steps do not wait for them\n")

    def announce(self) -> None:
        """Print the active settings to stderr on rank 0."""
        if not self._engine.is_first:
            return
        sys.stderr.write(f"oktopk: {self}\n")
        dense = self._dense_numels
        sparse = self._engine.numel - sum(dense)
        selected = 2 * sparse * (self.density or 1.0)  # an index and a value each
        warnings = {
            "one rank has nobody to exchange with: its sparse steps only cost time": self.size == 1,
            "every parameter travels dense, nothing will be compressed": not sparse,
            f"most bytes travel dense: {sum(dense):,} elements of small tensors. Give another exclude=, such as () for "
            "none": sparse and sum(dense) > selected,
        }
        for text in (text for text, holds in warnings.items() if holds):
            sys.stderr.write(f"oktopk: WARNING: {text}\n")

    def check_kind(self, entries: Container[str]) -> None:
        """Refuse a state of another kind of handle, given its entries."""
        kinds = {True: "LocalSteps", False: "attach"}
        is_local, wants_local = "agreed" in entries, "agreed" in self.MORE
        if is_local != wants_local:
            raise StateError(f"wanted a state of {kinds[wants_local]}, and this is one of {kinds[is_local]}")

    def check_parameters(self, theirs: Mapping[str, int]) -> None:
        """Refuse a state whose parameters, given by name and length, are not this model's."""
        self._check_parameters(theirs, {name: parameter.numel() for name, parameter in self.parameters.items()})

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The parameters whose gradients are exchanged, by name; with FSDP DTensors of the whole shape."""
        return self._engine.parameters

    def _sizes_here(self) -> dict[str, int]:
        return {name: span.stop - span.start for group in self._engine.groups for name, span in group.spans.items()}

    def _check_parameters(self, theirs: Mapping[str, int], ours: Mapping[str, int]) -> None:
        if theirs != ours:
            missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
            resized = sorted(name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name])
            raise StateError(
                f"the state dict is of another model: missing {missing}, unknown {extra}, of another size {resized}"
            )


class WorkerThread(threading.Thread):
    """Runs the `jobs` that are put into its queue, until `stop`. A job deals with its own errors."""

    def __init__(self) -> None:
        super().__init__(name="oktopk exchange", daemon=True)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        """Run the jobs."""
        while (job := self.jobs.get()) is not None:
            job()
            del job  # or the last job, and all it refers to, would live until the next one comes

    def stop(self, timeout: float) -> None:
        """Join the thread, after the jobs that are waiting."""
        self.jobs.put(None)
        if threading.current_thread() is not self:
            self.join(timeout)


def _shut_down(
    owner: int,
    leave: Callable[[], None],
    worker: WorkerThread,
    engine: Engine,
    groups: Sequence[dist.ProcessGroup],
    timeout: float,
) -> None:
    """End what a handle started, in the process that did: a forked child has none of its threads."""
    if os.getpid() != owner:
        return
    leave()
    worker.stop(timeout)
    engine.close()
    for group in groups if dist.is_initialized() else ():
        with suppress(ValueError):  # it ended with the world it was in, and this is another
            dist.destroy_process_group(group)


def _number_of(name: str, value: Any) -> float | None:
    """Return a figure of a script as a float; None if it is not finite, because JSON has no NaN."""
    try:
        number = float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        came = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise SettingError(f"log wants a number for {name}, or a tensor of one element; this is {came}") from None
    return number if math.isfinite(number) else None


def algorithm_of(algorithm: Algorithm | str) -> Algorithm:
    """Return the algorithm, or the one of that name."""
    return as_algorithm(make_algorithm(algorithm) if isinstance(algorithm, str) else algorithm)


def _short(algorithm: Any) -> str:
    """Return an algorithm with its density and the settings that are not its defaults."""
    if not is_dataclass(algorithm):
        return str(algorithm)
    named = {each.name: getattr(algorithm, each.name) for each in fields(algorithm)}
    defaults = {each.name: each.default for each in fields(algorithm) if each.name != "density"}
    shown = ", ".join(f"{name}={value!r}" for name, value in named.items() if value != defaults.get(name))
    return f"{type(algorithm).__name__}({shown})"
