#!/usr/bin/env bash
# Makes the Debian package and tries it in a chroot of Debian 12 that has nothing of this machine:
#
#     tools/test_package.sh
#
# Installs it there with apt, builds the C example with pkg-config and a C++ program with
# find_package(narrowfloat), runs both, and quantizes a checkpoint with the program. Needs root,
# debootstrap, dpkg-dev and Debian's mirror; the chroot, 700 MB, goes to build/package/chroot and is
# made once.
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/package chroot=$PWD/build/package/chroot
for program in debootstrap dpkg-shlibdeps; do
  if ! command -v $program > /dev/null; then
    echo "test_package: no $program; apt-get install debootstrap dpkg-dev" >&2
    exit 1
  fi
done
if [ "$(id -u)" -ne 0 ]; then
  echo "test_package: chroot needs root" >&2
  exit 1
fi

cmake --preset package --log-level=WARNING
cmake --build --preset package
rm -f $build/*.deb
cpack --preset package > /dev/null
package=$(ls $build/*.deb)
dpkg-deb --info "$package"

if [ ! -f "$chroot/made" ]; then
  rm -rf "$chroot"
  debootstrap --variant=minbase --include=cmake,g++,make,pkgconf bookworm "$chroot" > "$chroot.log"
  touch "$chroot/made"
fi
inside() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive chroot "$chroot" "$@"
}
inside apt-get remove -qq -y -o Dpkg::Use-Pty=0 narrowfloat > /dev/null 2>&1 || true
rm -rf "$chroot/trial"
mkdir -p "$chroot/trial"
cp "$package" "$chroot/trial/narrowfloat.deb"
cp -r examples models/tiny-moe "$chroot/trial"
inside apt-get install -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends /trial/narrowfloat.deb > /dev/null
inside ldconfig -p | grep -q 'libnarrowfloat\.so\.'

inside sh -euc 'cd /trial
  cc -std=c99 examples/05_c_api.c $(pkg-config --cflags --libs narrowfloat) -lm -o c_api
  ./c_api
  cmake -S examples -B build > /dev/null
  cmake --build build --target example_01_roundtrip > /dev/null
  build/01_roundtrip
  narrowfloat quantize tiny-moe nvfp4 --to nvfp4
  narrowfloat check nvfp4
  narrowfloat-bench --version > /dev/null
  test -s /usr/share/doc/narrowfloat/THIRD_PARTY_LICENSES.txt
  apt-get remove -qq -y -o Dpkg::Use-Pty=0 narrowfloat > /dev/null
  test -z "$(ls -d /usr/lib/*/libnarrowfloat* /usr/include/narrowfloat 2> /dev/null)"'
echo "$package: installed, used and removed in a chroot"
