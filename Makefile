# Two of these are for everybody: `make up` runs a whole cloud on this host, `make test` runs what CI runs.
SHELL := /bin/bash
PROTOS := $(shell find protos -name '*.proto' | sort)
DIR := .trivet
# Flags of bin/up, which a second cloud on the same host needs; see e2e/up.
UP_FLAGS :=
GUEST := .build/guest
# The version of the programs, which their command or flag `version` prints.
VERSION := $(shell .ci/version)
STAMP := -X github.com/trivet-cloud/trivet/shared/version.stamped=$(VERSION)

# Debian packages that are needed to run a cloud here, and more to test it.
RUN_PACKAGES := qemu-system-x86 ovmf swtpm iproute2 iptables nftables $(shell cat images/guest/packages)
CEPH_PACKAGES := ceph-mon ceph-osd ceph-common librbd-dev librados-dev qemu-block-extra
TEST_PACKAGES := $(RUN_PACKAGES) $(CEPH_PACKAGES) protobuf-compiler libprotobuf-dev ipset e2fsprogs util-linux systemd curl openssl cloud-init conntrack qemu-guest-agent sbsigntool isolinux xorriso prometheus man-db

.PHONY: up down wipe dev build packages guest gen check test sim soak compat robustness bench bench-kv bench-credit bench-network bench-storage bench-vm run-packages test-packages

up: run-packages build guest
	@bin/up $(UP_FLAGS) $(DIR) bin $(GUEST)

down:
	@[ -x bin/up ] || CGO_ENABLED=0 go build -trimpath -o bin/up ./e2e/up
	@bin/up -down $(UP_FLAGS) $(DIR)

wipe: down
	rm -rf $(DIR)

# Static programs; each is written only when it changed, so that `up` restarts only what was rebuilt. trivet-rbd links
# librbd and is built only where its header files are installed.
build:
	@mkdir -p bin
	CGO_ENABLED=0 go build -trimpath -ldflags "$(STAMP)" -o bin/trivet-controlplane ./controlplane
	CGO_ENABLED=0 go build -trimpath -ldflags "$(STAMP)" -o bin/trivet-nodeagent ./nodeagent
	CGO_ENABLED=0 go build -trimpath -ldflags "$(STAMP)" -o bin/trivet ./cli
	CGO_ENABLED=0 go build -trimpath -ldflags "$(STAMP)" -o bin/trivet-dev ./e2e/dev
	CGO_ENABLED=0 go build -trimpath -o bin/up ./e2e/up
	@if [ -e /usr/include/rbd/librbd.h ]; then \
		CGO_ENABLED=1 go build -trimpath -tags ceph,pacific -o bin/trivet-rbd ./nodeagent/rbd/trivet-rbd; \
	else \
		echo "bin/trivet-rbd is not built, because librbd-dev is not installed: hosts serve no RBD volumes"; \
	fi

# dev runs a cloud of one member and one host until it is interrupted.
dev: run-packages build guest
	@bin/trivet-dev --guest $(GUEST)

