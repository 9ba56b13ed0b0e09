import torch

from oktopk.train.models.gpt import Gpt


def test_a_text_is_not_seen_before_it_is_continued():
    torch.manual_seed(0)
    net, texts = Gpt(2, 64, 2, 32).eval(), torch.randint(256, (3, 32))
    other = texts.clone()
    other[:, 20:] = 0
    with torch.no_grad():
        before, after = net(texts), net(other)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_positions_count_and_only_their_distance():
    """Rotary positions: with one layer, a byte sees the others by how far they are before it."""
    torch.manual_seed(0)
    net = Gpt(1, 32, 2, 16).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(20 if parameter.ndim > 1 else 1)  # or attention is nearly even at first
        one, other = net(torch.tensor([[1, 2, 3], [2, 1, 3]]))[:, -1]
        assert not torch.allclose(one, other, atol=1e-3)


def test_the_head_is_the_embedding_unless_it_has_its_own():
    for tied, names in ((True, []), (False, ["head.weight"])):
        net = Gpt(1, 32, 2, 16, tied=tied)
        assert [name for name, _ in net.named_parameters() if "head" in name] == names
