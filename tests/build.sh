#!/bin/bash
# build.sh: what the Makefile considers stale, what tests/packages.sh says where something is missing, and what is skipped
# without a private network. A cargo and a pkg-config that only record how they are called stand in for the real ones,
# so nothing is compiled or installed here.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/lib.sh"
unset MAKEFLAGS MAKELEVEL MFLAGS CARGO CARGOFLAGS CARGO_TARGET_DIR CARGO_HOME CC LDFLAGS RUSTFLAGS LIBCLANG_PATH
cd "$scratch" || exit 1

# ------------------------------------------------------------------------------------------------------------- stale

mkdir tree bin && tar -C "$top" --exclude=./target --exclude=./build --exclude=./.git -cf - . | tar -C tree -xf -
# An archive that lacks everything that is exported, which a version script tolerates.
echo 'int rpcrdma_stand_in;' >stand_in.c
cc -c -fPIC stand_in.c || { FAIL "a stand-in for the library compiles"; closing; }
cat >bin/cargo <<END
#!/bin/sh
[ "\$1" = -V ] && { echo "cargo 99.0.0"; exit; }
echo "\${0##*/} \$*" >>$scratch/calls
mkdir -p target/release target/tool && rm -f target/release/librpcrdma.a && ar rc target/release/librpcrdma.a $scratch/stand_in.o
cp $scratch/tool target/tool/rpcrdma
END
# A stand-in for the command, which writes its pages and completions itself.
cat >tool <<'END'
#!/bin/sh
mkdir -p "$2/man1" "$2/completions"
for file in man1/rpcrdma.1 man1/rpcrdma-run.1 man1/rpcrdma-ping.1 completions/rpcrdma.bash completions/_rpcrdma completions/rpcrdma.fish; do
    echo "generated" >"$2/$file"
