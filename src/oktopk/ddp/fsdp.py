"""`FSDPWrapper`: the units of an FSDP2 model, each rank's shard of which is exchanged with its replicas.

FSDP2 on the shard dimension sums a unit's gradients inside a node and hands each rank its shard, one flat tensor, to
the unit's all-reduce hook. It then makes the shards' gradients views of that tensor and reads nothing before backward()
is over. So the hook gives the tensor to the worker thread and returns, and a callback at the end of backward() waits.

On a 2-D mesh, and by replicate(), FSDP would sum over the replicas before the hook. It does so where a unit's mesh has
them (`mesh_info`), so that a unit which is attached gets a view of its mesh that has not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from oktopk.comm import Comm, ProcessGroupComm
from oktopk.cuda.events import wait_event
from oktopk.ddp.engine import Bucket
from oktopk.ddp.hook import HOOK, SHARD_IT, hook_of
from oktopk.ddp.loss_scale import forget_scalers, scaler_of_this_backward
from oktopk.errors import SettingError
from oktopk.steps import ParamGroup, slot_of

REDUCE_DTYPES = (torch.float32, torch.bfloat16)
NATIVE = "_oktopk_native"
"""Name of the attribute that keeps FSDP's own view of a mesh on the one that takes its place."""
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of names that activation checkpointing and torch.compile add, which state must not depend on."""


class Unit:
    """One FSDP unit: where the shards of its parameters lie in the tensor that its hook gets.

    FSDP pads each shard with zeros to the same size on all ranks. The padding belongs to the parameter, so that the
    tensor is summed as it lies, in the order of native HSDP, and no shard is empty.
    """

    def __init__(self, name: str, param_group: Any, prefixes: dict[nn.Module, str]) -> None:
        self.name, self._param_group = name, weakref.ref(param_group)
        infos = [each._module_info for each in self.fsdp_params]
        self.names = [f"{prefixes[info.module]}{info.param_name}" for info in infos]
        self.sizes = [each.padded_sharded_param_size for each in self.fsdp_params]

    @property
    def param_group(self) -> Any:
        """FSDP's side of the unit."""
        return self._param_group()

    @property
    def fsdp_params(self) -> list[Any]:
        """The parameters that require gradients, in FSDP's order."""
        return [each for each in self.param_group.fsdp_params if each.sharded_param.requires_grad]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters, by name: DTensors of the whole shape."""
        return {name: each.sharded_param for name, each in zip(self.names, self.fsdp_params, strict=True)}

    @property
    def mesh_info(self) -> Any:
        """FSDP's own view of the unit's mesh, also where `leave_replicas_` has put another in its place."""
        info = self.param_group.mesh_info
        return getattr(info, NATIVE, info)

    @property
    def knows_replicas(self) -> bool:
        """Whether FSDP itself would sum over the replicas: a 2-D mesh, or replicate()."""
        return hasattr(self.mesh_info, "replicate_process_group")

    @property
    def shards(self) -> list[int]:
        """The ranks that have the other shards of this rank's replica, and itself."""
        group = getattr(self.mesh_info, "shard_process_group", None)
        return [dist.get_rank()] if group is None else sorted(dist.get_process_group_ranks(group))

    @property
    def sums(self) -> bool:
        """Whether the replicas are summed, as FSDP does where it has a divide factor, which its own sum takes."""
        return self.param_group.gradient_divide_factor is not None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the tensor that the hook gets."""
        policy = self.param_group.mp_policy
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or self.fsdp_params[0].sharded_param.dtype
        return dtype

    def grads_in(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the gradient of each shard, by parameter."""
        parts = torch.split(buffer, [size.numel() for size in self.sizes])
        return dict(zip(self.names, parts, strict=True))

    def make_group(self) -> ParamGroup:
        """Return the group of the unit's shards."""
        shards = zip(self.names, (torch.empty(size, device="meta") for size in self.sizes), strict=True)
        group = ParamGroup([slot_of(*shard) for shard in shards], self.reduce_dtype, self.param_group.device)
        group.sums = self.sums
        return group

    def leave_replicas_(self) -> None:
        """Make FSDP sum over the shards alone, and hand the result to the hook, where it would sum over all ranks."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo

        unit, native = self.param_group, self.mesh_info
        if not self.knows_replicas or unit.mesh_info is not native:
            return
        if hasattr(native, "shard_process_group"):
            alone: Any = FSDPMeshInfo(native.mesh, shard_mesh_dim=native.shard_mesh_dim)
            alone.reduce_scatter_process_group = native.reduce_scatter_process_group
        else:
            alone = DataParallelMeshInfo(native.mesh, replicate_mesh_dim=native.replicate_mesh_dim)
        setattr(alone, NATIVE, native)
        unit.mesh_info = alone
        if unit.post_forward_mesh_info is native:  # FSDP compares the two
            unit.post_forward_mesh_info = alone

    def check_sum(self) -> None:
        """Refuse a unit whose gradients FSDP would divide after the hook, or that it would not hand over."""
        unit = self.param_group
        if unit.force_sum_reduction_for_comms and unit.gradient_divide_factor != 1:
            raise SettingError(
                f"unit {self.name!r} sums only, so that FSDP divides after the exchange: leave out "
                "set_force_sum_reduction_for_comms, or call set_gradient_divide_factor(1.0), too, and scale the loss"
            )
        if not unit.all_reduce_grads:
            raise SettingError(
                f"unit {self.name!r} is not to be summed over the replicas, which oktopk does in every backward(): "
                "accumulate with set_requires_gradient_sync(False), not set_requires_all_reduce(False)"
            )

    def check(self, reduced: Tensor, sums: bool) -> None:
        """Refuse a tensor whose layout is not known, or that is read before backward() is over."""
        self.check_sum()
        if self.sums != sums:
            raise SettingError(f"unit {self.name!r} has got a gradient divide factor, or lost it: attach again")
        numel = sum(size.numel() for size in self.sizes)
        if reduced.numel() != numel:
            raise SettingError(
                f"unit {self.name!r} has a gradient for {reduced.numel()} of its {numel} elements on this rank: a "
                "parameter was not used. Call model.set_reduce_scatter_unused_params(True), or attach again if "
                "requires_grad_() was called since"
            )
        for name, parameter in self.parameters.items():
            if getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise SettingError(
                    f"{name!r} has a post-accumulate-grad hook, which would read its gradient before the exchange is "
                    "over: step the optimizer after backward()"
                )

    def is_read_later(self, reduced: Tensor) -> bool:
        """Whether FSDP makes the gradients views of this tensor, and neither casts nor adds nor copies it."""
        return all(
            each.sharded_param.grad is None
            and each.sharded_param.dtype == reduced.dtype
            and not (each.offload_to_cpu and reduced.is_cuda)
            for each in self.fsdp_params
        )


@dataclass
class _Backward:
    """A backward pass: its step's future, and the means that FSDP's gradients are to get when it is over."""

    graph: int
    done: Future[Exception | None]
    num_units: int = 0
    late: list[tuple[Tensor, Tensor, bool]] = field(default_factory=list)  # parameter, mean, whether it is added

    def take(self, unit: Unit, reduced: Tensor) -> Tensor:
        """Return the buffer whose gradients are exchanged: FSDP's own, or a copy where FSDP reads that at once."""
        self.num_units += 1
        if unit.is_read_later(reduced):
            return reduced
        buffer = reduced.clone()
        reduced.zero_()
        for name, grad in unit.grads_in(buffer).items():
            parameter = unit.parameters[name]
            self.late.append((parameter, grad, parameter.grad is not None))
        return buffer

    def deliver(self) -> None:
        """Write the means where FSDP has put zeros."""
        for parameter, mean, is_added in self.late:
            shard = parameter.grad.to_local()  # type: ignore[union-attr]
            mean = mean[: shard.numel()].view(shard.shape).to(shard.device)
            shard.add_(mean) if is_added else shard.copy_(mean)


