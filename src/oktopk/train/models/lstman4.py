"""The speech recogniser of the Deep Speech 2 family (Amodei et al., 2015, arXiv 1512.02595): sound in, letters out.

Two convolutions over (frequency, time) halve the time once; LSTM layers with batch normalisation between them follow;
then a lookahead convolution where the LSTM hears one direction only; then a linear layer to the characters.

An utterance gives the same output whatever it is batched with (in eval mode): frames beyond its length are zeroed
wherever a layer looks at other frames than its own. Sequences are padded, not packed: on a CPU that is 1.5 to 3.6
times as fast.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oktopk.errors import InputError
from oktopk.train.data.features import BINS, output_frames
from oktopk.train.data.labels import LABELS

_CEILING = 20.0  # of the clipped ReLU, from the paper


class SpeechRecogniser(nn.Module):
    """Spectrograms to the log-probabilities of characters, for CTC.

    channels        of the first and of the second convolution
    hidden          units of an LSTM layer, in each direction
    layers          LSTM layers
    bidirectional   each layer also hears the utterance backwards, and the two directions are summed
    lookahead       frames that the lookahead convolution sees, the current one included; 0 leaves it out
    """

    def __init__(
        self, channels: tuple[int, int], hidden: int, layers: int, bidirectional: bool = False, lookahead: int = 0
    ) -> None:
        super().__init__()
        self.convolutions = _Convolutions(*channels)
        widths = [self.convolutions.features] + [hidden] * (layers - 1)
        self.recurrent = nn.ModuleList(_Recurrent(width, hidden, bidirectional) for width in widths)
        self.between = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in widths[1:])
        self.lookahead = _Lookahead(hidden, lookahead) if lookahead else None
        self.last_norm = nn.BatchNorm1d(hidden)
        self.characters = nn.Linear(hidden, len(LABELS), bias=False)

    def forward(self, inputs: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [T', B, 29] and the number of the T' frames that count for each utterance [B].

        `inputs` [B, 1, 161, T]: spectrograms, with anything beyond `frames` [B] of them. T' = ceil(T / 2).
        The result's frames are on the device of `frames`: on the CPU, reading them does not wait for the GPU.
        """
        if inputs.ndim != 4 or inputs.shape[1:3] != (1, BINS) or frames.shape != inputs.shape[:1]:
            raise InputError(
                f"the recogniser wants inputs [B, 1, {BINS}, T] and frames [B], not {list(inputs.shape)} and "
                f"{list(frames.shape)}: take both from one Batch"
            )
        x, lengths = self.convolutions(inputs, frames.to(inputs.device))
        valid = _valid(lengths, x.shape[0]).t().unsqueeze(2)  # [T', B, 1]
        for i, layer in enumerate(self.recurrent):
            x = layer(x if i == 0 else _on_rows(self.between[i - 1], x), lengths)
            x = x * valid  # as packed sequences come back: the next normalisation and the lookahead count on it
        if self.lookahead is not None:
            x = self.lookahead(x)
        logits = self.characters(_on_rows(self.last_norm, x))
        return logits.float().log_softmax(-1), output_frames(frames)


class _Convolutions(nn.Module):
    """Spectrograms [B, 1, 161, T] to features [T', B, features], and the frames of each that count."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, first, (41, 11), stride=(2, 2), padding=(20, 5))
        self.first_norm = nn.BatchNorm2d(first)
        self.second = nn.Conv2d(first, second, (21, 11), stride=(2, 1), padding=(10, 5))
        self.second_norm = nn.BatchNorm2d(second)
        self.features = second * output_frames(output_frames(BINS))

    def forward(self, inputs: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        lengths = output_frames(frames)
        inputs = inputs * _valid(frames, inputs.shape[3])[:, None, None]
        valid = _valid(lengths, output_frames(inputs.shape[3]))[:, None, None]
        x = _clipped(self.first_norm(self.first(inputs) * valid) * valid)  # zero stays zero when clipped
        x = _clipped(self.second_norm(self.second(x) * valid) * valid)
        return x.flatten(1, 2).permute(2, 0, 1).contiguous(), lengths


class _Recurrent(nn.Module):
    """One LSTM layer over [T, B, width]; if `bidirectional`, the sum of both directions.

    Each utterance is turned round within its own length, so that the padding comes last in both directions.
    """

    def __init__(self, width: int, hidden: int, bidirectional: bool) -> None:
        super().__init__()
        self.forwards = nn.LSTM(width, hidden)
        self.backwards = nn.LSTM(width, hidden) if bidirectional else None

    def forward(self, x: Tensor, frames: Tensor) -> Tensor:
        forwards: Tensor = self.forwards(x)[0]
        if self.backwards is None:
            return forwards
        turn = _turned(frames, x.shape[0]).unsqueeze(2)
        backwards: Tensor = self.backwards(x.gather(0, turn.expand_as(x)))[0]
        return forwards + backwards.gather(0, turn.expand_as(backwards))


class _Lookahead(nn.Module):
    """Each feature of [T, B, hidden] weighed over the current and the coming frames (Wang et al., 2016), clipped."""

    def __init__(self, hidden: int, frames: int) -> None:
        super().__init__()
        self.coming = frames - 1
        self.weigh = nn.Conv1d(hidden, hidden, frames, groups=hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.permute(1, 2, 0), (0, self.coming))
        return _clipped(self.weigh(padded).permute(2, 0, 1))


def _clipped(x: Tensor) -> Tensor:
    return F.hardtanh(x, 0.0, _CEILING)


def _on_rows(norm: nn.Module, x: Tensor) -> Tensor:
    rows: Tensor = norm(x.flatten(0, 1))
    return rows.view_as(x)


def _valid(frames: Tensor, total: int) -> Tensor:
    """Return [B, total]: whether a frame belongs to its utterance."""
    return torch.arange(total, device=frames.device) < frames.unsqueeze(1)


def _turned(frames: Tensor, total: int) -> Tensor:
    """Return [total, B]: the frame that stands at each place when each utterance is turned round; padding stays."""
    place = torch.arange(total, device=frames.device).unsqueeze(1)
    mirrored = frames - 1 - place
    return torch.where(mirrored >= 0, mirrored, place)
