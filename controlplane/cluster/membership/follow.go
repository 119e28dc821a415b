package membership

import (
	"context"
	"maps"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// listCall is the name of a command between members. The called member returns the members in its local records.
const listCall = "member.list"

// known holds the arguments of Peers.SetMembers: the address (host:port) of each member by ID, and the IDs of removed
// members.
type known struct {
	Addresses map[uint64]string
	Removed   []uint64
}

// Follow calls Peers.SetMembers with the members in the local records, and again whenever the records change, until ctx
// ends.
func (s *Service) Follow(ctx context.Context) error {
	for ctx.Err() == nil {
		k, revision, err := s.known()
		if err != nil {
			return err
		}
		if len(k.Addresses) > 0 {
			if err := s.opts.Peers.SetMembers(k.Addresses, k.Removed); err != nil {
				return err
			}
		}
		w := Members.WatchPaths(s.opts.Store, revision+1)
		_, _, err = w.Next(ctx)
		w.Close()
		if err != nil && !fault.Is(err, fault.OutOfRange) && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// known returns the members in the local records, which may be outdated, and the revision of the records.
func (s *Service) known() (k known, revision int64, err error) {
	k.Addresses = map[uint64]string{}
	err = s.opts.Store.Local(func(v *store.View) error {
		revision = v.Revision()
		all, err := list(v)
		if err != nil {
			return err
		}
		for _, m := range all {
			k.Addresses[m.ID] = HostPort(m.RaftAddr)
		}
		gone, _, err := removed.List(v, 0)
		for _, r := range gone {
			if id, err := strconv.ParseUint(r.Path[0], 10, 64); err == nil {
				k.Removed = append(k.Removed, id)
			}
		}
		return err
	})
	return k, revision, err
}

// IDs returns the IDs of the members whose process has joined, according to the local records.
func (s *Service) IDs() []uint64 {
	var ids []uint64
	for _, m := range s.joined() {
		ids = append(ids, m.ID)
	}
	return ids
}

// Listeners returns a function that returns host:port for each joined member, by member ID. The host is that of the
// member's raft address, and the port is the given one, which must be the same on all members.
func (s *Service) Listeners(port uint16) func() map[uint64]string {
	return func() map[uint64]string {
		out := map[uint64]string{}
		for _, m := range s.joined() {
			if host, _, err := net.SplitHostPort(HostPort(m.RaftAddr)); err == nil {
				out[m.ID] = net.JoinHostPort(host, strconv.Itoa(int(port)))
			}
		}
		return out
	}
}

func (s *Service) serveList(context.Context, uint64, []byte) ([]byte, error) {
	k, _, err := s.known()
	if err != nil {
		return nil, err
	}
	return cbor.Marshal(k)
}

// UnknownMember is called when a member calls this one and is not in the local records. It queues the caller's ID for
// ResolveUnknownMembers. It does not block: if the queue is full, the ID is dropped.
func (s *Service) UnknownMember(id uint64) {
	select {
	case s.unknownMembers <- id:
	default:
	}
}

// ResolveUnknownMembers requests the addresses of the members that UnknownMember has queued from the known members, and
// passes them to Peers, until ctx ends. It does not wait for newer local records, because the unknown member may be the
// only one that can send them.
func (s *Service) ResolveUnknownMembers(ctx context.Context) {
	for {
		select {
		case id := <-s.unknownMembers:
			s.resolveUnknownMember(ctx, id)
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(askPause):
		case <-ctx.Done():
			return
		}
	}
}

func (s *Service) resolveUnknownMember(ctx context.Context, id uint64) {
	have := s.opts.Peers.Members()
	if _, met := have[id]; met {
		return
	}
	for _, other := range slices.Sorted(maps.Keys(have)) {
		limited, cancel := context.WithTimeout(ctx, askTime)
		body, err := s.opts.Peers.Direct(limited, other, listCall, nil)
		cancel()
		var k known
		if err != nil || cbor.Unmarshal(body, &k) != nil || k.Addresses[id] == "" {
			continue
		}
		s.opts.Log.Info("learned of a member that is not in the local records yet", "id", id, "through", other)
		have[id] = k.Addresses[id]
		if err := s.opts.Peers.SetMembers(have, k.Removed); err != nil {
			s.opts.Log.Warn("look up an unknown member", "id", id, "err", err)
		}
		return
	}
}
