package transport

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// maxCall is the timeout of every command that is sent to another member; a shorter deadline of the caller applies too.
const maxCall = time.Minute

// Call implements leader.Caller. It runs the command over the gRPC connection to the member.
func (m *Transport) Call(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller) ([]byte, error) {
	client, err := m.reach(ctx, member)
	if err != nil {
		return nil, err
	}
	request, err := request(command, body, caller)
	if err != nil {
		return nil, err
	}
	limited, cancel := context.WithTimeout(ctx, maxCall)
	defer cancel()
	answer, err := client.Call(limited, request)
	if err != nil {
		return nil, unknown(ctx, fmt.Errorf("call %s on member %d: %w", command, member, err))
	}
	if err := decodeError(answer.GetNotLeader(), answer.GetFault(), answer.GetInternal()); err != nil {
		return nil, err
	}
	return answer.GetBody(), nil
}

// Open implements leader.Caller. It runs the stream over the gRPC connection to the member.
func (m *Transport) Open(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, send func([]byte) error) error {
	client, err := m.reach(ctx, member)
	if err != nil {
		return err
	}
	request, err := request(command, body, caller)
	if err != nil {
		return err
	}
	limited, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := client.Open(limited, request)
	if err != nil {
		return unknown(ctx, fmt.Errorf("open %s on member %d: %w", command, member, err))
	}
	for {
		piece, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return unknown(ctx, fmt.Errorf("read %s from member %d: %w", command, member, err))
		}
		if err := decodeError(piece.GetNotLeader(), piece.GetFault(), piece.GetInternal()); err != nil {
			return err
		}
		if err := send(piece.GetData()); err != nil {
			return err
		}
	}
}

// Exchange implements leader.Caller. It runs the exchange over the gRPC connection to the member. Recv of the pipe is
// called in a goroutine, which has ended when Exchange returns.
func (m *Transport) Exchange(ctx context.Context, member uint64, command string, body []byte, caller *cloud.Caller, pipe leader.Pipe) error {
	client, err := m.reach(ctx, member)
	if err != nil {
		return err
	}
	request, err := request(command, body, caller)
	if err != nil {
		return err
	}
	limited, cancel := context.WithCancel(ctx)
	var sending sync.WaitGroup
	defer sending.Wait()
	defer cancel()
	s, err := client.Exchange(limited)
	if err == nil {
		err = s.Send(&peerv1.ExchangeRequest{Call: request})
	}
	if err != nil {
		return unknown(ctx, fmt.Errorf("begin %s on member %d: %w", command, member, err))
	}
	sending.Go(func() {
		for {
			data, err := pipe.Recv(limited)
			if errors.Is(err, io.EOF) {
				_ = s.CloseSend() // its error is always nil
				return
			}
			if err == nil {
				err = s.Send(&peerv1.ExchangeRequest{Data: data})
			}
			if err != nil { // if the stream has ended, Recv below returns the reason
				cancel()
				return
			}
		}
	})
	for {
		piece, err := s.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return unknown(ctx, fmt.Errorf("exchange data of %s with member %d: %w", command, member, err))
		}
		if err := decodeError(piece.GetNotLeader(), piece.GetFault(), piece.GetInternal()); err != nil {
			return err
		}
		if err := pipe.Send(piece.GetData()); err != nil {
			return err
		}
	}
}

// unknown returns the error of a call that may or may not have taken effect: the error of ctx if ctx has ended, and err
// otherwise.
func unknown(ctx context.Context, err error) error {
	if at, ok := ctx.Deadline(); ok && status.Code(err) == codes.DeadlineExceeded && time.Until(at) < time.Second {
		<-ctx.Done() // the other member's deadline passed slightly earlier than this one's
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

func request(command string, body []byte, caller *cloud.Caller) (*peerv1.CallRequest, error) {
	r := &peerv1.CallRequest{Command: command, Body: body}
	if caller != nil {
		who, err := cbor.Marshal(caller)
		if err != nil {
			return nil, fmt.Errorf("encode caller: %w", err)
		}
		r.Caller, r.RequestId = who, caller.RequestID
	}
	return r, nil
}

// faults makes CBOR maps in a fault's details decode as maps with string keys, so that they can be encoded as JSON.
var faults = cbor.DecOptions{DefaultMapType: reflect.TypeFor[map[string]any]()}

// decodeError returns the error that the fields of a response encode, or nil if the call succeeded.
func decodeError(notLeader bool, encoded []byte, internal string) error {
	switch {
	case notLeader:
		return leader.ErrNotLeader
	case internal != "":
		return &leader.RemoteError{Text: internal}
	case len(encoded) > 0:
		f := &fault.Fault{}
		decode, err := faults.DecMode()
		if err == nil {
			err = decode.Unmarshal(encoded, f)
		}
		if err != nil {
			return fmt.Errorf("decode fault: %w", err)
		}
		return f
	}
	return nil
}

// encodeError returns the fields of a response that encode err. It is the inverse of decodeError.
func encodeError(err error) (notLeader bool, encoded []byte, internal string) {
	switch f, ok := fault.From(err); {
	case err == nil:
	case errors.Is(err, leader.ErrNotLeader):
		return true, nil, ""
	case ok:
		if encoded, err := cbor.Marshal(f); err == nil {
			return false, encoded, ""
		}
		return false, nil, f.Message
	default:
		return false, nil, err.Error()
	}
	return false, nil, ""
}

func callerOf(r *peerv1.CallRequest) (*cloud.Caller, error) {
	if len(r.GetCaller()) == 0 {
		return nil, nil
	}
	c := &cloud.Caller{}
	if err := cbor.Unmarshal(r.GetCaller(), c); err != nil {
		return nil, fault.New(fault.InvalidArgument, "caller: %v", err)
	}
	return c, nil
}
