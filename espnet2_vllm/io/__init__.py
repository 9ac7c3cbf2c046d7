"""Kaldi and json formats, in and out."""
