import pytest
import torch
from torch import nn

from oktopk.errors import InputError, SettingError
from oktopk.train.models import make_model
from oktopk.train.models.lstman4 import SpeechRecogniser, _Lookahead, _Recurrent

ONE_WAY = {"channels": (2, 3), "hidden": 8, "layers": 3, "lookahead": 5}
BOTH_WAYS = {"channels": (2, 3), "hidden": 8, "layers": 3, "bidirectional": True}
EVERYTHING = {"channels": (2, 3), "hidden": 8, "layers": 2, "bidirectional": True, "lookahead": 3}
tiny = pytest.mark.parametrize("settings", [ONE_WAY, BOTH_WAYS, EVERYTHING])


def lived_in(settings):
    """A model whose normalisations have seen data: fresh ones leave zeros at zero, which would hide padding."""
    torch.manual_seed(0)
    model = SpeechRecogniser(**settings)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
                module.bias.uniform_(-1, 1)
        for _ in range(3):
            model(torch.randn(4, 1, 161, 40) + 0.5, torch.full((4,), 40))
    return model.eval()


@pytest.mark.parametrize(("name", "size"), [("lstman4", 27_569_568), ("lstman4-small", 1_063_080)])
def test_the_named_models_have_their_sizes_and_weights_of_the_seed(name, size):
    def weights(seed):
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(make_model(name).parameters())

    first, again, other = weights(3), weights(3), weights(4)
    assert len(first) == size
    assert (torch.equal(first, again), torch.equal(first, other)) == (True, False)


@tiny
@pytest.mark.parametrize(("frames", "wanted"), [(1, 1), (2, 1), (3, 2), (41, 21)])
def test_half_the_frames_come_out_as_log_probabilities(settings, frames, wanted):
    inputs = torch.randn(2, 1, 161, frames).double()
    log_probs, output_frames = lived_in(settings).double()(inputs, torch.tensor([frames, 1]))
    assert (log_probs.dtype, log_probs.shape) == (torch.float32, (wanted, 2, 29))
    assert output_frames.tolist() == [wanted, 1]
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones(wanted, 2), atol=1e-5)


@tiny
def test_an_utterance_gives_the_same_whatever_it_is_batched_with(settings):
    model = lived_in(settings)
    for frames, padding in ((1, 3.0), (2, 0.0), (17, 3.0), (30, 0.0), (59, 3.0)):
        inputs = torch.randn(3, 1, 161, 60)
        inputs[1, :, :, frames:] = padding
        together, output_frames = model(inputs, torch.tensor([60, frames, 45]))
        alone, lengths = model(inputs[1:2, :, :, :frames], torch.tensor([frames]))
        assert lengths[0] == output_frames[1] == len(alone)
        assert (together[: len(alone), 1] - alone[:, 0]).abs().max() < 1e-4


@tiny
def test_normalisations_count_zeros_beyond_an_utterance(settings):
    model, seen = lived_in(settings).train(), {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.LSTM)):
            module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].detach()}))
    model(torch.randn(2, 1, 161, 40), torch.tensor([40, 21]))
    for name in ("convolutions.first_norm", "convolutions.second_norm"):
        assert seen[name][1].any(0).any(0).nonzero().max() == 10
    for name in ("between.0", "last_norm", "recurrent.0.forwards"):
        assert seen[name].view(20, 2, -1)[:, 1].any(-1).nonzero().max() == 10


def test_both_directions_equal_a_packed_bidirectional_lstm():
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


def test_convolutions_and_lookahead_are_clipped_and_the_lookahead_weighs_the_coming_frames():
    x, _ = lived_in(ONE_WAY).convolutions(1e4 * torch.randn(2, 1, 161, 40), torch.tensor([40, 40]))
    assert (x.min(), x.max()) == (0, 20)
    torch.manual_seed(0)
    lookahead, x = _Lookahead(2, 3), 60 * torch.randn(7, 1, 2)
    weights, later = lookahead.weigh.weight[:, 0], torch.cat([x[:, 0], torch.zeros(2, 2)])
    wanted = torch.stack([sum(weights[:, i] * later[t + i] for i in range(3)) for t in range(7)]).clamp(0, 20)
    assert torch.allclose(lookahead(x)[:, 0], wanted, atol=1e-5)
    assert (wanted.min(), wanted.max()) == (0, 20)


@pytest.mark.parametrize(("settings", "first"), [(ONE_WAY, 20 - 7 - 4), (BOTH_WAYS, 0)], ids=["one way", "both ways"])
def test_a_frame_is_heard_by_all_later_ones_and_as_far_ahead_as_the_net_looks(settings, first):
    """Frame 40 is frame 20 of the output; the convolutions spread it by 5 // 2 + 5 frames, the lookahead by 4 more."""
    inputs, model = torch.randn(1, 1, 161, 80, requires_grad=True), lived_in(settings)
    log_probs = model(inputs, torch.tensor([80]))[0]
    gradients = [torch.autograd.grad(log_probs[t, 0, 3], inputs, retain_graph=True)[0] for t in range(40)]
    assert [t for t, each in enumerate(gradients) if each[..., 40].abs().max() > 0] == list(range(first, 40))
    log_probs.sum().backward()
    assert [name for name, each in model.named_parameters() if each.grad is None] == []


def test_refuses_another_name_and_other_shapes():
    with pytest.raises(SettingError, match="Did you mean 'lstman4'"):
        make_model("lstm_an4")
    for shape, lengths in (((2, 161, 30), [30, 30]), ((2, 1, 80, 30), [30, 30]), ((2, 1, 161, 30), [30])):
        with pytest.raises(InputError, match="take both from one Batch"):
            lived_in(ONE_WAY)(torch.zeros(shape), torch.tensor(lengths))
