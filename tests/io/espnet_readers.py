"""What ESPnet's own readers give for a table: ``espnet_readers.py TABLE KIND OUT.npz`` (KIND: omniio_audio, ...)."""

import json
import sys

import numpy as np
from espnet2.speechlm.dataloader.multimodal_loader import ALL_DATA_LOADERS

table, kind, out = sys.argv[1:]
reader = ALL_DATA_LOADERS[kind](table)
found = {}
for uid in sorted(reader.keys()):
    if kind == "omniio_audio":
        found[f"{uid}/wav"], found[f"{uid}/rate"] = reader[uid]
    else:
        found[uid] = np.array(json.dumps(reader[uid]))
np.savez(out, **found)
