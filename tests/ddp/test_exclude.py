"""Which parameters travel dense by default: the smallest, and never many."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from oktopk.ddp.exclude import SMALL, smallest

shapes = st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12)


@given(shapes=shapes, density=st.sampled_from([0.001, 0.03, 0.3, 1.0]))
def test_the_default_takes_the_smallest_tensors_up_to_a_tenth_of_what_is_sent(shapes, density):
    model = {str(i): torch.empty(shape, device="meta") for i, shape in enumerate(shapes)}
    dense, capacity = smallest(model, density), density * sum(each.numel() for each in model.values()) / 10
    sent = sum(model[name].numel() for name in dense)
    assert sent <= capacity
    assert all(model[name].dim() == 1 or model[name].numel() < SMALL for name in dense)
    small = [each.numel() for each in model.values() if each.dim() == 1 or each.numel() < SMALL]
    assert sorted(model[name].numel() for name in dense) == sorted(small)[: len(dense)]
    assert len(dense) == len(small) or sent + sorted(small)[len(dense)] > capacity
