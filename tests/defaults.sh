#!/bin/bash
# defaults.sh COMMAND...: runs a command without this machine's settings and bindings: if /etc/rpcrdma.conf and
# /etc/rpcrdma.d exist, private mounts cover them for the command. Where mounts are not allowed, that is reported and the
# files take effect. tests/lib.sh runs each script like this.
if [ -n "${TEST_DEFAULTS:-}" ] || ! { [ -s /etc/rpcrdma.conf ] || [ -e /etc/rpcrdma.d ]; }; then
    export TEST_DEFAULTS=${TEST_DEFAULTS:-none}
    exec "$@"
fi
alone=(unshare --mount) back=()
if [ "$(id -u)" -ne 0 ]; then
    alone=(unshare --user --map-current-user --keep-caps --mount)
    back=(setpriv --inh-caps=-all --ambient-caps=-all)
fi
# What covers the others need not have a name once it is mounted.
cover='covered=$(mktemp -d) && mkdir "$covered/folder" && : >"$covered/file" && chmod -R a+rX "$covered" &&
    { [ ! -s /etc/rpcrdma.conf ] || mount --bind "$covered/file" /etc/rpcrdma.conf; } &&
    { [ ! -e /etc/rpcrdma.d ] || mount --bind "$covered/folder" /etc/rpcrdma.d; }
    status=$?
    rm -rf "$covered"
    [ $status -eq 0 ] || exit 125'
if "${alone[@]}" bash -c "$cover" 2>/dev/null; then
    export TEST_DEFAULTS=covered
    exec "${alone[@]}" bash -c "$cover; exec \"\$@\"" cover "${back[@]}" "$@"
fi
echo "defaults.sh: this machine's settings, in /etc, count in what follows: they cannot be covered here" >&2
export TEST_DEFAULTS=no
exec "$@"
