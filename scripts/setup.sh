#!/bin/sh
# Makes the environment: system packages where they are missing and can be installed, a virtual environment, the build.
#   scripts/setup.sh VENV run|dev
# run: what serving needs, which is no PyTorch on CPU. dev: also what tests, checks and benchmarks need: PyTorch and
# transformers are what the engine is compared with. TORCH: what pip is asked for (default torch==2.13.0). TORCH_INDEX: where
# to look for it, for example PyTorch's index of CPU builds; empty: pip's own.
set -eu

venv=$1
kind=$2
torch=${TORCH:-torch==2.13.0}

find_python() {
    for name in python3 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null 2>&1 &&
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    return 1
}

has_python() { python=$(find_python) && "$python" -c 'import ensurepip, venv' 2>/dev/null && has_python_headers; }
has_python_headers() {
    [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ]
}
has_compiler() { echo 'int main(){}' | c++ -std=c++20 -x c++ -o /dev/null - 2>/dev/null; }
has_libfabric() { pkg-config --exists libfabric 2>/dev/null; }

missing=""
has_python || missing="$missing python3 python3-venv python3-dev"
has_compiler || missing="$missing g++"
has_libfabric || missing="$missing libfabric-dev pkg-config"

if [ -n "$missing" ]; then
    install="apt-get install -y --no-install-recommends$missing"
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "kvmesh needs (by their Debian names):$missing" >&2
        exit 1
    elif [ "$(id -u)" = 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo"
    else
        echo "kvmesh needs a few packages; type: sudo $install" >&2
        exit 1
    fi
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    $as_root apt-get update -q >/dev/null
    $as_root $install >/dev/null
    if ! has_python; then
        echo "kvmesh needs Python 3.11 or newer with venv and headers; the one here is $(python3 -V 2>&1)" >&2
        exit 1
    fi
fi

if [ "$kind" = dev ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 && ! command -v chromium >/dev/null 2>&1; then
    echo "installing: chromium, for the console's tests"
    { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >/dev/null ||
        echo "no chromium: the console's tests in a browser are skipped" >&2
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check"
echo "installing Python packages into $venv"
$pip install -q "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.20" ninja
extra=""
if [ "$kind" = dev ]; then
    $pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    extra="[dev]"
fi
echo "building"
$pip install -q --no-build-isolation -e ".$extra"
