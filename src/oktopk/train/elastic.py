"""One member of a run whose members come and go: data by what is committed, records, checkpoints. Without DDP.

All samples of an epoch have one order, whatever the members are. A step takes the next ones, a share for each member
of its quorum. Only a committed step moves the cursor on, so that no sample comes twice or is left out in an epoch.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from oktopk.errors import MismatchError, PeerError, StateError
from oktopk.partition import even_cuts
from oktopk.reducer import compile_kernels
from oktopk.telemetry.figures import finite
from oktopk.telemetry.schema import EpochRecord, TrainStep
from oktopk.train import checkpoint
from oktopk.train.config import Config
from oktopk.train.folder import FolderRecords
from oktopk.train.models import make_model
from oktopk.train.optimizers import make_optimizers, set_rates
from oktopk.train.rundir import RunDir
from oktopk.train.workloads import workload_of

if TYPE_CHECKING:
    from oktopk.integrations.torchft import Member

NEVER = 10**9
COLLECTIVE_S = 30.0
"""Seconds of a collective at most, because a frozen member costs the others this time; `timeout_s` may be less."""
SHARED_SETTINGS = ("dnn", "dataset", "batch_size", "nsteps_update", "seed", "lr", "momentum", "clip", "optimizer",
                   "max_epochs", "max_steps", "checkpoint_every")  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """The least and the largest number of members, as `--elastic MIN:MAX` has them."""

    least: int
    most: int


@dataclass
class Progress:
    """Position of the run, as a checkpoint and a member that heals get it."""

    epoch: int = 0
    cursor: int = 0  # samples of the epoch in committed steps
    loss_sum: float = 0.0  # over these


def share_of(left: int, most: int, size: int, rank: int) -> tuple[int, range]:
    """Return how many of the `left` samples a step takes, and which of them are this member's.

    >>> share_of(left=10, most=2, size=3, rank=1), share_of(left=4, most=2, size=3, rank=2)
    ((6, range(2, 4)), (4, range(2, 4)))
    """
    count = min(left, most * size)
    cuts = even_cuts(count, size).tolist()
    return count, range(cuts[rank], cuts[rank + 1])


def be_member(run: RunDir, lighthouse: str, bounds: Bounds) -> None:
    """Train as a member of the run until its end."""
    from oktopk.integrations.torchft.start import Patience, address_towards, make_manager

    config = run.load_config()
    for name in ("torchft", "torchft.manager", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a member that dies would fill the terminal
    warnings.simplefilter("ignore")
    trainer = ElasticTrainer(config, run, bounds)  # first, because the others may wait for a member that has a manager
    patience = Patience(collective_s=min(config.timeout_s, COLLECTIVE_S), quorum_s=config.timeout_s)
    manager, close = make_manager(
        lighthouse, address_towards(lighthouse), name=f"worker-{os.getpid()}", min_members=bounds.least,
        patience=patience,
    )  # fmt: skip
    try:
        trainer.join(manager)
        trainer.run()
    finally:
        close()


class ElasticTrainer:
    """A member of the run."""

    member: Member

    def __init__(self, config: Config, run: RunDir, bounds: Bounds) -> None:
        self.config, self.run_dir, self.bounds, self.progress = config, run, bounds, Progress()
        self.workload = workload_of(config)(config)
        self.batches, self.validation = self.workload.batches(1)
        torch.manual_seed(config.seed)
        self.net = make_model(config.dnn)
        self.optimizers = make_optimizers(self.net, config)
        self._records, self._speaks = FolderRecords(run), False  # whether this member writes its folder's
        self._is_new, self._size = True, 0
        compile_kernels(config.algorithm(), torch.float32)

    def join(self, manager: Any) -> None:
        """Become a member, at the newest checkpoint of this run's folder if there is one."""
        from oktopk.integrations.torchft import attach

        config, last = self.config, checkpoint.find_last(self.run_dir)
        saved = None if last is None else checkpoint.load_shared(last)
        self.member = attach(
            self.net,
            self.optimizers,
            config.algorithm(),
            manager=manager,
            dense_steps=NEVER if config.is_dense else config.dense_steps,
            on_nonfinite=config.on_nonfinite,
            sparse_momentum=config.sparse_momentum,
            checkpoint_step=0 if saved is None else elastic_part(saved, last)["manager"]["step"],
            timeout=config.timeout_s,
        )
        manager.register_state_dict_fn("trainer", self._load, self._save)
        if saved is not None:
            self.member.load_state_dict(elastic_part(saved, last))
            self._load(saved["trainer"])

    def run(self) -> None:
        """Train to the end."""
        self.net.train()
        while not self._is_over:
            epoch, start = self.progress.epoch, time.perf_counter()
            order = self.batches.order(epoch)
            while self.progress.epoch == epoch and not self._is_over:
                if not self._step(order):
                    continue
                if self.progress.cursor >= self.workload.num_train or self._is_over:
                    self._end_epoch(time.perf_counter() - start)
        self.member.detach()

    @property
    def _is_over(self) -> bool:
        limit = self.config.max_steps or NEVER
        return self.progress.epoch >= self.config.max_epochs or self.member.step_number >= limit

    def _step(self, order: Sequence[int]) -> bool:
        """Make one step with the members that are there; return whether it is committed, in this epoch."""
        epoch, start = self.progress.epoch, time.perf_counter()
        self.member.zero_grad()
        self._refuse_too_many()
        if self.progress.epoch != epoch:  # it healed, and the others are further
            return False
        progress, config, left = self.progress, self.config, self.workload.num_train - self.progress.cursor
        each = config.batch_size * config.nsteps_update
        count, mine = share_of(left, each, self.member.size, self.member.rank)
        met = time.perf_counter()
        loss_sum = self._forward_backward([order[progress.cursor + i] for i in mine], count)
        compute = time.perf_counter() - met
        rates = config.rates_at(progress.epoch, "dense", progress.cursor / self.workload.num_train)
        set_rates(self.optimizers, rates.lr, rates.momentum)
        step, norm = self.member.step_number, list[Tensor]()
        limit = config.clip if config.clip else math.inf
        committed = self.member.step(
            flush=self._is_checkpoint_after(step, count == left),
            figures=(loss_sum, self._records.number),
            before_update=lambda: norm.append(clip_grad_norm_(self.net.parameters(), limit)),
        )
        if not committed:
            return False
        self._is_new = False
        folders = [number for _, number in self.member.told]
        self._speaks = folders.index(self._records.number) == self.member.rank
        loss = math.fsum(told[0] for told in self.member.told) / count
        progress.cursor, progress.loss_sum = progress.cursor + count, progress.loss_sum + loss * count
        self._record(loss, count, rates.lr, rates.momentum, float(norm[0]), compute, time.perf_counter() - start)
        every = config.checkpoint_every
        if every and (step + 1) % every == 0 and count != left:
            self._checkpoint()
        return True

    def _is_checkpoint_after(self, step: int, is_last: bool) -> bool:
        """Return whether a checkpoint comes after this step, which then leaves no residual."""
        every, limit = self.config.checkpoint_every, self.config.max_steps
        return is_last or (every > 0 and (step + 1) % every == 0) or (limit > 0 and step + 1 >= limit)

    def _forward_backward(self, samples: Sequence[int], count: int) -> float:
        """Make the gradient of this member's samples; the mean over members is that of all `count`."""
        total, size = 0.0, self.config.batch_size
        for at in range(0, len(samples), size):
            batch = self.batches.batch(self.progress.epoch, list(samples[at : at + size]))
            loss = self.workload.loss(self.net, batch)
            weight = batch.utterances * self.member.size / count
            (loss * weight).backward()
            total += float(loss) * batch.utterances
        return total

    def _refuse_too_many(self) -> None:
        size, rank, most = self.member.size, self.member.rank, self.bounds.most
        if size > most and self._is_new and (rank >= most or self.member.step_number > 0):
            raise PeerError(f"the run has {size - 1} members already, and --elastic allows {most}")

    def _end_epoch(self, seconds: float) -> None:
        progress, config = self.progress, self.config
        is_whole = progress.cursor >= self.workload.num_train
        due = (
            self._is_over
            or progress.epoch + 1 == config.max_epochs
            or (progress.epoch + 1) % config.validate_every == 0
        )
        figures = self._validate() if due else {}
        record = EpochRecord(
            epoch=progress.epoch, step=self.member.step_number, validated=due, epoch_seconds=seconds,
            train_loss=finite(progress.loss_sum / max(progress.cursor, 1)),
            lr=config.rates_at(progress.epoch, "dense").lr, **figures,  # type: ignore[arg-type]
        )  # fmt: skip
        self._records.add(record, writes=self._speaks)
        if is_whole:
            progress.epoch, progress.cursor, progress.loss_sum = progress.epoch + 1, 0, 0.0
        self._checkpoint()
        if self._speaks:
            names = ("train_loss", "val_loss", self.workload.error)
            said = ", ".join(
                f"{name} {getattr(record, name):.4g}" for name in names if getattr(record, name) is not None
            )
            print(f"epoch {record.epoch + 1}/{config.max_epochs}  step {record.step}  {said}", flush=True)

    @torch.no_grad()
    def _validate(self) -> dict[str, float | None]:
        """Return the figures of the whole validation set: each member makes them, so that none waits for another."""
        self.net.eval()
        found = [self.workload.evaluate(self.net, batch) for batch in self.validation.epoch(0)]
        self.net.train()
        return self.workload.figures([math.fsum(each) for each in zip(*found, strict=True)])

    def _checkpoint(self) -> None:
        if self._speaks:
            shared = {"elastic": self.member.state_dict(), "trainer": self._save()}
            checkpoint.save_shared(self.run_dir, self.member.step_number, shared, self.member.size)

    def _record(
        self, loss: float, count: int, lr: float, momentum: float, norm: float, compute: float, seconds: float
    ) -> None:
        made = self.member.last
        assert made is not None
        split = {"data": 0.0, "compute": compute, "wait": seconds - compute, "update": 0.0}
        self._records.add(
            TrainStep(
                **{**vars(made), "buckets": ()}, epoch=self.progress.epoch, loss=finite(loss), lr=lr, momentum=momentum,
                grad_norm=finite(norm), residual_norm=None, utterances=count, characters=0, split=split, ranks=[],
            ),
            writes=self._speaks,
        )  # fmt: skip
        if self.member.size != self._size:
            self._size = self.member.size
            event = {"kind": "event", "event": "members", "step": made.step, "message": f"{self._size} members"}
            self._records.add(event, writes=self._speaks)

    def _save(self) -> dict[str, Any]:
        settings = {name: getattr(self.config, name) for name in SHARED_SETTINGS}
        return {"progress": asdict(self.progress), "settings": settings, "data": list(self.workload.sizes)}

    def _load(self, saved: dict[str, Any]) -> None:
        ours = self._save()
        for name, there in {**saved["settings"], "data": saved["data"]}.items():
            here = ours["data"] if name == "data" else ours["settings"].get(name)
            if here != there:
                what = "the samples or bytes of the data" if name == "data" else f"the setting {name}"
                raise MismatchError(f"this member and the others disagree on {what}: here {here}, there {there}")
        self.progress = Progress(**saved["progress"])


def elastic_part(saved: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the part of a checkpoint that members share; refuse one of a run without --elastic."""
    if "elastic" not in saved:
        raise StateError(f"{folder} is a checkpoint of a run without --elastic: go on with it without --elastic")
    part: dict[str, Any] = saved["elastic"]
    return part