class UnitHook:
    """The all-reduce hook of all units of a model: its target, if any, is the `Attached` that takes the gradients."""

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup) -> None:
        self.model, self._replicas = weakref.ref(model), replicas
        self.target: Any = None
        self._backward: _Backward | None = None

    def __call__(self, unit: Unit, sums: bool, reduced: Tensor) -> None:
        """Take the shard of a unit from FSDP, on the autograd thread."""
        if self.target is None:  # as native HSDP
            dist.all_reduce(reduced, dist.ReduceOp.SUM if sums else dist.ReduceOp.AVG, self._replicas)
            return
        unit.check(reduced, sums)
        graph = torch._C._current_graph_task_id()
        if self._backward is None or self._backward.graph != graph:  # one that raised leaves its own behind
            self._backward = _Backward(graph, Future())
            self._end_after_backward(self._backward)
        index, buffer = self._backward.num_units, self._backward.take(unit, reduced)
        scaler = scaler_of_this_backward() if self.target.looks_for_scaler else None
        self.target.take(Bucket(index, False, buffer, unit.grads_in(buffer), self._backward.done, scaler))

    def _end_after_backward(self, backward: _Backward) -> None:
        """End the step behind FSDP's own callbacks, which reduce the units whose inputs need no gradient."""
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(partial(self._end, backward)))

    def _end(self, backward: _Backward) -> None:
        self._backward = None
        last = Bucket(backward.num_units, True, torch.empty(0, device=self.target.device), {}, backward.done)
        self.target.take(last)
        error = backward.done.wait()
        if error is not None:
            forget_scalers()
            raise error
        wait_event(last.buffer.device, last.over)
        backward.deliver()


