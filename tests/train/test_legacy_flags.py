"""Are the old spellings understood, and is everything else left as it is?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oktopk.train.legacy_flags import modern


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("train --data_dir d --max_epochs 2", "train --data-dir d --max-epochs 2"),
        ("train --data_dir=a_b/c_d", "train --data-dir=a_b/c_d"),
        ("train --nworkers 2 --nworkers=2", "train --nproc 2 --nproc=2"),
        ("train --lstm-lr 0.1 --lstm_lr=0.2", "train --lr 0.1 --lr=0.2"),
        ("train --compressor none", "train --compressor dense"),
        ("train --compressor=topkA", "train --compressor topka"),
        ("train --compressor topkDSA --lr 1", "train --compressor topkdsa --lr 1"),
        ("train --compression", "train"),
        ("train --compression True --lr 1", "train --lr 1"),
        ("train --compression=False", "train --compressor dense"),
        ("train --compression no", "train --compressor dense"),
        ("train --compression --density 0.1", "train --density 0.1"),
    ],
)
def test_an_old_spelling_becomes_todays_with_a_note(old, new):
    arguments, notes = modern(old.split())
    assert arguments == new.split()
    changed = sum(word.split("=")[0] not in new for word in old.split() if word.startswith("--"))
    assert len(notes) >= max(1, changed)
    assert all(note.startswith("--") for note in notes)


@pytest.mark.parametrize(
    "arguments",
    [
        "train --dnn lstman4 --dataset an4 --data-dir a_b --nproc 2",
        "train --set clip_place=local --set=lr_anneal=1.1 --name my_run --name=my_run",
        "train --compressor oktopk --compressor=topka",
        "train --resume runs/an4_small --compressor",
        "data an4 some_archive.tar.gz --out a_b",
        "--version",
        "",
    ],
)
def test_todays_spelling_is_left_alone(arguments):
    assert modern(arguments.split()) == (arguments.split(), [])


@given(
    st.lists(st.sampled_from(["train", "--data_dir", "--nworkers=2", "--compressor", "none", "--compression", "no"]))
)
def test_what_was_made_is_not_changed_again(arguments):
    made, _ = modern(arguments)
    assert modern(made) == (made, [])
