# The commands of this project. `make help` lists them.

MACHINE_TOOLS := qemu-system-x86_64=qemu-system-x86 qemu-img=qemu-utils
BOOT_TOOLS := dnsmasq=dnsmasq-base ip=iproute2 openssl=openssl cpio=cpio zstd=zstd modprobe=kmod /usr/lib/ipxe/undionly.kpxe=ipxe /usr/lib/ipxe/qemu/pxe-virtio.rom=ipxe-qemu /usr/share/OVMF/OVMF_CODE_4M.fd=ovmf
TEST_TOOLS := $(BOOT_TOOLS) busybox=busybox-static nbdkit=nbdkit qemu-nbd=qemu-utils nbdinfo=libnbd-bin nbdcopy=libnbd-bin /usr/lib/python3/dist-packages/nbd.py=python3-libnbd fio=fio curl=curl mtype=mtools fsck.vfat=dosfstools mkntfs=ntfs-3g losetup=mount mkfs.ext4=e2fsprogs mkfs.nilfs2=nilfs-tools mkfs.xfs=xfsprogs mkfs.btrfs=btrfs-progs openssl=openssl sfdisk=fdisk parted=parted fstrim=util-linux python3=python3-minimal nginx=nginx-light iscsi-test-cu=libiscsi-bin iscsi-ls=libiscsi-bin /usr/lib/x86_64-linux-gnu/qemu/block-iscsi.so=qemu-block-extra chromium=chromium /usr/bin/pg_ctlcluster=postgresql promtool=prometheus swtpm=swtpm /usr/lib/shim/shimx64.efi.signed=shim-signed /usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed=grub-efi-amd64-signed
CARGO_DEB := 3.8.0
MDBOOK := 0.5.4
AZURITE := 3.37.0
AZURE_MGMT_COMPUTE := 39.0.0
CONSOLE_TOOLS := node=nodejs npm=npm
PEERS := qemu-system-x86_64=qemu-system-x86 ip=iproute2 tc=iproute2 nsenter=util-linux curl=curl qemu-nbd=qemu-utils qemu-storage-daemon=qemu-system-common nbdkit=nbdkit fio=fio tgtd=tgt iscsi-perf=libiscsi-bin

# Demos run a program that is compiled quickly, not for speed. HEADWATER names another one.
PROGRAM = $(if $(HEADWATER),,cargo build --locked --package headwater)

.DEFAULT_GOAL := help
.PHONY: help rust build deb deb-test image image-test book tutorials console console-check console-test guest demo boot-demo boot-test outlive fleet test compare streaming bench packing upgrade soak long filesystems conformance fuzz fuzz-keep clean desktop

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

rust:
	@xtask/need-rust

build: rust ## build the optimised binaries, target/release/headwater and headwater-study
	cargo build --release --locked --package headwater --package headwater-studies

# Or HEADWATER=target/debug/headwater, to work on the package alone.
deb: rust ## build the Debian packages of the server and for images of network boot, build/deb/headwater*.deb, and their debug symbols
	@xtask/need objcopy=binutils dpkg-shlibdeps=dpkg-dev gzip=gzip pydoc3=python3
	@[ "$$(build/tools/bin/cargo-deb --version 2>&1)" = "cargo-deb $(CARGO_DEB)" ] || CARGO_TARGET_DIR=build/tools/target cargo install --locked --version $(CARGO_DEB) --root build/tools cargo-deb
	$(if $(HEADWATER),,cargo build --release --locked --package headwater --package headwater-studies)
	HEADWATER=$(HEADWATER) packaging/deb/build

image: deb ## build an OCI image of the server with QEMU, build/image/headwater.tar, from the package of 'make deb'
	@xtask/need mmdebstrap=mmdebstrap
	packaging/image/build

image-test: image ## run the image of 'make image' in a container (as root)
	@xtask/need buildah=buildah skopeo=skopeo
	packaging/image/test

deb-test: deb ## install, upgrade, use and purge the packages of 'make deb' in clean Debian 12 and 13 (as root; 600 MB from Debian's mirror)
	@xtask/need mmdebstrap=mmdebstrap systemd-nspawn=systemd-container
	guest/build
	HEADWATER=$(HEADWATER) packaging/deb/test $(SUITES)

book: rust ## build the documentation as a book, build/book/html/index.html, and check its links
	@[ "$$(build/tools/bin/mdbook --version 2>&1)" = "mdbook v$(MDBOOK)" ] || CARGO_TARGET_DIR=build/tools/target cargo install --locked --version $(MDBOOK) --no-default-features --features search --root build/tools mdbook
	docs/build build/tools/bin/mdbook

