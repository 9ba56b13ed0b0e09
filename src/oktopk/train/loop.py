"""`Trainer`: the training loop of one worker, with a record of every step and checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import oktopk
from oktopk.steps import READBACK_DELAY
from oktopk.telemetry import StepRecord
from oktopk.telemetry.figures import finite
from oktopk.telemetry.format import format_bytes, format_value
from oktopk.telemetry.schema import SPLIT, EpochRecord, TrainStep, from_row, to_row
from oktopk.train import checkpoint
from oktopk.train.collectives import all_or_none, check_same_weights, gather, share_buffers, total
from oktopk.train.config import Config, Rates
from oktopk.train.console import Console
from oktopk.train.corpus import Corpus
from oktopk.train.data.loader import Batch, Batches
from oktopk.train.dist import Place
from oktopk.train.divergence import DivergedError, Health, largest_gradient, nonfinite_message
from oktopk.train.metrics import Counts, Transcripts, greedy, references
from oktopk.train.models import make_model
from oktopk.train.models.ctc import ctc_loss
from oktopk.train.plan import Plan, travel_dense
from oktopk.train.rng import rng_state, set_rng_state
from oktopk.train.run_logger import RunLogger

NEVER = 10**9
"""Dense steps of a run whose compressor is dense."""

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
    best_wer: float | None = None
    grad_norm: float | None = None

    @property
    def train_loss(self) -> float | None:
        """The mean loss of the epoch's steps so far."""
        return self.loss_sum / self.loss_count if self.loss_count else None

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.step_of_epoch, self.loss_sum, self.loss_count = self.epoch + 1, 0, 0.0, 0


