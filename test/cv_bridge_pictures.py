"""Run by test_cv_bridge.py in a Python that has cv_bridge: argv: messages.npz, out.npz. Imports of ours only what `encodings` needs."""
import sys
from types import SimpleNamespace

import numpy as np

from spirula_ros import encodings


def main() -> None:
    bridge, why = encodings.cv_bridge_state()
    if bridge is None:
        sys.exit(f"cv_bridge {why}")
    out = {}
    for key, data in np.load(sys.argv[1]).items():
        name, width, height, step, big = key.split("|")
        msg = SimpleNamespace(encoding=name, width=int(width), height=int(height), step=int(step), is_bigendian=int(big), data=data)
        by = "cv_bridge" if encodings.in_cv_bridge(name) else "own"
        out[f"{by}|{key}"] = encodings.image_to_rgb(msg)
    np.savez(sys.argv[2], **out)


main()
