package node

import (
	"bytes"
	"context"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Reasons in errors to agents. An agent that receives an error with one of these reasons stops retrying.
const (
	ReasonEvicted = "NODE_EVICTED"
	ReasonBanned  = "NODE_BANNED"
)

// eviction is the record of a forced eviction of a host with VMs, at node-evicted/<node>. It invalidates the
// certificates of the host that were issued before At. The eviction of a host without VMs writes no such record: it
// deletes the host's own record, which invalidates all its certificates.
//
// Joined is the time at which the host has joined again after the eviction, or 0.
type eviction struct {
	At     cloud.Time
	Joined cloud.Time `cbor:",omitempty"`
}

var evictions = store.NewTable[eviction]("node-evicted")

// invalidates reports whether the certificate leaf was issued before the eviction. A certificate contains its issue
// time in whole seconds.
func (e *eviction) invalidates(leaf *x509.Certificate) bool {
	return mtls.Issued(leaf).UnixMilli() < e.At
}

// issueTime returns the issue time for a new certificate of the host. That is now, if it is after the eviction. If this
// member's clock is behind, it is the first full second after the eviction, so that the eviction does not invalidate
// the new certificate.
func (e *eviction) issueTime(now time.Time) time.Time {
	if after := time.UnixMilli(e.At).Truncate(time.Second).Add(time.Second); now.Before(after) {
		return after
	}
	return now
}

// GivenUp reports whether an operator has evicted a host that has VMs, and the host has not joined again.
func GivenUp(r store.Reader, id cloud.NodeID) (bool, error) {
	e, err := evictions.Get(r, string(id))
	return e != nil && e.Joined == 0, err
}

// evicted returns the eviction record of a host, or nil if the host has none.
func (s *Service) evicted(ctx context.Context, id cloud.NodeID) (e *eviction, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
		e, err = evictions.Get(v, string(id))
		return err
	})
	return e, err
}

func errEvicted() *fault.Fault {
	return fault.New(fault.PermissionDenied, "this host is no longer in the cluster: to join again, it needs a new token of `trivet host token`").
		WithReason(ReasonEvicted)
}

// checkHost returns nil if the host with this ID may make calls with the certificate leaf. It returns errBanned if the
// certificate's key is banned, and errEvicted if the host has no record or leaf was issued before its eviction.
func checkHost(r store.Reader, id cloud.NodeID, leaf *x509.Certificate) error {
	key, err := mtls.KeyOf(leaf.PublicKey)
	if err != nil {
		return err
	}
	if err := checkBan(r, key); err != nil {
		return err
	}
	known, err := Nodes.Has(r, string(id))
	if err != nil {
		return err
	}
	e, err := evictions.Get(r, string(id))
	if err != nil {
		return err
	}
	if !known || e != nil && e.invalidates(leaf) {
		return errEvicted()
	}
	return nil
}

type evictRequest struct {
	Node  cloud.NodeID
	Force bool
}

// Evict invalidates a host's certificates and returns how many VMs are placed on it. The caller must already be
// authorized. If the host has no VMs, Evict deletes the host's record, its keys, the join tokens that it used, and the
// placements of deleted VMs that it has not cleaned up. If the host joins again, it gets a new ID.
//
// If the host has no VMs but volumes in storage pools that only this host uses, Evict fails with ReasonHasVolumes unless
// force is true. With force, it deletes the host's record. The content of these volumes is then out of reach: see
// VolumeController.RemoveHost. Volumes in shared pools become usable on the other hosts of the pool.
//
// If the host has VMs, Evict fails with ReasonHasVMs unless force is true. With force, Evict keeps the host's record
// and cordons the host. Its VMs may still run there, so they must not start elsewhere. With the same key and a new
// token, the host can join again under the same ID.
func (s *Service) Evict(ctx context.Context, id cloud.NodeID, force bool) (vms int, err error) {
	if err := cloud.CheckUUID("node_id", string(id)); err != nil {
		return 0, err
	}
	return evictCommand.Call(ctx, s.opts.Commands, evictRequest{id, force})
}

// ReasonHasVMs is the reason in the error of Evict if the host has VMs and force is false.
const ReasonHasVMs = "NODE_HAS_VMS"

// ReasonHasVolumes is the reason in the error of Evict if the host has no VMs, but has volumes in its storage pools, and
// force is false.
const ReasonHasVolumes = "NODE_HAS_VOLUMES"

var evictCommand = leader.NewCommand("node.evict", leader.Once, (*Service).evictOnLeader)

