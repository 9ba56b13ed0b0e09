"""The three workloads of the learning experiment still run, and its default is the library's and its trainer's."""

import gzip
import json
import struct
import sysconfig
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from oktopk import OkTopk
from oktopk.train.config import Config
from research.learning.__main__ import main
from research.learning.images import Images
from research.learning.language import Continuation, Text, TextRecipe
from research.learning.learner import Learner, Rates
from research.learning.settings import Setting, parse
from tests.research.test_learning import made_up

pytestmark = pytest.mark.slow
long = pytest.mark.long

SOURCES = Path(sysconfig.get_path("stdlib")) / "json"
SIDE = 8  # rows of an image, and classes: the bright row of an image is its class


def curves(out):
    """Return the curves of the trainings in a folder, by the names of their settings."""
    lines = map(json.loads, (out / "runs.jsonl").read_text().splitlines())
    return {run["setting"]["name"]: run["curves"] for run in lines}


def test_default_is_what_the_library_and_its_trainer_do():
    setting, config = parse("default"), Config()
    assert setting.algorithm_at(0) == OkTopk() == config.algorithm()
    dense, sparse = (config.rates_at(0, phase) for phase in ("dense", "sparse"))
    assert setting.momentum == sparse.momentum
    assert setting.lr_scale == pytest.approx(sparse.lr / dense.lr, rel=1e-9)
    assert not setting.is_weighted
    usual, ours = ({field.name: field.default for field in fields(kind)} for kind in (OkTopk, Setting))
    assert all(ours[name] == usual[name] for name in ("ranking", "slack", "rescale_every"))


def test_settings_train_from_one_trunk_and_are_tabled(tmp_path, capsys):
    made_up(8).save(tmp_path / "packed.pt")
    arguments = ["--corpus", f"{tmp_path}/packed.pt", "--batch", "2", "--workers", "2", "--set", "augment=no"]
    arguments += ["--steps", "4", "--dense-steps", "2", "--evaluate-every", "1"]
    three = [*arguments, "--settings", "dense,default,ef21m", "--out", f"{tmp_path}/out"]
    result = main(three)
    assert [row["name"] for row in result["rows"]] == ["dense", "default", "ef21m"]
    assert all(row["times_fewer_bytes"] > 10 for row in result["rows"][1:])
    assert (tmp_path / "out" / "loss.png").stat().st_size > 1000
    made = curves(tmp_path / "out")
    dense, default = made["dense"]["loss"], made["default"]["loss"]
    assert dense[:3] == default[:3] == made["ef21m"]["loss"][:3], "they part at the switch"
    assert dense[3] != default[3]
    capsys.readouterr()
    main([*three, "--no-plots"])
    said = capsys.readouterr()
    assert said.err == "", "all is there: nothing is trained"
    assert json.loads(said.out.splitlines()[-1])["rows"] == result["rows"]
    main([*arguments, "--out", f"{tmp_path}/other", "--settings", "default", "--no-plots"])
    again = curves(tmp_path / "other")["default"]
    assert all(again[name] == made["default"][name] for name in ("loss", "grad_norm", "residual_norm", "sent_bytes"))


def bright_rows(count):
    """Return images of noise with a bright row, and its number as the label."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, SIDE, (count,), generator=generator)
    pixels = torch.randint(0, 60, (count, SIDE, SIDE), generator=generator)
    pixels[torch.arange(count), labels] += 150
    return pixels.to(torch.uint8), labels.to(torch.uint8)


def idx(values):
    """Return the tensor as an idx file has it."""
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.numpy().tobytes()


@long
def test_images_learn_as_speech_does(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for part, count in (("train", 96), ("t10k", 40)):
        pixels, labels = bright_rows(count)
        (tmp_path / "data" / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (tmp_path / "data" / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    arguments = ["--recipe", "fashion", "--workers", "2", "--batch", "8", "--set", "width=16", "--set", "lr=0.05"]
    main([*arguments, "--data-dir", f"{tmp_path}/data", "--pack", f"{tmp_path}/packed.pt"])
    images = Images.load(tmp_path / "packed.pt")
    assert torch.equal(images.pixels, torch.cat([bright_rows(96)[0], bright_rows(40)[0]]))
    assert (images.num_train, images.num_classes) == (96, SIDE)
    arguments += ["--steps", "30", "--dense-steps", "4", "--settings", "dense,magnitude-3+momentum=0.5+lr_scale=5"]
    result = main([*arguments, "--corpus", f"{tmp_path}/packed.pt", "--out", f"{tmp_path}/out", "--errors", "0.8,0.1"])
    said = capsys.readouterr().out
    assert json.loads(said.splitlines()[-1]) == result
    assert "error 0.8" in said
    dense, sparse = result["rows"]
    assert dense["error"] < 0.5
    assert sparse["times_fewer_bytes"] > 2
    assert (tmp_path / "out" / "error.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="several workloads"):
        main(["--recipe", "an4-small", "--out", f"{tmp_path}/out"])


@long
def test_text_learns_as_speech_does(tmp_path, capsys):
    arguments = ["--recipe", "gpt", "--workers", "2", "--batch", "4", "--steps", "40", "--dense-steps", "10"]
    for setting in ("layers=2", "width=64", "heads=2", "context=32", "warmup=5"):
        arguments += ["--set", setting]
    main([*arguments, "--data-dir", str(SOURCES), "--pack", f"{tmp_path}/packed.pt"])
    read, packed = Text.read(SOURCES), Text.load(tmp_path / "packed.pt")
    assert torch.equal(read.content, packed.content)
    assert read.num_train == packed.num_train
    arguments += ["--settings", "dense,library,grad-row-0.25+momentum=0.5+packed=no", "--evaluate-every", "1000"]
    arguments += ["--corpus", f"{tmp_path}/packed.pt", "--out", f"{tmp_path}/out"]
    rows = {row["name"]: row for row in main([*arguments, "--nats", "5,1"])["rows"]}
    assert "nats a byte 5" in capsys.readouterr().out
    assert all(row["nats"] < 4.0 for row in rows.values())
    assert rows["library"]["times_fewer_bytes"] > 2
    first, *others = (made["loss"][:11] for made in curves(tmp_path / "out").values())
    assert others == [first] * 2  # one trunk, moments of AdamW and all


@long
def test_matrices_decay_and_the_update_is_adamws():
    recipe, device = TextRecipe(layers=2, width=64, heads=2, context=32, batch_size=4), torch.device("cpu")
    made = Continuation(recipe, Text.read(SOURCES), device)
    assert len({tuple(made.starts(step, worker).tolist()) for step in range(3) for worker in range(2)}) == 6
    learner, net = Learner(made, 1, device), made.make_net()
    matrices, vectors = ([each for each in net.parameters() if (each.ndim > 1) == many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(5):
        learner.fill_gradient(0, step)
        learner.update(learner.grads[0], Rates(1e-2, 0.9, False, 1.0))
        theirs.zero_grad()
        made.loss(net, step, 0).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        theirs.step()
    for ours, other in zip(learner.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)
