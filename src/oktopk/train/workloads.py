"""The workload of a run, by its net."""

from oktopk.train.config import Config
from oktopk.train.language import Language
from oktopk.train.speech import Speech
from oktopk.train.workload import Workload


def workload_of(config: Config) -> type[Workload]:
    """Return the class whose objects have the data of these settings."""
    return Language if config.is_text else Speech
