package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// faultyGuest is a guest with one disk that is moved between two hosts, with failures.
type faultyGuest struct {
	c    *networkCloud
	m    *machine
	id   string
	disk migrationDisk
	// source and target are the hosts of the present migration: indexes into networkCloud.hosts.
	source, target int
	witness        *witness
}

// newFaultyGuest boots a guest with one disk on a host. The guest is started again if its process dies.
func (c *networkCloud) newFaultyGuest(name, subnet string, disk migrationDisk) *faultyGuest {
	spec := disk.create(name)
	m := c.bootFrom(name, 0, func(r *vmv1.CreateVmRequest) {
		r.Metadata = map[string]string{"trivet/restart": "on-failure"}
		r.Spec.Disks = []*vmv1.DiskSpec{spec}
	}, &vmv1.NetworkSpec{SubnetId: subnet})
	_, err := c.vms.UpdateVm(c.context(time.Minute), &vmv1.UpdateVmRequest{
		VmId: m.vm.GetId(), Labels: map[string]string{"trivet/node-selector": ""}, // which boot has set
	})
	require.NoError(c.t, err)
	return &faultyGuest{c: c, m: m, id: m.vm.GetId(), disk: disk}
}

// ended waits until the VM is RUNNING without a migration, and returns its host.
func (g *faultyGuest) ended(within time.Duration) (host int) {
	err := lab.Until(g.c.context(within), "the migration has ended", func(ctx context.Context) error {
		r, err := g.c.admin.Operator.GetMigration(ctx, &operatorv1.GetMigrationRequest{VmId: g.id, OrgId: "default", ProjectId: "default"})
		if err != nil {
			return err
		}
		if phase := r.GetMigration().GetPhase(); phase != "" {
			return fmt.Errorf("it is in the phase %s", phase)
		}
		vm, err := g.c.vms.GetVm(ctx, &vmv1.GetVmRequest{VmId: g.id})
		if err != nil {
			return err
		}
		for i, id := range g.c.ids {
			if id == vm.GetNodeId() && vm.GetState() == vmv1.VmState_VM_STATE_RUNNING {
				host = i
				return nil
			}
		}
		return fmt.Errorf("it is %v on %s: %s", vm.GetState(), vm.GetNodeId(), vm.GetStatus().GetLastError())
	})
	if err != nil {
		for i, h := range g.c.hosts {
			text, _ := os.ReadFile(g.record(i))
			g.c.t.Logf("%s: QEMU %d, record %s", h.Name, g.qemu(i), text)
		}
	}
	require.NoError(g.c.t, err)
	return host
}

// settled waits until the guest answers on its host, and the other host has removed the VM.
func (g *faultyGuest) settled() {
	require.NoError(g.c.t, lab.Until(g.c.context(5*time.Minute), "one host has the guest", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if _, err := g.m.try(ctx, "true"); err != nil {
			return err
		}
		other := 1 - g.m.host
		if _, err := os.Stat(g.record(other)); err == nil || g.qemu(other) != 0 {
			return fmt.Errorf("%s has not removed the VM", g.c.hosts[other].Name)
		}
		return nil
	}))
}

// migrate begins the migration.
func (g *faultyGuest) migrate() {
	_, err := g.c.vms.MigrateVm(g.c.context(time.Minute), &vmv1.MigrateVmRequest{VmId: g.id, DestinationNodeId: g.c.ids[g.target]})
	require.NoError(g.c.t, err)
}

func (g *faultyGuest) await(what string, reached func() bool) {
	g.c.t.Helper()
	ctx := g.c.context(3 * time.Minute)
	for !reached() {
		require.NoError(g.c.t, ctx.Err(), what)
		time.Sleep(2 * time.Millisecond)
	}
}

// suspendAgent suspends the agent of a host until the returned function is called.
func (g *faultyGuest) suspendAgent(host int) (resume func()) {
	name := g.c.hosts[host].Name
	g.c.dir.Signal(name, syscall.SIGSTOP)
	return func() { g.c.dir.Signal(name, syscall.SIGCONT) }
}

// record is the path of a host's record of the VM.
func (g *faultyGuest) record(host int) string {
	return filepath.Join(g.c.hosts[host].DataDir(), "records", g.id+".json")
}

func (g *faultyGuest) home(host int) string {
	return filepath.Join(g.c.hosts[host].DataDir(), "vms", g.id)
}

// attempt returns a field of the migrations in a host's record of the VM, or 0.
func (g *faultyGuest) attempt(host int, field string) (n uint64) {
	text, err := os.ReadFile(g.record(host))
	if err != nil {
		return 0
	}
	return number64(text, "migration", field)
}

// paused reports whether a migration has paused the guest on a host.
func (g *faultyGuest) paused(host int) bool {
	_, err := os.Stat(filepath.Join(g.home(host), "migrating"))
	return err == nil
}

// tunnel returns the pid of a host's tunnel process.
func (g *faultyGuest) tunnel(host int) int {
	text, err := os.ReadFile(filepath.Join(g.home(host), "migration", "tunnel.json"))
	require.NoError(g.c.t, err)
	return int(number64(text, "pid"))
}

// qemu returns the pid of the guest's QEMU on a host, or 0.
func (g *faultyGuest) qemu(host int) int { return g.c.hosts[host].Guest(g.id) }

// restore ends all failures that last.
func (g *faultyGuest) restore() {
	for _, h := range g.c.hosts {
		g.c.dir.Signal(h.Name, syscall.SIGCONT)
	}
	require.NoError(g.c.t, g.c.spaces.Heal())
}

// number64 returns the number in a JSON object at the path of keys, or 0.
func number64(text []byte, keys ...string) uint64 {
	for _, key := range keys {
		var object map[string]json.RawMessage
		if json.Unmarshal(text, &object) != nil {
			return 0
		}
		text = object[key]
	}
	n, _ := strconv.ParseUint(string(text), 10, 64)
	return n
}