// evictOnLeader implements Evict on the leader. It returns the number of VMs placed on the host, not counting deleted
// VMs.
func (s *Service) evictOnLeader(ctx context.Context, q evictRequest) (vms int, err error) {
	_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
		n, err := Nodes.Get(tx, string(q.Node))
		if err != nil {
			return err
		}
		if n == nil {
			return noNode(q.Node)
		}
		placed, _, err := PlacedVMs.List(tx, 0, string(q.Node))
		if err != nil {
			return err
		}
		vms = 0
		for _, r := range placed {
			if !r.Value.Gone {
				vms++
			}
		}
		if vms > 0 && !q.Force {
			return s.errHasVMs(tx, n, placed, vms)
		}
		if err := deleteUsedTokens(tx, q.Node); err != nil {
			return err
		}
		if vms > 0 && !mutant.On(mutant.EvictForgets) {
			n.Cordoned, n.UpdatedAt = true, tx.Now()
			Nodes.Put(tx, n, string(q.Node))
			evictions.Put(tx, &eviction{At: tx.Now()}, string(q.Node))
			return nil
		}
		if !q.Force {
			if err := checkNoVolumes(tx, n); err != nil {
				return err
			}
		}
		return s.removeHost(tx, q.Node, placed)
	})
	return vms, err
}

// maxNamedVMs is the maximum number of VMs that errHasVMs names.
const maxNamedVMs = 10

// errHasVMs returns the error of Evict for a host on which VMs are placed. It names the first maxNamedVMs VMs.
func (s *Service) errHasVMs(r store.Reader, n *cloud.Node, placed []store.Record[Placed], vms int) error {
	var names []string
	for _, p := range placed {
		if p.Value.Gone || len(names) == maxNamedVMs {
			continue
		}
		name, err := s.vms.Describe(r, p.Value.Project, cloud.VMID(p.Path[1]))
		if err != nil {
			return err
		}
		names = append(names, name)
	}
	if more := vms - len(names); more > 0 {
		names = append(names, fmt.Sprintf("and %d more", more))
	}
	return fault.New(fault.FailedPrecondition, "%d VMs are placed on node %s (%s): %s. Move them with `trivet host drain`, and delete those that stay "+
		"(of a host that is lost, with `trivet vm delete --force`), or use force: the VMs then stay placed on this host and start on no other one, and the host can rejoin with them",
		vms, n.ID, n.Name, strings.Join(names, ", ")).WithReason(ReasonHasVMs).With("vms", vms)
}

// checkNoVolumes returns an error with ReasonHasVolumes if the host has volumes in its storage pools. RBD volumes and
// volumes in shared pools do not count: other hosts can use them. Neither do deleted volumes.
func checkNoVolumes(r store.Reader, n *cloud.Node) error {
	bound, _, err := BoundVolumes.List(r, 0, string(n.ID))
	if err != nil {
		return err
	}
	volumes := 0
	for _, b := range bound {
		if !b.Value.Gone && b.Value.Class == "" && b.Value.PoolID == "" {
			volumes++
		}
	}
	if volumes == 0 {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "%d volumes are stored on node %s (%s), and cannot be moved: delete them first, "+
		"or use force: their content is then lost", volumes, n.ID, n.Name).WithReason(ReasonHasVolumes).With("volumes", volumes)
}

// removeHost deletes a host's record, its keys, and the placements of deleted VMs.
func (s *Service) removeHost(tx *store.Tx, id cloud.NodeID, placed []store.Record[Placed]) error {
	if err := s.volumes.RemoveHost(tx, id); err != nil {
		return err
	}
	for _, r := range placed {
		PlacedVMs.Delete(tx, r.Path...)
	}
	keys, err := keysOf(tx, id)
	if err != nil {
		return err
	}
	for _, key := range keys {
		hostKeys.Delete(tx, key)
	}
	evictions.Delete(tx, string(id))
	fences.Delete(tx, string(id))
	network.DeleteHostNetwork(tx, id)
	if err := forgetDrain(tx, id); err != nil {
		return err
	}
	Nodes.Delete(tx, string(id))
	return nil
}

// deleteUsedTokens removes the join tokens that a host has used. Otherwise the evicted host could join again with them.
func deleteUsedTokens(tx *store.Tx, id cloud.NodeID) error {
	all, _, err := joinTokens.List(tx, 0)
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.Value.Node == id {
			joinTokens.Delete(tx, r.Path...)
		}
	}
	return nil
}

// keysOf returns the stored public keys of a host, as SHA-256 in hex. A host normally has one.
func keysOf(tx *store.Tx, id cloud.NodeID) (keys []string, err error) {
	all, _, err := hostKeys.List(tx, 0)
	if err != nil {
		return nil, err
	}
	for _, r := range all {
		if *r.Value == id {
			keys = append(keys, r.Path[0])
		}
	}
	return keys, nil
}

// sameKey reports whether two public keys are equal.
func sameKey(a, b any) bool {
	x, errX := mtls.KeyOf(a)
	y, errY := mtls.KeyOf(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

func keyText(key []byte) string { return hex.EncodeToString(key) }
