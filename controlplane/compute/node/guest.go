package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of calls of guest agents on one host: in total, and of one project and one org. An agent has the same total
// limit.
const (
	maxGuestCalls        = 16
	maxProjectGuestCalls = 4
	maxOrgGuestCalls     = 8
)

const (
	// guestSilence is the maximum wait for each further message of the host. An agent that waits for a guest sends empty
	// messages more often.
	guestSilence = 30 * time.Second
	// maxGuestResult is the maximum size, in bytes, of an encoded GuestResult.
	maxGuestResult = 2 << 20
)

func newGuestCalls() *hostReads {
	return &hostReads{
		plural: "guest agent calls in progress", object: "the VM", reason: "TOO_MANY_GUEST_CALLS", perHost: maxGuestCalls,
		perProject: maxProjectGuestCalls, perOrg: maxOrgGuestCalls, open: map[string]*hostRead{},
	}
}

// guestCall is a request to the guest agent in a tenant's VM. Request is an encoded GuestRequest without an ID. It may
// contain secrets: it is sent to the leader and to the host, and not recorded.
type guestCall struct {
	Tenant  cloud.Tenant
	Node    cloud.NodeID
	Request []byte
}

// CallGuest sends a request to the guest agent in a tenant's VM, and returns the result. It forwards the request to the
// leader, to which the host is connected. It sets the request's ID. The text of a FailedPrecondition fault without a reason
// is from the host. If the request is to run a program, the fault may be retried only if the program was not started.
func (s *Service) CallGuest(ctx context.Context, t cloud.Tenant, node cloud.NodeID, r *agentv1.GuestRequest) (*agentv1.GuestResult, error) {
	body, err := proto.Marshal(r)
	if err != nil {
		return nil, fmt.Errorf("encode a request to a guest agent: %w", err)
	}
	var data []byte
	err = callGuestCommand.Call(ctx, s.opts.Commands, guestCall{t, node, body}, func(part []byte) error {
		if len(data)+len(part) > maxGuestResult {
			return fault.New(fault.Unavailable, "the host of the VM sent more than %d bytes", maxGuestResult)
		}
		data = append(data, part...)
		return nil
	})
	if r.GetCommand() != nil && errors.Is(err, leader.ErrOutcomeUnknown) {
		return nil, errProgramUnknown(err)
	}
	if err != nil {
		return nil, err
	}
	out := &agentv1.GuestResult{}
	if err := proto.Unmarshal(data, out); err != nil {
		return nil, fault.New(fault.Unavailable, "the host of the VM sent an invalid message").Because(err)
	}
	return out, nil
}

var callGuestCommand = leader.NewStream("node.guest", (*Service).callGuestOnLeader)

// callGuestOnLeader implements CallGuest on the leader.
func (s *Service) callGuestOnLeader(ctx context.Context, q guestCall, send func([]byte) error) error {
	r := &agentv1.GuestRequest{}
	if err := proto.Unmarshal(q.Request, r); err != nil {
		return fmt.Errorf("decode a request to a guest agent: %w", err)
	}
	if err := s.checkAgent(q.Node, cloud.FeatureGuestCalls, "call guest agents"); err != nil {
		return err
	}
	err := s.read(ctx, s.guests, q.Node, q.Tenant, func(id string) hostRequest {
		r.RequestId = id
		return r
	}, func(id string) hostRequest {
		return &agentv1.GuestRequest{RequestId: id, Cancel: true}
	}, guestSilence, send)
	if r.GetCommand() != nil && errors.Is(err, errInterrupted) {
		return errProgramUnknown(err)
	}
	return err
}

// checkAgent returns FailedPrecondition if the agent of a host does not have a feature, because it is too old. Such an
// agent does not answer requests that need the feature. The parameter purpose completes the sentence "the agent is too
// old to".
func (s *Service) checkAgent(id cloud.NodeID, feature, purpose string) error {
	var n *cloud.Node
	err := s.opts.Store.Local(func(v *store.View) (err error) { n, err = Nodes.Get(v, string(id)); return err })
	if err != nil || n == nil {
		return err // read returns an error for a host that does not exist
	}
	if n.MissingFeature([]string{feature}) == "" {
		return nil
	}
	return fault.New(fault.FailedPrecondition,
		"the agent of the VM's host is too old to %s: an operator must upgrade it, or migrate the VM", purpose).
		WithReason("HOST_TOO_OLD")
}

// errProgramUnknown returns the error for a program of which it is not known whether it was started. It is not marked as
// retryable, because a repeat would run the program again.
func errProgramUnknown(err error) error {
	text := err.Error()
	if f, ok := fault.From(err); ok {
		text = f.Message
	}
	return fault.New(fault.Unavailable, "%s: the program may have been started, and may run on", text).Because(err)
}
