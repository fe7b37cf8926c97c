#!/usr/bin/env bash
# Test and time the wheel in dist/ on a machine with a Hopper GPU, JAX and pytest, and no package registry.
#
# usage: tools/run_on_gpu_host.sh OUT [STEP...]      steps: doctor tests sanitize bench training cold lengths
#                                                           ablation tune
#                                                    default: all, in this order, but lengths, ablation and tune
#
#   OUT            folder for logs and rows: summary.json, doctor.log, tests.log, tests.xml, sanitize.log, bench.jsonl,
#                  bench.log, bench.png, training.jsonl, training.log, cold.jsonl, lengths.jsonl, lengths.log,
#                  lengths.png, ablation.jsonl, counters.jsonl, tune.jsonl, tune.log
#   WHEEL=path     the wheel, else the one in dist/
#   COMMIT=hash    what the wheel was built from, recorded in every row; else that of the checkout
#   WORKERS=6      test processes that share the GPU
#   TESTS="..."    more arguments for pytest, e.g. "-k lengths"
#   CASES=, IMPLS= what the step bench times (jax-r2p bench --help)
#   TRAINING_CASES=, TRAINING_IMPLS=   and the step training
#   LENGTHS_CASES=, LENGTHS_IMPLS=     and the step lengths; it times jax_r2p alone if nothing is said
#   ABLATION=dir   folder that `benchmarks/ablation.py build` made; with it there is a step `ablation`
#   TUNE=dir       folder that `benchmarks/tune.py build` made, for the step `tune`
#   TUNE_ARGS=     more arguments for `benchmarks/tune.py run`, e.g. "--cases causal_d128_s8192"
#   PEERS=dir      folder with rivals' packages, put behind the wheel on PYTHONPATH, for the benchmark only
#   LIMIT_TESTS, LIMIT_SANITIZE, LIMIT_BENCH, LIMIT_TRAINING, LIMIT_COLD, LIMIT_LENGTHS, LIMIT_ABLATION, LIMIT_TUNE
#                  seconds a step may take
#
# The wheel is installed without its dependencies into a temporary folder. Tests and benchmarks are copied away from the
# checkout, so that nothing can import the source tree by accident; where `jax_r2p` came from is checked.
# Every step runs even if an earlier one failed; the exit status is 0 only if all passed.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
[[ $# -ge 1 ]] || { sed -n '2,/^set/p' "$0" | sed '$d'; exit 2; }
out=$(mkdir -p "$1" && cd "$1" && pwd) || exit 2
shift
steps=("$@")
[[ ${#steps[@]} -gt 0 ]] || steps=(doctor tests sanitize bench training cold)
python=${PYTHON:-python3}
workers=${WORKERS:-6}
if [[ -z ${WHEEL:-} ]]; then
  wheels=("$root"/dist/jax_r2p-*.whl)
  [[ ${#wheels[@]} == 1 && -f ${wheels[0]} ]] || { echo "need one wheel in $root/dist; see tools/build_wheel.sh" >&2; exit 2; }
  WHEEL=${wheels[0]}
fi
commit=${COMMIT:-$(git -C "$root" rev-parse --verify --quiet HEAD || echo unknown)}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$WHEEL" || exit 2
mkdir "$work/checkout"
cp -r "$root"/{tests,benchmarks,examples,tools,pyproject.toml} "$work/checkout/" || exit 2
cd "$work/checkout" || exit 2
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}

"$python" - "$work/site" <<'PY' || exit 2
import pathlib, sys
import jax, jax_r2p
found, site = pathlib.Path(jax_r2p.__file__).resolve(), pathlib.Path(sys.argv[1]).resolve()
if site not in found.parents:
    sys.exit(f"jax_r2p comes from {found}, not from the wheel in {site}")
device = jax.devices()[0]
print(f"jax_r2p {jax_r2p.__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}, {device.device_kind}")
if str(getattr(device, "compute_capability", None)) != "9.0":
    sys.exit("this machine has no Hopper GPU that jax can use; everything would be skipped")
PY

declare -A status seconds
step() { # step NAME LIMIT LOG COMMAND...: runs it if asked for, with a limit, and remembers how it ended
  local name=$1 limit=$2 log=$3 start=$SECONDS
  shift 3
  [[ " ${steps[*]} " == *" $name "* ]] || return 0
  echo "== $name (at most $limit s)"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log" | tail -n "${TAIL:-40}"
  status[$name]=${PIPESTATUS[0]} seconds[$name]=$((SECONDS - start))
  echo "== $name: exit status ${status[$name]} after ${seconds[$name]} s"
}

sanitize() {
  local tool=${SANITIZER:-$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)}
  [[ -n $tool ]] || { echo "compute-sanitizer is not installed"; return 1; }
  # one allocation per array, so that a step outside an array is seen
  export XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer=
  # a process for each part: the tool itself has died of many kernels in one
  local part failed=0 parts="lengths forward pairs gradient_lengths gradients64 gradients128 gradients256"
  for part in $parts; do
    echo "-- memcheck $part"
    "$tool" --tool memcheck --error-exitcode 9 --print-limit 20 "$python" tools/sanitize_cases.py "$part" || failed=1
  done
  # Where the first thread of a backward kernel copies lse and delta over those of an earlier step, it reports the reads
  # of that step, though a lane of each warp has arrived after them at the barrier that the copy waits for. Any other
  # hazard counts, a read before such a copy has ended among them.
  local known='Write Thread [(]0,0,0[)] at r2p_bwd_'
  for part in $parts; do
    echo "-- racecheck $part"
    "$tool" --tool racecheck --racecheck-report hazard --show-backtrace no --print-limit 0 \
      "$python" tools/sanitize_cases.py "$part" >"$work/racecheck" 2>&1 || failed=1
    grep -E '^(ok|BAD)|RACECHECK SUMMARY' "$work/racecheck"
    awk -v known="$known" '/Potential .* hazard/ { kind = $0 }
      /Write Thread/ && !(kind ~ /Potential WAR/ && $0 ~ known) { print kind; print }' "$work/racecheck" >"$work/hazards"
    echo "hazards besides those known: $(grep -c 'Write Thread' "$work/hazards")"
    if [[ -s $work/hazards ]]; then failed=1; head -40 "$work/hazards"; fi
  done
  # It does not see what TMA stores: copies of such arrays to the host, and XLA's reads of them, are reported in vain.
  for part in $parts; do
    echo "-- initcheck $part"
    "$tool" --tool initcheck --check-api-memory-access no --show-backtrace no --print-limit 100000 \
      "$python" tools/sanitize_cases.py "$part" >"$work/initcheck" 2>&1 || failed=1
    grep -E '^(ok|BAD)|ERROR SUMMARY' "$work/initcheck"
    if grep -A3 'Uninitialized' "$work/initcheck" | grep 'r2p_'; then failed=1; fi
  done
  return $failed
}
export -f sanitize
export python work

# The plugins that the tests use and no other: whatever else the host has would warn, and warnings are errors.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
step doctor 60 "$out/doctor.log" "$python" -P -m jax_r2p doctor
step tests "${LIMIT_TESTS:-540}" "$out/tests.log" \
  "$python" -P -m pytest -p xdist.plugin -p pytest_timeout -m gpu -n "$workers" --dist worksteal -p no:cacheprovider --junitxml "$out/tests.xml" \
  --durations 25 ${TESTS:-} tests/gpu
step sanitize "${LIMIT_SANITIZE:-300}" "$out/sanitize.log" bash -c sanitize
export PYTHONPATH=$PYTHONPATH${PEERS:+:$PEERS}
matmul=() # a yardstick, in turn with one of the cases
[[ ",${CASES:-all}," =~ ,(all|headline|full_d128_s8192), ]] && matmul=(--matmul)
step bench "${LIMIT_BENCH:-400}" "$out/bench.log" \
  "$python" -P -m jax_r2p bench --host "${matmul[@]}" --out "$out/bench.jsonl" --plot "$out/bench.png" --commit "$commit" \
  --cases "${CASES:-all}" --impls "${IMPLS:-default}"
step training "${LIMIT_TRAINING:-300}" "$out/training.log" \
  "$python" -P -m jax_r2p bench --pass training --host --out "$out/training.jsonl" --commit "$commit" \
  --cases "${TRAINING_CASES:-training}" --impls "${TRAINING_IMPLS:-default}"
step cold "${LIMIT_COLD:-120}" /dev/stdout \
  "$python" -P -m jax_r2p bench --cold --out "$out/cold.jsonl" --commit "$commit"
step lengths "${LIMIT_LENGTHS:-540}" "$out/lengths.log" \
  "$python" -P -m jax_r2p bench --out "$out/lengths.jsonl" --plot-lengths "$out/lengths.png" --commit "$commit" \
  --cases "${LENGTHS_CASES:-lengths}" --impls "${LENGTHS_IMPLS:-jax_r2p}"

ablation() {
  local ncu=${NCU:-$(command -v ncu || ls /usr/local/cuda*/bin/ncu 2>/dev/null | head -1)}
  [[ -n ${ABLATION:-} ]] || { echo "ABLATION must name the folder of kernels"; return 1; }
  "$python" benchmarks/ablation.py run "$ABLATION" --out "$out/ablation.jsonl" --commit "$commit" || return 1
  [[ -z $ncu ]] || "$python" benchmarks/ablation.py counters "$ABLATION" --out "$out/counters.jsonl" \
    --commit "$commit" --ncu "$ncu"
}
export -f ablation
export out commit ABLATION=${ABLATION:+$(cd "$root" && realpath "$ABLATION")}
step ablation "${LIMIT_ABLATION:-400}" "$out/ablation.log" bash -c ablation

tune() {
  [[ -n ${TUNE:-} ]] || { echo "TUNE must name the folder of kernels"; return 1; }
  "$python" benchmarks/tune.py run "$TUNE" --out "$out/tune.jsonl" --commit "$commit" ${TUNE_ARGS:-} &&
    "$python" benchmarks/tune.py show "$out/tune.jsonl"
}
export -f tune
export TUNE=${TUNE:+$(cd "$root" && realpath "$TUNE")}
step tune "${LIMIT_TUNE:-540}" "$out/tune.log" bash -c tune

failed=0
{
  printf '{"commit": "%s", "wheel": "%s", "sha256": "%s", "steps": {' \
    "$commit" "$(basename "$WHEEL")" "$(sha256sum "$WHEEL" | cut -d' ' -f1)"
  comma=
  for name in "${steps[@]}"; do
    printf '%s"%s": {"exit_status": %s, "seconds": %s}' "$comma" "$name" "${status[$name]:-null}" "${seconds[$name]:-null}"
    comma=', '
    [[ ${status[$name]:-1} == 0 ]] || failed=1
  done
  printf '}}\n'
} >"$out/summary.json"
cat "$out/summary.json"
exit $failed
