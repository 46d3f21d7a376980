"""`make develop`: replaces what `make build` installed by links into the checkout, so that edits take effect at once.

The messages stay as they were built. Run it again after adding a file (pytest does). pip removes such links like files.
"""
import os
import sysconfig
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("platlib"))
SHARE = Path(sysconfig.get_path("data")) / "share" / "spirula_ros"


def sources():
    """(file of the checkout, where it is installed)"""
    for package in ("spirula_gpu", "spirula_ros"):
        for suffix in ("*.py", "*.so"):
            for file in (CHECKOUT / package).rglob(suffix):
                yield file, SITE / file.relative_to(CHECKOUT)
    for folder in ("config", "launch", "rviz", "foxglove"):
        for file in (CHECKOUT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, SHARE / file.relative_to(CHECKOUT)


for file, installed in sources():
    if not (installed.is_symlink() and os.readlink(installed) == str(file)):
        installed.parent.mkdir(parents=True, exist_ok=True)
        installed.unlink(missing_ok=True)
        installed.symlink_to(file)
