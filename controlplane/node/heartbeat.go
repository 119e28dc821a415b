package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// heartbeat takes what a host says of itself, and returns when the quorum has proven that this member still led after
// it came: what it answers renews the host's lease.
func (s *Service) heartbeat(ctx context.Context, said cloud.Node) (cloud.Node, error) {
	leader, term := s.opts.Leadership.Leader()
	if leader != s.opts.Self {
		return cloud.Node{}, s.redirect(leader)
	}
	if err := checkHeartbeat(&said); err != nil {
		return cloud.Node{}, err
	}
	now := s.opts.Steady().UnixMilli()
	s.mu.Lock()
	known, ok := s.fleet[said.ID]
	s.mu.Unlock()
	if !ok || !same(&known, &said) {
		stored, err := s.describe(ctx, said.ID, func(n *cloud.Node) { merge(n, &said) })
		if err != nil {
			return cloud.Node{}, err
		}
		known = stored
	}
	if err := s.opts.Store.Barrier(ctx); err != nil {
		return cloud.Node{}, err
	}
	// A member that follows passes the barrier too: by another leader, who has not heard from this host.
	if leader, now := s.opts.Leadership.Leader(); leader != s.opts.Self || now != term {
		return cloud.Node{}, s.redirect(leader)
	}
	s.mu.Lock()
	s.seen[said.ID] = now
	s.mu.Unlock()
	return known, nil
}

// describe changes a host's record.
func (s *Service) describe(ctx context.Context, id cloud.NodeID, change func(*cloud.Node)) (out cloud.Node, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		n, err := Nodes.Get(tx, string(id))
		if err != nil {
			return err
		}
		if n == nil {
			return noNode(id)
		}
		before := *n
		change(n)
		out = *n
		if same(&before, n) && slices.Equal(before.CPUModels, n.CPUModels) && before.QEMUVersion == n.QEMUVersion && before.Architecture == n.Architecture {
			return nil
		}
		n.UpdatedAt = tx.Now()
		out = *n
		Nodes.Put(tx, n, string(id))
		return nil
	})
	return out, err
}

// merge takes over what a heartbeat says; what is ours stays.
func merge(n, said *cloud.Node) {
	n.Name, n.Declared, n.Capacity, n.Allocatable = said.Name, said.Declared, said.Capacity, said.Allocatable
	n.Hypervisors, n.Labels, n.AgentVersion = said.Hypervisors, said.Labels, said.AgentVersion
	n.VolumeDrivers, n.StorageClasses, n.SharedMigration = said.VolumeDrivers, said.StorageClasses, said.SharedMigration
}

// same reports whether two records agree in all that a heartbeat says.
func same(a, b *cloud.Node) bool {
	return a.Name == b.Name && a.Declared == b.Declared && a.Capacity == b.Capacity && a.Allocatable == b.Allocatable &&
		slices.Equal(a.Hypervisors, b.Hypervisors) && maps.Equal(a.Labels, b.Labels) && a.AgentVersion == b.AgentVersion &&
		slices.Equal(a.VolumeDrivers, b.VolumeDrivers) && slices.Equal(a.StorageClasses, b.StorageClasses) &&
		a.SharedMigration == b.SharedMigration
}

// Limits of what a host may say of itself.
const (
	maxHostName = 253
	maxWord     = 128
	maxModels   = 1024
)

// most is more than any host has, and far from where sums overflow.
var most = cloud.Capacity{VCPUs: 1 << 20, MemoryMiB: 1 << 32, StorageGiB: 1 << 32}

func checkHeartbeat(n *cloud.Node) error {
	if err := checkHostName(n.Name); err != nil {
		return err
	}
	switch {
	case n.Declared != cloud.NodeReady && n.Declared != cloud.NodeNotReady:
		return fault.Invalid("state", "an agent says READY or NOT_READY")
	case len(n.Hypervisors) > 8 || len(n.VolumeDrivers) > 8 || len(n.StorageClasses) > 64:
		return fault.New(fault.InvalidArgument, "the heartbeat lists too much")
	}
	for _, c := range []struct {
		field string
		have  cloud.Capacity
	}{{"capacity", n.Capacity}, {"allocatable", n.Allocatable}} {
		if c.have.VCPUs > most.VCPUs || c.have.MemoryMiB > most.MemoryMiB || c.have.StorageGiB > most.StorageGiB {
			return fault.Invalid(c.field, "at most %d vCPUs, %d MiB and %d GiB", most.VCPUs, most.MemoryMiB, most.StorageGiB)
		}
	}
	if err := checkWords("agent_version", n.AgentVersion); err != nil {
		return err
	}
	if err := checkWords("supported_storage_classes", n.StorageClasses...); err != nil {
		return err
	}
	return cloud.CheckPairs("labels", n.Labels)
}

func checkHostName(name string) error {
	if name == "" || len(name) > maxHostName || !printable(name) {
		return fault.Invalid("name", "must be 1 to %d printable bytes", maxHostName)
	}
	return nil
}

func checkWords(field string, words ...string) error {
	for _, w := range words {
		if len(w) > maxWord || !printable(w) {
			return fault.Invalid(field, "must be at most %d printable bytes", maxWord)
		}
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// facts takes what a host says of itself once a session.
func (s *Service) facts(ctx context.Context, id cloud.NodeID, f *agentv1.NodeFacts) error {
	if len(f.GetCpuModels()) > maxModels {
		return fault.Invalid("facts.cpu_models", "at most %d", maxModels)
	}
	if err := checkWords("facts.cpu_models", f.GetCpuModels()...); err != nil {
		return err
	}
	if err := checkWords("facts.qemu_version", f.GetQemuVersion()); err != nil {
		return err
	}
	architecture := cloud.Architecture(f.GetArchitecture())
	if f.GetArchitecture() < 0 || f.GetArchitecture() > vmv1.Architecture(cloud.AArch64) {
		return fault.Invalid("facts.architecture", "unknown value %d", f.GetArchitecture())
	}
	_, err := s.describe(ctx, id, func(n *cloud.Node) {
		n.CPUModels, n.QEMUVersion, n.Architecture = f.GetCpuModels(), f.GetQemuVersion(), architecture
	})
	return err
}
