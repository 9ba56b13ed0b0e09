"""The trainer on a GPU: a resumed run draws there what it would have drawn without the stop."""

import json
from functools import partial

import pytest
import torch

from oktopk.train import loop
from oktopk.train.data.manifest import TRAIN_MANIFEST, VAL_MANIFEST, write_manifest
from tests.train.data.corpus import tone, utterance
from tests.train.runs import last, succeed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and there is none here")


@pytest.fixture
def settings(tmp_path):
    for manifest in (TRAIN_MANIFEST, VAL_MANIFEST):
        pairs = [utterance(tmp_path, f"{manifest[:-4]}-{i}", tone(1.0 + i / 10)) for i in range(10)]
        write_manifest(tmp_path / manifest, pairs)
    return {"dataset": "an4", "data_dir": str(tmp_path), "batch_size": 2, "dense_steps": 2, "device": "cuda"}


def note_draws(rank, path):
    """Draw on the GPU in every step, and write it down."""
    del rank
    forward_backward = loop.Trainer._forward_backward

    def noted(self, work):
        with path.open("a") as file:
            file.write(json.dumps(torch.rand(3, device=self.device).tolist()) + "\n")
        return forward_backward(self, work)

    loop.Trainer._forward_backward = noted  # type: ignore[method-assign]


@pytest.mark.timeout(280)
def test_what_the_gpu_draws_after_a_resume_is_what_it_would_have(tmp_path, settings):
    whole, parts, folder = tmp_path / "whole.txt", tmp_path / "parts.txt", tmp_path / "parts"
    succeed(tmp_path / "whole", **settings, max_steps=5, prepare=partial(note_draws, path=whole))
    note = partial(note_draws, path=parts)
    succeed(folder, **settings, max_steps=3, prepare=note)
    succeed(folder, resume=last(folder), max_steps=5, prepare=note)
    assert len(whole.read_text().splitlines()) == 5
    assert parts.read_text() == whole.read_text()
