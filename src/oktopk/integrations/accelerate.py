"""Ok-Topk under Hugging Face Accelerate.

`DistributedDataParallelKwargs(comm_hook=...)` takes a member of a closed enum and ignores any other hook, so attach to
the model that `prepare` returns.
"""

from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import oktopk
from oktopk import Attached, save_distributed
from oktopk.algorithms import Algorithm
from oktopk.integrations import FOLDER, Latest, ddp_of, load_beside, log_numbers, optimizer_setting

try:
    import accelerate  # noqa: F401 - only to say that it is missing
except ImportError as error:
    raise ImportError("oktopk.integrations.accelerate needs Accelerate: pip install accelerate") from error


def attach(accelerator: Any, model: Any, algorithm: Algorithm | str, **settings: Any) -> Attached:
    """Attach to the model that `accelerator.prepare` returned, with the settings of `oktopk.attach`.

    `save_state` and `load_state` then keep every rank's residuals. `register_for_checkpointing` would keep rank 0's
    alone, because Accelerate writes custom objects on the main process only. `accelerator.log` also gives the trackers
    the exchange's figures, and puts the script's into the record.
    """
    wrapped = ddp_of(model, "call accelerator.prepare(model) first, and start two processes or more")
    latest = Latest()
    defaults = {"scaler": accelerator.scaler, **optimizer_setting(accelerator._optimizers, wrapped)}
    attached = oktopk.attach(wrapped, algorithm, **latest.among({**defaults, **settings}))
    accelerator.log = _logging_both(accelerator.log, attached, latest)
    accelerator.register_save_state_pre_hook(lambda _, __, path: save_distributed(Path(path) / FOLDER, attached))
    accelerator.register_load_state_pre_hook(lambda _, path: load_beside(path, attached))
    return attached


def _logging_both(log: Any, attached: Attached, latest: Latest) -> Any:
    """Return Accelerate's `log` such that figures go both ways."""

    @wraps(log)
    def log_both(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        log_numbers(attached, values)
        return log({**latest.figures(), **values}, *args, **kwargs)

    return log_both
