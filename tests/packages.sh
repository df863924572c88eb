#!/bin/bash
# packages.sh WHAT: the one list of what this project needs, and the one place that sees to it.
#
#   demo       for `make demo`: what the library and the demos need is installed where that is possible
#   check      for `make check`: so is what the tests use; without that they say what they skip
#   build      for `make`: installs nothing
#   cargo      prints the cargo to use
#   sources    prints rustc's option that has what is built name no folder of an installed rust-src; nothing without one
#   features   prints cargo's option for a library without adapters, where rdma-core's headers or libclang are missing
#
# On Debian, as root or with a sudo that asks nothing, the first two install what is missing; no service is started by
# that. Else they name it in one line to copy, and so does the third; all three fail if the library cannot be built. What
# is there is found by looking for the thing itself: a compiler, a libclang or a Rust of one's own will do.
set -u
export LC_ALL=C
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
what=${1:-}

# A package, and a test for whether it, or something in its place, is there.
needed=(
    "make             has make"
    "gcc              has ${CC:-cc}"
    "libc6-dev        header stdio.h"
    "pkg-config       has pkg-config"
    "libtirpc-dev     module libtirpc"
    "rpcsvc-proto     has rpcgen"
    "ca-certificates  certificates"    # cargo fetches the crates by HTTPS
)
# For the private network that root's demo runs in.
private=(
    "rpcbind          has rpcbind"
    "iproute2         has ip"
    "netbase          file /etc/services"    # rpcbind asks for its port there
)
# With the versions that the crate rdma-sys needs.
adapters=(
    "libibverbs-dev   module libibverbs 1.8.28"
    "librdmacm-dev    module librdmacm 1.2.28"
    "libclang-dev     libclang"
)
tests=(
    g++ clang libclang-rt-14-dev valgrind strace tshark procps psmisc mandoc tmux
    # The programs that are run over RDMA.
    nfs-common nfs-kernel-server quota libquota-perl ogdi-bin ypserv yp-tools
    # RPCSEC_GSS.
    krb5-kdc krb5-admin-server krb5-user libkrb5-dev
)
oldest_rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)

# ------------------------------------------------------------------------------------------------------ what is there

# Daemons are in folders that are not in an ordinary user's PATH.
has() { PATH=$PATH:/usr/sbin:/sbin command -v "$1" >/dev/null; }
file() { [ -e "$1" ]; }
header() { [ -e "/usr/include/$1" ] || echo "#include <$1>" | ${CC:-cc} -E -xc - >/dev/null 2>&1; }
module() { # NAME [VERSION]
    if has pkg-config; then
        pkg-config --exists "$1${2:+ >= $2}"
    else
        compgen -G "/usr/lib/*/pkgconfig/$1.pc" >/dev/null
    fi
}
certificates() {
    # Vendored crates are not fetched.
    [ ! -d vendor ] || return 0
    [ -n "${SSL_CERT_FILE:-}${CARGO_HTTP_CAINFO:-}" ] || [ -e /etc/ssl/certs/ca-certificates.crt ] || [ -e /etc/pki/tls/cert.pem ]
}
# Looks where the crate clang-sys does; and for the compiler's own headers, which do not come with libclang.so.1 alone.
libclang() {
    local place
    [ -z "${LIBCLANG_PATH:-}" ] || return 0
    for place in /usr/lib{,/*-linux-gnu,64,/llvm*/lib,64/llvm*/lib} /usr/local/lib{,64} /usr/local/llvm*/lib; do
        compgen -G "$place/libclang[-.]*so*" || continue
        has clang || compgen -G '/usr/lib*/clang/*/include/stddef.h' ||
            compgen -G '/usr/lib*/llvm*/lib*/clang/*/include/stddef.h'
        return
    done
    return 1
} >/dev/null

