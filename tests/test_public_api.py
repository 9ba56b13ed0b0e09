import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import oktopk

PROMISED = """
ALGORITHMS Algorithm Attached CallbackSink Comm Dense GTopk GaussianK InputError JsonlSink LocalSteps MalformedError
MemorySink MeteredComm MismatchError NonFiniteError OkTopk OkTopkPaper OktopkError PeerError ProcessGroupComm Reduced
Reducer SettingError Sparse StateError StepRecord Summary TensorBoardSink TopkA TopkDSA Traffic attach
load_distributed make_algorithm run_local save_distributed small_or_vector
"""


def test_all_is_what_is_promised_and_exists() -> None:
    assert list(oktopk.__all__) == sorted(PROMISED.split())
    assert all(hasattr(oktopk, name) for name in oktopk.__all__)


def test_the_settings_of_oktopk() -> None:
    shared = {"density": 0.03, "ranking": "magnitude", "wire": "auto", "rescale_every": 16}
    assert {field.name: field.default for field in fields(oktopk.OkTopk)} == {**shared, "slack": 1.25}
    paper = {field.name: field.default for field in fields(oktopk.OkTopkPaper)}
    assert paper == {**shared, "rethreshold_every": 32, "repartition_every": 64, "cap": 2.0}


def test_the_names_on_a_command_line() -> None:
    assert list(oktopk.ALGORITHMS) == ["dense", "topka", "topkdsa", "gtopk", "gaussiank", "oktopk", "oktopk_paper"]
    assert oktopk.make_algorithm("oktopk", density=0.5) == oktopk.OkTopk(density=0.5)


def test_the_fields_of_a_record() -> None:
    promised = "step phase numel selected nnz sparsity compression_ratio nominal_bytes sent_bytes received_bytes"
    promised += " messages seconds threshold global_threshold"
    assert set(promised.split()) <= {field.name for field in fields(oktopk.StepRecord)}


def test_importing_sets_nothing_up_and_needs_no_extra() -> None:
    """No process group, no thread, no random number drawn; of the extras, none. A prompt completes the names."""
    code = (
        "import oktopk; assert set(oktopk.__all__) <= set(dir(oktopk)); "
        "import sys, threading, torch; state = torch.random.get_rng_state(); import oktopk.api; "
        "assert torch.equal(state, torch.random.get_rng_state()); "
        "assert not torch.distributed.is_initialized(); assert threading.active_count() == 1; "
        "extras = ('triton', 'numba', 'tensorboard', 'typer', 'rich', 'jinja2', 'plotly', 'soundfile', 'jiwer'); "
        "assert not [name for name in extras if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=50)


def test_the_readme_claims_figures_of_the_default() -> None:
    default, text = oktopk.OkTopk(), " ".join((Path(__file__).parents[1] / "README.md").read_text().split())
    wire = default.codec(27_569_568).wire
    assert f"with `OkTopk()`, as `attach` runs it ({default.density * 100:g} % of the values as {wire})" in text
    assert f"sends the {default.density * 100:g} % of the gradient" in text
    assert inspect.signature(oktopk.attach).parameters["algorithm"].default == type(default).__name__.lower()
