package node

import (
	"context"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// heartbeat processes the description of a host in its heartbeat, and returns the host's record. A successful response
// renews the host's lease. Therefore heartbeat returns success only after a quorum has confirmed that this member still
// leads in the same term. A changed description is written to the record at most once per minUpdateInterval. If it
// changes again within that time, the first heartbeat after that time writes the change.
//
// heartbeat adds cloud.HostLabel to the map reported.Labels, and replaces a value that the agent has sent for it.
func (s *Service) heartbeat(ctx context.Context, reported cloud.Node) (cloud.Node, error) {
	leader, term := s.opts.Leadership.Leader()
	if leader != s.opts.Self {
		return cloud.Node{}, s.redirect(leader)
	}
	if err := checkHeartbeat(&reported); err != nil {
		return cloud.Node{}, err
	}
	if reported.Labels == nil {
		reported.Labels = map[string]string{}
	}
	reported.Labels[cloud.HostLabel] = reported.Name
	now := s.opts.Steady().UnixMilli()
	s.mu.Lock()
	known, ok := s.nodes[reported.ID]
	s.mu.Unlock()
	b := s.budgetOf(reported.ID)
	if !ok || !sameHeartbeat(&known, &reported) {
		stored, inTurn, err := s.updateNodeThrottled(ctx, reported.ID, &b.lastUpdate, func(n *cloud.Node) { copyHeartbeat(n, &reported) })
		switch {
		case err != nil:
			return cloud.Node{}, err
		case inTurn:
			known = stored
		case !ok:
			n, err := s.get(ctx, reported.ID)
			if err != nil {
				return cloud.Node{}, err
			}
			known = *n
		}
	}
	if err := s.recordFacts(ctx, reported.ID, b); err != nil {
		return cloud.Node{}, err
	}
	fencing := s.fencings.count(reported.ID)
	if err := s.opts.Store.Barrier(ctx); err != nil {
		return cloud.Node{}, err
	}
	if err := s.removeFence(ctx, reported.ID); err != nil {
		return cloud.Node{}, err
	}
	// Barrier also succeeds on a follower. In that case another member leads, and it has not received this heartbeat.
	if leader, now := s.opts.Leadership.Leader(); leader != s.opts.Self || now != term {
		return cloud.Node{}, s.redirect(leader)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fencings.count(reported.ID) != fencing && !mutant.On(mutant.RenewFencedLease) {
		return cloud.Node{}, errFencing
	}
	s.lastHeartbeat[reported.ID] = now
	s.placement.seen(reported.ID, now)
	return known, nil
}

// updateNode calls change on a copy of a host's record. It stores the result if change modified a fact or a field that
// heartbeats set. It returns the record, and whether it was stored.
func (s *Service) updateNode(ctx context.Context, id cloud.NodeID, change func(*cloud.Node)) (out cloud.Node, changed bool, err error) {
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
		if changed = !sameHeartbeat(&before, n) || !factsOf(&before).equal(factsOf(n)); !changed {
			return nil
		}
		n.UpdatedAt = tx.Now()
		out = *n
		Nodes.Put(tx, n, string(id))
		return nil
	})
	return out, changed && err == nil, err
}

// copyHeartbeat copies from reported to n those fields that a heartbeat sets. Other fields of n keep their values.
func copyHeartbeat(n, reported *cloud.Node) {
	n.Name, n.Declared, n.Capacity, n.Allocatable = reported.Name, reported.Declared, reported.Capacity, reported.Allocatable
	n.Hypervisors, n.Labels, n.AgentVersion = reported.Hypervisors, reported.Labels, reported.AgentVersion
	n.VolumeDrivers, n.StorageClasses, n.SharedMigration = reported.VolumeDrivers, reported.StorageClasses, reported.SharedMigration
}

// sameHeartbeat reports whether two records are equal in all fields that copyHeartbeat copies.
func sameHeartbeat(a, b *cloud.Node) bool {
	return a.Name == b.Name && a.Declared == b.Declared && a.Capacity == b.Capacity && a.Allocatable == b.Allocatable &&
		slices.Equal(a.Hypervisors, b.Hypervisors) && maps.Equal(a.Labels, b.Labels) && a.AgentVersion == b.AgentVersion &&
		slices.Equal(a.VolumeDrivers, b.VolumeDrivers) && slices.Equal(a.StorageClasses, b.StorageClasses) &&
		a.SharedMigration == b.SharedMigration
}

// Limits on the description in a host's heartbeat, in bytes unless stated otherwise.
const (
	maxHostName  = 253
	maxWordBytes = 128
	// maxModels is the maximum number of CPU models that a host offers, and maxModelBytes the maximum total length of
	// their names. QEMU 7.2 has 140 models for x86-64, with 2 KiB in total.
	maxModels     = 512
	maxModelBytes = 16 << 10

	maxDedicatedCPUs = 1024
)

// maxCapacity is the maximum capacity that a host may report. It is more than any host has, and small enough that sums
// over hosts do not overflow.
var maxCapacity = cloud.Capacity{VCPUs: 1 << 20, MemoryMiB: 1 << 32, StorageGiB: 1 << 32}

func checkHeartbeat(n *cloud.Node) error {
	if err := checkHostName(n.Name); err != nil {
		return err
	}
	switch {
	case n.Declared != cloud.NodeReady && n.Declared != cloud.NodeNotReady:
		return fault.Invalid("state", "must be READY or NOT_READY")
	case len(n.Hypervisors) > 8 || len(n.VolumeDrivers) > 8 || len(n.StorageClasses) > 64:
		return fault.New(fault.InvalidArgument, "the heartbeat lists too many values")
	}
	for _, c := range []struct {
		field string
		have  cloud.Capacity
	}{{"capacity", n.Capacity}, {"allocatable", n.Allocatable}} {
		if c.have.VCPUs > maxCapacity.VCPUs || c.have.MemoryMiB > maxCapacity.MemoryMiB || c.have.StorageGiB > maxCapacity.StorageGiB {
			return fault.Invalid(c.field, "at most %d vCPUs, %d MiB and %d GiB", maxCapacity.VCPUs, maxCapacity.MemoryMiB, maxCapacity.StorageGiB)
		}
	}
	if err := checkWords("agent_version", n.AgentVersion); err != nil {
		return err
	}
	if err := checkWords("supported_storage_classes", n.StorageClasses...); err != nil {
		return err
	}
	return cloud.CheckNodeLabels("labels", n.Labels)
}

func checkHostName(name string) error {
	if name == "" || len(name) > maxHostName || !printable(name) {
		return fault.Invalid("name", "must be 1 to %d printable bytes", maxHostName)
	}
	return nil
}

func checkWords(field string, words ...string) error {
	for _, w := range words {
		if len(w) > maxWordBytes || !printable(w) {
			return fault.Invalid(field, "must be at most %d printable bytes", maxWordBytes)
		}
	}
	return nil
}

func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}
