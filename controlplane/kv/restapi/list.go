package restapi

import (
	"context"
	"encoding/json"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// list responds with all keys that begin with the prefix in the query parameters, and with their values. The response
// is streamed.
func (s *Server) list(r request) (any, error) {
	q, err := parseQuery(r.Request)
	if err != nil {
		return nil, err
	}
	to := target{local: true}
	if !q.local {
		if to, err = s.destination(r, true); err != nil {
			return nil, err
		}
	}
	if !to.local {
		return s.forwardTo(r, to, nil, keyTimeout, true)
	}
	if to.stale {
		r.w.Header().Set(staleHeader, "1")
	}
	return rest.Stream(func(out io.Writer) error {
		return faultOf(s.writeItems(r.Context(), q, q.local || to.stale, out))
	}), nil
}

// writeItems writes a list of keys as of one revision, as `{"items": […]}`. It streams the items, so the memory does
// not depend on the list's length. At most maxLists lists are streamed at the same time.
func (s *Server) writeItems(ctx context.Context, q listQuery, serializable bool, out io.Writer) error {
	waiting, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	if s.lists.Acquire(waiting, 1) != nil {
		return fault.New(fault.Internal, "%d lists are being streamed, which is the limit: try again later", maxLists).MayRetry()
	}
	defer s.lists.Release(1)
	key, end := listBounds(q.prefix)
	if _, err := io.WriteString(out, `{"items":[`); err != nil {
		return err
	}
	sep := ""
	err := s.opts.Keys.RangeStream(ctx, &pb.RangeRequest{Key: key, RangeEnd: end, Serializable: serializable}, func(part *pb.RangeResponse) error {
		for _, kv := range part.Kvs {
			text, err := json.Marshal(newItem(kv.Key, kv.Value))
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