class FSDPWrapper:
    """An FSDP2 model as `attach` sees it: `parameters` are DTensors of the whole shape, groups have the shards here."""

    may_be_unused = False

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
        if group is not None:
            raise SettingError("group= is for DDP: with FSDP leave it out, and attach makes groups of its own")
        self.name, self._model = type(model).__name__, weakref.ref(model)
        self._units = _units_of(model)
        replicas = _replicas_of(self._units[0], mesh)
        self._replicas, self._shards = sorted(dist.get_process_group_ranks(replicas)), self._units[0].shards
        self._hook = hook_of(model) or UnitHook(model, replicas)
        if self._hook.target is not None:
            raise SettingError("oktopk is attached to this model already: detach() first")

    @property
    def place(self) -> dict[str, int]:
        """Where this rank's gradients lie in the model."""
        return {"shard": self._shards.index(dist.get_rank()), "shards": len(self._shards)}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All parameters that require gradients, by name."""
        return {name: each for unit in self._units for name, each in unit.parameters.items()}

    @property
    def keeps_gradients(self) -> bool:
        """Whether optimizers may step on this replica's gradients: means, as wide as the weights, and on the CPU."""
        return not any(
            unit.sums
            or unit.param_group.device.type != "cpu"
            or any(each.dtype != unit.reduce_dtype for each in unit.parameters.values())
            for unit in self._units
        )

    def make_groups(self) -> list[ParamGroup]:
        """Return a group for each unit, the last one first."""
        return [unit.make_group() for unit in reversed(self._units)]

    def open_groups(self, timeout: float) -> tuple[dist.ProcessGroup, Comm, list[dist.ProcessGroup]]:
        """Return the group of this shard's replicas, the comm of this replica's shards, and the groups of both."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self._replicas, self._shards))
        _check_grid(every)
        replicas, shards = zip(*every, strict=True)
        groups = [_new_group(replicas, timeout, None), _new_group(shards, timeout, "gloo")]
        return groups[0], ProcessGroupComm(groups[1]), groups

    def register(self, target: Any) -> None:
        """Make `target` take the gradients of all units."""
        for unit in self._units:
            unit.leave_replicas_()
            unit.param_group._all_reduce_hook = partial(self._hook, unit, unit.sums)
        setattr(self._model(), HOOK, self._hook)
        self._hook.target = target


def whole_of(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a DTensor like the parameter, whose shard here is the beginning of `flat`, without the padding."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    shard = flat[: parameter.to_local().numel()].view(parameter.to_local().shape)
    mesh, placements, shape, stride = parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)


def _units_of(model: nn.Module) -> list[Unit]:
    """Return the units that have parameters to train, in the order of the modules; refuse those that have no hook."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise SettingError(f"attach wants torch 2.13 or later for FSDP; this is torch {torch.__version__}")
    prefixes = {module: _clean(f"{name}.") if name else "" for name, module in model.named_modules()}
    units: dict[int, Unit] = {}
    for module, prefix in prefixes.items():
        for param_group in _param_groups_of(module, prefix[:-1]) if isinstance(module, FSDPModule) else ():
            if id(param_group) not in units:
                unit = units[id(param_group)] = Unit(prefix[:-1], param_group, prefixes)
                _check_unit(unit)
    with_gradients = [unit for unit in units.values() if unit.names]
    if not with_gradients:
        raise SettingError("attach wants a model with parameters that require gradients")
    if len({(unit.mesh_info.mesh, unit.knows_replicas) for unit in with_gradients}) > 1:
        raise SettingError(f"the units of this model are sharded over several meshes: give all the same, {SHARD_IT}")
    return with_gradients