at_least() { [[ $1 == [0-9]* ]] && [ "$(printf '%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }
# CARGO may be several words: "cargo +nightly".
version_of() { $1 -V 2>/dev/null </dev/null | sed -n 's/^cargo \([0-9][0-9.]*\).*/\1/p'; }

# Prints the cargo to use: the one that CARGO names, else the first one that is new enough. False if there is none.
choose_cargo() {
    local choice=() candidate best=
    if [ -n "${CARGO:-}" ]; then
        choice=("$CARGO")
    else
        choice=("$(command -v cargo)" "${CARGO_HOME:-${HOME:-}/.cargo}/bin/cargo")
    fi
    for candidate in "${choice[@]}"; do
        [ -n "$candidate" ] && command -v "${candidate%% *}" >/dev/null || continue
        : "${best:=$candidate}"
        if at_least "$(version_of "$candidate")" "$oldest_rust"; then echo "$candidate"; return; fi
    done
    echo "${best:-${CARGO:-cargo}}"
    return 1
}

# Without rust-src, paths of the standard library's code in our library begin with /rustc/COMMIT; with it, with its folder.
remap_sources() {
    local cargo rustc sources commit
    read -ra cargo <<<"$(choose_cargo)"
    # The rustc beside that cargo: cargo, cargo-1.85, .../bin/cargo.
    rustc=("${cargo[0]%cargo*}rustc${cargo[0]##*cargo}" "${cargo[@]:1}")
    [ -z "${RUSTC:-}" ] || rustc=("$RUSTC")
    sources=$("${rustc[@]}" --print sysroot 2>/dev/null </dev/null)/lib/rustlib/src/rust
    commit=$("${rustc[@]}" -vV 2>/dev/null </dev/null | sed -n 's/^commit-hash: //p')
    [ ! -d "$sources" ] || echo "--remap-path-prefix=$sources=/rustc/$commit"
}

# Debian's packages of a Rust that is new enough; false if apt knows of none. Besides its original rustc, Debian 12 has
# rustc-web, which can replace it: browsers are built with that, so security updates keep it new.
debian_rust() {
    local suffix candidate known=
    for suffix in -web ''; do
        candidate=$(apt-cache policy "rustc$suffix" 2>/dev/null | sed -n 's/^ *Candidate: //p')
        [ -z "$candidate" ] || known=yes
        if at_least "$candidate" "$oldest_rust"; then echo "cargo$suffix rustc$suffix"; return; fi
    done
    # apt has not been updated yet.
    [ -z "$known" ] && echo cargo-web rustc-web
}

# missing ROW...: prints the packages of these rows that are not there.
missing() {
    local row name probe
    for row in "$@"; do
        read -r name probe <<<"$row"
        $probe >/dev/null 2>&1 || echo "$name"
    done
}

# Sets required; for_adapters and for_tests, which can be done without; rust, what is wrong with the cargo that is there;
# and rust_advice, if no package of Debian's is to replace it.
look() {
    local cargo version packages rows=("${needed[@]}")
    required=() for_adapters=() for_tests=() rust='' rust_advice=''
    [ "$what" = build ] || [ "$(id -u)" -ne 0 ] || rows+=("${private[@]}")
    mapfile -t required < <(missing "${rows[@]}")
    case " ${CARGOFLAGS:-} " in
    *' --no-default-features '*) ;;
    *) mapfile -t for_adapters < <(missing "${adapters[@]}") ;;
    esac
    if [ "$what" = check ]; then
        mapfile -t for_tests < <(
            dpkg-query -W -f '${Package} ${db:Status-Status}\n' "${tests[@]}" 2>/dev/null |
                awk '$2 == "installed" { print $1 }' | sort -u | comm -13 - <(printf '%s\n' "${tests[@]}" | sort)
        )
    fi
    cargo=$(choose_cargo) && return
    version=$(version_of "$cargo")
    if ! command -v "${cargo%% *}" >/dev/null; then
        rust="and there is no $cargo"
    elif [ -z "$version" ]; then
        rust="and $cargo does not work: $($cargo -V 2>&1 </dev/null | head -n 1)"
    else
        rust="and $cargo is $version"
    fi
    case $cargo in
    cargo | /usr/bin/cargo | /bin/cargo)
        if packages=$(debian_rust); then
            # shellcheck disable=SC2206
            required+=($packages)
        else
            rust_advice="take it from https://rustup.rs, or add Debian's security updates to apt's sources, for cargo-web and rustc-web"
        fi
        ;;
    *) rust_advice="with rustup: rustup update stable && rustup default stable" ;;
    esac
}

