"""How much of the device the codec may take from an engine that is at work on it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TIME, SPACE = "time", "space"
_GROUP = 8  # multiprocessors that a green context has a multiple of (compute capability 9)


@dataclass(frozen=True)
class Share:
    """A part of the device.

    Attributes:
        fraction: above 0 and up to 1, which is the whole device.
        by: ``time``: layers of the decoder run one by one, with rests between them; works in whatever process the engine is.
            ``space``: a green context with so many of the multiprocessors; only of use if the engine is in this process, since
            the device goes from one process to the other as a whole.
    """

    fraction: float = 1.0
    by: str = TIME

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"the codec's share {self.fraction:g} is not above 0 and up to 1, which is the whole device"
            )
        if self.by not in (TIME, SPACE):
            raise ConfigError(f"the codec's share is by {self.by!r}; expected {TIME} or {SPACE}")

    @classmethod
    def parse(cls, text: str) -> Share:
        """``0.1``, ``0.1:time`` or ``0.1:space``. ConfigError for anything else."""
        number, colon, by = text.partition(":")
        try:
            fraction = float(number)
        except ValueError:
            raise ConfigError(f"the codec's share {text!r} is no number, as in 0.1 or 0.1:{SPACE}") from None
        return cls(fraction, by if colon else TIME)

    def __str__(self) -> str:
        return f"{self.fraction:g}" if self.by == TIME else f"{self.fraction:g}:{self.by}"

    @property
    def rests(self) -> bool:
        """Whether there are rests between layers."""
        return self.by == TIME and self.fraction < 1

    def rest(self, work: float) -> float:
        """Seconds to rest behind so many at work."""
        return work * (1 / self.fraction - 1)


def make_stream(device: torch.device, share: Share) -> tuple[torch.cuda.Stream, Any]:
    """A CUDA stream for the codec's work, and what has to live as long as the stream does.

    Where the device cannot be divided, the log says why, and the stream is one of the whole device.
    """
    import torch

    if share.by == TIME or share.fraction == 1:
        return torch.cuda.Stream(device), None
    total = torch.cuda.get_device_properties(device).multi_processor_count
    count = max(round(share.fraction * total / _GROUP), 1) * _GROUP
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext

        if not SUPPORTED:
            raise RuntimeError("this PyTorch was built without green contexts")
        context = GreenContext.create(count, torch.cuda.current_device() if device.index is None else device.index)
        of = context.Stream()
        stream = torch.cuda.Stream(stream_id=of.stream_id, device_index=of.device_index, device_type=of.device_type)
        with torch.cuda.stream(stream), torch.inference_mode():
            # A convolution shows whether the libraries take the stream.
            torch.nn.functional.conv1d(torch.ones(1, 1, 64, device=device), torch.ones(1, 1, 3, device=device))
        stream.synchronize()
    except (ImportError, AttributeError, RuntimeError) as error:
        log.warning("codec: has no multiprocessors of its own but the whole device, because this failed: %s", error)
        return torch.cuda.Stream(device), None
    log.info("codec: has %d of the device's %d multiprocessors", count, total)
    return stream, context
