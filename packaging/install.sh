#!/bin/sh
# install.sh install|uninstall: the one list of what `make install` installs and `make uninstall` removes. The Makefile
# gives the places, and in STAGE what is made for them: rpcrdma-run and rpcrdma.pc.
#
# An existing rpcrdma.conf belongs to its owner: it is never replaced, nor removed once it was changed.
set -eu
cd "$(dirname "$0")/.."
root=${DESTDIR:-}
own_folders="$DOCDIR/examples $DOCDIR/docs/pictures $DOCDIR/docs $DOCDIR/bench $DOCDIR"

# each COMMAND: calls COMMAND MODE SOURCE TARGET for every file.
each() {
    "$1" 755 build/rpcrdma "$BINDIR/rpcrdma"
    "$1" 755 "$STAGE/rpcrdma-run" "$BINDIR/rpcrdma-run"
    "$1" 644 build/librpcrdma.so.0 "$LIBDIR/librpcrdma.so.0"
    "$1" link librpcrdma.so.0 "$LIBDIR/librpcrdma.so"
    "$1" 644 "$STAGE/rpcrdma.pc" "$LIBDIR/pkgconfig/rpcrdma.pc"
    "$1" 644 include/rpcrdma.h "$INCLUDEDIR/rpcrdma.h"
    for page in docs/*.[1-8]; do
        "$1" 644 "$page" "$MANDIR/man${page##*.}/${page##*/}"
    done
    for page in build/generated/man1/*.1; do
        # rpcrdma-run has a page of its own.
        [ ! -e "$page" ] || [ -e "docs/${page##*/}" ] || "$1" 644 "$page" "$MANDIR/man1/${page##*/}"
    done
    "$1" 644 build/generated/completions/rpcrdma.bash "$BASHCOMPDIR/rpcrdma"
    "$1" 644 build/generated/completions/_rpcrdma "$ZSHCOMPDIR/_rpcrdma"
    "$1" 644 build/generated/completions/rpcrdma.fish "$FISHCOMPDIR/rpcrdma.fish"
    # In the same folders as here, for the links between them.
    for page in README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs/*.md docs/pictures/*.svg bench/results.txt bench/results.svg; do
        "$1" 644 "$page" "$DOCDIR/$page"
    done
    for example in packaging/rpcrdma.conf packaging/service.conf examples/hello.c examples/fileservice/*; do
        "$1" 644 "$example" "$DOCDIR/examples/${example##*/}"
    done
}

# folder FOLDER: creates it. An existing folder keeps its permissions, which may be those of a group.
folder() { [ -d "$1" ] || $INSTALL -d -m 755 "$1"; }

put() {
    folder "$root${3%/*}"
    case $1 in
    link) ln -sf "$2" "$root$3" ;;
    *) $INSTALL -m "$1" "$2" "$root$3" ;;
    esac
}
take() { rm -f "$root$3"; }

# leave FOLDER: removes it if it is empty; in a stage also its parents that are then empty.
leave() {
    [ -d "$root$1" ] || return 0
    if [ -n "$root" ]; then
        (cd "$root/" && rmdir -p --ignore-fail-on-non-empty "${1#/}")
    else
        rmdir --ignore-fail-on-non-empty "$1"
    fi
}
leave_folder_of() { [ -z "$root" ] || leave "${3%/*}"; }

config=$root$SYSCONFDIR/rpcrdma.conf
case ${1:-} in
install)
    each put
    if [ -e "$config" ] || [ -L "$config" ]; then
        cmp -s packaging/rpcrdma.conf "$config" || echo "$config was there, and is left as it is"
    elif ! folder "${config%/*}" || ! [ -w "${config%/*}" ]; then
        echo "$config is not made: the folder cannot be written to; the library does without"
    else
        $INSTALL -m 644 packaging/rpcrdma.conf "$config"
    fi
    ;;
uninstall)
    # Compared with what was installed, which may be of another version than this checkout.
    if cmp -s "$root$DOCDIR/examples/rpcrdma.conf" "$config"; then
        rm -f "$config"
        [ -z "$root" ] || leave "$SYSCONFDIR"
    elif [ -e "$config" ]; then
        echo "$config was changed, and stays"
    fi
    each take
    # The generated pages may no longer be in build/.
    for page in "$root$MANDIR"/man1/rpcrdma.1 "$root$MANDIR"/man1/rpcrdma-*.1; do rm -f "$page"; done
    each leave_folder_of
    for folder in $own_folders; do leave "$folder"; done
    ;;
*)
    echo "usage: install.sh install|uninstall" >&2
    exit 2
    ;;
esac
