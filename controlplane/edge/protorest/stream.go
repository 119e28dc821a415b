package protorest

import (
	"context"
	"net/http"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// sendEvents returns the handler of a route that sends each message of an RPC's stream as a server-sent event.
func (m *method) sendEvents(row Row) rest.EventHandler {
	return func(q *http.Request, send func(rest.Event) error) error {
		return m.runStream(row, q, func(out proto.Message) error {
			return send(rest.Event{Name: row.Event, Data: Encode(out.ProtoReflect())})
		})
	}
}

// sendBytes returns the handler of a route that sends the bytes in the messages of an RPC's stream.
func (m *method) sendBytes(row Row) rest.DownloadHandler {
	data := m.desc.Output().Fields().Get(0)
	return func(q *http.Request, send func([]byte) error) error {
		return m.runStream(row, q, func(out proto.Message) error {
			return send(out.ProtoReflect().Get(data).Bytes())
		})
	}
}

// runStream runs the RPC until its stream ends, and calls send for each message.
func (m *method) runStream(row Row, q *http.Request, send func(proto.Message) error) error {
	return m.stream.Handler(m.impl, &serverStream{ctx: q.Context(), send: send, read: func(in proto.Message) error {
		return m.read(row, q, in)
	}})
}

// serverStream is the stream of an RPC with one request. It implements grpc.ServerStream.
type serverStream struct {
	headers
	ctx  context.Context
	read func(proto.Message) error
	send func(proto.Message) error
}

func (s *serverStream) Context() context.Context { return s.ctx }

func (s *serverStream) RecvMsg(m any) error { return s.read(m.(proto.Message)) }

func (s *serverStream) SendMsg(m any) error { return s.send(m.(proto.Message)) }

func (s *serverStream) SetTrailer(metadata.MD) {}

// headers collects the response headers that an RPC sets. It implements grpc.ServerTransportStream.
type headers struct{ md metadata.MD }

func (h *headers) Method() string { return "" }

func (h *headers) SetHeader(md metadata.MD) error {
	h.md = metadata.Join(h.md, md)
	return nil
}

func (h *headers) SendHeader(md metadata.MD) error { return h.SetHeader(md) }

func (h *headers) SetTrailer(metadata.MD) error { return nil }
