"""The few recordings of the test set that ship with the recipe: ``pick_recordings.py data/test recordings``."""

from __future__ import annotations

import sys
from pathlib import Path

import kaldiio
import soundfile
from texts import answer

from espnet2_vllm.io.keyed import read_keyed, write_keyed

# A recording of the voice that speaks, strings of digits in other voices, and two questions of one speaker.
_PICKED = {
    "voice": "tts1-digits",
    **{f"digits{i}": f"asr{3 * i:02}-digits" for i in range(1, 6)},
    "question1": "asr08-question-00048",
    "question2": "asr08-question-00103",
}
_FRAMES = range(75, 150)  # of the codec, in recordings that are picked by their speaker


def main() -> None:
    test, output = map(Path, sys.argv[1:])
    output.mkdir(parents=True, exist_ok=True)
    texts = read_keyed(test / "text")
    wavs = kaldiio.load_scp(str(test / "wav.scp"))
    said = {}
    for name, prefix in _PICKED.items():
        found = [uid for uid in sorted(texts) if uid.startswith(prefix)]
        key = next(uid for uid in found if uid == prefix or len(wavs[uid][1]) // 320 in _FRAMES)
        rate, wav = wavs[key]
        soundfile.write(output / f"{name}.flac", wav, rate)
        said[name] = texts[key]
        print(f"{name}: {key} {texts[key]!r}")
    write_keyed(output / "text", said)
    write_keyed(output / "answer", {name: answer(text) for name, text in said.items() if name.startswith("question")})


if __name__ == "__main__":
    main()