tutorials: deb ## carry out the tutorials with the Debian guest, as root, and compare what is printed with the pages (half an hour without KVM)
	@xtask/need $(MACHINE_TOOLS) $(BOOT_TOOLS)
	docs/try $(or $(HEADWATER),target/release/headwater) $(PAGES)

console: ## build the web console into console/dist, which is checked in and becomes part of the program
	@xtask/need $(CONSOLE_TOOLS)
	console/build console/dist

console-check: ## check the types of the web console, and that console/dist is what its sources give, twice
	@xtask/need $(CONSOLE_TOOLS)
	console/check

console-test: ## the states of all screens of the web console in a browser: accessibility, policy, errors, 10,000 machines (7 minutes); pictures in build/console
	@xtask/need $(CONSOLE_TOOLS) chromium=chromium
	cd console && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	node console/test/states.mjs $(STATES)
	$(if $(STATES),,node console/test/many.mjs)

guest: ## build the Debian guest that demo and tests boot, into build/guest (kept for the next time)
	guest/build

demo: rust ## boot three machines from one image, overflow their RAM caches, reset one
	@xtask/need $(MACHINE_TOOLS)
	$(PROGRAM)
	guest/build
	demo/run

boot-demo: rust ## boot two diskless machines from the network, one by BIOS and one by UEFI, write to their disks, reboot them
	@xtask/need $(MACHINE_TOOLS) $(BOOT_TOOLS) debugfs=e2fsprogs
	$(PROGRAM)
	boot/run $(or $(HEADWATER),target/debug/headwater)

boot-test: rust ## the acceptance tests of network boot: BIOS, UEFI, HTTP boot, Secure Boot, DHCP servers (as root; a quarter of an hour): TESTS="bios secure"
	@xtask/need $(MACHINE_TOOLS) $(BOOT_TOOLS) debugfs=e2fsprogs mcopy=mtools syslinux=syslinux
	$(PROGRAM)
	boot/test $(or $(HEADWATER),target/debug/headwater) $(TESTS)

outlive: rust ## kill the daemon and the disk process, and upgrade that, while three machines write: they go on, and nothing is lost
	@xtask/need $(MACHINE_TOOLS)
	$(PROGRAM)
	guest/build
	demo/outlive

fleet: rust ## two controllers, PostgreSQL, two nodes: kill the controller and the database during a roll, and see machines and roll go on
	@xtask/need $(MACHINE_TOOLS) debugfs=e2fsprogs setpriv=util-linux /usr/bin/pg_ctlcluster=postgresql
	$(PROGRAM)
	guest/build
	demo/fleet

desktop: rust ## boot two Xfce desktops from one image, with Secure Boot, TPM and scratch disk, as root; pictures in build/desktop (half an hour without KVM)
	@xtask/need $(MACHINE_TOOLS) swtpm=swtpm /usr/share/OVMF/OVMF_CODE_4M.ms.fd=ovmf
	$(PROGRAM)
	demo/desktop

test: rust ## check everything: formatting, house rules, clippy, all tests, real guests
	@xtask/need $(MACHINE_TOOLS) $(TEST_TOOLS) $(CONSOLE_TOOLS)
	cd headwater/tests/oidc && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	cargo xtask test

compare: rust ## measure beside nbdkit, QEMU and the raw disk; table, JSON and plots in build/compare
	@xtask/need $(PEERS)
	cargo build --release --locked --package headwater --package headwater-measure
	target/release/headwater-measure $(ARGS)

streaming: rust ## boot the guest over a slow link, and while a server dies, seal it while it runs: a quarter of an hour; fails where a target is missed
	@xtask/need $(MACHINE_TOOLS) $(PEERS)
	guest/build
	cargo build --release --locked --package headwater --package headwater-measure
	target/release/headwater-measure --check --rounds 3 --only slow-link --only guest- --only seal-pause --out build/streaming --work-dir build/streaming/work $(ARGS)

bench: rust ## measure a volume alone, beside bare memory and the bare disk; table, and JSON in build/bench
	@mkdir -p build/bench
	$(if $(CASES),,HEADWATER_BENCH_DIR=$(CURDIR)/build/bench cargo bench --locked --package headwater-volume --bench engine $(ARGS))
	cargo run --release --locked --package headwater-volume --example figures -- \
	    --dir build/bench --json build/bench/figures.json $(or $(CASES),all) $(if $(AFTER),pack $(BEFORE) $(AFTER))

packing: rust ## how much more RAM holds of what a Debian guest changes in an update (the first time it is updated: half an hour)
	guest/update
	cargo run --release --locked --package headwater-volume --example figures -- pack build/guest/guest.raw build/guest/updated.raw

