"""Does the third workload of the learning experiment run, and does its optimizer train as torch's does?"""

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from oktopk.errors import SettingError
from research.learning.__main__ import main
from research.learning.language import MAX_BYTES, Continuation, Gpt, Text, TextRecipe
from research.learning.learner import Learner, Rates

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
TINY = {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch_size": 4}


def write(folder: Path, count: int = 40) -> Path:
    """Write files that are easy to continue, one of them in a folder of its own, and one that is no source."""
    (folder / "deeper").mkdir(parents=True)
    for i in range(count):
        (folder / ("deeper" if i == 7 else "") / f"{i}.py").write_text(f"value_{i} = {i}\n" * 20)
    (folder / "empty.py").touch()
    (folder / "notes.txt").write_text("no source")
    return folder


def workload(tmp_path: Path, **changes) -> Continuation:
    return Continuation(TextRecipe(**(TINY | changes)), Text.read(write(tmp_path / "data")), CPU)


def test_files_are_read_in_one_order_and_none_is_parted(tmp_path):
    text = Text.read(write(tmp_path / "data"))
    text.save(tmp_path / "packed.pt")
    again = Text.load(tmp_path / "packed.pt")
    assert torch.equal(text.content, again.content)
    assert text.num_train == again.num_train
    lines = bytes(text.content.tolist()).decode().splitlines()
    assert sorted(set(lines)) == sorted(f"value_{i} = {i}" for i in range(40))
    assert lines != sorted(lines)
    train, val = (bytes(part.tolist()) for part in text.content.tensor_split([text.num_train]))
    assert 0.9 < len(train) / len(text.content) < 0.98
    assert not set(train.splitlines()) & set(val.splitlines())


def test_a_folder_without_sources_and_a_file_of_something_else_are_refused(tmp_path):
    with pytest.raises(SettingError, match="wanted two or more"):
        Text.read(tmp_path)
    torch.save({"packed": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(SettingError, match="no packed file of text"):
        Text.load(tmp_path / "other.pt")


def test_a_text_is_not_seen_before_it_is_continued():
    torch.manual_seed(0)
    net = Gpt(2, 64, 2, 32).eval()
    texts = torch.randint(256, (3, 32))
    other = texts.clone()
    other[:, 20:] = 0
    with torch.no_grad():
        before, after = net(texts), net(other)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_every_worker_has_its_own_texts_and_all_settings_the_same(tmp_path):
    made = workload(tmp_path, seed=1)
    starts = [made.starts(step, worker).tolist() for step in range(3) for worker in range(2)]
    assert starts == [made.starts(step, worker).tolist() for step in range(3) for worker in range(2)]
    assert len(set(map(tuple, starts))) == 6


def test_the_learning_rate_rises_and_falls_to_nothing(tmp_path):
    made = workload(tmp_path, lr=1.0, warmup=4, steps=100)
    assert [made.lr_at(step) for step in (0, 50, 100)] == [0.25, 0.5, 0.0]


def test_matrices_decay_and_the_update_is_adamws(tmp_path):
    made = workload(tmp_path)
    learner = Learner(made, 1, CPU)
    net = made.make_net()
    matrices = [parameter for parameter in net.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in net.parameters() if parameter.ndim == 1]
    theirs = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        learner.fill_gradient(0, step)
        learner.update(learner.grads[0], Rates(1e-2, 0.9, False, 1.0))
        theirs.zero_grad()
        made.loss(net, step, 0).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        theirs.step()
    for ours, other in zip(learner.net.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)


def test_text_learns_as_speech_does(tmp_path, capsys):
    folder = Path(sysconfig.get_path("stdlib")) / "json"
    sizes = [f"{name}={TINY[name]}" for name in ("layers", "width", "heads", "context")]
    arguments = ["--recipe", "gpt", "--workers", "2", "--batch", "4", "--steps", "40", "--dense-steps", "10"]
    arguments += [word for size in [*sizes, "warmup=5"] for word in ("--set", size)]
    main([*arguments, "--data-dir", str(folder), "--pack", f"{tmp_path}/packed.pt"])
    arguments += ["--settings", "dense,library,grad-row-0.25+momentum=0.5+packed=no", "--evaluate-every", "1000"]
    arguments += ["--corpus", f"{tmp_path}/packed.pt", "--out", f"{tmp_path}/out"]
    result = main([*arguments, "--nats", "5,1"])
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == result
    assert "nats a byte 5" in said.out
    rows = {row["name"]: row for row in result["rows"]}
    assert all(row["nats"] < 4.0 for row in rows.values())
    assert rows["library"]["times_fewer_bytes"] > 2
    losses = [json.loads(line)["curves"]["loss"] for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert losses[0][:11] == losses[1][:11] == losses[2][:11]  # one trunk, moments of AdamW and all


def test_a_corpus_is_never_larger_than_it_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("research.learning.language.MAX_BYTES", 3000)
    assert 2000 < len(Text.read(write(tmp_path / "data")).content) <= 3000 < MAX_BYTES