# --------------------------------------------------------------------------------------------------------- installing

say() { echo "tests/packages.sh: $*" >&2; }

as_root=()
[ "$(id -u)" -eq 0 ] || as_root=(sudo -n)
may_install() {
    has apt-get && { [ ${#as_root[@]} -eq 0 ] || { has sudo && sudo -n true 2>/dev/null; }; }
}

# apt ARGUMENT...: another apt may be at work on a machine that has just started: wait for it, and for nothing else.
apt() {
    local try errors
    for try in 1 2 3 4 5 6; do
        errors=$("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=120 "$@" 2>&1 >/dev/null) && return
        [[ $errors == *'Could not get lock'* ]] || break
        sleep $((try * 5))
    done
    echo "$errors" >&2
    return 1
}

install() { # PACKAGE...
    # Installing a server must not start it.
    local policy=/usr/sbin/policy-rc.d package
    if [ ! -e $policy ]; then
        trap '"${as_root[@]}" rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee $policy >/dev/null && "${as_root[@]}" chmod 755 $policy
    fi
    if ! apt install --no-install-recommends "$@"; then
        # One package that this Debian does not have must not keep the others away.
        for package in "$@"; do apt install --no-install-recommends "$package"; done
    fi
}

# line PACKAGE...: prints the line to copy. On a machine whose apt was never updated, apt knows no packages.
line() {
    local sudo=''
    has apt-get || { echo "    (by Debian's names) $*"; return; }
    ! has sudo || sudo='sudo '
    [ -n "$sudo" ] || echo "As root:"
    echo
    echo "    $(compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null || echo "${sudo}apt update && ")${sudo}apt install -y --no-install-recommends $*"
    echo
}

case $what in
cargo) choose_cargo; exit 0 ;;
sources) remap_sources; exit 0 ;;
features) [ -z "$(missing "${adapters[@]}")" ] || echo --no-default-features; exit 0 ;;
build | demo | check) ;;
*) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac

look
if [ "$what" != build ] && [ -n "${required[*]}${for_adapters[*]}${for_tests[*]}$rust" ] && may_install; then
    # Only now does apt know which Rust versions there are.
    apt update || say "apt-get update failed; trying with the lists that are there"
    look
    set -- "${required[@]}" "${for_adapters[@]}" "${for_tests[@]}"
    if [ $# -gt 0 ]; then
        say "installing $*${rust:+; Rust $oldest_rust or later is needed, $rust}"
        install "$@"
        look
    fi
fi

set -- "${required[@]}" "${for_adapters[@]}" "${for_tests[@]}"
if [ ${#required[@]} -gt 0 ] || [ -n "$rust" ]; then
    say "something is missing, and nothing can be built without it."
    if [ -n "$rust" ]; then
        echo "Rust $oldest_rust or later is needed, $rust:"
        echo "${rust_advice:-take cargo-web and rustc-web of Debian, as below, or leave them out and take it from https://rustup.rs}."
    fi
    [ $# -eq 0 ] || line "$@"
    exit 1
fi >&2
case $what in
check)
    if [ ${#for_tests[@]} -gt 0 ]; then
        say "without these, tests say what they skip:"
        line "${for_adapters[@]}" "${for_tests[@]}"
    fi >&2
    ;;
build)
    [ ${#for_adapters[@]} -eq 0 ] || say "building without adapters, for want of ${for_adapters[*]}"
    ;;
esac
exit 0
