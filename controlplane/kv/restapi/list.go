package restapi

import (
	"context"
	"encoding/json"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// list streams the items of a prefix.
func (s *Server) list(r request) (any, error) {
	q, err := queryOf(r.Request)
	if err != nil {
		return nil, err
	}
	to := hop{here: true}
	if !q.local {
		if to, err = s.hop(r, true); err != nil {
			return nil, err
		}
	}
	if !to.here {
		return s.hand(r, to, nil, keyTime, true)
	}
	if to.stale {
		r.w.Header().Set(staleHeader, "1")
	}
	return rest.Stream(func(out io.Writer) error {
		return faultOf(s.items(r.Context(), q, q.local || to.stale, out))
	}), nil
}

// items writes `{"items": […]}` at one revision. It streams the items, so the memory does not depend on the list's
// length.
func (s *Server) items(ctx context.Context, q listQuery, serializable bool, out io.Writer) error {
	waiting, cancel := context.WithTimeout(ctx, keyTime)
	defer cancel()
	if s.lists.Acquire(waiting, 1) != nil {
		return fault.New(fault.Internal, "%d lists are being written: say it again", maxLists).MayRetry()
	}
	defer s.lists.Release(1)
	key, end := listBounds(q.prefix)
	if _, err := io.WriteString(out, `{"items":[`); err != nil {
		return err
	}
	sep := ""
	err := s.opts.Keys.RangeStream(ctx, &pb.RangeRequest{Key: key, RangeEnd: end, Serializable: serializable}, func(part *pb.RangeResponse) error {
		for _, kv := range part.Kvs {
			text, err := json.Marshal(itemOf(kv.Key, kv.Value))
			if err != nil {
				return err
			}
			if _, err := io.WriteString(out, sep); err != nil {
				return err
			}
			if _, err := out.Write(text); err != nil {
				return err
			}
			sep = ","
		}
		return nil
	})
	if err != nil {
		return err
	}
	_, err = io.WriteString(out, "]}")
	return err
}