def _param_groups_of(module: Any, name: str) -> list[Any]:
    param_groups: list[Any] = module._get_fsdp_state()._fsdp_param_groups
    if len(param_groups) > 1:
        raise SettingError(
            f"unit {name!r} has several parameter groups, of which FSDP hooks none: let shard_placement_fn put all "
            "parameters of a unit on one mesh, or call fully_shard on the module of each group"
        )
    return param_groups


def _check_unit(unit: Unit) -> None:
    """Refuse a unit whose hook would not get one rank's shard of the mean over the shards."""
    hook = unit.param_group._all_reduce_hook
    if hook is not None and not isinstance(getattr(hook, "func", None), UnitHook):
        raise SettingError(f"unit {unit.name!r} has another all-reduce hook, and FSDP takes one: attach before it")
    for name, each in zip(unit.names, unit.fsdp_params, strict=True):
        if each.is_dtensor:
            raise SettingError(
                f"{name!r} was a DTensor before fully_shard, as with tensor parallelism: attach wants parameters that "
                'FSDP alone shards (torchtitan: spmd_backend="partial_dtensor")'
            )
    unit.check_sum()
    if unit.names and unit.reduce_dtype not in REDUCE_DTYPES:
        raise SettingError(
            f"unit {unit.name!r} reduces gradients as {unit.reduce_dtype}, where oktopk takes float32 or bfloat16: "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        )


def _replicas_of(unit: Unit, mesh: DeviceMesh | None) -> dist.ProcessGroup:
    """Return the group of this shard's replicas: the one that FSDP would sum over, or the one of `mesh`."""
    own: dist.ProcessGroup | None = getattr(unit.mesh_info, "replicate_process_group", None)
    if mesh is None and own is not None:
        return own
    if mesh is None or mesh.ndim != 1:
        came = "nothing" if mesh is None else f"a mesh of {mesh.ndim} dimensions"
        raise SettingError(
            f"mesh= wants the replicate dimension of the mesh that the model is sharded on, not {came}: use {SHARD_IT}"
        )
    if own is not None and dist.get_process_group_ranks(own) != dist.get_process_group_ranks(mesh.get_group()):
        raise SettingError("mesh= has other ranks than the replicas of this model, which knows its own: leave it out")
    return mesh.get_group()


def _check_grid(every: list[tuple[list[int], list[int]]]) -> None:
    """Refuse ranks that are not a grid of replicas and shards, given the ranks of both on every rank."""
    for rank, (replicas, shards) in enumerate(every):
        if set(replicas) & set(shards) != {rank} or len(replicas) * len(shards) != len(every):
            raise SettingError(
                f"mesh= has ranks {replicas} on rank {rank}, whose model is sharded over ranks {shards}: these are not "
                f"the replicas and shards of {len(every)} ranks. Use {SHARD_IT}"
            )


def _new_group(rows: tuple[list[int], ...], timeout: float, backend: str | None) -> dist.ProcessGroup:
    """Return the group of this rank's row. Every rank takes part in making the group of each row."""
    for ranks in sorted({tuple(row) for row in rows}):
        group = dist.new_group(list(ranks), timedelta(seconds=timeout), backend)
        if dist.get_rank() in ranks:
            mine = group
    assert isinstance(mine, dist.ProcessGroup)
    return mine


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
