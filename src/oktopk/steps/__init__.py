"""The steps of a reduction, made on the host or on the device: the seam between algorithms and their drivers.

    begin(context)                start a step; it chooses where the step is made
    start(group, grads, outs)     reduce one group's gradients, as soon as they are there
    finish(error)                 write the means and commit all groups, or none

`Reducer` drives these with one tensor, `oktopk.ddp` with the buckets of a model.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from oktopk.algorithms import Algorithm
from oktopk.comm import Comm, MeteredComm
from oktopk.cuda import step as cuda_step
from oktopk.errors import NonFiniteError
from oktopk.steps.device import READBACK_DELAY, DeviceSteps
from oktopk.steps.group import ParamGroup, ParamSlot, StepContext, make_groups, slot_of
from oktopk.steps.host import HostSteps, agree_with_shards
from oktopk.steps.made import MadeStep, StepLog

__all__ = ["READBACK_DELAY", "MadeStep", "ParamGroup", "ParamSlot", "StepContext", "StepLog", "Steps"]
__all__ += ["agree_with_shards", "make_groups", "slot_of"]


class Steps:
    """Makes each step on the device where it can stay there, on the host otherwise.

    `shards`: the ranks that exchange the other shards of the same model, which commit a step with these or not at all.
    """

    def __init__(self, groups: Sequence[ParamGroup], comm: MeteredComm, shards: Comm | None = None) -> None:
        self._groups, self._shards = groups, shards
        agree = None if shards is None else partial(agree_with_shards, shards=shards)
        self._host, self._device = HostSteps(comm, agree), DeviceSteps(comm)
        self._current: HostSteps | DeviceSteps = self._host
        self.context = StepContext(0, None)

    @property
    def delay(self) -> int:
        """Steps after which the host reads the stats of the current step."""
        return self._current.delay

    def on_device(self, algorithm: Algorithm | None, may_be_unused: bool = False) -> bool:
        """Whether a step of this algorithm stays on the device."""
        if may_be_unused or not self._groups or self._shards is not None:  # the device knows nothing of other shards
            return False
        supports = cuda_step.supports_device_step
        return all(supports(algorithm, group.numel, group.dtype, group.device) for group in self._groups)

    def begin(self, context: StepContext) -> None:
        """Begin a step, and forget one that was not finished."""
        self._current.abandon()
        if context.algorithm is not self.context.algorithm:
            on_device = self.on_device(context.algorithm, context.may_be_unused)
            self._current = self._device if on_device else self._host
            if not on_device:
                self._device.to_host()
        self.context = context

    def start(self, group: ParamGroup, grads: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        """Start to write the mean over ranks of what this step delivers into `outs`, which may be `grads`."""
        self._current.start(group, grads, outs, self.context)

    def finish(self, error: NonFiniteError | None = None) -> MadeStep:
        """End what was started; commit all groups unless there is an error, an earlier step's or this one's."""
        return self._current.finish(self.context, error)

    def save_(self) -> None:
        """Copy the algorithm's states to the host, into the groups."""
        self._device.save_()

    def to_host(self) -> None:
        """Bring the algorithm's states to the host, and keep none elsewhere."""
        self._device.to_host()
