"""Decode ESPnet SpeechLM checkpoints on a stock vLLM wheel."""

__version__ = "0.1.0"
