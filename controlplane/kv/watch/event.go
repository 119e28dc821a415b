package watch

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/protobuf/proto"

	mvccwatch "github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/controlplane/kv/translate"
)

// events converts the engine's events to etcd's type, and omits those that the watch's filters exclude. The keys and
// values share memory with the given events; they are not copied.
func (w *watch) events(all []mvccwatch.Event) []*mvccpb.Event {
	type block struct {
		event mvccpb.Event
		kv    mvccpb.KeyValue
	}
	blocks := make([]block, len(all))
	out := make([]*mvccpb.Event, 0, len(all))
	for i := range all {
		e := &all[i]
		if e.Type == mvccwatch.EventPut && w.noPut || e.Type == mvccwatch.EventDelete && w.noDelete {
			continue
		}
		b := &blocks[i]
		b.kv.Key, b.kv.Value, b.kv.Lease = e.KV.Key, e.KV.Value, e.KV.Lease
		b.kv.CreateRevision, b.kv.ModRevision, b.kv.Version = e.KV.CreateRevision, e.KV.ModRevision, e.KV.Version
		b.event.Kv = &b.kv
		if e.Type == mvccwatch.EventDelete {
			b.event.Type = mvccpb.Event_DELETE
		}
		if e.Prev != nil {
			b.event.PrevKv = translate.KeyValue(e.Prev)
		}
		out = append(out, &b.event)
	}
	return out
}

// fragments splits a response into responses of at most Options.FragmentBytes each. An event that is larger gets a
// response of its own. If partial is set, the next batch continues the last revision, and the last response is
// therefore marked as a fragment, too.
func (s *Stream) fragments(r *pb.WatchResponse, partial bool) (pieces []*pb.WatchResponse) {
	base := proto.Size(r) - eventsSize(r.Events)
	events := r.Events
	for {
		size, n := base, 0
		for n < len(events) {
			more := eventSize(events[n])
			if n > 0 && size+more > s.opts.FragmentBytes {
				break
			}
			size += more
			n++
		}
		last := n == len(events)
		pieces = append(pieces, &pb.WatchResponse{Header: r.Header, WatchId: r.WatchId, Events: events[:n], Fragment: !last || partial})
		if last {
			return pieces
		}
		events = events[n:]
	}
}

func eventsSize(all []*mvccpb.Event) (sum int) {
	for _, e := range all {
		sum += eventSize(e)
	}
	return sum
}

// eventSize returns the maximum size of an event in an encoded response, in bytes. It assumes the longest encoding of
// the field with the event's length.
func eventSize(e *mvccpb.Event) int {
	const overhead = 1 + 5 // tag and length
	return proto.Size(e) + overhead
}
