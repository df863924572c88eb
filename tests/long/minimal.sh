# minimal.sh, sourced after tests/lib.sh: a minimal Debian 12, $base, to be copied; or the script skips and ends.
#
# It has nothing but git. debootstrap creates it once, and it is kept in $cache, which is $RPCRDMA_FRESH
# (~/.cache/rpcrdma-fresh); the packages that apt fetches there are kept in $cache/debs. apt uses the same sources as on this
# machine.
cache=${RPCRDMA_FRESH:-${XDG_CACHE_HOME:-$HOME/.cache}/rpcrdma-fresh}
# The library would take this variable for an unknown setting.
export -n RPCRDMA_FRESH
path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

[ "$(id -u)" -eq 0 ] || { skip "a fresh machine" "needs root"; closing; }
unshare --mount --pid --fork true 2>/dev/null || { skip "a fresh machine" "mounts are not allowed here"; closing; }
[ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || { skip "a fresh machine" "needs Debian on x86-64, for debootstrap"; closing; }
mkdir -p "$cache/debs/partial"

# The base system, created once. Its apt has the Debian sources of this machine's apt.
base=$cache/bookworm
sources=$(apt-get indextargets --format '$(ORIGIN)|deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 2>/dev/null |
    sed -n 's/^Debian|\(.* bookworm.*\)/\1/p' | sort -u)
mirror=$(awk '$3 == "bookworm" && $4 == "main" { print $2; exit }' <<<"$sources")
if [ ! -e "$base/ready" ]; then
    command -v debootstrap >/dev/null || apt-get -qq -y install --no-install-recommends debootstrap >"$scratch/log" 2>&1 ||
        { skip "a fresh machine" "debootstrap cannot be installed"; closing; }
    rm -rf --one-file-system "$base"
    debootstrap --variant=minbase --include=git bookworm "$base" "${mirror:-http://deb.debian.org/debian}" >"$scratch/log" 2>&1 ||
        { tail -n 3 "$scratch/log"; skip "a fresh machine" "debootstrap fails; is there a network?"; closing; }
    touch "$base/ready"
fi
echo "${sources:-deb http://deb.debian.org/debian bookworm main
deb http://deb.debian.org/debian bookworm-updates main
deb http://deb.debian.org/debian-security bookworm-security main}" >"$base/etc/apt/sources.list"
{
    apt-config dump 2>/dev/null | grep -E '^Acquire::(https?::|Check-|Retries)'
    echo 'APT::Keep-Downloaded-Packages "true";'
} >"$base/etc/apt/apt.conf.d/90host"
cp /etc/resolv.conf /etc/hosts "$base/etc/"
mkdir -p "$base/usr/local/share/ca-certificates"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp {} "$base/usr/local/share/ca-certificates/" \; 2>/dev/null
chroot "$base" env -i PATH=$path apt-get -qq update >"$scratch/log" 2>&1 ||
    { tail -n 3 "$scratch/log"; skip "a fresh machine" "apt finds no packages; is there a network?"; closing; }