done
END
chmod 755 tool
cat >bin/gcc-too <<END
#!/bin/sh
echo linked >>$scratch/links
exec cc "\$@"
END
chmod 755 bin/*
cp bin/cargo bin/other-cargo
build() { rm -f calls links; make -C tree "$@" >make.log 2>&1; }
calls() { cat calls 2>/dev/null; }

# stale NAME FLAGS ARGUMENT...: make with these arguments calls cargo once for the library and once for the command, with these
# flags, and then not again.
stale() {
    local name=$1 flags=$2; shift 2
    build "$@" && [[ $(calls) == *"build $flags"*"--release --lib"*"build $flags"*"-p rpcrdma-tools" ]] && [ "$(calls | wc -l)" -eq 2 ] &&
        [ tree/build/librpcrdma.so.0 -nt tree/build/librpcrdma.a ] && build "$@" && [ -z "$(calls)" ] &&
        ok "$name" || FAIL "$name: $(calls)" make.log
}
mine=("CARGO=$scratch/bin/cargo")
stale "a first build" "--locked" "${mine[@]}"
stale "other flags for cargo" "--offline" "${mine[@]}" CARGOFLAGS=--offline
stale "other features" "--locked --no-default-features" "${mine[@]}" CARGOFLAGS="--locked --no-default-features"
stale "flags for rustc" "--locked" "${mine[@]}" RUSTFLAGS="--cfg it's"
stale "back to the usual flags" "--locked" "${mine[@]}"
stale "another cargo" "--locked" "CARGO=$scratch/bin/other-cargo"
stale "another folder for what cargo makes" "--locked" "${mine[@]}" CARGO_TARGET_DIR=target/.
build "${mine[@]}"
# changed FILE: touches it until it is newer than the last build: a file's time advances by ticks of the kernel's clock.
changed() { until touch "$1" && [ "$1" -nt tree/build/rpcrdma ]; do :; done; }
changed tree/src/lib.rs
stale "a source that was changed" "--locked" "${mine[@]}"
changed tree/src/added.rs && build "${mine[@]}" && rm tree/src/added.rs
stale "a source that was removed" "--locked" "${mine[@]}"

if build "${mine[@]}" "CC=$scratch/bin/gcc-too" && [ -s links ]; then ok "another compiler links anew"; else FAIL "another compiler links anew" make.log; fi
build "${mine[@]}"
echo "__attribute__((constructor)) static void by_hand(void) {}" >by_hand.c && cc -c -fPIC by_hand.c
ar rc tree/target/release/librpcrdma.a by_hand.o && touch -d '+2 seconds' tree/target/release/librpcrdma.a
if build "${mine[@]}" && ! nm tree/build/librpcrdma.so.0 | grep -q by_hand; then
    ok "what was built beside make, with other flags, is not linked"
else
    FAIL "what was built beside make, with other flags, is not linked" make.log
fi

build "${mine[@]}" CARGOFLAGS=--offline
if build install DESTDIR="$scratch/staged" "CARGO=$scratch/none" && [ -z "$(calls)" ]; then
    ok "make install installs what was built"
else
    FAIL "make install installs what was built" make.log
fi

# ------------------------------------------------------------------------------------------- installed, and taken away

# installed WANTED...: are these files there, and are all that are there readable by everybody?
installed() {
    local file
    for file in "$@"; do [ -e "$stage/$file" ] || { echo "$file is missing" >>make.log; return 1; }; done
    ! find "$stage" ! -type l ! -perm -444 | grep . >>make.log
}
nothing() { ! find "$stage" -mindepth 1 2>/dev/null | grep . >>make.log; }
stage=$scratch/stage
mkdir stage
if (umask 077; build install DESTDIR="$stage" PREFIX=/usr LIBDIR=/usr/lib/abi CARGOFLAGS=--offline) &&
    installed usr/bin/rpcrdma{,-run} usr/lib/abi/librpcrdma.so{,.0} usr/lib/abi/pkgconfig/rpcrdma.pc usr/include/rpcrdma.h \
        usr/share/man/man{1/rpcrdma{,-run,-ping}.1,5/rpcrdma.conf.5,7/rpcrdma.7,3/rpcrdma_svc_run.3} \
        usr/share/bash-completion/completions/rpcrdma usr/share/zsh/site-functions/_rpcrdma \
        usr/share/fish/vendor_completions.d/rpcrdma.fish etc/rpcrdma.conf \
        usr/share/doc/rpcrdma/{README.md,examples/{rpcrdma,service,fileservice}.conf,examples/hello.c}; then
    ok "make install puts everything into its place"
else
    FAIL "make install puts everything into its place" make.log
fi
# broken_links FOLDER: prints the links in its pages that lead to no file there.
broken_links() {
    local page link
    find "$1" -name '*.md' | while IFS= read -r page; do
        grep -oE '\]\([^)#]+' "$page" | sed 's/^](//' | grep -v '^[a-z]*:' | while IFS= read -r link; do
            [ -e "${page%/*}/$link" ] || echo "$page: $link"
        done
    done
}
broken_links stage/usr/share/doc/rpcrdma >broken
if [ "$(grep -c ']([a-z]' stage/usr/share/doc/rpcrdma/README.md)" -gt 10 ] && [ ! -s broken ]; then
    ok "each link of the installed pages leads somewhere"
else
    FAIL "each link of the installed pages leads somewhere" broken
fi
if cmp -s "$top/docs/rpcrdma-run.1" stage/usr/share/man/man1/rpcrdma-run.1; then
    ok "rpcrdma-run has its own page"
else
    FAIL "rpcrdma-run has its own page"
fi
if grep -q 'libdir=/usr/lib/abi$' stage/usr/lib/abi/pkgconfig/rpcrdma.pc && strings -a stage/usr/bin/rpcrdma-run | grep -q '^/usr/lib/abi/'; then
    ok "what is installed knows its places"
else
    FAIL "what is installed knows its places"
fi
: >foreign && cp foreign stage/usr/share/man/man1/
places=(DESTDIR="$stage" PREFIX=/usr LIBDIR=/usr/lib/abi)
if build uninstall "${places[@]}" && [ "$(find stage -type f)" = stage/usr/share/man/man1/foreign ] && rm stage/usr/share/man/man1/foreign; then
    ok "make uninstall takes it away, and nothing else"
else
    find stage >>make.log
    FAIL "make uninstall takes it away, and nothing else" make.log
fi
rm -rf stage && build install "${places[@]}" CARGOFLAGS=--offline && rm -r tree/build/generated && build uninstall "${places[@]}" && nothing &&
    ok "nothing is left" || FAIL "nothing is left" make.log
build "${mine[@]}" CARGOFLAGS=--offline && changed tree/tool/src/main.rs && build "${mine[@]}" CARGOFLAGS=--offline
mkdir -p stage/usr/bin stage/etc && chmod 2775 stage/usr/bin stage/etc && build install "${places[@]}" CARGOFLAGS=--offline
if [ "$(stat -c %a stage/usr/bin stage/etc | xargs)" = "2775 2775" ]; then
    ok "a folder that is there keeps its rights"
else
    FAIL "a folder that is there keeps its rights" make.log
fi
build install "${places[@]}" CARGOFLAGS=--offline && echo 'credits = 64' >stage/etc/rpcrdma.conf
if build install "${places[@]}" CARGOFLAGS=--offline && grep -q 'was there' make.log && build uninstall "${places[@]}" &&
    [ "$(find stage -type f -exec cat {} +)" = 'credits = 64' ] && grep -q 'was changed, and stays' make.log; then
    ok "a changed rpcrdma.conf is neither replaced nor removed"
else
    FAIL "a changed rpcrdma.conf is neither replaced nor removed" make.log
fi
make -s --no-print-directory -C tree help >said 2>&1
if [ "$(head -n 1 said | cut -d ' ' -f 1)" = make ] && ! grep -q '^#' said && grep -q '^make bench ' said &&
    [ -z "$(grep -o '^make [a-z0-9-]*' said | cut -d ' ' -f 2 | while read -r goal; do grep -Eq "^([a-z0-9 -]* )?$goal( [a-z0-9 -]*)?:" tree/Makefile || echo "$goal"; done)" ]; then
    ok "make help lists the targets, all of which there are"
else
    FAIL "make help lists the targets, all of which there are" said
fi

# ----------------------------------------------------------------------------------------------------------- missing

# The machine of an ordinary user: it has only what the links in `machine` lead to.
mkdir machine
for tool in bash sh cat sed sort head uname grep tee printf dirname comm awk env sleep mkdir rm touch; do
    ln -s "$(command -v $tool)" "machine/$tool"
done
script() { printf '#!/bin/sh\n%s\n' "$2" >"machine/$1"; chmod 755 "machine/$1"; }
script id 'echo 1000'
# asked WHAT: runs packages.sh on that machine; `said` gets what it says.
asked() { PATH=$scratch/machine HOME=$scratch bash "$here/packages.sh" "$@" >said 2>&1; }
says() { if grep -Eq -- "$2" said; then ok "$1"; else FAIL "$1" said; fi; }
silent() { if "${@:2}" && [ ! -s said ]; then ok "$1"; else FAIL "$1" said; fi; }
lines() { grep -c 'apt install' said; }

script apt-get 'echo "apt-get must not be called" >&2; exit 1'
for what in build demo check; do
    if asked $what; then FAIL "$what: fails on an empty machine" said; else ok "$what: fails on an empty machine"; fi
    says "$what: names one line" '^    .*apt install -y --no-install-recommends make gcc .*pkg-config .*rpcsvc-proto .*cargo-web rustc-web'
    [ "$(lines)" -eq 1 ] || FAIL "$what: one line only" said
    says "$what: names Rust" '^Rust 1\.[0-9]+ or later is needed, and there is no cargo:$'
    says "$what: says where Rust comes from" 'https://rustup\.rs'
    if grep -Eq ' (iproute2|rpcbind)' said; then FAIL "$what: asks for nothing that an ordinary user has no use for" said; fi
done
asked check
says "check: the same line has what the tests use" 'apt install .*g\+\+ .*valgrind'

# apt knows of no Rust that is new enough: no security updates among its sources.
script apt-cache 'echo "$2:"; case $2 in rustc) echo "  Candidate: (none)" ;; rustc-web) echo "  Candidate: 1.85.0+dfsg3-1" ;; esac'
asked build
says "an apt without a new Rust is told what it lacks" "add Debian's security updates to apt's sources"
if grep -q 'apt install.*rustc' said; then FAIL "and is not asked for the old one" said; fi
rm machine/apt-cache

# A sudo that asks for no password. It runs apt-get, which records what it is asked for, and after that everything is there.
script sudo 'shift; case $1 in env) exec "$@" ;; *) cat >/dev/null ;; esac'
cat >machine/apt-get <<'END'
#!/bin/bash
while [[ $1 == -* ]]; do [ "$1" != -o ] || shift; shift; done
echo "$*" >>"$HOME/apt"
here=$(dirname "$0")
[ "$1" = update ] || for tool in make cc rpcgen pkg-config cargo; do
    printf '#!/bin/sh\necho cargo 1.100.0\n' >"$here/$tool"; /bin/chmod 755 "$here/$tool"
done
END
if LIBCLANG_PATH=$scratch SSL_CERT_FILE=/dev/null asked demo && [ "$(grep -c 'packages.sh: installing' said)" -eq 1 ] &&
    [ "$(sed -n 1p apt)" = update ] && [ "$(wc -l <apt)" -eq 2 ] &&
    grep -Eq '^install --no-install-recommends make gcc pkg-config rpcsvc-proto cargo-web rustc-web( |$)' apt; then
    ok "with a sudo that asks nothing, demo installs what is missing, and goes on"
else
    cat apt >>said
    FAIL "with a sudo that asks nothing, demo installs what is missing, and goes on" said
fi
rm -f machine/{make,cc,rpcgen,pkg-config,cargo} apt
if asked build; then FAIL "build installs nothing" said; elif [ -e apt ]; then FAIL "build installs nothing" apt; else ok "build installs nothing"; fi
says "with sudo, the line has it" '^    (sudo apt update && )?sudo apt install'
rm machine/sudo
script apt-get 'echo "apt-get must not be called" >&2; exit 1'

script cargo 'echo "cargo 1.65.0"'
asked build
says "an old cargo of one's own" 'Rust 1\.[0-9]+ or later is needed, and .*/cargo is 1\.65\.0:'
says "is for rustup to renew" 'rustup update'
if grep -q cargo-web said; then FAIL "and not replaced by Debian's" said; fi
script cargo 'echo "error: no default toolchain" >&2; exit 1'
asked build
says "a cargo that does not work" 'and .*/cargo does not work: error: no default toolchain:'

