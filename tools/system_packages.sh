#!/bin/sh
# Debian packages that the build and the Python packages need. Installs the missing ones as root, else prints the command.
#   tools/system_packages.sh PYTHON
python=$1
command -v dpkg-query >/dev/null || exit 0 # another system: the build says what it misses

missing=
has_library() { ldconfig -p | grep -q "$1"; }
has_header() { "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null; }
command -v g++ >/dev/null || missing="$missing g++"
command -v "$python" >/dev/null || missing="$missing python3"
"$python" -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
has_header || missing="$missing python3-dev"
has_library libGL.so.1 || missing="$missing libgl1"
has_library libglib-2.0.so.0 || missing="$missing libglib2.0-0"
has_library libgomp.so.1 || missing="$missing libgomp1"
has_library libusb-1.0.so.0 || missing="$missing libusb-1.0-0"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ]; then
  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $missing
else
  echo "Some Debian packages are missing. Install them, then run make again:"
  echo "  sudo apt-get update && sudo apt-get install -y$missing"
  exit 1
fi
