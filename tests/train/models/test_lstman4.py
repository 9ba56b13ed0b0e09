from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from oktopk.errors import InputError, SettingError
from oktopk.train.models import make_model
from oktopk.train.models.lstman4 import RecogniserSettings, SpeechRecogniser, _Lookahead, _Recurrent

ONE_WAY = RecogniserSettings(channels=(2, 3), hidden=8, layers=3, lookahead_frames=5)
BOTH_WAYS = RecogniserSettings(channels=(2, 3), hidden=8, layers=3, bidirectional=True)
EVERYTHING = RecogniserSettings(channels=(2, 3), hidden=8, layers=2, bidirectional=True, lookahead_frames=3)
tiny = pytest.mark.parametrize("settings", [ONE_WAY, BOTH_WAYS, EVERYTHING])


def lived_in(settings: RecogniserSettings) -> SpeechRecogniser:
    """A model whose normalisations have seen data: fresh ones leave zeros at zero, which would hide padding."""
    torch.manual_seed(0)
    model = SpeechRecogniser(settings)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.bias.uniform_(-1, 1)
        for _ in range(3):
            model(torch.randn(4, 1, 161, 40) + 0.5, torch.full((4,), 40))
    return model.eval()


@pytest.mark.parametrize(("name", "least", "most"), [("lstman4", 27_569_568, 27_569_568), ("lstman4-small", 7e5, 15e5)])
def test_the_named_models_have_their_sizes_and_do_not_hear_padding(name: str, least: int, most: int) -> None:
    torch.manual_seed(0)
    model = make_model(name)
    assert least <= sum(each.numel() for each in model.parameters()) <= most
    model(torch.randn(2, 1, 161, 60) + 0.5, torch.tensor([60, 60]))
    inputs = torch.randn(2, 1, 161, 60)
    with torch.no_grad():
        together, _ = model.eval()(inputs, torch.tensor([60, 35]))
        alone, _ = model(inputs[1:, :, :, :35], torch.tensor([35]))
    assert (together[:18, 1] - alone[:, 0]).abs().max() < 1e-4


@tiny
@pytest.mark.parametrize(("frames", "wanted"), [(1, 1), (2, 1), (3, 2), (41, 21)])
def test_half_the_frames_come_out_as_log_probabilities(settings: RecogniserSettings, frames: int, wanted: int) -> None:
    inputs = torch.randn(2, 1, 161, frames).double()
    log_probs, output_frames = lived_in(settings).double()(inputs, torch.tensor([frames, 1]))
    assert (log_probs.dtype, log_probs.shape) == (torch.float32, (wanted, 2, 29))
    assert output_frames.tolist() == [wanted, 1]
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(wanted, 2), atol=1e-5)


@tiny
def test_an_utterance_gives_the_same_whatever_it_is_batched_with(settings: RecogniserSettings) -> None:
    model = lived_in(settings)
    for frames, padding in ((1, 3.0), (2, 0.0), (17, 3.0), (30, 0.0), (59, 3.0)):
        inputs = torch.randn(3, 1, 161, 60)
        inputs[1, :, :, frames:] = padding
        together, output_frames = model(inputs, torch.tensor([60, frames, 45]))
        alone, lengths = model(inputs[1:2, :, :, :frames], torch.tensor([frames]))
        assert lengths[0] == output_frames[1] == len(alone)
        assert (together[: len(alone), 1] - alone[:, 0]).abs().max() < 1e-4


@tiny
def test_normalisations_count_zeros_beyond_an_utterance(settings: RecogniserSettings) -> None:
    model, seen = lived_in(settings).train(), {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LSTM)):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].detach()}))
    model(torch.randn(2, 1, 161, 40), torch.tensor([40, 21]))
    for name in ("convolutions.first_norm", "convolutions.second_norm"):
        assert not seen[name][1, :, :, 11:].any()
        assert seen[name][1, :, :, 10].any()
    for name in ("between.0", "last_norm", "recurrent.0.forwards"):
        rows = seen[name].view(20, 2, -1)
        assert not rows[11:, 1].any()
        assert rows[10, 1].any()


