#!/bin/sh
# The native tests under AddressSanitizer (with leaks and undefined use after return) and ThreadSanitizer.
# Suppressions, each with its reason, are in native/tests/lsan.supp; ThreadSanitizer needs none.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=${JOBS:-2}
# Debian's libfabric links a library that otherwise takes over the signals and writes backtraces into the working directory.
export IPATH_NO_BACKTRACE=1
export ASAN_OPTIONS="detect_stack_use_after_return=1:halt_on_error=1"
export LSAN_OPTIONS="suppressions=$root/native/tests/lsan.supp:print_suppressions=0"
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1"
for sanitizer in address thread; do
    build="$root/build/check-$sanitizer"
    cmake -S "$root/native" -B "$build" -DKVMESH_TESTS=ON -DKVMESH_SANITIZE=$sanitizer \
        -DCMAKE_BUILD_TYPE=RelWithDebInfo >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
    cmake --build "$build" -j "$jobs" >"$build.log" 2>&1 || { tail -50 "$build.log"; exit 1; }
    for part in fabric kernels; do
        if [ -f "$build/$part/CTestTestfile.cmake" ]; then
            echo "native tests: $part, $sanitizer sanitizer"
            ctest --test-dir "$build/$part" --output-on-failure --no-tests=ignore
        fi
    done
done
