package network

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// delta describes the next message of a session: the IDs of records that the host no longer needs, the keys of the
// records to send, and the addresses of hosts.
type delta struct {
	revision int64
	deleted  []string
	keys     []recordKey
	// underlay has the underlay addresses of all hosts. It is nil if the protected addresses are not to be sent.
	underlay []netip.Addr
	// peers are the hosts with which the host exchanges encrypted packets. It is nil if no keys are to be sent.
	peers *peerList
}

// take returns the changes that the session has to send. ok is false if there are none. The delta of a session whose
// host has received no VPC is the snapshot. wait is the time after which take must be called again for a change that is
// not in the delta yet, or 0 if there is none.
func (f *Feed) take(s *feedSession) (d delta, wait time.Duration, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.index
	if x == nil || f.sessions[s.node] != s {
		return d, 0, false
	}
	d.revision = x.revision
	if s.underlay != x.underlayVersion {
		wait = f.protectedInterval - time.Since(s.underlayAt)
		if s.underlay == 0 || wait <= 0 {
			wait = 0
			s.underlay, s.underlayAt, d.underlay = x.underlayVersion, time.Now(), x.underlayAddresses()
		}
	}
	d.peers = s.takePeers(x)
	keys := map[recordKey]struct{}{}
	formerProjects := projectsOf(s.vpcs)
	for id := range s.lost {
		if _, has := s.vpcs[id]; has {
			delete(s.vpcs, id)
			d.deleted = append(d.deleted, string(id))
		}
	}
	clear(s.lost)
	had := maps.Clone(s.vpcs)
	hadProjects := projectsOf(had)
	for id := range x.needs[s.node] {
		if _, has := s.vpcs[id]; !has {
			s.vpcs[id] = x.vpcs[id].project
			maps.Copy(keys, x.vpcs[id].records)
		}
	}
	for id := range had {
		if _, needed := x.needs[s.node][id]; !needed {
			delete(s.vpcs, id)
			d.deleted = append(d.deleted, string(id))
		}
	}
	nowProjects := projectsOf(s.vpcs)
	for id := range nowProjects {
		if !hadProjects[id] {
			maps.Copy(keys, x.projects[id].groups)
		}
	}
	for id := range formerProjects {
		if p := x.projects[id]; !nowProjects[id] && p != nil {
			for key := range p.groups {
				d.deleted = append(d.deleted, key.id)
			}
		}
	}
	for key := range s.unsent {
		e, exists := x.entries[key]
		_, has := s.vpcs[e.vpc]
		if key.kind == feedGroup {
			has = nowProjects[key.project]
		}
		if exists && has && s.hasPeer(e) {
			keys[key] = struct{}{}
		} else if key.kind != feedVPC {
			d.deleted = append(d.deleted, key.id)
		}
	}
	maps.DeleteFunc(keys, func(key recordKey, _ struct{}) bool { return !s.hasPeer(x.entries[key]) })
	d.keys = slices.SortedFunc(maps.Keys(keys), compareKeys)
	slices.Sort(d.deleted)
	d.deleted = slices.Compact(d.deleted)
	ok = s.confirm || len(d.keys) > 0 || len(d.deleted) > 0 || d.underlay != nil || d.peers != nil
	s.confirm = false
	clear(s.unsent)
	return d, wait, ok
}

// hasPeer reports whether the host has both VPCs of a peering. It returns true for other records.
func (s *feedSession) hasPeer(e entry) bool {
	if e.peer == "" {
		return true
	}
	_, has := s.vpcs[e.peer]
	_, hasOwn := s.vpcs[e.vpc]
	return has && hasOwn
}

// projectsOf returns the projects of VPCs.
func projectsOf(vpcs map[cloud.VPCID]cloud.ProjectID) map[cloud.ProjectID]bool {
	out := map[cloud.ProjectID]bool{}
	for _, p := range vpcs {
		out[p] = true
	}
	return out
}

// readPage is the number of records that sendDelta reads from one snapshot of the store, so that a slow host does not
// keep the snapshot open.
const readPage = 500

// sendDelta reads the records of a delta and sends them in one or more messages.
func (f *Feed) sendDelta(ctx context.Context, s *feedSession, d delta, send func(*agentv1.SyncNetworksResponse) error) error {
	out := &feedWriter{term: s.term, revision: d.revision, send: func(m *agentv1.SyncNetworksResponse) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if m.GetComplete() {
			f.mu.Lock()
			s.sent, s.sentAt = d.revision, time.Now()
			f.mu.Unlock()
		}
		f.metrics.messages.Inc()
		return send(m)
	}}
	if d.underlay != nil {
		// Another set of hosts can have the same addresses, for example after a host got a new ID.
		if now := f.protected(d.underlay); s.protected == nil || !slices.Equal(s.protected, now) {
			if err := out.setProtected(now); err != nil {
				return err
			}
			s.protected = append([]string{}, now...)
		}
	}
	if d.peers != nil {
		if err := out.setEncryption(d.peers.message(f.opts.Key)); err != nil {
			return err
		}
	}
	for _, id := range d.deleted {
		if err := out.delete(id); err != nil {
			return err
		}
	}
	for page := range slices.Chunk(d.keys, readPage) {
		messages, err := f.readMessages(page)
		if err != nil {
			return err
		}
		for _, m := range messages {
			if err := out.add(m); err != nil {
				return err
			}
		}
	}
	return out.flush(true)
}

// protected returns the IP addresses of the given hosts and of the members, sorted. It leaves out members whose address
// is a DNS name. The address of a new member is sent with the next change of the hosts' underlay addresses, or when a
// host connects again.
func (f *Feed) protected(hosts []netip.Addr) (out []string) {
	all := slices.Clone(hosts)
	if f.opts.Listeners != nil {
		for _, listener := range f.opts.Listeners() {
			if a, err := netip.ParseAddrPort(listener); err == nil {
				all = append(all, a.Addr().Unmap().WithZone(""))
			}
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	for _, a := range slices.Compact(all) {
		out = append(out, a.String())
	}
	return out
}

// readMessages reads records and converts them to messages. It leaves out a record that was deleted after the delta was
// composed: the next delta has its ID.
func (f *Feed) readMessages(keys []recordKey) (out []any, err error) {
	vteps := map[cloud.NodeID]netip.Addr{}
	err = f.opts.Store.Local(func(v *store.View) error {
		for _, key := range keys {
			f.reads.Add(1)
			k := feedKinds[key.kind]
			record, err := k.get(v, string(key.project), key.id)
			if err != nil {
				return err
			}
			if record == nil {
				continue
			}
			m := k.message(record)
			switch m := m.(type) {
			case *agentv1.HostPort:
				m.Vtep, err = vtepText(v, vteps, cloud.NodeID(m.GetPort().GetNodeId()))
			case *agentv1.HostNatGateway:
				m.Vtep, err = vtepText(v, vteps, cloud.NodeID(m.GetNatGateway().GetNodeId()))
			}
			if err != nil {
				return err
			}
			out = append(out, m)
		}
		return nil
	})
	return out, err
}

// vtepText returns the underlay address of a host, or "" if it is not known. known has the addresses that were read.
func vtepText(v *store.View, known map[cloud.NodeID]netip.Addr, node cloud.NodeID) (string, error) {
	if _, read := known[node]; !read && node != "" {
		h, err := HostNetworkOf(v, node)
		if err != nil {
			return "", err
		}
		if h != nil {
			known[node] = h.VTEP
		}
	}
	return addressText(known[node]), nil
}
