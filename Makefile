# make              the library: build/librpcrdma.so.0
# make install      PREFIX=/usr/local, LIBDIR, INCLUDEDIR, BINDIR, MANDIR, DOCDIR, SYSCONFDIR=/etc, BASHCOMPDIR, ZSHCOMPDIR,
#                   FISHCOMPDIR; DESTDIR is respected
# make uninstall    takes away what install has installed: with the same variables
# make deb          packages for this Debian: build/packages
# make rpm          the same for rpmbuild
# make help         this list
# make demo         copies files over tcp and over RDMA with the same binaries; calls clients back
# make nfs3         the example NFS server and client: build/nfs3/nfs3d and nfs3
# make nfs41        the example NFS version 4.1 client and server, with calls back: build/nfs41/nfs41 and nfs41d
# make check        what every change must pass
# make check-long   check, and what takes longer: an hour
# make soak MINUTES=n DEVICE=iwarp|local|rxe|siw   honest clients and servers among faults
# make check-fresh  the README's commands on minimal systems of their own: needs root and a network; an hour and a half
# make check-bad-peers   every corruption of every byte of a peer's frames: some minutes
# make check-sanitizers   the library itself under AddressSanitizer and ThreadSanitizer: ten minutes, and Rust's sources
# make check-schedules   schedules of threads that wait and serve, tried one after the other: a minute and a build
# make fuzz         SECONDS=60: each target of fuzz/ for so long (fuzz/README.md)
# make check-planted     plants known defects, and sees them found: half an hour
# make simulate     CALLS=n SEED=s: engines over a simulated network; 100000 calls a second
# make check-vm     against the kernel's NFS/RDMA, in a guest that tests/vm/setup.sh prepares; KERNEL=6.1, 6.12, 7.3: with the
#                   newest of these that Debian has, which is prepared then
# make bench        measures: bench/results.txt, .json, .svg; REPORT=FILE.txt for others
# make pictures     draws how calls travel: docs/pictures
# make bench-instructions  counts instructions per call (callgrind)
#
# `make demo` and `make check` do all the set-up: tests/packages.sh installs what is missing, or names it in one line.
#
# The linking is done here and not by cargo: only a version script can give the interposed functions libtirpc's symbol
# version, and rustc passes one of its own.

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
BINDIR ?= $(PREFIX)/bin
MANDIR ?= $(PREFIX)/share/man
DOCDIR ?= $(PREFIX)/share/doc/rpcrdma
BASHCOMPDIR ?= $(PREFIX)/share/bash-completion/completions
ZSHCOMPDIR ?= $(PREFIX)/share/zsh/site-functions
FISHCOMPDIR ?= $(PREFIX)/share/fish/vendor_completions.d
# Where the library looks for its files, whatever PREFIX is.
SYSCONFDIR ?= /etc
# Rust from rustup, or Debian's cargo-web and rustc-web.
ifndef CARGO
CARGO := $(shell bash tests/packages.sh cargo)
endif
CARGOFLAGS ?= --locked
# With the crates beside the sources (packaging/release.sh makes that tarball) nothing is fetched.
ifneq ($(wildcard vendor),)
VENDORED := --offline --config packaging/vendor.toml
endif
# What is installed names no folder of the machine that built it. RUSTFLAGS would override what a config.toml says, so it is
# extended only if it is set.
CRATES := $(or $(CARGO_HOME),$(HOME)/.cargo)/registry/src
comma := ,
quoted = '$(subst ','\'',$(1))'
standard = $(shell CARGO=$(call quoted,$(CARGO)) RUSTC=$(call quoted,$(RUSTC)) bash tests/packages.sh sources)
ifdef RUSTFLAGS
as_installed = env RUSTFLAGS=$(call quoted,$(RUSTFLAGS) --remap-path-prefix=$(CURDIR)=. --remap-path-prefix=$(CRATES)=crates $(standard)) \
    $(CARGO) $(1) $(CARGOFLAGS) $(FEATURES) $(VENDORED)
else
as_installed = $(CARGO) $(1) $(CARGOFLAGS) $(FEATURES) $(VENDORED) --config \
    $(call quoted,build.rustflags=["--remap-path-prefix=$(CURDIR)=."$(comma) \
        "--remap-path-prefix=$(CRATES)=crates"$(if $(standard),$(comma) "$(standard)")])
