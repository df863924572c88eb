#!/bin/bash
# setup.sh: once per machine, for vm.sh: QEMU, Debian's kernel unpacked beside the host's own, and siw for it, which
# Debian does not build. As root, on Debian 12. Everything lands in $RPCRDMA_VM (~/.cache/rpcrdma-vm); packages are
# installed, the host's kernel and its modules are not touched.
set -eu
base=${RPCRDMA_VM:-$HOME/.cache/rpcrdma-vm}
export DEBIAN_FRONTEND=noninteractive
mkdir -p "$base"
cd "$base"
fail() { tail -n 20 setup.log >&2; exit 1; }
apt-get install -y -q --no-install-recommends qemu-system-x86 busybox-static kmod cpio zstd xz-utils make gcc iproute2 \
    rdma-core ibverbs-providers rpcbind nfs-common nfs-kernel-server git linux-source-6.1 >setup.log 2>&1 || fail
image=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-6/ { print $2; exit }')
version=${image#linux-image-}
if [ ! -e "kern/boot/vmlinuz-$version" ]; then
    rm -rf kern kern.tmp
    apt-get download -q "$image" >>setup.log 2>&1 || fail
    dpkg -x "$image"_*.deb kern.tmp
    [ -d kern.tmp/lib ] || mv kern.tmp/usr/lib kern.tmp/lib
    mv kern.tmp kern
    rm -f "$image"_*.deb
fi
if [ ! -e "extra/$version/siw.ko" ]; then
    apt-get install -y -q --no-install-recommends "linux-headers-$version" >>setup.log 2>&1 || fail
    rm -rf siw && mkdir -p siw "extra/$version"
    tar -xJf /usr/src/linux-source-6.1.tar.xz -C siw --strip-components=5 linux-source-6.1/drivers/infiniband/sw/siw
    make -C "/usr/src/linux-headers-$version" M="$base/siw" CONFIG_RDMA_SIW=m modules >>setup.log 2>&1 || fail
    strip --strip-debug siw/siw.ko
    cp siw/siw.ko "extra/$version/"
    rm -rf siw
fi
echo "the guest's kernel $version is ready in $base"