upgrade: rust ## what a version adds to a store after `apt upgrade` of Debian's last release (the first time: half an hour); fails above the target
	guest/update --upgrade
	cargo run --release --locked --package headwater-image --example upgrade_table -- build/guest-released/guest.raw build/guest-released/upgraded.raw --judge

soak: rust ## half an hour of load on eight volumes, with limits changed at random and a disk that fails
	HEADWATER_SOAK_SECONDS=$${SECONDS_TO_RUN:-1800} cargo test --release --locked --package headwater-volume --test soak -- --nocapture $(ARGS)

long: rust ## the tests of random operations, crashes and schedules at full length, of which `make test` runs an eighth; a guest under QEMU alone
	@xtask/need $(MACHINE_TOOLS) $(TEST_TOOLS)
	HEADWATER_LONG=1 cargo test --locked --package headwater-volume --package headwater-store --package headwater-writecache $(ARGS)
	HEADWATER_LONG=1 cargo test --locked --package headwater-writecache --features shuttle --test schedules $(ARGS)
	HEADWATER_LONG=1 cargo test --locked --package headwater --test it $(ARGS) -- disk_crash::
	guest/build
	cargo test --locked --package headwater-qemu --test debian $(ARGS)

filesystems: rust ## compare 200 random volumes of ext and 200 of NTFS with what the kernel and their tools read (as root): VOLUMES=200
	@xtask/need $(TEST_TOOLS)
	HEADWATER_VOLUMES=$(or $(VOLUMES),200) cargo test --locked --package headwater-filesystems --test it random_volumes -- --nocapture $(ARGS)

conformance: rust ## real NBD, iSCSI and vhost-user clients, domains of libvirt (as root), the Device conformance suite, guests that boot over iSCSI, Azure against Microsoft's emulator and SDKs
	@xtask/need $(MACHINE_TOOLS) $(TEST_TOOLS) $(CONSOLE_TOOLS)
	HEADWATER_VHOST_REQUESTS=200000 cargo test --locked --package headwater-testkit --package headwater-nbd --package headwater-iscsi \
	    --package headwater-fuse --package headwater-vhost-user
	guest/build
	cargo test --locked --package headwater-volume --test it conformance::
	cargo test --locked --package headwater --test vhost_user
	@xtask/need libvirtd=libvirt-daemon-system virsh=libvirt-clients virt-xml-validate=libvirt-clients xmllint=libxml2-utils unshare=util-linux
	cargo test --locked --package headwater --test libvirt
	cargo build --release --locked --package headwater
	guest/vhost-test target/release/headwater
	guest/newer-clients target/release/headwater
	cargo build --release --locked --package headwater-testkit --example cut_relay
	guest/iscsi-boot bios target/release/headwater target/release/examples/cut_relay
	guest/iscsi-boot uefi
	guest/iscsi-test target/release/headwater
	cargo build --release --locked --package headwater-attach --example device_suite
	guest/attach-test target/release/headwater ublk nbd client whose ends images kept
	[ -d build/azurite/$(AZURITE) ] || npm install --prefix build/azurite/$(AZURITE) --ignore-scripts --no-audit --no-fund --loglevel=error azurite@$(AZURITE)
	cargo build --release --locked --package headwater-azure --example upload_vhd
	node hosting/azure/azurite-test.mjs build/azurite/$(AZURITE) target/release/examples/upload_vhd
	@xtask/need go=golang-go pip3=python3-pip
	rm -f build/azure-bodies.jsonl
	HEADWATER_AZURE_KILLS=all HEADWATER_AZURE_BODIES=$(CURDIR)/build/azure-bodies.jsonl cargo test --locked --package headwater-azure
	cd testkit/azure/oracle && go run . $(CURDIR)/build/azure-bodies.jsonl
	[ -d build/azure-client/$(AZURE_MGMT_COMPUTE) ] || pip3 install --quiet --target build/azure-client/$(AZURE_MGMT_COMPUTE) azure-mgmt-compute==$(AZURE_MGMT_COMPUTE)
	cargo build --locked --package headwater-testkit-azure
	PYTHONPATH=build/azure-client/$(AZURE_MGMT_COMPUTE) python3 testkit/azure/client.py target/debug/headwater-testkit-azure

fuzz: rust ## fuzz the readers of formats and wires with coverage, TIME=60 seconds each, JOBS at a time, TARGETS="a b"
	@xtask/need g++=g++ qemu-img=qemu-utils
	fuzz/run $(or $(TIME),60) $(or $(JOBS),$$(nproc)) $(TARGETS)

fuzz-keep: rust ## take what fuzzing found interesting, and the record of its runs, into the tree
	fuzz/run keep

clean: ## remove what was built and measured, except the guest and what fuzzing found
	cargo clean
	rm -rf build/bench build/book build/compare build/deb build/demo build/fuzz/target build/image build/streaming
