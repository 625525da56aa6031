#!/usr/bin/env bash
# The fuzz target, for each set of vector instructions that this machine has, under the address and undefined-behaviour sanitizers, then the parity tests.
# Usage: csrc/tests/sanitize.sh [cases]      PYTHON names the interpreter, 'python' by default.
set -euo pipefail
cd "$(dirname "$0")/../.."
cases="${1:-1000000}"
build="$(mktemp -d)"
trap 'rm -rf "$build"' EXIT
python="${PYTHON:-python}"
checks="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
exact="-ffp-contract=off -fno-math-errno -fno-trapping-math"
sets=("")
if grep -qw avx2 /proc/cpuinfo 2>/dev/null; then sets=("-mavx2"); fi
if grep -qw avx512dq /proc/cpuinfo 2>/dev/null; then sets+=("-mavx2 -mavx512f -mavx512bw -mavx512vl -mavx512dq"); fi

# More optimisation takes compilers many minutes with these checks.
for native in "${sets[@]}"; do
  "${CXX:-c++}" -std=c++17 -O1 $checks $exact $native csrc/tests/fuzz.cpp -o "$build/fuzz"
  "$build/fuzz" "$cases"
done

cmake -S . -B "$build/module" -DCMAKE_BUILD_TYPE=Release -DSTQ_SANITIZE=ON -DPython_EXECUTABLE="$(command -v "$python")" >"$build/log"
cmake --build "$build/module" --parallel 1 >>"$build/log"
# The package from the source tree with the checked module in it.
cp -r src "$build/src"
rm -f "$build"/src/stquant/_cpu*.so
cp "$build"/module/_cpu*.so "$build/src/stquant/"
LD_PRELOAD="$("${CXX:-c++}" -print-file-name=libasan.so) $("${CXX:-c++}" -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$build/src:." "$python" -m pytest -q -p no:cacheprovider tests/parity
