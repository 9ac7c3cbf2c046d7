"""Audio files in and out: Kaldi's ways of naming a recording, resampling, and wav writing."""

from espnet2_vllm.audio.reading import Reading, first_channel, mono_at, read_audio
from espnet2_vllm.audio.resampling import resample
from espnet2_vllm.audio.writing import append_to_ark, write_wav

__all__ = ["Reading", "append_to_ark", "first_channel", "mono_at", "read_audio", "resample", "write_wav"]
