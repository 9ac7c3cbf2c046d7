"""What files generated sound goes to: containers and sample widths, alone or in Kaldi arks."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError

FORMATS = ("wav", "flac", "wav.ark", "flac.ark")  # ESPnet's --audio_format
BITS = ("16", "24", "float")
_SUBTYPES = {"16": "PCM_16", "24": "PCM_24", "float": "FLOAT"}


@dataclass(frozen=True)
class AudioFormat:
    """How a waveform is written. ESPnet's decoders write 16-bit wav files.

    Attributes:
        name: one of ``FORMATS``; ``.ark`` puts all recordings of a folder into one file.
        bits: one of ``BITS``; flac has no floats.
    """

    name: str = "wav"
    bits: str = "16"

    def __post_init__(self) -> None:
        for what, value, valid in (("audio_format", self.name, FORMATS), ("audio_bits", self.bits, BITS)):
            if value not in valid:
                raise ConfigError(f"{what} {value!r} is unknown; expected one of {', '.join(valid)}")
        if self.container == "flac" and self.bits == "float":
            raise ConfigError("audio_bits float: flac holds 16 or 24 bits; take --audio_format wav")

    @property
    def container(self) -> str:
        return self.name.removesuffix(".ark")

    @property
    def in_arks(self) -> bool:
        return self.name.endswith(".ark")

    @property
    def suffix(self) -> str:
        """Of a recording's own name, also where it goes to an ark."""
        return f".{self.container}"

    @property
    def clips(self) -> bool:
        """Whether samples beyond full scale are cut off."""
        return self.bits != "float"

    @property
    def soundfile(self) -> dict[str, str]:
        """What ``soundfile.write`` is told."""
        return {"format": self.container.upper(), "subtype": _SUBTYPES[self.bits]}