endif
release = $(call as_installed,build)
# If the headers for adapters are missing, the library is built without adapters.
FEATURES := $(if $(findstring -features,$(CARGOFLAGS)),,$(shell bash tests/packages.sh features))
CC ?= cc
INSTALL ?= install

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
TARGET := $(or $(CARGO_TARGET_DIR),target)
SOURCES := Cargo.toml Cargo.lock $(shell find src -name '*.rs')
LIBRARY := build/librpcrdma.so.0
# Every test that is a script; the scripts named here are parts of others.
SCRIPTS := $(filter-out tests/defaults.sh tests/lib.sh tests/ns.sh tests/packages.sh tests/planted.sh,$(sort $(wildcard tests/*.sh)))
# The longest ones come first.
LONGEST := tests/late.sh tests/workers.sh tests/demo.sh tests/stat.sh tests/back.sh tests/exceptions.sh tests/loop.sh
SCRIPTS := $(foreach one,$(LONGEST),$(filter $(one),$(SCRIPTS))) $(filter-out $(LONGEST),$(SCRIPTS))
# The tests that need a guest with a kernel of its own; the other scripts there are parts of the guest.
# The soak is not among them: `make soak DEVICE=rxe`. The kernel's siw does not survive it.
VM_SCRIPTS := $(filter-out tests/vm/guest.sh tests/vm/setup.sh tests/vm/vm.sh tests/vm/soak.sh,$(sort $(wildcard tests/vm/*.sh)))
LONG := $(filter-out tests/long/fresh.sh tests/long/minimal.sh,$(sort $(wildcard tests/long/*.sh)))

all: $(LIBRARY) build/librpcrdma.so build/rpcrdma-run build/rpcrdma

# How the library is built, and from what: if this has changed, what is there is stale, whatever its timestamp says.
# `make install` installs what was built, and need not be given the flags again.
BUILT_WITH := $(CARGO) $(CARGOFLAGS) $(FEATURES) RUSTFLAGS=$(RUSTFLAGS) $(TARGET); $(CC) $(CFLAGS) $(LDFLAGS); $(sort $(SOURCES))
ifneq ($(filter-out install uninstall help deb rpm,$(or $(MAKECMDGOALS),all)),)
ifneq ($(strip $(BUILT_WITH)),$(strip $(if $(wildcard build/flags),$(file <build/flags))))
build/flags: FORCE
endif
endif
build/flags:
	@mkdir -p build
	@printf '%s\n' $(call quoted,$(BUILT_WITH)) >$@

# A copy: cargo replaces its own library whenever it is called, with whatever flags.
build/librpcrdma.a: $(SOURCES) build/flags
	@bash tests/packages.sh build
	$(release) --release --lib
	@cp $(TARGET)/release/librpcrdma.a $@

# --whole-archive: only the version script refers to the exported functions; --gc-sections removes the rest.
# Without -ltirpc, which is looked up when it is needed (src/tirpc/library.rs); on x86-64 nothing refers to -lgcc_s either
# (src/unwind.rs). So a program that makes no RPC loads nothing but this library.
# -z nodelete: libtirpc keeps pointers to our operations. -z defs: a missing symbol is an error here, not in a program.
$(LIBRARY): build/librpcrdma.a src/exports.map
	$(CC) -shared -o $@ -Wl,-soname,librpcrdma.so.0 \
	    -Wl,--whole-archive $< -Wl,--no-whole-archive \
	    -Wl,--version-script=src/exports.map -Wl,--gc-sections \
	    -Wl,-z,nodelete -Wl,-z,defs -Wl,-z,now -Wl,-z,relro -Wl,--build-id $(LDFLAGS) \
	    -Wl,--as-needed -lgcc_s -lrt -lpthread -ldl -lc

build/librpcrdma.so: $(LIBRARY)
	ln -sf librpcrdma.so.0 $@

# rpcrdma-run knows where the library is installed, so it is compiled for each place.
compile_run = $(CC) -O2 -Wall -Wextra $(CPPFLAGS) $(CFLAGS) -D_GNU_SOURCE -DLIBDIR='"$(LIBDIR)"' -o $(1) rpcrdma-run.c $(LDFLAGS) -ldl

build/rpcrdma-run: rpcrdma-run.c build/flags
	$(call compile_run,$@)

# The command, with its manual pages and completions (build/generated).
build/rpcrdma: $(SOURCES) $(shell find tool -name '*.rs') tool/Cargo.toml docs/rpcrdma-run.1 build/flags
	$(release) --profile tool -p rpcrdma-tools
	@cp $(TARGET)/tool/rpcrdma $@
	@rm -rf build/generated && $@ generate build/generated

places = DESTDIR='$(DESTDIR)' LIBDIR='$(LIBDIR)' INCLUDEDIR='$(INCLUDEDIR)' BINDIR='$(BINDIR)' MANDIR='$(MANDIR)' \
    DOCDIR='$(DOCDIR)' SYSCONFDIR='$(SYSCONFDIR)' BASHCOMPDIR='$(BASHCOMPDIR)' ZSHCOMPDIR='$(ZSHCOMPDIR)' \
    FISHCOMPDIR='$(FISHCOMPDIR)' INSTALL='$(INSTALL)'

# What depends on the place is made in a temporary folder: the user who installs need not be the one who builds.
install: all
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && \
	$(call compile_run,"$$made/rpcrdma-run") && \
	sed -e 's|@LIBDIR@|$(LIBDIR)|' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' -e 's|@VERSION@|$(VERSION)|' \
	    pkgconfig/rpcrdma.pc.in >"$$made/rpcrdma.pc" && \
	$(places) STAGE="$$made" sh packaging/install.sh install

uninstall:
	@$(places) STAGE=/nowhere sh packaging/install.sh uninstall

deb rpm:
	@bash packaging/build.sh $@ build/packages

help:
	@sed -n '/^# make /!{/^#  /!q};s/^# //p' $(firstword $(MAKEFILE_LIST))

# In a separate make, which finds what has just been installed.
demo:
	@bash tests/packages.sh demo
	@$(MAKE) --no-print-directory demo-here
demo-here: all
	bash examples/demo.sh
	bash examples/watch/demo.sh

nfs3:
	$(MAKE) -C examples/nfs3 OUT=$(CURDIR)/build/nfs3

nfs41: all
	$(MAKE) -C examples/nfs41 OUT=$(CURDIR)/build/nfs41

# The library is linked on one processor; the command is compiled meanwhile.
check:
	@bash tests/packages.sh check
	@$(MAKE) --no-print-directory -j2 all nfs3 nfs41
	@$(MAKE) --no-print-directory check-here
# Two at a time: most tests wait for something. valgrind and the other C tests take as long as what cargo does. An ordinary
# user's tests use the same ports, and run one after the other.
check-here: all nfs3 nfs41
	@$(MAKE) --no-print-directory -j$(if $(filter 0,$(shell id -u)),2,1) check-c-all check-beside $(addprefix script/,$(SCRIPTS))

check-beside:
	@$(MAKE) --no-print-directory IN_ORDER=yes check-source check-rust

check-c-all:
	@$(MAKE) --no-print-directory IN_ORDER=yes check-exports check-valgrind check-c

# A script, whose output does not mix with another's. A make inside it is independent of this one.
script/%: all nfs3 nfs41
	@log=$$(mktemp) && trap 'rm -f "$$log"' EXIT; \
	env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL bash $* >"$$log" 2>&1 </dev/null; status=$$?; \
	echo "== $*"; cat "$$log"; exit $$status

# The cargo tests need the library: bad_peers preloads it.
check-source: all
	@if $(CARGO) fmt --version >/dev/null 2>&1; then echo "$(CARGO) fmt --check"; $(CARGO) fmt --all --check; \
	    else echo "skip  rustfmt (not installed)"; fi
	@if $(CARGO) clippy --version >/dev/null 2>&1; then \
	    echo "$(CARGO) clippy"; $(CARGO) clippy $(CARGOFLAGS) $(FEATURES) --all-targets -- -D warnings && \
	    echo "$(CARGO) clippy, of tool/" && \
	    $(CARGO) clippy $(CARGOFLAGS) $(FEATURES) -p rpcrdma-tools --all-targets -- -D warnings; \
	    else echo "skip  clippy (not installed)"; fi
	@if $(CARGO) fmt --version >/dev/null 2>&1; then $(CARGO) fmt --manifest-path fuzz/Cargo.toml --check; fi
	@if $(CARGO) clippy --version >/dev/null 2>&1; then \
	    echo "$(CARGO) clippy, of fuzz/"; $(CARGO) clippy $(FUZZ) --all-targets -- -D warnings; fi
	+RUSTDOCFLAGS=-Dwarnings $(CARGO) doc $(CARGOFLAGS) $(FEATURES) --no-deps
	+$(schedules) $(CARGO) check --profile test $(in_schedules)

# The command's tests, with the crates of the command: to optimise them takes longer than they do.
unoptimised = --config profile.tool.package.rpcrdma-tools.opt-level=0

# After the library is built: some tests preload it.
check-rust: all
	+bash tests/defaults.sh $(CARGO) test $(CARGOFLAGS) $(FEATURES)
	+bash tests/defaults.sh $(call as_installed,test) --profile tool -p rpcrdma-tools $(unoptimised)
	+bash tests/defaults.sh $(CARGO) test $(FUZZ)

# Replays what fuzzing has found and reached with the installed compiler, without libFuzzer and sanitizers. The crates are those
# of the library's tests, compiled once.
FUZZ = --manifest-path fuzz/Cargo.toml --no-default-features $(if $(FEATURES),,--features verbs) --locked --target-dir $(TARGET)

fuzz:
	CARGO="$(CARGO)" bash fuzz/run.sh $(or $(SECONDS),60)

check-exports: all
	c-tests/exports.sh $(LIBRARY)

check-c: all
	bash c-tests/check.sh tcp redirect rdma placed two threads local linked asan

check-c-long: all
	bash c-tests/check.sh local-threads local-asan local-valgrind helgrind

# Separate builds, with an unstable switch of rustc.
check-sanitizers:
	bash c-tests/sanitized.sh address
	bash c-tests/sanitized.sh thread

check-valgrind: all
	bash c-tests/check.sh valgrind

check-bad-peers: all
	BAD_PEERS=full $(CARGO) test $(CARGOFLAGS) $(FEATURES) --test bad_peers

# A separate build: other locks, and no adapters. `make check` only checks that it compiles.
schedules = RUSTFLAGS="--cfg shuttle"
in_schedules = $(filter-out --no-default-features,$(CARGOFLAGS)) --no-default-features --target-dir $(TARGET)/schedules --lib
check-schedules:
	$(schedules) $(CARGO) test $(in_schedules) schedules

# A given seed is replayed step by step; a seed that fails is named.
simulate:
	SIMULATE_CALLS=$(CALLS) SIMULATE_SEED=$(SEED) $(CARGO) test $(CARGOFLAGS) $(FEATURES) --release --lib -- \
	    --ignored --exact --nocapture connection::tests::simulation::as_many_calls_as_are_told

# Plants defects on purpose, each of which has to be found.
check-planted:
	bash tests/planted.sh

check-long: check
	@$(MAKE) --no-print-directory check-long-here
check-long-here: check-bad-peers check-schedules check-c-long check-sanitizers
	$(CARGO) test $(CARGOFLAGS) $(FEATURES) --release --lib -- --ignored --skip on_a_device
	@for script in $(LONG); do echo "== $$script"; bash $$script || exit 1; done

# MINUTES of mixed calls among faults, over DEVICE: iwarp or local; rxe or siw in a guest.
MINUTES ?= 1
DEVICE ?= iwarp
soak: all $(if $(filter rxe siw,$(DEVICE)),nfs3 nfs41)
ifneq ($(filter rxe siw,$(DEVICE)),)
	SOAK_SECONDS=$$(($(MINUTES) * 60)) bash tests/vm/soak.sh verbs/$(DEVICE)
else
	bash tests/long/soak.sh $(MINUTES) $(DEVICE)
endif

check-fresh:
	bash tests/long/fresh.sh

check-vm: all nfs3 nfs41
ifneq ($(KERNEL),)
	bash tests/vm/setup.sh $(KERNEL)
endif
	@export KERNEL=$(KERNEL); failed=; for script in $(VM_SCRIPTS); do echo "== $$script"; bash $$script || failed="$$failed $$script"; done; \
	    [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

# The table, its figures and their picture: bench/results.txt, .json and .svg, or others.
REPORT ?= bench/results.txt
bench: all
	bash bench/bench.sh $(REPORT)

# How calls travel: docs/pictures.
pictures: all
	bash docs/pictures.sh

bench-instructions: all
	bash bench/instructions.sh

clean:
	$(CARGO) clean
	rm -rf build

.PHONY: all install uninstall deb rpm help demo demo-here nfs3 nfs41 check check-here check-beside check-c-all check-source check-rust check-exports \
    check-c check-c-long check-sanitizers check-valgrind check-long check-long-here check-fresh check-bad-peers \
    check-schedules check-vm bench bench-instructions clean pictures soak fuzz simulate check-planted FORCE
.DELETE_ON_ERROR:
ifdef IN_ORDER
.NOTPARALLEL:
endif
