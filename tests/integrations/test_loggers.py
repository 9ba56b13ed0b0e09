"""Do the recipes for wandb and mlflow in docs/trainers.md work, offline?"""

import json
import re

import pytest

from tests.integrations.examples import ROOT, run

RECIPES = {re.search(r"import (\w+)", code)[1]: code for code in re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/trainers.md").read_text().partition("## wandb and mlflow")[2], re.M | re.S
)}  # fmt: skip

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import oktopk

rank = 0
dist.init_process_group("gloo", store=dist.FileStore("store", 1), rank=0, world_size=1)
model = DDP(torch.nn.Linear(200, 200))

def train(model):
    for _ in range(5):
        model(torch.randn(4, 200)).square().mean().backward()

{recipe}
{read}
print("read " + json.dumps(found))
"""
READ = {
    "wandb": "run.log({'end': 1}, step=5)  # which commits step 4\n"
    "found = [run.summary['_step'], run.summary['compression/sparsity']]",
    "mlflow": "history = mlflow.MlflowClient().get_metric_history(run.info.run_id, 'compression/sparsity')\n"
    "found = [history[-1].step, history[-1].value]",
}


@pytest.mark.slow
@pytest.mark.parametrize("logger", list(READ))
def test_a_recipe_logs_every_step(logger, tmp_path):
    pytest.importorskip(logger, reason=f"needs {logger}: make test-slow installs it")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(recipe=RECIPES[logger], read=READ[logger]))
    store = f"file:{tmp_path}/mlruns"
    offline = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = run("-c", f"import os, runpy; os.chdir({str(tmp_path)!r}); runpy.run_path({str(script)!r})", **offline)
    assert done.returncode == 0, done.stdout
    step, sparsity = json.loads(done.stdout.partition("read ")[2].splitlines()[0])
    assert step == 4
    assert 0.9 < sparsity < 1
