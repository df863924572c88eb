#!/bin/bash
# Defects that are planted on purpose, one at a time, in a copy of the sources: each must be found by the command that its
# patch names. A test that misses known defects says little about unknown ones.
#
#   tests/planted.sh [name ...]     those of tests/planted/name.patch; all of them by default
#
# A patch begins with `Found by: ` and a command, which runs in the copy. Each takes a build: half an
# hour in all. RPCRDMA_PLANTED: where the copy is kept, to be faster the next time.
set -u
cd "$(dirname "$0")/.." || exit 1
here=$PWD
[ $# -gt 0 ] || set -- $(cd tests/planted && ls -- *.patch)

copy=${RPCRDMA_PLANTED:-$(mktemp -d)}
mkdir -p "$copy/src"
[ -n "${RPCRDMA_PLANTED:-}" ] || trap 'rm -rf "$copy"' EXIT
export CARGO_TARGET_DIR=$copy/target

# Copies the sources as they are here, changed or not.
fresh() {
    rm -rf "$copy/tree.new" && mkdir "$copy/tree.new" || exit 1
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp -p --parents -t "$copy/tree.new" || exit 1
    rm -rf "$copy/tree" && mv "$copy/tree.new" "$copy/tree" || exit 1
    # Without the headers for adapters, the commands test the library without that part.
    [ -z "$(bash tests/packages.sh features)" ] || sed -i 's/^default = \["verbs"\]/default = []/' "$copy/tree/Cargo.toml"
    # The previous defect is gone, but its file is now older than what was built from it.
    touch "$copy/tree/src/lib.rs"
}

finds() { sed -n 's/^Found by: //p' "$here/tests/planted/$1.patch" | head -n 1; }

# A command that fails even without a defect proves nothing.
fresh
names=("${@%.patch}")
while read -r command; do
    (cd "$copy/tree" && timeout -k 5 1800 bash -c "$command") >"$copy/none.log" 2>&1 </dev/null ||
        { echo "FAIL  without a defect: $command"; tail -n 20 "$copy/none.log"; exit 1; }
done < <(for name in "${names[@]}"; do finds "$name"; done | sort -u)

missed=
for name in "${names[@]}"; do
    patch=$here/tests/planted/$name.patch
    command=$(finds "$name")
    log=$copy/$name.log
    fresh
    cd "$copy/tree" || exit 1
    if [ -z "$command" ] || ! patch -p1 -s <"$patch"; then
        echo "FAIL  $name: does not apply, or names no command"
        missed="$missed $name"
    # A defect that does not compile does not count.
    elif ! cargo test --locked --lib --no-run >"$log" 2>&1; then
        echo "FAIL  $name: does not compile: $log"
        missed="$missed $name"
    elif timeout -k 5 600 bash -c "$command" >"$log" 2>&1; then
        echo "FAIL  $name: is not found by: $command"
        missed="$missed $name"
    else
        echo "ok    $name: $(grep -A1 panicked "$log" | sed -n 2p | cut -c1-90)"
    fi
    cd "$here" || exit 1
done
[ -z "$missed" ] || { echo "not found:$missed"; exit 1; }
