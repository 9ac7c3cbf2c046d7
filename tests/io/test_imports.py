"""What a light command may import stays light."""

import subprocess
import sys

HEAVY = ("torch", "vllm", "transformers", "soundfile", "kaldiio", "lhotse", "pyarrow")
LIGHT = [
    *("layout", "delay", "codes", "plan", "protocol", "errors", "text"),
    *("prompt.tasks", "prompt.opuslm", "prompt.bagpiper", "prompt.conversation"),
    *("speechlm", "decoding_choice", "thinking", "audio.listening", "audio.ahead"),
    *("io.kaldi", "io.data_json", "io.dataset_json", "io.specifiers", "io.json_lines", "io.lhotse", "io.omniio"),
]


def test_nothing_heavy_is_imported():
    code = "import sys\n" + "".join(f"import espnet2_vllm.{name}\n" for name in LIGHT)
    code += f"print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
