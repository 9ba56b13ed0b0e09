"""Does the second workload of the learning experiment run, and does its reader refuse what is no idx file?"""

import gzip
import json
import struct

import pytest
import torch

from oktopk.errors import SettingError
from research.learning.__main__ import main
from research.learning.classification import Classification, ImageRecipe
from research.learning.images import Images, read_idx

pytestmark = pytest.mark.long

SIDE = 8


def idx(values: torch.Tensor) -> bytes:
    """Return the tensor as an idx file has it."""
    head = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
    return head + values.to(torch.uint8).numpy().tobytes()


def made_up(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise with a bright row: its number is the label."""
    generator = torch.Generator().manual_seed(count)
    labels = torch.randint(0, SIDE, (count,), generator=generator)
    pixels = torch.randint(0, 60, (count, SIDE, SIDE), generator=generator)
    pixels[torch.arange(count), labels] += 150
    return pixels, labels


def write(folder, train: int = 96, test: int = 40):
    folder.mkdir(exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        pixels, labels = made_up(count)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def workload(seed: int = 0, workers: int = 2) -> Classification:
    pixels, labels = made_up(40)
    images = Images(pixels.to(torch.uint8), labels, 32)
    return Classification(ImageRecipe(width=2, batch_size=4, seed=seed), images, workers, torch.device("cpu"))


def test_images_are_read_and_packed_as_they_are(tmp_path):
    read = Images.read(write(tmp_path))
    read.save(tmp_path / "packed.pt")
    again = Images.load(tmp_path / "packed.pt")
    (pixels, labels), (test_pixels, test_labels) = made_up(96), made_up(40)
    for images in (read, again):
        assert torch.equal(images.pixels, torch.cat([pixels, test_pixels]).to(torch.uint8))
        assert torch.equal(images.labels, torch.cat([labels, test_labels]))
        assert (images.num_train, images.num_classes) == (96, SIDE)


GOOD = idx(made_up(3)[0])


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "no idx file"),
        (b"\x89PNG" + GOOD, "begins with 89 50 4e 47"),
        (idx(made_up(3)[1]), "in 3 dimensions"),
        (GOOD[:9], "wanted 1 to"),
        (GOOD[:-1], "wanted 192 bytes, found 191"),
        (GOOD + b"\0", "found more"),
        (struct.pack(">BBBB3I", 0, 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "wanted 1 to 1,073,741,824 bytes"),
        (gzip.compress(GOOD)[:-20], "damaged"),
        (gzip.compress(GOOD)[:-8] + b"\0" * 8, "damaged"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path, raw, said):
    (tmp_path / "images").write_bytes(raw)
    with pytest.raises(SettingError, match=said):
        read_idx(tmp_path / "images", dimensions=3)


def test_a_folder_that_lacks_a_file_or_a_label_is_refused(tmp_path):
    folder = write(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx(made_up(39)[1]))
    with pytest.raises(SettingError, match="t10k has 40 images and 39 labels"):
        Images.read(folder)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(SettingError, match=r"neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        Images.read(folder)


def test_a_packed_file_of_something_else_is_refused(tmp_path):
    torch.save({"packed": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(SettingError, match="no packed file of images"):
        Images.load(tmp_path / "other.pt")


def test_every_worker_has_its_own_images_and_all_settings_the_same():
    def chosen(seed):
        return [workload(seed).indices(step, worker).tolist() for step in range(8) for worker in range(2)]

    assert chosen(1) == chosen(1) != chosen(2)
    assert sorted(i for batch in chosen(1)[:8] for i in batch) == list(range(32))
    assert chosen(1)[:8] != chosen(1)[8:]


def test_the_learning_rate_falls_to_nothing():
    made = workload()
    assert [made.lr_at(step) for step in (0, 750, 1500)] == [0.02, 0.01, 0.0]


def test_images_learn_as_speech_does(tmp_path, capsys):
    write(tmp_path / "data")
    arguments = ["--recipe", "fashion", "--workers", "2", "--batch", "8", "--set", "width=16", "--set", "lr=0.05"]
    main([*arguments, "--data-dir", f"{tmp_path}/data", "--pack", f"{tmp_path}/packed.pt"])
    arguments += ["--steps", "30", "--dense-steps", "4", "--settings", "dense,magnitude-3+momentum=0.5+lr_scale=5"]
    result = main([*arguments, "--corpus", f"{tmp_path}/packed.pt", "--out", f"{tmp_path}/out", "--errors", "0.8,0.1"])
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1]) == result
    assert "error 0.8" in said.out
    assert "WER" not in said.out
    dense, sparse = result["rows"]
    assert dense["error"] < 0.5
    assert sparse["times_fewer_bytes"] > 2
    assert (tmp_path / "out" / "error.png").stat().st_size > 1000


def test_a_folder_of_another_workload_is_refused(tmp_path):
    (tmp_path / "runs.jsonl").write_text(json.dumps({"setting": {"name": "dense"}, "seed": 1, "ended": ""}) + "\n")
    with pytest.raises(SystemExit, match="several workloads"):
        main(["--recipe", "fashion", "--data-dir", "nowhere", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--set", "widht=3"], "width"), (["--set", "lr=fast"], "lr wants a float"), ([], "want --data-dir")],
)
def test_a_wrong_recipe_is_refused_with_a_hint(tmp_path, arguments, said):
    with pytest.raises(SettingError, match=said):
        main(["--recipe", "fashion", "--out", str(tmp_path), *arguments])