class Trainer:
    """One worker of a run. All workers construct one and call the same methods in the same order."""

    def __init__(
        self, config: Config, place: Place, corpus: Corpus, plan: Plan, run_logger: RunLogger, console: Console
    ) -> None:
        self.config, self.place, self.plan, self.run_logger, self.console = config, place, plan, run_logger, console
        self.device = torch.device(plan.device)
        batches = partial(
            Batches, batch_size=config.batch_size, rank=place.rank, world_size=place.size, seed=config.seed
        )
        self.train_batches = batches(corpus.train, augmentation=config.augmentation())
        self.val_batches = batches(corpus.val, evaluation=True)
        torch.manual_seed(config.seed)
        self.net = make_model(config.dnn).to(self.device)
        self.model = DistributedDataParallel(self.net)  # gives all ranks the weights of rank 0
        rates = config.rates_at(0, "dense")
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=rates.lr, momentum=rates.momentum, nesterov=rates.momentum > 0
        )
        self._records: SimpleQueue[StepRecord] = SimpleQueue()
        self._unfinished: deque[_Step] = deque()
        self.sparse = oktopk.attach(
            self.model,
            config.algorithm(),
            dense_steps=NEVER if config.is_dense else config.dense_steps,
            exclude=travel_dense(self.net, config.density),
            clip=config.clip if config.clip and config.clip_place == "local" else None,
            on_nonfinite="skip",  # `_check_health` raises, with step and learning rate
            sinks=[self._records.put],
            timeout=config.timeout_s,
        )
        self.progress = Progress()
        self.health = Health()

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint, as if the run had never stopped."""
        rank, size = self.place.rank, self.place.size
        shared, own = all_or_none("reading the checkpoint", lambda: checkpoint.load(folder, rank, size))
        self.net.load_state_dict(shared["net"])
        self.optimizer.load_state_dict(shared["optimizer"])
        self.progress = Progress(**shared["progress"])
        self.health = Health(**shared["health"])
        # At another number of workers an epoch has another number of steps; the same part of it is over.
        done, before = self.progress.step_of_epoch, shared["steps_per_epoch"]
        self.progress.step_of_epoch = done * self.plan.steps_per_epoch // before
        if "pending" in own:  # another number of workers
            self.sparse.load_residual(**own["pending"])
        elif own["oktopk"]["algorithm"] != type(self.sparse.algorithm).__name__:  # another compressor
            self.sparse.load_residual(own["oktopk"]["residual"], own["oktopk"]["step"])
        else:
            self.sparse.load_state_dict(own["oktopk"])
        self.run_logger.go_on_from(self.progress.step, self.progress.epoch + self._is_over())
        self.run_logger.event("resume", self.progress.step, f"resumed from {folder.name}")
        if "generators" in own:  # only with the same number of workers
            set_rng_state(own["generators"], self.device)

    def run(self) -> dict[str, Any]:
        """Train to the end; return the summary of the run."""
        try:
            with self.console:
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

    def _run_epoch(self) -> None:
        progress = self.progress
        start, left = time.perf_counter(), self.plan.steps_per_epoch - progress.step_of_epoch
        limit = self.config.max_steps
        self.console.begin_epoch(progress.epoch, min(left, limit - progress.step) if limit else left)
        self.net.train()
        passes = self.config.nsteps_update
        batches = self.train_batches.epoch(progress.epoch, progress.step_of_epoch * passes)
        while not (self._is_epoch_whole or self._is_over()):
            self._step(batches)
            self._checkpoint_if_due()
        self._end_epoch(time.perf_counter() - start)

    def _step(self, batches: Iterator[Batch]) -> None:
        """Make one step: forward and backward, the exchange within backward, the update.

        On a GPU the host only enqueues it. The record comes through a sink some steps later, see `_finish_steps`.
        """
        laps, buffers = _Laps(self.device), [buffer.clone() for buffer in self.net.buffers()]
        work = [batch.to(self.device) for batch in islice(batches, self.config.nsteps_update)]
        laps.end("data")
        loss = self._forward_backward(work)
        laps.end("compute")
        for buffer, before in zip(self.net.buffers(), buffers, strict=True):
            # A NaN in a running mean would never leave it. On a GPU the device alone knows whether there is one.
            buffer.copy_(torch.where(torch.isfinite(loss), buffer, before))
        rates = self.config.rates_at(self.progress.epoch, self._phase)
        norm = self._update(rates)
        figures = torch.stack([loss, norm, self._residual_norm()]).to("cpu", non_blocking=True)
        laps.end("update")
        step = _Step(
            rates=rates,
            laps=laps,
            figures=figures,
            utterances=sum(len(batch.frames) for batch in work),
            characters=sum(int(batch.target_lengths.sum()) for batch in work),
        )
        self._unfinished.append(step)
        self.progress.step, self.progress.step_of_epoch = self.progress.step + 1, self.progress.step_of_epoch + 1
        self._finish_steps(but=READBACK_DELAY if self.device.type == "cuda" else 0)

    @property
    def _phase(self) -> str:
        """The phase of the next step."""
        return "dense" if self.config.is_dense or self.progress.step < self.config.dense_steps else "sparse"

    def _residual_norm(self) -> Tensor:
        """Return the norm of this rank's residual, NaN in steps in which it is not measured."""
        due = self._phase == "sparse" and self.progress.step % RESIDUAL_EVERY == 0
        return self.sparse.residual_norm_tensor() if due else torch.tensor(math.nan, device=self.device)

    def _forward_backward(self, work: list[Batch]) -> Tensor:
        """Return this rank's mean loss over the passes; the last backward exchanges the sum of their gradients."""
        self.optimizer.zero_grad()
        losses = []
        for i, batch in enumerate(work):
            last = i == len(work) - 1
            with nullcontext() if last else self.model.no_sync():
                log_probs, frames = self.model(batch.inputs, batch.frames)
                loss = ctc_loss(log_probs, frames, batch.targets, batch.target_lengths) / len(work)
                loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().double())
        return torch.stack(losses).sum()

    def _update(self, rates: Rates) -> Tensor:
        """Clip the mean over workers if the setting says so, and step; return the gradient's norm before.

        A skipped step delivers zeros: the optimizer goes on with its momentum alone.
        """
        clipped = self.config.clip_place == "global" or self._phase == "dense"  # `attach` clips sparse steps only
        clip = self.config.clip if self.config.clip and clipped else math.inf
        norm = clip_grad_norm_(self.net.parameters(), clip)
        set_rates(self.optimizer, rates)
        self.optimizer.step()
        return norm

    def _finish_steps(self, but: int = 0) -> None:
        """Check and write the steps so far, except for the last `but`, which the GPU may not have finished."""
        if not but:
            self.sparse.flush()
        while len(self._unfinished) > but:
            step = self._unfinished.popleft()
            made = self._records.get(timeout=self.config.timeout_s)
            loss, norm, residual_norm = step.figures_on_host()
            seconds = step.laps.seconds()
            wait = min(made.wait_seconds or 0.0, seconds["compute"])
            own = {
                "loss": loss,
                "utterances": step.utterances,
                "characters": step.characters,
                "residual_norm": None if made.skipped else residual_norm,
                "split": {**seconds, "compute": seconds["compute"] - wait, "wait": wait},
            }
            ranks = [from_row(each) for each in gather(to_row({**vars(made), **own}))]
            self._check_health(made, ranks, step.rates.lr, None if made.skipped else norm)
            self._write(made, ranks, step.rates, None if made.skipped else norm)

    def _check_health(self, made: StepRecord, ranks: list[dict[str, Any]], lr: float, norm: float | None) -> None:
        """Raise or warn if a loss or gradient is not finite or explodes; all ranks see the same numbers."""
        step, before = made.step, self.progress.grad_norm
        losses = [_loss_of(rank) for rank in ranks]
        if made.skipped or not all(map(math.isfinite, [*losses, norm or 0.0])):
            message = nonfinite_message(step, losses, lr, before, made.reason or "loss or gradient norm is not finite")
            self._warn_or_raise("non-finite", step, message)
            return
        per_character = [rank["loss"] * rank["utterances"] / max(1.0, rank["characters"]) for rank in ranks]
        exploded = self.health.check(per_character, step, lr, norm, lambda: largest_gradient(self.net))
        if exploded is not None:
            self._warn_or_raise("exploded", step, exploded)

    def _warn_or_raise(self, event: str, step: int, message: str) -> None:
        self.run_logger.event(event, step, message)
        if self.config.on_nonfinite == "raise":  # on all ranks; rank 0 has the message
            raise DivergedError(message if self.place.rank == 0 else f"stopped at step {step}: rank 0 says why")
        self.console.warn(message)

    def _write(self, made: StepRecord, ranks: list[dict[str, Any]], rates: Rates, norm: float | None) -> None:
        progress, losses = self.progress, [_loss_of(rank) for rank in ranks]
        loss = finite(math.fsum(losses) / len(losses))
        if loss is not None:
            progress.loss_sum, progress.loss_count = progress.loss_sum + loss, progress.loss_count + 1
        mine = ranks[self.place.rank]
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
        if made.phase == "sparse" and made.step == self.config.dense_steps:
            self._announce_sparse(made)
        if norm is not None:
            progress.grad_norm = norm

    def _announce_sparse(self, made: StepRecord) -> None:
        message = (
            f"step {made.step}: the first sparse step: sparsity {made.sparsity:.3f}, "
            f"compression ratio {format_value(made.compression_ratio)}, "
            f"{format_bytes(made.sent_bytes)} sent where a dense step sends {format_bytes(self.plan.dense_bytes)}"
        )
        self.run_logger.event("first-sparse", made.step, message)
        self.console.say(message)

    def _end_epoch(self, seconds: float) -> None:
        self._finish_steps()
        progress = self.progress
        last = progress.epoch + 1 == self.config.max_epochs or self._is_over()
        due = last or (progress.epoch + 1) % self.config.validate_every == 0
        figures: dict[str, Any] = self._validate() if due else {"val_loss": None, "wer": None, "cer": None}
        record = EpochRecord(
            epoch=progress.epoch,
            step=progress.step,
            train_loss=progress.train_loss,
            lr=self.optimizer.param_groups[0]["lr"],  # of its last step
            epoch_seconds=seconds,
            validated=due,
            **figures,
        )
        self.run_logger.write(record)
        self.console.end_epoch(record)
        wer = figures["wer"]
        best = wer is not None and (progress.best_wer is None or wer < progress.best_wer)
        if self._is_epoch_whole:  # else max_steps ended it, and a resumed run may go on with it
            progress.best_wer = wer if best else progress.best_wer
            progress.end_epoch()
        self._checkpoint(best)

    def _checkpoint_if_due(self) -> None:
        every, progress = self.config.checkpoint_every, self.progress
        at_end = self._is_epoch_whole or self._is_over()  # which has one of its own
        if every and progress.step % every == 0 and not at_end:
            self._checkpoint(best=False)

    def _checkpoint(self, best: bool) -> None:
        self._finish_steps()
        digest = check_same_weights(self.net, self.progress.step)
        shared = {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "steps_per_epoch": self.plan.steps_per_epoch,
            "health": asdict(self.health),
            "digest": digest,
        }
        own = {"oktopk": self.sparse.state_dict(), "generators": rng_state(self.device)}
        folder = checkpoint.save(self.run_logger.run, self.progress.step, shared, own, best)
        self.run_logger.log(f"step {self.progress.step}: checkpoint {folder.name}, weights {digest}")

    @torch.no_grad()
    def _validate(self) -> dict[str, float | None]:
        """Return loss, WER and CER over the validation set, of which each worker evaluates its share."""
        share_buffers(self.net)
        self.net.eval()
        transcripts, loss_sum, count = Transcripts(), 0.0, 0
        for batch in self.val_batches.epoch(0):
            on_device = batch.to(self.device)
            log_probs, frames = self.net(on_device.inputs, batch.frames)
            loss = ctc_loss(log_probs, frames, on_device.targets, batch.target_lengths)
            loss_sum, count = loss_sum + float(loss) * len(batch.frames), count + len(batch.frames)
            transcripts.add(references(batch.targets, batch.target_lengths), greedy(log_probs, frames))
        self.net.train()
        losses = total(torch.tensor([loss_sum, count], dtype=torch.float64))
        counts = Counts.from_tensor(total(transcripts.counts().to_tensor()))
        val_loss = finite(float(losses[0] / losses[1])) if losses[1] else None
        return {"val_loss": val_loss, "wer": counts.wer, "cer": counts.cer}