script cargo 'echo "cargo 1.100.0 (2027-01-01)"'
for tool in make cc rpcgen; do script $tool 'exit 0'; done
# All headers but those of libibverbs.
script pkg-config 'case "$*" in *libibverbs*) exit 1 ;; esac'
export LIBCLANG_PATH=$scratch SSL_CERT_FILE=/dev/null
if asked build && [ "$(cat said)" = "tests/packages.sh: building without adapters, for want of libibverbs-dev" ]; then
    ok "without the headers for adapters one line says so, and it goes on"
else
    FAIL "without the headers for adapters one line says so, and it goes on" said
fi
asked features
says "then cargo is told" '^--no-default-features$'
CARGOFLAGS="--locked --no-default-features" silent "who wants no adapters is told nothing" asked build
script pkg-config 'exit 0'
silent "features: nothing where all is there" asked features
silent "build: nothing where all is there" asked build
silent "demo: nothing where all is there" asked demo
asked cargo
says "the cargo to use" "^$scratch/machine/cargo\$"
script cargo 'echo "cargo 1.65.0"'
mkdir -p .cargo/bin
(sed 's/1.65.0/1.99.0/' machine/cargo >.cargo/bin/cargo; chmod 755 .cargo/bin/cargo)
asked cargo
says "that of rustup, where Debian's comes first and is too old" "^$scratch/.cargo/bin/cargo\$"

# ------------------------------------------------------------------------------------------------------------ skipped

# A plain chroot cannot have a private network either, whoever asks.
mkdir plain
(cd plain && printf '#!/bin/sh\nexit 1\n' >unshare && chmod 755 unshare)
for script in capture pairs netid; do
    if PATH=$scratch/plain:$PATH bash "$here/$script.sh" >said 2>&1 && [ "$(grep -c '^skip .*(.*)$' said)" -eq 1 ] && ! grep -q '^ok' said; then
        ok "$script.sh says what it skips without a private network"
    else
        FAIL "$script.sh says what it skips without a private network" said
    fi
done
closing
