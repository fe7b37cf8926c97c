#!/usr/bin/env bash
# Build the wheel into dist/: kernels compiled, library linked, nothing taken from the checkout's build products.
# usage: tools/build_wheel.sh [DIR]        DIR defaults to dist/ beside this folder; older wheels in it are removed
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "${1:-$root/dist}" && cd "${1:-$root/dist}" && pwd)
max_bytes=$((15 * 1000 * 1000))

rm -f "$out"/jax_r2p-*.whl
"${PYTHON:-python3}" -m pip wheel --no-deps --wheel-dir "$out" "$root"

shopt -s nullglob
wheels=("$out"/jax_r2p-*.whl)
[[ ${#wheels[@]} == 1 ]] || { echo "expected one wheel in $out, got ${#wheels[@]}" >&2; exit 1; }
bytes=$(stat -c %s "${wheels[0]}")
echo "${wheels[0]}: $bytes bytes"
((bytes <= max_bytes)) || { echo "the wheel is over $max_bytes bytes" >&2; exit 1; }
(cd "$out" && sha256sum "$(basename "${wheels[0]}")")
"${PYTHON:-python3}" - "${wheels[0]}" <<'PY'
"""The kernels in the wheel are those of its manifest: every hash, every file, no other."""
import hashlib, json, sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    folder = "jax_r2p/cubins/"
    files = {n.removeprefix(folder) for n in wheel.namelist() if n.startswith(folder) and not n.endswith("/")}
    rows = json.loads(wheel.read(folder + "manifest.json"))["variants"]
    listed = {row["file"] for row in rows}
    if files != listed | {"manifest.json"}:
        sys.exit(f"files and manifest differ: {sorted(files ^ (listed | {'manifest.json'}))}")
    for row in rows:
        found = hashlib.sha256(wheel.read(folder + row["file"])).hexdigest()
        if found != row["sha256"]:
            sys.exit(f"{row['file']}: sha256 {found}, the manifest says {row['sha256']}")
    if "jax_r2p/libjax_r2p.so" not in wheel.namelist():
        sys.exit("the wheel has no jax_r2p/libjax_r2p.so")
    print(f"{len(rows)} kernels, hashes as in the manifest")
PY