def test_both_directions_equal_a_packed_bidirectional_lstm() -> None:
    torch.manual_seed(0)
    frames, x = torch.tensor([9, 4, 1]), torch.randn(9, 3, 5)
    oracle, ours = nn.LSTM(5, 6, bidirectional=True), _Recurrent(5, 6, bidirectional=True)
    for name, parameter in oracle.named_parameters():
        direction = ours.backwards if name.endswith("_reverse") else ours.forwards
        direction.get_parameter(name.removesuffix("_reverse")).data.copy_(parameter)
    packed = nn.utils.rnn.pack_padded_sequence(x, frames)
    both = nn.utils.rnn.pad_packed_sequence(oracle(packed)[0])[0]
    wanted, got = both[..., :6] + both[..., 6:], ours(x, frames)
    for i, length in enumerate(frames.tolist()):
        assert torch.allclose(got[:length, i], wanted[:length, i], atol=1e-6)


def test_the_convolutions_are_clipped_to_0_and_20() -> None:
    x, _ = lived_in(ONE_WAY).convolutions(1e4 * torch.randn(2, 1, 161, 40), torch.tensor([40, 40]))
    assert (x.min(), x.max()) == (0, 20)


def test_the_lookahead_weighs_the_current_and_the_coming_frames_and_is_clipped() -> None:
    torch.manual_seed(0)
    lookahead, x = _Lookahead(2, 3), 60 * torch.randn(7, 1, 2)
    weights, later = lookahead.weigh.weight[:, 0], torch.cat([x[:, 0], torch.zeros(2, 2)])
    wanted = torch.stack([sum(weights[:, i] * later[t + i] for i in range(3)) for t in range(7)]).clamp(0, 20)
    assert torch.allclose(lookahead(x)[:, 0], wanted, atol=1e-5)
    assert (wanted.min(), wanted.max()) == (0, 20)


@pytest.mark.parametrize(("settings", "first"), [(ONE_WAY, 20 - 7 - 4), (BOTH_WAYS, 0)], ids=["one way", "both ways"])
def test_a_frame_is_heard_by_all_later_ones_and_as_far_ahead_as_the_net_looks(
    settings: RecogniserSettings, first: int
) -> None:
    """Frame 40 is frame 20 of the output; the convolutions spread it by 5 // 2 + 5 frames, the lookahead by 4 more."""
    inputs = torch.randn(1, 1, 161, 80, requires_grad=True)
    log_probs, _ = lived_in(settings)(inputs, torch.tensor([80]))
    gradients = (torch.autograd.grad(log_probs[t, 0, 3], inputs, retain_graph=True)[0] for t in range(40))
    assert [t for t, each in enumerate(gradients) if each[..., 40].abs().max() > 0] == list(range(first, 40))


@tiny
def test_every_parameter_learns(settings: RecogniserSettings) -> None:
    torch.manual_seed(0)
    model = SpeechRecogniser(settings)
    log_probs, _ = model(torch.randn(2, 1, 161, 40), torch.tensor([40, 30]))
    (log_probs * torch.randn_like(log_probs)).sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_the_seed_gives_the_weights() -> None:
    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make_model("lstman4-small").parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_says_which_model_was_probably_meant() -> None:
    with pytest.raises(SettingError, match=r"there is lstman4, lstman4-small. Did you mean 'lstman4'"):
        make_model("lstm_an4")


@pytest.mark.parametrize("bad", [{"hidden": 0}, {"layers": 0}, {"channels": (0, 4)}, {"lookahead_frames": -1}])
def test_refuses_sizes_that_cannot_be(bad: dict[str, int]) -> None:
    with pytest.raises(SettingError, match="at least 1"):
        RecogniserSettings(**{"channels": (2, 3), "hidden": 8, "layers": 1} | bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "lengths"), [((2, 161, 30), [30, 30]), ((2, 1, 80, 30), [30, 30]), ((2, 1, 161, 30), [30])]
)
def test_refuses_other_shapes(shape: tuple[int, ...], lengths: list[int]) -> None:
    with pytest.raises(InputError, match="take both from one Batch"):
        lived_in(ONE_WAY)(torch.zeros(shape), torch.tensor(lengths))