def set_rates(optimizer: torch.optim.SGD, rates: Rates) -> None:
    """Set the rates of the next step; where the momentum changes, scale the momentum buffers.

    Under a steady gradient g a buffer is g / (1 - momentum). Left at 10 g with a momentum of 0.5 at 5 times the
    learning rate, the first updates would be too large by up to a factor of 2. The momentum before is part of the
    optimizer's state, so that a resumed run scales exactly once.
    """
    for group in optimizer.param_groups:
        if group["momentum"] != rates.momentum:
            # SGD does not update its buffers while the momentum is 0: they hold an old gradient.
            scale = (1 - group["momentum"]) / (1 - rates.momentum) if group["momentum"] else 0.0
            for parameter in group["params"]:
                buffer = optimizer.state.get(parameter, {}).get("momentum_buffer")
                if buffer is not None:  # there is none before the first step
                    buffer.mul_(scale)
        group.update(lr=rates.lr, momentum=rates.momentum)


def _loss_of(rank: dict[str, Any]) -> float:
    """Return the loss of a rank, NaN where it is not finite."""
    return math.nan if rank["loss"] is None else rank["loss"]


@dataclass(kw_only=True)
class _Step:
    """A step that was made; `figures` are loss, gradient norm and residual norm, on their way to the host."""

    rates: Rates
    laps: _Laps
    figures: Tensor
    utterances: int
    characters: int

    def figures_on_host(self) -> list[float]:
        """Return loss, gradient norm and residual norm, once the device has made them."""
        self.laps.wait()
        return self.figures.tolist()


class _Laps:
    """A stopwatch with named laps, in the time of the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.end("start")

    def end(self, name: str) -> None:
        """End a lap, which begins where the last one ended."""
        if self._on_gpu:
            mark: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        else:
            mark = time.perf_counter()
        self._marks.append((name, mark))

    def wait(self) -> None:
        """Wait until the device has reached the end of the last lap."""
        if self._on_gpu:
            self._marks[-1][1].synchronize()

    def seconds(self) -> dict[str, float]:
        """Return the laps."""
        return {
            name: start.elapsed_time(end) / 1e3 if self._on_gpu else end - start
            for (_, start), (name, end) in pairwise(self._marks)
        }
