"""Promise: jagged rows become a padded batch and come back unchanged, whatever they are batched with."""

import pytest
import torch

from tritonrec import nn

OFFSETS = torch.tensor([0, 2, 2, 5])
ROWS = torch.arange(1.0, 11).view(5, 2)


def test_the_drawn_layout():
    left, hidden = nn.pad(torch.arange(1, 6), OFFSETS, 4)
    assert left.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 3, 4, 5]]
    assert torch.equal(hidden, left == 0)
    right, hidden = nn.pad(torch.arange(1, 6), OFFSETS, 4, side="right")
    assert right.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 5, 0]] and torch.equal(hidden, right == 0)


@pytest.mark.parametrize("side", ["left", "right"])
def test_there_and_back_with_gradients(side):
    rows = ROWS.clone().requires_grad_()
    wide, hidden = nn.pad(rows, OFFSETS, 3, side)
    assert wide.shape == (3, 3, 2) and torch.equal(wide[~hidden], ROWS) and not wide[hidden].any()
    back = nn.unpad(wide * 2, OFFSETS, 5, side)
    assert torch.equal(back, ROWS * 2)
    back.backward(ROWS)
    assert torch.equal(rows.grad, ROWS * 2)


def test_wrong_lengths_and_sides_are_refused():
    with pytest.raises(ValueError, match="a sample has 3 tokens, the model takes 2"):
        nn.pad(ROWS, OFFSETS, 2)
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'top'"):
        nn.pad(ROWS, OFFSETS, 3, side="top")
    with pytest.raises(ValueError, match="loss must be"):
        nn.PaddedNextItem(torch.nn.Identity(), 3, loss="mse")

    class Pair(torch.nn.Module):
        def forward(self, x, hidden):
            return x, hidden

    with pytest.raises(TypeError, match="returned a tuple"):
        nn.Padded(Pair(), 3)(ROWS, OFFSETS)


def test_no_tokens_and_no_samples():
    for offsets in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        wide, hidden = nn.pad(ROWS[:0], offsets, 4)
        assert wide.shape == (len(offsets) - 1, 4, 2) and hidden.all()
        assert nn.unpad(wide, offsets, 0).shape == (0, 2)


class Sum(torch.nn.Module):
    def forward(self, x, hidden):
        return x.cumsum(1) * ~hidden[..., None]


def test_an_encoder_sees_padded_rows():
    out = nn.Padded(Sum(), 4)(ROWS, OFFSETS)
    expected = torch.cat([ROWS[:2].cumsum(0), ROWS[2:].cumsum(0)])
    assert torch.equal(out, expected)


def test_losses_are_those_of_the_formulas():
    class Batch:
        offsets = OFFSETS
        labels, negatives = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([[7, 1]] * 5)

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5 + 5 + 10, 2, generator=generator)
    hidden = nn.Padded(Sum(), 4)(rows[:5], OFFSETS)
    logits = (torch.cat([rows[5:10, None], rows[10:].view(5, 2, 2)], 1) * hidden[:, None]).sum(2)
    logits[0, 2] = -torch.inf  # the label among the negatives
    by_token = {
        "sampled_softmax": torch.nn.functional.cross_entropy(
            logits, torch.zeros(5, dtype=torch.int64), reduction="none"
        ),
        "bce": -torch.nn.functional.logsigmoid(logits[:, 0])
        - torch.nn.functional.logsigmoid(-logits[:, 1:]).sum(1),
    }
    for loss, values in by_token.items():
        model = nn.PaddedNextItem(Sum(), 4, loss=loss)
        expected = torch.stack([values[:2].sum(), torch.tensor(0.0), values[2:].sum()])
        torch.testing.assert_close(model(Batch, {"item": rows}, 0), expected)
