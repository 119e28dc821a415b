package dial

import (
	"errors"
	"io"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

// RequestID returns the ID of the last unary call of c to which a member has responded. The logs and the audit records
// of the members contain it. It is empty if there was no call, and for calls of etcd's API.
func (c *Conn) RequestID() string { return c.requestID }

// requestID returns the request ID in the headers of a response, or "" if there is none.
func requestID(header metadata.MD) string {
	if ids := header.Get("x-request-id"); len(ids) > 0 {
		return ids[0]
	}
	return ""
}

// withRequestID returns err with a google.rpc.RequestInfo in its details. It returns err itself if err is nil or not a
// status.
func withRequestID(err error, id string) error {
	s, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	if with, failed := s.WithDetails(&errdetails.RequestInfo{RequestId: id}); failed == nil {
		return with.Err()
	}
	return err
}

// identifiedStream is a stream whose errors contain the request ID.
type identifiedStream struct{ grpc.ClientStream }

func (s identifiedStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	// The headers have arrived, or the stream has ended without them: Header does not wait.
	header, _ := s.Header()
	if id := requestID(header); id != "" {
		return withRequestID(err, id)
	}
	return err
}
