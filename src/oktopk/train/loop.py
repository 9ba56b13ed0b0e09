"""`Trainer`: the training loop of one worker, with a record of every step and checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import oktopk
from oktopk.ddp.handle import Handle
from oktopk.ddp.momentum import Rates
from oktopk.steps import READBACK_DELAY
from oktopk.telemetry.figures import finite
from oktopk.telemetry.format import format_bytes, format_value
from oktopk.telemetry.schema import SPLIT, EpochRecord, StepRecord, TrainStep, add_by_name, from_row, to_row
from oktopk.train import checkpoint
from oktopk.train.collectives import all_or_none, check_same_weights, gather
from oktopk.train.console import Console
from oktopk.train.dist import Place
from oktopk.train.divergence import DivergedError, Health, nonfinite_message
from oktopk.train.models import make_model
from oktopk.train.optimizers import make_optimizers, set_rates
from oktopk.train.plan import Plan
from oktopk.train.rundir import RunLogger
from oktopk.train.workload import AnyBatch, Workload

Ranks = list[dict[str, Any]]  # the figures of each rank
NEVER = 10**9
"""Step that no run reaches: the first sparse one of a dense compressor, the last one without a limit."""
RESIDUAL_EVERY = 10
"""Steps from one norm of the residual to the next, because each takes 5 ms at 27.6 M elements."""


@dataclass
class Progress:
    """Position of the run and sums so far, as a checkpoint holds them."""

    epoch: int = 0
    step_of_epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # of the epoch's steps so far
    loss_count: int = 0
    best_error: float | None = None  # of the validations so far
    grad_norm: float | None = None


@dataclass(frozen=True)
class _Unfinished:
    """A step whose figures are not written yet; those of a GPU are on their way to the host."""

    rates: Rates
    laps: Laps
    counts: dict[str, int]
    figures: Tensor  # loss, gradient norm, residual norm


class Trainer:
    """One worker of a run. All workers construct one and call the same methods in the same order."""

    model: nn.Module
    sparse: Handle

    def __init__(self, place: Place, workload: Workload, plan: Plan, run_logger: RunLogger, console: Console) -> None:
        self.place, self.workload, self.plan, self.run_logger, self.console = place, workload, plan, run_logger, console
        self.config = config = plan.config
        self.device = torch.device(plan.device)
        self.train_batches, self.val_batches = workload.batches(place.size, place.rank)
        torch.manual_seed(config.seed)
        self.net = make_model(config.dnn).to(self.device)
        self.optimizers = make_optimizers(self.net, config)
        self._autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=config.in_bf16(self.device))
        self._records: SimpleQueue[StepRecord] = SimpleQueue()
        self._unfinished: deque[_Unfinished] = deque()
        self.progress = Progress()
        self.health = Health()
        self._connect()

    def _connect(self) -> None:
        """Wrap the net, so that each backward exchanges gradients."""
        config = self.config
        self.model = DistributedDataParallel(self.net)  # gives all ranks the weights of rank 0
        self.sparse = oktopk.attach(
            self.model,
            config.algorithm(),
            dense_steps=NEVER if config.is_dense else config.dense_steps,
            clip=config.clip if config.clip and config.clip_place == "local" else None,
            on_nonfinite="skip",  # `_check_health` raises, with step and learning rate
            optimizer=self.optimizers,
            sparse_momentum=config.sparse_momentum,
            sinks=[self._records.put],
            timeout=config.timeout_s,
        )

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, as if the run had never stopped."""
        rank, size = self.place.rank, self.place.size
        shared, own = all_or_none(
            "reading the checkpoint", lambda: checkpoint.load(folder, rank, size, self.sparse.owed)
        )
        self.net.load_state_dict({**shared["net"], **own.get("buffers", {})})
        for optimizer, state in zip(
            self.optimizers, (own if "optimizers" in own else shared)["optimizers"], strict=True
        ):
            optimizer.load_state_dict(state)
        self.progress = Progress(**shared["progress"])
        self.health = Health(**shared["health"])
        # At another number of workers an epoch has another number of steps; the same part of it is over.
        done, before = self.progress.step_of_epoch, shared["steps_per_epoch"]
        self.progress.step_of_epoch = done * self.plan.steps_per_epoch // before
        if "pending" in own:  # another number of workers
            self.sparse.load_residual(**own["pending"])
            self.sparse.load_rest(own["oktopk"], is_own=False)
        elif own["oktopk"]["algorithm"] != type(self.sparse.algorithm).__name__:  # another compressor
            self.sparse.load_residual(own["oktopk"]["residual"], own["oktopk"]["step"])
            self.sparse.load_rest(own["oktopk"], is_own=True)
        else:
            self.sparse.load_state_dict(own["oktopk"])
        self.run_logger.go_on_from(self.progress.step, self.progress.epoch + self._is_over())
        self.run_logger.event("resume", self.progress.step, f"resumed from {folder.name}")
        if "generators" in own:  # only with the same number of workers
            checkpoint.set_rng_state(own["generators"], self.device)

    def run(self) -> dict[str, Any]:
        """Train to the end; return the summary of the run."""
        try:
            with self.console.progress:
                while self.progress.epoch < self.config.max_epochs and not self._is_over():
                    self._run_epoch()
        finally:
            self.sparse.detach()
        self.run_logger.event("end", self.progress.step, f"the run reached its end at step {self.progress.step}")
        return self.run_logger.finish()

    def _is_over(self) -> bool:
        """Return whether `max_steps` ends the run, even amid an epoch."""
        return 0 < self.config.max_steps <= self.progress.step

    @property
    def _is_epoch_whole(self) -> bool:
        return self.progress.step_of_epoch >= self.plan.steps_per_epoch

    @property
    def _is_epoch_over(self) -> bool:
        return self._is_epoch_whole or self._is_over()

    def _run_epoch(self) -> None:
        start, progress, every = time.perf_counter(), self.progress, self.config.checkpoint_every
        left = self.plan.steps_per_epoch - progress.step_of_epoch
        steps = min(left, (self.config.max_steps or NEVER) - progress.step)
        self.console.begin_epoch(progress.epoch, steps, progress.step)
        self.net.train()
        batches = self.train_batches.epoch(progress.epoch, progress.step_of_epoch * self.config.nsteps_update)
        while not self._is_epoch_over:
            self._step(batches)
            if every and progress.step % every == 0 and not self._is_epoch_over:  # the end has a checkpoint of its own
                self._checkpoint(best=False)
        self._end_epoch(time.perf_counter() - start)

    def _step(self, batches: Iterator[AnyBatch]) -> None:
        """Make one step: forward and backward, the exchange within backward, the update.

        On a GPU the host only enqueues it. The record comes through a sink some steps later, see `_finish_steps`.
        """
        laps, buffers = Laps(self.device), [buffer.clone() for buffer in self.net.buffers()]
        work = [batch.to(self.device) for batch in islice(batches, self.config.nsteps_update)]
        laps.end("data")
        loss = self._forward_backward(work)
        laps.end("compute")
        for buffer, before in zip(self.net.buffers(), buffers, strict=True):
            # A NaN in a running mean would never leave it. On a GPU the device alone knows whether there is one.
            buffer.copy_(torch.where(torch.isfinite(loss), buffer, before))
        phase = self._phase_of(self.progress.step)
        clipped = self.config.clip_place == "global" or phase == "dense"  # `attach` clips sparse steps only
        norm = clip_grad_norm_(self.net.parameters(), self.config.clip if self.config.clip and clipped else math.inf)
        set_rates(self.optimizers, *self._rates("dense"))
        self._update(loss, norm, laps)
        residual_norm = torch.tensor(math.nan, device=self.device)
        if self._measures_residual(phase):
            residual_norm = self.sparse.residual_norm_tensor()
        figures = torch.stack([loss, norm, residual_norm]).to("cpu", non_blocking=True)
        laps.end("update")
        counts = {name: sum(getattr(batch, name) for batch in work) for name in ("utterances", "characters")}
        self._unfinished.append(_Unfinished(self._rates(phase), laps, counts, figures))
        self.progress.step, self.progress.step_of_epoch = self.progress.step + 1, self.progress.step_of_epoch + 1
        self._after_step()

    def _update(self, loss: Tensor, norm: Tensor, laps: Laps) -> None:  # noqa: ARG002
        """Make a step of the optimizers. A skipped one delivers zeros, and goes on with the momentum alone."""
        for optimizer in self.optimizers:
            optimizer.step()

    def _measures_residual(self, phase: str) -> bool:
        return phase == "sparse" and self.progress.step % RESIDUAL_EVERY == 0

    def _after_step(self) -> None:
        """Write the steps that the device has finished."""
        self._finish_steps(but=READBACK_DELAY if self.device.type == "cuda" else 0)

    def _phase_of(self, step: int) -> str:
        return "dense" if self.config.is_dense or step < self.config.dense_steps else "sparse"

    def _rates(self, phase: str, before: int = 0) -> Rates:
        """Return the rates of the next step, or of one that is `before` steps earlier in its epoch."""
        part = (self.progress.step_of_epoch - before + 0.5) / self.plan.steps_per_epoch
        return self.config.rates_at(self.progress.epoch, phase, part, self.place.size)

    def _forward_backward(self, work: list[AnyBatch]) -> Tensor:
        """Return this rank's mean loss over the passes; the last backward exchanges the sum of their gradients."""
        self.net.zero_grad()
        losses = []
        for i, batch in enumerate(work):
            last = i == len(work) - 1
            with nullcontext() if last else self._no_sync():
                with self._autocast:
                    loss = self.workload.loss(self.model, batch) / len(work)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().double())
        return torch.stack(losses).sum()

    def _no_sync(self) -> AbstractContextManager[None]:
        """Let a backward pass only add to the gradients."""
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def _finish_steps(self, but: int = 0) -> None:
        """Check and write the steps so far, except for the last `but`, which the GPU may not have finished.

        The figures of all these steps travel in one message.
        """
        if not but:
            self.sparse.flush()
        steps = [self._unfinished.popleft() for _ in range(len(self._unfinished) - but)]
        ended = [self._figures_of(step) for step in steps]
        rows = gather([number for _, own in ended for number in to_row(own)]) if ended else []
        for i, (step, (made, own)) in enumerate(zip(steps, ended, strict=True)):
            width = len(rows[0]) // len(ended)
            ranks = [from_row(row[i * width : (i + 1) * width]) for row in rows]
            losses = [math.nan if rank["loss"] is None else rank["loss"] for rank in ranks]
            self._check_health(made, ranks, losses, step.rates.lr, own["norm"])
            self._write(made, ranks, finite(math.fsum(losses) / len(losses)), step.rates, own["norm"])

    def _figures_of(self, step: _Unfinished) -> tuple[StepRecord, dict[str, Any]]:
        """Return the record of a step's exchange, and all figures of the step on this rank."""
        made = self._records.get(timeout=self.config.timeout_s)
        seconds = step.laps.seconds()  # which waits until the figures are there
        loss, norm, residual_norm = step.figures.tolist()
        if made.skipped:
            norm = residual_norm = None
        if "wait" not in seconds:  # the exchange was within backward
            wait = min(made.wait_seconds or 0.0, seconds["compute"])
            seconds |= {"compute": seconds["compute"] - wait, "wait": wait}
        own = {"loss": loss, "norm": norm, "residual_norm": residual_norm, "split": seconds}
        return made, {**vars(made), **step.counts, **own}

    def _check_health(self, made: StepRecord, ranks: Ranks, losses: list[float], lr: float, norm: float | None) -> None:
        """Raise or warn if a loss or gradient is not finite or explodes; all ranks see the same numbers."""
        if made.skipped or not all(map(math.isfinite, [*losses, norm or 0.0])):
            reason = made.reason or "loss or gradient norm is not finite"
            event, message = "non-finite", nonfinite_message(made.step, losses, lr, self.progress.grad_norm, reason)
        else:
            per_character = [self.workload.loss_per_character(rank) for rank in ranks]
            exploded = self.health.check(per_character, made.step, lr, norm, self.net)
            if exploded is None:
                return
            event, message = "exploded", exploded
        self.run_logger.event(event, made.step, message)
        if self.config.on_nonfinite == "raise":  # on all ranks; rank 0 has the message
            raise DivergedError(message if self.place.rank == 0 else f"stopped at step {made.step}: rank 0 says why")
        self.console.warn(message)

    def _write(self, made: StepRecord, ranks: Ranks, loss: float | None, rates: Rates, norm: float | None) -> None:
        progress, mine = self.progress, ranks[self.place.rank]
        if loss is not None:
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + 1
        progress.grad_norm = progress.grad_norm if norm is None else norm
        record = TrainStep(
            **{**vars(made), "buckets": ()},
            epoch=progress.epoch,
            loss=loss,
            lr=rates.lr,
            momentum=rates.momentum,
            grad_norm=finite(norm),
            residual_norm=mine["residual_norm"],
            utterances=int(sum(rank["utterances"] for rank in ranks)),
            characters=int(sum(rank["characters"] for rank in ranks)),
            split={name: mine[name] for name in SPLIT},
            ranks=ranks,
        )
        self.run_logger.write(record)
        self.console.step(record)
        if made.phase == "sparse" and made.step == self._first_sparse_step:
            message = (
                f"step {made.step}: the first sparse step: sparsity {made.sparsity:.3f}, "
                f"compression ratio {format_value(made.compression_ratio)}, "
                f"{format_bytes(made.sent_bytes)} sent where a dense step sends {format_bytes(self.plan.dense_bytes)}"
            )
            self.run_logger.event("first-sparse", made.step, message)
            self.console.say(message)

    @property
    def _first_sparse_step(self) -> int:
        return self.config.dense_steps

    def _end_epoch(self, seconds: float) -> None:
        self._finish_steps()
        progress = self.progress
        last = progress.epoch + 1 == self.config.max_epochs or self._is_over()
        due = last or (progress.epoch + 1) % self.config.validate_every == 0
        figures = self._validate() if due else {}
        record = EpochRecord(
            epoch=progress.epoch,
            step=progress.step,
            train_loss=progress.loss_sum / progress.loss_count if progress.loss_count else None,
            lr=self._rates(self._phase_of(progress.step - 1), before=1).lr,
            epoch_seconds=seconds,
            validated=due,
            **figures,  # type: ignore[arg-type]
        )
        self.run_logger.write(record)
        self.console.end_epoch(record)
        error = figures.get(self.workload.error)
        best = error is not None and (progress.best_error is None or error < progress.best_error)
        if self._is_epoch_whole:  # else max_steps ended it, and a resumed run may go on with it
            progress.best_error = error if best else progress.best_error
            progress.epoch, progress.step_of_epoch = progress.epoch + 1, 0
            progress.loss_sum, progress.loss_count = 0.0, 0
        self._checkpoint(best)

    def _checkpoint(self, best: bool) -> None:
        self._finish_steps()
        own = {**self._own_state(), "generators": checkpoint.rng_state(self.device)}
        with self._as_one():
            digest = check_same_weights(self.net, self.progress.step)
            shared = {
                "net": self.net.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "progress": asdict(self.progress),
                "steps_per_epoch": self.plan.steps_per_epoch,
                "health": asdict(self.health),
                "digest": digest,
            }
            folder = checkpoint.save(self.run_logger.run, self.progress.step, shared, own, best)
        self.run_logger.log(f"step {self.progress.step}: checkpoint {folder.name}, weights {digest}")

    def _own_state(self) -> dict[str, Any]:
        """Return the state of this worker that no other has."""
        return {"oktopk": self.sparse.state_dict()}

    def _as_one(self) -> AbstractContextManager[None]:
        """Let the net have the same weights on all workers inside the block; here it has them always."""
        return nullcontext()

    @torch.no_grad()
    def _validate(self) -> dict[str, float | None]:
        """Return the figures of the validation set, of which each worker evaluates its share."""
        self.net.eval()
        with self._as_one(), self._autocast:
            for buffer in self.net.buffers():
                dist.broadcast(buffer, 0)  # the running statistics, as DDP does before each forward pass of training
            found = [self.workload.evaluate(self.net, batch.to(self.device)) for batch in self.val_batches.epoch(0)]
        self.net.train()
        sums = torch.tensor([sum(each) for each in zip(*found, strict=True)], dtype=torch.float64)
        dist.all_reduce(sums)
        return self.workload.figures(sums.tolist())


class Laps:
    """A stopwatch with named laps, in the time of the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.end("start")

    def end(self, name: str) -> None:
        """End a lap, which begins where the last one ended."""
        mark: Any = time.perf_counter()
        if self._on_gpu:
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        self._marks.append((name, mark))

    def seconds(self) -> dict[str, float]:
        """Return the laps, those of one name added up, once the device has reached the end of the last."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()
        return add_by_name(
            {name: start.elapsed_time(end) / 1e3 if self._on_gpu else end - start}
            for (_, start), (name, end) in pairwise(self._marks)
        )
