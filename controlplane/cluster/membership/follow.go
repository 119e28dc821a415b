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

// listCall asks a member for what it knows of the others.
const listCall = "member.list"

// known is what the mesh of peers is told.
type known struct {
	Addresses map[uint64]string
	Removed   []uint64
}

// Follow keeps the mesh of peers as this member's records have it, until the context ends.
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
		w := Members.Watch(s.opts.Store, revision+1)
		_, _, err = w.Next(ctx)
		w.Close()
		if err != nil && !fault.Is(err, fault.OutOfRange) && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// known is what this member's records say, however old.
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

// Count is how many members have joined, as far as this one knows.
func (s *Service) Count() int { return len(s.joined()) }

// Listeners gives, when asked, where each member that joined is reached on another port than its peers', which is the
// same on all of them.
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

// Stranger hears that a member called which is not known here. It does not block.
func (s *Service) Stranger(id uint64) {
	select {
	case s.strangers <- id:
	default:
	}
}

// Meet asks the known members about strangers, until the context ends: this member's records may be behind, and the
// stranger the one that could bring them up.
func (s *Service) Meet(ctx context.Context) {
	for {
		select {
		case id := <-s.strangers:
			s.meet(ctx, id)
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

func (s *Service) meet(ctx context.Context, id uint64) {
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
		s.opts.Log.Info("met a member that the records here do not have yet", "id", id, "through", other)
		have[id] = k.Addresses[id]
		if err := s.opts.Peers.SetMembers(have, k.Removed); err != nil {
			s.opts.Log.Warn("meet a member", "id", id, "err", err)
		}
		return
	}
}
