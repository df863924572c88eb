#!/bin/bash
# setup.sh [KERNEL]: run once per machine, for vm.sh: gets QEMU, a Debian kernel unpacked beside the host's own, and siw for it,
# which Debian does not build. As root, on Debian 12. Everything goes to $RPCRDMA_VM (~/.cache/rpcrdma-vm); packages are
# installed, but the host's kernel and its modules are not touched.
#
# KERNEL is the beginning of a version, as in 6.12 or 7.3: the newest such kernel in bookworm, trixie or their backports is
# taken. Without it, Debian 12's own. For a kernel that this machine's apt does not know, siw is compiled in a small system of
# that release, which debootstrap creates.
set -eu
wanted=${1:-}
base=${RPCRDMA_VM:-$HOME/.cache/rpcrdma-vm}
export DEBIAN_FRONTEND=noninteractive LC_ALL=C
mkdir -p "$base/kernels"
cd "$base"
: >setup.log
fail() { tail -n 20 setup.log >&2; exit 1; }
logged() { "$@" >>setup.log 2>&1 || fail; }
logged apt-get install -y -q --no-install-recommends qemu-system-x86 busybox-static kmod cpio zstd xz-utils make gcc iproute2 \
    rdma-core ibverbs-providers rpcbind nfs-common nfs-kernel-server git debootstrap

# Packages are looked for and siw is compiled here, or in `root`, a system of another release.
root=
# objtool needs a /proc there.
at_root() {
    if [ -z "$root" ]; then "$@"; return; fi
    unshare --mount sh -c 'mount -t proc proc "$0/proc" && exec chroot "$0" "$@"' "$root" \
        env -i PATH="$PATH" LC_ALL=C DEBIAN_FRONTEND=noninteractive "$@"
}

# other_release RELEASE: creates `root`. Its apt gets packages from the same place as this machine's.
other_release() {
    local mirror
    root=$base/root-$1
    mirror=$(apt-get indextargets --format '$(ORIGIN)|$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        sed -n 's/^Debian|\(.*\) bookworm main$/\1/p' | head -n 1)
    mirror=${mirror:-http://deb.debian.org/debian}
    if [ ! -e "$root/ready" ]; then
        rm -rf --one-file-system "$root"
        logged debootstrap --variant=minbase "$1" "$root" "$mirror"
        printf 'deb %s %s main\n' "$mirror" "$1" "$mirror" "$1-backports" >"$root/etc/apt/sources.list"
        apt-config dump | grep -E '^Acquire::(https?::|Check-|Retries)' >"$root/etc/apt/apt.conf.d/90host" || true
        touch "$root/ready"
    fi
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    logged at_root apt-get -q update
}
newest() {
    at_root apt-cache search --names-only "^linux-image-${wanted//./\\.}[.+-].*-amd64\$" | cut -d ' ' -f 1 |
        grep -Ev -e '-(cloud|rt)-amd64$' | sort -V | tail -n 1
}
if [ -z "$wanted" ]; then
    image=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-6/ { print $2; exit }')
else
    image=$(newest)
    for release in bookworm trixie; do
        [ -z "$image" ] || break
        other_release $release
        image=$(newest)
    done
    [ -n "$image" ] || { echo "setup.sh: Debian has no kernel $wanted for bookworm or trixie" >&2; exit 1; }
fi
version=${image#linux-image-}

if [ ! -e "kernels/$version/ready" ]; then
    rm -rf "kernels/$version" kernel.tmp && mkdir kernel.tmp
    # Since 7.3 the image's files are in separate packages.
    mapfile -t packages < <(at_root apt-cache depends "$image" | awk '/Depends:/ { print $2 }' | grep -e "-$version\$" || true)
    tmp=$root/tmp/kernel
    rm -rf "$tmp" && mkdir -p "$tmp"
    for package in "$image" "${packages[@]}"; do
        logged at_root sh -c "cd ${tmp#"$root"} && apt-get download -q $package"
    done
    for file in "$tmp"/*.deb; do logged dpkg -x "$file" kernel.tmp; done
    rm -rf "$tmp"
    mkdir -p kernel.tmp/lib kernel.tmp/boot
    [ -d kernel.tmp/lib/modules ] || mv kernel.tmp/usr/lib/modules kernel.tmp/lib/
    [ -e "kernel.tmp/boot/vmlinuz-$version" ] || mv "kernel.tmp/lib/modules/$version/vmlinuz" "kernel.tmp/boot/vmlinuz-$version"
    touch kernel.tmp/ready
    mv kernel.tmp "kernels/$version"
fi
if [ ! -e "extra/$version/siw.ko" ]; then
    source=linux-source-$(sed 's/^\([0-9]*\.[0-9]*\).*/\1/' <<<"$version")
    logged at_root apt-get install -y -q --no-install-recommends "linux-headers-$version" "$source" make gcc xz-utils
    made=$root/tmp/siw
    rm -rf "$made" && mkdir -p "$made" "extra/$version"
    logged tar -xJf "$root/usr/src/$source.tar.xz" -C "$made" --strip-components=5 "$source/drivers/infiniband/sw/siw"
    logged at_root make -C "/usr/src/linux-headers-$version" M="${made#"$root"}" CONFIG_RDMA_SIW=m modules
    strip --strip-debug "$made/siw.ko"
    cp "$made/siw.ko" "extra/$version/"
    rm -rf "$made"
fi
echo "$version" >"kernel${wanted:+-$wanted}"
echo "the guest's kernel $version is ready in $base"
