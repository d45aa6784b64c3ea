#!/usr/bin/env bash
# Tests of the CPU's layers on an emulated machine of two NUMA nodes, for those who have none:
#
#     tools/numa_check.sh
#
# Makes a root file system of the test programs and their libraries, libtbbbind among them, and
# starts it with Debian's kernel in qemu: four processors, two a node, AVX2 at most. Takes two
# minutes after the build. Installs nothing: apt-get install qemu-system-x86 busybox-static cpio
# libtbbbind-2-5. Fetches Debian's kernel (70 MB) once.
set -euo pipefail
cd "$(dirname "$0")/.."

for program in qemu-system-x86_64 busybox cpio apt-get dpkg; do
  if ! command -v $program > /dev/null; then
    echo "numa_check: no $program; see the head of this script" >&2
    exit 1
  fi
done
bind=$(ldconfig -p | awk '/libtbbbind_2_5.so.3 /{print $NF}')
if [ -z "$bind" ]; then
  echo "numa_check: no libtbbbind, by which oneTBB finds nodes: apt-get install libtbbbind-2-5" >&2
  exit 1
fi

work=$PWD/build/numa root=$PWD/build/numa/root
mkdir -p "$work"
if ! ls "$work"/kernel/boot/vmlinuz-* > /dev/null 2>&1; then
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/{print $2}')
  (cd "$work" && apt-get download -qq "$package" && dpkg -x "$package"_*.deb kernel)
fi

programs=(runtime_test moe_ops_test moe_threads_test)
cmake --preset check --log-level=WARNING
cmake --build --preset check --target "${programs[@]}"

rm -rf "$root"
mkdir -p "$root"/{bin,lib,lib64,proc,sys,tmp}
cp "$(command -v busybox)" "$root/bin"
for applet in sh mount poweroff; do ln -s busybox "$root/bin/$applet"; done
for program in "${programs[@]}"; do
  strip "build/check/tests/bin/$program" -o "$root/bin/$program"
done
# All in one folder: oneTBB looks for libtbbbind where it lies itself.
cp -L "$bind" "$root/lib"
ldd "${programs[@]/#/build/check/tests/bin/}" "$bind" |
  awk '$2 == "=>" {print $3} $1 ~ /^.lib64/ {print $1}' | sort -u |
  while read -r library; do
    case $library in
      /lib64/*) cp -L "$library" "$root/lib64" ;;
      *) cp -L "$library" "$root/lib" ;;
    esac
  done

cat > "$root/init" << 'INIT'
#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
echo 0 > /proc/sys/kernel/numa_balancing
export LD_LIBRARY_PATH=/lib
run() {
  echo "== $*"
  "$@" --gtest_color=no && echo "numa_check: passed"
}
run runtime_test --gtest_brief=1 --gtest_filter='NodePart*:OnNodes*'
run moe_ops_test --gtest_filter='StripLoop*:StripPlaces*'
run moe_ops_test --gtest_brief=1 --gtest_filter='Modes/GroupedGemm.*'
run moe_threads_test --gtest_brief=1
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) > "$work/initrd"

timeout 900 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -m 3G -smp 4,sockets=2,cores=2 \
  -object memory-backend-ram,id=m0,size=1536M -object memory-backend-ram,id=m1,size=1536M \
  -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 \
  -kernel "$work"/kernel/boot/vmlinuz-* -initrd "$work/initrd" \
  -append "console=ttyS0 quiet panic=-1" -nographic -no-reboot < /dev/null | tee "$work/log" |
  sed -n '/== runtime_test/,$p'
passed=$(grep -c '^numa_check: passed' "$work/log" || true)
if grep -q 'SKIPPED.*Strip' "$work/log" || [ "$passed" -ne 4 ]; then
  echo "numa_check: a test failed, or skipped as oneTBB found one node ($work/log)" >&2
  exit 1
fi
