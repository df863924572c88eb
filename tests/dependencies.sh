#!/bin/bash
# dependencies.sh: every crate that is built here has a licence that deny.toml allows, and needs no newer Rust than
# Cargo.toml does. cargo-deny, where it is installed, also checks for known advisories.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
cd "$top" || exit 1
cargo=$(bash tests/packages.sh cargo) || { FAIL "a cargo"; closing; }
asked=(--locked --all-features)
[ ! -d vendor ] || asked+=(--offline --config packaging/vendor.toml)

# allowed CRATE: the licences that deny.toml allows it, one per line.
allowed() {
    sed -n '/^allow = \[/,/^\]/{s/^ *"\(.*\)",$/\1/p}' deny.toml
    sed -n "s/.*crate = \"$1\", allow = \[\"\(.*\)\"\].*/\1/p" deny.toml
}
# clarified CRATE: what deny.toml says of a crate that has no field for its licence.
clarified() { sed -n "/^crate = \"$1\"\$/{n;s/^expression = \"\(.*\)\"\$/\1/p}" deny.toml; }
# permitted CRATE LICENCE: whether the licence, an SPDX expression, can be met with what is allowed. Each name becomes 1 or 0,
# and the expression is then evaluated. A slash is the old notation of crates for OR.
permitted() {
    local names value
    names=$(allowed "$1" | sort -r | sed 's/[.+]/\\&/g; s/.*/s~(^|[( ])&($|[) ])~\\11\\2~g/')
    value=$(sed -E 's~ */ *~ OR ~g' <<<"$2" | sed -E "$names" | sed -E "$names" | sed -E '
        s/[A-Za-z][A-Za-z0-9.+-]* WITH [A-Za-z0-9.-]+/0/g; s/\bOR\b/|/g; s/\bAND\b/\&/g; s/[A-Za-z][A-Za-z0-9.+-]*/0/g; s/ //g
        :a
        s/\(([01]\|)*1(\|[01])*\)/1/; ta
        s/\(0(\|0)*\)/0/; ta
        s/1&1/1/; ta
        s/0&[01]|1&0/0/; ta
        s/^([01]\|)*1(\|[01])*$/1/')
    [ "$value" = 1 ]
}
for line in "MIT|yes" "MIT OR GPL-3.0|yes" "GPL-3.0/MIT|yes" "MIT AND GPL-3.0|no" "(MIT OR GPL-3.0) AND Unicode-3.0|yes" "|no" \
    "(GPL-2.0 OR GPL-3.0) AND MIT|no" "Apache-2.0 WITH LLVM-exception OR GPL-2.0|yes" "GPL-2.0 WITH Classpath-exception-2.0|no" \
    "GPL-2.0 OR MIT AND ISC|yes" "MITX|no"; do
    permitted x "${line%|*}" && is=yes || is=no
    [ "$is" = "${line#*|}" ] || FAIL "\"${line%|*}\" is read as $is"
done

if $cargo tree "${asked[@]}" --workspace --target x86_64-unknown-linux-gnu -e normal,build,dev --prefix none \
    --format '{p}|{l}' >"$scratch/tree" 2>"$scratch/log"; then
    sed -n 's/^\([^ ]* v[^ |]*\)[^|]*|\([^*]*\)\( (\*)\)*$/\1|\2/p' "$scratch/tree" | sed 's/ *$//' | sort -u >"$scratch/licences"
    while IFS='|' read -r crate licence; do
        : "${licence:=$(clarified "${crate%% *}")}"
        permitted "${crate%% *}" "$licence" || echo "$crate: $licence"
    done <"$scratch/licences" >"$scratch/refused"
    count=$(wc -l <"$scratch/licences")
    if [ ! -s "$scratch/refused" ] && [ "$count" -gt 20 ]; then
        ok "the licences of $count crates are allowed"
    else
        FAIL "the licences of $count crates are allowed" "$scratch/refused"
    fi
else
    FAIL "cargo tree" "$scratch/log"
fi

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if $cargo metadata "${asked[@]}" --filter-platform x86_64-unknown-linux-gnu --format-version 1 >"$scratch/metadata" 2>"$scratch/log"; then
    sed 's/{"name":"\([^"]*\)","version":"\([^"]*\)"/\n\1 \2 /g' "$scratch/metadata" |
        sed -n 's/^\([^ ]* [^ ]*\) .*"rust_version":"\([^"]*\)".*/\2 \1/p' | sort -u >"$scratch/versions"
    while read -r version crate; do
        [ "$(printf '%s\n' "$version" "$oldest" | sort -V | tail -n 1)" = "$oldest" ] || [ "$version" = "$oldest.0" ] ||
            echo "$crate asks for Rust $version"
    done <"$scratch/versions" >"$scratch/newer"
    count=$(wc -l <"$scratch/versions")
    if [ ! -s "$scratch/newer" ] && [ "$count" -gt 20 ]; then
        ok "none of $count crates that say so asks for a newer Rust than $oldest"
    else
        FAIL "none of $count crates that say so asks for a newer Rust than $oldest" "$scratch/newer"
    fi
else
    FAIL "cargo metadata" "$scratch/log"
fi

if ! $cargo deny --version >/dev/null 2>&1; then
    skip "cargo deny" "not installed"
elif $cargo deny --locked check bans licenses sources >"$scratch/log" 2>&1; then
    ok "cargo deny"
else
    FAIL "cargo deny" "$scratch/log"
fi
closing
