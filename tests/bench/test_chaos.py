"""The chaos command: its figures from events, and a short run in the laboratory."""

import pytest

from oktopk.bench.chaos import ChaosSettings, Fault, faults_of, run_chaos
from oktopk.bench.chaos_figures import figures_of, tables_of, write_page
from oktopk.errors import SettingError


def commit(t, step, member, digest="a", size=3):
    return {"t": t, "event": "commit", "step": step, "member": member, "life": 0, "digest": digest, "size": size}


def members(t, member, law=0.0, size=2):
    return {"t": t, "event": "members", "step": 2, "member": member, "life": 0, "uids": ["x"], "size": size, "law": law}


EVENTS = [
    commit(0.5, 1, 0), commit(0.5, 1, 1), commit(0.5, 1, 2),
    {"t": 2.0, "event": "uncommitted", "step": 1, "member": 0, "life": 0},
    members(2.2, 0, law=3e-8), members(2.2, 1, law=1e-8), commit(2.5, 2, 0, size=2), commit(2.5, 2, 1, size=2),
    commit(3.5, 3, 0, "a"), commit(3.5, 3, 1, "b"),
]  # fmt: skip
FAULT = vars(Fault("kill", [2], t=1.0, over=3.0))


def test_figures_say_how_soon_the_others_went_on_and_what_was_lost():
    figures = figures_of(EVENTS, [], [FAULT], (0.0, 10.0), compute_s=0.1)
    assert figures["go_on_s"] == [{"kind": "kill", "seconds": 1.5}]
    assert (figures["steps"], figures["hangs"], figures["divergences"]) == (3, 0, 1)
    assert figures["attempts_committed"] == 7 / 8
    assert figures["law_worst"] == 3e-8
    assert figures["longest_gap_s"] == 6.5
    assert figures["time_committed"] == pytest.approx(3 * 1.5 / 10)


def test_a_long_silence_is_a_hang_and_no_recovery():
    figures = figures_of(EVENTS[:3], [], [FAULT], (0.0, 60.0), compute_s=0.1)
    assert (figures["hangs"], figures["go_on_s"], figures["go_on_median_s"]) == (1, [], None)


def test_settings_that_cannot_be_are_refused():
    assert faults_of("kill,stop,kill") == ("kill", "stop")
    with pytest.raises(SettingError, match=r"unknown fault 'partitoin'.* Did you mean 'partition'"):
        faults_of("partitoin")
    with pytest.raises(SettingError, match="3 members or more"):
        ChaosSettings(members=2)


@pytest.mark.slow
@pytest.mark.usefixtures("lab_works")
@pytest.mark.timeout(170)
def test_members_that_are_killed_frozen_and_cut_off_end_with_the_same_bits(tmp_path):
    pytest.importorskip("torchft", reason="oktopk[torchft] is not installed")
    settings = ChaosSettings(members=3, minutes=0.4, every_s=4.0, timeout_s=2.0, compute_s=0.05, seed=1)
    result = run_chaos(settings)
    assert len(result["faults_made"]) >= 3
    assert (result["hangs"], result["divergences"], result["errors"]) == (0, 0, [])
    assert result["law_worst"] <= 1e-6
    assert result["steps"] > 40
    assert result["go_on_worst_s"] < 30
    write_page({**result, "bench": "chaos", "notes": [], **PROVENANCE}, tmp_path)
    assert all(row[0] in (tmp_path / "index.html").read_text() for row in tables_of(result)[0]["rows"])


PROVENANCE = {
    "command": "oktopk bench chaos",
    "date": "",
    "versions": dict.fromkeys(("oktopk", "torch", "python"), ""),
    "hardware": {"cores": 1, "processor": "", "system": "", "load": []},
}
