"""Measuring: throughput and latency (``espnet2-vllm bench``), and numerics (``espnet2-vllm compare``)."""
