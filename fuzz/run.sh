#!/bin/bash
# run.sh [SECONDS [TARGET...]]    fuzzes each target for so long (60), one after the other; no TARGET: all
# run.sh keep [TARGET...]         makes corpus/ the fewest and smallest inputs that reach all edges known, of itself and of work/
#
# The stable compiler does: RUSTC_BOOTSTRAP lets it take the one flag that is not stable, and the others are what cargo-fuzz
# passes. What is found on the way lies in work/, inputs that fail in artifacts/; a failure ends the run with status 1, and
# so does an input that takes 20 seconds or 1500 MiB.
set -u
cd "$(dirname "$0")" || exit 1

keep='' seconds=60
case ${1:-} in
keep) keep=yes; shift ;;
[0-9]*) seconds=$1; shift ;;
'') ;;
*) sed -n '2,3s/^# //p' "$0" >&2; exit 2 ;;
esac
# Without the headers for adapters there is no target for them.
features=()
[ -z "$(bash ../tests/packages.sh features)" ] || features=(--no-default-features --features libfuzzer)
targets=("$@")
if [ $# -eq 0 ]; then
    mapfile -t targets < <(sed -n 's|^path = "fuzz_targets/\(.*\)\.rs"|\1|p' Cargo.toml)
    [ ${#features[@]} -eq 0 ] || mapfile -t targets < <(printf '%s\n' "${targets[@]}" | grep -vx verbs)
fi

# --target: without it build scripts are built with these flags too, and then do not run.
triple=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1
export RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address --cfg fuzzing"
bins=()
for target in "${targets[@]}"; do bins+=(--bin "$target"); done
"${CARGO:-cargo}" build --locked --release --target "$triple" "${features[@]}" "${bins[@]}" || exit

# What the library keeps for the life of the process is not a leak.
export ASAN_OPTIONS=detect_leaks=0
failed=0
TIMEFORMAT='%R seconds, of the processor %U'
for target in "${targets[@]}"; do
    binary=${CARGO_TARGET_DIR:-target}/$triple/release/$target
    mkdir -p "work/$target" "artifacts/$target" "corpus/$target"
    if [ -n "$keep" ]; then
        rm -rf "work/$target.least" && mkdir "work/$target.least"
        # Edges alone count, not how often each was gone through.
        "$binary" -set_cover_merge=1 -use_counters=0 "work/$target.least" "corpus/$target" "work/$target" \
            >"work/$target.log" 2>&1 || exit
        rm -rf "corpus/$target" && mv "work/$target.least" "corpus/$target"
        echo "$target: $(find "corpus/$target" -type f | wc -l) inputs, $(du -sb "corpus/$target" | cut -f 1) bytes"
        continue
    fi
    echo "== $target"
    dictionary=()
    [ ! -e "$target.dict" ] || dictionary=("-dict=$target.dict")
    options=(-max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=1500 -artifact_prefix="artifacts/$target/")
    { time "$binary" "work/$target" "corpus/$target" "${dictionary[@]}" "${options[@]}" >"work/$target.log" 2>&1; } \
        2>"work/$target.cpu" || failed=1
    # The last line of progress, what it took, and what failed.
    grep -E '^#[0-9]+.*cov:' "work/$target.log" | tail -n 1
    cat "work/$target.cpu"
    grep -E 'panicked at|ERROR: |Test unit written' -A 1 "work/$target.log"
done
exit $failed