# packages writes Debian packages, with programs that have no debugging information.
PACKAGES := .build/packages
packages:
	@mkdir -p $(PACKAGES)/bin
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $(STAMP)" -o $(PACKAGES)/bin/trivet-controlplane ./controlplane
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $(STAMP)" -o $(PACKAGES)/bin/trivet-nodeagent ./nodeagent
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $(STAMP)" -o $(PACKAGES)/bin/trivet ./cli
	CGO_ENABLED=0 go build -trimpath -ldflags "-s -w $(STAMP)" -o $(PACKAGES)/bin/trivet-dev ./e2e/dev
	@if [ -e /usr/include/rbd/librbd.h ]; then \
		CGO_ENABLED=1 go build -trimpath -tags ceph,pacific -ldflags "-s -w" -o $(PACKAGES)/bin/trivet-rbd ./nodeagent/rbd/trivet-rbd; \
	fi
	@rm -f $(PACKAGES)/*.deb
	@packaging/build $(PACKAGES)/bin $(PACKAGES) $(VERSION)

guest: run-packages
	@images/guest/build $(GUEST)

run-packages:
	@.ci/packages $(RUN_PACKAGES)

test-packages:
	@.ci/packages $(TEST_PACKAGES)

# gen writes the .pb.go files beside their .proto; .ci/check writes them elsewhere and compares.
GEN_OUT := protos
gen:
	@mkdir -p .build/bin
	@go build -o .build/bin/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc
	@PATH="$(CURDIR)/.build/bin:$$PATH" protoc -I protos \
		--go_out=$(GEN_OUT) --go_opt=paths=source_relative \
		--go-grpc_out=$(GEN_OUT) --go-grpc_opt=paths=source_relative \
		$(PROTOS:protos/%=%)

# check: generated code in step, vet, staticcheck, formatting, import arrows.
check: test-packages
	.ci/check

# test runs the same tests as CI. It prints a line for each part, and the number of tests at the end. The compiler does
# not collect garbage until it uses an eighth of the host's memory, which saves a quarter of its processor time. The
# compiler has a lower priority than the tests that run at the same time, because some tests depend on real time.
COMPILER_KIB = $(shell awk '/^MemTotal:/ {print int($$2 / 8)}' /proc/meminfo)
test: export GOFLAGS = $(shell go env GOFLAGS) '-toolexec=nice -n 10 env GOGC=off GOMEMLIMIT=$(COMPILER_KIB)KiB'
test: test-packages build guest
	.ci/test

# sim runs more of ring (a), then of ring (b): make sim SEEDS=20000 SECONDS=3600
SEEDS := 10000
SECONDS := 600
sim:
	TRIVET_SIM_SEEDS=$(SEEDS) go test ./controlplane/sim -run RingA -v -timeout 0
	TRIVET_SIM_SECONDS=$(SECONDS) go test ./controlplane/sim -run RingB -v -timeout 0

# soak compares ten million commands with the model of the credit ledger, and a hundred thousand through the store. It
# applies a packet filter for a thousand ports, compares the verdicts of the packet filters of two hundred random VPCs
# with the policy, and applies a hundred random states of external networks and of peerings. It starts a thousand ports
# under traffic, revokes a thousand permissions, repairs changes by hand among a thousand ports, and kills and upgrades
# the agent of a thousand ports. With each driver of volumes, it makes two hundred volumes, attaches each to a guest,
# detaches and deletes it. It uploads an image of 2 GiB. Then clients make twenty thousand calls while members are
# killed, cut off and given wrong clocks, also with mutants.
soak:
	TRIVET_LEDGER_COMMANDS=10000000 TRIVET_LEDGER_SEEDS=1000 go test ./controlplane/money/credit/ledger -run Model -v -timeout 0
	TRIVET_CREDIT_COMMANDS=100000 go test ./controlplane/money/credit -run RecordsMatchTheModel -v -timeout 0
	TRIVET_FIREWALL_PORTS=1000 TRIVET_FIREWALL_VPCS=200 go test ./nodeagent/firewall -run 'ManyPorts|ChainsDecide' -v
	TRIVET_EDGE_STATES=100 go test ./nodeagent/edge -run RandomStates -v -timeout 0
	TRIVET_PEERING_STATES=100 go test ./nodeagent/peering -run RandomPeerings -v -timeout 0
	TRIVET_VPC_PORTS=1000 go test ./nodeagent/vpc -run 'PortsStartFiltered|Revocations|DriftAmongPorts' -v -timeout 0
	TRIVET_VPC_PORTS=1000 go test ./nodeagent -run RestartWithPorts -v -timeout 0
	TRIVET_VOLUME_ROUNDS=200 go test ./nodeagent/machine -run 'RoundsLeaveNothing|GuestsUseRBD' -v -timeout 0
	TRIVET_UPLOAD_MIB=2048 go test ./e2e -run 'ImageUpload$$' -v -count=1 -timeout 0
	TRIVET_HISTORY_OPS=20000 go test -tags long ./e2e -run 'CreditHistory|HistoryNoticesMutants' -v -count=1 -timeout 0

# compat runs the whole of etcd's own suite against the key-value store, of which test runs the quick part.
compat: test-packages build
	TRIVET_BIN=$(CURDIR)/bin COMPAT=all go -C controlplane/kv/compat test -v -count=1 -timeout 60m .

# robustness breaks trios in every way for SECONDS and checks what clients saw against etcd's model. Then it runs each
# failure at each point of a live migration three times, loses hosts with ten VMs on RBD volumes (one that is switched
# off, one that is cut off, and two at once with room for four of the VMs), and drains a host with 20 VMs.
robustness: test-packages build guest
	TRIVET_BIN=$(CURDIR)/bin ROBUSTNESS_SECONDS=$(SECONDS) go -C controlplane/kv/compat test -v -count=1 -tags long -timeout 0 ./robustness
	TRIVET_MIGRATION_ROUNDS=3 go test -tags long ./e2e -run 'MigrationFaults|MigrationWitness|LostHosts|DrainOfManyVMs' -v -count=1 -timeout 0

bench: run-packages build guest
	.ci/bench

# bench-kv measures the key-value store beside etcd.
bench-kv: run-packages build
	.ci/bench-kv

# bench-credit measures wallets beside PostgreSQL, and tokens beside others' libraries.
bench-credit: run-packages build
	.ci/bench-credit

# bench-network compares the networks of hosts with plain Linux, and measures the control plane with 10,000 ports.
bench-network: run-packages build guest
	.ci/bench-network

# bench-storage compares volumes and images with QEMU, QMP, qemu-img, cp and rbd(8) by hand.
bench-storage: test-packages build guest
	.ci/bench-storage

# bench-vm measures placements per second beside a naive scan of all hosts, migrations beside QEMU by hand and
# `virsh migrate`, the creation of 100 VMs at a fixed rate beside libvirt, and a cloud with 1,000 simulated hosts of which
# 50 die at once.
bench-vm: run-packages build guest
	.ci/bench-vm
	.ci/bench-migration
	.ci/bench -run rate,scale
