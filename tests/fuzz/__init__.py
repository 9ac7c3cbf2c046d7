"""The fuzzer: random worlds on the vllm backend, and the pytorch backend to say what must come out.

A *deck* is a model and requests of all kinds with their rows. A *world* is a schedule of some of them: when each arrives, is
aborted, is preempted, how many seats, KV blocks and rows a step there are. One engine serves many worlds. A world that fails is
shrunk and printed as one command that replays it. ``tools/fuzz.sh --help`` says how to run it.
"""
